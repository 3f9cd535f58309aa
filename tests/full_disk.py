"""Runs grpo_ref_split.py where no file may have more than so many KiB, as on a full disk. Arguments: KIB OPTIONS."""

import resource
import sys

from killed_at import run_trainer

if __name__ == "__main__":
    own = [word for word in sys.argv if word.startswith("--local_rank")]  # the launcher puts it first
    size, *options = [word for word in sys.argv[1:] if word not in own]
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size) << 10,) * 2)  # Python ignores SIGXFSZ: a write fails
    run_trainer([*own, *options])

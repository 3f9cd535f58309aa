"""Runs grpo_ref_split.py with some constants of its modules set to other values: MODULE:NAME=NUMBER ... -- OPTIONS."""

import sys

from killed_at import find, run_trainer

if __name__ == "__main__":
    own = [word for word in sys.argv if word.startswith("--local_rank")]  # the launcher puts it first
    words = [word for word in sys.argv[1:] if word not in own]
    end = words.index("--")
    for word in words[:end]:
        place, _, number = word.partition("=")
        module, name = find(*place.split(":"))
        assert isinstance(getattr(module, name), float)
        setattr(module, name, float(number))
    run_trainer([*own, *words[end + 1 :]])

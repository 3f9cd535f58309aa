"""Runs grpo_ref_split.py with some constants of its modules set to other values: MODULE:NAME=NUMBER ... -- OPTIONS."""

import importlib
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    own = [word for word in sys.argv if word.startswith("--local_rank")]  # the launcher puts it first
    words = [word for word in sys.argv[1:] if word not in own]
    end = words.index("--")
    for word in words[:end]:
        module, _, rest = word.partition(":")
        name, _, number = rest.partition("=")
        module = importlib.import_module(module)
        assert isinstance(getattr(module, name), float)
        setattr(module, name, float(number))
    sys.argv = ["grpo_ref_split.py", *own, *words[end + 1 :]]
    runpy.run_path("grpo_ref_split.py", run_name="__main__")

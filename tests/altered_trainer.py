"""Runs grpo_ref_split.py with something changed in its process. Arguments: FUNCTION ARGUMENT OPTIONS.

FUNCTION is one of this file's below; what each takes is in its docstring. A place is module:name, as in
grpo.run.checkpoints:Checkpoints.save.
"""

import importlib
import itertools
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def altered(function: str, argument: str = "") -> tuple[str, ...]:
    """What stands before the trainer's options in a command."""
    return "tests/altered_trainer.py", function, argument


def killed_at(moment: str, rank: int = 0) -> tuple[str, ...]:
    return altered("kill", f"{moment}:{rank}")


def find(module: str, name: str) -> tuple[Any, str]:
    """Who has it, and by which name."""
    *path, name = name.split(".")
    return reduce(getattr, path, importlib.import_module(module)), name


def replace(owner: Any, name: str, by: Callable) -> None:
    """Let `by(function, *arguments)` be called in a function's place."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: by(function, *arguments, **options))


def kill(moment: str) -> None:
    """Kill this process, as `kill -9` would, at a moment: PLACE:when:count:rank.

    That is before or after the so many-th call, on that rank alone. Where "when" is "raises", it makes a mistake
    instead.
    """
    module, name, when, count, rank = moment.split(":")
    calls = itertools.count(1)

    def call(function, *arguments, **options):
        is_now = next(calls) == int(count)
        if is_now and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_now and when == "raises":
            raise LookupError("a mistake of ours")
        value = function(*arguments, **options)
        if is_now and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    if os.environ.get("RANK", "0") == rank:
        replace(*find(module, name), call)


def limit_files(kib: str) -> None:
    """Let no file have more than so many KiB, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(kib) << 10,) * 2)  # Python ignores SIGXFSZ: a write fails


def set_values(changes: str) -> None:
    """Set constants of modules, which are floats: PLACE=NUMBER, several with commas between."""
    for change in changes.split(","):
        place, _, number = change.partition("=")
        module, name = find(*place.split(":"))
        assert isinstance(getattr(module, name), float)
        setattr(module, name, float(number))


if __name__ == "__main__":
    rank = [word for word in sys.argv if word.startswith("--local_rank")]  # the launcher puts it first
    function, argument, *options = [word for word in sys.argv[1:] if word not in rank]
    globals()[function](argument)
    sys.argv = ["grpo_ref_split.py", *rank, *options]
    runpy.run_path("grpo_ref_split.py", run_name="__main__")

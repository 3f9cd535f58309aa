"""Runs grpo_ref_split.py and kills this process, as `kill -9` would, at a named moment. Arguments: MOMENT RANK OPTIONS.

MOMENT is module:function:when:count, as in grpo.run.checkpoints:put_in_place:before:2, the second call of it; a dot
goes into a class. Only the process of that rank is killed. Where WHEN is "raises", it makes a mistake instead.
"""

import importlib
import os
import runpy
import signal
import sys
from functools import reduce
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def find(module: str, function: str) -> tuple[Any, str]:
    """Who has it, and by which name."""
    *path, name = function.split(".")
    return reduce(getattr, path, importlib.import_module(module)), name


def run_trainer(options: list[str]) -> None:
    sys.argv = ["grpo_ref_split.py", *options]
    runpy.run_path("grpo_ref_split.py", run_name="__main__")


def arm(module: str, function: str, when: str, count: str) -> None:
    owner, name = find(module, function)
    real, calls = getattr(owner, name), 0

    def armed(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == int(count) and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if calls == int(count) and when == "raises":
            raise LookupError("a mistake of ours")
        value = real(*arguments, **options)
        if calls == int(count) and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    setattr(owner, name, armed)


if __name__ == "__main__":
    own = [word for word in sys.argv if word.startswith("--local_rank")]  # the launcher puts it first
    moment, rank, *rest = [word for word in sys.argv[1:] if word not in own]
    if os.environ.get("RANK", "0") == rank:
        arm(*moment.split(":"))
    run_trainer([*own, *rest])

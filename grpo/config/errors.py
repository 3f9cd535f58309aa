"""ConfigError, the end of a program whose setting cannot be used, and how a machine prints an error once."""

from __future__ import annotations

import difflib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COMMAND = "GRPO_COMMAND"
"""the environment variable in which grpo.launch tells the programs that it starts what the user typed"""

LAUNCHER_VARIABLES = (
    "a launcher sets RANK and LOCAL_RANK, both below WORLD_SIZE, and MASTER_ADDR and MASTER_PORT: start under one, "
    "or unset RANK, LOCAL_RANK and WORLD_SIZE"
)
"""the remedy where one of these is missing or wrong"""

OPEN_FILES = 256
"""the files and connections that a trainer or worker may open; processes of reward functions and tools have most"""


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the field, the value and the remedy."""


class RewardError(RuntimeError):
    """A reward function that raised, or that returned something else than one reward per completion."""

    def __init__(self, message: str, traceback: str = ""):
        """`traceback` is the user's part of the stack, with line ends; empty where the message says all."""
        super().__init__(message, traceback)
        self.traceback = traceback

    def __str__(self) -> str:
        return self.args[0]


def require(ok: bool, field: str, value: Any, remedy: str) -> None:
    """Raise ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{field}={value!r}: {remedy}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the known name that is closest, as the end of a sentence; empty where none is close."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def say_once(message: str, details: str = "") -> None:
    """Print an error that several ranks may have met at the same time, once on each machine; `details` stand above it.

    The machine's first rank prints it at once and ends, which ends the machine's other ranks. They wait for that: a
    rank that still runs after five seconds is alone with its error, and prints it.
    """
    line = f"{program_name()}: error: "
    if not first_here():
        time.sleep(5)
        line = f"\n{line}rank {os.environ.get('RANK')}: "  # rank 0's progress bar stands in the current line
    print(details + line + message, file=sys.stderr, flush=True)


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end this process by a line, in the place of a traceback of what is being imported.

    It is so until the program takes the signal itself.
    """

    def end(number: int, _) -> None:
        say_once("interrupted before the start")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, end)


def first_here() -> bool:
    """Tell whether this is the first rank of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def rank_count() -> int:
    """Return the number of ranks that the launcher started; without one it is 1. Raises ConfigError as
    launcher_number."""
    return launcher_number("WORLD_SIZE", 1, least=1)


def launcher_number(name: str, default: int, least: int = 0, most: float = math.inf) -> int:
    """Return a number that a launcher puts into the environment; without one the default.

    Raises ConfigError where it is no whole number of that range.
    """
    value = os.environ.get(name, str(default))
    require(value.isdecimal() and least <= int(value) <= most, name, value, LAUNCHER_VARIABLES)
    return int(value)


def allow_open_files(needed: int = OPEN_FILES, other_remedy: str = "") -> None:
    """Let this process open so many files. Raises ConfigError where the system allows it fewer.

    Without it a program fails wherever it opens the first that is too many, or asks a server again and again.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"the system allows this process {hard} open files, and it may need {needed}: raise the limit "
            f"(ulimit -Hn){other_remedy}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def is_first_rank() -> bool:
    """Tell whether this is the first of all ranks."""
    return os.environ.get("RANK", "0") == "0"


def program_name() -> str:
    """Return what the user wrote before the options: a file's name, or `python -m` and a module's."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name

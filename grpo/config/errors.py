"""Errors that end a program, printed once on each machine; what a launcher tells a rank."""

from __future__ import annotations

import difflib
import math
import os
import resource
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Variables of grpo.launch: the command that the user typed, the file in which a rank out of memory leaves a setting.
COMMAND, LOWERED = "GRPO_COMMAND", "GRPO_LOWERED"

LAUNCHER_VARIABLES = (
    "a launcher sets RANK and LOCAL_RANK, both below WORLD_SIZE, and MASTER_ADDR and MASTER_PORT: start under one, "
    "or unset RANK, LOCAL_RANK and WORLD_SIZE"
)


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the field, the value and the remedy."""


class RewardError(RuntimeError):
    """A reward function, tool or environment failed, or returned something wrong."""

    def __init__(self, message: str, traceback: str = ""):
        """`traceback` is the user's part of the stack, with line ends; it may be empty."""
        super().__init__(message, traceback)
        self.traceback = traceback

    def __str__(self) -> str:
        return self.args[0]


def require(ok: bool, field: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{field}={value!r}: {remedy}")


def one_line(text: object, most: int | None = 300) -> str:
    """Return the start of an error's or another object's text as a part of a sentence."""
    return " ".join(str(text).split())[:most]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the closest known name as the end of a sentence, or "". Of TRL's names that are not ours, all but one of
    those that are less like one of ours than 0.8 mean something else."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


def typed_command() -> str:
    """Return the command that the user typed, also in a program that a launcher has started."""
    return os.environ.get(COMMAND) or shlex.join([*program_name().split(), *sys.argv[1:]])


def say_once(message: str, details: str = "") -> None:
    """Print an error below `details`, once on each machine: its first rank's end ends the others within 5 s, or a rank
    is alone with its error, and prints it too."""
    line = f"{program_name()}: error: "
    if not first_here():
        time.sleep(5)
        line = f"\n{line}rank {os.environ.get('RANK')}: "  # rank 0's progress bar stands in the current line
    print(details + line + message, file=sys.stderr, flush=True)


def end_at_ctrl_c() -> None:
    """Let Ctrl-C print a line instead of a traceback, until the program handles the signal itself."""

    def end(number: int, _) -> None:
        say_once("interrupted before the start")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, end)


@contextmanager
def ending_at_ctrl_c() -> Iterator[None]:
    """Do as end_at_ctrl_c does in the `with` block."""
    before = signal.getsignal(signal.SIGINT)
    end_at_ctrl_c()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def wake_main_thread() -> None:
    """Let a signal end the main thread's wait, also one that the system gives to another thread, as it may
    after Ctrl-Z and fg: Python calls the handlers in the main thread alone."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGURG, lambda *_: None)

    def wake() -> None:
        while True:
            if {*os.read(read, 64)} != {signal.SIGURG}:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGURG)

    threading.Thread(target=wake, name="signals", daemon=True).start()


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def on_stop_signals(handle: Callable[[int, Any], None]) -> None:
    """Handle each SIGINT, SIGTERM and SIGHUP, but for those that this process ignores, as under nohup."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


def reset_signals_in_forks() -> None:
    """Let SIGTERM end the forks that the user's code makes, as multiprocessing expects, and let none of their signals
    count as this process's."""

    def mask(how: int) -> None:
        signal.pthread_sigmask(how, [signal.SIGTERM])

    def begin_fork() -> None:
        signal.set_wakeup_fd(-1)  # the parent reads it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mask(signal.SIG_UNBLOCK)

    # Until begin_fork a SIGTERM waits: a fork still has its parent's handler, which would drop it.
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK),
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK),
        after_in_child=begin_fork,
    )


def on_end_signals(end: Callable[[int], None]) -> None:
    """Call `end` with the number of the first SIGINT or SIGTERM; a second one ends the process at once."""
    wake_main_thread()
    numbers = signal.SIGINT, signal.SIGTERM

    def on_signal(number: int, _) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        end(number)

    for number in numbers:
        signal.signal(number, on_signal)


def first_here() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def cores_here() -> int:
    """Return this rank's share of the cores that the machine, SLURM or a container gives. The deepspeed launcher and
    torchrun say how many ranks share them."""
    ranks = ranks_here(launcher_number("LOCAL_WORLD_SIZE", 1, least=1))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def rank_count() -> int:
    return launcher_number("WORLD_SIZE", 1, least=1)


def ranks_here(unsaid: int) -> int:
    """Return how many of a run's ranks are on this machine, or `unsaid` if the launcher does not say it."""
    return launcher_number("LOCAL_SIZE", unsaid, least=1)


def launcher_number(name: str, default: int, least: int = 0, most: float = math.inf) -> int:
    """Return a launcher's environment variable, or the default. Raises ConfigError unless it is a number in range."""
    value = os.environ.get(name, str(default))
    require(value.isdecimal() and least <= int(value) <= most, name, value, LAUNCHER_VARIABLES)
    return int(value)


def allow_open_files(needed: int = 256, other_remedy: str = "") -> None:
    """Let this process open so many files, most for processes of the user's code. Raises ConfigError if it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"the system allows this process {hard} open files, and it may need {needed}: raise the limit "
            f"(ulimit -Hn){other_remedy}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def program_name() -> str:
    """Return the words before the options: a file's name, or `python -m` and a module's."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name

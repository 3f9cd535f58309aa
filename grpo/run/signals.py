"""SIGINT, SIGTERM and SIGHUP: the first one lets a run finish its step and save, a second one ends it at once.

The deepspeed launcher has two processes above the ranks. The upper one dies of a signal and leaves everything running;
the lower one passes a signal on and kills what is still there after 30 seconds. So a rank watches both from its first
moment on: a launcher that is gone is a signal to stop, and one that would kill is held until the rank has ended.
Whoever reads what the ranks say (tee, ssh) may die of the same Ctrl-C, or be all that ends: that is a signal to stop
too, and no error.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from grpo.config.errors import first_here, say_once

_GRACE = 5.0  # seconds after the first signal in which a SIGTERM is the launcher's, which passes the first one on
_LOOK = 0.5  # seconds between two looks at the launcher


class Launcher:
    """The launcher's process that started this rank, and the one above it. Make it before anything that takes time:
    from then on a thread looks whether both are there, and ends this process where one is not."""

    def __init__(self) -> None:
        self.process = _launcher()
        """its number; 0 where there is no launcher"""
        self.on_gone: Callable[[], None] = _end_unstarted
        """what to do once it is gone"""
        self._above = _parent(self.process) if self.process else 0
        if self.process:
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()
        # The launcher alone sets this (LOCAL_SIZE is set by `deepspeed --launcher mpich` too): it has ended by now.
        elif "CROSS_SIZE" in os.environ and not any(map(_is_launcher, _ancestors())):
            _end_unstarted()

    def _watch(self) -> None:
        gone = _is_orphan(self.process)
        while not gone:
            time.sleep(_LOOK)
            gone = os.getppid() != self.process or _parent(self.process) != self._above
        self.on_gone()


class StopSignals:
    """From its making on, signals only ask. A thread of its own reads them: the main thread may be in a collective."""

    def __init__(self, launcher: Launcher) -> None:
        self.asked = 0
        """number of the signal that asked to stop, once there was one"""
        self._since = 0.0
        self._guard: subprocess.Popen | None = None
        self._launcher = launcher.process
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        # A terminal that is closed sends SIGHUP, which nohup has ignored.
        hang_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hang_up else [])):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write)
        unread = partial(self._lost, "nobody reads this")
        sys.stdout, sys.stderr = _Screen(sys.stdout, unread), _Screen(sys.stderr, unread)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        launcher.on_gone = partial(self._lost, "the launcher is gone")

    def _watch(self) -> None:
        while True:
            for number in os.read(self._read, 64):
                self._signalled(number)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGTERM and self._launcher and _children(self._launcher) < _ranks_here():
            os._exit(128 + number)  # another rank has died, and the launcher ends the others
        if self.asked and number == signal.SIGHUP:
            return  # a closed terminal and its shell send one each
        if self.asked:
            # What was passed on may be handled first: of two signals that wait, Linux runs SIGTERM's handler first.
            passed_on = signal.SIGTERM in (number, self.asked) and time.monotonic() < self._since + _GRACE
            if not passed_on:
                os._exit(128 + number)
            self.asked = min(self.asked, number)  # SIGINT, where it was a Ctrl-C
        else:
            self._ask(number, signal.Signals(number).name)

    def _lost(self, reason: str) -> None:
        if not self.asked:
            self._ask(signal.SIGTERM, reason)

    def _ask(self, number: int, reason: str) -> None:
        self.asked, self._since = number, time.monotonic()
        if first_here():
            if self._launcher:
                self._guard = _hold(self._launcher)
            print(f"\n{reason}: stopping after this step; once more ends it at once", file=sys.stderr, flush=True)


class _Screen:
    """A stream whose reader may go away: `unread` is called then, and what is written from then on is lost."""

    def __init__(self, stream: TextIO, unread: Callable[[], None]) -> None:
        self._stream, self._unread = stream, unread

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, action: Callable, *arguments: str) -> None:
        try:
            action(*arguments)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # a pipe without a reader, a terminal that was closed
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._unread()


def _launcher() -> int:
    """The process that started this rank, if it is DeepSpeed's launcher; else 0."""
    parent = os.getppid()
    return parent if _is_launcher(parent) else 0


def _is_launcher(process: int) -> bool:
    try:
        return b"deepspeed.launcher.launch" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _ancestors() -> Iterator[int]:
    """List the processes above this one: a wrapper that the user names may stand between launcher and rank."""
    process = os.getppid()
    while process > 0:
        yield process
        process = _parent(process)


def _end_unstarted() -> None:
    try:
        if first_here():
            say_once("the launcher is gone, and no step was done: start it again")
    finally:  # nobody may read it any more
        os._exit(128 + signal.SIGTERM)


def _is_orphan(process: int) -> bool:
    """Return whether the process that started it is gone already.

    A process has its parent's session or leads a session of its own; the process that adopts an orphan has another one.
    """
    session, above = (_stat(number)[3:4] for number in (process, _parent(process)))
    return bool(above) and session not in (above, [str(process)])


def _stat(process: int) -> list[str]:
    """Its state, its parent and more, as proc(5) has them after the name; empty where the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(process: int) -> int:
    """0 where the process is gone."""
    stat = _stat(process)
    return int(stat[1]) if stat else 0


def _children(process: int) -> int:
    """How many processes it has below it that have not ended."""
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it is gone, or this kernel keeps no such list: then none is known to be missing
        return _ranks_here() if _stat(process) else 0
    return sum(_stat(int(child))[:1] not in ([], ["Z"]) for child in found)


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_SIZE", "1"))


def _hold(launcher: int) -> subprocess.Popen:
    """Stop the launcher until this process has ended, however that comes: a shell reads a pipe until nobody has its
    other end."""
    script = f"kill -STOP {launcher}; cat >/dev/null; kill -CONT {launcher}"
    return subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)

"""Ends a program that may be one of several ranks: with one line that says why, and an exit code; at a signal, too.

The first SIGINT, SIGTERM or SIGHUP lets a run finish its step and save, a second one ends it at once. Of the deepspeed
launcher's two processes the upper one dies of a signal and leaves everything running; the lower one passes it on, and
kills the ranks after 30 seconds. So each rank watches both from its first moment on: a launcher that is gone counts as
a signal, and the lower process is stopped (SIGSTOP) until the rank has ended. The program that reads the ranks' output
(tee, ssh) may die of the same Ctrl-C, or alone: a closed stdout or stderr counts as a signal too, and is no error. The
file of `grpo stop` asks as a first signal does, and the run ends with 0.
"""

import atexit
import errno
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psutil

from grpo.config.console import end_now, start_logging
from grpo.config.errors import (
    COMMAND,
    STOP_SIGNALS,
    ConfigError,
    allow_open_files,
    first_here,
    is_first_rank,
    on_stop_signals,
    program_name,
    ranks_here,
    reset_signals_in_forks,
    say_once,
)
from grpo.run.run_folder import is_stop_asked

_GRACE = 5.0  # seconds after the first signal in which a SIGTERM is the first one, passed on by the launcher
_LOOK = 0.5  # seconds between two looks at the launcher
_LOOK_FOR_STOP = 1.0  # the same for the file of `grpo stop`
FOR_GOOD = 128  # `grpo stop` among the numbers of signals: the greatest, as it counts if some ranks got a signal


class Launcher:
    """The launcher's process that started this rank, and the one above it. Make it before anything that takes time:
    from then on a thread watches both, and ends this process when one of them is gone."""

    def __init__(self) -> None:
        above = psutil.Process().parents()
        self.process = above[0].pid if above and _is_launcher(above[0]) else 0  # the lower one; 0 without a launcher
        self.on_gone: Callable[[], None] = _end_before_first_step  # the thread calls it when one of them is gone
        self._upper_process = _parent(self.process) if self.process else 0
        if self.process:
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()
        # Only the launcher sets this variable (`deepspeed --launcher mpich` sets LOCAL_SIZE too): it has ended already,
        # unless a wrapper that the user names stands between it and the rank.
        elif "CROSS_SIZE" in os.environ and not any(map(_is_launcher, above)):
            _end_before_first_step()

    def _watch(self) -> None:
        gone = _is_orphan(self.process)
        while not gone:
            time.sleep(_LOOK)
            gone = os.getppid() != self.process or _parent(self.process) != self._upper_process
        self.on_gone()


class StopSignals:
    """Catch the signals that ask this process to stop: the first one only sets `asked`. A thread reads them, as the
    main thread may be in a collective. Another one watches for `grpo stop`."""

    def __init__(self, launcher: Launcher, event: threading.Event | None = None, folder: Path | None = None) -> None:
        """`event` is set when a signal asks, or a file in the run's `folder`."""
        self._event = event or threading.Event()
        self.asked = 0  # number of the signal that asked to stop, or FOR_GOOD; 0 before there was one
        self._asked_at = 0.0
        self._launcher_hold: subprocess.Popen | None = None
        self._launcher = launcher.process
        self._pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        on_stop_signals(lambda *_: None)
        signal.set_wakeup_fd(wakeup)
        reset_signals_in_forks()
        sys.stdout = _Output(sys.stdout, partial(self._ask_unless_asked, "stdout was closed"))
        sys.stderr = _Output(sys.stderr, partial(self._ask_unless_asked, "stderr was closed"))
        threading.Thread(target=self._read_signals, name="signals", daemon=True).start()
        launcher.on_gone = partial(self._ask_unless_asked, "the launcher is gone")
        if folder is not None:
            threading.Thread(target=self._watch, args=[folder], name="stop", daemon=True).start()

    def _watch(self, folder: Path) -> None:
        while not is_stop_asked(folder):
            time.sleep(_LOOK_FOR_STOP)
        if not self.asked:
            self._ask(FOR_GOOD, "grpo stop")
        self.asked = FOR_GOOD  # also after a signal: what starts a preempted run again must take this as its end

    def _read_signals(self) -> None:
        while True:
            for number in os.read(self._pipe, 64):
                if number in STOP_SIGNALS:  # the alarm of a reward function comes here, too
                    self._handle(number)

    def _handle(self, number: int) -> None:
        if number == signal.SIGTERM and self._launcher and _count_children(self._launcher) < ranks_here(1):
            os._exit(128 + number)  # another rank has died, and the launcher ends the rest
        if not self.asked:
            self._ask(number, signal.Signals(number).name)
        elif number != signal.SIGHUP:  # a closed terminal and its shell send one each
            # The passed-on signal may be handled first: where two are pending, Linux runs SIGTERM's handler first.
            passed_on = signal.SIGTERM in (number, self.asked) and time.monotonic() < self._asked_at + _GRACE
            if not passed_on or self.asked == FOR_GOOD:
                os._exit(128 + number)
            self.asked = min(self.asked, number)  # SIGINT of a Ctrl-C

    def _ask_unless_asked(self, reason: str) -> None:
        if not self.asked:
            self._ask(signal.SIGTERM, reason)

    def _ask(self, number: int, reason: str) -> None:
        self.asked, self._asked_at = number, time.monotonic()
        self._event.set()
        if first_here():
            if self._launcher and number != FOR_GOOD:
                self._launcher_hold = _hold(self._launcher)
            what = "a signal" if number == FOR_GOOD else "once more"
            print(f"\n{reason}: stopping after this step; {what} ends it at once", file=sys.stderr, flush=True)
        self._asked_at = time.monotonic()  # again: a terminal may have stopped the print for longer than _GRACE


class _Output:
    """A stream whose reader may go away: then `on_closed` is called, and the text goes to /dev/null from then on."""

    def __init__(self, stream: TextIO, on_closed: Callable[[], None]) -> None:
        self._stream, self._on_closed = stream, on_closed

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
            self._on_closed()


def _hold(launcher: int) -> subprocess.Popen:
    """Stop the launcher until this process has ended, in whatever way. A shell continues it when `cat` ends, which is
    when no process has the other end of its pipe any more."""
    script = f"kill -STOP {launcher}; cat >/dev/null; kill -CONT {launcher}"
    return subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)


def _end_before_first_step() -> None:
    try:
        if first_here():
            say_once("the launcher is gone, and no step was done: start it again")
    finally:  # also where nobody reads the line any more
        os._exit(128 + signal.SIGTERM)


def _is_launcher(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "deepspeed.launcher.launch" in process.cmdline()
    return False


def _is_orphan(process: int) -> bool:
    """Return whether the parent that started the process is gone already. A process has its parent's session or leads a
    session of its own; the process that adopts an orphan has another one."""
    with suppress(psutil.Error, ProcessLookupError):
        if parent := _parent(process):
            return os.getsid(process) not in (os.getsid(parent), process)
    return False


def _parent(process: int) -> int:
    """Return the parent's id; 0 if the process is gone."""
    with suppress(psutil.Error):
        return psutil.Process(process).ppid()
    return 0


def _count_children(process: int) -> int:
    with suppress(psutil.NoSuchProcess):  # also of a child that ends meanwhile: the others end with it
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(process).children())
    return 0


# gloo, and torch's store, of a rank that has ended
_GONE = "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed"


class EndRun(Exception):
    """The end of a run before its last step, on every rank after the same step. The message says why."""

    def __init__(self, message: str, code: int = 1, traceback: str = ""):
        """`code` is the exit code: 1, or that of code_of. `traceback` is the user's part, with line ends."""
        super().__init__(message)
        self.code, self.traceback = code, traceback


def code_of(asked: int) -> int:
    """Return the exit code of a run that ends because it was asked to stop, by a signal or FOR_GOOD."""
    return 0 if asked == FOR_GOOD else 128 + asked


def how_to_continue(folder: Path, step: int, command: str | None = None) -> str:
    """Return the command that resumes a run, to copy from its last line (whole if grpo.launch started the run). Another
    process than the run's gives the `command` of grpo.launch that started it."""
    words, kept = iter(shlex.split(os.environ.get(COMMAND, "") if command is None else command)), []
    for word in words:
        name, has_value, _ = word.partition("=")
        if name.replace("-", "_") not in ("__resume_from_checkpoint", "__output_dir"):
            kept.append(word)
        elif not has_value:
            next(words, None)
    command = shlex.join([*kept, "--resume_from_checkpoint", "last", "--output_dir", str(folder)])
    return f"{command} goes on after step {step}"


def exit_code(work: Callable[[], int | None], failures: tuple[type[Exception], ...], interrupted: str) -> int:
    """Do a rank's work. Return the exit code: the work's own, 0 for None, 1 for one of `failures`, 2 for a bad setting,
    128 + a signal's number. Raises any other error: a bug of this program."""
    start_logging(logging.INFO if is_first_rank() else logging.ERROR)
    try:
        allow_open_files()
        with _no_success_before_the_end():
            return work() or 0
    except ConfigError as error:
        say_once(str(error))
        return 2
    except EndRun as end:
        if end.code == 1:
            say_once(str(end), end.traceback)
        elif first_here():  # it was asked to, and all ranks act on that: no error
            print(f"{program_name()}: {end}", file=sys.stderr, flush=True)
        return end.code
    except failures as error:
        say_once(str(error), getattr(error, "traceback", ""))
        return 1
    except RuntimeError as error:
        if any(sign in str(error) for sign in _GONE):
            reason = "another rank has ended; see its own message"
        elif "Timed out waiting" in str(error):
            reason = "another rank has not come for too long; the log above names it and its phase"
        else:
            raise
        print(f"\n{program_name()}: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say_once(interrupted)
        return 130
    except SystemExit as error:  # with any code the work is not done
        caller = traceback.extract_tb(error.__traceback__)[-1]
        say_once(f"sys.exit was called at {caller.filename}:{caller.lineno} in {caller.name}, before the work was done")
        return 1


def run_to_the_end(work: Callable[[], None], failures: tuple[type[Exception], ...], interrupted: str) -> NoReturn:
    """Do a rank's work, and end this process with exit_code's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # all is imported: exit_code handles a Ctrl-C from now on
    code = 1
    try:
        code = exit_code(work, failures, interrupted)
    except Exception:
        sys.excepthook(*sys.exc_info())
    if code == 0:
        atexit._run_exitfuncs()
    end_now(code)


@contextmanager
def _no_success_before_the_end() -> Iterator[None]:
    """Let os._exit(0) end this process with 1 and a line, as sys.exit does. The C library's _exit is not stopped."""
    process, end = os.getpid(), os._exit

    def end_with_failure(code: int) -> NoReturn:
        if code % 256 == 0 and os.getpid() == process:  # a forked process may end as it likes
            caller = sys._getframe(1)
            where = f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_name}"
            say_once(f"os._exit({code}) was called at {where}, before the work was done")
            code = 1
        end(code)

    os._exit = end_with_failure
    try:
        yield
    finally:
        os._exit = end

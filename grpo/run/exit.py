"""Ends a program that may be one of several ranks: with one line that says why, and an exit code."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from grpo.config.console import start_logging
from grpo.config.errors import COMMAND, ConfigError, allow_open_files, first_here, is_first_rank, program_name, say_once

_GONE = "Connection closed by peer", "Connection reset by peer", "Broken pipe"  # gloo, of a rank that has ended


class EndRun(Exception):
    """The end of a run before its last step, on every rank after the same step. The message says why."""

    def __init__(self, message: str, code: int = 1, traceback: str = ""):
        """`code` is the exit code: 1, or 128 + a signal's number. `traceback` is the user's part, with line ends."""
        super().__init__(message)
        self.code, self.traceback = code, traceback


def how_to_continue(folder: Path, step: int) -> str:
    """Return the command that resumes a run, to copy from its last line (whole if grpo.launch started the run)."""
    words, kept = iter(shlex.split(os.environ.get(COMMAND, ""))), []
    for word in words:
        name, has_value, _ = word.partition("=")
        if name.replace("-", "_") not in ("__resume_from_checkpoint", "__output_dir"):
            kept.append(word)
        elif not has_value:
            next(words, None)
    command = shlex.join([*kept, "--resume_from_checkpoint", "last", "--output_dir", str(folder)])
    return f"{command} goes on after step {step}"


def exit_code(work: Callable[[], None], failures: tuple[type[Exception], ...], interrupted: str) -> int:
    """Do a rank's work. Return its exit code: 0, 1 for one of `failures`, 2 for a bad setting, 128 + a signal's number.
    Raises any other error: a bug of this program."""
    start_logging(logging.INFO if is_first_rank() else logging.ERROR)
    try:
        allow_open_files()
        with _no_success_before_the_end():
            work()
    except ConfigError as error:
        say_once(str(error))
        return 2
    except EndRun as end:
        if end.code == 1:
            say_once(str(end), end.traceback)
        elif first_here():  # a signal, which all ranks act on: no error
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
    return 0


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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python would wait for threads that a reward function left, or that wait for the reference


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

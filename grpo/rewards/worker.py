"""A process that calls reward functions for the trainer, and the guard above it.

    trainer -> worker    pickle: (number, place of the function, prompts, completions, columns), of one completion
    worker -> trainer    a line of JSON with that number: where foreign code ran, nothing is taken that could run here

The guard is the process that the trainer started. It forks the worker, runs no foreign code, and is the parent of
whatever the worker's descendants leave (prctl(2), PR_SET_CHILD_SUBREAPER): so it finds those that have a session of
their own. When its standard input closes, however the trainer ended, or when the worker ends, it kills them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from grpo.rewards.functions import attempt, is_reward, load_function

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def work(descriptor: int) -> None:
    """Answer tasks, below a guard, until the trainer's end of the socket closes."""
    # The deepspeed launcher sends SIGTERM to all below it, while the trainer has a step to finish. A handler, and not
    # SIG_IGN: what the user's code starts would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    if worker := os.fork():
        os.close(descriptor)
        _guard(worker)
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)  # foreign code may kill the guard
    os.setsid()
    sys.stdout.reconfigure(line_buffering=True)  # what it printed before it hung is of use
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # code that asks for input must not wait for some, nor take the guard's
    os.close(nothing)
    # Where memory runs out, the system shall end this process and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with socket.socket(fileno=descriptor) as trainer, trainer.makefile("rb") as tasks:

        def say(reply: dict[str, Any]) -> None:
            trainer.sendall(json.dumps(reply).encode() + b"\n")

        try:
            functions = [load_function(name) for name in pickle.load(tasks)]
        except Exception as error:  # the user's file may raise anything
            say(_raised(error))
            return
        say({})
        own = os.getpid()
        while True:
            try:
                number, place, *task = pickle.load(tasks)
            except EOFError:
                return
            reply = _answer(functions[place], *task)
            if os.getpid() != own:
                os._exit(0)  # the foreign code forked, and this is its child
            say({"number": number, **reply})


def _guard(worker: int) -> NoReturn:
    """Wait for the end of the worker, or of the trainer; end all that the worker started, and as it has ended."""

    def watch() -> None:
        os.read(0, 1)  # the trainer writes nothing
        os.kill(worker, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid) != worker:
        os.waitpid(ended, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)  # at once, before any of them can start more
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    # Whoever has a session of its own is left. The children of a process that is killed become this one's.
    while any([_kill(child) for child in _children()]):
        os.waitpid(-1, 0)
    os._exit(128 - code if code < 0 else code)


def _children() -> list[int]:
    children = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may have ended
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                children.append(int(name))
    return children


def _kill(process: int) -> bool:
    """False where it is another user's, as of a program with the set-user-ID bit."""
    try:
        os.kill(process, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _answer(function: Callable, prompts: list[str], completions: list[str], columns: dict[str, list]) -> dict[str, Any]:
    returned = attempt(function, prompts, completions, columns)
    if isinstance(returned, BaseException):
        if isinstance(returned, Exception) and not isinstance(returned, MemoryError):
            return _raised(returned)
        raise returned  # like a hang an event of running foreign code, not a mistake: it costs the process
    (reward,) = returned
    if not is_reward(reward):
        return {"returned": repr(reward)}
    return {"reward": None if reward is None else float(reward)}


def _raised(error: Exception) -> dict[str, Any]:
    return {"raised": repr(error), "traceback": "".join(traceback.format_exception(error))}

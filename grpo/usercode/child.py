"""A process that calls the user's code for the trainer, and the guard above it.

    trainer -> worker    pickle: what makes the service, and its arguments
                         pickle: (number, what the service is asked...)
    worker -> trainer    a line of JSON: that number, and the service's `answer`; no pickle, as foreign code may have
                         written it. An exception of `answer` ends the process

The guard is the process that the trainer starts. It forks the worker and runs no foreign code. Processes that the
worker's descendants leave behind become its children (prctl(2), PR_SET_CHILD_SUBREAPER), even those in a session of
their own. It kills them all when the worker ends, or when its standard input closes, as it does however the trainer
ends.
"""

import contextlib
import ctypes
import json
import os
import pickle
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from grpo.config.errors import ConfigError

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def run_worker(descriptor: int) -> None:
    """Fork a worker that answers tasks until the trainer's end of the socket closes; guard it."""
    # The deepspeed launcher sends SIGTERM to every process below it while the trainer still has a step to finish. A
    # handler, not SIG_IGN: processes that the user's code starts would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda *_: None)
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if worker := os.fork():
        os.close(descriptor)
        _guard(worker)
    prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # foreign code may kill the guard
    os.setsid()
    sys.stdout.reconfigure(line_buffering=True)  # show what a function printed before it hung
    # Code that reads input must neither wait for it nor read the guard's.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # When memory runs out, the system should kill this process and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with socket.socket(fileno=descriptor) as trainer, trainer.makefile("rb") as tasks:

        def send(reply: dict[str, Any]) -> None:
            with contextlib.suppress(ConnectionError):  # the trainer has ended: the next task shows it
                trainer.sendall(json.dumps(reply).encode() + b"\n")

        try:
            make_service, arguments = pickle.load(tasks)
            service = make_service(*arguments)
        except Exception as error:  # the user's file may raise anything
            send({"raised": str(error) if isinstance(error, ConfigError) else repr(error)})
            return
        send({})
        worker_pid = os.getpid()
        while True:
            try:
                number, *task = pickle.load(tasks)
            except (EOFError, ConnectionError):  # the latter if the trainer has not read all replies
                return
            reply = service.answer(*task)
            if os.getpid() != worker_pid:
                os._exit(0)  # the foreign code forked, and this is its child
            send({"number": number, **reply})


def _guard(worker: int) -> NoReturn:
    """Wait for the worker or the trainer to end, kill every process that the worker started, exit with its code."""

    def watch_trainer() -> None:
        os.read(0, 1)  # returns when the pipe closes: the trainer writes nothing
        os.kill(worker, signal.SIGKILL)

    threading.Thread(target=watch_trainer, daemon=True).start()
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid) != worker:
        os.waitpid(ended, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)  # the group at once, before any of it can start more
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    # Processes in other sessions are left. The children of a killed process become children of this one.
    while _kill_children():
        os.waitpid(-1, 0)
    os._exit(128 - code if code < 0 else code)


def _kill_children() -> bool:
    """Kill all children of this process but another user's, such as a program with the set-user-ID bit; tell whether
    there were any."""
    killed = False
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # the process may have ended
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                os.kill(int(name), signal.SIGKILL)
                killed = True
    return killed

"""A process that calls the user's code for the trainer, and the guard above it.

    trainer -> worker    pickle: what makes the service, and its arguments
                         pickle: (number, the arguments of `answer`...)
    worker -> trainer    a line of JSON: that number, and the service's `answer`; no pickle, as foreign code may have
                         written it. An exception of `answer` ends the process

The guard (grpo/usercode/guard.py) is the process that the trainer starts, and forks the worker.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
from typing import Any

from grpo.config.errors import ConfigError, reset_signals_in_forks
from grpo.usercode.guard import fork_below_guard, yield_memory


def run_worker(descriptor: int) -> None:
    """Fork a worker that answers tasks until the trainer's end of the socket closes; guard it."""
    # The deepspeed launcher sends SIGTERM to every process below it while the trainer still has a step to finish. A
    # handler, not SIG_IGN: processes that the user's code starts would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda *_: None)
    fork_below_guard(descriptor)
    reset_signals_in_forks()
    os.setsid()
    sys.stdout.reconfigure(line_buffering=True)  # show what a function printed before it hung
    # Code that reads input must neither wait for it nor read the guard's.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    yield_memory()
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

"""Reward functions in processes of their own, each call with a deadline: for rewards that run what a model wrote.

Only a signal ends code that hangs in C (a catastrophic regular expression holds the GIL for ever). So a call that takes
too long has its process killed, with every process that it started, and a new process takes its place. The processes
are started from the command line, not by `multiprocessing` or a library over it: that would import the trainer's
script, with torch and DeepSpeed, into each of them. Their side is grpo/rewards/worker.py.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpo.rewards.alone import call_each_alone
from grpo.rewards.functions import (
    Batch,
    Logged,
    RewardError,
    invalid_reward,
    quote_completion,
    text_of,
)
from grpo.rewards.prints import PRINTS

log = logging.getLogger(__name__)

_START_SECONDS = 300.0  # to import the functions' files, which may be slow; counts for no completion's deadline
END_SECONDS = 30.0  # to kill every process that a call has started
_LOGGED_CHARACTERS = 80


class RewardPool:
    """Worker processes that call reward functions on one completion at a time. They end with the interpreter."""

    def __init__(self, names: list[str], timeout: float, fallback: float, workers: int):
        """`names` are as in `reward_funcs`. A call may take `timeout` seconds; a lost one earns `fallback`."""
        self._names, self._timeout, self._fallback = names, timeout, fallback
        self._workers = [_Worker(names, os.getcwd()) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        atexit.register(self.close)

    def make_function(self, name: str) -> Callable:
        """Return an async function that calls the function of this name in the workers, on each completion alone.

        It raises RewardError where the function raises, or returns something else than a reward.
        """
        index, label = self._names.index(name), name.rpartition(":")[2]

        async def compute_reward(batch: Batch, logged: Logged) -> float | None:
            return await asyncio.wrap_future(self._threads.submit(self._call_function, index, label, batch, logged))

        return call_each_alone(compute_reward)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()  # a call that hangs would not end by itself
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.stop()

    def _call_function(self, index: int, label: str, batch: Batch, logged: Logged) -> float | None:
        (completion,) = map(text_of, batch.completions)
        worker = self._idle.get()  # there are as many workers as threads
        try:
            reply = worker.call((index, batch), self._timeout)
        except _CallLost as lost:
            # An error, not a warning: ranks other than the first show nothing less.
            shown = quote_completion(completion, _LOGGED_CHARACTERS)
            log.error("reward function %r %s on %s: that earns %g", label, lost, shown, self._fallback)
            return self._fallback
        finally:
            self._idle.put(worker)
        if "failed" in reply:
            raise RewardError(f"Reward function {label!r} {reply['failed']}", reply["traceback"])
        if "returned" in reply:
            raise invalid_reward(label, reply["returned"], completion)
        logged.extra, logged.metrics = reply["extra"], reply["metrics"]
        return reply["reward"]


class _CallLost(Exception):
    """A call without a reply. The message follows the function's name in a sentence."""


class _Worker:
    """A process that answers one task at a time. A new process replaces one that is lost."""

    def __init__(self, names: list[str], folder: str):
        """`folder` is the process's working directory: the trainer's may have changed when it is replaced."""
        self._names, self._folder = names, folder
        self._calls = 0
        self._start()

    def call(self, task: tuple, seconds: float) -> dict[str, Any]:
        """Return the reply to a task. Raises _CallLost without one in time, RewardError where no process starts."""
        if not self._ready:
            self._wait_ready()
        self._calls += 1
        body = pickle.dumps((self._calls, *task))
        try:
            deadline = time.monotonic() + seconds
            self._socket.settimeout(seconds)
            self._socket.sendall(body)
            reply = json.loads(self._read_line(deadline))
            if not isinstance(reply, dict) or reply.get("number") != self._calls:
                raise ValueError(reply)
        except TimeoutError:
            self.stop()
            lost = _CallLost(f"gave no answer within {seconds:g} s")
        except ValueError:
            self.stop()
            lost = _CallLost("wrote where its process replies")
        except (OSError, EOFError):
            lost = _CallLost(self._stop_and_explain())
        else:
            return reply
        self._start()
        raise lost

    def kill(self) -> None:
        """Have the guard kill the worker and every process that it started, as any end of this process does."""
        self._process.stdin.close()

    def stop(self) -> None:
        """Kill the worker and wait until it has ended."""
        self.kill()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it was stopped, or waits for a process that even SIGKILL does not end
            self._process.kill()
            self._process.wait()
        self._printer.join(1.0)  # another user's process may survive and hold the pipe
        self._socket.close()

    def _start(self) -> None:
        self._socket, worker_end = socket.socketpair()
        imports = f"import sys; sys.path[:] = {sys.path!r}; from grpo.rewards.worker import run_worker"
        code = f"{imports}; run_worker({worker_end.fileno()})"
        with worker_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[worker_end.fileno()],
                start_new_session=True,  # Ctrl-C is for the trainer
                cwd=self._folder,
                # Several processes that compute must not each take all cores.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._printer = threading.Thread(target=PRINTS.read_all, args=[self._process.stdout], daemon=True)
        self._printer.start()
        self._ready, self._received = False, b""
        self._socket.settimeout(_START_SECONDS)
        self._socket.sendall(pickle.dumps(self._names))

    def _wait_ready(self) -> None:
        try:
            reply = json.loads(self._read_line(time.monotonic() + _START_SECONDS))
        except (OSError, EOFError, ValueError):
            raise RewardError(
                f"a worker process for {' '.join(self._names)} {self._stop_and_explain()} before it could begin: "
                "see what it printed; the files of reward functions are imported there"
            ) from None
        if "raised" in reply:
            raise RewardError(
                f"a worker process could not load {' '.join(self._names)}: {reply['raised']}: their files are imported "
                "there too, not only in the trainer"
            )
        self._ready = True

    def _read_line(self, deadline: float) -> bytes:
        """Read up to the next line end. Raises TimeoutError at the deadline, EOFError where nothing more can come."""
        while b"\n" not in self._received:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            if not (chunk := self._socket.recv(65536)):
                raise EOFError
            self._received += chunk
            if time.monotonic() > deadline:
                raise TimeoutError
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _stop_and_explain(self) -> str:
        """Stop a process that closed its socket; return how it ended, in words."""
        try:
            code = self._process.wait(1.0)  # its sockets close a moment before it is gone
            number = -code if code < 0 else code - 128
            reason = signal.Signals(number).name if number in [*signal.Signals] else f"exit code {code}"
        except subprocess.TimeoutExpired:
            reason = "it closed its connection"
        self.stop()
        return f"lost its process ({reason})"

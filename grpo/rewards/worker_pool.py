"""Reward functions in processes of their own, each call with a deadline: for rewards that run what a model wrote.

Nothing but a signal ends code that hangs in C (a catastrophic regular expression holds the GIL for ever), so a call
that overruns has its process killed, with all that it started, and another takes its place. The processes are started
from the command line, like reward.py's own, and not by `multiprocessing` or a library over it: that would import the
trainer's script, with torch and DeepSpeed, into each of them. What they do is in grpo/rewards/worker.py.
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

from grpo.rewards.functions import RewardError, no_reward, quote, row
from grpo.rewards.prints import PRINTS

log = logging.getLogger(__name__)

_START_SECONDS = 300.0  # to import the functions' files, which may be slow; no completion pays for it
_END_SECONDS = 30.0  # to kill all that a call has started
_LOGGED_CHARACTERS = 80


class RewardPool:
    """Worker processes that call reward functions on one completion at a time. It is closed with the interpreter."""

    def __init__(self, names: list[str], timeout: float, fallback: float, workers: int):
        """`names` as in `reward_funcs`. `timeout`: seconds a call may take; `fallback`: its reward where it is over."""
        self._names, self._timeout, self._fallback = names, timeout, fallback
        self._workers = [_Worker(names, os.getcwd()) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        atexit.register(self.close)

    def function(self, name: str) -> Callable:
        """The function of this name, to be awaited: its rewards are in the order of the completions.

        Raises RewardError where it raises, or returns what is no reward.
        """
        place, label = self._names.index(name), name.rpartition(":")[2]

        async def rewards(prompts: list[str], completions: list[str], **columns: list) -> list[float | None]:
            calls = [
                self._threads.submit(self._call, place, label, row(i, prompts, completions, columns))
                for i in range(len(completions))
            ]
            try:
                return await asyncio.gather(*map(asyncio.wrap_future, calls))
            finally:
                for call in calls:
                    call.cancel()

        return rewards

    def close(self) -> None:
        atexit.unregister(self.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()  # what is still called will not end by itself
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.end()

    def _call(self, place: int, label: str, task: tuple) -> float | None:
        completion = task[1][0]
        worker = self._idle.get()  # there are as many as threads
        try:
            reply = worker.ask((place, *task), self._timeout)
        except _Lost as lost:
            # An error, not a warning: of all ranks but the first nothing less is shown.
            shown = quote(completion, _LOGGED_CHARACTERS)
            log.error("reward function %r %s on %s: that earns %g", label, lost, shown, self._fallback)
            return self._fallback
        finally:
            self._idle.put(worker)
        if "raised" in reply:
            cause = RuntimeError(f"in a worker process:\n{reply['traceback']}")
            raise RewardError(f"Reward function {label!r} failed on {quote(completion)}: {reply['raised']}") from cause
        if "returned" in reply:
            raise no_reward(label, reply["returned"], completion)
        return reply["reward"]


class _Lost(Exception):
    """A call that will not be answered. The message follows the function's name in a sentence."""


class _Worker:
    """A process that answers one task at a time. One that is lost is replaced at once."""

    def __init__(self, names: list[str], folder: str):
        """`folder` is where it starts: the trainer's may be another by the time that it is replaced."""
        self._names, self._folder = names, folder
        self._asked = 0
        self._start()

    def ask(self, task: tuple, seconds: float) -> dict[str, Any]:
        """The reply to a task. Raises _Lost where there is none in time, RewardError where no process can begin."""
        if not self._ready:
            self._wait_ready()
        self._asked += 1
        body = pickle.dumps((self._asked, *task))
        try:
            end = time.monotonic() + seconds
            self._socket.settimeout(seconds)
            self._socket.sendall(body)
            reply = json.loads(self._line(end))
            if not isinstance(reply, dict) or reply.get("number") != self._asked:
                raise ValueError(reply)
        except TimeoutError:
            self.end()
            lost = _Lost(f"gave no answer within {seconds:g} s")
        except ValueError:
            self.end()
            lost = _Lost("wrote where its process replies")
        except (OSError, EOFError):
            lost = _Lost(self._end_and_tell())
        else:
            return reply
        self._start()
        raise lost

    def kill(self) -> None:
        """Have it killed with all that it started. So it is, too, when this process ends in whatever way."""
        self._process.stdin.close()

    def end(self) -> None:
        self.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it was stopped, or waits for a process that even SIGKILL does not end
            self._process.kill()
            self._process.wait()
        self._printed.join(1.0)  # another user's process may live on and hold the pipe
        self._socket.close()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from grpo.rewards.worker import work; work({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the trainer
                cwd=self._folder,
                # Many processes that compute must not each take all cores.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._printed = threading.Thread(target=PRINTS.read_all, args=[self._process.stdout], daemon=True)
        self._printed.start()
        self._ready, self._received = False, b""
        self._socket.settimeout(_START_SECONDS)
        self._socket.sendall(pickle.dumps(self._names))

    def _wait_ready(self) -> None:
        try:
            reply = json.loads(self._line(time.monotonic() + _START_SECONDS))
        except (OSError, EOFError, ValueError):
            raise RewardError(
                f"a worker process for {' '.join(self._names)} {self._end_and_tell()} before it could begin: see what "
                "it printed; the files of reward functions are imported there"
            ) from None
        if "raised" in reply:
            raise RewardError(
                f"a worker process could not load {' '.join(self._names)}: {reply['raised']}: their files are imported "
                "there too, not only in the trainer"
            )
        self._ready = True

    def _line(self, end: float) -> bytes:
        """What stands before the next line end. Raises TimeoutError at `end`, EOFError where nothing more can come."""
        while b"\n" not in self._received:
            self._socket.settimeout(max(1e-3, end - time.monotonic()))
            if not (chunk := self._socket.recv(65536)):
                raise EOFError
            self._received += chunk
            if time.monotonic() > end:
                raise TimeoutError
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _end_and_tell(self) -> str:
        try:
            code = self._process.wait(1.0)  # its sockets close a moment before it is gone
            number = -code if code < 0 else code - 128
            how = signal.Signals(number).name if number in [*signal.Signals] else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "it closed its connection"
        self.end()
        return f"lost its process ({how})"

"""Processes for code of the user's, and the threads that wait for them: used again, ended with the interpreter."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, TypeVar

from grpo.rewards.process import UserProcess
from grpo.rewards.worker import Service

_Result = TypeVar("_Result")


class ProcessPool:
    """Processes of one service. Up to `threads` calls run at a time; a process that is needed is started.

    A program that ends otherwise than by os._exit closes it, or Python waits for the calls that run.
    """

    def __init__(
        self,
        make_service: Callable[..., Service],
        arguments: tuple,
        names: Sequence[str],
        timeout: float,
        threads: int,
        started: int = 0,
    ):
        """The first three arguments are those of UserProcess. `timeout`: seconds that a call may take. `started`: how
        many processes are started now, so that their imports are done when they are needed."""
        self.timeout = timeout
        self._arguments = make_service, arguments, names, os.getcwd()
        self._lock = threading.Lock()
        self._all = [UserProcess(*self._arguments) for _ in range(started)]
        self._idle = deque(self._all)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="user's code")
        self._is_closed = False

    async def run(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Make a call in a thread of this process, which waits for one of those."""
        return await asyncio.wrap_future(self._threads.submit(call, *arguments))

    def call(self, *task: Any) -> dict[str, Any]:
        """Return the reply to a task that needs no process of its own. Raises as UserProcess.call."""
        process = self.take()
        try:
            return process.call(task, self.timeout)
        finally:
            self.give_back(process)

    def take(self) -> UserProcess:
        """Return a process that nobody else has until it is given back."""
        with self._lock:
            if self._is_closed:
                raise CancelledError
            if self._idle:
                process = self._idle.popleft()
                process.replace_if_lost()  # where memory runs out, the system kills these first
                return process
            process = UserProcess(*self._arguments)
            self._all.append(process)
            return process

    def give_back(self, process: UserProcess) -> None:
        with self._lock:
            self._idle.append(process)

    def close(self) -> None:
        """Kill them with all that they started. Calls that wait or run are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            for process in self._all:
                process.end()  # a call that hangs would not end by itself
        self._threads.shutdown(wait=True)
        for process in self._all:
            process.stop()

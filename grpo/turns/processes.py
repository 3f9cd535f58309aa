"""The processes that `tool_timeout` asks for: started when one is needed, used again, ended with the interpreter."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpo.config.turns import TurnsSection
from grpo.rewards.process import UserProcess, count_processes
from grpo.turns.service import TurnsService
from grpo.turns.session import Reply


class Processes:
    """Processes that each have the tools, and an instance of the environment while a completion has them."""

    def __init__(self, config: TurnsSection):
        self.timeout: float = config.tool_timeout
        """seconds that a call may take"""
        self._arguments = (config.tools, config.environment, config.max_tool_response_length)
        self._names = [*config.tools, *([config.environment] if config.environment else [])]
        self._folder = os.getcwd()
        self._lock = threading.Lock()
        self._all: list[UserProcess] = []
        self._idle: list[UserProcess] = []
        # More calls at the same time than there are cores would only use up each other's time.
        self._threads = ThreadPoolExecutor(count_processes(), thread_name_prefix="turns")
        atexit.register(self.close)

    async def run(self, call: Callable[..., Reply], *arguments: Any) -> Reply:
        """Make a call in a thread of this process, which waits for one of those."""
        return await asyncio.wrap_future(self._threads.submit(call, *arguments))

    def call(self, *task: Any) -> Reply:
        """Do a task that needs no process of its own. Raises CallLost."""
        process = self.take()
        try:
            return process.call(task, self.timeout)
        finally:
            self.give_back(process)

    def take(self) -> UserProcess:
        """Return a process that nobody else has until it is given back."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            process = UserProcess(TurnsService, self._arguments, self._names, self._folder)
            self._all.append(process)
            return process

    def give_back(self, process: UserProcess) -> None:
        with self._lock:
            self._idle.append(process)

    def close(self) -> None:
        """Kill them with all that they started."""
        atexit.unregister(self.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.kill()  # a call that hangs would not end by itself
        self._threads.shutdown(wait=True)
        for process in self._all:
            process.stop()

"""Runs the user's code in this process, one call at a time, or in processes with deadlines.

Async tools always run on this process's event loop. A place does one task after another, and holds the environment of
a completion.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

from grpo.config.user_code import Key, async_user_code, user_code
from grpo.tools.schema import Tool
from grpo.tools.session import Reply, Session
from grpo.usercode.process import CallLost, ProcessPool, UserProcess

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""seconds between two log lines, and of a call that is logged"""


class SlowCalls:
    """Logs slow calls in this process, from a thread: a call may block the event loop."""

    def __init__(self, timeout: float | None):
        """`timeout` is `tool_timeout`, which ends no code that blocks the event loop."""
        self._remedy = "nothing ends them: set tool_timeout"
        if timeout is not None:
            self._remedy = f"tool_timeout={timeout:g} ends no async tool that blocks the event loop: await, or use def"
        self._running: dict[object, tuple[str, float]] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="slow calls", daemon=True).start()

    @contextmanager
    def noted(self, task: str, *arguments: Any) -> Iterator[None]:
        """Count a task of grpo/tools/session.py as running inside."""
        key = object()
        self._running[key] = (arguments[0] if task in ("tool", "method") else task), time.monotonic()
        try:
            yield
        finally:
            del self._running[key]

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(PATIENCE):
            now = time.monotonic()
            times = [(name, now - began) for name, began in [*self._running.values()]]
            slow = [f"{name} (for {seconds:.0f} s)" for name, seconds in times if seconds >= PATIENCE]
            if slow:
                more = f", and {len(slow) - 3} more" if len(slow) > 3 else ""
                # An error: ranks other than the first show no warnings.
                log.error("these have not answered yet: %s%s; %s", ", ".join(slow[:3]), more, self._remedy)


class Place(Protocol):
    """Runs the code of one completion."""

    async def perform(self, key: Key, task: str, *arguments: Any) -> Reply:
        """Do a task of grpo/tools/session.py; `key` seeds its random numbers. Raises CallLost."""
        ...

    def release(self) -> None:
        """Free the place for another completion."""
        ...


class LocalPlace:
    """This process: sync code in a thread, async code on the event loop, without deadlines."""

    def __init__(self, session: Session, thread: UserThread, slow_calls: SlowCalls):
        self._session, self._thread, self._slow_calls = session, thread, slow_calls

    async def perform(self, key: Key, task: str, *arguments: Any) -> Reply:
        started = await asyncio.wrap_future(self._thread.submit(self._start, key, task, *arguments))
        if isinstance(started, dict):
            return started
        with self._slow_calls.noted(task, *arguments), async_user_code(*key):
            return await self._session.finish(task, started)

    def release(self) -> None:
        """Do nothing: the session ends with the completion."""

    def _start(self, key: Key, *task: Any) -> Reply | Awaitable:
        with self._slow_calls.noted(*task), user_code(*key):
            return self._session.start(*task)


class ProcessPlace:
    """A process for this completion alone, from the first task until its release, with deadlines."""

    def __init__(self, processes: ProcessPool):
        self._processes = processes
        self._process: UserProcess | None = None
        self._order = threading.Lock()  # a waiter may be cancelled while its call runs

    async def perform(self, key: Key, task: str, *arguments: Any) -> Reply:
        return await self._processes.run(self._call, key, task, *arguments)

    def release(self) -> None:
        if self._process is not None:
            self._processes.give_back(self._process)
            self._process = None

    def _call(self, *task: Any) -> Reply:
        with self._order:
            if self._process is None:
                self._process = self._processes.take()
            return self._process.call(task, self._processes.timeout)


async def _perform_async(session: Session, seconds: float | None, task: str, *arguments: Any) -> Reply:
    """Do a task of async code. Raises CallLost after `seconds`."""
    started: Reply | Awaitable = session.start(task, *arguments)
    if isinstance(started, dict):
        return started
    call = asyncio.ensure_future(session.finish(task, started))
    done, _ = await asyncio.wait([call], timeout=seconds)
    if not done:
        call.cancel()
        raise CallLost(f"gave no answer within {seconds:g} s")
    return call.result()


class UserThread:
    """A daemon thread for sync code, which may hang: the program ends without it, unlike an executor's."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future, Callable, tuple] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="user's code", daemon=True).start()

    def submit(self, function: Callable, *arguments: Any) -> Future:
        future: Future = Future()
        self._calls.put((future, function, arguments))
        return future

    def close(self) -> None:
        """End the thread after its calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)


class Runner:
    """Runs tools, and makes a place for each instance of the environment; in this process if `processes` is None."""

    def __init__(self, make_session: Callable[[], Session], processes: ProcessPool | None):
        self._make_session, self._tools = make_session, make_session()
        self._processes = processes
        self._timeout = None if processes is None else processes.timeout
        self._thread = UserThread()
        self._slow_calls = SlowCalls(self._timeout)

    async def call_tool(self, key: Key, tool: Tool, arguments: dict[str, Any]) -> Reply:
        """Call a tool; `key` seeds its random numbers. Raises CallLost."""
        task = "tool", tool.name, arguments
        if tool.is_async:
            with self._slow_calls.noted(*task), async_user_code(*key):
                return await _perform_async(self._tools, self._timeout, *task)
        if self._processes is None:
            return await LocalPlace(self._tools, self._thread, self._slow_calls).perform(key, *task)
        return await self._processes.run(self._processes.call, key, *task)

    def make_place(self) -> Place:
        if self._processes is None:
            return LocalPlace(self._make_session(), self._thread, self._slow_calls)
        return ProcessPlace(self._processes)

    def close(self) -> None:
        """End the user's code."""
        self._thread.close()
        self._slow_calls.close()
        if self._processes is not None:
            self._processes.close()

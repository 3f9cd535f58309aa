"""Where the user's code runs: in this process, one call at a time, or in processes with deadlines.

Async tools always run on this process's event loop. A place is what answers one task after another, and holds the
environment of a completion.
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
"""seconds from one look at the calls to the next, and those that a call may take before it is named"""


class SlowCalls:
    """The calls that run now. A thread of their own looks at them: what they block may be the event loop."""

    def __init__(self, timeout: float | None):
        """`timeout` is `tool_timeout`, which ends no code that blocks the event loop."""
        self._remedy = (
            "nothing ends them: set tool_timeout"
            if timeout is None
            else f"tool_timeout={timeout:g} ends no async tool that blocks the event loop: let it await, or write it "
            "without async"
        )
        self._running: dict[object, tuple[str, float]] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="slow calls", daemon=True).start()

    @contextmanager
    def noted(self, task: str, *arguments: Any) -> Iterator[None]:
        """Take a task of grpo/tools/session.py for one that runs, as long as the block lasts."""
        key = object()
        self._running[key] = (arguments[0] if task in ("tool", "method") else task), time.monotonic()
        try:
            yield
        finally:
            del self._running[key]

    def close(self) -> None:
        """Look at them no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(PATIENCE):
            now = time.monotonic()
            slow = [
                f"{name} (for {now - began:.0f} s)"
                for name, began in [*self._running.values()]
                if now - began >= PATIENCE
            ]
            if slow:
                more = f", and {len(slow) - 3} more" if len(slow) > 3 else ""
                # An error, not a warning: ranks other than the first show nothing less.
                log.error("these have not answered yet: %s%s; %s", ", ".join(slow[:3]), more, self._remedy)


class Place(Protocol):
    """Where the code of one completion runs."""

    async def perform(self, key: Key, task: str, *arguments: Any) -> Reply:
        """Do one of the tasks of grpo/tools/session.py; its random numbers follow from `key`. Raises CallLost."""
        ...

    def release(self) -> None:
        """Let another completion have what this one used."""
        ...


class LocalPlace:
    """This process: sync code in a thread of its own, async code on the event loop."""

    def __init__(self, session: Session, thread: UserThread, slow_calls: SlowCalls):
        self._session, self._thread, self._slow_calls = session, thread, slow_calls

    async def perform(self, key: Key, task: str, *arguments: Any) -> Reply:
        """Do a task; nothing ends it before it ends itself."""
        started = await asyncio.wrap_future(self._thread.submit(self._start, key, task, *arguments))
        if isinstance(started, dict):
            return started
        with self._slow_calls.noted(task, *arguments), async_user_code(*key):
            return await self._session.finish(task, started)

    def release(self) -> None:
        """Leave nothing: the session goes with the completion."""

    def _start(self, key: Key, *task: Any) -> Reply | Awaitable:
        with self._slow_calls.noted(*task), user_code(*key):
            return self._session.start(*task)


class ProcessPlace:
    """A process, from the first task until it is released: no other completion uses it in that time."""

    def __init__(self, processes: ProcessPool):
        self._processes = processes
        self._process: UserProcess | None = None
        self._order = threading.Lock()  # who waits for a call may be cancelled, and not the call

    async def perform(self, key: Key, task: str, *arguments: Any) -> Reply:
        """Do a task; it may take `tool_timeout` seconds."""
        return await self._processes.run(self._call, key, task, *arguments)

    def release(self) -> None:
        """Give the process back."""
        if self._process is not None:
            self._processes.give_back(self._process)
            self._process = None

    def _call(self, *task: Any) -> Reply:
        with self._order:
            if self._process is None:
                self._process = self._processes.take()
            return self._process.call(task, self._processes.timeout)


async def _perform_async(session: Session, seconds: float | None, task: str, *arguments: Any) -> Reply:
    """Do a task whose code is async. Raises CallLost after so many seconds."""
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
    """A thread for sync code, which may hang: it must not keep the program from its end, as an executor's would."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future, Callable, tuple] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="user's code", daemon=True).start()

    def submit(self, function: Callable, *arguments: Any) -> Future:
        future: Future = Future()
        self._calls.put((future, function, arguments))
        return future

    def close(self) -> None:
        """End the thread after the calls that it has."""
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
    """Runs tools, and makes a place for each instance of the environment."""

    def __init__(self, make_session: Callable[[], Session], processes: ProcessPool | None):
        """Without `processes` all code runs in this one."""
        self._make_session, self._tools = make_session, make_session()
        self._processes = processes
        self._timeout = None if processes is None else processes.timeout
        self._thread = UserThread()
        self._slow_calls = SlowCalls(self._timeout)

    async def call_tool(self, key: Key, tool: Tool, arguments: dict[str, Any]) -> Reply:
        """Call one of `tools`; its random numbers follow from `key`. Raises CallLost."""
        task = "tool", tool.name, arguments
        if tool.is_async:
            with self._slow_calls.noted(*task), async_user_code(*key):
                return await _perform_async(self._tools, self._timeout, *task)
        if self._processes is None:
            return await LocalPlace(self._tools, self._thread, self._slow_calls).perform(key, *task)
        return await self._processes.run(self._processes.call, key, *task)

    def make_place(self) -> Place:
        """Return where an instance of the environment is to live."""
        if self._processes is None:
            return LocalPlace(self._make_session(), self._thread, self._slow_calls)
        return ProcessPlace(self._processes)

    def close(self) -> None:
        """End what runs the user's code."""
        self._thread.close()
        self._slow_calls.close()
        if self._processes is not None:
            self._processes.close()

"""Runs tools, and environments' instances, in this process, one call at a time, or in processes with deadlines.

Async tools always run on this process's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from grpo.config.errors import RewardError
from grpo.config.user_code import Key, async_user_code, user_code
from grpo.data.records import Example
from grpo.tools.schema import Tool
from grpo.tools.session import EnvironmentClass, Reply, Session
from grpo.usercode.process import CallLost, ProcessPool, UserProcess, ended_within

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds between two log lines, and of a call that is logged
_FALLBACK = 0.0  # the reward of a completion whose environment hangs or ends its process


class Failures:
    """Logs the first failure of each kind that does not end the run, then counts."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, traceback: str = "") -> None:
        """`traceback` is the user's part of the stack, with line ends."""
        self._counts[kind] += 1
        # Errors, here and below: ranks other than the first show no warnings.
        if (count := self._counts[kind]) == 1:
            log.error("%s%s: the run continues, and counts more of these", traceback, kind)
        elif str(count).rstrip("0") == "1":
            log.error("%s, %d times by now", kind, count)


class SlowCalls:
    """Logs slow calls in this process, from a thread: a call may block the event loop."""

    def __init__(self) -> None:
        self._running: dict[object, tuple[str, float]] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="slow calls", daemon=True).start()

    @contextmanager
    def noted(self, task: str, *arguments: Any) -> Iterator[None]:
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
                log.error(
                    "these have not answered yet: %s (%d in all): set tool_timeout, which ends all but an async tool "
                    "that does not await",
                    ", ".join(slow[:3]),
                    len(slow),
                )


class LocalPlace:
    """Runs tasks of grpo/tools/session.py in this process: sync code in a thread, async code on the event loop."""

    def __init__(self, session: Session, thread: ThreadPoolExecutor, slow_calls: SlowCalls):
        self._session, self._thread, self._slow_calls = session, thread, slow_calls

    async def perform(self, key: Key, task: str, *arguments: Any) -> Reply:
        """Do a task; `key` seeds its random numbers."""
        started = await asyncio.wrap_future(self._thread.submit(self._start, key, task, *arguments))
        if isinstance(started, dict):
            return started
        with self._slow_calls.noted(task, *arguments), async_user_code(*key):
            return await self._session.finish(task, started)

    def release(self) -> None:
        """Do nothing: it is the completion's own."""

    def _start(self, key: Key, *task: Any) -> Reply | Awaitable:
        with self._slow_calls.noted(*task), user_code(*key):
            return self._session.start(*task)


class ProcessPlace:
    """Runs them in a process for this completion alone, from the first task until its release, with deadlines."""

    def __init__(self, processes: ProcessPool):
        self._processes = processes
        self._process: UserProcess | None = None
        self._order = threading.Lock()  # a waiter may be cancelled while its call runs

    async def perform(self, key: Key, task: str, *arguments: Any) -> Reply:
        """Do a task; `key` seeds its random numbers. Raises CallLost."""
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


Place = LocalPlace | ProcessPlace  # runs the code of one completion's instance


class Instance:
    """The environment of one completion. Its calls log and raise CallLost if it is lost with its process, and raise
    RewardError if it fails."""

    def __init__(self, environment: EnvironmentClass, place: Place, key: Key, failures: Failures):
        """`key` and a call's number seed the call's random numbers."""
        self._environment, self._key, self._calls = environment, key, 0
        self._prefix = f"environment={environment.name!r}: "
        self._failures = failures
        self._place: Place | None = place
        self._steps_reward = 0.0
        self.is_lost = False

    async def reset(self, columns: dict[str, Any]) -> str:
        """Make the instance; return its observation."""
        return (await self.perform("reset", columns))["text"]

    def check_observation(self, observation: str, example: Example) -> None:
        """Raise RewardError unless the prompt ends with the observation of the completion's `reset`. A worker's example
        has no messages, only their text in a chat template, and is not checked."""
        contents = [message["content"].rstrip() for message in example.messages]
        if contents and not any(content.endswith(observation.rstrip()) for content in contents):
            raise RewardError(
                f"{self._prefix}reset said {observation[:200]!r} to a completion, and something else as the data was "
                "read: it must depend on the row alone: draw random numbers from a seed in the row"
            )

    async def step(self, text: str) -> tuple[str, bool]:
        """Return its answer to a turn, and whether the completion is over."""
        reply = await self.perform("step", text)
        self._steps_reward += reply["reward"]
        return reply["text"], reply["done"]

    async def compute_reward(self) -> dict[str, float]:
        """Return the completion's reward by name: that of get_reward, or the sum of the steps' rewards."""
        if not self._environment.gives_reward:
            return {}
        reward: float | None = self._steps_reward
        if self._environment.has_get_reward and not self.is_lost:
            with suppress(CallLost):
                reward = (await self.perform("get_reward"))["reward"]
        if self.is_lost:
            reward = _FALLBACK
        return {} if reward is None else {self._environment.label: reward}

    async def close(self) -> None:
        """Close it once. Errors of its `close` are logged."""
        place, self._place = self._place, None
        if place is None:
            return
        try:
            if not self.is_lost:
                reply = await place.perform((*self._key, "close"), "close")
                if "error" in reply:
                    self._failures.note(f"{self._prefix}close raised {reply['error']}", reply["traceback"])
        except CallLost as lost:
            self._failures.note(f"{self._prefix}close {lost}")
        finally:
            place.release()

    async def perform(self, task: str, *arguments: Any) -> Reply:
        self._calls += 1
        try:
            reply = await self._place.perform((*self._key, self._calls), task, *arguments)
        except (CallLost, RewardError) as error:  # RewardError: no process starts
            self.is_lost = True
            if isinstance(error, CallLost):
                log.error("%s%s %s: the completion ends with the reward %g", self._prefix, task, error, _FALLBACK)
            raise
        if "raised" in reply:
            raise RewardError(f"{self._prefix}{reply['raised']}", reply["traceback"])
        return reply


class Runner:
    """Runs tools, and makes a place for each instance of the environment; in this process if `processes` is None."""

    def __init__(self, make_session: Callable[[], Session], processes: ProcessPool | None):
        self._make_session, self._tools = make_session, make_session()
        self._processes = processes
        self._timeout = None if processes is None else processes.timeout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="user's code")
        self._slow_calls = SlowCalls()

    async def call_tool(self, key: Key, tool: Tool, arguments: dict[str, Any]) -> Reply:
        """Call a tool; `key` seeds its random numbers. Raises CallLost."""
        if tool.is_async:
            with self._slow_calls.noted("tool", tool.name), async_user_code(*key):
                started = self._tools.start("tool", tool.name, arguments)
                if isinstance(started, dict):
                    return started
                return (await ended_within(self._timeout, self._tools.finish("tool", started))).result()
        if self._processes is None:
            place = LocalPlace(self._tools, self._thread, self._slow_calls)
            return await place.perform(key, "tool", tool.name, arguments)
        return await self._processes.run(self._processes.call, key, "tool", tool.name, arguments)

    def make_place(self) -> Place:
        if self._processes is None:
            return LocalPlace(self._make_session(), self._thread, self._slow_calls)
        return ProcessPlace(self._processes)

    def close(self) -> None:
        """End the user's code. A call that hangs stays in its thread: a program ends by end_now."""
        self._thread.shutdown(wait=False)
        self._slow_calls.close()
        if self._processes is not None:
            self._processes.close()

"""`reward_timeout`: reward functions are called on each completion alone, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from grpo.config.user_code import user_code
from grpo.rewards.functions import (
    Logged,
    Misuse,
    RewardBatch,
    RewardError,
    begin_call,
    call_function,
    check_returned,
    describe_failure,
    format_user_stack,
    invalid_reward,
    is_reward,
    load_function,
    log_lost_call,
    make_error,
    repr_of,
    text_of,
)
from grpo.usercode.process import CallLost, ProcessPool


def call_each_alone(compute_reward: Callable[[RewardBatch, Logged], Awaitable[float | None]]) -> Callable:
    """Return an async function for `begin_call` that calls this one on all completions at the same time, as batches of
    one.

    The calls' logs are logged for the whole batch: a column is null for calls without it.
    """

    async def rewards(batch: RewardBatch, logged: Logged) -> list[float | None]:
        logs = [Logged() for _ in batch.completions]
        calls = [asyncio.ensure_future(compute_reward(batch.select(i), alone)) for i, alone in enumerate(logs)]
        try:
            values = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        for column in dict.fromkeys(column for alone in logs for column in alone.extra):
            logged.log_extra(column, [alone.extra.get(column, [None])[0] for alone in logs])
        for alone in logs:
            alone.extra = {}
            logged.add(alone)
        return values

    rewards.takes_batch = True
    return rewards


def add_deadline(label: str, function: Callable, seconds: float, fallback: float) -> Callable:
    """Return an async function that calls this one on each completion alone, in this process.

    A call is cancelled after `seconds`, and its completion gets the reward `fallback`.
    """

    async def compute_reward(batch: RewardBatch, logged: Logged) -> float | None:
        (completion,) = map(text_of, batch.completions)
        try:
            call = asyncio.ensure_future(begin_call(function, batch, logged))
        except Misuse as error:
            raise make_error(label, error) from error
        # Not wait_for: a TimeoutError that the function raises is an error like any other.
        done, _ = await asyncio.wait([call], timeout=seconds)
        if not done:
            call.cancel()
            log_lost_call(label, f"gave no answer within {seconds:g} s", completion, fallback)
            return fallback
        try:
            return check_returned(call.result(), batch, logged)[0]
        except BaseException as error:  # the user's code may raise anything
            raise make_error(label, error, completion) from error

    return call_each_alone(compute_reward)


class RewardService:
    """Calls reward functions in a process, on one completion at a time."""

    def __init__(self, names: list[str]):
        """`names` are as in `reward_funcs`."""
        self._functions = [load_function(name) for name in names]

    def answer(self, index: int, batch: RewardBatch) -> dict[str, Any]:
        """Call a function on a batch of one completion. Raises sys.exit and other ends of a process."""
        logged = Logged()
        with user_code(*batch.key, index):
            returned = call_function(self._functions[index], batch, logged)
        if isinstance(returned, BaseException):
            if isinstance(returned, Exception) and not isinstance(returned, MemoryError):
                return {
                    "failed": describe_failure(returned, text_of(batch.completions[0])),
                    "traceback": format_user_stack(returned),
                }
            raise returned  # the process ends
        (reward,) = returned
        if not is_reward(reward):
            return {"returned": repr_of(reward)}
        return {"reward": None if reward is None else float(reward), "extra": logged.extra, "metrics": logged.metrics}


class RewardPool:
    """Worker processes that call reward functions, on one completion at a time."""

    def __init__(self, names: list[str], timeout: float, fallback: float, workers: int):
        """`names` are as in `reward_funcs`. A call may take `timeout` seconds; a lost one earns `fallback`."""
        self._names, self._fallback = names, fallback
        self._processes = ProcessPool((RewardService, (names,), names), timeout, threads=workers, started=workers)

    def make_function(self, name: str) -> Callable:
        """Return an async function that calls the function of this name in the workers, on each completion alone.

        It raises RewardError if the function raises or returns no reward.
        """
        index, label = self._names.index(name), name.rpartition(":")[2]

        async def compute_reward(batch: RewardBatch, logged: Logged) -> float | None:
            return await self._processes.run(self._call_function, index, label, batch, logged)

        return call_each_alone(compute_reward)

    def close(self) -> None:
        self._processes.close()

    def _call_function(self, index: int, label: str, batch: RewardBatch, logged: Logged) -> float | None:
        (completion,) = map(text_of, batch.completions)
        try:
            reply = self._processes.call(index, batch)
        except CallLost as lost:
            log_lost_call(label, str(lost), completion, self._fallback)
            return self._fallback
        if "failed" in reply:
            raise RewardError(f"Reward function {label!r} {reply['failed']}", reply["traceback"])
        if "returned" in reply:
            raise invalid_reward(label, reply["returned"], completion)
        logged.extra, logged.metrics = reply["extra"], reply["metrics"]
        return reply["reward"]

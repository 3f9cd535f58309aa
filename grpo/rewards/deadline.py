"""`reward_timeout`: reward functions are called on each completion alone, with a deadline."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from grpo.config.user_code import user_code
from grpo.rewards.functions import (
    Logged,
    RewardBatch,
    RewardError,
    await_call,
    call_function,
    invalid_reward,
    is_reward,
    load_function,
    make_error,
    quote_completion,
    text_of,
)
from grpo.usercode.process import CallLost, ProcessPool, ended_within

log = logging.getLogger(__name__)

_FALLBACK = 0.0  # the reward of a completion on which a function hangs or ends its process


def call_each_alone(label: str, compute_reward: Callable[[RewardBatch, Logged], Awaitable[float | None]]) -> Callable:
    """Return an async function for `await_call` that calls this one on all completions at once, as batches of one. The
    calls' logs are logged for the whole batch: a column is null for calls without it."""

    async def compute_or_fall_back(batch: RewardBatch, logged: Logged) -> float | None:
        try:
            return await compute_reward(batch, logged)
        except CallLost as lost:
            # An error: ranks other than the first show no warnings.
            shown = quote_completion(text_of(batch.completions[0]), 80)
            log.error("reward function %r %s on %s: that earns %g", label, lost, shown, _FALLBACK)
            return _FALLBACK

    async def rewards(batch: RewardBatch, logged: Logged) -> list[float | None]:
        logs = [Logged() for _ in batch.completions]
        calls = [asyncio.ensure_future(compute_or_fall_back(batch.select(i), alone)) for i, alone in enumerate(logs)]
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


def add_deadline(label: str, function: Callable, seconds: float) -> Callable:
    """Return an async function that calls this one on each completion alone, in this process, for `seconds` at most."""

    async def compute_reward(batch: RewardBatch, logged: Logged) -> float | None:
        call = await ended_within(seconds, await_call(function, batch, logged))
        try:
            return call.result()[0]
        except BaseException as error:  # the user's code may raise anything
            raise make_error(label, function, error, batch, text_of(batch.completions[0])) from error

    return call_each_alone(label, compute_reward)


class RewardService:
    """Calls reward functions in a process, on one completion at a time."""

    def __init__(self, names: list[str]):
        """`names` are as in `reward_funcs`."""
        self._functions = [(name.rpartition(":")[2], load_function(name)) for name in names]

    def answer(self, index: int, batch: RewardBatch) -> dict[str, Any]:
        """Call a function on a batch of one completion. Raises sys.exit and other ends of a process."""
        (label, function), logged, completion = self._functions[index], Logged(), text_of(batch.completions[0])
        with user_code(*batch.key, index):
            returned = call_function(function, batch, logged)
        if isinstance(returned, Exception) and not isinstance(returned, MemoryError):
            error = make_error(label, function, returned, batch, completion)
        elif isinstance(returned, BaseException):
            raise returned  # the process ends
        elif not is_reward(returned[0]):
            error = invalid_reward(label, returned[0], completion)
        else:
            reward = None if returned[0] is None else float(returned[0])
            return {"reward": reward, "extra": logged.extra, "metrics": logged.metrics}
        return {"error": str(error), "traceback": error.traceback}


class RewardPool(ProcessPool):
    """Worker processes that call reward functions, on one completion at a time."""

    def __init__(self, names: list[str], timeout: float, workers: int):
        """`names` are as in `reward_funcs`. A call may take `timeout` seconds."""
        super().__init__((RewardService, (names,), names), timeout, threads=workers, started=workers)
        self._names = names

    def make_function(self, name: str) -> Callable:
        """Return an async function that calls the function of this name in the workers, on each completion alone. It
        raises RewardError if the function raises or returns no reward."""
        index, label = self._names.index(name), name.rpartition(":")[2]

        async def compute_reward(batch: RewardBatch, logged: Logged) -> float | None:
            reply = await self.run(self.call, index, batch)
            if "error" in reply:
                raise RewardError(reply["error"], reply["traceback"])
            logged.extra, logged.metrics = reply["extra"], reply["metrics"]
            return reply["reward"]

        return call_each_alone(label, compute_reward)

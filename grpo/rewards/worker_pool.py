"""Reward functions in processes of their own, each call with a deadline: for rewards that run what a model wrote."""

from __future__ import annotations

from collections.abc import Callable

from grpo.rewards.alone import call_each_alone
from grpo.rewards.functions import (
    Batch,
    Logged,
    RewardError,
    invalid_reward,
    log_lost_call,
    text_of,
)
from grpo.rewards.process import CallLost
from grpo.rewards.process_pool import ProcessPool
from grpo.rewards.service import RewardService


class RewardPool:
    """Worker processes that call reward functions on one completion at a time. They end with the interpreter."""

    def __init__(self, names: list[str], timeout: float, fallback: float, workers: int):
        """`names` are as in `reward_funcs`. A call may take `timeout` seconds; a lost one earns `fallback`."""
        self._names, self._fallback = names, fallback
        self._processes = ProcessPool(RewardService, (names,), names, timeout, threads=workers, started=workers)

    def make_function(self, name: str) -> Callable:
        """Return an async function that calls the function of this name in the workers, on each completion alone.

        It raises RewardError where the function raises, or returns something else than a reward.
        """
        index, label = self._names.index(name), name.rpartition(":")[2]

        async def compute_reward(batch: Batch, logged: Logged) -> float | None:
            return await self._processes.run(self._call_function, index, label, batch, logged)

        return call_each_alone(compute_reward)

    def close(self) -> None:
        self._processes.close()

    def _call_function(self, index: int, label: str, batch: Batch, logged: Logged) -> float | None:
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

"""What a process for reward functions does."""

from __future__ import annotations

from typing import Any

from grpo.config.user_code import user_code
from grpo.rewards.functions import (
    Batch,
    Logged,
    call_function,
    describe_failure,
    format_user_stack,
    is_reward,
    load_function,
    repr_of,
    text_of,
)


class RewardService:
    """Calls reward functions, each on one completion at a time: a Service of grpo/rewards/worker.py."""

    def __init__(self, names: list[str]):
        """`names` are as in `reward_funcs`."""
        self._functions = [load_function(name) for name in names]

    def answer(self, index: int, batch: Batch) -> dict[str, Any]:
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
            raise returned  # an accident of foreign code like a hang, not a mistake: the process ends
        (reward,) = returned
        if not is_reward(reward):
            return {"returned": repr_of(reward)}
        return {"reward": None if reward is None else float(reward), "extra": logged.extra, "metrics": logged.metrics}

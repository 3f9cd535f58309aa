"""A run's rewards, in training and in evaluation: what its functions give, their weights, and which are verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from grpo.algorithm.advantages import soft_overlong_punishment
from grpo.config.rewards import RewardedConfig
from grpo.rewards.compute import RewardScorer
from grpo.rewards.functions import Logged, TrainerState
from grpo.rollouts.records import Example, Rollout
from grpo.trainer.scoring import score_rollouts

PUNISHMENT = "soft_overlong_punishment"


class Rewarder:
    """A run's reward functions with their weights."""

    def __init__(
        self,
        loaded: Mapping[str, Callable | str],
        started: dict[str, Callable | RewardScorer],
        config: RewardedConfig,
    ):
        """`loaded` are the functions as load_reward_funcs returns them, `started` the same as start_rewards does."""
        self._started, self._config = started, config
        self.names, weights = reward_names(loaded, config), [*config.reward_weights]
        self.weights = torch.tensor(weights + [1.0] * (len(self.names) - len(weights)), dtype=torch.float64)
        self.verdicts = verdicts(loaded)
        self.full_rewards = full_rewards(loaded)

    def compute(
        self,
        examples: Sequence[Example],
        rollouts: Sequence[Rollout],
        state: TrainerState,
        logged: Logged | None = None,
    ) -> torch.Tensor:
        """Compute the rewards of rollouts: float64 [functions, rollouts], NaN where one does not apply.

        `examples` has the prompt of each rollout; `logged` takes up what the functions log. Raises RewardError,
        ServerError.
        """
        config = self._config
        by_function = torch.from_numpy(score_rollouts(self._started, examples, rollouts, state, logged))
        if config.soft_punish_cache:
            lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])
            punishment = soft_overlong_punishment(lengths, config.max_completion_length, config.soft_punish_cache)
            by_function = torch.cat([by_function, punishment.unsqueeze(0)])
        return by_function

    def is_correct(self, by_function: np.ndarray) -> np.ndarray:
        """Tell which completions are right, from [functions, ...]: bool [...].

        A verdict is right above 0. Of several all that apply must be; a completion that none applies to is not right.
        """
        rewards = by_function[[self.names.index(name) for name in self.verdicts]]
        return (rewards > 0).any(axis=0) & ((rewards > 0) | np.isnan(rewards)).all(axis=0)

    def has_format(self, by_function: np.ndarray) -> np.ndarray:
        """Tell which completions earn every full reward that a function declares: [functions, ...] -> bool [...]."""
        rows = [self.names.index(name) for name in self.full_rewards]
        full = np.array([*self.full_rewards.values()]).reshape(-1, *[1] * (by_function.ndim - 1))
        return (by_function[rows] == full).all(axis=0)


def reward_names(loaded: Mapping[str, Callable | str], config: RewardedConfig) -> list[str]:
    """Return the names under which rewards are logged: the functions', and the overlong punishment's."""
    return [*loaded, *([PUNISHMENT] if config.soft_punish_cache else [])]


def verdicts(loaded: Mapping[str, Callable | str]) -> list[str]:
    """Return the names of the functions that declare `is_verdict = True`: a reward above 0 says that an answer is
    right, and evaluation counts these as accuracy."""
    return [name for name, function in loaded.items() if getattr(function, "is_verdict", False)]


def full_rewards(loaded: Mapping[str, Callable | str]) -> dict[str, float]:
    """Return the `full_reward` of each function that declares one: evaluation counts the answers that earn it."""
    return {name: function.full_reward for name, function in loaded.items() if hasattr(function, "full_reward")}

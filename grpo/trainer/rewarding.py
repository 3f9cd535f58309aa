"""A run's rewards, in training and in evaluation: what its functions and its environment give, their weights, and
which are verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from grpo.algorithm.advantages import soft_overlong_punishment
from grpo.client.errors import ServerError, ServersLost
from grpo.config.errors import ConfigError, RewardError
from grpo.config.rewards import RewardedConfig
from grpo.config.user_code import Key
from grpo.rewards.compute import RewardScorer
from grpo.rewards.functions import Logged, TrainerState
from grpo.rollouts.records import Example, Rollout
from grpo.run.collective import raise_together
from grpo.trainer.scoring import score_rollouts

PUNISHMENT = "soft_overlong_punishment"


class RewardsLost(RewardError):
    """The failure of a reward, a tool or an environment on some rank. Every rank raises it at the same place."""


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise RewardsLost on every rank where one could not draw or reward. All ranks call it together.

    What is done inside is done by each rank alone, but for what raises ServersLost.
    """
    lost = None
    try:
        yield
    except ServersLost:
        raise
    except (RewardError, ServerError) as error:
        lost = error
    raise_together(lost, RewardsLost)


class Rewarder:
    """A run's rewards with their weights: those of its functions, then its environment's, then the punishment."""

    def __init__(
        self,
        rewards: Mapping[str, Any],
        started: dict[str, Callable | RewardScorer],
        config: RewardedConfig,
    ):
        """`rewards` are those of join_rewards, `started` those of the functions as start_rewards returns them."""
        self._started, self._config, weights = started, config, [*config.reward_weights]
        self._of_environment = [name for name in rewards if name not in started]
        self.names = reward_names(rewards, config)
        self.weights = torch.tensor(weights + [1.0] * (len(self.names) - len(weights)), dtype=torch.float64)
        self.verdicts = verdicts(rewards)
        self.full_rewards = full_rewards(rewards)

    def compute(
        self,
        examples: Sequence[Example],
        rollouts: Sequence[Rollout],
        state: TrainerState,
        logged: Logged | None = None,
        key: Key = (),
    ) -> torch.Tensor:
        """Compute the rewards of rollouts: float64 [names, rollouts], NaN where one does not apply.

        `examples` has the prompt of each rollout; `logged` takes up what the functions log. Their random numbers follow
        from the run's seed, the step in `state`, and `key`, which no other batch of the step has. The punishment for
        length counts the tokens of answers too: max_completion_length, which the completion comes close to, does. It
        applies where another reward does. Raises RewardError, ServerError.
        """
        config, key = self._config, (self._config.seed, state.global_step, *key)
        by_function = torch.from_numpy(score_rollouts(self._started, examples, rollouts, state, logged, key))
        if self._of_environment:
            by_function = torch.cat([by_function, self._given_by_environment(rollouts)])
        if config.soft_punish_cache:
            lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])
            punishment = soft_overlong_punishment(lengths, config.max_completion_length, config.soft_punish_cache)
            punishment = punishment.masked_fill(by_function.isnan().all(dim=0), torch.nan)
            by_function = torch.cat([by_function, punishment.unsqueeze(0)])
        return by_function

    def _given_by_environment(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        of_rollouts = [{} if rollout.outcome is None else rollout.outcome.rewards for rollout in rollouts]
        rows = [[rewards.get(name, np.nan) for rewards in of_rollouts] for name in self._of_environment]
        return torch.tensor(rows, dtype=torch.float64)

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


def join_rewards(loaded: Mapping[str, Callable | str], of_environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions, as load_reward_funcs returns them, and the environment's class by the name of each reward
    that it gives, in one mapping by name: what gives each reward, and declares what it means.

    Raises ConfigError where both have the same name.
    """
    if both := sorted({*loaded} & {*of_environment}):
        raise ConfigError(
            f"reward_funcs={both[0]!r}: the environment gives a reward of this name too: rename one, because each is "
            "logged under its name"
        )
    return {**loaded, **of_environment}


def reward_names(rewards: Mapping[str, Any], config: RewardedConfig) -> list[str]:
    """Return the names under which rewards are logged: those of join_rewards, and the overlong punishment's."""
    return [*rewards, *([PUNISHMENT] if config.soft_punish_cache else [])]


def verdicts(rewards: Mapping[str, Any]) -> list[str]:
    """Return the names of those of join_rewards that declare `is_verdict = True`: a reward above 0 says that an answer
    is right, and evaluation counts these as accuracy."""
    return [name for name, giver in rewards.items() if getattr(giver, "is_verdict", False)]


def full_rewards(rewards: Mapping[str, Any]) -> dict[str, float]:
    """Return the `full_reward` of each of join_rewards that declares one: evaluation counts the answers that earn
    it."""
    return {name: giver.full_reward for name, giver in rewards.items() if hasattr(giver, "full_reward")}

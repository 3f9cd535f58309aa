"""Computes the advantages of the estimators beside grpo, and of the user's. Pure functions of tensors, without ranks.

A formula takes the outcomes of a round's completions on all ranks, and returns float64 [groups, num_generations]. NaN,
without any reward, is in no mean; advantages.py makes its advantage 0, and those of groups without signal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from grpo.config.errors import ConfigError
from grpo.config.loss_settings import LossSection
from grpo.config.user_code import load_function, modes_kept


@dataclass(frozen=True)
class Outcomes:
    """The rewards of a round's completions, of all ranks."""

    rewards: torch.Tensor
    """float64 [groups, num_generations], the weighted sum over the functions, less the KL with kl_in_reward"""
    lengths: torch.Tensor | None = None
    """int64 [groups, num_generations], tokens of each completion, if not only the signal is needed"""
    greedy: torch.Tensor | None = None
    """float64 [groups], the reward of each prompt's greedy completion, for remax"""


def rloo(outcomes: Outcomes, settings: LossSection) -> torch.Tensor:
    """Return reward - mean of the group's other rewards.

    Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740, the RLOO estimator. With n rewards that is n / (n - 1)
    times (reward - group mean).
    """
    rewards = outcomes.rewards
    count = (~rewards.isnan()).sum(dim=1, keepdim=True)
    return (rewards - rewards.nanmean(dim=1, keepdim=True)) * count / (count - 1).clamp(min=1)


def reinforce_plus_plus(outcomes: Outcomes, settings: LossSection) -> torch.Tensor:
    """Return the rewards whitened over the tokens of the round.

    Hu et al. 2025, "REINFORCE++", arXiv:2501.03262, equations 8 to 10, without discount. Equation 8 has the KL from a
    token on, kl_in_reward the whole completion's: the KL before a token is a baseline, without effect on the expected
    gradient.
    """
    if not has_signal(outcomes.rewards.view(1, -1), 0.0):
        return torch.zeros_like(outcomes.rewards)  # not rounding errors
    return _whiten(outcomes.rewards, outcomes.lengths)


def reinforce_plus_plus_baseline(outcomes: Outcomes, settings: LossSection) -> torch.Tensor:
    """Return reward - group mean, whitened over the tokens of the round; a group without signal counts as zeros.

    Hu et al. 2025, "REINFORCE++", arXiv:2501.03262, REINFORCE++ with baseline.
    """
    rewards = outcomes.rewards
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    signal = has_signal(rewards, settings.reward_tolerance)
    return _whiten(torch.where(signal.unsqueeze(1), centred, centred * 0.0), outcomes.lengths)


def remax(outcomes: Outcomes, settings: LossSection) -> torch.Tensor:
    """Return reward - reward of the policy's greedy completion of the prompt.

    Li et al. 2023, "ReMax", arXiv:2310.10505, algorithm 1. The greedy completion's reward never has a KL.
    """
    return outcomes.rewards - outcomes.greedy.unsqueeze(1)


def opo(outcomes: Outcomes, settings: LossSection) -> torch.Tensor:
    """Return reward - mean of the group's rewards, each weighed by its completion's tokens.

    Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585: the baseline of least variance if a
    gradient's squared norm grows with the completion's length.
    """
    rewards = outcomes.rewards
    tokens = outcomes.lengths.masked_fill(rewards.isnan(), 0)
    # Completions without a token have no gradient, whatever their advantage.
    baseline = (tokens * rewards.nan_to_num(nan=0.0)).sum(dim=1) / tokens.sum(dim=1).clamp(min=1)
    return rewards - baseline.unsqueeze(1)


def passk(outcomes: Outcomes, settings: LossSection) -> torch.Tensor:
    """Return best reward - second best for the best completion of a group, 0 for the others; with scale_rewards group
    divided by the group's std + 1e-4.

    Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning",
    arXiv:2503.19595: the maximum over the group, less the maximum without the completion.
    """
    rewards = outcomes.rewards
    gap = _lead(rewards)
    if settings.scale_rewards == "group":
        gap = gap / (std(rewards) + 1e-4)
    best = rewards.nan_to_num(nan=-torch.inf).argmax(dim=1, keepdim=True)
    return torch.zeros_like(rewards).scatter(1, best, gap.unsqueeze(1))


@dataclass(frozen=True)
class Estimator:
    """A way to make advantages from rewards."""

    advantages: Callable[[Outcomes, LossSection], torch.Tensor]
    signal: Callable[[Outcomes, float], torch.Tensor] | None
    """(outcomes, tolerance) -> bool [groups]: whether a group's rewards tell good completions from bad; None if that
    depends on the whole round"""


def _spread_signal(outcomes: Outcomes, tolerance: float) -> torch.Tensor:
    return has_signal(outcomes.rewards, tolerance)


ESTIMATORS = {
    "rloo": Estimator(rloo, _spread_signal),
    "reinforce++": Estimator(reinforce_plus_plus, None),
    "reinforce++_baseline": Estimator(reinforce_plus_plus_baseline, _spread_signal),
    "remax": Estimator(remax, lambda outcomes, tolerance: (remax(outcomes, None).abs() > tolerance).any(dim=1)),
    "opo": Estimator(opo, _spread_signal),
    "passk": Estimator(passk, lambda outcomes, tolerance: _lead(outcomes.rewards) > tolerance),
}


def has_signal(rewards: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return bool [groups]: whether a group's rewards ([groups, num_generations]) differ by more, without NaN."""
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(dim=1)
    return highest - lowest > tolerance


def std(rewards: torch.Tensor) -> torch.Tensor:
    """Return the std over the last dimension, ddof 1, without NaN; 0 of fewer than two."""
    count = (~rewards.isnan()).sum(dim=-1)
    squares = (rewards - rewards.nanmean(dim=-1, keepdim=True)).square().nansum(dim=-1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _lead(rewards: torch.Tensor) -> torch.Tensor:
    """Return a group's best reward - second best, [groups]; 0 of fewer than two."""
    best, second = rewards.nan_to_num(nan=-torch.inf).topk(2, dim=1).values.unbind(dim=1)
    return torch.where(second.isneginf(), 0.0, best - second)


def _whiten(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return (value - mean) / sqrt(variance + 1e-8), mean and variance (ddof 1) over all tokens: each has its
    completion's value. All [groups, num_generations]."""
    tokens = lengths.masked_fill(values.isnan(), 0)
    count = tokens.sum()
    mean = (tokens * values.nan_to_num(nan=0.0)).sum() / count.clamp(min=1)
    squares = (tokens * (values - mean).square().nan_to_num(nan=0.0)).sum()
    return (values - mean) / (squares / (count - 1).clamp(min=1) + 1e-8).sqrt()


@functools.cache  # reward functions may change the directory that a path begins in
def find_estimator(name: str) -> Estimator:
    """Return a built-in estimator other than grpo, or the user's function with a check around it.

    Raises ConfigError where there is no such file or function, or the file cannot be imported.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    function = load_function("advantage_estimator", name)

    def checked(outcomes: Outcomes, settings: LossSection) -> torch.Tensor:
        rewards = outcomes.rewards
        with modes_kept():
            result = function(rewards.clone())
        if not isinstance(result, torch.Tensor) or result.shape != rewards.shape:
            raise ConfigError(
                f"advantage_estimator={name!r}: for rewards of shape {tuple(rewards.shape)} it returned "
                f"{_describe(result)}: return a tensor of that shape"
            )
        return result.detach().double()

    return Estimator(checked, None)


def try_estimator(name: str, num_generations: int) -> None:
    """Call a user's estimator on the rewards of three groups, one of equals. Raises ConfigError if it fails."""
    if ":" not in name:
        return
    estimator = find_estimator(name)
    rewards = torch.arange(3 * num_generations, dtype=torch.float64).view(3, num_generations)
    rewards[1] = 1.0
    try:
        advantages = estimator.advantages(Outcomes(rewards), LossSection(advantage_estimator=name))
    except ConfigError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(
            f"advantage_estimator={name!r}: it failed on the rewards of three groups ({error!r}): correct it"
        ) from error
    if not advantages.isfinite().all():
        raise ConfigError(
            f"advantage_estimator={name!r}: of the rewards {rewards.tolist()} it made the advantages "
            f"{advantages.tolist()}: return finite numbers, also for a group whose rewards are equal"
        )


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)

"""Advantages: the reward of a completion compared with others. Pure functions of tensors, without ranks.

Those of `advantage_estimator` grpo are here: group-relative, Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300,
section 4.1.2; the others' formulas are in estimators.py. Rewards are float64, [functions, groups, num_generations] or
[groups, num_generations]; NaN: no function applies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from grpo.algorithm.estimators import Outcomes, find_estimator, has_signal, std
from grpo.config.loss_settings import LossSection


def advantages(
    by_function: torch.Tensor,
    weights: torch.Tensor,
    settings: LossSection,
    penalty: torch.Tensor | float = 0.0,
    lengths: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the advantage of each completion, float64 [groups, num_generations].

    by_function: float64 [functions, groups, num_generations] of all ranks; penalty: [groups, num_generations], taken
    off the sum; lengths: int64 [groups, num_generations], tokens of each completion, which grpo does not need; greedy:
    [functions, groups], rewards of the greedy completions, needed by remax alone.
    """
    if settings.advantage_estimator == "grpo":
        return AGGREGATIONS[settings.multi_objective_aggregation].advantages(by_function, weights, settings, penalty)
    estimator, rewards = find_estimator(settings.advantage_estimator), total_rewards(by_function, weights)
    without_kl = Outcomes(rewards, lengths, None if greedy is None else total_rewards(greedy, weights))
    outcomes = replace(without_kl, rewards=rewards - penalty)
    compared = estimator.advantages(outcomes, settings)
    if estimator.signal is not None:
        judged = without_kl if settings.divided_by_group else outcomes
        compared = torch.where(estimator.signal(judged, settings.reward_tolerance).unsqueeze(1), compared, 0.0)
        compared = compared.nan_to_num(nan=0.0)  # where a greedy completion has no reward
    return compared.masked_fill(rewards.isnan(), 0.0)


def groups_with_signal(
    by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection, greedy: torch.Tensor | None = None
) -> torch.Tensor:
    """Return bool [groups]: whether these rewards ([functions, groups, num_generations]) tell good completions from
    bad. Only for estimators that judge this of each group by itself (settings.groups_have_signal)."""
    if settings.advantage_estimator == "grpo":
        compared = AGGREGATIONS[settings.multi_objective_aggregation].compared(by_function, weights)
        return _any_signal(compared, settings.reward_tolerance)
    baseline = None if greedy is None else total_rewards(greedy, weights)
    outcomes = Outcomes(total_rewards(by_function, weights), greedy=baseline)
    return find_estimator(settings.advantage_estimator).signal(outcomes, settings.reward_tolerance)


def total_rewards(by_function: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over the functions, [functions, ...] -> [...]. A function that does not apply (NaN) adds
    nothing; where none applies the sum is NaN."""
    total = torch.tensordot(weights, by_function.nan_to_num(nan=0.0), dims=1)
    return total.masked_fill(by_function.isnan().all(dim=0), torch.nan)


def sum_then_normalize(
    by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection, penalty: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Add the functions' rewards up, and compare the sums, less the penalty, within the group.

    Equal rewards are no signal where the group's own std divides, whatever the penalty: its differences, mere rounding
    while the policy is the reference, would be scaled to what a difference of rewards is.
    """
    rewards = total_rewards(by_function, weights)
    judged = rewards if settings.divided_by_group else rewards - penalty
    compared = group_advantages(rewards - penalty, settings.scale_rewards)
    return torch.where(has_signal(judged, settings.reward_tolerance).unsqueeze(1), compared, 0.0)


def normalize_then_sum(
    by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection, penalty: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Normalise each function's rewards within the group, add them up by weight, normalise the sums over the batch.

    GDPO, arXiv:2601.05242. There is no sum of rewards to take a penalty off: the settings refuse kl_in_reward.
    """
    no_reward = by_function.isnan().all(dim=0)
    signal = _any_signal(by_function, settings.reward_tolerance)
    normalised = torch.stack([group_advantages(rewards, "group", settings.reward_tolerance) for rewards in by_function])
    total = torch.einsum("f,fgn->gn", weights, normalised).masked_fill(no_reward, torch.nan)
    scaled = (total - total.nanmean()) / (std(total.flatten()) + 1e-4)
    return torch.where(signal.unsqueeze(1), scaled, 0.0).nan_to_num(nan=0.0)


@dataclass(frozen=True)
class Aggregation:
    """A way to make one advantage from the rewards of several functions."""

    advantages: Callable[..., torch.Tensor]
    compared: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(by_function, weights) -> the rewards that are compared within a group, [any number, groups, num_generations]"""


AGGREGATIONS = {
    "sum_then_normalize": Aggregation(
        sum_then_normalize, lambda by_function, weights: total_rewards(by_function, weights).unsqueeze(0)
    ),
    "normalize_then_sum": Aggregation(normalize_then_sum, lambda by_function, weights: by_function),
}


def group_advantages(rewards: torch.Tensor, scale_rewards: str = "group", tolerance: float = 0.0) -> torch.Tensor:
    """Return (reward - group mean) / scale. Both [groups, num_generations], of all ranks.

    NaN, a completion to which no reward function applies, is left out of mean and scale and gets 0. So does every
    completion of a group without signal, whose rewards differ by no more than `tolerance`: exactly 0.
    """
    centred = (rewards - rewards.nanmean(dim=1, keepdim=True)) / SCALES[scale_rewards](rewards)
    return torch.where(has_signal(rewards, tolerance).unsqueeze(1), centred, 0.0).nan_to_num(nan=0.0)


def scale_of_group(rewards: torch.Tensor) -> torch.Tensor:
    """Return each group's std (ddof 1) + 1e-4, [groups, 1]: DeepSeekMath, section 4.1.2."""
    return std(rewards).unsqueeze(1) + 1e-4


def scale_of_batch(rewards: torch.Tensor) -> torch.Tensor:
    """Return the std (ddof 1) of all rewards + 1e-4, a scalar."""
    return std(rewards.flatten()) + 1e-4


def no_scale(rewards: torch.Tensor) -> float:
    """Return 1: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, does not divide."""
    return 1.0


SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor | float]] = {
    "group": scale_of_group,
    "batch": scale_of_batch,
    "none": no_scale,
}


def soft_overlong_punishment(lengths: torch.Tensor, max_completion_length: int, soft_punish_cache: int) -> torch.Tensor:
    """Return 0 up to max_completion_length - soft_punish_cache tokens, from there falling to -1 at the maximum.
    float64 [n].

    DAPO, arXiv:2503.14476, equation 13.
    """
    beyond = lengths.double() - (max_completion_length - soft_punish_cache)
    return -(beyond / soft_punish_cache).clamp(0.0, 1.0)


def _any_signal(by_function: torch.Tensor, tolerance: float) -> torch.Tensor:
    return torch.stack([has_signal(rewards, tolerance) for rewards in by_function]).any(dim=0)

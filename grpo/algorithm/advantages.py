"""Computes advantages: a completion's reward compared with others. Pure functions of tensors, without ranks.

`advantage_estimator` grpo is here: group-relative, Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2.
The other formulas are in estimators.py. Rewards are float64, [functions, groups, num_generations] or [groups,
num_generations]; NaN: no function applies.
"""

from __future__ import annotations

from dataclasses import replace

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

    by_function: float64 [functions, groups, num_generations] of all ranks; penalty: [groups, num_generations],
    subtracted from the sum; lengths: int64 [groups, num_generations], tokens of each completion, unused by grpo;
    greedy: [functions, groups], rewards of the greedy completions, for remax alone.
    """
    if settings.advantage_estimator == "grpo":
        aggregate = sum_then_normalize if sums_first(settings) else normalize_then_sum
        return aggregate(by_function, weights, settings, penalty)
    estimator, rewards = find_estimator(settings.advantage_estimator), total_rewards(by_function, weights)
    without_kl = Outcomes(rewards, lengths, None if greedy is None else total_rewards(greedy, weights))
    outcomes = replace(without_kl, rewards=rewards - penalty)
    compared = estimator.advantages(outcomes, settings)
    if estimator.signal is not None:
        judged = without_kl if settings.divided_by_group else outcomes
        compared = torch.where(estimator.signal(judged, settings.reward_tolerance).unsqueeze(1), compared, 0.0)
        compared = compared.nan_to_num(nan=0.0)  # a greedy completion without reward
    return compared.masked_fill(rewards.isnan(), 0.0)


def groups_with_signal(
    by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection, greedy: torch.Tensor | None = None
) -> torch.Tensor:
    """Return bool [groups]: whether these rewards ([functions, groups, num_generations]) tell good completions from
    bad, for estimators that judge groups alone (settings.groups_have_signal)."""
    if settings.advantage_estimator == "grpo":
        compared = total_rewards(by_function, weights).unsqueeze(0) if sums_first(settings) else by_function
        return _any_signal(compared, settings.reward_tolerance)
    baseline = None if greedy is None else total_rewards(greedy, weights)
    outcomes = Outcomes(total_rewards(by_function, weights), greedy=baseline)
    return find_estimator(settings.advantage_estimator).signal(outcomes, settings.reward_tolerance)


def total_rewards(by_function: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over the functions, [functions, ...] -> [...], without NaN; NaN if all are NaN."""
    total = torch.tensordot(weights, by_function.nan_to_num(nan=0.0), dims=1)
    return total.masked_fill(by_function.isnan().all(dim=0), torch.nan)


def sum_then_normalize(
    by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection, penalty: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Add the functions' rewards up, and compare the sums, less the penalty, within the group.

    Equal rewards are no signal if the group's std divides, whatever the penalty: its differences, mere rounding while
    the policy is the reference, would be scaled up to those of rewards.
    """
    rewards = total_rewards(by_function, weights)
    judged = rewards if settings.divided_by_group else rewards - penalty
    compared = group_advantages(rewards - penalty, settings.scale_rewards)
    return torch.where(has_signal(judged, settings.reward_tolerance).unsqueeze(1), compared, 0.0)


def normalize_then_sum(
    by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection, penalty: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Normalise each function's rewards within the group, add them up by weight, normalise the sums over the batch.

    GDPO, arXiv:2601.05242. The settings refuse kl_in_reward, the only penalty.
    """
    no_reward = by_function.isnan().all(dim=0)
    signal = _any_signal(by_function, settings.reward_tolerance)
    normalised = torch.stack([group_advantages(rewards, "group", settings.reward_tolerance) for rewards in by_function])
    total = torch.einsum("f,fgn->gn", weights, normalised).masked_fill(no_reward, torch.nan)
    scaled = (total - total.nanmean()) / (std(total.flatten()) + 1e-4)
    return torch.where(signal.unsqueeze(1), scaled, 0.0).nan_to_num(nan=0.0)


def sums_first(settings: LossSection) -> bool:
    return settings.multi_objective_aggregation == "sum_then_normalize"


def group_advantages(rewards: torch.Tensor, scale_rewards: str = "group", tolerance: float = 0.0) -> torch.Tensor:
    """Return (reward - group mean) / scale. Both [groups, num_generations], of all ranks.

    The scale is the std (ddof 1) of the group (DeepSeekMath) or the batch + 1e-4, or 1 (Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783). NaN is in no mean or scale, and gets 0, as do all completions of a group without signal, whose
    rewards differ by no more than `tolerance`.
    """
    scale: torch.Tensor | float = 1.0
    if scale_rewards != "none":
        scale = (std(rewards).unsqueeze(1) if scale_rewards == "group" else std(rewards.flatten())) + 1e-4
    centred = (rewards - rewards.nanmean(dim=1, keepdim=True)) / scale
    return torch.where(has_signal(rewards, tolerance).unsqueeze(1), centred, 0.0).nan_to_num(nan=0.0)


def soft_overlong_punishment(lengths: torch.Tensor, max_completion_length: int, soft_punish_cache: int) -> torch.Tensor:
    """Return 0 up to max_completion_length - soft_punish_cache tokens, then falling to -1 at the maximum, float64 [n].

    DAPO, arXiv:2503.14476, equation 13.
    """
    beyond = lengths.double() - (max_completion_length - soft_punish_cache)
    return -(beyond / soft_punish_cache).clamp(0.0, 1.0)


def _any_signal(by_function: torch.Tensor, tolerance: float) -> torch.Tensor:
    return torch.stack([has_signal(rewards, tolerance) for rewards in by_function]).any(dim=0)

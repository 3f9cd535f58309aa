"""What a completion was worth beside the others of its prompt. Pure functions of tensors, without ranks.

Group-relative advantages: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2. The others stand at their
formulas. Rewards are float64, [functions, groups, num_generations] or [groups, num_generations]; NaN: none applies.
"""

from __future__ import annotations

import torch

from grpo.config.loss import LossSection


def total_rewards(by_function: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum over the functions, [functions, ...] -> [...]. A function that does not apply (NaN) adds nothing;
    where none applies the sum is NaN."""
    total = torch.tensordot(weights, by_function.nan_to_num(nan=0.0), dims=1)
    return total.masked_fill(by_function.isnan().all(dim=0), torch.nan)


def advantages(
    by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection, penalty: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """What each completion was worth beside the others, float64 [groups, num_generations].

    by_function: float64 [functions, groups, num_generations] of all ranks; penalty: [groups, num_generations], taken
    off the sum.
    """
    if settings.multi_objective_aggregation == "normalize_then_sum":
        return decoupled_advantages(by_function, weights, settings.reward_tolerance)
    rewards = total_rewards(by_function, weights) - penalty
    return group_advantages(rewards, settings.scale_rewards, settings.reward_tolerance)


def groups_with_signal(by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection) -> torch.Tensor:
    """bool [groups]: whether these rewards ([functions, groups, num_generations]) tell good completions from bad."""
    compared = by_function
    if settings.multi_objective_aggregation == "sum_then_normalize":
        compared = total_rewards(by_function, weights).unsqueeze(0)
    return _any_signal(compared, settings.reward_tolerance)


def group_advantages(rewards: torch.Tensor, scale_rewards: str = "group", tolerance: float = 0.0) -> torch.Tensor:
    """(reward - group mean) / (std + 1e-4), std with ddof 1. Both [groups, num_generations], of all ranks.

    scale_rewards "group": the group's std (DeepSeekMath, section 4.1.2); "batch": that of all rewards; "none": not
    divided (Dr. GRPO). NaN, a completion to which no reward function applies, is left out of mean and std and gets 0.
    So does every completion of a group without signal, whose rewards differ by no more than `tolerance`: exactly 0.
    """
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        centred = centred / (_std(rewards).unsqueeze(1) + 1e-4)
    elif scale_rewards == "batch":
        centred = centred / (_std(rewards.flatten()) + 1e-4)
    return torch.where(_has_signal(rewards, tolerance).unsqueeze(1), centred, 0.0).nan_to_num(nan=0.0)


def decoupled_advantages(by_function: torch.Tensor, weights: torch.Tensor, tolerance: float = 0.0) -> torch.Tensor:
    """Each function's rewards normalised within the group, the weighted sum of them normalised over the batch.

    GDPO, arXiv:2601.05242; `normalize_then_sum` in TRL. by_function: float64 [functions, groups, num_generations] of
    all ranks, NaN where a function does not apply; weights: [functions]. Returns [groups, num_generations].
    """
    nothing = by_function.isnan().all(dim=0)
    alive = _any_signal(by_function, tolerance)
    each = torch.stack([group_advantages(rewards, "group", tolerance) for rewards in by_function])
    total = torch.einsum("f,fgn->gn", weights, each).masked_fill(nothing, torch.nan)
    scaled = (total - total.nanmean()) / (_std(total.flatten()) + 1e-4)
    return torch.where(alive.unsqueeze(1), scaled, 0.0).nan_to_num(nan=0.0)


def soft_overlong_punishment(lengths: torch.Tensor, max_completion_length: int, soft_punish_cache: int) -> torch.Tensor:
    """0 up to max_completion_length - soft_punish_cache tokens, from there falling to -1 at the maximum. float64 [n].

    DAPO, arXiv:2503.14476, equation 13.
    """
    beyond = lengths.double() - (max_completion_length - soft_punish_cache)
    return -(beyond / soft_punish_cache).clamp(0.0, 1.0)


def _has_signal(rewards: torch.Tensor, tolerance: float) -> torch.Tensor:
    """bool [groups]: whether a group's rewards ([groups, num_generations], NaN left out) differ by more than that."""
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(dim=1)
    return highest - lowest > tolerance


def _any_signal(by_function: torch.Tensor, tolerance: float) -> torch.Tensor:
    return torch.stack([_has_signal(rewards, tolerance) for rewards in by_function]).any(dim=0)


def _std(rewards: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, ddof 1, NaN left out; 0 where fewer than two are left."""
    count = (~rewards.isnan()).sum(dim=-1)
    squares = (rewards - rewards.nanmean(dim=-1, keepdim=True)).square().nansum(dim=-1)
    return (squares / (count - 1).clamp(min=1)).sqrt()

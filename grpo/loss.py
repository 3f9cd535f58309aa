"""The objective: group-relative advantages and the GRPO loss. Pure functions of tensors; no model, no ranks.

GRPO: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, equations 1 to 4.
"""

from __future__ import annotations

import torch

_LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: large enough to show, small enough not to overflow


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """(reward - group mean) / (group std + 1e-4), std with ddof 1. Both [groups, num_generations].

    A group whose rewards are all equal says nothing about which completion is better: it gives exactly 0.
    """
    mean = rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True)
    differ = rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)
    return torch.where(differ, (rewards - mean) / (std + 1e-4), 0.0)


def token_weights(completion_lengths: torch.Tensor, sequences: int) -> torch.Tensor:
    """Each token's share of the step's loss: the mean over sequences of the mean over a sequence's tokens.

    completion_lengths: int64 [S] of these sequences; sequences: how many the whole step has, over all micro-batches and
    ranks. Returns float32 [completion_lengths.sum()]. As the divisor is the step's, the sum over any cut into
    micro-batches and ranks is the same. An empty completion has no token and adds 0, and still counts in the mean.
    """
    shares = 1.0 / (completion_lengths.clamp(min=1) * sequences)
    return shares.float().repeat_interleave(completion_lengths)


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    beta: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate with a KL penalty, summed with `weights`. All inputs are [T], a value a completion token.

    With r = exp(logp - old) and d = ref - logp, a token's loss is (DeepSeekMath, equations 3 and 4)

        -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta (exp(d) - d - 1)

    Both log-ratios are clamped to +-20 before exp. `ref_logprobs` None leaves out the KL.
    Returns (loss, metrics): a scalar, and for each metric the values [T] of which the mean over tokens is reported.
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    metrics = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
    if ref_logprobs is not None:
        log_ratio = (ref_logprobs - logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        kl = torch.exp(log_ratio) - log_ratio - 1
        per_token = per_token + beta * kl
        metrics["kl"] = kl
    return (per_token * weights).sum(), {name: values.detach().float() for name, values in metrics.items()}

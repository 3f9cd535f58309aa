"""Computes advantages: a completion's reward compared with others. Pure functions of tensors, without ranks.

Rewards are float64, [functions, groups, num_generations] or [groups, num_generations]; NaN: no function applies. A
formula takes the outcomes of a round's completions on all ranks, and returns float64 [groups, num_generations]. NaN is
in no mean; `advantages` makes its advantage 0, and those of groups without signal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

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

    Equal rewards are no signal if the group's std divides, whatever the penalty: its differences, mere rounding while
    the policy is the reference, would be scaled up to those of rewards.
    """
    if settings.multi_objective_aggregation == "normalize_then_sum":
        return normalize_then_sum(by_function, weights, settings)
    estimator, without_penalty = find_estimator(settings.advantage_estimator), _outcomes(by_function, weights, greedy)
    rewards = without_penalty.rewards
    outcomes = replace(without_penalty, rewards=rewards - penalty, lengths=lengths)
    compared = estimator.advantages(outcomes, settings)
    if estimator.signal is not None:
        judged = without_penalty if settings.divided_by_group else outcomes
        compared = torch.where(estimator.signal(judged, settings.reward_tolerance).unsqueeze(1), compared, 0.0)
        compared = compared.nan_to_num(nan=0.0)  # a greedy completion without reward
    return compared.masked_fill(rewards.isnan(), 0.0)


def groups_with_signal(
    by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection, greedy: torch.Tensor | None = None
) -> torch.Tensor:
    """Return bool [groups]: whether these rewards ([functions, groups, num_generations]) tell good completions from
    bad, for estimators that judge groups alone (settings.groups_have_signal)."""
    if settings.multi_objective_aggregation == "normalize_then_sum":
        return has_signal(by_function, settings.reward_tolerance).any(dim=0)
    signal = find_estimator(settings.advantage_estimator).signal
    return signal(_outcomes(by_function, weights, greedy), settings.reward_tolerance)


def total_rewards(by_function: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over the functions, [functions, ...] -> [...], without NaN; NaN if all are NaN."""
    total = torch.tensordot(weights, by_function.nan_to_num(nan=0.0), dims=1)
    return total.masked_fill(by_function.isnan().all(dim=0), torch.nan)


def _outcomes(by_function: torch.Tensor, weights: torch.Tensor, greedy: torch.Tensor | None) -> Outcomes:
    baseline = None if greedy is None else total_rewards(greedy, weights)
    return Outcomes(total_rewards(by_function, weights), greedy=baseline)


def normalize_then_sum(by_function: torch.Tensor, weights: torch.Tensor, settings: LossSection) -> torch.Tensor:
    """Normalise each function's rewards within the group, add them up by weight, normalise the sums over the batch.

    GDPO, arXiv:2601.05242.
    """
    no_reward = by_function.isnan().all(dim=0)
    signal = has_signal(by_function, settings.reward_tolerance).any(dim=0)
    normalised = torch.stack([group_advantages(rewards, "group", settings.reward_tolerance) for rewards in by_function])
    total = torch.einsum("f,fgn->gn", weights, normalised).masked_fill(no_reward, torch.nan)
    scaled = (total - total.nanmean()) / (std(total.flatten()) + 1e-4)
    return torch.where(signal.unsqueeze(1), scaled, 0.0).nan_to_num(nan=0.0)


def group_advantages(rewards: torch.Tensor, scale_rewards: str = "group", tolerance: float = 0.0) -> torch.Tensor:
    """Return (reward - group mean) / scale. Both [groups, num_generations], of all ranks.

    The scale is the std (ddof 1) of the group (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2) or
    the batch + 1e-4, or 1 (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). NaN gets 0, as do all completions of a group
    whose rewards differ by no more than `tolerance`.
    """
    scale: torch.Tensor | float = 1.0
    if scale_rewards != "none":
        scale = (std(rewards).unsqueeze(1) if scale_rewards == "group" else std(rewards.flatten())) + 1e-4
    centred = (rewards - rewards.nanmean(dim=1, keepdim=True)) / scale
    return torch.where(has_signal(rewards, tolerance).unsqueeze(1), centred, 0.0).nan_to_num(nan=0.0)


def grpo(outcomes: Outcomes, settings: LossSection) -> torch.Tensor:
    return group_advantages(outcomes.rewards, settings.scale_rewards)


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
    "grpo": Estimator(grpo, _spread_signal),
    "rloo": Estimator(rloo, _spread_signal),
    "reinforce++": Estimator(reinforce_plus_plus, None),
    "reinforce++_baseline": Estimator(reinforce_plus_plus_baseline, _spread_signal),
    "remax": Estimator(remax, lambda outcomes, tolerance: (remax(outcomes, None).abs() > tolerance).any(dim=1)),
    "opo": Estimator(opo, _spread_signal),
    "passk": Estimator(passk, lambda outcomes, tolerance: _lead(outcomes.rewards) > tolerance),
}


def has_signal(rewards: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return whether a group's rewards differ by more, without NaN: [..., num_generations] -> bool [...]."""
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=-1)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(dim=-1)
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


def soft_overlong_punishment(lengths: torch.Tensor, max_completion_length: int, soft_punish_cache: int) -> torch.Tensor:
    """Return 0 up to max_completion_length - soft_punish_cache tokens, then falling to -1 at the maximum, float64 [n].

    DAPO, arXiv:2503.14476, equation 13.
    """
    beyond = lengths.double() - (max_completion_length - soft_punish_cache)
    return -(beyond / soft_punish_cache).clamp(0.0, 1.0)


@functools.cache  # reward functions may change the directory that a path begins in
def find_estimator(name: str) -> Estimator:
    """Return a built-in estimator, or the user's function with a check around it.

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
                f"advantage_estimator={name!r}: it returned {' '.join(repr(result).split()):.200}: return a tensor of "
                f"the rewards' shape, {tuple(rewards.shape)}"
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
    except Exception as error:  # it may raise anything
        raise ConfigError(
            f"advantage_estimator={name!r}: it failed on the rewards of three groups ({error!r}): correct it"
        ) from error
    if not advantages.isfinite().all():
        raise ConfigError(
            f"advantage_estimator={name!r}: of the rewards {rewards.tolist()} it made the advantages "
            f"{advantages.tolist()}: return finite numbers, also for a group whose rewards are equal"
        )

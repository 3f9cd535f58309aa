"""Computes advantages: a completion's reward compared with others. Pure functions of tensors, without ranks.

Rewards are float64, [functions, groups, num_generations] or [groups, num_generations]; NaN: no function applies. An
estimator takes the rewards of a round's completions on all ranks, the tokens of each, int64 [groups, num_generations],
and the reward of each prompt's greedy completion, float64 [groups], and returns float64 [groups, num_generations]. NaN
is in no mean; `advantages` makes its advantage 0, and those of groups without signal.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from grpo.config.errors import ConfigError, one_line, require
from grpo.config.loss_settings import LossSection
from grpo.config.user_code import load_function, modes_kept

Estimator = Callable[[Tensor, Tensor | None, Tensor | None, LossSection], Tensor]
"""(rewards, lengths, greedy, settings) -> advantages"""


def advantages(
    by_function: Tensor,
    weights: Tensor,
    settings: LossSection,
    penalty: Tensor | float = 0.0,
    lengths: Tensor | None = None,
    greedy: Tensor | None = None,
) -> Tensor:
    """Return the advantage of each completion, float64 [groups, num_generations].

    by_function: float64 [functions, groups, num_generations] of all ranks; penalty: [groups, num_generations],
    subtracted from the sum; lengths: int64 [groups, num_generations], tokens of each completion, unused by grpo;
    greedy: [functions, groups], rewards of the greedy completions, for remax alone.

    Equal rewards are no signal if the group's std divides, whatever the penalty: its differences, mere rounding while
    the policy is the reference, would be scaled up to those of rewards.
    """
    if settings.multi_objective_aggregation == "normalize_then_sum":
        return normalize_then_sum(by_function, weights, settings)
    without_penalty = total_rewards(by_function, weights)
    baseline = None if greedy is None else total_rewards(greedy, weights)
    rewards = without_penalty - penalty
    compared = find_estimator(settings.advantage_estimator)(rewards, lengths, baseline, settings)
    if settings.groups_have_signal:
        judged = without_penalty if settings.divided_by_group else rewards
        compared = torch.where(_signal(judged, baseline, settings).unsqueeze(1), compared, 0.0)
        compared = compared.nan_to_num(nan=0.0)  # a greedy completion without reward
    return compared.masked_fill(without_penalty.isnan(), 0.0)


def groups_with_signal(
    by_function: Tensor, weights: Tensor, settings: LossSection, greedy: Tensor | None = None
) -> Tensor:
    """Return bool [groups]: whether these rewards ([functions, groups, num_generations]) tell good completions from
    bad, for estimators that judge groups alone (settings.groups_have_signal)."""
    if settings.multi_objective_aggregation == "normalize_then_sum":
        return has_signal(by_function[weights != 0], settings.reward_tolerance).any(dim=0)
    baseline = None if greedy is None else total_rewards(greedy, weights)
    return _signal(total_rewards(by_function, weights), baseline, settings)


def _signal(rewards: Tensor, greedy: Tensor | None, settings: LossSection) -> Tensor:
    match settings.advantage_estimator:
        case "remax":
            return ((rewards - greedy.unsqueeze(1)).abs() > settings.reward_tolerance).any(dim=1)
        case "passk":
            return _lead(rewards) > settings.reward_tolerance
    return has_signal(rewards, settings.reward_tolerance)


def total_rewards(by_function: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over the functions, [functions, ...] -> [...], without NaN; NaN where `is_unjudged`."""
    total = torch.tensordot(weights, by_function.nan_to_num(nan=0.0), dims=1)
    return total.masked_fill(is_unjudged(by_function, weights), torch.nan)


def is_unjudged(by_function: Tensor, weights: Tensor) -> Tensor:
    """Tell to which completions no function of a weight applies: [functions, ...] -> bool [...]. A measure, whose
    weight is 0, would make no verdict a reward of 0. Where all are measures, they decide."""
    judging = by_function[weights != 0] if weights.any() else by_function
    return judging.isnan().all(dim=0)


def normalize_then_sum(by_function: Tensor, weights: Tensor, settings: LossSection) -> Tensor:
    """Normalise each function's rewards in the group, their weighted sum over the batch: GDPO, arXiv:2601.05242."""
    signal = has_signal(by_function[weights != 0], settings.reward_tolerance).any(dim=0)
    normalised = torch.stack([group_advantages(rewards, "group", settings.reward_tolerance) for rewards in by_function])
    total = torch.einsum("f,fgn->gn", weights, normalised).masked_fill(is_unjudged(by_function, weights), torch.nan)
    scaled = (total - total.nanmean()) / (std(total.flatten()) + 1e-4)
    return torch.where(signal.unsqueeze(1), scaled, 0.0).nan_to_num(nan=0.0)


def group_advantages(rewards: Tensor, scale_rewards: str = "group", tolerance: float = 0.0) -> Tensor:
    """Return (reward - group mean) / scale. Both [groups, num_generations], of all ranks. The scale is the std (ddof 1)
    of the group (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2) or the batch + 1e-4, or 1 (Dr.
    GRPO, Liu et al. 2025, arXiv:2503.20783). NaN gets 0, as do groups whose rewards differ by at most `tolerance`."""
    scale: Tensor | float = 1.0
    if scale_rewards != "none":
        scale = (std(rewards).unsqueeze(1) if scale_rewards == "group" else std(rewards.flatten())) + 1e-4
    centred = (rewards - rewards.nanmean(dim=1, keepdim=True)) / scale
    return torch.where(has_signal(rewards, tolerance).unsqueeze(1), centred, 0.0).nan_to_num(nan=0.0)


def rloo(rewards: Tensor, lengths: Tensor, greedy: Tensor, settings: LossSection) -> Tensor:
    """Return reward - mean of the group's other rewards. Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740, the
    RLOO estimator. With n rewards that is n / (n - 1) times (reward - group mean)."""
    count = (~rewards.isnan()).sum(dim=1, keepdim=True)
    return (rewards - rewards.nanmean(dim=1, keepdim=True)) * count / (count - 1).clamp(min=1)


def reinforce_plus_plus(rewards: Tensor, lengths: Tensor, greedy: Tensor, settings: LossSection) -> Tensor:
    """Return the rewards whitened over the tokens of the round. Hu et al. 2025, "REINFORCE++", arXiv:2501.03262,
    equations 8 to 10, without discount. Equation 8 has the KL from a token on, kl_in_reward the whole completion's: the
    KL before a token is a baseline, without effect on the expected gradient."""
    if not has_signal(rewards.view(1, -1), 0.0):
        return torch.zeros_like(rewards)  # not rounding errors
    return _whiten(rewards, lengths)


def reinforce_plus_plus_baseline(rewards: Tensor, lengths: Tensor, greedy: Tensor, settings: LossSection) -> Tensor:
    """Return reward - group mean, whitened over the tokens of the round; a group without signal counts as zeros. Hu et
    al. 2025, "REINFORCE++", arXiv:2501.03262, REINFORCE++ with baseline."""
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    signal = has_signal(rewards, settings.reward_tolerance)
    return _whiten(torch.where(signal.unsqueeze(1), centred, centred * 0.0), lengths)


def remax(rewards: Tensor, lengths: Tensor, greedy: Tensor, settings: LossSection) -> Tensor:
    """Return reward - reward of the policy's greedy completion of the prompt. Li et al. 2023, "ReMax",
    arXiv:2310.10505, algorithm 1. The greedy completion's reward never has a KL."""
    return rewards - greedy.unsqueeze(1)


def opo(rewards: Tensor, lengths: Tensor, greedy: Tensor, settings: LossSection) -> Tensor:
    """Return reward - mean of the group's rewards, each weighed by its completion's tokens. Hao et al. 2025, "On-Policy
    RL with Optimal Reward Baseline", arXiv:2505.23585: the baseline of least variance if a gradient's squared norm
    grows with the completion's length."""
    tokens = lengths.masked_fill(rewards.isnan(), 0)
    # Completions without a token have no gradient, whatever their advantage.
    baseline = (tokens * rewards.nan_to_num(nan=0.0)).sum(dim=1) / tokens.sum(dim=1).clamp(min=1)
    return rewards - baseline.unsqueeze(1)


def passk(rewards: Tensor, lengths: Tensor, greedy: Tensor, settings: LossSection) -> Tensor:
    """Return best reward - second best for the best completion of a group, 0 for the others; with scale_rewards group
    divided by the group's std + 1e-4. Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives using
    Reinforcement Learning", arXiv:2503.19595: the maximum over the group, less the maximum without the completion."""
    gap = _lead(rewards)
    if settings.scale_rewards == "group":
        gap = gap / (std(rewards) + 1e-4)
    best = rewards.nan_to_num(nan=-torch.inf).argmax(dim=1, keepdim=True)
    return torch.zeros_like(rewards).scatter(1, best, gap.unsqueeze(1))


ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rewards, lengths, greedy, settings: group_advantages(rewards, settings.scale_rewards),
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "passk": passk,
}


def has_signal(rewards: Tensor, tolerance: float) -> Tensor:
    """Return whether a group's rewards differ by more, without NaN: [..., num_generations] -> bool [...]."""
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=-1)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(dim=-1)
    return highest - lowest > tolerance


def most_varied(rewards: Tensor, count: int) -> Tensor:
    """Return the places of those `count` rewards of each group that have the largest variance: [groups, drawn] -> int64
    [groups, count], ascending. NaN, no reward, stands for the group's mean. They are the k highest and the count - k
    lowest, for some k (Xu et al. 2025, arXiv:2504.13818: max-variance down-sampling)."""
    order = rewards.where(~rewards.isnan(), rewards.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0).sort(stable=True)
    drawn = rewards.shape[1]
    places = torch.stack([torch.cat([torch.arange(count - k), torch.arange(drawn - k, drawn)]) for k in range(count)])
    best = order.values[:, places].var(dim=2, correction=0).argmax(dim=1)
    return order.indices.gather(1, places[best]).sort(dim=1).values


def std(rewards: Tensor) -> Tensor:
    """Return the std over the last dimension, ddof 1, without NaN; 0 of fewer than two."""
    count = (~rewards.isnan()).sum(dim=-1)
    squares = (rewards - rewards.nanmean(dim=-1, keepdim=True)).square().nansum(dim=-1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _lead(rewards: Tensor) -> Tensor:
    """Return a group's best reward - second best, [groups]; 0 of fewer than two."""
    best, second = rewards.nan_to_num(nan=-torch.inf).topk(2, dim=1).values.unbind(dim=1)
    return torch.where(second.isneginf(), 0.0, best - second)


def _whiten(values: Tensor, lengths: Tensor) -> Tensor:
    """Return (value - mean) / sqrt(variance + 1e-8), mean and variance (ddof 1) over all tokens: each has its
    completion's value. All [groups, num_generations]."""
    tokens = lengths.masked_fill(values.isnan(), 0)
    count = tokens.sum()
    mean = (tokens * values.nan_to_num(nan=0.0)).sum() / count.clamp(min=1)
    squares = (tokens * (values - mean).square().nan_to_num(nan=0.0)).sum()
    return (values - mean) / (squares / (count - 1).clamp(min=1) + 1e-8).sqrt()


def soft_overlong_punishment(lengths: Tensor, max_completion_length: int, soft_punish_cache: int) -> Tensor:
    """Return 0 up to max_completion_length - soft_punish_cache tokens, then falling to -1 at the maximum, float64 [n].
    DAPO, arXiv:2503.14476, equation 13."""
    beyond = lengths.double() - (max_completion_length - soft_punish_cache)
    return -(beyond / soft_punish_cache).clamp(0.0, 1.0)


@functools.cache  # reward functions may change the directory that a path begins in
def find_estimator(name: str) -> Estimator:
    """Return a built-in estimator, or the user's function with a check around it. Raises ConfigError."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    function = load_function("advantage_estimator", name)

    def checked(rewards: Tensor, *_) -> Tensor:
        with modes_kept():
            result = function(rewards.clone())
        if not isinstance(result, Tensor) or result.shape != rewards.shape:
            raise ConfigError(
                f"advantage_estimator={name!r}: it returned {one_line(repr(result), 200)}: return a tensor of "
                f"the rewards' shape, {tuple(rewards.shape)}"
            )
        return result.detach().double()

    return checked


def try_estimator(name: str, num_generations: int) -> None:
    """Call a user's estimator on the rewards of three groups, one of equals. Raises ConfigError if it fails."""
    if ":" not in name:
        return
    estimator = find_estimator(name)
    rewards = torch.arange(3 * num_generations, dtype=torch.float64).view(3, num_generations)
    rewards[1] = 1.0
    try:
        advantages = estimator(rewards)
    except ConfigError:
        raise
    except Exception as error:  # it may raise anything
        reason = f"it failed on the rewards of three groups ({error!r}): correct it"
        raise ConfigError(f"advantage_estimator={name!r}: {reason}") from error
    made = f"of the rewards {rewards.tolist()} it made the advantages {advantages.tolist()}"
    remedy = "return finite numbers, also for a group whose rewards are equal"
    require(bool(advantages.isfinite().all()), "advantage_estimator", name, f"{made}: {remedy}")

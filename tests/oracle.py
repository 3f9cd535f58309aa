"""The papers' formulas, one number at a time in Python floats, to hold advantages, losses and steps against.

Knows neither torch nor grpo/. `settings` is anything with LossSection's field names. Gradients are central differences;
where a formula stops the gradient, the stopped factor is taken from the unmoved completion (`at`).

    GRPO         DeepSeekMath, arXiv:2402.03300, eq. 3 (surrogate) and 4 (KL)
    DAPO         arXiv:2503.14476, eq. 8 (two epsilons, mean over all tokens) and 13 (overlong punishment)
    Dr. GRPO     arXiv:2503.20783: divided by neither lengths nor the rewards' deviation
    GSPO         arXiv:2507.18071, eq. 5 and 7 (the sequence's ratio)
    CISPO        MiniMax-M1, arXiv:2506.13585, eq. 4 and 5
    SAPO         arXiv:2511.20347 (the soft gate)
    LUSPO        arXiv:2602.05261: GSPO, a sequence's loss times its length
    VESPO        arXiv:2602.10693: w^k e^(lambda (1 - w)) in the place of the sequence's ratio w
    dual clip    Ye et al., arXiv:1912.09729; INTELLECT-2, arXiv:2505.07291, writes it as min(r, delta)
    V3.2         DeepSeek-V3.2, arXiv:2512.02556: KL times the ratio; eq. 9, the off-policy sequence mask
    GDPO         arXiv:2601.05242: normalise each reward, add up, normalise
    top entropy  Beyond the 80/20 rule, arXiv:2506.01939
    distillation Agarwal et al., arXiv:2306.13649, section 2; its reverse KL by policy gradient: Lu et al. 2025
    k1, k2, k3   Schulman 2020, Approximating KL divergence
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

LIMIT = 20.0  # of a log-ratio before exp
STEP = 1e-5  # of a central difference
SAPO_TAU = {True: 1.0, False: 1.05}  # by whether the advantage is positive
VESPO = {True: (2.0, 3.0), False: (3.0, 2.0)}  # k and lambda by whether the advantage is 0 or more


@dataclass(frozen=True)
class Completion:
    """A completion: lists have a number for each token."""

    advantage: float
    logp: list[float]
    entropy: list[float]
    old: list[float] | None = None
    """log-probs of the policy before the first update on the completion; None: it is the current policy"""
    ref: list[float] | None = None
    sampling: list[float] | None = None  # log-probs as the sampler knew them, NaN where it did not
    teacher: list[float] | None = None  # log-probs of the teacher whose lead is part of the advantage, NaN without one
    high_entropy: list[bool] | None = None  # tokens that the policy term acts on; None: all


@dataclass(frozen=True)
class Size:
    """The size of a whole step."""

    sequences: int
    tokens: int
    high_entropy_tokens: int | None


def size(completions: Sequence[Completion]) -> Size:
    masks = [mark for completion in completions for mark in completion.high_entropy or []]
    masked = any(completion.high_entropy is not None for completion in completions)
    return Size(
        len(completions), sum(len(completion.logp) for completion in completions), sum(masks) if masked else None
    )


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def bounded_exp(log_ratio: float) -> float:
    return math.exp(clamp(log_ratio, -LIMIT, LIMIT))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def drawn(completion: Completion, at: Completion) -> list[float]:
    """Return the log-probs of the policy that drew the completion; those of the current one take no gradient."""
    return at.logp if completion.old is None else completion.old


def ratios(completion: Completion, at: Completion, level: str) -> list[float]:
    """Return each token's pi / pi_old, or for each token the sequence's (pi / pi_old)^(1 / length), GSPO eq. 7."""
    differences = [new - old for new, old in zip(completion.logp, drawn(completion, at), strict=True)]
    if level == "sequence" and differences:
        differences = [mean(differences)] * len(differences)
    return [bounded_exp(difference) for difference in differences]


def upper(settings) -> float:
    if settings.epsilon_high is not None:
        return settings.epsilon_high
    return 5.0 if settings.loss_type == "cispo" else settings.epsilon


def policy_term(logp: float, ratio: float, stopped_ratio: float, advantage: float, settings) -> float:
    if settings.loss_type == "cispo":
        return -min(stopped_ratio, upper(settings)) * advantage * logp
    if settings.loss_type == "sapo":
        tau = SAPO_TAU[advantage > 0]
        return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    clipped = clamp(ratio, 1 - settings.epsilon, 1 + upper(settings)) * advantage
    surrogate = min(ratio * advantage, clipped)
    if settings.delta is not None and advantage < 0:
        surrogate = max(surrogate, settings.delta * advantage)
    return -surrogate


def vespo_weight(at: Completion, settings) -> float:
    ratio = math.fsum(clamp(new - old, -LIMIT, LIMIT) for new, old in zip(at.logp, drawn(at, at), strict=True))
    for weight in importance(at, at, settings):
        ratio += clamp(math.log(weight), math.log(1e-8), LIMIT) if weight else math.log(1e-8)
    w = math.exp(clamp(ratio, math.log(1e-8), LIMIT))
    power, rate = VESPO[at.advantage >= 0]
    return w**power * math.exp(rate * (1 - w))


def kl(estimator: str, log_ratio: float, stopped_log_ratio: float) -> list[float]:
    """Return terms that add up to the KL of the policy from the reference; log_ratio is log ref - log pi."""

    def k3(d: float) -> float:
        exp = math.exp(d) if d <= LIMIT else math.exp(LIMIT) * (1 + d - LIMIT)  # beyond, the tangent
        return exp - d - 1

    if estimator == "k3+":  # the value of k3 with the gradient of k2
        return [k3(stopped_log_ratio), (log_ratio**2 - stopped_log_ratio**2) / 2]
    return [{"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": k3(log_ratio)}[estimator]]


def off_policy_kept(completion: Completion, at: Completion, settings) -> bool:
    """Drop a bad sequence that the policy has left (mean of log pi_old - log pi): DeepSeek-V3.2 eq. 9.

    A token whose log-prob the sampler did not know counts with a difference of 0, as in TRL.
    """
    if settings.off_policy_mask_threshold is None or completion.advantage >= 0 or not completion.logp:
        return True
    olds = drawn(completion, at) if completion.sampling is None else completion.sampling
    differences = [0.0 if math.isnan(old) else old - now for old, now in zip(olds, at.logp, strict=True)]
    return mean(differences) <= settings.off_policy_mask_threshold


def importance(completion: Completion, at: Completion, settings) -> list[float]:
    """Return each token's pi_old / pi_sampler, truncated or dropped beyond its bounds; a sequence's is the product."""
    mode = settings.importance_sampling_mode
    if mode in (None, "none") or completion.sampling is None:
        return [1.0] * len(completion.logp)
    differences = [
        0.0 if math.isnan(sampled) else old - sampled
        for old, sampled in zip(drawn(completion, at), completion.sampling, strict=True)
    ]
    if mode.startswith("sequence"):
        differences = [math.fsum(differences)] * len(differences)
    low = settings.importance_sampling_clip_min
    low = -math.inf if low is None else low
    high = settings.importance_sampling_clip_max
    high = math.inf if high is None else high
    weights = [bounded_exp(difference) for difference in differences]
    if mode.endswith("truncate"):
        return [clamp(weight, low, high) for weight in weights]
    return [weight if low <= weight <= high else 0.0 for weight in weights]


def terms(completion: Completion, settings, beta: float, at: Completion) -> list[float]:
    """Return the policy term and, where there is a reference, the KL term of each token, before any mean."""
    level = settings.importance_sampling_level
    weights = importance(completion, at, settings)
    kept = off_policy_kept(completion, at, settings)
    result = []
    olds = drawn(completion, at)
    for place, (ratio, stopped_ratio) in enumerate(
        zip(ratios(completion, at, level), ratios(at, at, level), strict=True)
    ):
        advantage = completion.advantage
        if completion.teacher is not None and not math.isnan(completion.teacher[place]):
            advantage += settings.distillation_coef * (completion.teacher[place] - olds[place])
        if kept and (completion.high_entropy is None or completion.high_entropy[place]):
            if settings.loss_type == "vespo":
                result.append(-vespo_weight(at, settings) * completion.advantage * completion.logp[place])
            else:
                policy = policy_term(completion.logp[place], ratio, stopped_ratio, advantage, settings)
                result.append(policy * weights[place])
        if completion.ref is not None:
            penalty = kl(
                settings.kl_estimator,
                completion.ref[place] - completion.logp[place],
                completion.ref[place] - at.logp[place],
            )
            result += [beta * term * (ratio if settings.use_bias_correction_kl else 1.0) for term in penalty]
    return result


def divisors(episodes: Sequence[Sequence[Completion]], settings, max_completion_length: int) -> list[float]:
    """Return by what the terms of each branch are divided, of one episode after the other.

    A mean over sequences is one over all branches, or over those episodes that have any: their tokens together.
    """
    by_branch = settings.branch_weighting == "branches"
    units = [[branch] for branches in episodes for branch in branches] if by_branch else [*filter(None, episodes)]
    lengths = [sum(len(branch.logp) for branch in unit) for unit in units]
    step = Size(len(units), sum(lengths), None)
    return [
        own_divisor(length, step, settings, max_completion_length)
        for unit, length in zip(units, lengths, strict=True)
        for _ in unit
    ]


def own_divisor(tokens: int, step: Size, settings, max_completion_length: int) -> float:
    """Return by what the terms of a sequence of so many tokens are divided."""
    return {
        "grpo": max(tokens, 1) * step.sequences,
        "sapo": max(tokens, 1) * step.sequences,
        "bnpo": step.tokens,
        "dapo": step.tokens,
        "cispo": step.tokens,
        "vespo": step.tokens,
        "luspo": step.sequences,
        "dr_grpo": step.sequences * max_completion_length,
    }[settings.loss_type]


def shares(
    completion: Completion,
    step: Size,
    settings,
    beta: float,
    max_completion_length: int,
    at: Completion | None = None,
    divisor: float | None = None,
) -> list[float]:
    """Return what this sequence adds to the step's loss, term by term; the sum over all sequences is the loss. Without
    a divisor each sequence counts by itself."""
    divisor = divisor or own_divisor(len(completion.logp), step, settings, max_completion_length)
    result = [term / divisor for term in terms(completion, settings, beta, at or completion)]
    if settings.entropy_coef:
        acted_on = step.tokens if step.high_entropy_tokens is None else step.high_entropy_tokens
        for place, entropy in enumerate(completion.entropy):
            if completion.high_entropy is None or completion.high_entropy[place]:
                result.append(-settings.entropy_coef * entropy / acted_on)
    return result


def loss(completions: Sequence[Completion], settings, beta: float, max_completion_length: int) -> float:
    step = size(completions)
    return math.fsum(
        share for completion in completions for share in shares(completion, step, settings, beta, max_completion_length)
    )


def gradient(
    completion: Completion, step: Size, settings, beta: float, max_completion_length: int, divisor: float | None = None
) -> tuple[list[float], list[float]]:
    """Return the gradient of the step's loss by this sequence's log-probs and by its entropies."""

    def slope(field: str, place: int) -> float:
        sides = []
        for shift in (STEP, -STEP):
            moved = list(getattr(completion, field))
            moved[place] += shift
            moved = replace(completion, **{field: moved})
            sides.append(shares(moved, step, settings, beta, max_completion_length, at=completion, divisor=divisor))
        # Term by term before the sum: next to a term of 1e8 a small slope would be lost.
        return math.fsum(up - down for up, down in zip(*sides, strict=True)) / (2 * STEP)

    places = range(len(completion.logp))
    by_entropy = [slope("entropy", place) for place in places] if settings.entropy_coef else [0.0 for _ in places]
    return [slope("logp", place) for place in places], by_entropy


def mark_high_entropy(completions: Sequence[Completion], quantile: float) -> list[Completion]:
    """Mark the tokens in the top `quantile` of all entropies (linear interpolation, the threshold itself is in)."""
    ordered = sorted(entropy for completion in completions for entropy in completion.entropy)
    if not ordered:
        return [replace(completion, high_entropy=[]) for completion in completions]
    place = (1 - quantile) * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    threshold = ordered[below] + (ordered[above] - ordered[below]) * (place - below)
    return [
        replace(completion, high_entropy=[entropy >= threshold for entropy in completion.entropy])
        for completion in completions
    ]


def known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation with ddof 1; 0 for less than two values."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def advantages(
    groups: Sequence[Sequence[float]],
    scale: str,
    tolerance: float = 0.0,
    penalties: Sequence[Sequence[float]] | None = None,
) -> list[list[float]]:
    """Return (reward - group mean) / (std + 1e-4), std of the group or of the batch; "none" leaves the division out.

    NaN is in no mean and has advantage 0, and so has a group whose rewards are within `tolerance` of each other. The
    penalties are taken off the rewards first; where the group's own std divides they make no signal.
    """
    judged = groups
    if penalties is not None:
        groups = [[r - p for r, p in zip(*rows, strict=True)] for rows in zip(groups, penalties, strict=True)]
        judged = judged if scale == "group" else groups
    batch = spread([reward for group in groups for reward in known(group)])
    result = []
    for group, to_judge in zip(groups, judged, strict=True):
        rewards, to_judge = known(group), known(to_judge)
        if not rewards or max(to_judge) - min(to_judge) <= tolerance:
            result.append([0.0] * len(group))
            continue
        divisor = {"group": spread(rewards) + 1e-4, "batch": batch + 1e-4, "none": 1.0}[scale]
        middle = statistics.fmean(rewards)
        result.append([0.0 if math.isnan(reward) else (reward - middle) / divisor for reward in group])
    return result


def weighted_sum(by_function: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Add up [functions][n] -> [n]; NaN is left out, a completion for which all functions have NaN is NaN. Those of
    weight 0 are left out first, unless all are."""
    if any(weights):
        by_function = [row for row, weight in zip(by_function, weights, strict=True) if weight]
        weights = [weight for weight in weights if weight]
    result = []
    for sampled in zip(*by_function, strict=True):
        terms = [weight * value for weight, value in zip(weights, sampled, strict=True) if not math.isnan(value)]
        result.append(math.fsum(terms) if terms else math.nan)
    return result


def decoupled_advantages(
    by_function: Sequence[Sequence[Sequence[float]]], weights: Sequence[float], tolerance: float = 0.0
) -> list[list[float]]:
    """Normalise [functions][groups][n] in each group, add up with weights, normalise over the batch: GDPO."""
    normalised = [
        [
            [math.nan if math.isnan(reward) else scaled for reward, scaled in zip(group, row, strict=True)]
            for group, row in zip(groups, advantages(groups, "group", tolerance), strict=True)
        ]
        for groups in by_function
    ]
    sums = [weighted_sum(rows, weights) for rows in zip(*normalised, strict=True)]
    every = [value for row in sums for value in known(row)]
    if not every:
        return [[0.0] * len(row) for row in sums]
    middle, std = statistics.fmean(every), spread(every)
    return [[0.0 if math.isnan(value) else (value - middle) / (std + 1e-4) for value in row] for row in sums]

"""The objective: the family of GRPO losses and their KL term. Pure functions of tensors, without ranks.

GRPO: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, equations 1 to 4. The others stand at their formulas.

Tensors of tokens are ragged and flat: [T] holds the completion tokens of S sequences, one sequence after the other.
What a loss divides by is the size of the whole optimizer step, so the sum over any cut of a step into micro-batches and
ranks is the loss of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from grpo.config.loss import LossSection

# exp(20) = 5e8. Where the KL is multiplied by the ratio two such factors meet, and the gradient's norm squares them:
# 6e34 a token, which float32 still holds.
_LOG_RATIO_LIMIT = 20.0
_LOG_LEAST = math.log(1e-8)  # of a sequence's ratio in vespo


@dataclass(frozen=True)
class StepSize:
    """What a whole optimizer step trains on, over all micro-batches and ranks."""

    sequences: int
    tokens: int
    """completion tokens of them"""
    high_entropy_tokens: int | None = None
    """those that the policy term and the entropy bonus act on where top_entropy_quantile is below 1; None: all"""


@dataclass(frozen=True)
class Tokens:
    """What the loss is computed from: T completion tokens of S sequences."""

    lengths: torch.Tensor
    """int64 [S], may be 0"""
    advantages: torch.Tensor
    """[S]"""
    logprobs: torch.Tensor
    """[T] of the policy, with gradient"""
    entropy: torch.Tensor
    """[T] in nats, with gradient where the entropy bonus needs it"""
    old_logprobs: torch.Tensor | None = None
    """[T] of the policy before the first update on these; None: it is the policy of now"""
    ref_logprobs: torch.Tensor | None = None
    """[T]; None leaves out the KL"""
    sampling_logprobs: torch.Tensor | None = None
    """[T] as the sampler knew them, NaN where it did not; None where nothing is made of them"""
    high_entropy: torch.Tensor | None = None
    """bool [T]; None: all"""


def grpo_loss(
    tokens: Tokens,
    step: StepSize,
    settings: LossSection,
    *,
    beta: float,
    entropy_coef: float,
    max_completion_length: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """These tokens' share of the step's loss, with the coefficients of this step. Returns (scalar, metrics).

    A metric is the values whose mean is reported, NaN left out: [T], or [S] where the probability ratio is one of
    sequences. The log of a ratio is clamped to +-20 before exp.
    """
    logprobs = tokens.logprobs
    old = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    per_sequence = settings.importance_sampling_level == "sequence"
    log_ratio = logprobs - old
    if per_sequence:
        log_ratio = _sequence_sums(log_ratio, tokens.lengths) / tokens.lengths.clamp(min=1)
    ratio = _exp(log_ratio)
    if per_sequence:
        ratio = _to_tokens(ratio, tokens.lengths, len(logprobs))
    if settings.loss_type == "vespo":
        weight = _vespo_weight(tokens, old, settings)
        policy = -_to_tokens(weight * tokens.advantages, tokens.lengths, len(logprobs)) * logprobs
        metrics = {"vespo/phi_seq_mean": weight}
    else:
        of_tokens = _to_tokens(tokens.advantages, tokens.lengths, len(logprobs))
        policy, metrics = _policy_term(ratio, of_tokens, logprobs, settings)
        if per_sequence:
            # One value a sequence, read off its first token.
            metrics = {name: _of_first_tokens(values, tokens.lengths) for name, values in metrics.items()}

    if settings.off_policy_mask_threshold is not None:
        keep = _near_policy(tokens, old, settings.off_policy_mask_threshold)
        policy = policy * _to_tokens(keep, tokens.lengths, len(logprobs))
        metrics["off_policy_masked"] = ~keep
    if tokens.high_entropy is not None:
        policy = policy * tokens.high_entropy
    if tokens.sampling_logprobs is not None:
        metrics["sampling/sampling_logp_difference"] = (old - tokens.sampling_logprobs).abs()
        if settings.importance_sampling_mode != "none":
            weight, per_token_weight = _sampler_correction(tokens, old, settings)
            if settings.loss_type != "vespo":  # there it is in the sequence's weight
                policy = policy * per_token_weight
            metrics["sampling/importance_sampling_ratio"] = weight

    per_token = policy
    if tokens.ref_logprobs is not None:
        kl = kl_divergence(logprobs, tokens.ref_logprobs, settings.kl_estimator)
        if settings.use_bias_correction_kl:
            kl = kl * ratio
        metrics["kl"] = kl
        if not settings.kl_in_reward:
            per_token = per_token + beta * kl
    weights = token_weights(tokens.lengths, len(logprobs), step, settings.loss_type, max_completion_length)
    loss = (per_token * weights).sum()
    if entropy_coef > 0:
        acted_on = tokens.entropy if tokens.high_entropy is None else tokens.entropy * tokens.high_entropy
        among = step.tokens if step.high_entropy_tokens is None else step.high_entropy_tokens
        loss = loss - entropy_coef * acted_on.sum() / max(among, 1)
    metrics["entropy"] = tokens.entropy
    if settings.use_adaptive_entropy:
        metrics["entropy_acted_on"] = tokens.entropy
        if tokens.high_entropy is not None:
            metrics["entropy_acted_on"] = tokens.entropy.masked_fill(~tokens.high_entropy, torch.nan)
    return loss, {name: values.detach().float() for name, values in metrics.items()}


def token_weights(
    lengths: torch.Tensor, count: int, step: StepSize, loss_type: str, max_completion_length: int
) -> torch.Tensor:
    """Each token's weight in the step's sum, float32 [T], for sequences of these lengths (int64 [S]), `count` in all.

    grpo, sapo: the mean over sequences of the mean over a sequence's tokens (DeepSeekMath, equation 3). An empty
    completion has no token and adds 0, and still counts as a sequence.
    bnpo, dapo, cispo: the mean over all tokens of the step (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 8).
    vespo: the same, as TRL has it.
    dr_grpo: the sum over sequences x max_completion_length (Liu et al. 2025, arXiv:2503.20783, section 3.2).
    luspo: the mean over sequences of the sum over a sequence's tokens (Liu et al. 2026, arXiv:2602.05261).
    """
    if loss_type in ("grpo", "sapo"):
        shares = 1.0 / (lengths.clamp(min=1) * max(step.sequences, 1))
    else:
        whole = {"dr_grpo": step.sequences * max_completion_length, "luspo": step.sequences}.get(loss_type, step.tokens)
        shares = torch.full_like(lengths, 1.0 / max(whole, 1), dtype=torch.float64)
    return _to_tokens(shares.float(), lengths, count)


def kl_divergence(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates of KL(policy || reference) from single tokens, with d = ref - logp (Schulman 2020, "Approximating KL
    divergence", http://joschu.net/blog/kl-approx.html):

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1

    k3+ has the value of k3 and the gradient of k2, which is the unbiased one on-policy (k3's is not). All shapes equal.

    Where d > 20 the tangent of exp at 20 stands for exp, e^20 (d - 19): it cannot overflow, and a token that far below
    the reference is pulled back as strongly as one at 20. There is no bound below: far above the reference k3's slope
    goes to 1, and stays.
    """
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    bounded = difference.clamp(max=_LOG_RATIO_LIMIT)
    k3 = torch.exp(bounded) * (1 + difference - bounded) - difference - 1
    if estimator == "k3":
        return k3
    k2 = difference.square() / 2
    return k3.detach() + k2 - k2.detach()


def experts_chosen(router_logits: torch.Tensor, per_token: int) -> torch.Tensor:
    """How many tokens chose each expert, the mean of all layers: [layers, T, experts] -> float64 [experts]."""
    chosen = router_logits.softmax(dim=-1).topk(per_token, dim=-1).indices
    # bincount would wait for a GPU to know how many there are.
    counts = torch.zeros(router_logits.shape[-1], dtype=torch.float64, device=router_logits.device)
    counts.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.float64))
    return counts / len(router_logits)


def balance_loss(router_logits: torch.Tensor, chosen: torch.Tensor, step: StepSize) -> torch.Tensor:
    """These tokens' share of the load-balancing loss of the whole step, experts x sum of f x P.

    Switch Transformer, Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6.

    f is the share of the step's tokens that chose an expert, `chosen` / tokens; P the router's mean probability for it.
    f has no gradient, and with the whole step's f the sum over any cut is the loss of the step, as transformers'
    load_balancing_loss_func has it of all these tokens at once. router_logits: [layers, T, experts].
    """
    layers, _, experts = router_logits.shape
    shares = chosen.to(router_logits.device) / max(step.tokens, 1)
    probabilities = router_logits.softmax(dim=-1).sum(dim=(0, 1), dtype=torch.float32)
    return experts * (shares.float() * probabilities).sum() / (layers * max(step.tokens, 1))


def adapt_beta(beta: float, kl: float, sequences: int, target: float, horizon: float) -> float:
    """The KL coefficient for the next step: it grows where the measured KL (nats a token) is above the target.

    Ziegler et al. 2019, arXiv:1909.08593, section 2.2; as verl has it, a step counts as many as it has sequences.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * sequences / horizon)


def applied_entropy_coef(entropy_coef: float, last_entropy: float | None, settings: LossSection) -> float:
    """The coefficient of the entropy bonus in a step. An adaptive one acts only where the last step's entropy was at or
    below the target; before the first step it is not known. (Skywork-OR1, He et al. 2025, arXiv:2505.22312.)"""
    if not settings.use_adaptive_entropy:
        return entropy_coef
    return entropy_coef if last_entropy is not None and last_entropy <= settings.entropy_target else 0.0


def adapt_entropy_coef(entropy_coef: float, entropy: float, settings: LossSection) -> float:
    """The coefficient for the next step: a delta more where the entropy was at or below the target, else a delta less,
    up to the bounds. (Skywork-OR1, as above.)"""
    if entropy <= settings.entropy_target:
        return min(entropy_coef + settings.entropy_coef_delta, settings.entropy_coef_max)
    return max(entropy_coef - settings.entropy_coef_delta, settings.entropy_coef_min)


def _vespo_weight(tokens: Tokens, old: torch.Tensor, settings: LossSection) -> torch.Tensor:
    """[S] w^k e^(lambda (1 - w)) of a sequence's probability ratio w, without length normalisation or gradient; 1 at 1.

    VESPO, Shen et al. 2026, arXiv:2602.10693. Where the sampler is corrected, w is policy / sampler. The bounds on
    log-ratios are TRL's.
    """
    log_ratio = (tokens.logprobs.detach() - old).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    if tokens.sampling_logprobs is not None and settings.importance_sampling_mode != "none":
        _, corrected = _sampler_correction(tokens, old, settings)
        log_ratio = log_ratio + corrected.log().clamp(_LOG_LEAST, _LOG_RATIO_LIMIT)
    log_ratio = _sequence_sums(log_ratio, tokens.lengths).clamp(_LOG_LEAST, _LOG_RATIO_LIMIT)
    good = tokens.advantages >= 0
    power = torch.where(good, settings.vespo_k_pos, settings.vespo_k_neg)
    rate = torch.where(good, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    weight = torch.exp(rate + power * log_ratio - rate * log_ratio.exp())
    return weight.nan_to_num(nan=0.0, posinf=0.0)


def _policy_term(
    ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor, settings: LossSection
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy's loss before any weight, and what was clipped. All [T]."""
    high = settings.upper_clip
    if settings.loss_type == "cispo":
        # MiniMax-M1, arXiv:2506.13585, equations 4 and 5: the weight is clipped, no token loses its gradient.
        clipped = (ratio > high) & (advantages > 0)
        return -ratio.clamp(max=high).detach() * advantages * logprobs, {"cispo_clip_ratio": clipped}
    if settings.loss_type == "sapo":
        # Gao et al. 2025, arXiv:2511.20347, equations 5 and 6: a sigmoid gate in the place of the clip.
        gate = torch.where(advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
        return -advantages * torch.sigmoid(gate * (ratio - 1)) * 4 / gate, {}
    # With delta, a negative advantage's loss ends at delta |A|: the two-sided clip of INTELLECT-2 (arXiv:2505.07291),
    # which is the dual clip of Ye et al. 2020 (arXiv:1912.09729, equation 5).
    bounded = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    within = ratio.clamp(1 - settings.epsilon, 1 + high)
    low_clipped = (bounded < 1 - settings.epsilon) & (advantages < 0)
    high_clipped = (bounded > 1 + high) & (advantages > 0)
    metrics = {
        "clip_ratio/low_mean": low_clipped,
        "clip_ratio/high_mean": high_clipped,
        "clip_ratio/region_mean": low_clipped | high_clipped,
    }
    return -torch.minimum(bounded * advantages, within * advantages), metrics


def _near_policy(tokens: Tokens, old: torch.Tensor, threshold: float) -> torch.Tensor:
    """bool [S]: a sequence is kept unless it was worse than its group and the policy has moved away from it.

    DeepSeek-V3.2, arXiv:2512.02556, equation 9. The distance is the mean over tokens of sampler - policy.
    """
    sampled = old if tokens.sampling_logprobs is None else tokens.sampling_logprobs
    # A token of which the sampler said nothing is no evidence of a distance.
    away = (sampled - tokens.logprobs.detach()).nan_to_num(nan=0.0)
    distance = _sequence_sums(away, tokens.lengths) / tokens.lengths.clamp(min=1)
    return (tokens.advantages >= 0) | (distance <= threshold)


def _sampler_correction(tokens: Tokens, old: torch.Tensor, settings: LossSection) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights old / sampler, truncated or masked: of tokens [T] or sequences [S], and what that is for each token [T].

    Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", https://fengyao.notion.site/off-policy-rl.
    """
    level, kind = settings.importance_sampling_mode.split("_")
    difference = (old - tokens.sampling_logprobs).nan_to_num(nan=0.0)  # where the sampler said nothing, the weight is 1
    weight = _exp(_sequence_sums(difference, tokens.lengths) if level == "sequence" else difference)
    low, high = settings.importance_sampling_clip_min, settings.importance_sampling_clip_max
    low, high = (0.0 if low is None else low), (torch.inf if high is None else high)
    if kind == "truncate":
        weight = weight.clamp(low, high)
    else:
        weight = weight.masked_fill((weight < low) | (weight > high), 0.0)
    return weight, _to_tokens(weight, tokens.lengths, len(old)) if level == "sequence" else weight


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def _to_tokens(of_sequences: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """[S] -> [T], a sequence's value at each of its tokens: their `count` is given, as a GPU would be waited for."""
    return of_sequences.repeat_interleave(lengths, dim=0, output_size=count)


def _sequence_sums(of_tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[T] -> [S]."""
    owner = _to_tokens(torch.arange(len(lengths), device=lengths.device), lengths, len(of_tokens))
    return of_tokens.new_zeros(len(lengths)).index_add(0, owner, of_tokens)


def _of_first_tokens(of_tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[T] -> float32 [S], the value at each sequence's first token, NaN where it has none."""
    padded = nn.functional.pad(of_tokens.float(), (0, 1), value=torch.nan)
    return padded[lengths.cumsum(0) - lengths].masked_fill(lengths == 0, torch.nan)

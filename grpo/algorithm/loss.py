"""Computes the objective: a loss type (loss_types.py), masks, the sampler's correction, KL term and entropy bonus.

GRPO: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, equations 1 to 4. Pure functions of tensors, without ranks. A
loss divides by the size of the whole optimizer step: the sum over any cut into micro-batches and ranks is the step's.
"""

import math
from dataclasses import replace

import torch

from grpo.algorithm.loss_types import LOG_RATIO_LIMIT, LOSSES, LossInputs, StepSize, Tokens, exp_bounded, find_loss
from grpo.config.errors import ConfigError
from grpo.config.loss_settings import LossSection

DISTANCE = "sampling/sampling_logp_difference/mean"
HORIZON = 10_000  # completions over which an adaptive beta follows: Ziegler et al.'s, and verl's
# Sums of probabilities in float32 are that exact: the other tokens have at least this.
_LEAST_REST = 1e-7


def grpo_loss(
    tokens: Tokens,
    step: StepSize,
    settings: LossSection,
    *,
    beta: float,
    entropy_coef: float,
    max_completion_length: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return these tokens' share of the step's loss, a scalar, and metrics. A metric is reported as the mean of its
    values, or the statistic after a colon in its name, without NaN: [T], or [S] if probability ratios are of sequences.
    The log of a ratio is clamped to +-20 before exp."""
    logprobs, entropy, high = tokens.logprobs, tokens.entropy, tokens.high_entropy
    old = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    weight = sampler_weights = None
    if tokens.sampling_logprobs is not None and settings.importance_sampling_mode not in (None, "none"):
        weight, sampler_weights = _sampler_correction(tokens, old, settings)
    token_advantages, of_teacher = _with_teacher(tokens, old, settings)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        ratio=_ratio(tokens, old, settings.importance_sampling_level),
        advantages=token_advantages,
        sequence_advantages=tokens.advantages,
        entropy=entropy,
        sampler_weights=sampler_weights,
        lengths=tokens.lengths,
        completion_lengths=tokens.lengths if tokens.completion_lengths is None else tokens.completion_lengths,
        step=step,
        max_completion_length=max_completion_length,
    )
    per_token, weights, metrics = find_loss(settings.loss_type)(inputs, settings)
    metrics = dict(metrics) | of_teacher
    if settings.off_policy_mask_threshold is not None:
        keep = _near_policy(tokens, old, settings.off_policy_mask_threshold)
        per_token = per_token * inputs.to_tokens(keep)
        metrics["off_policy_masked"] = ~keep
    if high is not None:
        per_token = per_token * high
    metrics |= _of_sampler(tokens, old, weight)
    if sampler_weights is not None and settings.loss_type != "vespo":  # which has them in its policy term
        per_token = per_token * sampler_weights
    if tokens.ref_logprobs is not None:
        metrics["kl"] = kl = _kl(tokens, old, settings)
        if not settings.kl_in_reward:
            per_token = per_token + beta * kl
    if tokens.policy_top is not None:
        metrics["distillation/loss"] = distance = _from_teacher(tokens, settings)
        per_token = per_token + settings.distillation_coef * distance.nan_to_num(nan=0.0)
    loss = (per_token * weights).sum()
    if settings.has_entropy_bonus:
        metrics["policy_loss:sum"] = loss.unsqueeze(0)
    if entropy_coef > 0:
        divisor = step.tokens if step.high_entropy_tokens is None else step.high_entropy_tokens
        loss = loss - entropy_coef * (entropy if high is None else entropy * high).sum() / max(divisor, 1)
    metrics["entropy"] = entropy
    if settings.use_adaptive_entropy:
        metrics["entropy_acted_on:none"] = entropy if high is None else entropy.masked_fill(~high, torch.nan)
    return loss, {name: values.detach().float() for name, values in metrics.items()}


def try_loss(settings: LossSection) -> None:
    """Call a user's loss type on three small sequences, one of them empty. Raises ConfigError if it fails."""
    if settings.loss_type in LOSSES:
        return
    tokens = Tokens(
        lengths=torch.tensor([2, 0, 3]),
        advantages=torch.tensor([1.0, 0.0, -0.5]),
        logprobs=torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], requires_grad=True),
        entropy=torch.ones(5),
        old_logprobs=torch.tensor([-1.5, -2.0, -0.5, -2.5, -1.0]),
        sampling_logprobs=torch.tensor([-1.5, torch.nan, -0.5, -2.5, -1.0]),
    )
    try:
        grpo_loss(
            tokens, StepSize(sequences=3, tokens=5), settings, beta=0.0, entropy_coef=0.0, max_completion_length=4
        )
    except ConfigError:
        raise
    except Exception as error:  # it may raise anything
        reason = f"it failed on three small sequences ({error!r}): correct it"
        raise ConfigError(f"loss_type={settings.loss_type!r}: {reason}") from error


def _ratio(tokens: Tokens, old: torch.Tensor, level: str) -> torch.Tensor:
    """Return policy / old policy, [T]: of each token, or of its sequence, (pi / pi_old)^(1 / length) (GSPO, Zheng et
    al. 2025, arXiv:2507.18071, equation 7)."""
    log_ratio = tokens.logprobs - old
    if level == "token":
        return exp_bounded(log_ratio)
    log_ratio = tokens.to_sequences(log_ratio) / tokens.lengths.clamp(min=1)
    return tokens.to_tokens(exp_bounded(log_ratio))


def _with_teacher(
    tokens: Tokens, old: torch.Tensor, settings: LossSection
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return each token's advantage, [T], and metrics of the teacher. Without a divergence the advantage has the
    teacher's part, the log-prob of the teacher less that of the policy which drew the token: the reverse KL by policy
    gradient (Lu and Thinking Machines 2025, https://thinkingmachines.ai/blog/on-policy-distillation)."""
    advantages = tokens.to_tokens(tokens.advantages)
    if tokens.teacher_logprobs is None:
        return advantages, {}
    behind = old - tokens.teacher_logprobs
    if settings.distillation_loss is None:
        advantages = advantages - settings.distillation_coef * behind.nan_to_num(nan=0.0)
    return advantages, {"distillation/reverse_kl": behind}


def _from_teacher(tokens: Tokens, settings: LossSection) -> torch.Tensor:
    """Return the policy's divergence from the teacher, [T]: without a teacher NaN, and no gradient."""
    known = ~tokens.teacher_logprobs.isnan()
    own = tokens.policy_top.detach()  # instead of NaN, which would reach the gradient
    distance = teacher_divergence(
        torch.where(known.unsqueeze(1), tokens.policy_top, own),
        torch.where(known.unsqueeze(1), tokens.teacher_top, own),
        settings.distillation_loss,
    )
    return distance.masked_fill(~known, torch.nan)


def teacher_divergence(student: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a divergence of two distributions at each position, float32 [T], with the gradient of `student`.

    student, teacher: float32 [T, k], both models' log-probs of the teacher's k likeliest tokens; all other tokens are
    one more. With p the student's and q the teacher's k + 1 probabilities (Agarwal et al. 2024, "On-Policy
    Distillation of Language Models", arXiv:2306.13649, section 2):

        reverse_kl  sum p log(p / q)        forward_kl  sum q log(q / p)
        jsd         (forward_kl of q and m + forward_kl of p and m) / 2, with m = (p + q) / 2
    """
    student, teacher = _with_rest(student), _with_rest(teacher)
    if kind == "reverse_kl":
        distance = _kl_of_rows(student, teacher)
    elif kind == "forward_kl":
        distance = _kl_of_rows(teacher, student)
    else:
        middle = torch.logaddexp(student, teacher) - math.log(2)
        distance = (_kl_of_rows(student, middle) + _kl_of_rows(teacher, middle)) / 2
    return distance.float()


def _kl_of_rows(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    return (of.exp() * (of - to)).sum(dim=1)


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Add the log of the rest of the probability: [T, k] -> float64 [T, k + 1]."""
    logprobs = logprobs.double()
    rest = (1 - logprobs.exp().sum(dim=1, keepdim=True)).clamp(min=_LEAST_REST).log()
    return torch.cat([logprobs, rest], dim=1)


def _kl(tokens: Tokens, old: torch.Tensor, settings: LossSection) -> torch.Tensor:
    """Return the KL, with use_bias_correction_kl KL x ratio, [T] (DeepSeek-V3.2, arXiv:2512.02556). In float64: with k3
    and d = ref - logp, the slopes of both factors are near exp(d), and cancel up to -d."""
    if not settings.use_bias_correction_kl:
        return kl_divergence(tokens.logprobs, tokens.ref_logprobs, settings.kl_estimator)
    exact = replace(tokens, logprobs=tokens.logprobs.double())
    ratio = _ratio(exact, old, settings.importance_sampling_level)
    kl = kl_divergence(exact.logprobs, tokens.ref_logprobs, settings.kl_estimator) * ratio
    return kl.to(tokens.logprobs.dtype)


def _near_policy(tokens: Tokens, old: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return bool [S]: keep a sequence unless it was worse than its group and the policy has moved away from it.
    DeepSeek-V3.2, arXiv:2512.02556, equation 9. The distance is the mean over tokens of sampler - policy."""
    sampled = old if tokens.sampling_logprobs is None else tokens.sampling_logprobs
    # Tokens without the sampler's log-prob count as distance 0.
    away = (sampled - tokens.logprobs.detach()).nan_to_num(nan=0.0)
    distance = tokens.to_sequences(away) / tokens.lengths.clamp(min=1)
    return (tokens.advantages >= 0) | (distance <= threshold)


def _sampler_correction(tokens: Tokens, old: torch.Tensor, settings: LossSection) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights old / sampler, truncated or masked: of tokens [T] or sequences [S], and of each token [T].
    Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", https://fengyao.notion.site/off-policy-rl."""
    level, kind = settings.importance_sampling_mode.split("_")
    # Without the sampler's log-prob the weight is 1.
    difference = (old - tokens.sampling_logprobs).nan_to_num(nan=0.0)
    weight = exp_bounded(tokens.to_sequences(difference) if level == "sequence" else difference)
    low, high = settings.importance_sampling_clip_min, settings.importance_sampling_clip_max
    low, high = (0.0 if low is None else low), (torch.inf if high is None else high)
    if kind == "truncate":
        weight = weight.clamp(low, high)
    else:
        weight = weight.masked_fill((weight < low) | (weight > high), 0.0)
    return weight, tokens.to_tokens(weight) if level == "sequence" else weight


def _of_sampler(tokens: Tokens, old: torch.Tensor, weight: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the metrics of the sampler's distance from the policy, and of the correction's weights."""
    if tokens.sampling_logprobs is None:
        return {}
    difference = (old - tokens.sampling_logprobs).abs()
    distances = {DISTANCE: difference, "sampling/sampling_logp_difference/max:max": difference}
    names = () if weight is None else ("mean", "max:max", "min:min")
    return distances | {f"sampling/importance_sampling_ratio/{name}": weight for name in names}


def experts_chosen(router_logits: torch.Tensor, per_token: int) -> torch.Tensor:
    """Count the tokens that chose each expert, the mean of all layers: [layers, T, experts] -> float64 [experts]."""
    chosen = router_logits.softmax(dim=-1).topk(per_token, dim=-1).indices
    # bincount would wait for a GPU.
    counts = torch.zeros(router_logits.shape[-1], dtype=torch.float64, device=router_logits.device)
    counts.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.float64))
    return counts / len(router_logits)


def balance_loss(router_logits: torch.Tensor, chosen: torch.Tensor, step: StepSize) -> torch.Tensor:
    """Return these tokens' share of the step's load-balancing loss, experts x sum of f x P (Fedus et al. 2021, "Switch
    Transformers", arXiv:2101.03961, equations 4 to 6).

    f is the share of the step's tokens that chose an expert, `chosen` / tokens, without gradient; P the router's mean
    probability for it. The sum over any cut of the step is transformers' load_balancing_loss_func of all its tokens.
    router_logits: [layers, T, experts].
    """
    layers, _, experts = router_logits.shape
    shares = chosen.to(router_logits.device) / max(step.tokens, 1)
    probabilities = router_logits.softmax(dim=-1).sum(dim=(0, 1), dtype=torch.float32)
    return experts * (shares.float() * probabilities).sum() / (layers * max(step.tokens, 1))


def kl_divergence(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) from single tokens, with d = ref - logp (Schulman 2020, "Approximating KL
    divergence", http://joschu.net/blog/kl-approx.html):

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1

    k3+ has the value of k3 and the gradient of k2, which is unbiased on-policy (k3's is not). All shapes equal.

    Above d = 20 the tangent e^20 (d - 19) replaces exp: it cannot overflow, and keeps the slope at 20. Below no bound
    is needed: k3's slope goes to 1.
    """
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    bounded = difference.clamp(max=LOG_RATIO_LIMIT)
    k3 = torch.exp(bounded) * (1 + difference - bounded) - difference - 1
    if estimator == "k3":
        return k3
    k2 = difference.square() / 2
    return k3.detach() + k2 - k2.detach()


def adapt_beta(beta: float, kl: float, *, sequences: float, target: float) -> float:
    """Return the next step's KL coefficient: it grows if the measured KL (nats a token) is above the target. Ziegler et
    al. 2019, arXiv:1909.08593, section 2.2; as in verl, a step of n sequences counts n times."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * sequences / HORIZON)


def applied_entropy_coef(entropy_coef: float, last_entropy: float | None, settings: LossSection) -> float:
    """Return the coefficient of the entropy bonus in a step. An adaptive one (Skywork-OR1, He et al. 2025,
    arXiv:2505.22312) acts only if the last step's entropy, None before the first, was at or below the target."""
    if not settings.use_adaptive_entropy:
        return entropy_coef
    return entropy_coef if last_entropy is not None and last_entropy <= settings.entropy_target else 0.0


def adapt_entropy_coef(entropy_coef: float, entropy: float, settings: LossSection) -> float:
    """Return the next step's coefficient: up if the entropy was at or below the target, else down, within bounds."""
    if entropy <= settings.entropy_target:
        return min(entropy_coef + settings.entropy_coef_delta, settings.entropy_coef_max)
    return max(entropy_coef - settings.entropy_coef_delta, settings.entropy_coef_min)

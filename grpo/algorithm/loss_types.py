"""Computes each loss type, by a function with its paper, and the user's. Pure functions of tensors, without ranks.

A loss type is a policy term for each token, and a weight for each token, by which the step's sum is divided. It takes
`LossInputs` and the settings and returns three things:

    policy    [T] policy term of each token, with gradient
    weights   [T] weight of each token in the step's loss, without gradient
    metrics   values by name, [T] or [S]; the metric is their mean, or as after a colon in the name: "ratio:max"

loss.py adds masks, the sampler's correction, KL and entropy bonus. The loss of a step is the sum over its tokens of
(policy + beta x KL) x weights, and so must be the sum over any cut of the step: weights divide by the size of the whole
step (`inputs.step`), never by a micro-batch's. Your own function goes into a file: see docs/recipes.md.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from grpo.config.errors import ConfigError, one_line, require
from grpo.config.loss_settings import LossSection
from grpo.config.user_code import load_function, modes_kept

# exp(20) = 5e8. KL x ratio has two such factors, and the gradient's norm squares them: float32 holds 6e34 a token.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """The size of a whole optimizer step, over all micro-batches and ranks."""

    sequences: int  # of which means are taken: with branch_weighting tokens an agent's episode is one, else each branch
    tokens: int  # completion tokens of these sequences
    high_entropy_tokens: int | None = None
    """tokens in the policy term and the entropy bonus, if top_entropy_quantile is below 1; None: all"""


class _OfSequences:
    """T completion tokens of S sequences, one sequence after the other."""

    lengths: torch.Tensor  # int64 [S]
    logprobs: torch.Tensor  # [T]

    def to_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat each sequence's value at each of its tokens, [S] -> [T]. The known T avoids waiting for a GPU."""
        return values.repeat_interleave(self.lengths, dim=0, output_size=len(self.logprobs))

    def to_sequences(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values of each sequence's tokens, [T] -> [S]."""
        owner = self.to_tokens(torch.arange(len(self.lengths), device=self.lengths.device))
        return values.new_zeros(len(self.lengths)).index_add(0, owner, values)


@dataclass(frozen=True, kw_only=True)
class Tokens(_OfSequences):
    """The inputs of the loss."""

    lengths: torch.Tensor  # int64 [S] tokens of each sequence, may be 0
    advantages: torch.Tensor  # [S] advantage of each sequence
    logprobs: torch.Tensor  # [T] log-probs of the policy, with gradient
    entropy: torch.Tensor  # [T] entropy of the policy in nats, with gradient if the entropy bonus needs it
    completion_lengths: torch.Tensor | None = None
    """int64 [S] tokens of all branches of each branch's episode; None: each sequence counts by itself"""
    old_logprobs: torch.Tensor | None = None
    """[T] log-probs of the policy before the first update on these tokens; None: it is the current policy"""
    ref_logprobs: torch.Tensor | None = None  # [T] log-probs of the reference; None leaves out the KL
    sampling_logprobs: torch.Tensor | None = None  # [T] the sampler's log-probs, NaN if unknown; None if unused
    high_entropy: torch.Tensor | None = None  # bool [T] tokens in the policy term; None: all
    teacher_logprobs: torch.Tensor | None = None
    """[T] log-probs of a teacher, NaN if a prompt's source has none; None without teachers"""
    teacher_top: torch.Tensor | None = None  # [T, k] a teacher's log-probs of its likeliest tokens, NaN as above
    policy_top: torch.Tensor | None = None  # [T, k] the policy's log-probs of these, with gradient


def exp_bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of the log-ratio clamped to +-20."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


# The papers' constants, by the sign of the advantage; TRL's defaults too.
SAPO_TEMPERATURE_POS, SAPO_TEMPERATURE_NEG = 1.0, 1.05  # the gate closes faster for negative advantages
VESPO_K_POS, VESPO_LAMBDA_POS = 2.0, 3.0  # the ratio's power, and the rate at which a ratio above 1 loses weight
VESPO_K_NEG, VESPO_LAMBDA_NEG = 3.0, 2.0
_LOG_LEAST = math.log(1e-8)  # of a sequence's ratio in vespo


@dataclass(frozen=True, kw_only=True)
class LossInputs(_OfSequences):
    """The inputs of a loss type, and the size of the whole step."""

    logprobs: torch.Tensor  # [T] log-probs of the policy, with gradient
    old_logprobs: torch.Tensor  # [T] log-probs of the policy before the first update on the tokens
    ratio: torch.Tensor
    """[T] probability ratio, exp(logprobs - old_logprobs), with gradient; with importance_sampling_level sequence the
    geometric mean of the sequence's ratios, at each of its tokens"""
    advantages: torch.Tensor  # [T] advantage of the token's sequence
    sequence_advantages: torch.Tensor  # [S] advantage of each sequence
    entropy: torch.Tensor  # [T] entropy of the policy in nats
    sampler_weights: torch.Tensor | None
    """[T] correction for another sampler (importance_sampling_mode), by which the policy term is multiplied later"""
    lengths: torch.Tensor  # int64 [S] tokens of each sequence, may be 0
    completion_lengths: torch.Tensor
    """int64 [S] tokens of a sequence's mean: `lengths`, with branch_weighting tokens those of its episode's branches"""
    step: StepSize
    max_completion_length: int


LossTerms = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
LossFunction = Callable[[LossInputs, LossSection], LossTerms]


def cispo(inputs: LossInputs, settings: LossSection) -> LossTerms:
    """Weigh log p by -clip(ratio) A, the ratio without gradient: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. The
    weight is clipped, and so no token loses its gradient. The mean is over all tokens of the step."""
    high = settings.upper_clip
    clipped = (inputs.ratio > high) & (inputs.advantages > 0)
    policy = -inputs.ratio.clamp(max=high).detach() * inputs.advantages * inputs.logprobs
    return policy, mean_of_tokens(inputs), {"cispo_clip_ratio": one_per_ratio(clipped, inputs, settings)}


def sapo(inputs: LossInputs, settings: LossSection) -> LossTerms:
    """Use a sigmoid gate instead of the clip: SAPO, Gao et al. 2025, arXiv:2511.20347, equations 5 and 6."""
    gate = torch.where(inputs.advantages > 0, SAPO_TEMPERATURE_POS, SAPO_TEMPERATURE_NEG)
    policy = -inputs.advantages * torch.sigmoid(gate * (inputs.ratio - 1)) * 4 / gate
    return policy, mean_of_sequence_means(inputs), {}


def vespo(inputs: LossInputs, settings: LossSection) -> LossTerms:
    """Weigh log p by -w^k e^(lambda (1 - w)) A: VESPO, Shen et al. 2026, arXiv:2602.10693. w is the probability ratio
    of a sequence, without length normalisation or gradient, to the sampler if that is corrected, and the factor 1 where
    it is 1. The bounds on log-ratios and the mean over all tokens are TRL's."""
    log_ratio = (inputs.logprobs.detach() - inputs.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if inputs.sampler_weights is not None:
        log_ratio = log_ratio + inputs.sampler_weights.log().clamp(_LOG_LEAST, LOG_RATIO_LIMIT)
    log_ratio = inputs.to_sequences(log_ratio).clamp(_LOG_LEAST, LOG_RATIO_LIMIT)
    good = inputs.sequence_advantages >= 0
    power = torch.where(good, VESPO_K_POS, VESPO_K_NEG)
    rate = torch.where(good, VESPO_LAMBDA_POS, VESPO_LAMBDA_NEG)
    factor = torch.exp(rate + power * log_ratio - rate * log_ratio.exp()).nan_to_num(nan=0.0, posinf=0.0)
    policy = -inputs.to_tokens(factor * inputs.sequence_advantages) * inputs.logprobs
    return policy, mean_of_tokens(inputs), {"vespo/phi_seq_mean": factor}


def clipped_term(inputs: LossInputs, settings: LossSection) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the policy term -min(ratio A, clip(ratio) A), [T], and the shares that were clipped. With `delta`, a
    negative advantage's loss ends at delta |A|: the two-sided clip of INTELLECT-2 (arXiv:2505.07291), which is the dual
    clip of Ye et al. 2020 (arXiv:1912.09729, equation 5)."""
    low, high, advantages = 1 - settings.epsilon, 1 + settings.upper_clip, inputs.advantages
    bounded = inputs.ratio if settings.delta is None else inputs.ratio.clamp(max=settings.delta)
    low_clipped = (bounded < low) & (advantages < 0)
    high_clipped = (bounded > high) & (advantages > 0)
    by_sequence = [inputs.to_sequences(clipped.float()) / inputs.lengths for clipped in (low_clipped, high_clipped)]
    metrics = {
        "clip_ratio/low_mean": one_per_ratio(low_clipped, inputs, settings),
        "clip_ratio/high_mean": one_per_ratio(high_clipped, inputs, settings),
        "clip_ratio/region_mean": one_per_ratio(low_clipped | high_clipped, inputs, settings),
        "clip_ratio/low_min:min": by_sequence[0],
        "clip_ratio/high_max:max": by_sequence[1],
    }
    return -torch.minimum(bounded * advantages, inputs.ratio.clamp(low, high) * advantages), metrics


def one_per_ratio(values: torch.Tensor, inputs: LossInputs, settings: LossSection) -> torch.Tensor:
    """Keep one value for each ratio: all of [T], or if ratios are of sequences their means [S], NaN without a token."""
    if settings.importance_sampling_level == "token":
        return values
    return inputs.to_sequences(values.float()) / inputs.lengths


def mean_of_sequence_means(inputs: LossInputs) -> torch.Tensor:
    """Return the weights, float32 [T], of a mean over sequences, empty ones too, of the mean over their tokens."""
    shares = 1.0 / (inputs.completion_lengths.clamp(min=1) * max(inputs.step.sequences, 1))
    return inputs.to_tokens(shares.float())


def mean_of_tokens(inputs: LossInputs) -> torch.Tensor:
    """Return the weights, float32 [T], of a mean over all tokens of the step."""
    return divided_by(inputs.step.tokens, inputs)


def divided_by(divisor: int, inputs: LossInputs) -> torch.Tensor:
    """Return equal weights 1 / divisor, float32 [T]."""
    shares = torch.full_like(inputs.lengths, 1.0 / max(divisor, 1), dtype=torch.float64)
    return inputs.to_tokens(shares.float())


def clipped(make_weights: Callable[[LossInputs], torch.Tensor]) -> LossFunction:
    """Return the loss type with the clipped policy term and these weights."""

    def loss(inputs: LossInputs, settings: LossSection) -> LossTerms:
        policy, metrics = clipped_term(inputs, settings)
        return policy, make_weights(inputs), metrics

    return loss


LOSSES: dict[str, LossFunction] = {
    # The mean over sequences of token means: DeepSeekMath, arXiv:2402.03300, equation 3.
    "grpo": clipped(mean_of_sequence_means),
    # TRL divides by the tokens of a micro-batch, but a result must not depend on the cut: so it is dapo here.
    "bnpo": clipped(mean_of_tokens),
    # The sum over tokens, divided by a constant: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2.
    "dr_grpo": clipped(lambda inputs: divided_by(inputs.step.sequences * inputs.max_completion_length, inputs)),
    # The mean over all tokens of the step: DAPO, Yu et al. 2025, arXiv:2503.14476, equation 8.
    "dapo": clipped(mean_of_tokens),
    "cispo": cispo,
    "sapo": sapo,
    # The mean over sequences of token sums: LUSPO, Liu et al. 2026, arXiv:2602.05261.
    "luspo": clipped(lambda inputs: divided_by(inputs.step.sequences, inputs)),
    "vespo": vespo,
}


_METRICS = "loss", "policy_loss", "kl", "entropy", "entropy_acted_on", "off_policy_masked"  # of every loss


@functools.cache  # reward functions may change the directory that a path begins in
def find_loss(loss_type: str) -> LossFunction:
    """Return the function of a loss type: a built-in one, or the user's with checks. Raises ConfigError."""
    if loss_type in LOSSES:
        return LOSSES[loss_type]
    function = load_function("loss_type", loss_type)

    def checked(inputs: LossInputs, settings: LossSection) -> LossTerms:
        with modes_kept():
            terms = function(inputs, settings)
        if not _are_terms(terms, inputs.logprobs):
            raise ConfigError(
                f"loss_type={loss_type!r}: for {len(inputs.logprobs)} tokens it returned "
                f"{one_line(repr(terms))}: return (policy, weights, metrics), two tensors with a value "
                "for each token, policy with the gradient of inputs.logprobs or inputs.ratio, and a dict of "
                "one-dimensional tensors by name"
            )
        for name in terms[2]:
            reason = f"it returns the metric {name!r}, which every loss has: choose another name"
            require(name.partition(":")[0] not in _METRICS, "loss_type", loss_type, reason)
        return terms

    return checked


def _are_terms(terms: Any, logprobs: torch.Tensor) -> bool:
    match terms:
        case policy, weights, {**metrics}:
            tensors = [policy, weights, *metrics.values()]
            return (
                all(isinstance(tensor, torch.Tensor) and tensor.dim() == 1 for tensor in tensors)
                and len(policy) == len(weights) == len(logprobs)
                and policy.requires_grad >= logprobs.requires_grad
            )
    return False

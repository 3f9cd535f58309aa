"""The tensors of the objective: completion tokens of sequences of different lengths, one sequence after the other.

[T] holds the tokens of S sequences, flat and without padding; [S] holds one value for each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

# exp(20) = 5e8. Where the KL is multiplied by the ratio two such factors meet, and the gradient's norm squares them:
# 6e34 a token, which float32 still holds.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class StepSize:
    """The size of a whole optimizer step, over all micro-batches and ranks."""

    sequences: int
    tokens: int
    """completion tokens of these sequences"""
    high_entropy_tokens: int | None = None
    """tokens that the policy term and the entropy bonus act on where top_entropy_quantile is below 1; None: all"""


@dataclass(frozen=True)
class Tokens:
    """What the loss is computed from: T completion tokens of S sequences."""

    lengths: torch.Tensor
    """int64 [S] tokens of each sequence, may be 0"""
    advantages: torch.Tensor
    """[S] advantage of each sequence"""
    logprobs: torch.Tensor
    """[T] log-probs of the policy, with gradient"""
    entropy: torch.Tensor
    """[T] entropy of the policy in nats, with gradient where the entropy bonus needs it"""
    old_logprobs: torch.Tensor | None = None
    """[T] log-probs of the policy before the first update on these tokens; None: it is the current policy"""
    ref_logprobs: torch.Tensor | None = None
    """[T] log-probs of the reference; None leaves out the KL"""
    sampling_logprobs: torch.Tensor | None = None
    """[T] log-probs as the sampler knew them, NaN where it did not; None where nothing is made of them"""
    high_entropy: torch.Tensor | None = None
    """bool [T] tokens that the policy term acts on; None: all"""


def exp_bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of the log-ratio clamped to +-20."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def to_tokens(values: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat each sequence's value at each of its tokens, [S] -> [T]. Without `count` (T) a GPU would be waited for."""
    return values.repeat_interleave(lengths, dim=0, output_size=count)


def sequence_sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sum the values of each sequence's tokens, [T] -> [S]."""
    owner = to_tokens(torch.arange(len(lengths), device=lengths.device), lengths, len(values))
    return values.new_zeros(len(lengths)).index_add(0, owner, values)


def first_tokens(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Take the value at each sequence's first token, NaN where it has none: [T] -> float32 [S]."""
    padded = nn.functional.pad(values.float(), (0, 1), value=torch.nan)
    return padded[lengths.cumsum(0) - lengths].masked_fill(lengths == 0, torch.nan)

"""Draw tokens from softmax(logits), every completion with random numbers of its own.

A completion's random numbers follow from (seed, group, place in the group) alone, one for each token: whatever else is
drawn beside it, before it or on another rank changes nothing. A token is the inverse of the distribution function at
its number (Devroye 1986, Non-Uniform Random Variate Generation, section III.2).

Logits are in blocks of the vocabulary, float32 [blocks, rows, size], -inf beyond its end: a block's sum is computed
while the block is in cache, and only the block in which a token lies is looked through. A small vocabulary is one.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo.model.logprobs import CPU_BLOCK, CUDA_BLOCK
from grpo.sampling.sampler import Name

BELOW_1 = 1 - 2**-52
"""times a float64, less than it after rounding: beyond the end of a distribution function there is no token"""


def uniforms(name: Name, count: int) -> np.ndarray:
    """Return the first `count` random numbers of a completion: float64 [count], 0 <= number < 1."""
    seed, group, place = name
    # NumPy lists 32-bit words and pads with 0: 42 + (1 << 32), 5, 0 would be 42, 1, 5. A spawn key comes after the pad.
    key = (seed >> 32,) if seed >> 32 else ()
    words = np.random.SeedSequence((seed & 0xFFFFFFFF, group, place), spawn_key=key)
    return np.random.Generator(np.random.Philox(words)).random(count)


def check_drawn(logprobs: Iterable[float]) -> None:
    """Raise FloatingPointError if a drawn token has no log-prob."""
    if math.isnan(sum(logprobs)):
        raise FloatingPointError("the model's logits are NaN: its weights or its dtype are unusable")


def in_blocks(logits: Tensor) -> Tensor:
    """Cut logits into blocks: [rows, vocabulary] -> [blocks, rows, size]."""
    rows, vocabulary = logits.shape
    size = min((CUDA_BLOCK if logits.is_cuda else CPU_BLOCK)[1], vocabulary)
    return F.pad(logits, (0, -vocabulary % size), value=-torch.inf).view(rows, -1, size).transpose(0, 1)


def draw(logits: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw a token for each row: float32 [blocks, rows, size], float64 [rows] -> int64 [rows], float32 [rows]. Returns
    tokens and their log-probs. Without numbers each token is the most likely one, the first of equals."""
    if len(logits) == 1:
        return _draw_from_block(logits[0], numbers)
    top, block = logits.amax(dim=2).max(dim=0, keepdim=True)  # places too, of all, would cost five times as much
    top = top.T
    sums = torch.stack([(part - top).exp_().sum(dim=1) for part in logits])
    ends = sums.cumsum(dim=0, dtype=torch.float64)
    total = ends[-1]
    if numbers is None:
        row_logits = _of_block(logits, block)
        place = row_logits.argmax(dim=1, keepdim=True)
    else:
        target = numbers.clamp(max=BELOW_1) * total
        block = (ends <= target).sum(dim=0, keepdim=True).clamp_(max=len(ends) - 1)  # too many where NaN
        row_logits = _of_block(logits, block)
        inside = (row_logits - top).exp_().cumsum(dim=1, dtype=torch.float64)
        # A block's sum, in float32, is not quite the end of its numbers here.
        share = (target - ends.gather(0, block)[0]) / sums.gather(0, block)[0] + 1
        place = _place(inside, share.clamp_(0, BELOW_1))
    logprobs = row_logits.gather(1, place).double() - top - total.log().unsqueeze(1)
    return block[0] * logits.shape[2] + place[:, 0], logprobs[:, 0].float()


def _draw_from_block(logits: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
    """Do as `draw` with the whole vocabulary in one block: float32 [rows, size]."""
    shares = logits.softmax(dim=1)
    if numbers is None:
        place = logits.argmax(dim=1, keepdim=True)
    else:
        place = _place(shares.cumsum(dim=1, dtype=torch.float64), numbers.clamp(max=BELOW_1))
    return place[:, 0], shares.gather(1, place)[:, 0].log()


def _place(inside: Tensor, share: Tensor) -> Tensor:
    """Find the place of a share, 0 <= share < 1, in a distribution function [rows, size]: int64 [rows, 1]."""
    target = (share * inside[:, -1]).unsqueeze(1)
    return torch.searchsorted(inside, target, right=True).clamp_(max=inside.shape[1] - 1)


def _of_block(logits: Tensor, block: Tensor) -> Tensor:
    """Take a block of each row: [blocks, rows, size], [1, rows] -> [rows, size]."""
    return logits.gather(0, block.unsqueeze(2).expand(-1, -1, logits.shape[2]))[0]

"""Triton kernels that draw tokens: the distribution function's inverse, as grpo/sampling/draw.py computes it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # of the vocabulary


def draw(logits: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw a token for each row: float32 [rows, vocabulary], float64 [rows] -> int64 [rows], float32 [rows]. Returns
    tokens and their log-probs. Without numbers each token is the most likely one, the first of equals."""
    (rows, vocabulary), logits = logits.shape, logits.contiguous()  # as they are on a card
    blocks = triton.cdiv(vocabulary, BLOCK)
    tops, sums = logits.new_empty(2, rows, blocks)
    tokens, logprobs = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
    _reduce[(rows, blocks)](logits, tops, sums, vocabulary, BLOCK=BLOCK)
    _choose[(rows,)](
        logits=logits,
        tops=tops,
        sums=sums,
        numbers=tops if numbers is None else numbers,
        tokens=tokens,
        logprobs=logprobs,
        vocabulary=vocabulary,
        blocks=blocks,
        IS_GREEDY=numbers is None,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
    )
    return tokens, logprobs


@triton.jit
def _reduce(logits, tops, sums, vocabulary, BLOCK: tl.constexpr):
    """Compute the largest logit of a block, and the sum of the exponentials of what each is below it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    top = tl.max(values)
    at = row * tl.num_programs(1) + block
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp(values - tl.where(top == float("-inf"), 0.0, top))))


@triton.jit
def _count(ends, target, most):
    """Count the ends up to the target, not the last one that reaches `most`: beyond it nothing has a probability."""
    return tl.sum(((ends <= target) & (ends < most)).to(tl.int32))


@triton.jit
def _choose(
    logits,
    tops,
    sums,
    numbers,
    tokens,
    logprobs,
    vocabulary,
    blocks,
    IS_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    own_tops = tl.load(tops + row * blocks + number, mask=number < blocks, other=float("-inf"))
    own_sums = tl.load(sums + row * blocks + number, mask=number < blocks, other=0.0)
    top = tl.max(own_tops)
    shares = own_sums.to(tl.float64) * tl.exp(own_tops - top).to(tl.float64)
    ends = tl.cumsum(shares)
    total = tl.max(ends)
    if IS_GREEDY:
        block = tl.min(tl.where(own_tops == top, number, BLOCKS))
    else:
        target = tl.load(numbers + row) * total
        block = _count(ends, target, total)
    block = tl.minimum(block, blocks - 1)  # too many where NaN
    place = tl.arange(0, BLOCK)
    token = block * BLOCK + place
    values = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    if IS_GREEDY:
        chosen = tl.min(tl.where(values == top, place, BLOCK))
    else:
        inside = tl.cumsum(tl.exp(values - top).to(tl.float64))
        share = tl.sum(tl.where(number == block, shares, 0.0))
        before = tl.sum(tl.where(number == block, ends, 0.0)) - share
        # A block's sum, in float32, is not quite the end of its numbers here.
        most = tl.max(inside)
        chosen = _count(inside, (target - before) / share * most, most)
    chosen = tl.minimum(block * BLOCK + chosen, vocabulary - 1)
    value = tl.load(logits + row * vocabulary + chosen)
    tl.store(tokens + row, chosen)
    # Not the total: the largest of numbers is one of those that are not NaN.
    tl.store(logprobs + row, (value - top).to(tl.float64) - tl.log(tl.sum(shares)))

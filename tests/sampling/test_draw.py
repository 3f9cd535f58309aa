"""Tokens are drawn by the inverse of the distribution function, with a completion's own random numbers."""

import numpy as np
import torch
from rounding import assert_rounded

from grpo.model.logprobs import CPU_BLOCK
from grpo.sampling.draw import draw, in_blocks, uniforms

BLOCK = CPU_BLOCK[1]
VOCABULARY = 2 * BLOCK + 77


def test_tokens_are_the_inverse_of_the_distribution_function():
    """Against NumPy in float64; a number that lies within float32's rounding of a border may go either way."""
    torch.manual_seed(0)
    logits, numbers = 4 * torch.randn(500, VOCABULARY), torch.rand(500, dtype=torch.float64)
    tokens, logprobs = draw(in_blocks(logits), numbers)
    weights = np.exp(logits.double().numpy())
    ends = weights.cumsum(axis=1) / weights.sum(axis=1, keepdims=True)
    rows = np.arange(500)
    begin, end = ends[rows, tokens - 1] * (tokens.numpy() > 0), ends[rows, tokens]
    assert (begin - 1e-6 < numbers.numpy()).all() and (numbers.numpy() < end + 1e-6).all()
    assert_rounded(logprobs, logits.log_softmax(dim=1)[rows, tokens])
    assert len(set((tokens // BLOCK).tolist())) == 3


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((3, VOCABULARY), -torch.inf)
    likely = [5, BLOCK + 3, 2 * BLOCK + 7]
    logits[:, likely] = 0.0
    numbers = torch.tensor([0.0, np.nextafter(1 / 3, 1), np.nextafter(1.0, 0.0)], dtype=torch.float64)
    tokens, logprobs = draw(in_blocks(logits), numbers)
    assert tokens.tolist() == likely
    torch.testing.assert_close(logprobs, torch.full((3,), 1 / 3).log())


def test_without_numbers_it_is_the_most_likely_token_and_of_equals_the_first():
    logits = torch.zeros(2, VOCABULARY)
    logits[0, [BLOCK + 9, BLOCK + 8, 2 * BLOCK + 1]] = 1.5
    tokens, logprobs = draw(in_blocks(logits), None)
    assert tokens.tolist() == [BLOCK + 8, 0]
    assert_rounded(logprobs, logits.log_softmax(dim=1)[[0, 1], tokens])


def test_every_completion_has_numbers_of_its_own():
    seeds = (0, 1, 2**32, 2**32 + 1, 2**63)
    names = [(seed, group, place) for seed in seeds for group in (0, 1, 2**40) for place in (0, 1)]
    assert len({tuple(uniforms(name, 4)) for name in names}) == len(names)
    numbers = uniforms((3, 5, 7), 1000)
    assert (numbers[:9] == uniforms((3, 5, 7), 9)).all()
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.04

"""Advantages against the papers' formulas in Python floats (oracle.py)."""

import math
import random

import oracle
import pytest
import torch

from grpo.algorithm.advantages import (
    advantages,
    group_advantages,
    groups_with_signal,
    normalize_then_sum,
    soft_overlong_punishment,
)
from grpo.config.loss import LossSection

SCALES = ["group", "batch", "none"]


def random_groups(seed: int) -> list[list[float]]:
    """Six groups of five: two ordinary, one of equals, one with a NaN, one with a single number, one of NaN only."""
    draw = random.Random(seed)
    groups = [[draw.gauss(0, 2) for _ in range(5)] for _ in range(6)]
    groups[2] = [0.1] * 5
    groups[3][draw.randrange(5)] = math.nan
    groups[4] = [math.nan, math.nan, 3.7, math.nan, math.nan]
    groups[5] = [math.nan] * 5
    return groups


def random_functions(seed: int) -> list[list[list[float]]]:
    """Three reward functions that differ in where they apply. None applies to two completions of the last group."""
    by_function = [random_groups(seed), random_groups(100 + seed), random_groups(200 + seed)]
    by_function[1][5] = [1.0, 2.0, math.nan, 4.0, math.nan]
    by_function[2][0] = [1.0] * 5
    return by_function


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(own: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(own, tensor(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", SCALES)
def test_of_one_reward_they_are_the_papers(scale, seed):
    groups = random_groups(seed)
    own = group_advantages(tensor(groups), scale, 0.0)
    close(own, oracle.advantages(groups, scale))
    assert own[[2, 4, 5]].eq(0).all()  # exactly: nothing is to be learnt there


@pytest.mark.parametrize("value", [0.0, 0.1, 2.8, 1e9])
@pytest.mark.parametrize("scale", SCALES)
def test_a_group_with_equal_rewards_gives_exactly_zero(scale, value):
    rewards = torch.full((2, 7), value, dtype=torch.float64)
    rewards[1, 0] = value + 1
    own = group_advantages(rewards, scale, 0.0)
    assert own[0].tolist() == [0.0] * 7 and own[1].ne(0).all()


@pytest.mark.parametrize("scale", SCALES)
def test_rewards_within_the_tolerance_are_equal(scale):
    rewards = [[1.0, 1.01, 0.99], [1.0, 1.5, 2.0]]
    own = group_advantages(tensor(rewards), scale, 0.05)
    assert own[0].tolist() == [0.0] * 3
    close(own, oracle.advantages(rewards, scale, 0.05))


@pytest.mark.parametrize("scale", SCALES)
def test_they_do_not_depend_on_where_rewards_begin(scale):
    rewards = tensor(random_groups(1)[:2])
    own = group_advantages(rewards, scale, 0.0)
    torch.testing.assert_close(group_advantages(rewards + 5, scale, 0.0), own)
    factor = 100.0 if scale == "none" else 1.0
    torch.testing.assert_close(group_advantages(100 * rewards, scale, 0.0), factor * own, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", SCALES)
def test_of_several_rewards_they_are_those_of_the_weighted_sum(scale, seed):
    by_function, weights = random_functions(seed), [1.0, 0.5, 2.0]
    sums = [oracle.weighted_sum(rows, weights) for rows in zip(*by_function, strict=True)]
    settings = LossSection(scale_rewards=scale)
    close(advantages(tensor(by_function), tensor(weights), settings), oracle.advantages(sums, scale))

    penalties = [[0.1 * place * row for place in range(5)] for row in range(6)]
    less = [[one - other for one, other in zip(*rows, strict=True)] for rows in zip(sums, penalties, strict=True)]
    own = advantages(tensor(by_function), tensor(weights), settings, tensor(penalties))
    close(own, oracle.advantages(less, scale))


@pytest.mark.parametrize("tolerance", [0.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_decoupled_ones_are_the_papers(seed, tolerance):
    by_function, weights = random_functions(seed), [1.0, 0.5, 2.0]
    expected = oracle.decoupled_advantages(by_function, weights, tolerance)
    settings = LossSection(multi_objective_aggregation="normalize_then_sum", reward_tolerance=tolerance)
    close(advantages(tensor(by_function), tensor(weights), settings), expected)


def test_decoupled_ones_of_equal_rewards_are_zero():
    by_function, weights = torch.full((2, 3, 4), 0.1, dtype=torch.float64), tensor([1.0, 2.0])
    assert normalize_then_sum(by_function, weights, LossSection()).eq(0).all()
    by_function[:, :, 0] = math.nan
    assert normalize_then_sum(by_function, weights, LossSection()).eq(0).all()
    by_function[:] = math.nan
    assert normalize_then_sum(by_function, weights, LossSection()).eq(0).all()


@pytest.mark.parametrize("how", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("seed", range(3))
def test_a_group_with_signal_is_one_with_advantages(how, seed):
    by_function, weights = tensor(random_functions(seed)), tensor([1.0, 0.5, 2.0])
    settings = LossSection(multi_objective_aggregation=how, reward_tolerance=0.0)
    signal = groups_with_signal(by_function, weights, settings)
    assert signal.tolist() == advantages(by_function, weights, settings).ne(0).any(dim=1).tolist()
    assert not signal.all() and signal.any()


def test_overlong_punishment_is_dapos():
    lengths = range(30)
    for cache in (1, 5, 20):
        expected = [oracle.overlong_punishment(length, 20, cache) for length in lengths]
        assert soft_overlong_punishment(torch.tensor(lengths), 20, cache).tolist() == pytest.approx(expected, rel=1e-6)

"""Advantages against the papers' formulas in Python floats (oracle.py)."""

import math
import random
from itertools import product
from typing import get_args, get_type_hints

import oracle
import pytest
import torch
from ragged import named

from grpo.algorithm.advantages import (
    advantages,
    group_advantages,
    groups_with_signal,
    normalize_then_sum,
    soft_overlong_punishment,
)
from grpo.config.loss_settings import LossSection

SETTINGS = get_type_hints(LossSection)
SCALES, AGGREGATIONS = (get_args(SETTINGS[name]) for name in ("scale_rewards", "multi_objective_aggregation"))


def random_groups(seed: int) -> list[list[float]]:
    """Draw six groups of five: two ordinary, one of equals, one with a NaN, one with one number, one of NaN only."""
    draw = random.Random(seed)
    groups = [[draw.gauss(0, 2) for _ in range(5)] for _ in range(6)]
    groups[2] = [0.1] * 5
    groups[3][draw.randrange(5)] = math.nan
    groups[4] = [math.nan, math.nan, 3.7, math.nan, math.nan]
    groups[5] = [math.nan] * 5
    return groups


def random_functions(seed: int) -> list[list[list[float]]]:
    """Draw the rewards of three functions that apply to different completions, none to two of the last group."""
    by_function = [random_groups(seed), random_groups(100 + seed), random_groups(200 + seed)]
    by_function[1][5] = [1.0, 2.0, math.nan, 4.0, math.nan]
    by_function[2][0] = [1.0] * 5
    return by_function


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(result: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(result, tensor(expected), rtol=1e-9, atol=1e-12)


def test_of_one_reward_they_are_the_papers():
    for scale, seed in product(SCALES, range(5)):
        groups = random_groups(seed)
        with named(scale, seed):
            result = group_advantages(tensor(groups), scale, 0.0)
            close(result, oracle.advantages(groups, scale))
            assert result[[2, 4, 5]].eq(0).all()  # exactly: nothing is to be learnt there


def test_a_group_with_equal_rewards_gives_exactly_zero():
    for scale, value in product(SCALES, (0.0, 0.1, 2.8, 1e9)):
        rewards = torch.full((2, 7), value, dtype=torch.float64)
        rewards[1, 0] = value + 1
        with named(scale, value):
            result = group_advantages(rewards, scale, 0.0)
            assert result[0].tolist() == [0.0] * 7 and result[1].ne(0).all()


def test_rewards_within_the_tolerance_are_equal():
    rewards = [[1.0, 1.01, 0.99], [1.0, 1.5, 2.0]]
    for scale in SCALES:
        with named(scale):
            result = group_advantages(tensor(rewards), scale, 0.05)
            assert result[0].tolist() == [0.0] * 3
            close(result, oracle.advantages(rewards, scale, 0.05))


def test_they_do_not_depend_on_where_rewards_begin():
    rewards = tensor(random_groups(1)[:2])
    for scale in SCALES:
        with named(scale):
            result = group_advantages(rewards, scale, 0.0)
            torch.testing.assert_close(group_advantages(rewards + 5, scale, 0.0), result)
            factor = 100.0 if scale == "none" else 1.0
            torch.testing.assert_close(group_advantages(100 * rewards, scale, 0.0), factor * result, rtol=1e-3, atol=0)


def test_of_several_rewards_they_are_those_of_the_weighted_sum():
    weights = [1.0, 0.5, 2.0]
    penalties = [[0.1 * place * group for place in range(5)] for group in range(6)]
    for scale, seed in product(SCALES, range(5)):
        by_function = random_functions(seed)
        sums = [oracle.weighted_sum(rewards, weights) for rewards in zip(*by_function, strict=True)]
        settings = LossSection(scale_rewards=scale)
        with named(scale, seed):
            close(advantages(tensor(by_function), tensor(weights), settings), oracle.advantages(sums, scale))
            result = advantages(tensor(by_function), tensor(weights), settings, tensor(penalties))
            close(result, oracle.advantages(sums, scale, penalties=penalties))


def test_a_kl_of_mere_rounding_is_not_scaled_to_the_size_of_a_reward():
    rewards = tensor([[[1.0] * 4, [1.0, 0.0, 0.0, 1.0]]])
    noise = 1e-2 * torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for estimator, scale in (
        *[("grpo", "group"), ("grpo", "none"), ("grpo", "batch"), ("passk", "group"), ("rloo", "group")],
    ):
        settings = LossSection(advantage_estimator=estimator, scale_rewards=scale)
        with named(estimator, scale):
            equal, other = advantages(rewards, tensor([1.0]), settings, noise).abs().amax(dim=1).tolist()
            if settings.divided_by_group:
                assert equal == 0
            else:  # as it is: what the objective loses by it
                assert 0 < equal < 0.05
            assert other > 0.4 or estimator == "passk"


def test_decoupled_ones_are_the_papers():
    weights = [1.0, 0.5, 2.0]
    for seed, tolerance in product(range(5), (0.0, 3.0)):
        by_function = random_functions(seed)
        settings = LossSection(multi_objective_aggregation="normalize_then_sum", reward_tolerance=tolerance)
        with named(seed, tolerance):
            expected = oracle.decoupled_advantages(by_function, weights, tolerance)
            close(advantages(tensor(by_function), tensor(weights), settings), expected)


def test_decoupled_ones_of_equal_rewards_are_zero():
    by_function, weights = torch.full((2, 3, 4), 0.1, dtype=torch.float64), tensor([1.0, 2.0])
    assert normalize_then_sum(by_function, weights, LossSection()).eq(0).all()
    by_function[:, :, 0] = math.nan
    assert normalize_then_sum(by_function, weights, LossSection()).eq(0).all()
    by_function[:] = math.nan
    assert normalize_then_sum(by_function, weights, LossSection()).eq(0).all()


def test_a_group_with_signal_is_one_with_advantages():
    weights = tensor([1.0, 0.5, 2.0])
    for aggregation, seed in product(AGGREGATIONS, range(3)):
        by_function = tensor(random_functions(seed))
        settings = LossSection(multi_objective_aggregation=aggregation, reward_tolerance=0.0)
        with named(aggregation, seed):
            signal = groups_with_signal(by_function, weights, settings)
            assert signal.tolist() == advantages(by_function, weights, settings).ne(0).any(dim=1).tolist()
            assert not signal.all() and signal.any()


def test_overlong_punishment_is_dapos():
    lengths = range(30)
    for cache in (1, 5, 20):
        expected = [oracle.overlong_punishment(length, 20, cache) for length in lengths]
        assert soft_overlong_punishment(torch.tensor(lengths), 20, cache).tolist() == pytest.approx(expected, rel=1e-6)

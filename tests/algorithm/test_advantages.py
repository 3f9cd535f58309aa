"""Advantages against the papers' formulas in Python floats, token by token where these are; the user's estimators."""

import math
import random
import statistics
from itertools import combinations, product
from typing import get_args, get_type_hints

import oracle
import pytest
import torch
from careless import unchanged
from oracle import known
from ragged import documented, named

from grpo.algorithm.advantages import (
    advantages,
    group_advantages,
    groups_with_signal,
    most_varied,
    try_estimator,
)
from grpo.config.errors import ConfigError
from grpo.config.loss_settings import ADVANTAGE_ESTIMATORS, LossSection

SETTINGS = get_type_hints(LossSection)
SCALES, AGGREGATIONS = (get_args(SETTINGS[name]) for name in ("scale_rewards", "multi_objective_aggregation"))
NAN = math.nan
WEIGHTS = [1.0, 0.5, 2.0], [1.0, 0.5, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]


def random_round(seed: int) -> tuple[list[list[float]], list[list[int]], list[float]]:
    """Draw rewards, lengths and greedy rewards of six groups of five: one of equals, one with a NaN, one with a single
    number, one of NaN only, one whose best is as good as its second; and one completion without a token."""
    draw = random.Random(seed)
    rewards = [[draw.gauss(1, 2) for _ in range(5)] for _ in range(6)]
    rewards[1] = [0.1] * 5
    rewards[2][draw.randrange(5)] = NAN
    rewards[3] = [NAN, NAN, 3.7, NAN, NAN]
    rewards[4] = [NAN] * 5
    rewards[5] = [1.0, 7.0, 2.0, 7.0, -3.0]
    lengths = [[draw.randrange(1, 30) for _ in range(5)] for _ in range(6)]
    lengths[0][3] = 0
    return rewards, lengths, [draw.gauss(1, 2), 0.1, 0.0, 3.0, 1.0, NAN]


def random_functions(seed: int) -> list[list[list[float]]]:
    """Draw the rewards of three functions that apply to different completions, none to two of the last group."""
    by_function = [random_round(number)[0] for number in (seed, 100 + seed, 200 + seed)]
    by_function[1][4] = [1.0, 2.0, NAN, 4.0, NAN]
    by_function[2][0] = [1.0] * 5
    return by_function


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(result: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(result, tensor(expected), rtol=1e-9, atol=1e-12)


def test_of_one_reward_they_are_the_papers():
    for scale, tolerance, seed in product(SCALES, (0.0, 4.0), range(5)):
        groups, _, _ = random_round(seed)
        with named(scale, tolerance, seed):
            result = group_advantages(tensor(groups), scale, tolerance)
            close(result, oracle.advantages(groups, scale, tolerance))
            assert result[[1, 3, 4]].eq(0).all()  # exactly: nothing is to be learnt there


def test_of_several_rewards_they_are_those_of_the_weighted_sum():
    penalties = [[0.1 * place * group for place in range(5)] for group in range(6)]
    for scale, seed, weights in product(SCALES, range(5), WEIGHTS):
        by_function = random_functions(seed)
        sums = [oracle.weighted_sum(rewards, weights) for rewards in zip(*by_function, strict=True)]
        settings = LossSection(scale_rewards=scale)
        with named(scale, seed, weights):
            close(advantages(tensor(by_function), tensor(weights), settings), oracle.advantages(sums, scale))
            result = advantages(tensor(by_function), tensor(weights), settings, tensor(penalties))
            close(result, oracle.advantages(sums, scale, penalties=penalties))


def test_a_kl_of_mere_rounding_is_not_scaled_to_the_size_of_a_reward():
    rewards = tensor([[[1.0] * 4, [1.0, 0.0, 0.0, 1.0]]])
    noise = 1e-2 * torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kinds = [("grpo", "group"), ("grpo", "none"), ("grpo", "batch"), ("passk", "group"), ("rloo", "group")]
    for estimator, scale in kinds:
        settings = LossSection(advantage_estimator=estimator, scale_rewards=scale)
        with named(estimator, scale):
            equal, other = advantages(rewards, tensor([1.0]), settings, noise).abs().amax(dim=1).tolist()
            if settings.divided_by_group:
                assert equal == 0
            else:  # as it is: what the objective loses by it
                assert 0 < equal < 0.05
            assert other > 0.4 or estimator == "passk"


def test_decoupled_ones_are_the_papers():
    for seed, tolerance, weights in product(range(5), (0.0, 3.0), WEIGHTS[:-1]):
        by_function = random_functions(seed)
        settings = LossSection(multi_objective_aggregation="normalize_then_sum", reward_tolerance=tolerance)
        with named(seed, tolerance, weights):
            expected = oracle.decoupled_advantages(by_function, weights, tolerance)
            close(advantages(tensor(by_function), tensor(weights), settings), expected)


def test_a_group_with_signal_is_one_with_advantages():
    weights = tensor([1.0, 0.5, 2.0])
    for aggregation, seed in product(AGGREGATIONS, range(3)):
        by_function = tensor(random_functions(seed))
        settings = LossSection(multi_objective_aggregation=aggregation, reward_tolerance=0.0)
        with named(aggregation, seed):
            signal = groups_with_signal(by_function, weights, settings)
            assert signal.tolist() == advantages(by_function, weights, settings).ne(0).any(dim=1).tolist()
            assert not signal.all() and signal.any()
    by_function, unweighted = tensor([[[1.0, 1.0], [0.0, 1.0]], [[0.0, 3.0], [2.0, 2.0]]]), tensor([1.0, 0.0])
    for aggregation in AGGREGATIONS:
        settings = LossSection(multi_objective_aggregation=aggregation)
        assert groups_with_signal(by_function, unweighted, settings).tolist() == [False, True]
        assert advantages(by_function, unweighted, settings).ne(0).tolist() == [[False] * 2, [True] * 2]


# --- the estimators beside grpo

OTHERS = ADVANTAGE_ESTIMATORS[1:]


def rloo(group, lengths):
    """Ahmadian et al. 2024: the mean of the other rewards, written out."""
    result = []
    for place, reward in enumerate(group):
        others = known(group[:place] + group[place + 1 :])
        result.append(reward - statistics.fmean(others) if others else 0.0)
    return result


def opo(group, lengths):
    """Hao et al. 2025: a token for a token."""
    per_token = [
        reward for reward, length in zip(group, lengths, strict=True) for _ in range(length) if reward == reward
    ]
    baseline = statistics.fmean(per_token) if per_token else 0.0
    return [reward - baseline for reward in group]


def passk(group, lengths, scale):
    """Tang et al. 2025: the maximum of all, less the maximum of the others."""
    result = []
    for place, reward in enumerate(group):
        others = known(group[:place] + group[place + 1 :])
        lead = max(0.0, reward - max(others)) if others else 0.0
        result.append(lead / (statistics.stdev(known(group)) + 1e-4) if lead and scale == "group" else lead)
    return result


def whitened(values: list[list[float]], lengths: list[list[int]]) -> list[list[float]]:
    """As verl's masked_whiten over the tokens of a batch."""
    tokens = [
        value
        for row, row_lengths in zip(values, lengths, strict=True)
        for value, length in zip(row, row_lengths, strict=True)
        for _ in range(length)
        if not math.isnan(value)
    ]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in values]


def expected(name: str, rewards, lengths, greedy, scale: str = "none") -> list[list[float]]:
    if name == "reinforce++":
        result = whitened(rewards, lengths)
    elif name == "reinforce++_baseline":
        result = whitened([[reward - statistics.fmean(known(g) or [0]) for reward in g] for g in rewards], lengths)
    elif name == "remax":
        result = [[reward - base for reward in group] for group, base in zip(rewards, greedy, strict=True)]
    else:
        formula = {"rloo": rloo, "opo": opo, "passk": lambda *group: passk(*group, scale)}[name]
        result = [formula(*group) for group in zip(rewards, lengths, strict=True)]
    for group, row in zip(rewards, result, strict=True):
        flat = not known(group) or max(known(group)) == min(known(group))
        for place, value in enumerate(row):
            if math.isnan(value) or (flat and name not in ("reinforce++", "remax")):
                row[place] = 0.0
    return result


def compute(name: str, rewards, lengths, greedy, penalty=0.0, **options) -> tuple[torch.Tensor, LossSection]:
    """Compute the advantages of two functions, whose weighted sum these rewards are."""
    settings = LossSection(advantage_estimator=name, **options)
    half = tensor([rewards, rewards])
    baselines = tensor([greedy, greedy])
    result = advantages(
        half, tensor([0.25, 0.75]), settings, penalty=penalty, lengths=torch.tensor(lengths), greedy=baselines
    )
    return result, settings


def test_they_are_the_papers():
    for name, seed, scale in product(OTHERS, range(5), ("group", "none")):
        if scale == "none" and name.startswith("reinforce"):
            continue
        drawn = random_round(seed)
        with named(name, seed, scale):
            result, _ = compute(name, *drawn, scale_rewards=scale)
            close(result, expected(name, *drawn, scale))
            assert result.ne(0).any()


def test_the_kl_is_taken_off_the_rewards_first():
    for name in OTHERS:
        rewards, lengths, greedy = random_round(1)
        penalty = [[0.1 * place * group for place in range(5)] for group in range(6)]
        less = [[r - p for r, p in zip(*rows, strict=True)] for rows in zip(rewards, penalty, strict=True)]
        with named(name):
            result, _ = compute(name, rewards, lengths, greedy, tensor(penalty))
            expected_values = expected(name, less, lengths, greedy, "group")
            if name == "passk":  # its groups 1 and 5 have no best reward, and the KL that tells them apart is scaled
                expected_values[1] = expected_values[5] = [0.0] * 5
            close(result, expected_values)


def test_a_group_without_signal_has_advantages_of_exactly_zero_and_no_other_has():
    for name, tolerance in product(OTHERS, (0.0, 0.3)):
        settings = LossSection(advantage_estimator=name)
        if not settings.groups_have_signal:
            continue
        rewards = [[1.0, 1.2, 1.1], [0.1] * 3, [1.0, 3.0, 3.0], [1.0, 2.0, 4.0], [NAN, 2.0, NAN], [NAN] * 3]
        lengths, greedy = [[3, 4, 5]] * 6, [1.0, 0.1, 3.0, 1.0, 2.0, 0.0]
        with named(name, tolerance):
            result, settings = compute(name, rewards, lengths, greedy, reward_tolerance=tolerance)
            signal = groups_with_signal(tensor([rewards]), tensor([1.0]), settings, tensor([greedy]))
            assert signal.tolist() == result.ne(0).any(dim=1).tolist()
            assert signal.tolist() == [not tolerance, False, name != "passk", True, False, False]


def test_a_group_without_signal_counts_as_zeros_where_a_round_is_whitened():
    rewards, lengths = [[1.0, 1.2, 1.1], [1.0, 4.0, 2.0]], [[3, 9, 5], [6, 2, 8]]
    result, _ = compute("reinforce++_baseline", rewards, lengths, [0.0, 0.0], reward_tolerance=0.3)
    middle = statistics.fmean(rewards[1])
    by_hand = whitened([[0.0] * 3, [reward - middle for reward in rewards[1]]], lengths)
    close(result, [[0.0] * 3, by_hand[1]])


def test_with_reinforce_plus_plus_equal_rewards_of_a_group_teach_and_of_a_round_do_not():
    rewards = [[0.0, 0.0], [0.1, 0.1], [0.1, 0.1]]
    result, _ = compute("reinforce++", rewards, [[5, 5]] * 3, [0.0] * 3)
    assert result.ne(0).all()
    result, _ = compute("reinforce++", [[0.1, 0.1]] * 3, [[5, 7]] * 3, [0.0] * 3)
    assert result.eq(0).all()


def test_one_completion_a_prompt_is_enough_where_no_group_is_needed():
    rewards, lengths, greedy = [[0.0], [1.0], [5.0]], [[3], [4], [5]], [1.0, 1.0, 2.0]
    for name in ("reinforce++", "remax"):
        with named(name):
            result, _ = compute(name, rewards, lengths, greedy)
            close(result, expected(name, rewards, lengths, greedy))


# --- the user's


def test_a_copy_of_rloo_is_rloo(tmp_path):
    (tmp_path / "copy.py").write_text(
        "from careless import change_modes\n\n"
        "def rloo(rewards):\n    n = rewards.shape[1]\n    change_modes()\n"
        "    return rewards - (rewards.sum(dim=1, keepdim=True) - rewards) / (n - 1)\n"
    )
    by_function, weights = torch.randn(2, 6, 5, dtype=torch.float64), torch.tensor([1.0, 0.5], dtype=torch.float64)
    penalty = torch.rand(6, 5, dtype=torch.float64)
    built_in = advantages(by_function, weights, LossSection(advantage_estimator="rloo"), penalty)
    with unchanged():
        copied = advantages(by_function, weights, LossSection(advantage_estimator=f"{tmp_path}/copy.py:rloo"), penalty)
    torch.testing.assert_close(copied, built_in)


def test_the_documented_one_works_and_a_completion_without_a_reward_has_no_advantage(tmp_path):
    name = documented(tmp_path, "compare.py")
    try_estimator(name, 4)
    rewards = torch.tensor([[[0.0, 1.0, 2.0, 5.0], [1.0, math.nan, 2.0, 3.0]]], dtype=torch.float64)
    result = advantages(rewards, torch.ones(1, dtype=torch.float64), LossSection(advantage_estimator=name))
    assert result.dtype == torch.float64 and result.isfinite().all()
    assert result[1, 1] == 0 and result[0].tolist() == [-1.0, 0.0, 1.0, 4.0]


# What a file has, and how it is refused.
REFUSED = [
    ("compare = 1", "has no such function: define it there"),
    ("def compare(rewards, settings): ...", r"failed on the rewards of three groups \(TypeError"),
    ("def compare(rewards): ...", r"it returned None: return a tensor of the rewards' shape, \(3, 4\)"),
    ("def compare(rewards): return rewards.mean(dim=1)", r"it returned tensor\(\[1.5.*: return a tensor"),
    (
        "def compare(rewards): return (rewards - rewards.mean(1, True)) / rewards.std(1, keepdim=True)",
        "it made the advantages .*nan.*: return finite numbers, also for a group whose rewards are equal",
    ),
]


def test_what_cannot_be_used_is_refused_before_the_run(tmp_path):
    for place, (text, reason) in enumerate(REFUSED):
        file = tmp_path / f"compare{place}.py"
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"^advantage_estimator='{file}:compare': .*{reason}"):
            try_estimator(f"{file}:compare", 4)


@pytest.mark.parametrize("drawn, count", [(2, 1), (3, 2), (5, 5), (7, 2), (7, 4), (9, 6)])
def test_no_other_completions_of_a_group_have_rewards_of_larger_variance(drawn, count):
    """By trying every subset."""
    chance = random.Random(drawn)
    groups = [[chance.choice([0.0, 1.0, chance.gauss(0, 1)]) for _ in range(drawn)] for _ in range(200)]
    chosen = most_varied(torch.tensor(groups, dtype=torch.float64), count).tolist()
    for rewards, places in zip(groups, chosen, strict=True):
        assert places == sorted({*places}) and len(places) == count
        best = max(statistics.pvariance(subset) for subset in combinations(rewards, count))
        assert statistics.pvariance([rewards[place] for place in places]) == pytest.approx(best)


def test_of_equal_rewards_the_first_are_chosen_and_one_without_reward_before_nothing():
    rewards = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, NAN, 1.0, NAN], [NAN] * 4], dtype=torch.float64)
    assert most_varied(rewards, 2).tolist() == [[0, 1], [0, 2], [0, 1]]

"""The estimators beside grpo against Python floats, token by token where the papers have it so."""

import math
import random
import statistics
from itertools import product

import pytest
import torch
from ragged import named

from grpo.algorithm.advantages import advantages, groups_with_signal
from grpo.algorithm.estimators import ESTIMATORS
from grpo.config.loss_settings import ADVANTAGE_ESTIMATORS, LossSection

NAN = math.nan


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


def known(group: list[float]) -> list[float]:
    return [reward for reward in group if not math.isnan(reward)]


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


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def compute(name: str, rewards, lengths, greedy, penalty=0.0, **options) -> tuple[torch.Tensor, LossSection]:
    """Compute the advantages of two functions, whose weighted sum these rewards are."""
    settings = LossSection(advantage_estimator=name, **options)
    half = tensor([rewards, rewards])
    baselines = tensor([greedy, greedy])
    result = advantages(half, tensor([0.25, 0.75]), settings, penalty, torch.tensor(lengths), baselines)
    return result, settings


def test_the_settings_name_every_built_in_estimator():
    assert ("grpo", *ESTIMATORS) == ADVANTAGE_ESTIMATORS
    assert {name for name in ESTIMATORS if ESTIMATORS[name].signal} == {
        name for name in ESTIMATORS if LossSection(advantage_estimator=name).groups_have_signal
    }


def test_they_are_the_papers():
    for name, seed, scale in product(ESTIMATORS, range(5), ("group", "none")):
        if scale == "none" and name.startswith("reinforce"):
            continue
        drawn = random_round(seed)
        with named(name, seed, scale):
            result, _ = compute(name, *drawn, scale_rewards=scale)
            torch.testing.assert_close(result, tensor(expected(name, *drawn, scale)), rtol=1e-9, atol=1e-12)
            assert result.ne(0).any()


def test_the_kl_is_taken_off_the_rewards_first():
    for name in ESTIMATORS:
        rewards, lengths, greedy = random_round(1)
        penalty = [[0.1 * place * group for place in range(5)] for group in range(6)]
        less = [[r - p for r, p in zip(*rows, strict=True)] for rows in zip(rewards, penalty, strict=True)]
        with named(name):
            result, _ = compute(name, rewards, lengths, greedy, tensor(penalty))
            expected_values = expected(name, less, lengths, greedy, "group")
            if name == "passk":  # its groups 1 and 5 have no best reward, and the KL that tells them apart is scaled
                expected_values[1] = expected_values[5] = [0.0] * 5
            torch.testing.assert_close(result, tensor(expected_values), rtol=1e-9, atol=1e-12)


def test_a_group_without_signal_has_advantages_of_exactly_zero_and_no_other_has():
    for name, tolerance in product(ESTIMATORS, (0.0, 0.3)):
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
    torch.testing.assert_close(result, tensor([[0.0] * 3, by_hand[1]]), rtol=1e-9, atol=0)


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
            torch.testing.assert_close(result, tensor(expected(name, rewards, lengths, greedy)), rtol=1e-9, atol=0)


def test_the_cut_into_ranks_changes_no_advantage():
    """What ranks have comes group after group, in another order for each number of ranks."""
    for name in ESTIMATORS:
        rewards, lengths, greedy = random_round(3)
        order = [3, 0, 5, 2, 4, 1]
        with named(name):
            whole, _ = compute(name, rewards, lengths, greedy)
            cut, _ = compute(name, *([rows[place] for place in order] for rows in (rewards, lengths, greedy)))
            torch.testing.assert_close(cut, whole[order], rtol=1e-12, atol=1e-14)


def test_tokens_of_a_round_are_white_after_reinforce_plus_plus():
    for name in ("reinforce++", "reinforce++_baseline"):
        rewards, lengths = [[1.0, 4.0], [2.0, -3.0]], [[10, 2], [7, 1]]
        result, _ = compute(name, rewards, lengths, [0.0, 0.0])
        per_token = result.flatten().repeat_interleave(torch.tensor(lengths).flatten())
        assert per_token.mean().item() == pytest.approx(0, abs=1e-12)
        assert per_token.std().item() == pytest.approx(1, abs=1e-6)

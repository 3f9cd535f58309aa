"""What a step counts of its completions, over all ranks."""

import math

import pytest

from grpo.data.records import Outcome, Rollout
from grpo.run.metrics import add_stats, step_metrics
from grpo.trainer.step_result import failure_frequency, stats_of_completions


def rollout(pattern: str, calls: int = 0, failures: int = 0, finished: bool = True) -> Rollout:
    """Make a completion: a D for each token that was drawn, an a for each of an answer."""
    drawn = [letter == "D" for letter in pattern]
    return Rollout([5] * len(drawn), finished, "", [], 0, drawn, Outcome(finished, [], calls, failures))


def metrics(*ranks: list[Rollout]) -> dict[str, float]:
    stats = {}
    for rollouts in ranks:
        add_stats(stats, stats_of_completions(rollouts))
    return step_metrics(stats) | failure_frequency(stats)


def test_lengths_are_of_what_the_policy_drew_and_answers_are_counted_beside_them():
    ranks = [
        [rollout("DDaaaDD", calls=1), rollout("DDD"), rollout("DaDaaD", calls=5, failures=1)],
        [rollout("DDDDDaD", calls=2, failures=1, finished=False)],
    ]
    expected = {
        "completions/mean_length": (4 + 3 + 3 + 6) / 4,
        "completions/min_length": 3,
        "completions/max_length": 6,
        "completions/mean_terminated_length": (4 + 3 + 3) / 3,
        "completions/min_terminated_length": 3,
        "completions/max_terminated_length": 4,
        "completions/clipped_ratio": 1 / 4,
        "completions/mean_turns": (2 + 1 + 3 + 2) / 4,
        "tools/mean_length": (3 + 0 + 3 + 1) / 4,
        "tools/call_frequency": 8 / 4,
        "tools/failure_frequency": 2 / 8,
    }
    assert metrics(*ranks) == pytest.approx(expected)


def test_what_no_completion_has_has_no_number():
    found = metrics([rollout("DD", finished=False)], [rollout("DDD", finished=False)])
    assert all(math.isnan(found[f"completions/{name}_terminated_length"]) for name in ("mean", "min", "max"))
    assert found["tools/failure_frequency"] == 0
    found = metrics([Rollout([5, 6, 7], True, "", [], 0)])
    assert found["completions/mean_length"] == 3
    assert not [name for name in found if "tool" in name or "turns" in name]

"""What a step counts of its completions, over all ranks, and what is shown of it."""

import math

import pytest

from grpo.data.records import Outcome, Rollout
from grpo.run.metrics import add_stats, step_metrics
from grpo.trainer.record import describe_step
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


def test_without_a_completion_that_ended_or_a_call_there_is_no_length_and_no_failure():
    found = metrics([rollout("DD", finished=False)], [rollout("DDD", finished=False)])
    assert all(math.isnan(found[f"completions/{name}_terminated_length"]) for name in ("mean", "min", "max"))
    assert found["tools/failure_frequency"] == 0


def test_without_turns_there_are_no_numbers_of_them():
    found = metrics([Rollout([5, 6, 7], True, "", [], 0)])
    assert found["completions/mean_length"] == 3
    assert not [name for name in found if "tool" in name or "turns" in name]


def test_the_numbers_of_the_last_evaluation_are_not_taken_for_the_steps():
    numbers = {"step_time": 3.42, "reward": 0.517, "kl": 0.0123, "tokens_per_second": 1234.0}
    rest = "kl 0.012, 1234 tokens/s"
    assert describe_step(numbers, {}) == f"3.4 s, reward 0.52, {rest}"
    accuracy = {"eval_accuracy": 0.875, "eval_reward": 1.5}
    assert describe_step(numbers, accuracy) == f"3.4 s, reward 0.52, held-out 87.5%, {rest}"
    assert describe_step(numbers, {"eval_reward": 1.5}) == f"3.4 s, reward 0.52, held-out 1.50, {rest}"

"""What the update is given of completions, and what a step counts of them, over all ranks."""

import math

import numpy as np
import pytest
from told import of_reference, sampled

from grpo.data.records import Example, Group, Outcome, Rollout, Sample, make_samples
from grpo.run.metrics import add_stats, step_metrics
from grpo.trainer.round import summed_kl
from grpo.trainer.step_result import failure_frequency, stats_of_completions

DRAWN = [True, True, False, False, True, False, True]
EXAMPLE = Example(index=0, prompt="p", prompt_ids=[1, 2], columns={})


def samples(at_answers: float) -> list[Sample]:
    """Make the samples of a group of two completions, the first of which has answers, with these log-probs there."""

    def logprobs(*values: float) -> list[float]:
        given = iter(values)
        return [next(given) if drawn else at_answers for drawn in DRAWN]

    outcome = Outcome(finished=True, messages=[])
    rollouts = [
        sampled(range(10, 17), sampling_logprobs=logprobs(-1, -2, -3, -4), drawn=DRAWN, outcome=outcome),
        sampled([20, 21], sampling_logprobs=[-5, -6], drawn=[True, True], outcome=outcome),
    ]
    group = Group(id=3, example=EXAMPLE, rollouts=rollouts)
    made = make_samples(group)
    scorer = of_reference([np.array(logprobs(-7, -8, -9, -10), np.float32), np.array([-11, -12], np.float32)])
    scorer.ask([group])
    scorer.wait(made)
    return made


@pytest.mark.parametrize("at_answers", [float("nan"), 0.0, -1e30])
def test_what_stands_at_the_tokens_of_answers_has_no_influence(at_answers):
    first, second = samples(at_answers)
    assert first.completion_ids == [*range(10, 17)], "the model is fed all of them"
    assert (first.tokens, second.tokens) == (4, 2)
    assert first.drawn.tolist() == DRAWN
    assert first.sampling_logprobs.tolist() == [-1, -2, -3, -4]
    assert first.ref_logprobs.tolist() == [-7, -8, -9, -10]
    assert second.sampling_logprobs.tolist() == [-5, -6] and second.ref_logprobs.tolist() == [-11, -12]
    first.old_logprobs = np.array([-1, -1, -1, -1], np.float32)
    assert summed_kl(first, "k1").item() == -4 + 34


def test_without_answers_the_log_probs_stay_as_they_are():
    rollout = sampled([5, 6], finished=False, sampling_logprobs=[-1.0, float("nan")])
    (sample,) = make_samples(Group(id=0, example=EXAMPLE, rollouts=[rollout]))
    assert sample.drawn is None and sample.tokens == 2 and not sample.finished
    np.testing.assert_array_equal(sample.sampling_logprobs, [-1.0, np.nan])


def rollout(pattern: str, calls: int = 0, failures: int = 0, finished: bool = True) -> Rollout:
    """Make a completion: a D for each token that was drawn, an a for each of an answer."""
    drawn = [letter == "D" for letter in pattern]
    outcome = Outcome(finished=finished, messages=[], tool_calls=calls, tool_failures=failures)
    return sampled([5] * len(drawn), finished=finished, drawn=drawn, outcome=outcome)


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
    found = metrics([sampled([5, 6, 7])])
    assert found["completions/mean_length"] == 3
    assert not [name for name in found if "tool" in name or "turns" in name]

"""The user's environment between the turns of a policy that samples: both samplers, in the trainer and in processes."""

import copy
import sys

import pytest
from talks import Talks, ids_of

from grpo.config.user_code import module_name
from grpo.data.records import Example
from grpo.model.trial import make_batcher
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.generate import LocalSampler

CODE = """
ALIVE, MOST = set(), [0]

class Echo:
    def reset(self, columns):
        ALIVE.add(self)
        MOST[0] = max(MOST[0], len(ALIVE))
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return f"{len(text)} in turn {self.turns}", 1.0, len(text) % 5 == 0

    def close(self):
        ALIVE.remove(self)
"""
LENGTH = 60


@pytest.fixture(scope="module")
def policy(model):
    policy = copy.deepcopy(model)  # what a batcher sets is for these tests
    assert make_batcher(policy, 0).packs
    return policy


@pytest.fixture
def sampled(policy, tmp_path):
    """`sampled(sampler, rows of the dataset, settings)`: three completions of each row, and the user's module."""
    started = []

    def sample(kind: type[LocalSampler], columns: list[dict], rows: int = 64, **settings):
        # A model that has learnt nothing rarely ends a turn, so many ids end one.
        talks = Talks(tmp_path, CODE, None, range(100, 130), environment="Echo", **settings)
        started.append(talks.turns)
        sampler = kind(policy, talks.tokenizer, talks.ends, LENGTH, rows=rows, turns=talks.turns)
        examples = [
            Example(index=i, prompt="", prompt_ids=ids_of(talks.tokenizer, "ask" * (i + 1), ends=False), columns=row)
            for i, row in enumerate(columns)
        ]
        module = sys.modules[module_name(talks.file)]
        try:
            groups = sampler.sample(examples, 3, 1.0, 3)
            return [rollout for group in groups for rollout in group], module, talks.tokenizer
        finally:
            assert not module.ALIVE

    yield sample
    for turns in started:
        turns.close()


def what(rollouts) -> list:
    return [(r.completion_ids, r.drawn, r.outcome) for r in rollouts]


def test_a_policy_and_an_environment_take_turns_and_samplers_and_rows_change_nothing(sampled):
    rollouts, module, tokenizer = sampled(ContinuousSampler, [{}, {}])
    assert any(rollout.outcome.finished for rollout in rollouts) and 1 < module.MOST[0] <= 6
    assert any(len(rollout.outcome.messages) > 1 for rollout in rollouts)
    for rollout in rollouts:
        heard = [message["content"] for message in rollout.outcome.messages if message["role"] == "user"]
        answered = [i for i, drawn in zip(rollout.completion_ids, rollout.drawn, strict=True) if not drawn]
        assert tokenizer.decode(answered) == "".join(f"\n\n{text}\n\n" for text in heard)
        steps = rollout.outcome.rewards["Echo"]
        # A step without an answer in the ids was the last, or its answer did not fit.
        assert steps in (len(heard), len(heard) + 1) and len(rollout.completion_ids) <= LENGTH
        assert rollout.finished == rollout.outcome.finished
    assert what(sampled(ContinuousSampler, [{}, {}], rows=2)[0]) == what(rollouts)
    assert what(sampled(LocalSampler, [{}, {}])[0]) == what(rollouts)


@pytest.mark.slow
def test_processes_change_nothing(sampled):
    first = what(sampled(ContinuousSampler, [{}, {}])[0])
    assert what(sampled(ContinuousSampler, [{}, {}], tool_timeout=60.0)[0]) == first

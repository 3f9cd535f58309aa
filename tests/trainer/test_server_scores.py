"""What servers are asked about completions, and how their answers reach samples."""

import numpy as np
import pytest
import torch
from told import of_reference, sampled

from grpo.client.server_errors import ServerError
from grpo.data.records import Example, Group, StepBatch, make_samples


def group(number: int) -> Group:
    rollouts = [sampled(ids, sampling_logprobs=[-1.0, -1.0]) for ids in ([2, 3], [4, 5])]
    return Group(id=number, example=Example(index=0, prompt="p", prompt_ids=[1], columns={}), rollouts=rollouts)


def logprobs(value: float) -> np.ndarray:
    return np.full(2, value, np.float32)


def test_samples_that_lack_an_answer_wait_for_it():
    groups = [group(4), group(7)]
    samples = [sample for each in groups for sample in make_samples(each)]
    samples[0].ref_logprobs = known = logprobs(-9.0)
    scorer = of_reference([logprobs(-1.0), logprobs(-2.0)], ServerError("no answer"))
    scorer.ask(groups)
    assert scorer.clients[""].asked == [("group 4", [1], [[2, 3], [4, 5]]), ("group 7", [1], [[2, 3], [4, 5]])]
    with pytest.raises(ServerError, match="no answer"):
        scorer.wait([samples[1], samples[0], samples[3], samples[2]])
    assert samples[0].ref_logprobs is known
    assert samples[1].ref_logprobs.tolist() == [-2.0, -2.0]
    assert samples[2].ref_logprobs is samples[3].ref_logprobs is None

    rewards = torch.zeros(2, 2)
    batch = StepBatch(groups=groups, by_function=rewards[None], rewards=rewards, signal=rewards[0] > 0, samples=samples)
    resumed = of_reference([logprobs(-3.0), logprobs(-4.0)])
    resumed.ask_again([batch])
    assert [name for name, *_ in resumed.clients[""].asked] == ["group 7"], "the answered group is not asked again"
    resumed.wait(samples)
    assert [sample.ref_logprobs[0] for sample in samples] == [-9.0, -2.0, -3.0, -4.0]


def test_what_is_asked_about_a_replaced_group_is_taken_back():
    scorer = of_reference(None, [logprobs(-1.0)] * 2)
    scorer.ask([group(1)])
    scorer.cancel(1)
    scorer.cancel(2)  # of which nothing was asked
    (request,) = scorer.clients[""].futures
    assert request.cancelled()
    scorer.ask([group(1)])
    scorer.wait(samples := make_samples(group(1)))
    assert samples[1].ref_logprobs.tolist() == [-1.0, -1.0]

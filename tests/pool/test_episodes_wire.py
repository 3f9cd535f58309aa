"""An agent's episodes between worker, pool and trainer: what is sent comes back, and what lies is refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save
from stored import AGENT, run_info, task_of

from grpo.pool.protocol import GroupResult, RunInfo, check_drawn
from grpo.pool.task_tensors import decode_drawn, encode_drawn
from grpo.wire.agent_runs import LONGEST_STORY, Branch, EpisodeRecord
from grpo.wire.refusals import ProtocolError
from grpo.wire.tool_outcomes import Outcome

NAN = math.nan
RUN = replace(run_info(), agent=AGENT)
TASK = task_of(5, version=3, columns='{"question": "?"}')
TURN = {"turn": 0, "after": None, "begins": "new_conversation", "prompt_tokens": 2, "tokens": 2}
TURN |= {"seen": True, "trained": True, "asked_at": 0.0, "answered_at": 0.125}
SAID = [{"role": "assistant", "content": "é"}]
BRANCHES = [
    Branch(
        prompt_ids=[1, 2],
        completion_ids=[4, 5, 9, 6],
        sampling_logprobs=[-0.5, -0.25, NAN, -1.5],
        drawn=[True, True, False, True],
    ),
    Branch(prompt_ids=[8], completion_ids=[3], sampling_logprobs=[-2.0], drawn=[True]),
]
TREE = [TURN, TURN | {"turn": 1, "after": 0, "begins": None}, TURN | {"turn": 2, "begins": "changed_history"}]
DRAWN = GroupResult(
    group=5,
    attempt=0,
    completions=[[4, 5, 6, 3], []],
    logprobs=[[-0.5, -0.25, -1.5, -2.0], []],
    versions=[[3, 3, 3, 3], []],
    drawn=[[True] * 4, []],
    outcomes=[
        Outcome(finished=True, messages=SAID, rewards={"solve": 0.5, "passed": 1.0}, parts={"tests": 3.0}),
        Outcome(finished=False, messages=SAID, failure="timeout"),
    ],
    episodes=[
        EpisodeRecord(branches=BRANCHES, text="é\n\U0001f600", tree=TREE),
        EpisodeRecord(branches=[], text="", tree=[TURN | {"tokens": 0, "seen": False, "trained": False}]),
    ],
)


def test_episodes_and_the_runs_agent_come_back_as_they_were_sent():
    other = replace(DRAWN, group=6, completions=DRAWN.completions[::-1], logprobs=DRAWN.logprobs[::-1])
    other = replace(other, versions=DRAWN.versions[::-1], drawn=DRAWN.drawn[::-1], outcomes=DRAWN.outcomes[::-1])
    other = replace(other, episodes=DRAWN.episodes[::-1])
    assert repr(decode_drawn(encode_drawn([DRAWN, other]))) == repr([DRAWN, other])  # NaN is not equal to itself
    assert RunInfo.of_json(RUN.to_json()) == RUN
    check_drawn(DRAWN, RUN, TASK)


def story(**changes) -> bytes:
    return json.dumps({"text": "", "tree": [TURN]} | changes).encode()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"branch_counts": np.array([2], np.int32)}, "branch_counts has 1 numbers: send 2"),
        ({"branch_counts": np.array([2, 1], np.int32)}, "the lengths add up to 3, and there are 2"),
        ({"branch_lengths": np.array([4, 2], np.int32)}, "the lengths add up to 6, and there are 5"),
        ({"branch_lengths": np.array([5, 0], np.int32)}, "a length is 0: send at least 1"),
        ({"branch_prompt_lengths": np.array([3], np.int32)}, "the tensors of branches have different lengths"),
        ({"branch_drawn": np.array([1, 1, 0, 1, 2], np.uint8)}, "branch_drawn has 2: send 0 or 1"),
        ({"branch_logprobs": np.zeros(4, np.float32)}, "the tensors of branches' tokens have different lengths"),
        ({"branch_ids": None}, "branch_ids"),
        ({"episode_lengths": None}, "episode_lengths"),
        ({"more": np.zeros(1, np.uint8)}, "unknown tensor 'more'"),
    ],
)
def test_damaged_tensors_are_refused(tensors, says):
    changed = load(encode_drawn([DRAWN])) | tensors
    with pytest.raises(ProtocolError, match=says) as refusal:
        decode_drawn(save({name: tensor for name, tensor in changed.items() if tensor is not None}))
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        story(more=1),
        story(text=7),
        story(text="\ud800"),
        story(tree={}),
        story(tree=[7]),
        story(tree=[TURN | {"seen": 1}]),
        story(tree=[TURN | {"trained": None}]),
        story(tree=[TURN | {"begins": "a b"}]),
        story(tree=[TURN | {"asked_at": NAN}]),
        story(tree=[{name: value for name, value in TURN.items() if name != "tokens"}]),
        story(text="a" * LONGEST_STORY),
    ],
)
def test_damaged_stories_are_refused(body):
    tensors = load(encode_drawn([DRAWN]))
    texts = [body, story()]
    tensors["episodes"] = np.frombuffer(b"".join(texts), np.uint8)
    tensors["episode_lengths"] = np.array([*map(len, texts)], np.int32)
    with pytest.raises(ProtocolError) as refusal:
        decode_drawn(save(tensors))
    assert refusal.value.status == 400


def with_branch(**changes) -> dict:
    first = replace(DRAWN.episodes[0], branches=[replace(BRANCHES[0], **changes), BRANCHES[1]])
    return {"episodes": [first, DRAWN.episodes[1]]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"episodes": None}, "it has episodes and the run no agent, or the run alone has"),
        ({"outcomes": None}, "it has outcomes and the run no turns, or the run alone has"),
        ({"versions": [[3, 3, 3, 2], []]}, "drawn by versions .*: the task is of version 3"),
        ({"completions": [[4, 5, 6], []]}, "its branches draw 4 tokens, and it has 3"),
        ({"logprobs": [[-0.5, -0.25, -1.5, -2.5], []]}, "its branches have other log-probs than the drawn tokens"),
        (with_branch(prompt_ids=[1, 100]), "token ids go from 1 to 100: the vocabulary is 0 to 99"),
        (with_branch(prompt_ids=[1] * 9), "a branch has 13 tokens: the most are 12"),
        (with_branch(drawn=[True, True, True, False]), "a branch does not begin and end with drawn tokens"),
        (with_branch(sampling_logprobs=[-0.5, -0.25, -0.1, -1.5]), "a token that is not drawn has a log-prob"),
        (
            {"outcomes": [replace(DRAWN.outcomes[0], rewards={"other": 1.0}), DRAWN.outcomes[1]]},
            "rewards .*other.*, which the run's agent does not give",
        ),
        (
            {"episodes": [replace(DRAWN.episodes[0], tree=[*TREE, TURN]), DRAWN.episodes[1]]},
            "an episode has 4 turns: max_turns is 3",
        ),
        (
            {"logprobs": [[0.5, -0.25, -1.5, -2.0], []], **with_branch(sampling_logprobs=[0.5, -0.25, NAN, -1.5])},
            "a log-prob is above 0 or not finite",
        ),
    ],
)
def test_a_worker_that_lies_of_episodes_is_refused(changes, says):
    with pytest.raises(ProtocolError, match=says) as refusal:
        check_drawn(replace(DRAWN, **changes), RUN, TASK)
    assert refusal.value.status == 422


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"agent_history": "other"}, "agent_history 'other': send drawn or rendered"),
        ({"context": 0}, "context"),
        ({"program": "abc"}, "program: send a list of texts"),
        ({"agent_failure_reward": "0"}, "agent_failure_reward: send a number or null"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs: send an object or null"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_damaged_agent_of_a_run_is_refused(changes, says):
    content = json.loads(RUN.to_json())
    content["agent"] |= changes
    with pytest.raises(ProtocolError, match=says):
        RunInfo.of_json(json.dumps(content).encode())

"""The bytes between trainer, pool and workers: what is sent comes back, and what is damaged is refused."""

import hashlib
import json
import math
from contextlib import nullcontext
from dataclasses import asdict, replace

import numpy as np
import pytest
from safetensors.numpy import load, save
from stored import AGENT, PROBE, run_info, task_of

from grpo.pool.protocol import GroupResult, Lease, RunInfo, Version, check_drawn
from grpo.pool.task_tensors import decode_drawn, decode_tasks, encode_drawn, encode_tasks
from grpo.wire.refusals import ProtocolError
from grpo.wire.tool_outcomes import (
    LONGEST_COLUMNS,
    LONGEST_OUTCOME,
    LONGEST_STORY,
    Branch,
    EpisodeRecord,
    Outcome,
    RunTools,
)

RUN = run_info()
TASKS = [task_of(5, [7, 8, 9], version=3), task_of(6, [1], attempt=2, version=3)]
DRAWN = GroupResult(
    group=5,
    attempt=0,
    completions=[[4, 2], [5, 6, 7, 8]],
    logprobs=[[-0.5, -0.25], [-1.0, 0.0, -2.0, -0.125]],
    versions=[[3, 3], [3, 3, 3, 3]],
)
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {}}}
SETTINGS = {
    "max_turns": 3,
    "max_tool_calling_iterations": None,
    "max_tool_response_length": 100,
    "tool_call_parser": "auto",
    "chat_template_kwargs": {"enable_thinking": False},
}
TURNS = RunTools.of([SCHEMA], "games/guess.py:Guess", ["Guess"], **SETTINGS)
WITH_TURNS = replace(RUN, max_completion_length=6, turns=TURNS)
NAN = math.nan


ADDED = "in_flight_weight_updates", "turns", "agent", "processor"  # fields that a run may lack
PICTURED_TASKS = [replace(TASKS[0], pictures=("ab" * 32, "cd" * 32)), TASKS[1]]
PICTURED_TASKS += [replace(TASKS[1], pictures=("ab" * 32,))]


def calling(arguments):
    call = {"function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "é", "tool_calls": [call]}


CALL, ANSWER = calling({}), {"role": "tool", "content": ""}
OUTCOMES = [
    Outcome(finished=True, messages=[CALL, ANSWER], tool_calls=2, tool_failures=1, rewards={"Guess": 0.5}),
    Outcome(finished=False, messages=[{"role": "assistant", "content": "\U0001f600"}]),
]
ANSWERED = GroupResult(
    group=5,
    attempt=0,
    completions=[[4, 2, 9, 2, 5, 2], [5, 2, 7, 8, 9, 6]],
    logprobs=[[-0.5, -0.25, NAN, NAN, -1.0, 0.0], [-1.0, -2.0, NAN, -0.5, -0.5, -0.125]],
    versions=[[3] * 6, [3] * 6],
    drawn=[[True, True, False, False, True, True], [True, True, False, True, True, True]],
    outcomes=OUTCOMES,
)
WITH_AGENT = replace(RUN, agent=AGENT)
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
EPISODES = GroupResult(
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
PLAIN = load(encode_tasks(TASKS))
VERSION = Version(version=3, sha256="b" * 64, size=1000, whole=False, base=2, delta="c" * 64, probe=PROBE)


def test_everything_comes_back_as_it_was_sent():
    assert decode_tasks(encode_tasks(TASKS), 100) == TASKS
    assert decode_tasks(encode_tasks([]), 100) == []
    assert decode_tasks(encode_tasks(PICTURED_TASKS), 100) == PICTURED_TASKS
    with_processor = replace(RUN, processor="ab12")
    assert RunInfo.of_json(with_processor.to_json()) == with_processor
    assert decode_drawn(encode_drawn([DRAWN, replace(DRAWN, group=6)])) == [DRAWN, replace(DRAWN, group=6)]
    assert decode_drawn(encode_drawn([])) == []
    assert RunInfo.of_json(RUN.to_json()) == RUN
    pictured = replace(VERSION, probe=replace(VERSION.probe, pictures=("ab" * 32,)))
    for version in (VERSION, pictured):
        assert Version.of_fields(json.loads(version.to_json())) == version
    lease = Lease(worker="box", room=3, holds=[[5, 0]], wait=20.0)
    lease = replace(lease, card="4090", version=2, message="drawing", tokens_per_second=12.5)
    assert Lease.of_json(lease.to_json()) == lease


def test_what_a_run_with_turns_sends_comes_back_as_it_was_sent():
    assert RunInfo.of_json(WITH_TURNS.to_json()) == WITH_TURNS
    # What workers compare, by hashlib and json alone.
    assert TURNS.schemas == hashlib.sha256(json.dumps([SCHEMA], sort_keys=True).encode()).hexdigest()
    assert (TURNS.tools, TURNS.environment) == (["add"], "Guess")
    tasks = [replace(TASKS[0], columns='{"secret": "\\u00e9", "hard": NaN}'), replace(TASKS[1], columns="{}")]
    assert decode_tasks(encode_tasks(tasks), 100) == tasks
    none = replace(ANSWERED, group=6, outcomes=[replace(OUTCOMES[0], rewards={"Guess": NAN}), OUTCOMES[1]])
    assert str(decode_drawn(encode_drawn([ANSWERED, none]))) == str([ANSWERED, none])  # NaN differs from itself
    assert (ANSWERED.tokens, DRAWN.tokens) == (9, 6)
    deep = replace(OUTCOMES[1], messages=[calling(nested(50))])
    assert Outcome.of_json(deep.to_json()) == deep


def test_episodes_and_the_runs_agent_come_back_as_they_were_sent():
    fields = "completions", "logprobs", "versions", "drawn", "outcomes", "episodes"
    other = replace(EPISODES, group=6, **{name: getattr(EPISODES, name)[::-1] for name in fields})
    assert str(decode_drawn(encode_drawn([EPISODES, other]))) == str([EPISODES, other])  # NaN differs from itself
    assert RunInfo.of_json(WITH_AGENT.to_json()) == WITH_AGENT


def test_without_turns_the_bodies_are_those_of_a_run_before_there_were_any():
    assert {*PLAIN} == {"groups", "attempts", "versions", "prompt_lengths", "prompt_ids"}
    of_drawn = {"groups", "attempts", "copies", "completion_lengths", "completion_ids", "logprobs", "versions"}
    assert {*load(encode_drawn([DRAWN]))} == of_drawn
    # A run that was written before a field was added is read.
    old = {name: value for name, value in asdict(RUN).items() if name not in ADDED}
    assert RunInfo.of_json(json.dumps(old).encode()) == RUN


IN_ROWS = load(encode_tasks([replace(TASKS[0], columns="{ }"), TASKS[1]]))
IN_TURNS = load(encode_drawn([ANSWERED]))
IN_PICTURES = load(encode_tasks(PICTURED_TASKS))
IN_EPISODES = load(encode_drawn([EPISODES]))


@pytest.mark.parametrize(
    ("tensors", "tensor", "value", "says"),
    [
        (PLAIN, "groups", np.asarray([5], np.int32), "different lengths"),
        (PLAIN, "versions", np.asarray([3, -1], np.int32), "below 0"),
        (PLAIN, "prompt_lengths", np.asarray([4, 0], np.int32), "a length is 0"),
        (PLAIN, "prompt_lengths", np.asarray([2**31 - 1, 2**31 - 1], np.int32), "add up to 4294967294"),
        (PLAIN, "prompt_ids", np.asarray([7, 8, 9, 100], np.int32), "vocabulary is 0 to 99"),
        (PLAIN, "prompt_ids", np.asarray([7, 8, 9, 1], np.float32), "send int32"),
        (PLAIN, "extra", np.zeros(1, np.int32), "unknown tensor 'extra'"),
        (IN_PICTURES, "picture_counts", np.asarray([2, 1], np.int32), "different lengths"),
        (IN_PICTURES, "picture_counts", np.asarray([2**27] * 3, np.int32), "lengths"),  # times 32 it is 0 in int32
        (IN_PICTURES, "picture_counts", np.asarray([2, -1, 2], np.int32), "a length is -32"),
        (IN_PICTURES, "picture_digests", np.zeros(95, np.uint8), "add up to 96, and there are 95"),
        (IN_PICTURES, "picture_digests", np.zeros(96, np.int32), "send uint8"),
        (IN_ROWS, "columns", np.frombuffer(b"[1]", np.uint8), "not a JSON object"),
        (IN_ROWS, "columns", np.frombuffer(b"{a}", np.uint8), "not JSON"),
        (IN_ROWS, "columns", np.frombuffer(b'"\xff"', np.uint8), "no UTF-8"),
        (IN_ROWS, "column_lengths", np.asarray([3], np.int32), "column_lengths has 1 numbers: send 2"),
        (IN_ROWS, "column_lengths", np.asarray([4, -1], np.int32), "a length is -1"),
        (IN_TURNS, "drawn", np.full(12, 2, np.uint8), "drawn has 2: send 0 or 1"),
        (IN_TURNS, "drawn", None, "'drawn' is missing"),
        (IN_TURNS, "outcome_lengths", np.asarray([5, 5, 5], np.int32), "outcome_lengths has 3 numbers: send 2"),
        (IN_TURNS, "copies", np.asarray([3], np.int32), "copies add up to 3"),
        (IN_TURNS, "logprobs", np.zeros(5, np.float32), "different lengths"),
        (IN_EPISODES, "branch_counts", np.array([2], np.int32), "branch_counts has 1 numbers: send 2"),
        (IN_EPISODES, "branch_counts", np.array([2, 1], np.int32), "the lengths add up to 3, and there are 2"),
        (IN_EPISODES, "branch_lengths", np.array([4, 2], np.int32), "the lengths add up to 6, and there are 5"),
        (IN_EPISODES, "branch_lengths", np.array([5, 0], np.int32), "a length is 0: send at least 1"),
        (IN_EPISODES, "branch_prompt_lengths", np.array([3], np.int32), "tensors of branches have different lengths"),
        (IN_EPISODES, "branch_drawn", np.array([1, 1, 0, 1, 2], np.uint8), "branch_drawn has 2: send 0 or 1"),
        (IN_EPISODES, "branch_logprobs", np.zeros(4, np.float32), "of branches' tokens have different lengths"),
        (IN_EPISODES, "branch_ids", None, "branch_ids"),
        (IN_EPISODES, "episode_lengths", None, "episode_lengths"),
        (IN_EPISODES, "more", np.zeros(1, np.uint8), "unknown tensor 'more'"),
    ],
)
def test_damaged_tensors_are_refused(tensors, tensor, value, says):
    body = save({name: values for name, values in (tensors | {tensor: value}).items() if values is not None})
    with pytest.raises(ProtocolError, match=says) as refusal:
        decode_tasks(body, 100) if "prompt_ids" in tensors else decode_drawn(body)
    assert refusal.value.status == 400


def story(**changes) -> bytes:
    return json.dumps({"text": "", "tree": [TURN]} | changes).encode()


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
    tensors = load(encode_drawn([EPISODES]))
    texts = [body, story()]
    tensors["episodes"] = np.frombuffer(b"".join(texts), np.uint8)
    tensors["episode_lengths"] = np.array([*map(len, texts)], np.int32)
    with pytest.raises(ProtocolError) as refusal:
        decode_drawn(save(tensors))
    assert refusal.value.status == 400


def test_columns_and_outcomes_have_a_largest_size():
    text = json.dumps({"text": "x" * LONGEST_COLUMNS})
    with pytest.raises(ProtocolError, match=f"{len(text)} bytes: send {LONGEST_COLUMNS} at most"):
        decode_tasks(encode_tasks([replace(TASKS[0], columns=text)]), 100)
    long = replace(OUTCOMES[0], messages=[{"role": "tool", "content": "x" * LONGEST_OUTCOME}])
    with pytest.raises(ProtocolError, match=f"bytes: send {LONGEST_OUTCOME} at most"):
        decode_drawn(encode_drawn([replace(ANSWERED, outcomes=[long, long])]))


def nested(depth):
    return {"arguments": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"finished": 1}, "send true or false"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "with a role and content"),
        ({"messages": [{"role": "system", "content": "a"}]}, "with a role and content"),
        ({"messages": [{"role": "user", "content": None}]}, "with a role and content"),
        ({"messages": [CALL | {"tool_calls": None}]}, "with name and arguments"),
        ({"messages": [CALL | {"tool_calls": [{"name": "add", "arguments": {}}]}]}, "with name and arguments"),
        ({"messages": [CALL | {"tool_calls": [{"function": {"name": 1, "arguments": {}}}]}]}, "with name and"),
        ({"messages": [calling([])]}, "with name and"),
        ({"messages": [CALL | {"name": 1}]}, "with a role and content"),
        ({"messages": []}, "send a message of the assistant first"),
        ({"messages": [{"role": "user", "content": "a"}, CALL]}, "send a message of the assistant first"),
        ({"messages": [CALL | {"content": "\ud800"}]}, "half of a surrogate pair"),
        ({"messages": [CALL | {"more": NAN}]}, "send none that has NaN"),
        ({"messages": [calling(nested(51))]}, "more than 55 lists and objects"),
        ({"tool_calls": -1}, "tool_calls '-1'"),
        ({"tool_failures": 3}, "tool_failures '3': send an integer from 0 to 2"),
        ({"failure": 3}, "failure: send a text"),
        ({"parts": {"tests": "3"}}, "parts: send an object of numbers"),
        ({"rewards": [1]}, "an object of numbers"),
        ({"rewards": {"a": True}}, "an object of numbers"),
        ({"rewards": {"a": 10**400}}, "an object of numbers"),
        ({"other": 1}, "unknown field 'other'"),
    ],
)
def test_damaged_outcomes_are_refused(changes, says):
    body = json.loads(OUTCOMES[0].to_json()) | changes
    with pytest.raises(ProtocolError, match=says) as refusal:
        Outcome.of_json(json.dumps(body).encode())
    assert refusal.value.status == 400


def swap(place: int, value, rows: list[list]) -> list[list]:
    return [[*rows[0][:place], value, *rows[0][place + 1 :]], rows[1]]


LIES = [
    ({"completions": [[4, 2]]}, "1 completions"),
    ({"completions": [[4, 2], [5, 6, 7, 100]]}, "ids go from 5 to 100"),
    ({"completions": [[2, 4], [5, 6, 7, 8]]}, "continues after an eos"),
    ({"completions": [[4, 5], [5, 6, 7, 8]]}, "neither an eos nor"),
    ({"completions": [[4, 2], [5, 6, 7, 8, 9]]}, "has 5 tokens"),
    ({"logprobs": [[-0.5, 0.1], [-1.0, 0.0, -2.0, -0.125]]}, "above 0"),
    ({"logprobs": [[-0.5, float("nan")], [-1.0, 0.0, -2.0, -0.125]]}, "not finite"),
    ({"versions": [[3, 3], [3, 3, 4, 4]]}, "the task is of version 3"),
]
OF_TURNS = [
    ({"drawn": None, "outcomes": None}, "it has outcomes and the run no turns, or the run alone"),
    ({"drawn": swap(5, False, ANSWERED.drawn)}, "not between an eos and drawn tokens"),
    ({"drawn": swap(0, False, ANSWERED.drawn)}, "not between an eos and drawn tokens"),
    ({"drawn": swap(1, False, ANSWERED.drawn)}, "not between an eos and drawn tokens"),
    ({"drawn": swap(2, True, ANSWERED.drawn)}, "continues after an eos"),
    ({"logprobs": swap(4, NAN, ANSWERED.logprobs)}, "not finite"),
    ({"logprobs": swap(2, -1.0, ANSWERED.logprobs)}, "an answer's token has a log-prob"),
    ({"completions": swap(5, 7, ANSWERED.completions)}, "without an eos at its end is called finished"),
    ({"outcomes": [replace(OUTCOMES[0], rewards={"Other": 1.0}), OUTCOMES[1]]}, "rewards {'Other'}"),
]


def with_branch(**changes) -> dict:
    first = replace(EPISODES.episodes[0], branches=[replace(BRANCHES[0], **changes), BRANCHES[1]])
    return {"episodes": [first, EPISODES.episodes[1]]}


OF_EPISODES = [
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
        {"outcomes": [replace(EPISODES.outcomes[0], rewards={"other": 1.0}), EPISODES.outcomes[1]]},
        "rewards .*other.*, which the run's agent does not give",
    ),
    (
        {"episodes": [replace(EPISODES.episodes[0], tree=[*TREE, TURN]), EPISODES.episodes[1]]},
        "an episode has 4 turns: max_turns is 3",
    ),
    (
        {"logprobs": [[0.5, -0.25, -1.5, -2.0], []], **with_branch(sampling_logprobs=[0.5, -0.25, NAN, -1.5])},
        "a log-prob is above 0 or not finite",
    ),
]


@pytest.mark.parametrize(
    ("drawn", "run", "changes", "says"),
    [
        *((DRAWN, RUN, *lie) for lie in LIES),
        *((ANSWERED, WITH_TURNS, *lie) for lie in OF_TURNS),
        *((EPISODES, WITH_AGENT, *lie) for lie in OF_EPISODES),
    ],
)
def test_a_worker_that_lies_is_refused(drawn, run, changes, says):
    check_drawn(drawn, run, TASKS[0])
    with pytest.raises(ProtocolError, match=says) as refusal:
        check_drawn(replace(drawn, **changes), run, TASKS[0])
    assert refusal.value.status == 422


@pytest.mark.parametrize(
    ("turns", "says"),
    [(replace(TURNS, max_turns=1), "a completion has 2 turns: max_turns is 1"), (None, "it has outcomes")],
)
def test_turns_that_the_run_does_not_have_are_refused(turns, says):
    with pytest.raises(ProtocolError, match=says):
        check_drawn(ANSWERED, replace(WITH_TURNS, turns=turns), TASKS[0])


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ([[3, 5], [3, 3, 5, 7]], None),
        ([[7, 7], [3, 3, 3, 3]], None),
        ([[3, 5], [3, 5, 3, 5]], r"drawn by versions \[3, 5\]: the task takes 3 and later ones, in order"),
        ([[2, 3], [3, 3, 3, 3]], r"drawn by versions \[2, 3\]: the task takes 3"),
    ],
)
def test_with_in_flight_weight_updates_tokens_have_versions_from_the_tasks_on(versions, says):
    run = RunInfo.of_json(json.dumps(asdict(RUN) | {"in_flight_weight_updates": True}).encode())
    with nullcontext() if says is None else pytest.raises(ProtocolError, match=says):
        check_drawn(replace(DRAWN, versions=versions), run, TASKS[0])


def read_version(body: bytes) -> Version:
    return Version.of_fields(json.loads(body))


def with_turns(**changes) -> dict:
    return asdict(RUN) | {"turns": asdict(TURNS) | changes}


def with_agent(**changes) -> dict:
    return asdict(RUN) | {"agent": asdict(AGENT) | changes}


@pytest.mark.parametrize(
    ("read", "found", "says"),
    [
        (RunInfo.of_json, asdict(RUN) | {"in_flight_weight_updates": 1}, "send true or false"),
        (RunInfo.of_json, asdict(RUN) | {"turns": []}, "RunTools: no object"),
        (RunInfo.of_json, with_turns(tools="add"), "tools: send a list of names"),
        (RunInfo.of_json, with_turns(rewards=[1]), "rewards: send a text"),
        (RunInfo.of_json, with_turns(environment=1), "environment: send a text"),
        (RunInfo.of_json, with_turns(schemas="a"), "schemas 'a': send 64 hex digits"),
        (RunInfo.of_json, with_turns(max_turns=0), "max_turns '0'"),
        (RunInfo.of_json, with_turns(max_tool_response_length=None), "max_tool_response_length 'None'"),
        (RunInfo.of_json, with_turns(tool_call_parser=None), "tool_call_parser: send a text"),
        (RunInfo.of_json, with_turns(chat_template_kwargs=[]), "chat_template_kwargs: send an object or null"),
        (RunInfo.of_json, with_agent(agent_history="other"), "agent_history 'other': send drawn or rendered"),
        (RunInfo.of_json, with_agent(context=0), "context"),
        (RunInfo.of_json, with_agent(program="abc"), "program: send a list of texts"),
        (RunInfo.of_json, with_agent(agent_failure_reward="0"), "agent_failure_reward: send a number or null"),
        (RunInfo.of_json, with_agent(chat_template_kwargs=[]), "chat_template_kwargs: send an object or null"),
        (RunInfo.of_json, with_agent(more=1), "unknown field 'more'"),
        (RunInfo.of_json, asdict(RUN) | {"temperature": 0}, "temperature '0'"),
        (RunInfo.of_json, asdict(RUN) | {"eos_token_ids": [100]}, "eos_token_ids has 100"),
        (RunInfo.of_json, asdict(RUN) | {"run": "x"}, "16 hex digits"),
        (RunInfo.of_json, asdict(RUN) | {"temperature": 10**400}, "temperature '1000"),
        (RunInfo.of_json, asdict(RUN) | {"groups_per_round": 0}, "groups_per_round '0'"),
        (RunInfo.of_json, asdict(RUN) | {"base_weights": "a" * 63}, "base_weights 'a*': send 64 hex digits"),
        (RunInfo.of_json, [1], "not a JSON object"),
        (Lease.of_json, {"worker": "a"}, "a field is missing: 'holds'"),
        (Lease.of_json, {"worker": "a", "room": True, "holds": [], "wait": 1}, "room"),
        (Lease.of_json, {"worker": "a", "room": 1, "holds": [[1]], "wait": 1}, r"list of \[group, attempt\]"),
        (Lease.of_json, {"worker": "a", "room": 1, "holds": [], "wait": float("inf")}, "wait"),
        (Lease.of_json, {"worker": "a" * 129, "room": 1, "holds": [], "wait": 1}, "129 characters"),
        (Lease.of_json, {"worker": "\ud800", "room": 1, "holds": [], "wait": 1}, "half of a surrogate pair"),
        (Lease.of_json, {"worker": "a\0b", "room": 1, "holds": [], "wait": 1}, "or a NUL"),
        (read_version, asdict(VERSION) | {"base": None}, "a version needs"),
        (read_version, asdict(VERSION) | {"sha256": "B" * 64}, "64 hex digits"),
        (read_version, asdict(VERSION) | {"probe": asdict(VERSION.probe) | {"logprobs": []}}, "one finite log-prob"),
        (read_version, asdict(VERSION) | {"probe": asdict(VERSION.probe) | {"logprobs": [10**400]}}, "one finite"),
        (read_version, asdict(VERSION) | {"probe": asdict(VERSION.probe) | {"pictures": "ab"}}, "as a list"),
        (read_version, asdict(VERSION) | {"probe": asdict(VERSION.probe) | {"pictures": ["ab"]}}, "64 hex digits"),
        (read_version, asdict(VERSION) | {"other": 1}, "unknown field 'other'"),
    ],
)
def test_damaged_json_is_refused(read, found, says):
    with pytest.raises(ProtocolError, match=says):
        read(json.dumps(found).encode())

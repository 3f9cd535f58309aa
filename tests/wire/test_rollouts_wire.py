"""The bytes between trainer, pool and workers: what is sent comes back, and what is damaged is refused."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace

import numpy as np
import pytest
from safetensors.numpy import load, save

from grpo.wire.errors import ProtocolError
from grpo.wire.rollout_tensors import decode_drawn, decode_tasks, encode_drawn, encode_tasks
from grpo.wire.rollouts import Drawn, Lease, Probe, RunInfo, Task, Version, check_drawn

RUN = RunInfo(
    run="0123456789abcdef",
    name="runs/a",
    vocab_size=100,
    eos_token_ids=[2],
    num_generations=2,
    max_completion_length=4,
    temperature=0.7,
    seed=42,
    model_files="a" * 64,
)
TASKS = [Task(5, 0, 3, [7, 8, 9]), Task(6, 2, 3, [1])]
DRAWN = Drawn(5, 0, [[4, 2], [5, 6, 7, 8]], [[-0.5, -0.25], [-1.0, 0.0, -2.0, -0.125]], [[3, 3], [3, 3, 3, 3]])
VERSION = Version(3, "b" * 64, 1000, False, 2, "c" * 64, Probe([1, 2], [3], [-0.5]))


def test_everything_comes_back_as_it_was_sent():
    assert decode_tasks(encode_tasks(TASKS), 100) == TASKS
    assert decode_tasks(encode_tasks([]), 100) == []
    assert decode_drawn(encode_drawn([DRAWN, replace(DRAWN, group=6)])) == [DRAWN, replace(DRAWN, group=6)]
    assert decode_drawn(encode_drawn([])) == []
    assert RunInfo.of_json(RUN.to_json()) == RUN
    assert Version.of_fields(json.loads(VERSION.to_json())) == VERSION
    lease = Lease("box", 3, [[5, 0]], 20.0, "4090", 2, "drawing", 12.5)
    assert Lease.of_json(lease.to_json()) == lease


@pytest.mark.parametrize(
    ("tensor", "value", "says"),
    [
        ("groups", np.asarray([5], np.int32), "different lengths"),
        ("versions", np.asarray([3, -1], np.int32), "below 0"),
        ("prompt_lengths", np.asarray([4, 0], np.int32), "a length is 0"),
        ("prompt_lengths", np.asarray([3, 3], np.int32), "add up to 6"),
        ("prompt_lengths", np.asarray([2**31 - 1, 2**31 - 1], np.int32), "add up to 4294967294"),
        ("prompt_ids", np.asarray([7, 8, 9, 100], np.int32), "vocabulary is 0 to 99"),
        ("prompt_ids", np.asarray([7, 8, 9, 1], np.float32), "send int32"),
        ("extra", np.zeros(1, np.int32), "unknown tensor 'extra'"),
    ],
)
def test_damaged_tasks_are_refused(tensor, value, says):
    body = save(load(encode_tasks(TASKS)) | {tensor: value})
    with pytest.raises(ProtocolError, match=says) as refusal:
        decode_tasks(body, 100)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("tensor", "value", "says"),
    [
        ("copies", np.asarray([3], np.int32), "copies add up to 3"),
        ("completion_lengths", np.asarray([6, 0], np.int32), "a length is 0"),
        ("logprobs", np.zeros(5, np.float32), "different lengths"),
    ],
)
def test_damaged_groups_are_refused(tensor, value, says):
    with pytest.raises(ProtocolError, match=says):
        decode_drawn(save(load(encode_drawn([DRAWN])) | {tensor: value}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"completions": [[4, 2]]}, "1 completions"),
        ({"completions": [[4, 2], [5, 6, 7, 100]]}, "ids go from 5 to 100"),
        ({"completions": [[2, 4], [5, 6, 7, 8]]}, "goes on after an eos"),
        ({"completions": [[4, 5], [5, 6, 7, 8]]}, "neither an eos nor"),
        ({"completions": [[4, 2], [5, 6, 7, 8, 9]]}, "has 5 tokens"),
        ({"logprobs": [[-0.5, 0.1], [-1.0, 0.0, -2.0, -0.125]]}, "above 0"),
        ({"logprobs": [[-0.5, float("nan")], [-1.0, 0.0, -2.0, -0.125]]}, "not finite"),
        ({"versions": [[3, 3], [3, 3, 4, 4]]}, "the task is of version 3"),
    ],
)
def test_a_worker_that_lies_is_refused(changes, says):
    check_drawn(DRAWN, RUN, TASKS[0])
    with pytest.raises(ProtocolError, match=says) as refusal:
        check_drawn(replace(DRAWN, **changes), RUN, TASKS[0])
    assert refusal.value.status == 422


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ([[3, 5], [3, 3, 5, 7]], None),
        ([[7, 7], [3, 3, 3, 3]], None),
        ([[3, 5], [3, 5, 3, 5]], r"drawn by versions 3, 5, 3, 5: the task takes 3 and later ones, in order"),
        ([[2, 3], [3, 3, 3, 3]], r"drawn by versions 2, 3: the task takes 3"),
        ([[3, 3], [3, 4, 5, 6]], r"drawn by version 4, which is not here"),
    ],
)
def test_with_in_flight_weight_updates_tokens_have_versions_from_the_tasks_on(versions, says):
    run = RunInfo.of_json(json.dumps(asdict(RUN) | {"in_flight_weight_updates": True}).encode())
    with nullcontext() if says is None else pytest.raises(ProtocolError, match=says):
        check_drawn(replace(DRAWN, versions=versions), run, TASKS[0], {2, 3, 5, 7})


def test_a_run_that_was_written_before_a_field_was_added_is_read():
    old = {name: value for name, value in asdict(RUN).items() if name != "in_flight_weight_updates"}
    assert RunInfo.of_json(json.dumps(old).encode()) == RUN


@pytest.mark.parametrize(
    ("read", "found", "says"),
    [
        (RunInfo.of_json, asdict(RUN) | {"in_flight_weight_updates": 1}, "send true or false"),
        (RunInfo.of_json, asdict(RUN) | {"temperature": 0}, "temperature '0'"),
        (RunInfo.of_json, asdict(RUN) | {"eos_token_ids": [100]}, "eos_token_ids has 100"),
        (RunInfo.of_json, asdict(RUN) | {"run": "x"}, "16 hex digits"),
        (RunInfo.of_json, asdict(RUN) | {"temperature": 10**400}, "temperature '1000"),
        (RunInfo.of_json, asdict(RUN) | {"name": 5}, "name: send a text"),
        (RunInfo.of_json, asdict(RUN) | {"groups_per_round": 0}, "groups_per_round '0'"),
        (RunInfo.of_json, asdict(RUN) | {"base_weights": "a" * 63}, "base_weights 'a*': send 64 hex digits"),
        (RunInfo.of_json, [1], "not a JSON object"),
        (Lease.of_json, {"worker": "a"}, "a field is missing"),
        (Lease.of_json, {"worker": "a", "room": True, "holds": [], "wait": 1}, "room"),
        (Lease.of_json, {"worker": "a", "room": 1, "holds": [[1]], "wait": 1}, r"list of \[group, attempt\]"),
        (Lease.of_json, {"worker": "a", "room": 1, "holds": [], "wait": float("inf")}, "wait"),
        (Lease.of_json, {"worker": "a" * 129, "room": 1, "holds": [], "wait": 1}, "129 characters"),
        (Lease.of_json, {"worker": "\ud800", "room": 1, "holds": [], "wait": 1}, "half of a surrogate pair"),
    ],
)
def test_damaged_json_is_refused(read, found, says):
    with pytest.raises(ProtocolError, match=says):
        read(json.dumps(found).encode())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base": None}, "a version needs"),
        ({"base": None, "delta": None}, "a version needs"),
        ({"sha256": "B" * 64}, "64 hex digits"),
        ({"probe": {"prompt_ids": [1], "completion_ids": [2], "logprobs": []}}, "one finite log-prob"),
        ({"probe": {"prompt_ids": [1], "completion_ids": [2], "logprobs": [10**400]}}, "one finite log-prob"),
        ({"other": 1}, "unknown field 'other'"),
    ],
)
def test_damaged_versions_are_refused(changes, says):
    with pytest.raises(ProtocolError, match=says):
        Version.of_fields(json.loads(VERSION.to_json()) | changes)

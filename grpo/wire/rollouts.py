"""The bytes of a pool of rollouts: tasks go to workers, completions come back. docs/protocol.md describes the requests.

A task is a group: a prompt whose completions one worker draws. A version of the policy is named by the number of
updates that it has had.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any

import numpy as np
from safetensors.numpy import save

from grpo.wire.errors import ProtocolError, check_name, check_number, malformed
from grpo.wire.tensors import float32, int32, read_tensors

MOST_TASKS = 4096
"""most tasks or groups of one request"""
LARGEST_ID = 2**31 - 1
ADAPTER = "adapter"
"""folder, in that of a model, with an adapter_config.json"""


@dataclass(frozen=True)
class RunInfo:
    """What all tasks of a run share. A pool serves one run."""

    run: str
    """the run's identity, in hex: model, data and the settings that change numbers"""
    name: str
    """the run's name on pages and in logs"""
    vocab_size: int
    eos_token_ids: list[int]
    num_generations: int
    """completions of each group"""
    max_completion_length: int
    temperature: float
    seed: int
    """random numbers of a completion follow from seed + (attempt << 32), group and the completion's number in it"""
    model_files: str
    """SHA-256 of the file (POST files) with the model's folder but for its weights: a safetensors file, one uint8
    tensor for each file, named by its path"""
    groups_per_round: int = 1
    """a group's id divided by it, rounded down, is the round: pages show it"""
    base_weights: str | None = None
    """SHA-256 of the file (POST files) with the frozen weights under an adapter: each version is the adapter alone,
    whose configuration is in the folder `adapter` of `model_files`; None where each version is all of the weights"""
    in_flight_weight_updates: bool = False
    """whether a task may be drawn by its version and by any newer one, and each token of a completion by another:
    workers always take the newest version"""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, body: bytes) -> RunInfo:
        """Read a body. Raises ProtocolError, 400."""
        info = _of_fields(cls, read_json(body))
        _check_text("name", info.name)
        _check_hex("run", info.run, 16)
        _check_hex("model_files", info.model_files, 64)
        if info.base_weights is not None:
            _check_hex("base_weights", info.base_weights, 64)
        for name in ("vocab_size", "num_generations", "max_completion_length", "seed", "groups_per_round"):
            _check_int(name, getattr(info, name), least=0 if name == "seed" else 1)
        for token in _ints("eos_token_ids", info.eos_token_ids):
            if token >= info.vocab_size:
                raise malformed(f"eos_token_ids has {token}: the vocabulary is 0 to {info.vocab_size - 1}")
        if not (_is_number(info.temperature) and info.temperature > 0):
            raise malformed(f"temperature {_shown(info.temperature)}: send a number above 0")
        if not isinstance(info.in_flight_weight_updates, bool):
            raise malformed("in_flight_weight_updates: send true or false")
        return info


@dataclass(frozen=True)
class Task:
    """A group to draw."""

    group: int
    """the group's id: its place in the run"""
    attempt: int
    """0, or the how-manieth replacement of the group this is"""
    version: int
    """the version of the policy that draws it; the oldest that may, with RunInfo.in_flight_weight_updates"""
    prompt_ids: list[int]

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.attempt


def encode_tasks(tasks: Sequence[Task], metadata: dict[str, str] | None = None) -> bytes:
    """Return the body of POST tasks, and of a lease's answer."""
    columns = {name: np.asarray([getattr(task, name[:-1]) for task in tasks], np.int32) for name in _TASK_COLUMNS}
    return save(
        columns
        | {
            "prompt_lengths": np.asarray([len(task.prompt_ids) for task in tasks], np.int32),
            "prompt_ids": _joined([task.prompt_ids for task in tasks], np.int32),
        },
        metadata,
    )


def decode_tasks(body: bytes, vocab_size: int) -> list[Task]:
    """Read tasks. Raises ProtocolError: 400 for what is malformed, 413 for too many."""
    tensors, _ = read_tensors(body)
    columns = [int32(tensors, name) for name in (*_TASK_COLUMNS, "prompt_lengths")]
    ids = int32(tensors, "prompt_ids")
    _check_names(tensors, {*_TASK_COLUMNS, "prompt_lengths", "prompt_ids"})
    check_number("tasks", len(columns[0]), MOST_TASKS)
    _check_lengths("tasks", columns)
    _check_ids(ids, vocab_size)
    prompts = _cut(ids, columns[-1], least=1)
    if any(len(column) and column.min() < 0 for column in columns):
        raise malformed("a group, attempt or version is below 0")
    rows = zip(*(column.tolist() for column in columns[:-1]), prompts, strict=True)
    return [Task(group, attempt, version, prompt.tolist()) for group, attempt, version, prompt in rows]


@dataclass(frozen=True)
class Drawn:
    """The completions of a group."""

    group: int
    attempt: int
    completions: list[list[int]]
    """token ids, the eos included; each ends with its first eos, or at max_completion_length"""
    logprobs: list[list[float]]
    """of each id, in the distribution that it was drawn from; float32"""
    versions: list[list[int]]
    """the version of the policy that drew each id"""

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.attempt


def encode_drawn(groups: Sequence[Drawn]) -> bytes:
    """Return the body of POST results, and of the answer of POST groups."""
    each = [completion for group in groups for completion in group.completions]
    return save(
        {
            "groups": np.asarray([group.group for group in groups], np.int32),
            "attempts": np.asarray([group.attempt for group in groups], np.int32),
            "copies": np.asarray([len(group.completions) for group in groups], np.int32),
            "completion_lengths": np.asarray([len(completion) for completion in each], np.int32),
            "completion_ids": _joined(each, np.int32),
            "logprobs": _joined([values for group in groups for values in group.logprobs], np.float32),
            "versions": _joined([values for group in groups for values in group.versions], np.int32),
        }
    )


def decode_drawn(body: bytes) -> list[Drawn]:
    """Read groups. Raises ProtocolError: 400 for what is malformed, 413 for too many."""
    tensors, _ = read_tensors(body)
    groups, attempts, copies = (int32(tensors, name) for name in ("groups", "attempts", "copies"))
    lengths = int32(tensors, "completion_lengths")
    ids, logprobs, versions = (
        int32(tensors, "completion_ids"),
        float32(tensors, "logprobs"),
        int32(tensors, "versions"),
    )
    _check_names(
        tensors, {"groups", "attempts", "copies", "completion_lengths", "completion_ids", "logprobs", "versions"}
    )
    check_number("groups", len(groups), MOST_TASKS)
    _check_lengths("groups", [groups, attempts, copies])
    _check_lengths("tokens", [ids, logprobs, versions])
    if any(len(column) and column.min() < 0 for column in (groups, attempts, copies)):
        raise malformed("a group, attempt or number of copies is below 0")
    each = [_cut(values, lengths, least=1) for values in (ids, logprobs, versions)]
    if copies.sum(dtype=np.int64) != len(lengths):
        raise malformed(f"copies add up to {copies.sum(dtype=np.int64)}, and there are {len(lengths)} completions")
    rows, ends = [[part.tolist() for part in parts] for parts in each], np.cumsum(copies).tolist()
    return [
        Drawn(group, attempt, *(parts[end - count : end] for parts in rows))
        for group, attempt, count, end in zip(groups.tolist(), attempts.tolist(), copies.tolist(), ends, strict=True)
    ]


def check_drawn(drawn: Drawn, run: RunInfo, task: Task, known: Container[int] = ()) -> None:
    """Raise ProtocolError, 422, where these cannot be completions of this task.

    `known` are the versions that there are, of which any may have drawn with RunInfo.in_flight_weight_updates.
    """

    def wrong(message: str) -> ProtocolError:
        return ProtocolError(422, "wrong_completions", f"group {drawn.group}: {message}")

    if len(drawn.completions) != run.num_generations:
        raise wrong(f"{len(drawn.completions)} completions: the run has num_generations {run.num_generations}")
    eos = {*run.eos_token_ids}
    for ids, logprobs, versions in zip(drawn.completions, drawn.logprobs, drawn.versions, strict=True):
        if min(ids) < 0 or max(ids) >= run.vocab_size:
            raise wrong(f"token ids go from {min(ids)} to {max(ids)}: the vocabulary is 0 to {run.vocab_size - 1}")
        if len(ids) > run.max_completion_length:
            raise wrong(f"a completion has {len(ids)} tokens: max_completion_length is {run.max_completion_length}")
        if not eos.isdisjoint(ids[:-1]):
            raise wrong("a completion goes on after an eos")
        if ids[-1] not in eos and len(ids) < run.max_completion_length:
            raise wrong(f"a completion of {len(ids)} tokens has neither an eos nor max_completion_length tokens")
        if not all(math.isfinite(value) and value <= 0 for value in logprobs):
            raise wrong("a log-prob is above 0 or not finite")
        if not run.in_flight_weight_updates:
            if {*versions} != {task.version}:
                raise wrong(f"drawn by version {versions[0]}: the task is of version {task.version}")
        elif versions != sorted(versions) or versions[0] < task.version:
            raise wrong(f"drawn by versions {_spans(versions)}: the task takes {task.version} and later ones, in order")
        elif unknown := {version for version in versions if version not in known}:
            raise wrong(f"drawn by version {min(unknown)}, which is not here")


@dataclass(frozen=True)
class Probe:
    """A sequence with the trainer's own log-probs, by which a worker proves that its engine has a version."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """of each completion id at temperature 1"""


@dataclass(frozen=True)
class Version:
    """The weights of a version of the policy, as files that the pool holds."""

    version: int
    sha256: str
    """SHA-256 of the whole safetensors file, in hex"""
    size: int
    """bytes of the whole file"""
    whole: bool
    """whether the pool holds the whole file"""
    base: int | None
    """the version to which `delta` leads from; None where there is no delta"""
    delta: str | None
    """SHA-256 of the delta (grpo/wire/delta.py), a file that the pool holds"""
    probe: Probe

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_fields(cls, found: dict[str, Any]) -> Version:
        """Read a JSON object. Raises ProtocolError, 400."""
        version = _of_fields(cls, found)
        _check_int("version", version.version, least=0)
        _check_int("size", version.size, least=1, most=2**63 - 1)
        _check_hex("sha256", version.sha256, 64)
        if not isinstance(version.whole, bool):
            raise malformed("whole: send true or false")
        if version.base is not None:
            _check_int("base", version.base, least=0)
            _check_hex("delta", version.delta, 64)
        if (version.base is None) != (version.delta is None) or not (version.whole or version.delta):
            raise malformed("a version needs the whole file, or a base with its delta, or both")
        probe = _of_fields(Probe, version.probe)
        ids = [_ints(name, getattr(probe, name)) for name in ("prompt_ids", "completion_ids")]
        numbers = isinstance(probe.logprobs, list) and all(map(_is_number, probe.logprobs))
        if not numbers or len(probe.logprobs) != len(ids[1]):
            raise malformed("probe: send one finite log-prob for each of completion_ids")
        return cls(**{field.name: getattr(version, field.name) for field in fields(cls)} | {"probe": probe})


@dataclass(frozen=True)
class Lease:
    """What a worker says when it asks for tasks. It is its heartbeat too."""

    worker: str
    """the worker's name"""
    room: int
    """tasks that it can take; 0 only keeps what it holds"""
    holds: list[list[int]]
    """[group, attempt] of each task that it is drawing"""
    wait: float
    """seconds to wait for a task where there is none"""
    card: str = ""
    """what it draws on"""
    version: int = -1
    """the version that it has; -1 is none"""
    message: str = ""
    """what it is doing"""
    tokens_per_second: float = 0.0

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, body: bytes) -> Lease:
        """Read a body. Raises ProtocolError, 400."""
        lease = _of_fields(cls, read_json(body))
        for name in ("worker", "card", "message"):
            _check_text(name, getattr(lease, name))
        if not lease.worker:
            raise malformed("worker is empty: send the worker's name")
        _check_int("room", lease.room, least=0, most=MOST_TASKS)
        _check_int("version", lease.version, least=-1)
        keys_of("holds", lease.holds)
        for name in ("wait", "tokens_per_second"):
            check_amount(name, getattr(lease, name))
        return lease


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ProtocolError, 400."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise malformed(f"the body is not JSON ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise malformed("the body is not a JSON object")
    return found


def keys_of(name: str, found: object) -> list[tuple[int, int]]:
    """Return the (group, attempt) pairs of a JSON list. Raises ProtocolError, 400, or 413 for too many."""
    if not isinstance(found, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in found):
        raise malformed(f"{name}: send a list of [group, attempt]")
    check_number("tasks", len(found), MOST_TASKS)
    return [(_check_int("group", group, least=0), _check_int("attempt", attempt, least=0)) for group, attempt in found]


def check_amount(name: str, value: object) -> None:
    """Raise ProtocolError, 400, for what is no number from 0 to a billion."""
    if not (_is_number(value) and 0 <= value < 1e9):
        raise malformed(f"{name} {_shown(value)}: send a number of at least 0")


def drifts_of(found: object) -> dict[int, tuple[float, int]]:
    """Return what a JSON list of [group, drift, tokens] says of each group.

    Drift is the mean distance of the trainer's log-probs from the sampler's, in nats a token. Raises ProtocolError,
    400, or 413 for too many.
    """
    if not isinstance(found, list) or not all(isinstance(row, list) and len(row) == 3 for row in found):
        raise malformed("groups: send a list of [group, drift, tokens]")
    check_number("groups", len(found), MOST_TASKS)
    for group, drift, tokens in found:
        _check_int("group", group, least=0)
        _check_int("tokens", tokens, least=1)
        check_amount("drift", drift)
    return {group: (float(drift), tokens) for group, drift, tokens in found}


_TASK_COLUMNS = ("groups", "attempts", "versions")


def _of_fields(cls, found: object):
    known = {field.name for field in fields(cls)}
    if not isinstance(found, dict) or (unknown := found.keys() - known):
        raise malformed(f"unknown field {min(unknown)!r}" if isinstance(found, dict) else f"{cls.__name__}: no object")
    try:
        return cls(**found)
    except TypeError as error:
        raise malformed(f"a field is missing: {error}") from error


def _spans(versions: Sequence[int]) -> str:
    """Return the versions of a completion's tokens as text, each span of equal ones once, of many the first."""
    numbers = [version for version, _ in groupby(versions)]
    return ", ".join(map(str, numbers[:5])) + ", ..." * (len(numbers) > 5)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _shown(value: object) -> str:
    # The text of nested lists may be as long as the body, and so deep that making it fails.
    return repr(str(value)[:80]) if isinstance(value, str | int | float | None) else f"({type(value).__name__})"


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise malformed(f"{name}: send a text")
    check_name(name, value)


def _check_int(name: str, value: object, least: int, most: int = LARGEST_ID) -> int:
    if type(value) is not int or not least <= value <= most:
        raise malformed(f"{name} {_shown(value)}: send an integer from {least} to {most}")
    return value


def _check_hex(name: str, value: object, digits: int) -> None:
    if not isinstance(value, str) or len(value) != digits or set(value) - set("0123456789abcdef"):
        raise malformed(f"{name} {_shown(value)}: send {digits} hex digits")


def _ints(name: str, found: object) -> list[int]:
    if not isinstance(found, list) or not found or len(found) > LARGEST_ID:
        raise malformed(f"{name}: send a list of token ids")
    return [_check_int(name, token, least=0) for token in found]


def _check_names(tensors: dict[str, np.ndarray], known: set[str]) -> None:
    if unknown := tensors.keys() - known:
        raise malformed(f"unknown tensor {min(unknown)!r}")


def _check_lengths(kind: str, columns: Sequence[np.ndarray]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise malformed(f"the tensors of {kind} have different lengths")


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise malformed(f"token ids go from {ids.min()} to {ids.max()}: the vocabulary is 0 to {vocab_size - 1}")


def _cut(values: np.ndarray, lengths: np.ndarray, least: int) -> list[np.ndarray]:
    if len(lengths) and lengths.min() < least:
        raise malformed(f"a length is {lengths.min()}: send at least {least}")
    if lengths.sum(dtype=np.int64) != len(values):
        raise malformed(f"the lengths add up to {lengths.sum(dtype=np.int64)}, and there are {len(values)} tokens")
    return np.split(values, np.cumsum(lengths[:-1], dtype=np.int64)) if len(lengths) else []


def _joined(rows: Iterable[Sequence[float]], dtype: type) -> np.ndarray:
    arrays = [np.asarray(row, dtype) for row in rows]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)

"""Tasks and completions as tensors: the bodies that have many token ids, of a pool's requests and of its file.

Each list of lists is one tensor with all numbers, and one with the lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from safetensors.numpy import save

from grpo.wire.errors import check_number, malformed
from grpo.wire.rollouts import MOST_TASKS, Drawn, Task
from grpo.wire.tensors import float32, int32, read_tensors

_TASK_COLUMNS = ("groups", "attempts", "versions")


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

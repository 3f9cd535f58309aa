"""Tasks and completions as tensors: the bodies with many token ids, of a pool's requests and of its file.

Each list of lists is one tensor with all numbers, and one with the lengths.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from safetensors.numpy import save

from grpo.pool.protocol import MOST_TASKS, GroupResult, Task
from grpo.wire.json_fields import check_hex, check_int
from grpo.wire.refusals import check_number, malformed
from grpo.wire.tensors import float32, int32, read_tensors, uint8
from grpo.wire.tool_outcomes import Branch, EpisodeRecord, Outcome, check_columns, read_story

_TASKS = ("groups", "attempts", "versions", "prompt_lengths")
_GROUPS = ("groups", "attempts", "copies")
_OF_ROWS, _OF_PICTURES = {"column_lengths", "columns"}, {"picture_counts", "picture_digests"}
_DIGEST = 32  # bytes of a SHA-256
_OF_TURNS = {"drawn", "outcome_lengths", "outcomes"}
_BRANCHES = ("branch_prompt_ids", "branch_ids", "branch_logprobs", "branch_drawn")
_BRANCH_LENGTHS = ("branch_counts", "branch_prompt_lengths", "branch_lengths")
_OF_EPISODES = {*_BRANCHES, *_BRANCH_LENGTHS, "episodes", "episode_lengths"}


def encode_tasks(tasks: Sequence[Task], metadata: dict[str, str] | None = None) -> bytes:
    """Return the body of POST tasks, and of a lease's answer."""
    tensors = _columns(_TASKS, [(*task.key, task.version, len(task.prompt_ids)) for task in tasks])
    tensors["prompt_ids"] = _joined([task.prompt_ids for task in tasks], np.int32)
    if any(task.columns for task in tasks):
        tensors |= _texts("column", [task.columns.encode() for task in tasks])
    if any(task.pictures for task in tasks):
        digests = b"".join(digests_of(task) for task in tasks)
        tensors["picture_counts"] = np.asarray([len(task.pictures) for task in tasks], np.int32)
        tensors["picture_digests"] = np.frombuffer(digests, np.uint8)
    return save(tensors, metadata)


def digests_of(task: Task) -> bytes:
    """Return the SHA-256 of a task's pictures, 32 bytes each."""
    return bytes.fromhex("".join(task.pictures))


def names_of(digests: bytes) -> tuple[str, ...]:
    """Return what `digests_of` was made of."""
    return tuple(digests[start : start + _DIGEST].hex() for start in range(0, len(digests), _DIGEST))


def decode_tasks(body: bytes, vocab_size: int) -> list[Task]:
    """Read tasks. Raises ProtocolError: 400 for a malformed body, 413 for too many tasks."""
    tensors, _ = read_tensors(body)
    columns = [int32(tensors, name) for name in _TASKS]
    ids = int32(tensors, "prompt_ids")
    _check_names(tensors, {*_TASKS, "prompt_ids"}, _OF_ROWS | _OF_PICTURES)
    check_number("tasks", len(columns[0]), MOST_TASKS)
    _check_lengths("tasks", columns)
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
        raise malformed(f"token ids go from {ids.min()} to {ids.max()}: the vocabulary is 0 to {vocab_size - 1}")
    prompts = _cut(ids, columns[-1], least=1)
    if any(column.min(initial=0) < 0 for column in columns):
        raise malformed("a group, attempt or version is below 0")
    pictures = [()] * len(prompts)
    if not _OF_PICTURES.isdisjoint(tensors):
        counts, digests = int32(tensors, "picture_counts"), uint8(tensors, "picture_digests")
        _check_lengths("tasks", [counts, columns[0]])
        pictures = [names_of(part.tobytes()) for part in _cut(digests, counts.astype(np.int64) * _DIGEST, least=0)]
    has_rows = not _OF_ROWS.isdisjoint(tensors)
    try:
        texts = [text.decode() for text in _read_texts("column", tensors, len(prompts))] if has_rows else []
    except UnicodeDecodeError as error:
        raise malformed("columns are no UTF-8") from error
    for text in filter(None, texts):
        check_columns(text)
    texts = texts or [""] * len(prompts)
    keys = np.stack(columns[:-1], axis=1).tolist()  # group, attempt, version
    return [
        Task(group=group, attempt=attempt, version=version, prompt_ids=prompt.tolist(), columns=text, pictures=names)
        for (group, attempt, version), prompt, text, names in zip(keys, prompts, texts, pictures, strict=True)
    ]


def encode_drawn(groups: Sequence[GroupResult], weights: Iterable[tuple[int, str]] | None = None) -> bytes:
    """Return the body of POST results, and of the answer of POST groups. `weights`, of POST results: number and SHA-256
    of the versions that drew them."""
    completions = [completion for group in groups for completion in group.completions]
    tensors = _columns(_GROUPS, [(*group.key, len(group.completions)) for group in groups]) | {
        "completion_lengths": np.asarray([*map(len, completions)], np.int32),
        "completion_ids": _joined(completions, np.int32),
        "logprobs": _joined([values for group in groups for values in group.logprobs], np.float32),
        "versions": _joined([values for group in groups for values in group.versions], np.int32),
    }
    if any(group.outcomes is not None for group in groups):
        tensors["drawn"] = _joined([mask for group in groups for mask in group.masks], np.uint8)
        tensors |= _texts("outcome", [outcome.to_json() for group in groups for outcome in group.outcomes])
    if any(group.episodes is not None for group in groups):
        tensors |= _encode_episodes([episode for group in groups for episode in group.episodes])
    return save(tensors, None if weights is None else {"weights": json.dumps([*weights])})


def _encode_episodes(episodes: Sequence[EpisodeRecord]) -> dict[str, np.ndarray]:
    branches = [branch for episode in episodes for branch in episode.branches]
    stories = [json.dumps({"text": episode.text, "tree": episode.tree}).encode() for episode in episodes]
    return {
        "branch_counts": np.asarray([len(episode.branches) for episode in episodes], np.int32),
        "branch_prompt_lengths": np.asarray([len(branch.prompt_ids) for branch in branches], np.int32),
        "branch_lengths": np.asarray([len(branch.completion_ids) for branch in branches], np.int32),
        "branch_prompt_ids": _joined([branch.prompt_ids for branch in branches], np.int32),
        "branch_ids": _joined([branch.completion_ids for branch in branches], np.int32),
        "branch_logprobs": _joined([branch.sampling_logprobs for branch in branches], np.float32),
        "branch_drawn": _joined([branch.drawn for branch in branches], np.uint8),
        **_texts("episode", stories),
    }


def _decode_episodes(tensors: dict[str, np.ndarray], count: int) -> list[EpisodeRecord]:
    counts, prompt_lengths, lengths = (int32(tensors, name) for name in _BRANCH_LENGTHS)
    _check_lengths("branches", [prompt_lengths, lengths])
    if len(counts) != count:
        raise malformed(f"branch_counts has {len(counts)} numbers: send {count}")
    of_tokens = {
        "completion_ids": int32(tensors, "branch_ids"),
        "sampling_logprobs": float32(tensors, "branch_logprobs"),
        "drawn": _mask(tensors, "branch_drawn"),
    }
    _check_lengths("branches' tokens", [*of_tokens.values()])
    rows = {name: _cut(values, lengths, least=1) for name, values in of_tokens.items()}
    rows["prompt_ids"] = _cut(int32(tensors, "branch_prompt_ids"), prompt_lengths, least=1)
    places = _cut(np.arange(len(lengths)), counts, least=0)
    stories = map(read_story, _read_texts("episode", tensors, count))
    return [
        EpisodeRecord(
            branches=[Branch(**{name: parts[place].tolist() for name, parts in rows.items()}) for place in of_episode],
            text=text,
            tree=tree,
        )
        for of_episode, (text, tree) in zip(places, stories, strict=True)
    ]


def _mask(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    mask = uint8(tensors, name)
    if mask.max(initial=0) > 1:
        raise malformed(f"{name} has {mask.max()}: send 0 or 1")
    return mask.astype(bool)


def decode_drawn(body: bytes) -> list[GroupResult]:
    """Read groups. Raises ProtocolError: 400 for a malformed body, 413 for too many groups."""
    tensors, _ = read_tensors(body)
    groups, attempts, copies, lengths = (int32(tensors, name) for name in (*_GROUPS, "completion_lengths"))
    of_tokens = {
        "completion_ids": int32(tensors, "completion_ids"),
        "logprobs": float32(tensors, "logprobs"),
        "versions": int32(tensors, "versions"),
    }
    known = {*_GROUPS, "completion_lengths", "completion_ids", "logprobs", "versions"}
    has_episodes = not _OF_EPISODES.isdisjoint(tensors)
    has_turns = _check_names(tensors, known | (_OF_EPISODES if has_episodes else set()), _OF_TURNS)
    check_number("groups", len(groups), MOST_TASKS)
    _check_lengths("groups", [groups, attempts, copies])
    if has_turns:
        of_tokens["drawn"] = _mask(tensors, "drawn")
    _check_lengths("tokens", [*of_tokens.values()])
    if any(column.min(initial=0) < 0 for column in (groups, attempts, copies)):
        raise malformed("a group, attempt or number of copies is below 0")
    rows: dict[str, list] = {
        name: [part.tolist() for part in _cut(values, lengths, least=0 if has_episodes else 1)]
        for name, values in of_tokens.items()
    }
    if copies.sum(dtype=np.int64) != len(lengths):
        raise malformed(f"copies add up to {copies.sum(dtype=np.int64)}, and there are {len(lengths)} completions")
    if has_turns:
        rows["outcomes"] = [Outcome.of_json(text) for text in _read_texts("outcome", tensors, len(lengths))]
    if has_episodes:
        rows["episodes"] = _decode_episodes(tensors, len(lengths))
    each = np.stack([groups, attempts, np.cumsum(copies) - copies, np.cumsum(copies)], axis=1).tolist()
    return [
        GroupResult(
            group=group,
            attempt=attempt,
            completions=rows["completion_ids"][start:end],
            logprobs=rows["logprobs"][start:end],
            versions=rows["versions"][start:end],
            drawn=rows["drawn"][start:end] if has_turns else None,
            outcomes=rows["outcomes"][start:end] if has_turns else None,
            episodes=rows["episodes"][start:end] if has_episodes else None,
        )
        for group, attempt, start, end in each
    ]


def decode_results(body: bytes) -> tuple[list[GroupResult], list[tuple[int, str]]]:
    """Read groups and `weights` of the body of POST results. Raises as decode_drawn."""
    groups, (_, metadata) = decode_drawn(body), read_tensors(body)
    try:
        weights = json.loads(metadata.get("weights", ""))
    except (ValueError, RecursionError) as error:
        raise malformed("the metadata has no weights as JSON: update the worker to the release of the pool") from error
    if not isinstance(weights, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in weights):
        raise malformed("weights in the metadata: send a list of [version, SHA-256]")
    for number, sha256 in weights:
        check_int("version", number, least=0)
        check_hex("weights", sha256, 64)
    drew = {version for group in groups for version in chain(*group.versions)}
    if unnamed := drew - {number for number, _ in weights}:
        raise malformed(f"weights in the metadata: version {min(unnamed)} is missing")
    return groups, [(number, sha256) for number, sha256 in weights]


def _columns(names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> dict[str, np.ndarray]:
    return dict(zip(names, np.array(rows, np.int32).reshape(-1, len(names)).T.copy(), strict=True))


def _check_names(tensors: dict[str, np.ndarray], known: set[str], more: set[str]) -> bool:
    """Refuse tensors of other names than `known` and `more`; return whether the body has one of `more`."""
    if unknown := tensors.keys() - known - more:
        raise malformed(f"unknown tensor {min(unknown)!r}")
    return not more.isdisjoint(tensors)


def _check_lengths(kind: str, columns: Sequence[np.ndarray]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise malformed(f"the tensors of {kind} have different lengths")


def _cut(values: np.ndarray, lengths: np.ndarray, least: int) -> list[np.ndarray]:
    if len(lengths) and lengths.min() < least:
        raise malformed(f"a length is {lengths.min()}: send at least {least}")
    if lengths.sum(dtype=np.int64) != len(values):
        raise malformed(f"the lengths add up to {lengths.sum(dtype=np.int64)}, and there are {len(values)}")
    return np.split(values, np.cumsum(lengths[:-1], dtype=np.int64)) if len(lengths) else []


def _texts(kind: str, texts: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Return the tensors of texts, one for each task or completion: `KINDs` and `KIND_lengths`."""
    lengths = np.asarray([len(text) for text in texts], np.int32)
    return {f"{kind}_lengths": lengths, f"{kind}s": np.frombuffer(b"".join(texts), np.uint8)}


def _read_texts(kind: str, tensors: dict[str, np.ndarray], count: int) -> list[bytes]:
    lengths, data = int32(tensors, f"{kind}_lengths"), uint8(tensors, f"{kind}s")
    if len(lengths) != count:
        raise malformed(f"{kind}_lengths has {len(lengths)} numbers: send {count}")
    return [part.tobytes() for part in _cut(data, lengths, least=0)]


def _joined(rows: Iterable[Sequence[float]], dtype: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype)

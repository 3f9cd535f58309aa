"""A pool's record of a run: its tasks and their results, the versions of the policy and their files.

Whatever a method stores is on the disk when it returns, all of it or nothing. `Recording` reads the file, also while a
pool runs on it.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from grpo.config.errors import ConfigError
from grpo.pool.database import PIECE_BYTES, Database, check_row, damaged, open_read_only, refuse_damage, unusable
from grpo.pool.protocol import GroupResult, RunInfo, Task, Version
from grpo.pool.task_tensors import decode_drawn, digests_of, encode_drawn, names_of
from grpo.wire.refusals import ProtocolError, malformed
from grpo.wire.tensors import FilePart

_ABANDONED_SECONDS = 3600  # without a byte; a file that no version and no run names is dropped then
_ROW = "version, worker, tokens, newest, prompt_ids, columns, pictures, drawn, checksum"
_TASK_OF_KEY = f"SELECT group_id, attempt, {_ROW} FROM tasks WHERE group_id = ? AND attempt = ?"  # a row for _read_task
_RUN = "SELECT number, info, checksum FROM run"
_VERSIONS = "SELECT version, weights, info, checksum FROM versions"
_TASK_NAME = "group {}, attempt {}"


class Files:
    """Files by their SHA-256, in pieces: weights and the model's folder. All methods may be called from any thread."""

    def __init__(self, database: Database):
        self._database = database
        self._digests: dict[str, tuple[int, Any]] = {}  # of how many first bytes of a file
        self._touched: dict[str, float] = {}  # time.monotonic() of their last pieces

    def add(self, piece: FilePart, data: bytes) -> int:
        """Keep a piece of a file, which may come twice; an empty one asks where to continue. Returns how many bytes are
        stored by now, from the first on without a gap. Raises ProtocolError: 400 for bytes beyond the size, 409 for a
        gap, or if the complete file has another SHA-256: the file is dropped then."""
        if piece.size < 1 or piece.offset + len(data) > piece.size:
            raise malformed(f"{len(data)} bytes from {piece.offset} on are beyond {piece.size}")
        with self._database.transaction():
            row = self._database.row("SELECT size, received FROM files WHERE sha256 = ?", piece.sha256)
            size, received = row or (None, 0)
            if size not in (None, piece.size):
                raise malformed(f"this file has {size} bytes, not {piece.size}")
            if piece.offset > received:
                message = f"{received} bytes of this file are here: send what follows them"
                raise ProtocolError(409, "missing_piece", message)
            new = memoryview(data)[received - piece.offset :]
            if not new:
                if received:
                    self._touched[piece.sha256] = time.monotonic()  # whoever asks for it is about to name it
                return received
            digest = self._digest(piece.sha256, received).copy()
            digest.update(new)
            end = received + len(new)
            self._database.sql("REPLACE INTO files VALUES (?, ?, ?)", piece.sha256, piece.size, end)
            for start in range(0, len(new), PIECE_BYTES):
                row = piece.sha256, received + start, new[start : start + PIECE_BYTES]
                self._database.sql("INSERT INTO pieces VALUES (?, ?, ?)", *row)
            is_damaged = end == piece.size and digest.hexdigest() != piece.sha256
            self._touched[piece.sha256], self._digests[piece.sha256] = time.monotonic(), (end, digest)
            if is_damaged:
                self._drop(piece.sha256)
        if is_damaged:
            message = "what came is not what was announced (SHA-256 differs): send all of it again"
            raise ProtocolError(409, "damaged", message)
        return end

    def size(self, sha256: str) -> int | None:
        """Return the bytes of a file, None if it is missing or not complete."""
        row = self._database.row("SELECT size FROM files WHERE sha256 = ? AND received = size", sha256)
        return row[0] if row else None

    def read(self, sha256: str, start: int, end: int) -> bytes:
        """Return the bytes of a complete file from `start` to before `end`; empty if it was dropped."""
        overlapping = "SELECT start, data FROM pieces WHERE sha256 = ? AND start < ? AND start + length(data) > ?"
        rows = self._database.sql(f"{overlapping} ORDER BY start", sha256, end, start)
        return b"".join(memoryview(data)[max(0, start - at) : end - at] for at, data in rows)

    def drop_unused(self, used: Set[str], gone: Set[str]) -> None:
        """Delete, in the caller's transaction, unused files: those whose last user is gone, and abandoned ones."""
        now = time.monotonic()
        for (sha256,) in self._database.sql("SELECT sha256 FROM files"):
            is_abandoned = now - self._touched.setdefault(sha256, now) >= _ABANDONED_SECONDS
            if sha256 not in used and (sha256 in gone or is_abandoned):
                self._drop(sha256)

    def _drop(self, sha256: str) -> None:
        self._database.sql("DELETE FROM pieces WHERE sha256 = ?", sha256)
        self._database.sql("DELETE FROM files WHERE sha256 = ?", sha256)
        self._digests.pop(sha256, None)
        self._touched.pop(sha256, None)

    def _digest(self, sha256: str, received: int) -> Any:
        """Return the digest of the stored bytes of a file."""
        length, digest = self._digests.get(sha256, (0, hashlib.sha256()))
        if length != received:  # after a restart, or a piece that could not be stored
            digest = hashlib.sha256()
            for start in range(0, received, PIECE_BYTES):
                digest.update(self.read(sha256, start, min(received, start + PIECE_BYTES)))
        return digest


class Store:
    """The pool's file, for any thread. All methods raise ProtocolError, 503, and store nothing, if the disk fails."""

    def __init__(self, path: str, on_damage: Callable[[ConfigError], None]):
        """Open the file as Database does."""
        self.database = Database(path, on_damage)
        self.files = Files(self.database)
        try:
            rows = self.database.checked_rows("the run", _RUN)
            self.known_run = RunInfo.of_json(rows[0][1]) if rows else None
            rows = self.database.sql("SELECT DISTINCT pictures FROM tasks")
            self._pictures = {name for (digests,) in rows for name in names_of(digests)}
        except ProtocolError as error:
            self.database.close()
            raise damaged(self.database.setting, error.message) from error

    def close(self) -> None:
        self.database.close()

    def run(self) -> RunInfo:
        """Return the run. Raises ProtocolError, 404, before the trainer has put one."""
        if self.known_run is None:
            raise ProtocolError(404, "no_run", "no trainer has told the pool its run yet", retry_after=2)
        return self.known_run

    def set_run(self, info: RunInfo) -> None:
        """Keep the run; the first one stays. Raises ProtocolError, 409, for another one."""
        with self.database.transaction():
            if self.known_run is None:
                self.database.store("run", 1, info.to_json())
            elif any(getattr(self.known_run, name) != getattr(info, name) for name in ("run", "base_weights", "turns")):
                message = f"the pool file is of run {self.known_run.name}: start the pool with another --pool_file"
                raise ProtocolError(409, "other_run", message)
        self.known_run = self.known_run or info

    def add_version(self, version: Version) -> None:
        """Keep a version. Raises ProtocolError, 409, if a file is missing. If the pool has, or had, this number with
        other weights, the run was resumed from an earlier checkpoint: that version and the later ones are deleted, with
        the completions that they drew."""
        with self.database.transaction():
            weights, known = self.find_version(version.version)
            is_other = weights not in (None, version.sha256)
            if known is not None and not is_other and (known.whole or not version.whole):
                return
            self._check_files(version)
            removed = []
            if is_other:
                removed = [other for other in self.versions() if other.version >= version.version]
                self.database.sql("DELETE FROM versions WHERE version >= ?", version.version)
                # The trainer may have put this version's tasks before it has sent the version: they stay, undrawn.
                later = "version > ? OR (version = ? AND attempt > 0)"
                self.database.sql(f"DELETE FROM tasks WHERE {later}", version.version, version.version)
                spoiled = self.database.sql("SELECT group_id, attempt FROM tasks WHERE newest >= ?", version.version)
                for key in spoiled:
                    self._store_task(self.find_task(key)[0])
            elif known is not None:  # a run that was started again sends whole what it sent as a delta
                version = replace(known, whole=True)
            self.database.store("versions", version.version, version.sha256, version.to_json())
            self._drop_files_of(removed)

    def versions(self) -> list[Version]:
        """Return all versions, the oldest first."""
        rows = self.database.checked_rows("version {}", f"{_VERSIONS} WHERE info IS NOT NULL ORDER BY version")
        return [_version(info) for _, _, info in rows]

    def find_version(self, number: int) -> tuple[str | None, Version | None]:
        """Return the SHA-256 of a version's weights, and the version, which is None once it was dropped."""
        rows = self.database.checked_rows("version {}", f"{_VERSIONS} WHERE version = ?", number)
        return (rows[0][1], rows[0][2] and _version(rows[0][2])) if rows else (None, None)

    def drop_versions_below(self, needed: int) -> None:
        """Delete the versions below `needed`, and their files, unless a chain of deltas to a later one needs them."""
        with self.database.transaction():
            versions = {version.version: version for version in self.versions()}
            kept = {number for number in versions if number >= needed}
            for number in [*kept]:
                while number in versions and not versions[number].whole:
                    number = versions[number].base
                    kept.add(number)
            removed = [version for number, version in versions.items() if number not in kept]
            for version in removed:
                self.database.store("versions", version.version, version.sha256, None)
            self._drop_files_of(removed)

    def _check_files(self, version: Version) -> None:
        """Raise ProtocolError if a worker could not make this version from the stored files."""
        sizes = {sha256: self.files.size(sha256) for sha256 in _files_of(version)}
        for sha256, size in sizes.items():
            if size is None:
                raise ProtocolError(409, "missing_file", f"file {sha256} of version {version.version} is not here")
        if version.whole and sizes[version.sha256] != version.size:
            raise malformed(f"size {version.size}: file {version.sha256} has {sizes[version.sha256]} bytes")
        is_reached = version.whole or self.find_version(version.base)[1] is not None
        if not is_reached or (version.base is not None and version.base >= version.version):
            message = f"version {version.version} leads from version {version.base}, which is not here"
            raise ProtocolError(409, "missing_file", message)

    def _drop_files_of(self, removed: Iterable[Version]) -> None:
        used = {sha256 for version in self.versions() for sha256 in _files_of(version)}
        used |= {self.known_run.model_files, self.known_run.base_weights} if self.known_run else set()
        used |= self._pictures  # they stay as tasks do: a run that goes back to a checkpoint has them drawn again
        self.files.drop_unused(used, {sha256 for version in removed for sha256 in _files_of(version)})

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Keep tasks. Raises ProtocolError, 409, for one that is stored with other content, or one of whose pictures is
        missing; none is kept then."""
        with self.database.transaction():
            for task in tasks:
                known, _ = self.find_task(task.key)
                if known is None:
                    self._check_pictures(task)
                    self._store_task(task)
                elif known != task:
                    reason = f"group {task.group} has another prompt, row or version in the pool file"
                    raise ProtocolError(409, "other_run", f"{reason}: start the pool with another --pool_file")

    def open_tasks(self, limit: int) -> list[Task]:
        """Return the first tasks without a result that a stored version may draw, by version, group and attempt."""
        takes_newest = self.known_run is not None and self.known_run.in_flight_weight_updates
        is_here = "<= (SELECT max(version)" if takes_newest else "IN (SELECT version"
        condition = f"drawn IS NULL AND version {is_here} FROM versions WHERE info IS NOT NULL)"
        query = f"SELECT group_id, attempt, {_ROW} FROM tasks WHERE {condition} ORDER BY version, group_id, attempt"
        rows = self.database.checked_rows(_TASK_NAME, f"{query} LIMIT ?", limit)
        return [_read_task(row)[0] for row in rows]

    def find_task(self, key: tuple[int, int]) -> tuple[Task | None, bytes | None]:
        """Return a task and its result as the file has it; None for an unknown key, and before it is drawn."""
        rows = self.database.checked_rows(_TASK_NAME, _TASK_OF_KEY, *key)
        return _read_task(rows[0]) if rows else (None, None)

    def add_results(self, drawn_tasks: Iterable[tuple[Task, GroupResult]], worker: str) -> None:
        """Keep the completions of tasks that have none."""
        with self.database.transaction():
            for task, drawn in drawn_tasks:
                self._store_task(task, drawn, worker)

    def _store_task(self, task: Task, drawn: GroupResult | None = None, worker: str | None = None) -> None:
        of_drawn, body = (None, None, None), None
        if drawn is not None:
            of_drawn, body = (worker, drawn.tokens, max(map(max, drawn.versions))), encode_drawn([drawn])
        prompt = np.asarray(task.prompt_ids, "<i4").tobytes()
        self.database.store("tasks", *task.key, task.version, *of_drawn, prompt, task.columns, digests_of(task), body)
        self._pictures.update(task.pictures)

    def _check_pictures(self, task: Task) -> None:
        """Raise ProtocolError if a worker could not get a picture of this task."""
        for sha256 in task.pictures:
            if sha256 not in self._pictures and self.files.size(sha256) is None:
                raise ProtocolError(409, "missing_file", f"picture {sha256} of group {task.group} is not here")

    def results(self, keys: Iterable[tuple[int, int]], most_bytes: int) -> list[bytes]:
        """Return the first of these tasks' results, as `encode_drawn` writes them, and others up to `most_bytes`."""
        results, size = [], 0
        with self.database.lock:
            for key in keys:
                if (drawn := self.find_task(key)[1]) is None:
                    continue
                size += len(drawn)
                if results and size > most_bytes:
                    break
                results.append(drawn)
        return results

    def workers_of(self, groups: Iterable[int]) -> dict[int, str]:
        """Return the worker that drew the last attempt of each of these groups."""
        with self.database.lock:
            last = "SELECT worker FROM tasks WHERE group_id = ? AND drawn IS NOT NULL ORDER BY attempt DESC LIMIT 1"
            rows = {group: self.database.row(last, group) for group in groups}
        return {group: row[0] for group, row in rows.items() if row}

    def rounds(self, count: int) -> list[dict[str, int]]:
        """Return tasks, results and tokens of the last rounds, the newest first."""
        with self.database.lock:
            newest = self.database.row("SELECT max(group_id) FROM tasks")[0]
            if newest is None or self.known_run is None:
                return []
            each = self.known_run.groups_per_round
            sums = "min(version), max(version), count(*), sum(drawn IS NOT NULL), coalesce(sum(tokens), 0)"
            query = f"SELECT group_id / ? AS round, {sums} FROM tasks WHERE group_id >= ? GROUP BY round"
            first = max(0, newest // each - count + 1) * each
            rows = self.database.sql(f"{query} ORDER BY round DESC", each, first)
        names = "round", "version", "last_version", "tasks", "drawn", "tokens"
        return [dict(zip(names, row, strict=True)) for row in rows]

    def count_open(self, version: int | None = None) -> int:
        """Return the number of tasks without a result: of a version, or of all."""
        of_version = "" if version is None else f" AND version = {version:d}"
        return self.database.row(f"SELECT count(*) FROM tasks WHERE drawn IS NULL{of_version}")[0]


def _read_task(row: tuple) -> tuple[Task, bytes | None]:
    """Return a row's task and its completions as the file has them, None before they are drawn."""
    group, attempt, version, _, _, _, prompt, columns, pictures, drawn, *_ = row
    task = Task(group, attempt, version, np.frombuffer(prompt, "<i4").tolist(), columns, names_of(pictures))
    return task, drawn


def _version(info: bytes) -> Version:
    return Version.of_fields(json.loads(info))


def _files_of(version: Version) -> list[str]:
    return [version.sha256] * version.whole + ([version.delta] if version.delta else [])


class Recording:
    """The run and the results of a pool's file, also of a running pool's. All methods may be called from any thread,
    and raise ConfigError if the file is damaged."""

    def __init__(self, path: str):
        """Open the file. Raises ConfigError if it is no pool's."""
        self._setting = f"replay={path!r}"
        self._connection, self._lock = open_read_only(path, self._setting), threading.Lock()
        try:
            if (row := self._row("the run", _RUN)) is None:
                reason = "no trainer has used it"
                raise unusable(self._setting, reason, "name the pool_file of a pool that has served a run")
        except ConfigError:
            self.close()
            raise
        self.run = RunInfo.of_json(row[1])

    def find(self, key: tuple[int, int]) -> tuple[Task | None, GroupResult | None]:
        """Return a task (group, attempt) and its completions; None for an unknown key, and before they are drawn."""
        row = self._row(_TASK_NAME.format(*key), _TASK_OF_KEY, *key)
        task, body = _read_task(row) if row else (None, None)
        return task, body and decode_drawn(body)[0]

    def close(self) -> None:
        self._connection.close()

    def _row(self, name: str, statement: str, *values: Any) -> tuple | None:
        with self._lock, refuse_damage(self._setting, name):
            row = self._connection.execute(statement, values).fetchone()
            if row is not None:
                check_row(row)
        return row

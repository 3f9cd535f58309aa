"""The pool's file: a run, its tasks and results, versions of the policy and their files, in SQLite.

Whatever a method stores is on the disk when it returns, all of it or nothing. The file can be read while a pool runs on
it, and after (`Recording`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from grpo.config.errors import ConfigError
from grpo.wire.errors import ProtocolError, malformed
from grpo.wire.rollouts import Drawn, RunInfo, Task, Version, decode_drawn, encode_drawn
from grpo.wire.weights import Piece

PIECE_BYTES = 16 << 20
"""most bytes of a file in one row, and in one answer"""
_APPLICATION, _SCHEMA_VERSION = 0x47525031, 1  # "GRP1"; another schema gets another number
_SCHEMA = """
CREATE TABLE run (number INTEGER PRIMARY KEY CHECK (number = 1), info BLOB NOT NULL);
CREATE TABLE tasks (
    group_id INTEGER NOT NULL, attempt INTEGER NOT NULL, version INTEGER NOT NULL,
    prompt_ids BLOB NOT NULL,  -- int32
    worker TEXT, tokens INTEGER,
    drawn BLOB,  -- the completions as grpo.wire.rollouts.encode_drawn writes them; NULL while there are none
    PRIMARY KEY (group_id, attempt)
);
CREATE INDEX open_tasks ON tasks (version, group_id, attempt) WHERE drawn IS NULL;
CREATE TABLE versions (version INTEGER PRIMARY KEY, info BLOB NOT NULL);
CREATE TABLE files (sha256 TEXT PRIMARY KEY, size INTEGER NOT NULL, received INTEGER NOT NULL);
CREATE TABLE pieces (
    sha256 TEXT NOT NULL, start INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (sha256, start)
);
"""
log = logging.getLogger(__name__)
_ABANDONED_SECONDS = 3600  # without a byte; a file that no version names is dropped then


class Store:
    """The pool's file, open for this process alone. All methods may be called from any thread.

    All that write raise ProtocolError, 503, where the disk is full; nothing of the request is stored then.
    """

    def __init__(self, path: str):
        """Open the file, or make it. Raises ConfigError where it is no pool's, damaged, or in use."""
        self.path = path
        self._lock = threading.RLock()
        self._file = _lock_file(path)
        try:
            self._connection = _open(path)
        except BaseException:
            os.close(self._file)
            raise
        found = self._row("SELECT info FROM run")
        self._run = RunInfo.of_json(found[0]) if found else None
        self._digests: dict[str, tuple[int, Any]] = {}  # of files that are not complete, and of how many bytes
        self._touched: dict[str, float] = {}  # time.monotonic() of their last pieces
        self.tokens: int = self._row("SELECT coalesce(sum(tokens), 0) FROM tasks")[0]
        """tokens of all completions"""

    def close(self) -> None:
        with self._lock:
            self._connection.close()
            os.close(self._file)  # not before: closing a file ends all locks that SQLite holds on it

    # The run

    def run(self) -> RunInfo:
        """Return the run. Raises ProtocolError, 404, while there is none."""
        if self._run is None:
            raise ProtocolError(404, "no_run", "no trainer has told the pool its run yet", retry_after=2)
        return self._run

    def has_run(self) -> bool:
        return self._run is not None

    def set_run(self, info: RunInfo) -> None:
        """Keep the run; the first one stays. Raises ProtocolError, 409, for another one."""
        with self._transaction():
            if self._run is None:
                self._sql("INSERT INTO run VALUES (1, ?)", info.to_json())
            elif self._run.run != info.run:
                message = f"the pool file is of run {self._run.name}: start the pool with another --pool_file"
                raise ProtocolError(409, "other_run", message)
        self._run = self._run or info

    # Files

    def add_piece(self, piece: Piece, data: bytes) -> int:
        """Keep a piece of a file. Return how many bytes are here by now, from the first on without a gap.

        Bytes that are here already are ignored, so a piece may come twice, and an empty one asks where to continue.

        Raises ProtocolError: 400 for what reaches beyond the size, 409 for what would leave a gap, or where the whole
        is not what was announced: it is dropped.
        """
        if piece.size < 1 or piece.offset + len(data) > piece.size:
            raise malformed(f"{len(data)} bytes from {piece.offset} on are beyond {piece.size}")
        with self._transaction():
            size, received = self._row("SELECT size, received FROM files WHERE sha256 = ?", piece.sha256) or (None, 0)
            if size not in (None, piece.size):
                raise malformed(f"this file has {size} bytes, not {piece.size}")
            if piece.offset > received:
                message = f"{received} bytes of this file are here: send what follows them"
                raise ProtocolError(409, "missing_piece", message)
            new = memoryview(data)[received - piece.offset :]
            if not new:
                return received
            digest = self._digest(piece.sha256, received).copy()
            digest.update(new)
            end = received + len(new)
            if size is None:
                self._sql("INSERT INTO files VALUES (?, ?, ?)", piece.sha256, piece.size, end)
            else:
                self._sql("UPDATE files SET received = ? WHERE sha256 = ?", end, piece.sha256)
            for start in range(0, len(new), PIECE_BYTES):
                row = piece.sha256, received + start, new[start : start + PIECE_BYTES]
                self._sql("INSERT INTO pieces VALUES (?, ?, ?)", *row)
            is_damaged = end == piece.size and digest.hexdigest() != piece.sha256
            if is_damaged:
                self._drop_file(piece.sha256)
            else:
                self._touched[piece.sha256] = time.monotonic()
                self._digests[piece.sha256] = end, digest
        if is_damaged:
            message = "what came is not what was announced (SHA-256 differs): send all of it again"
            raise ProtocolError(409, "damaged", message)
        return end

    def file_size(self, sha256: str) -> int | None:
        """Return the bytes of a file, None where it is not here or not complete."""
        found = self._row("SELECT size FROM files WHERE sha256 = ? AND received = size", sha256)
        return found[0] if found else None

    def read_file(self, sha256: str, start: int, end: int) -> bytes:
        """Return the bytes of a complete file from `start` on to before `end`; empty where it was dropped."""
        with self._lock:
            rows = self._rows(
                "SELECT start, data FROM pieces WHERE sha256 = ? AND start < ? AND start + length(data) > ? "
                "ORDER BY start",
                sha256,
                end,
                start,
            )
            return b"".join(memoryview(data)[max(0, start - at) : end - at] for at, data in rows)

    # Versions

    def add_version(self, version: Version) -> list[tuple[int, int]]:
        """Keep a version. Return the tasks that are not to be drawn any more as they were leased.

        A number that is there with other weights says that the run went on from an earlier checkpoint: that version
        and the later ones are deleted, with what they drew. Raises ProtocolError, 409, where a file is not here.
        """
        with self._transaction():
            found = self._row("SELECT info FROM versions WHERE version = ?", version.version)
            is_other = found and json.loads(found[0])["sha256"] != version.sha256
            if found and not is_other:
                return []
            self._check_files(version)
            removed, void = [], []
            if is_other:
                removed = [other for other in self.versions() if other.version >= version.version]
                void = self._rows("SELECT group_id, attempt FROM tasks WHERE version >= ?", version.version)
                self._sql("DELETE FROM versions WHERE version >= ?", version.version)
                # The trainer may have put this version's tasks before it has sent the version: they stay, undrawn.
                self._sql("DELETE FROM tasks WHERE version > ?1 OR (version = ?1 AND attempt > 0)", version.version)
                self._sql(
                    "UPDATE tasks SET worker = NULL, tokens = NULL, drawn = NULL WHERE version = ?", version.version
                )
            self._sql("INSERT INTO versions VALUES (?, ?)", version.version, version.to_json())
            self._drop_files_of(removed)
        return void

    def versions(self) -> list[Version]:
        """Return all versions, the oldest first."""
        return [_version(info) for (info,) in self._rows("SELECT info FROM versions ORDER BY version")]

    def drop_versions_below(self, needed: int) -> None:
        """Delete the versions below `needed` that no chain of deltas to a later one begins with, and their files."""
        with self._transaction():
            versions = {version.version: version for version in self.versions()}
            kept = {number for number in versions if number >= needed}
            for number in [*kept]:
                while number in versions and not versions[number].whole:
                    number = versions[number].base
                    kept.add(number)
            removed = [version for number, version in versions.items() if number not in kept]
            for version in removed:
                self._sql("DELETE FROM versions WHERE version = ?", version.version)
            self._drop_files_of(removed)

    def _check_files(self, version: Version) -> None:
        """Raise ProtocolError where no worker could make this version from what is here."""
        sizes = {sha256: self.file_size(sha256) for sha256 in _files_of(version)}
        for sha256, size in sizes.items():
            if size is None:
                raise ProtocolError(409, "missing_file", f"file {sha256} of version {version.version} is not here")
        if version.whole and sizes[version.sha256] != version.size:
            raise malformed(f"size {version.size}: file {version.sha256} has {sizes[version.sha256]} bytes")
        is_reached = version.whole or self._row("SELECT 1 FROM versions WHERE version = ?", version.base)
        if not is_reached or (version.base is not None and version.base >= version.version):
            message = f"version {version.version} leads from version {version.base}, which is not here"
            raise ProtocolError(409, "missing_file", message)

    def _drop_files_of(self, removed: Iterable[Version]) -> None:
        """Delete the files of versions that went, and those of which nothing more came, where nothing names them."""
        used = {sha256 for version in self.versions() for sha256 in _files_of(version)}
        used |= {self._run.model_files} if self._run else set()
        gone = {sha256 for version in removed for sha256 in _files_of(version)}
        now = time.monotonic()
        for (sha256,) in self._rows("SELECT sha256 FROM files"):
            is_abandoned = now - self._touched.setdefault(sha256, now) >= _ABANDONED_SECONDS
            if sha256 not in used and (sha256 in gone or is_abandoned):
                self._drop_file(sha256)

    def _drop_file(self, sha256: str) -> None:
        self._sql("DELETE FROM pieces WHERE sha256 = ?", sha256)
        self._sql("DELETE FROM files WHERE sha256 = ?", sha256)
        self._digests.pop(sha256, None)
        self._touched.pop(sha256, None)

    def _digest(self, sha256: str, received: int) -> Any:
        """Return the digest of what is here of a file."""
        length, digest = self._digests.get(sha256, (0, hashlib.sha256()))
        if length != received:  # after a restart, or a piece that could not be stored
            digest = hashlib.sha256()
            for start in range(0, received, PIECE_BYTES):
                digest.update(self.read_file(sha256, start, min(received, start + PIECE_BYTES)))
        return digest

    # Tasks and results

    def put_tasks(self, tasks: Sequence[Task]) -> list[tuple[int, int]]:
        """Keep tasks. Return those that were there for another version: they are to be drawn again.

        Raises ProtocolError, 409, for a task that is there with another prompt; none is kept then.
        """
        changed = []
        with self._transaction():
            for task in tasks:
                prompt = np.asarray(task.prompt_ids, "<i4").tobytes()
                found = self._row("SELECT version, prompt_ids FROM tasks WHERE group_id = ? AND attempt = ?", *task.key)
                if found is None:
                    self._sql(
                        "INSERT INTO tasks (group_id, attempt, version, prompt_ids) VALUES (?, ?, ?, ?)",
                        *task.key,
                        task.version,
                        prompt,
                    )
                elif found[1] != prompt:
                    message = (
                        f"group {task.group} has another prompt in the pool file: its run had other data: start the "
                        "pool with another --pool_file"
                    )
                    raise ProtocolError(409, "other_run", message)
                elif found[0] != task.version:
                    self._sql(
                        "UPDATE tasks SET version = ?, worker = NULL, tokens = NULL, drawn = NULL "
                        "WHERE group_id = ? AND attempt = ?",
                        task.version,
                        *task.key,
                    )
                    changed.append(task.key)
        return changed

    def open_tasks(self, limit: int) -> list[Task]:
        """Return the first tasks without a result whose version is here, by version, group and attempt."""
        rows = self._rows(
            "SELECT group_id, attempt, version, prompt_ids FROM tasks WHERE drawn IS NULL "
            "AND version IN (SELECT version FROM versions) ORDER BY version, group_id, attempt LIMIT ?",
            limit,
        )
        return [_task(row) for row in rows]

    def find_task(self, key: tuple[int, int]) -> tuple[Task, bool] | None:
        """Return a task and whether it has a result; None where it is not here."""
        row = self._row(
            "SELECT group_id, attempt, version, prompt_ids, drawn IS NOT NULL FROM tasks "
            "WHERE group_id = ? AND attempt = ?",
            *key,
        )
        return None if row is None else (_task(row[:4]), bool(row[4]))

    def add_results(self, drawn_tasks: Sequence[tuple[Task, Drawn]], worker: str) -> list[bool]:
        """Keep the completions of tasks; return of each whether it is kept: the first of a task and its version is."""
        kept, tokens = [], 0
        with self._transaction():
            for task, drawn in drawn_tasks:
                count = sum(map(len, drawn.completions))
                change = self._sql(
                    "UPDATE tasks SET worker = ?, tokens = ?, drawn = ? "
                    "WHERE group_id = ? AND attempt = ? AND version = ? AND drawn IS NULL",
                    worker,
                    count,
                    encode_drawn([drawn]),
                    *task.key,
                    task.version,
                )
                kept.append(change.rowcount == 1)
                tokens += count * kept[-1]
            self.tokens += tokens
        return kept

    def results(self, keys: Iterable[tuple[int, int]], most_bytes: int) -> list[bytes]:
        """Return the results that are there of these tasks, each as `encode_drawn` writes it.

        The first is returned whatever its size; then as many as stay below `most_bytes` together.
        """
        found, size = [], 0
        with self._lock:
            for key in keys:
                if (drawn := _read_result(self._row, key)) is None:
                    continue
                size += len(drawn)
                if found and size > most_bytes:
                    break
                found.append(drawn)
        return found

    # What the page shows

    def rounds(self, count: int) -> list[dict[str, int]]:
        """Return tasks, results and tokens of the last rounds, the newest first."""
        with self._lock:
            newest = self._row("SELECT max(group_id) FROM tasks")[0]
            if newest is None or self._run is None:
                return []
            each = self._run.groups_per_round
            rows = self._rows(
                "SELECT group_id / ?1 AS round, min(version), max(version), count(*), sum(drawn IS NOT NULL), "
                "coalesce(sum(tokens), 0) FROM tasks WHERE group_id >= ?2 GROUP BY round ORDER BY round DESC",
                each,
                max(0, newest // each - count + 1) * each,
            )
        names = "round", "version", "last_version", "tasks", "drawn", "tokens"
        return [dict(zip(names, row, strict=True)) for row in rows]

    def count_open(self) -> int:
        """Return the number of tasks without a result."""
        return self._row("SELECT count(*) FROM tasks WHERE drawn IS NULL")[0]

    # SQLite

    def _sql(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _row(self, statement: str, *values: Any) -> tuple | None:
        with self._lock:
            return self._sql(statement, *values).fetchone()

    def _rows(self, statement: str, *values: Any) -> list[tuple]:
        with self._lock:
            return self._sql(statement, *values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Store everything that is done inside, or nothing."""
        with self._lock:
            try:
                self._sql("BEGIN IMMEDIATE")
                yield
                self._sql("COMMIT")
            except BaseException as error:
                if self._connection.in_transaction:
                    self._sql("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError):
                    raise _no_space(self.path, error) from error
                raise


class Recording:
    """The run and the results of a pool's file, read only. A pool may be running on it."""

    def __init__(self, path: str):
        """Open the file. Raises ConfigError where it is no pool's."""
        if not Path(path).is_file():
            raise _unusable(path, "there is no such file", "name the pool_file of a pool")
        # Without a log beside it no process has it open, and it may lie where nothing can be written.
        mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
        self._connection = _connect(path, f"{Path(path).absolute().as_uri()}?{mode}")
        _check_kind(path, self._connection)
        self._lock = threading.Lock()
        found = self._row("SELECT info FROM run")
        if found is None:
            raise _unusable(path, "no trainer has used it", "name the pool_file of a pool that has served a run")
        self.run = RunInfo.of_json(found[0])

    def result(self, key: tuple[int, int]) -> Drawn | None:
        """Return the completions of a task (group, attempt), None where there are none."""
        body = _read_result(self._row, key)
        return None if body is None else decode_drawn(body)[0]

    def task(self, key: tuple[int, int]) -> Task | None:
        """Return a task, None where it is not here."""
        row = self._row(
            "SELECT group_id, attempt, version, prompt_ids FROM tasks WHERE group_id = ? AND attempt = ?", *key
        )
        return None if row is None else _task(row)

    def close(self) -> None:
        self._connection.close()

    def _row(self, statement: str, *values: Any) -> tuple | None:
        with self._lock:
            return self._connection.execute(statement, values).fetchone()


def _read_result(row, key: tuple[int, int]) -> bytes | None:
    found = row("SELECT drawn FROM tasks WHERE group_id = ? AND attempt = ?", *key)
    return found[0] if found else None


def _task(row: tuple) -> Task:
    return Task(*row[:3], np.frombuffer(row[3], "<i4").tolist())


def _version(info: bytes) -> Version:
    return Version.of_fields(json.loads(info))


def _files_of(version: Version) -> list[str]:
    return [version.sha256] * version.whole + ([version.delta] if version.delta else [])


def _lock_file(path: str) -> int:
    """Return a descriptor that keeps other pools from the file. Raises ConfigError."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unusable(path, error.strerror, "name a file to write to") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # SQLite's own locks are of another kind
    except OSError as error:
        os.close(file)
        raise _unusable(path, "another pool writes to it", "wait for its end, or name another file") from error
    return file


def _open(path: str) -> sqlite3.Connection:
    connection = _connect(path, Path(path).absolute().as_uri())
    try:
        if connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            connection.executescript(
                f"BEGIN; PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_SCHEMA_VERSION}; {_SCHEMA} "
                "COMMIT;"
            )
    except sqlite3.Error as error:
        raise _not_a_pool(path, error) from error
    _check_kind(path, connection)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA journal_size_limit = 67108864")
    return connection


def _connect(path: str, uri: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _not_a_pool(path, error) from error


def _check_kind(path: str, connection: sqlite3.Connection) -> None:
    """Raise ConfigError where the file is not a pool's."""
    try:
        (application,), (version,) = (
            connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
    except sqlite3.Error as error:
        raise _not_a_pool(path, error) from error
    if application != _APPLICATION:
        raise _unusable(path, "it is the database of another program", "name another file")
    if version != _SCHEMA_VERSION:
        reason = f"it has schema {version}, and this program reads {_SCHEMA_VERSION}"
        raise _unusable(path, reason, "use the release that made it, or name another file")


def _not_a_pool(path: str, error: sqlite3.Error) -> ConfigError:
    return _unusable(path, f"no pool file, or damaged ({error})", "name another file")


def _unusable(path: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"pool_file={path!r}: {reason}: {remedy}")


def _no_space(path: str, error: sqlite3.Error) -> ProtocolError:
    message = f"{path} cannot be written ({error}): its disk may be full"
    log.error(message)
    return ProtocolError(503, "no_space", message, retry_after=5)

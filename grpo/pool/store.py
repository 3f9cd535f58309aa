"""A pool's record of a run: its tasks and their results, and the versions of the policy.

Whatever a method stores is on the disk when it returns, all of it or nothing. `Recording` reads the file, also while a
pool runs on it.
"""

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from grpo.config.errors import ConfigError
from grpo.pool.database import (
    SHARED,
    Database,
    SqliteDatabase,
    checksum,
    damaged,
    is_whole,
    open_read_only,
    refuse_damage,
    unusable,
)
from grpo.pool.files import open_files
from grpo.pool.protocol import GroupResult, RunInfo, Task, Version
from grpo.pool.task_tensors import decode_drawn, digests_of, encode_drawn, names_of
from grpo.wire.refusals import ProtocolError, malformed

_ROW = "version, worker, tokens, newest, prompt_ids, columns, pictures, drawn, checksum"
_TASK_OF_KEY = f"SELECT group_id, attempt, {_ROW} FROM tasks WHERE group_id = ? AND attempt = ?"  # a row for _read_task
_RUN = "SELECT number, info, checksum FROM run"
_VERSIONS = "SELECT version, weights, info, checksum FROM versions"
_TASK_NAME = "group {}, attempt {}"
_JOURNAL = "SELECT group_id, attempt, weights, lines, checksum FROM journal WHERE group_id = ? AND attempt = ?"
_DROP_JOURNAL = "DELETE FROM journal WHERE group_id = ? AND attempt = ?"
_ANOTHER = "start the pool with another --pool_file or --pool_url"


class Store:
    """What a pool keeps, for any thread. All methods raise ProtocolError, 503, and store nothing, if the disk or the
    database fails."""

    def __init__(self, place: str, on_damage: Callable[[ConfigError], None], folder: str | None = None):
        """Open the pool's file, or the database at a URL, as their classes do. `folder` has the files: unset, beside
        the pool's file. Raises ConfigError, also for a folder without the files of the database's versions."""
        self.database = _open(place, on_damage)
        self._run: RunInfo | None = None
        self._has_given_folder = folder is not None
        try:
            self.files = open_files(folder or f"{place}.files")
            self.known_run()  # refuses a damaged one
            for version in self.versions()[-1:]:
                self._check_files(version)
        except ProtocolError as error:
            self.close()
            if error.code == "worker_died":
                raise damaged(self.database.setting, error.message) from error
            raise unusable(self.database.setting, error.message, "it needs the folder of files that it had") from error
        except ConfigError:
            self.database.close()
            raise

    def close(self) -> None:
        self.database.close()
        self.files.close()

    def known_run(self) -> RunInfo | None:
        """Return the run as it was read last, also while the database is away; None before the trainer has put one."""
        return self._run or self._read_run()

    def run(self) -> RunInfo:
        """Return the run as its trainer, or another pool's, put it last. Raises ProtocolError, 404, before that."""
        if (run := self._read_run()) is None:
            raise ProtocolError(404, "no_run", "no trainer has told the pool its run yet", retry_after=2)
        return run

    def _read_run(self) -> RunInfo | None:
        if rows := self.database.checked_rows("the run", _RUN):
            self._run = RunInfo.of_json(rows[0][1])
        return self._run

    def set_run(self, info: RunInfo) -> None:
        """Keep the run; a resumed one's facts replace those before: its agent's file may have been edited. Raises
        ProtocolError, 409, for another run, also in a folder that was given."""
        with self.files.locked(), self.database.transaction():
            same = "run", "base_weights", "turns"
            known = self._read_run()
            if known and any(getattr(known, name) != getattr(info, name) for name in same):
                raise ProtocolError(409, "other_run", f"the pool is of run {known.name}: {_ANOTHER}")
            if self._has_given_folder:
                self.files.claim(info.run, info.name)
            if known:
                info = replace(info, model_files=known.model_files)  # which workers may be fetching
                if known.agent != info.agent:
                    self.database.sql("DELETE FROM journal")  # another program had these answers, and gave the rewards
            if known != info:
                self.database.store("run", number=1, info=info.to_json())
                self._run = None  # to be read again, also if this is not stored after all

    def add_version(self, version: Version) -> None:
        """Keep a version. Raises ProtocolError, 409, if a file is missing. If the pool has, or had, this number with
        other weights, the run was resumed from an earlier checkpoint: that version and the later ones are deleted, with
        the completions that they drew."""
        with self.files.locked():
            self._drop_files_of(self._store_version(version))

    def _store_version(self, version: Version) -> list[Version]:
        """Store a version and return the deleted ones, whose files may go once this is on the disk."""
        with self.database.transaction():
            weights, known = self.find_version(version.version)
            is_other = weights not in (None, version.sha256)
            if known is not None and not is_other and (known.whole or not version.whole):
                return []
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
                    self.database.store("tasks", **_row(self.find_task(key)[0]))
                self.database.sql("DELETE FROM journal WHERE weights NOT IN (SELECT weights FROM versions)")
            elif known is not None:  # a run that was started again sends a whole file after a delta
                version = replace(known, whole=True)
            self.database.store("versions", version=version.version, weights=version.sha256, info=version.to_json())
        return removed

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
        with self.files.locked():
            with self.database.transaction():
                versions = {version.version: version for version in self.versions()}
                kept = {number for number in versions if number >= needed}
                for number in [*kept]:
                    while number in versions and not versions[number].whole:
                        number = versions[number].base
                        kept.add(number)
                removed = [version for number, version in versions.items() if number not in kept]
                for version in removed:
                    self.database.store("versions", version=version.version, weights=version.sha256, info=None)
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
        with self.database.transaction():  # meanwhile no other pool stores what names a file that is being dropped
            used = {sha256 for version in self.versions() for sha256 in _files_of(version)}
            if run := self.known_run():
                used |= {run.model_files, run.base_weights}
            # Pictures stay as tasks do: a run that goes back to a checkpoint has them drawn again.
            pictures = self.database.sql("SELECT DISTINCT pictures FROM tasks WHERE length(pictures) > 0")
            used |= {name for (digests,) in pictures for name in names_of(digests)}
            self.files.drop_unused(used, {sha256 for version in removed for sha256 in _files_of(version)})

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Keep tasks. Raises ProtocolError, 409, for one that is stored with other content, or one of whose pictures is
        missing; none is kept then."""
        with self.database.transaction():
            for task in tasks:
                known, _ = self.find_task(task.key)
                if known is None:
                    self._check_pictures(task)
                    self.database.store("tasks", **_row(task))
                elif known != task:
                    reason = f"group {task.group} has another prompt, row or version in the pool"
                    raise ProtocolError(409, "other_run", f"{reason}: {_ANOTHER}")

    def free_tasks(self, limit: int) -> list[Task]:
        """Return the first tasks without a result and a lease that a stored version may draw, by version, group and
        attempt."""
        run = self.known_run()
        is_here = "<= (SELECT max(version)" if run and run.in_flight_weight_updates else "IN (SELECT version"
        condition = f"drawn IS NULL AND version {is_here} FROM versions WHERE info IS NOT NULL)"
        leased = "SELECT 1 FROM leases WHERE leases.group_id = tasks.group_id AND leases.attempt = tasks.attempt"
        order = "ORDER BY version, group_id, attempt LIMIT ?"
        query = f"SELECT group_id, attempt, {_ROW} FROM tasks WHERE {condition} AND NOT EXISTS ({leased}) {order}"
        return [_read_task(row)[0] for row in self.database.checked_rows(_TASK_NAME, query, limit)]

    def find_task(self, key: tuple[int, int]) -> tuple[Task | None, bytes | None]:
        """Return a task and its result as the file has it; None for an unknown key, and before it is drawn."""
        rows = self.database.checked_rows(_TASK_NAME, _TASK_OF_KEY, *key)
        return _read_task(rows[0]) if rows else (None, None)

    def add_results(
        self, drawn_tasks: Iterable[tuple[Task, GroupResult]], worker: str, weights: Iterable[tuple[int, str]] = ()
    ) -> set[tuple[int, int]]:
        """Keep the completions of tasks that have none, unless other weights than the stored versions' drew them.
        Returns the tasks whose completions are kept."""
        kept = set()
        with self.database.transaction(SHARED):
            replaced = self.replaced(weights)
            for task, drawn in drawn_tasks:
                if replaced.isdisjoint(chain(*drawn.versions)) and self._store_result(task, drawn, worker):
                    kept.add(task.key)
        return kept

    def _store_result(self, task: Task, drawn: GroupResult, worker: str) -> bool:
        """Store a task's completions, unless it has some, or is gone. Return whether they are stored."""
        newest = max(chain(*drawn.versions), default=task.version)  # an agent's episodes may have drawn nothing
        new = {"worker": worker, "tokens": drawn.tokens, "newest": newest, "drawn": encode_drawn([drawn])}
        new["checksum"] = checksum((_row(task) | new).values())
        columns = ", ".join(f"{column} = ?" for column in new)
        undrawn = "group_id = ? AND attempt = ? AND version = ? AND drawn IS NULL"
        statement = f"UPDATE tasks SET {columns} WHERE {undrawn} RETURNING group_id"
        self.database.sql(_DROP_JOURNAL, *task.key)
        return bool(self.database.sql(statement, *new.values(), *task.key, task.version))

    def add_to_journal(self, key: tuple[int, int], weights: str, lines: bytes) -> bool:
        """Keep what a version with these weights has drawn for episodes of a task. Return whether the task waits for
        such; else nothing is kept."""
        with self.database.transaction(SHARED):
            task, result = self.find_task(key)
            is_wanted = task is not None and result is None and self.find_version(task.version)[0] == weights
            if is_wanted:
                row = {"group_id": task.group, "attempt": task.attempt, "weights": weights, "lines": lines}
                self.database.insert("journal", **row, checksum=checksum(row.values()))
        return is_wanted

    def drop_journal(self, keys: Iterable[tuple[int, int]]) -> None:
        """Delete the journals of these tasks."""
        with self.database.transaction(SHARED):
            for key in keys:
                self.database.sql(_DROP_JOURNAL, *key)

    def journal(self, key: tuple[int, int], weights: str) -> bytes:
        """Return the lines of all that these weights have drawn for a task."""
        rows = self.database.checked_rows(f"the journal of {_TASK_NAME}", _JOURNAL, *key)
        return b"".join(lines for _, _, drew, lines in rows if drew == weights)

    def replaced(self, weights: Iterable[tuple[int, str]]) -> set[int]:
        """Return the versions, of these with their weights' SHA-256, that have other weights here."""
        return {number for number, sha256 in weights if self.find_version(number)[0] != sha256}

    def _check_pictures(self, task: Task) -> None:
        """Raise ProtocolError if a worker could not get a picture of this task."""
        for sha256 in task.pictures:
            if self.files.size(sha256) is None:
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
            if newest is None or (run := self.known_run()) is None:
                return []
            each = run.groups_per_round
            sums = "min(version), max(version), count(*), count(drawn), CAST(coalesce(sum(tokens), 0) AS BIGINT)"
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
    task = Task(
        group=group,
        attempt=attempt,
        version=version,
        prompt_ids=np.frombuffer(prompt, "<i4").tolist(),
        columns=columns,
        pictures=names_of(pictures),
    )
    return task, drawn


def _row(task: Task) -> dict[str, Any]:
    """Return the values of a row of the table tasks, by column, without completions and without its checksum."""
    return {
        "group_id": task.group,
        "attempt": task.attempt,
        "version": task.version,
        "worker": None,
        "tokens": None,
        "newest": None,
        "prompt_ids": np.asarray(task.prompt_ids, "<i4").tobytes(),
        "columns": task.columns,
        "pictures": digests_of(task),
        "drawn": None,
    }


def _version(info: bytes) -> Version:
    return Version.of_fields(json.loads(info))


def _files_of(version: Version) -> list[str]:
    return [version.sha256] * version.whole + ([version.delta] if version.delta else []) + [*version.probe.pictures]


def _open(place: str, on_damage: Callable[[ConfigError], None]) -> Database:
    """Open a pool's file, or the database at a postgresql:// URL. Raises ConfigError."""
    if "://" not in place:
        return SqliteDatabase(place, on_damage)
    try:
        from grpo.pool.postgres import PostgresDatabase
    except ImportError as error:
        raise ConfigError(f"pool_url needs psycopg ({error}): pip install 'psycopg[binary]'") from error
    return PostgresDatabase(place, on_damage)


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
        if row is not None and not is_whole(row):
            raise damaged(self._setting, "its checksum differs", name)
        return row

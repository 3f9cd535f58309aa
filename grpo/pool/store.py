"""What a pool keeps of a run: its tasks and their results, the versions of the policy and their files.

Whatever a method stores is on the disk when it returns, all of it or nothing. The file can be read while a pool runs on
it, and after (grpo/pool/recording.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from grpo.config.errors import ConfigError
from grpo.pool.database import Database, damaged
from grpo.pool.files import Files
from grpo.wire.errors import ProtocolError, malformed
from grpo.wire.rollout_tensors import encode_drawn
from grpo.wire.rollouts import Drawn, RunInfo, Task, Version

log = logging.getLogger(__name__)

TASK = "group_id, attempt, version, prompt_ids, columns"
"""what `read_task` makes a task of"""


class Store:
    """The pool's file. All methods may be called from any thread.

    All raise ProtocolError, 503, where the disk fails; nothing of the request is stored then.
    """

    def __init__(self, path: str, on_damage: Callable[[ConfigError], None]):
        """Open the file as Database does."""
        self._database = Database(path, on_damage)
        self.files = Files(self._database)
        try:
            row = self._database.row("SELECT info FROM run")
            self._run = RunInfo.of_json(row[0]) if row else None
            drawn = self._database.row("SELECT count(*), coalesce(sum(drawn IS NOT NULL), 0) FROM tasks")
        except ProtocolError as error:
            self._database.close()
            raise damaged(self._database.setting, error.message) from error
        if self._run is not None:
            log.info("%s: run %s, %d groups, %d of them drawn", path, self._run.name, *drawn)

    def close(self) -> None:
        self._database.close()

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
        with self._database.transaction():
            if self._run is None:
                self._database.sql("INSERT INTO run VALUES (1, ?)", info.to_json())
            elif any(getattr(self._run, name) != getattr(info, name) for name in ("run", "base_weights", "turns")):
                message = f"the pool file is of run {self._run.name}: start the pool with another --pool_file"
                raise ProtocolError(409, "other_run", message)
        self._run = self._run or info

    def _takes_newest(self) -> bool:
        return self._run is not None and self._run.in_flight_weight_updates

    # Versions

    def add_version(self, version: Version) -> list[tuple[int, int]]:
        """Keep a version. Return the tasks that are not to be drawn any more as they were leased.

        A number that is there with other weights says that the run went on from an earlier checkpoint: that version
        and the later ones are deleted, with what they drew. Raises ProtocolError, 409, where a file is not here.
        """
        with self._database.transaction():
            row = self._database.row("SELECT info FROM versions WHERE version = ?", version.version)
            known = _version(row[0]) if row else None
            is_other = known is not None and known.sha256 != version.sha256
            if known is not None and not is_other and (known.whole or not version.whole):
                return []
            self._check_files(version)
            removed, void = [], []
            if is_other:
                removed = [other for other in self.versions() if other.version >= version.version]
                # With newest weights, what is being drawn of any task may have tokens of the versions that go.
                void = self._database.rows(
                    "SELECT group_id, attempt FROM tasks WHERE version >= ?1 OR (?2 AND drawn IS NULL)",
                    version.version,
                    self._takes_newest(),
                )
                self._database.sql("DELETE FROM versions WHERE version >= ?", version.version)
                # The trainer may have put this version's tasks before it has sent the version: they stay, undrawn.
                self._database.sql(
                    "DELETE FROM tasks WHERE version > ?1 OR (version = ?1 AND attempt > 0)", version.version
                )
                self._database.sql(
                    "UPDATE tasks SET worker = NULL, tokens = NULL, drawn = NULL WHERE version = ?", version.version
                )
            elif known is not None:  # a run that was started again sends whole what it sent as a delta
                version = replace(known, whole=True)
            self._database.sql("REPLACE INTO versions VALUES (?, ?)", version.version, version.to_json())
            self._drop_files_of(removed)
        return void

    def versions(self) -> list[Version]:
        """Return all versions, the oldest first."""
        return [_version(info) for (info,) in self._database.rows("SELECT info FROM versions ORDER BY version")]

    def drop_versions_below(self, needed: int) -> None:
        """Delete the versions below `needed` that no chain of deltas to a later one begins with, and their files."""
        with self._database.transaction():
            versions = {version.version: version for version in self.versions()}
            kept = {number for number in versions if number >= needed}
            for number in [*kept]:
                while number in versions and not versions[number].whole:
                    number = versions[number].base
                    kept.add(number)
            removed = [version for number, version in versions.items() if number not in kept]
            for version in removed:
                self._database.sql("DELETE FROM versions WHERE version = ?", version.version)
            self._drop_files_of(removed)

    def _check_files(self, version: Version) -> None:
        """Raise ProtocolError where no worker could make this version from what is here."""
        sizes = {sha256: self.files.size(sha256) for sha256 in _files_of(version)}
        for sha256, size in sizes.items():
            if size is None:
                raise ProtocolError(409, "missing_file", f"file {sha256} of version {version.version} is not here")
        if version.whole and sizes[version.sha256] != version.size:
            raise malformed(f"size {version.size}: file {version.sha256} has {sizes[version.sha256]} bytes")
        is_reached = version.whole or self._database.row("SELECT 1 FROM versions WHERE version = ?", version.base)
        if not is_reached or (version.base is not None and version.base >= version.version):
            message = f"version {version.version} leads from version {version.base}, which is not here"
            raise ProtocolError(409, "missing_file", message)

    def _drop_files_of(self, removed: Iterable[Version]) -> None:
        used = {sha256 for version in self.versions() for sha256 in _files_of(version)}
        used |= {self._run.model_files, self._run.base_weights} if self._run else set()
        self.files.drop_unused(used, {sha256 for version in removed for sha256 in _files_of(version)})

    # Tasks and results

    def put_tasks(self, tasks: Sequence[Task]) -> list[tuple[int, int]]:
        """Keep tasks. Return those that were there for another version: they are to be drawn again.

        Raises ProtocolError, 409, for a task that is there with another prompt or row; none is kept then.
        """
        changed = []
        with self._database.transaction():
            for task in tasks:
                prompt = np.asarray(task.prompt_ids, "<i4").tobytes()
                row = self._database.row(
                    "SELECT version, prompt_ids, columns FROM tasks WHERE group_id = ? AND attempt = ?", *task.key
                )
                if row is None:
                    self._database.sql(
                        "INSERT INTO tasks (group_id, attempt, version, prompt_ids, columns) VALUES (?, ?, ?, ?, ?)",
                        *task.key,
                        task.version,
                        prompt,
                        task.columns,
                    )
                elif row[1:] != (prompt, task.columns):
                    message = (
                        f"group {task.group} has another prompt or row in the pool file: its run had other data: start "
                        "the pool with another --pool_file"
                    )
                    raise ProtocolError(409, "other_run", message)
                elif row[0] != task.version:
                    self._database.sql(
                        "UPDATE tasks SET version = ?, worker = NULL, tokens = NULL, drawn = NULL "
                        "WHERE group_id = ? AND attempt = ?",
                        task.version,
                        *task.key,
                    )
                    changed.append(task.key)
        return changed

    def open_tasks(self, limit: int) -> list[Task]:
        """Return the first tasks without a result whose version is here, by version, group and attempt.

        Where the newest version draws, those are meant that it may draw.
        """
        is_here = "<= (SELECT max(version)" if self._takes_newest() else "IN (SELECT version"
        rows = self._database.rows(
            f"SELECT {TASK} FROM tasks WHERE drawn IS NULL "
            f"AND version {is_here} FROM versions) ORDER BY version, group_id, attempt LIMIT ?",
            limit,
        )
        return [read_task(row) for row in rows]

    def find_task(self, key: tuple[int, int]) -> tuple[Task, bool] | None:
        """Return a task and whether it has a result; None where it is not here."""
        row = self._database.row(
            f"SELECT {TASK}, drawn IS NOT NULL FROM tasks WHERE group_id = ? AND attempt = ?", *key
        )
        return None if row is None else (read_task(row[:-1]), bool(row[-1]))

    def add_results(self, drawn_tasks: Sequence[tuple[Task, Drawn]], worker: str) -> list[bool]:
        """Keep the completions of tasks; return of each whether it is kept: the first of a task and its version is."""
        kept = []
        with self._database.transaction():
            for task, drawn in drawn_tasks:
                change = self._database.sql(
                    "UPDATE tasks SET worker = ?, tokens = ?, drawn = ? "
                    "WHERE group_id = ? AND attempt = ? AND version = ? AND drawn IS NULL",
                    worker,
                    drawn.tokens,
                    encode_drawn([drawn]),
                    *task.key,
                    task.version,
                )
                kept.append(change.rowcount == 1)
        return kept

    def results(self, keys: Iterable[tuple[int, int]], most_bytes: int) -> list[bytes]:
        """Return the results that are there of these tasks, each as `encode_drawn` writes it.

        The first is returned whatever its size; then as many as stay below `most_bytes` together.
        """
        results, size = [], 0
        with self._database.lock:
            for key in keys:
                if (drawn := read_result(self._database.row, key)) is None:
                    continue
                size += len(drawn)
                if results and size > most_bytes:
                    break
                results.append(drawn)
        return results

    def workers_of(self, groups: Iterable[int]) -> dict[int, str]:
        """Return the worker that drew the last attempt of each of these groups."""
        with self._database.lock:
            rows = {
                group: self._database.row(
                    "SELECT worker FROM tasks WHERE group_id = ? AND drawn IS NOT NULL ORDER BY attempt DESC LIMIT 1",
                    group,
                )
                for group in groups
            }
        return {group: row[0] for group, row in rows.items() if row}

    # What the page shows

    def rounds(self, count: int) -> list[dict[str, int]]:
        """Return tasks, results and tokens of the last rounds, the newest first."""
        with self._database.lock:
            newest = self._database.row("SELECT max(group_id) FROM tasks")[0]
            if newest is None or self._run is None:
                return []
            each = self._run.groups_per_round
            rows = self._database.rows(
                "SELECT group_id / ?1 AS round, min(version), max(version), count(*), sum(drawn IS NOT NULL), "
                "coalesce(sum(tokens), 0) FROM tasks WHERE group_id >= ?2 GROUP BY round ORDER BY round DESC",
                each,
                max(0, newest // each - count + 1) * each,
            )
        names = "round", "version", "last_version", "tasks", "drawn", "tokens"
        return [dict(zip(names, row, strict=True)) for row in rows]

    def file_bytes(self) -> int:
        """Return the bytes of the file, with those that lie beside it until they are moved into it."""
        return self._database.size()

    def count_open(self, version: int | None = None) -> int:
        """Return the number of tasks without a result: of a version, or of all."""
        condition, values = ("", ()) if version is None else (" AND version = ?", (version,))
        return self._database.row(f"SELECT count(*) FROM tasks WHERE drawn IS NULL{condition}", *values)[0]


def read_result(first_row: Callable[..., tuple | None], key: tuple[int, int]) -> bytes | None:
    """Return a task's completions as the file has them, None where there are none.

    `first_row` is given a statement and its values.
    """
    row = first_row("SELECT drawn FROM tasks WHERE group_id = ? AND attempt = ?", *key)
    return row[0] if row else None


def read_task(row: tuple) -> Task:
    """Make a task of what TASK names, without columns where a file from before there were any has none."""
    group, attempt, version, prompt, *columns = row
    return Task(group, attempt, version, np.frombuffer(prompt, "<i4").tolist(), *columns)


def _version(info: bytes) -> Version:
    return Version.of_fields(json.loads(info))


def _files_of(version: Version) -> list[str]:
    return [version.sha256] * version.whole + ([version.delta] if version.delta else [])

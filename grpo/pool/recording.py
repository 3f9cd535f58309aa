"""A pool's file, read only: the run, its tasks and what was drawn of them. A pool may be running on it."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

from grpo.pool.database import check_row, damaged, open_read_only, unusable
from grpo.pool.store import RUN, TASK_OF_KEY, read_task
from grpo.wire.rollout_tensors import decode_drawn
from grpo.wire.rollouts import Drawn, RunInfo, Task


class Recording:
    """The run and the results of a pool's file.

    All methods may be called from any thread, and raise ConfigError where the file is damaged.
    """

    def __init__(self, path: str):
        """Open the file. Raises ConfigError where it is no pool's."""
        self._setting = f"replay={path!r}"
        self._connection = open_read_only(path, self._setting)
        self._lock = threading.Lock()
        row = self._row("the run", RUN)
        if row is None:
            raise unusable(
                self._setting, "no trainer has used it", "name the pool_file of a pool that has served a run"
            )
        self.run = RunInfo.of_json(row[1])

    def result(self, key: tuple[int, int]) -> Drawn | None:
        """Return the completions of a task (group, attempt), None where there are none."""
        _, body = self._task(key)
        return None if body is None else decode_drawn(body)[0]

    def task(self, key: tuple[int, int]) -> Task | None:
        """Return a task, None where it is not here."""
        return self._task(key)[0]

    def close(self) -> None:
        self._connection.close()

    def _task(self, key: tuple[int, int]) -> tuple[Task | None, bytes | None]:
        row = self._row("group {}, attempt {}".format(*key), TASK_OF_KEY, *key)
        return (None, None) if row is None else read_task(row)

    def _row(self, name: str, statement: str, *values: Any) -> tuple | None:
        try:
            with self._lock:
                row = self._connection.execute(statement, values).fetchone()
            if row is not None:
                check_row(row)
        except sqlite3.Error as error:
            raise damaged(self._setting, error, name) from error
        return row

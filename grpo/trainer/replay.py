"""The file of an earlier run's pool, in the place of a pool: what was drawn then is trained on again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from grpo.client.errors import ServersLost
from grpo.config.errors import ConfigError
from grpo.pool.recording import Recording
from grpo.wire.rollouts import Drawn, Task


class Replay:
    """A pool that has what an earlier run's workers drew, and gets nothing more."""

    def __init__(self, path: str, run: str):
        """`run` is the identity of the run that is replayed. Raises ConfigError where the file is of another one."""
        self.url = path
        self._recording = Recording(path)
        if run != self._recording.run.run:
            raise ConfigError(
                f"replay={path!r}: it is of run {self._recording.run.name}, which had another model, other data or "
                "other settings: give what that run had, all but the number of ranks"
            )

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Do nothing: `take` finds what there is of them."""

    def take(self, keys: Iterable[tuple[int, int]], wait: float) -> list[Drawn]:
        """Return these groups. Raises ServersLost where one is not in the file, or damaged."""
        drawn = []
        for group, attempt in keys:
            try:
                result = self._recording.result((group, attempt))
            except ConfigError as error:
                raise ServersLost(str(error)) from error
            if result is None:
                raise ServersLost(
                    f"{self.url} has no completions of group {group}, attempt {attempt}: the earlier run ended before: "
                    "go on with a pool on a copy of this file"
                )
            drawn.append(result)
        return drawn

    def status(self) -> dict[str, Any]:
        """Return that nobody draws."""
        return {}

"""The interface of every engine, which draws completions for grpo/workers/loop.py."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from grpo.pool.protocol import GroupResult, Probe, RunInfo, Task
from grpo.workers.worker_tools import WorkerTools


class EngineError(Exception):
    """A failed engine. The message is one sentence; the worker starts the engine again."""


class WorkerFailed(Exception):
    """The end of a worker. The message says why in one sentence."""


class Engine(Protocol):
    """Draws completions of groups. Every method may raise EngineError."""

    card: str  # the name of its GPU, or CPU, for the pool's page; "" until it is known
    capacity: int  # groups that it draws at a time; known after `start`
    loads_in_flight: bool
    """whether `load` and `logprobs` may be called while it draws: the new weights draw the rest of each completion;
    known after `start`"""

    def start(self, run: RunInfo, folder: Path, version: int, turns: WorkerTools | None = None) -> None:
        """Load the model of a folder, the policy's `version`: its configuration, tokenizer and model.safetensors, and
        for a run with `base_weights` the adapter in folder/adapter. `turns` answer the policy in each completion.

        `close` comes before a second `start`, which may have another folder's weights but never another run.
        """
        ...

    def load(self, folder: Path, version: int) -> None:
        """Draw from now on with the weights of the folder's versions_file. No `draw` runs, but with loads_in_flight."""
        ...

    def logprobs(self, probe: Probe) -> list[float]:
        """Return the log-prob of each of the probe's completion ids, at temperature 1. `draw` as for `load`."""
        ...

    def draw(self, task: Task) -> GroupResult:
        """Draw a group's completions, and say which version drew each token.

        Up to `capacity` threads call it at a time. It raises RewardError too, if the run's environment fails.
        """
        ...

    def close(self) -> None:
        """End. Any number of times, from any thread, and before `start` too.

        A `draw` that runs ends soon, perhaps with an EngineError.
        """
        ...

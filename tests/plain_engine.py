"""An engine without a model, for tests of what is around it. It imports nothing heavy."""

from __future__ import annotations

import threading
from pathlib import Path

from grpo.pool.delta import sha256_of
from grpo.pool.protocol import GroupResult, Probe, RunInfo, Task
from grpo.workers.engine import EngineError
from grpo.workers.weights_folder import WEIGHTS


class PlainEngine:
    """Every completion is an eos: a group's first by the version with which it began, the others by that at its end.
    What happened is in `calls`; a test may let it fail, or hold it."""

    card = "a card"

    def __init__(self, capacity: int = 1, loads_in_flight: bool = False, holds: bool = False):
        self.capacity, self.loads_in_flight = capacity, loads_in_flight
        self.calls: list[str] = []
        self.weights: list[str] = []  # SHA-256 of the weights of each start and load
        self.failing = 0  # draws that are still to fail
        self.wrong_logprobs = 0  # probes that are still to get the log-probs of other weights
        self.copies: int | None = None  # completions of a group, where they are not to be the run's
        self.go, self.prove = threading.Event(), threading.Event()  # cleared, they hold draws until `close`, and probes
        if not holds:
            self.go.set()
        self.prove.set()
        self.most_at_a_time = self.draws = self.drawing = 0
        self._lock = threading.Lock()

    def start(self, run: RunInfo, folder: Path, version: int, turns: object = None) -> None:
        self.run, self.version = run, version
        self.calls.append("start")
        self.weights.append(sha256_of(folder / WEIGHTS))

    def load(self, folder: Path, version: int) -> None:
        assert self.loads_in_flight or not self.drawing
        self.version = version
        self.calls.append(f"load {version}")
        self.weights.append(sha256_of(folder / WEIGHTS))

    def logprobs(self, probe: Probe) -> list[float]:
        assert self.loads_in_flight or not self.drawing
        self.prove.wait()
        self.wrong_logprobs -= 1
        return [value - (self.wrong_logprobs >= 0) for value in probe.logprobs]

    def draw(self, task: Task) -> GroupResult:
        with self._lock:
            self.drawing += 1
            self.draws += 1
            self.most_at_a_time = max(self.most_at_a_time, self.drawing)
            self.failing -= 1
            fails, began_with = self.failing >= 0, self.version
        try:
            self.go.wait()
            if fails:
                raise EngineError("the card fell off the bus")
        finally:
            with self._lock:
                self.drawing -= 1
        copies = self.copies or self.run.num_generations
        ids, logprobs = [[self.run.eos_token_ids[0]]] * copies, [[-0.5]] * copies
        return GroupResult(
            group=task.group,
            attempt=task.attempt,
            completions=ids,
            logprobs=logprobs,
            versions=[[began_with], *[[self.version]] * (copies - 1)],
        )

    def close(self) -> None:
        self.calls.append("close")
        self.go.set()

"""Which worker draws which task, and what the pool knows of its workers. In memory: a pool that restarts forgets it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from grpo.pool.protocol import Lease

Key = tuple[int, int]
"""(group, attempt)"""

LEASE_SECONDS = 30.0
"""a worker that is silent for so long loses its leases"""
MOST_REFUSALS = 3
"""so many refused uploads in a row set a worker apart"""
MOST_DRIFT = 0.1, 3.0
"""a worker is set apart where its drift is more than the first, in nats a token, and the second times the least of all
workers. Two right engines in bfloat16 were 0.04 apart, an engine that kept its old head 0.58; a lag moves all workers
alike."""
STATES = "drawing", "waiting", "silent", "apart"
_MOST_WORKERS = 256


@dataclass
class WorkerState:
    """What the pool knows of a worker. Times are time.monotonic()."""

    name: str
    lease: Lease
    """its last request"""
    seen: float
    holds: set[Key] = field(default_factory=set)
    uploaded: float | None = None
    """time of its last accepted upload"""
    groups: int = 0
    tokens: int = 0
    refusals: int = 0
    refused_in_a_row: int = 0
    reason: str = ""
    """why its last upload was refused, or why it is set apart"""
    drift: float | None = None
    """mean distance of its log-probs from the trainer's, in the last step with groups of it, in nats a token"""
    is_apart: bool = False
    """whether it gets no more tasks, until its process is started again"""


class Leases:
    """The leases of all workers. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """notified when a task may have become free, or a result may be there"""
        self._workers: dict[str, WorkerState] = {}
        self._revoked: set[tuple[str, Key]] = set()

    def seen(self, lease: Lease) -> WorkerState:
        """Note a worker's request: it holds what it names, and nothing else any more.

        What it has from before a restart of this process, or from before it was silent, is its own again where nobody
        else has it.
        """
        with self.changed:
            worker = self._worker(lease.worker, lease)
            named = {(group, attempt) for group, attempt in lease.holds}
            self._revoked = {(name, key) for name, key in self._revoked if name != worker.name or key in named}
            others = self.held() - worker.holds
            before = worker.holds
            worker.holds = {key for key in named - others if (worker.name, key) not in self._revoked}
            if before - named:
                self.changed.notify_all()
            return worker

    def renew(self, name: str) -> None:
        """Keep the leases of a worker that is waiting for an answer."""
        with self.changed:
            if name in self._workers:
                self._workers[name].seen = time.monotonic()

    def grant(self, name: str, keys: Iterable[Key]) -> None:
        with self.changed:
            if name in self._workers:
                self._workers[name].holds.update(keys)

    def held(self) -> set[Key]:
        """Return all leased tasks; the leases of workers that fell silent end here."""
        with self.changed:
            end = time.monotonic() - LEASE_SECONDS
            for worker in self._workers.values():
                if worker.seen < end:
                    worker.holds.clear()
            return set().union(*(worker.holds for worker in self._workers.values()))

    def find(self, name: str) -> WorkerState | None:
        """Return a worker, None where it is not known."""
        with self.changed:
            return self._workers.get(name)

    def revoke(self, keys: Iterable[Key]) -> None:
        """End the leases of these tasks: what is being drawn for them is not wanted any more."""
        with self.changed:
            keys = set(keys)
            for worker in self._workers.values():
                self._revoked |= {(worker.name, key) for key in worker.holds & keys}
                worker.holds -= keys
            self.changed.notify_all()

    def is_revoked(self, name: str, key: Key) -> bool:
        """Return whether this worker draws the task for a lease that was ended."""
        with self.changed:
            return (name, key) in self._revoked

    def uploaded(self, name: str, keys: Iterable[Key], groups: int, tokens: int) -> None:
        """Note an upload of these tasks, of which so many groups with so many tokens were accepted."""
        with self.changed:
            keys = set(keys)
            self._revoked -= {(name, key) for key in keys}
            for worker in self._workers.values():
                worker.holds -= keys
            if groups and (worker := self._workers.get(name)) is not None:
                worker.seen = worker.uploaded = time.monotonic()
                worker.groups, worker.tokens = worker.groups + groups, worker.tokens + tokens
                worker.refused_in_a_row = 0
            self.changed.notify_all()

    def refused(self, name: str, keys: Iterable[Key], reason: str) -> WorkerState:
        """Note a refused upload: others may draw these tasks."""
        with self.changed:
            worker = self._worker(name, None)
            worker.refusals, worker.refused_in_a_row = worker.refusals + 1, worker.refused_in_a_row + 1
            worker.reason = reason
            worker.holds.difference_update(keys)
            if worker.refused_in_a_row >= MOST_REFUSALS:
                self._suspend(worker, f"{MOST_REFUSALS} uploads in a row were refused, the last: {reason}")
            self.changed.notify_all()
            return worker

    def drifted(self, drifts: Mapping[str, float], are_alike: bool = True) -> list[WorkerState]:
        """Note how far each worker's log-probs are from the trainer's. Return the workers that this sets apart.

        `are_alike`: whether all drew with one version, so that they can be compared; else none is set apart.
        """
        with self.changed:
            least, apart = min(drifts.values(), default=0.0), []
            for name, drift in drifts.items():
                if (worker := self._workers.get(name)) is None or worker.is_apart:
                    continue
                worker.drift = drift
                if are_alike and drift > MOST_DRIFT[0] + MOST_DRIFT[1] * least:
                    far = f"its log-probs are {drift:.2g} nats a token from the trainer's"
                    self._suspend(worker, f"{far}, another worker's {least:.2g}")
                    apart.append(worker)
            self.changed.notify_all()
            return apart

    def workers(self) -> list[WorkerState]:
        """Return all workers that are known, the last seen first."""
        with self.changed:
            return sorted(self._workers.values(), key=lambda worker: -worker.seen)

    def states(self) -> Counter[str]:
        """Return the number of workers in each state."""
        return Counter(state(worker) for worker in self.workers())

    def _suspend(self, worker: WorkerState, reason: str) -> None:
        worker.is_apart, worker.reason = True, reason
        worker.holds.clear()

    def drawers(self, name: str) -> int:
        """Return how many workers draw, or would if they were given tasks; the named one is among them."""
        with self.changed:
            live = (worker for worker in self._workers.values() if state(worker) in ("drawing", "waiting"))
            return len({name, *(worker.name for worker in live if worker.holds or worker.lease.room)})

    def _worker(self, name: str, lease: Lease | None) -> WorkerState:
        now = time.monotonic()
        worker = self._workers.get(name)
        if worker is None:
            while len(self._workers) >= _MOST_WORKERS:
                del self._workers[min(self._workers.values(), key=lambda worker: worker.seen).name]
            worker = self._workers[name] = WorkerState(name, lease or Lease(name, 0, [], 0.0), now)
        worker.seen, worker.lease = now, lease or worker.lease
        return worker


def state(worker: WorkerState) -> str:
    """Return which of STATES a worker is in."""
    if worker.is_apart:
        return "apart"
    if worker.seen < time.monotonic() - LEASE_SECONDS:
        return "silent"
    return "drawing" if worker.holds else "waiting"

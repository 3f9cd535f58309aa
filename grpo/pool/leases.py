"""Which worker draws which task, and each worker's state. In memory: a pool that restarts forgets it."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from grpo.pool.protocol import Lease

log = logging.getLogger("ref_server")

Key = tuple[int, int]  # (group, attempt)

LEASE_SECONDS = 30.0  # a worker that is silent for so long loses its leases
MOST_REFUSALS = 3  # so many refused uploads in a row suspend a worker
MOST_DRIFT = 0.1, 3.0
"""a worker is suspended if its drift exceeds the first, in nats a token, plus the second times the least drift of all
workers. Two right engines in bfloat16 differed by 0.04, one that kept its old head by 0.58; a lag moves all workers
by the same amount."""
STATES = "drawing", "waiting", "silent", "apart"
_MOST_WORKERS = 256


@dataclass
class WorkerState:
    """The pool's record of a worker. Times are time.monotonic()."""

    name: str
    lease: Lease  # its last request
    seen: float
    holds: set[Key] = field(default_factory=set)
    uploaded: float | None = None  # time of its last accepted upload
    groups: int = 0
    tokens: int = 0
    refusals: int = 0
    refused_in_a_row: int = 0
    reason: str = ""  # why its last upload was refused, or why it is suspended
    drift: float | None = None  # nats a token from the trainer's log-probs, a mean of the last step with groups of it
    is_suspended: bool = False  # it gets no more tasks until its process is started again

    @property
    def state(self) -> str:
        """one of STATES"""
        if self.is_suspended:
            return STATES[-1]
        if self.seen < time.monotonic() - LEASE_SECONDS:
            return "silent"
        return "drawing" if self.holds else "waiting"

    def suspend(self, reason: str) -> None:
        self.is_suspended, self.reason = True, reason
        self.holds.clear()
        log.warning("worker %r is suspended: %s", self.name, reason)


class Leases:
    """The leases of all workers. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())  # notified when a task, or a result may be there
        self._workers: dict[str, WorkerState] = {}

    def seen(self, lease: Lease) -> WorkerState:
        """Note a worker's request: from now on it holds the tasks that it names, unless another holds them. It may name
        tasks from before this process started, or it was silent."""
        with self.changed:
            worker = self._worker(lease.worker, lease)
            named, before = {(group, attempt) for group, attempt in lease.holds}, worker.holds
            worker.holds = named - (self.held() - before)
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
        with self.changed:
            return self._workers.get(name)

    def uploaded(self, name: str, keys: Iterable[Key], groups: int, tokens: int) -> None:
        """Note an upload of these tasks; the pool accepted so many groups with so many tokens."""
        with self.changed:
            for worker in self._workers.values():
                worker.holds.difference_update(keys)
            if groups and (worker := self._workers.get(name)) is not None:
                worker.seen = worker.uploaded = time.monotonic()
                worker.groups, worker.tokens = worker.groups + groups, worker.tokens + tokens
                worker.refused_in_a_row = 0
            self.changed.notify_all()

    def refused(self, name: str, keys: Iterable[Key], reason: str) -> None:
        """Note a refused upload: others may draw these tasks."""
        with self.changed:
            worker = self._worker(name)
            worker.refusals, worker.refused_in_a_row = worker.refusals + 1, worker.refused_in_a_row + 1
            worker.reason = reason
            worker.holds.difference_update(keys)
            if worker.refused_in_a_row >= MOST_REFUSALS:
                worker.suspend(f"{MOST_REFUSALS} uploads in a row were refused, the last: {reason}")
            self.changed.notify_all()

    def drifted(self, drifts: Mapping[str, float], is_one_version: bool = True) -> None:
        """Note how far workers' log-probs are from the trainer's; suspend those too far, if `is_one_version`."""
        with self.changed:
            least = min(drifts.values(), default=0.0)
            for name, drift in drifts.items():
                if (worker := self._workers.get(name)) is None or worker.is_suspended:
                    continue
                worker.drift = drift
                if is_one_version and drift > MOST_DRIFT[0] + MOST_DRIFT[1] * least:
                    far = f"its log-probs are {drift:.2g} nats a token from the trainer's"
                    worker.suspend(f"{far}, another worker's {least:.2g}")
            self.changed.notify_all()

    def workers(self) -> list[WorkerState]:
        """Return all workers, the last seen first."""
        with self.changed:
            return sorted(self._workers.values(), key=lambda worker: -worker.seen)

    def states(self) -> Counter[str]:
        return Counter(worker.state for worker in self.workers())

    def drawers(self, name: str) -> int:
        """Return how many workers draw, or would if they were given tasks; the named one is among them."""
        live = (worker for worker in self.workers() if worker.state in ("drawing", "waiting"))
        return len({name, *(worker.name for worker in live if worker.holds or worker.lease.room)})

    def _worker(self, name: str, lease: Lease | None = None) -> WorkerState:
        now = time.monotonic()
        if name not in self._workers:
            if len(self._workers) >= _MOST_WORKERS:
                del self._workers[min(self._workers.values(), key=lambda worker: worker.seen).name]
            self._workers[name] = WorkerState(name, Lease(name, 0, [], 0.0), now)
        worker = self._workers[name]
        worker.seen, worker.lease = now, lease or worker.lease
        return worker

"""Which worker draws which task, and each worker's state. A pool's restart forgets it, several pools on one database
share it."""

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo.pool.database import LEASES, Database
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
_MOST_WORKERS = 1024


@dataclass(kw_only=True)
class WorkerState:
    """The pool's record of a worker. Times are those of Database.now."""

    name: str
    lease: Lease  # its last request
    seen: float
    is_suspended: bool = False  # it gets no more tasks until its process is started again
    holds: set[Key] = field(default_factory=set)
    uploaded: float | None = None  # time of its last accepted upload
    groups: int = 0
    tokens: int = 0
    refusals: int = 0
    refused_in_a_row: int = 0
    reason: str = ""  # why its last upload was refused, or why it is suspended
    drift: float | None = None  # nats a token from the trainer's log-probs, a mean of the last step with groups of it

    @classmethod
    def of_row(cls, row: tuple, holds: set[Key]) -> "WorkerState":
        """Read a row of the table workers."""
        name, seen, _, is_suspended, state = row
        state = json.loads(state)
        lease = Lease(**state.pop("lease"))
        return cls(name=name, lease=lease, seen=seen, is_suspended=bool(is_suspended), holds=holds, **state)

    def to_row(self) -> dict[str, Any]:
        """Return the values of a row of the table workers, by column."""
        state = asdict(self)
        for column in ("name", "seen", "is_suspended", "holds"):
            del state[column]
        return {
            "name": self.name,
            "seen": self.seen,
            "room": self.lease.room,
            "is_suspended": int(self.is_suspended),
            "state": json.dumps(state),
        }

    def state(self, now: float) -> str:
        """Return one of STATES."""
        if self.is_suspended:
            return STATES[-1]
        if self.seen < now - LEASE_SECONDS:
            return "silent"
        return "drawing" if self.holds else "waiting"

    def suspend(self, reason: str) -> None:
        self.is_suspended, self.reason = True, reason
        self.holds.clear()
        log.warning("worker %r is suspended: %s", self.name, reason)


class Leases:
    """The leases of all workers. All methods may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self.changed = threading.Condition(threading.RLock())  # notified when a task, or a result may be there
        self._database, self.now = database, database.now

    def seen(self, lease: Lease) -> WorkerState:
        """Note a worker's request: from now on it holds the tasks that it names, unless another holds them. It may name
        tasks from before this process started, or it was silent."""
        with self._changing():
            worker = self._worker(lease.worker, lease)
            worker.holds = set() if worker.is_suspended else {(group, attempt) for group, attempt in lease.holds}
            return self._keep(worker)

    def renew(self, name: str) -> None:
        """Keep the leases of a worker that is waiting for an answer."""
        with self._changing():
            self._database.sql("UPDATE workers SET seen = ? WHERE name = ?", self.now(), name)

    def grant(self, name: str, keys: Iterable[Key]) -> None:
        with self._changing():
            if (worker := self.find(name)) is not None:
                worker.holds.update(keys)
                self._keep(worker)

    def count(self) -> int:
        """Return how many tasks are leased; the leases of workers that fell silent, or were dropped, end here."""
        with self._changing():
            live = "SELECT name FROM workers WHERE seen >= ?"
            self._database.sql(f"DELETE FROM leases WHERE worker NOT IN ({live})", self.now() - LEASE_SECONDS)
            return self._database.row("SELECT count(*) FROM leases")[0]

    def find(self, name: str) -> WorkerState | None:
        return next(iter(self._read("WHERE name = ?", name)), None)

    def uploaded(
        self, name: str, done: Iterable[Key], *, unwanted: Iterable[Key] = (), groups: int, tokens: int
    ) -> None:
        """Note an upload of tasks that are done, and of others, drawn with replaced weights, which another worker may
        be drawing anew; the pool accepted so many groups with so many tokens."""
        of_task = "DELETE FROM leases WHERE group_id = ? AND attempt = ?"
        with self._changing():
            for key in done:
                self._database.sql(of_task, *key)
            for key in unwanted:
                self._database.sql(f"{of_task} AND worker = ?", *key, name)
            if groups and (worker := self.find(name)) is not None:
                worker.seen = worker.uploaded = self.now()
                worker.groups, worker.tokens = worker.groups + groups, worker.tokens + tokens
                worker.refused_in_a_row = 0
                self._keep(worker)
            self.changed.notify_all()

    def refused(self, name: str, keys: Iterable[Key], reason: str) -> None:
        """Note a refused upload: others may draw these tasks."""
        with self._changing():
            worker = self._worker(name)
            worker.refusals, worker.refused_in_a_row = worker.refusals + 1, worker.refused_in_a_row + 1
            worker.reason = reason
            worker.holds.difference_update(keys)
            if worker.refused_in_a_row >= MOST_REFUSALS:
                worker.suspend(f"{MOST_REFUSALS} uploads in a row were refused, the last: {reason}")
            self._keep(worker)

    def drifted(self, drifts: Mapping[str, float], is_one_version: bool = True) -> None:
        """Note how far workers' log-probs are from the trainer's; suspend those too far, if `is_one_version`."""
        with self._changing():
            least = min(drifts.values(), default=0.0)
            for name, drift in drifts.items():
                if (worker := self.find(name)) is None or worker.is_suspended:
                    continue
                worker.drift = drift
                if is_one_version and drift > MOST_DRIFT[0] + MOST_DRIFT[1] * least:
                    far = f"its log-probs are {drift:.2g} nats a token from the trainer's"
                    worker.suspend(f"{far}, another worker's {least:.2g}")
                self._keep(worker)

    def workers(self) -> list[WorkerState]:
        """Return all workers, the last seen first."""
        return self._read("ORDER BY seen DESC")

    def states(self) -> Counter[str]:
        return Counter(worker.state(self.now()) for worker in self.workers())

    def drawers(self, name: str) -> int:
        """Return how many workers draw, or would if they were given tasks; the named one is among them."""
        draws = "room > 0 OR EXISTS (SELECT 1 FROM leases WHERE worker = name)"
        is_live = f"seen >= ? AND is_suspended = 0 AND ({draws})"
        query = f"SELECT count(*) FROM workers WHERE name = ? OR ({is_live})"
        return max(1, self._database.row(query, name, self.now() - LEASE_SECONDS)[0])

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self.changed, self._database.transaction(LEASES):
            yield

    def _worker(self, name: str, lease: Lease | None = None) -> WorkerState:
        """Return the state of a worker that has just sent a request."""
        worker = self.find(name)
        if worker is None:
            if self._database.row("SELECT count(*) FROM workers")[0] >= _MOST_WORKERS:
                oldest = "SELECT name FROM workers ORDER BY seen LIMIT 1"
                self._database.sql(f"DELETE FROM workers WHERE name IN ({oldest})")
            worker = WorkerState(name=name, lease=Lease(worker=name, room=0, holds=[], wait=0.0), seen=0.0)
        worker.seen, worker.lease = self.now(), lease or worker.lease
        return worker

    def _keep(self, worker: WorkerState) -> WorkerState:
        """Store a worker's state, and those of its tasks that no other holds."""
        self.count()
        self._database.replace("workers", **worker.to_row())
        before = self._holds("WHERE worker = ?", worker.name).get(worker.name, set())
        for key in before - worker.holds:
            self._database.sql("DELETE FROM leases WHERE group_id = ? AND attempt = ?", *key)
        for key in worker.holds - before:
            self._database.sql("INSERT INTO leases VALUES (?, ?, ?) ON CONFLICT DO NOTHING", *key, worker.name)
        worker.holds = self._holds("WHERE worker = ?", worker.name).get(worker.name, set())
        if before - worker.holds:
            self.changed.notify_all()
        return worker

    def _read(self, condition: str, *values: str) -> list[WorkerState]:
        """Return workers, with their tasks."""
        with self._database.lock:
            rows = self._database.sql(f"SELECT name, seen, room, is_suspended, state FROM workers {condition}", *values)
            holds = self._holds("WHERE worker = ?" if values else "", *values)
        return [WorkerState.of_row(row, holds.get(row[0], set())) for row in rows]

    def _holds(self, condition: str, *values: str) -> dict[str, set[Key]]:
        """Return the leased tasks by worker."""
        holds: dict[str, set[Key]] = {}
        for worker, *key in self._database.sql(f"SELECT worker, group_id, attempt FROM leases {condition}", *values):
            holds.setdefault(worker, set()).add(tuple(key))
        return holds

"""A pool of rollouts: tasks wait for workers, completions wait for the trainer; a run's file keeps both."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import TypeVar

from grpo.config.server import ServerConfig
from grpo.pool.database import PIECE_BYTES
from grpo.pool.leases import LEASE_SECONDS, Key, Leases, WorkerState
from grpo.pool.pool_monitor import PoolMonitor
from grpo.pool.protocol import Lease, RunInfo, Task, Version, check_drawn
from grpo.pool.store import Store
from grpo.pool.task_tensors import decode_drawn, decode_results, decode_tasks, encode_drawn, encode_tasks
from grpo.server.http import THREADS
from grpo.server.service import Service
from grpo.wire.health import ModelInfo
from grpo.wire.refusals import ProtocolError, check_name

log = logging.getLogger("ref_server")

_MOST_WORK = 24  # requests that are read and stored at once
# Requests that wait for tasks or results; the other threads keep /health quick.
_MOST_WAITING = THREADS - 8 - _MOST_WORK
LONGEST_WAIT = 30.0  # seconds
_CHECK_SECONDS = 0.5  # how often a thread that waits checks whether its client is still connected

_Item = TypeVar("_Item")


class PoolService(Service):
    """The state of a pool: its file, the leases of its workers, and the threads that wait."""

    def __init__(self, config: ServerConfig):
        super().__init__(config, ModelInfo())
        self.store: Store | None = None
        self.leases = Leases()
        self.numbers = PoolMonitor(self.monitor, self.leases)
        self.work_threads = threading.Semaphore(_MOST_WORK)
        self._waiting_threads = threading.Semaphore(_MOST_WAITING)
        # While they are read, tokens take many times the size of the body: read and store one request at a time.
        self._storing = threading.Lock()

    def load(self) -> None:
        self.store = Store(self.config.pool_file, on_damage=self.fail)
        self._name_run()
        self.change_info(status="ready")

    def description(self) -> str:
        run = self.info.model.name
        return f"a pool of rollouts in {self.config.pool_file}, " + (f"of run {run}" if run else "of no run yet")

    def drain(self, seconds: float) -> None:
        with self.leases.changed:
            self.leases.changed.notify_all()

    def close(self) -> None:
        self.store.close()

    def set_run(self, info: RunInfo) -> None:
        """Keep a trainer's run. Raises ProtocolError, 409, where the file is another run's."""
        self.store.set_run(info)
        self._name_run()

    def add_version(self, version: Version) -> None:
        """Keep a version of the policy. Raises ProtocolError, 409, where a file is not here."""
        with self._storing, self.leases.changed:  # nobody may lease, or send, what is just going
            self.leases.revoke(self.store.add_version(version))

    def put_tasks(self, body: bytes) -> int:
        """Keep tasks; return their number. Raises ProtocolError, 409, for tasks of another run."""
        with self._storing:
            tasks = decode_tasks(body, self.store.run().vocab_size)
            with self.leases.changed:
                self.leases.revoke(self.store.put_tasks(tasks))
        return len(tasks)

    def lease(self, lease: Lease, is_gone: Callable[[], bool]) -> bytes:
        """Return the tasks that a worker is to draw, as bytes; wait for one where there is none.

        Raises ProtocolError: 403 for a worker that is set apart, 404 without a run, 503.
        """
        run = self.store.run()
        self._check_welcome(self.leases.seen(lease))
        tasks: list[Task] = []
        if lease.room:
            tasks = self._wait(lambda: self._take(lease), lease.wait, is_gone, lease.worker)
        metadata = {"lease_seconds": f"{LEASE_SECONDS:g}", "run": run.run}
        if (version := self._version_for(tasks, run)) is not None:
            # Not the number alone: a run that went back to a checkpoint may make a version of the same number anew.
            metadata |= {"version": str(version.version), "sha256": version.sha256}
        return encode_tasks(tasks, metadata)

    def groups(self, keys: list[Key], seconds: float, is_gone: Callable[[], bool]) -> bytes:
        """Return the results of these tasks that are there, as bytes; wait for one where there is none."""
        results = self._wait(lambda: self.store.results(keys, PIECE_BYTES), seconds, is_gone)
        return encode_drawn([decode_drawn(body)[0] for body in results])

    def add_results(self, body: bytes, worker: str) -> list[str]:
        """Keep completions; return of each whether it was accepted. Those are not wanted that weights drew which have
        been replaced.

        Raises ProtocolError: 403 for a worker that is set apart, 422 where something is no completion of its task:
        then nothing is kept.
        """
        check_name("worker", worker)
        if (known := self.leases.find(worker)) is not None:
            self._check_welcome(known)
        run = self.store.run()
        wanted, answers = [], []
        with self._storing:
            groups, weights = decode_results(body)
            replaced = {number for number, sha256 in weights if self.store.weights_of(number) != sha256}
            for drawn in groups:
                task, is_drawn = self.store.find_task(drawn.key) or (None, False)
                versions = {*chain(*drawn.versions)}
                is_revoked = self.leases.is_revoked(worker, drawn.key) or not versions.isdisjoint(replaced)
                is_wanted = task is not None and not is_revoked
                answers.append("already there" if is_drawn else "accepted" if is_wanted else "not wanted")
                if answers[-1] == "accepted":
                    try:
                        check_drawn(drawn, run, task)
                    except ProtocolError as error:
                        self._refuse(worker, [drawn.key for drawn in groups], error)
                        raise
                    wanted.append((task, drawn))
            kept = iter(self.store.add_results(wanted, worker))
        answers = [("accepted" if next(kept) else "already there") if a == "accepted" else a for a in answers]
        accepted = [drawn for drawn, answer in zip(groups, answers, strict=True) if answer == "accepted"]
        tokens = sum(drawn.tokens for drawn in accepted)
        self.leases.uploaded(worker, [drawn.key for drawn in groups], len(accepted), tokens)
        self.numbers.answered(answers, tokens)
        return answers

    def note_drift(self, drifts: dict[int, tuple[float, int]]) -> None:
        """Take in how far the log-probs of these groups are from the trainer's: nats a token, and tokens, by group."""
        sums: dict[str, list[float]] = {}
        for group, worker in self.store.workers_of(drifts).items():
            drift, tokens = drifts[group]
            total = sums.setdefault(worker, [0.0, 0])
            total[0] += drift * tokens
            total[1] += tokens
        drifts_of_workers = {name: total / tokens for name, (total, tokens) in sums.items()}
        # Where each draws with the newest version that it has, ages differ, and log-probs with them.
        are_alike = not self.store.run().in_flight_weight_updates
        for worker in self.leases.drifted(drifts_of_workers, are_alike):
            log.warning("worker %r is set apart: %s", worker.name, worker.reason)

    def metrics(self) -> bytes:
        if self.store is not None:
            self.numbers.refresh(self.store)
        return super().metrics()

    def status(self) -> dict:
        return super().status() | (self.numbers.status(self.store) if self.store is not None else {})

    def summary(self) -> str | None:
        return self.numbers.summary(self.store)

    def _version_for(self, tasks: list[Task], run: RunInfo) -> Version | None:
        """Return the version that is to draw these tasks; None where there is none.

        With in_flight_weight_updates it is the newest one, and named without tasks too: workers learn of it.
        """
        if not (tasks or run.in_flight_weight_updates):
            return None
        versions = {version.version: version for version in self.store.versions()}
        return versions.get(max(versions, default=-1) if run.in_flight_weight_updates else tasks[0].version)

    def _take(self, lease: Lease) -> list[Task]:
        """Lease to a worker the first tasks that are free, all to be drawn by one version, and no more than its share.

        A worker that draws many groups at a time would leave nothing to those that ask a moment later.
        """
        with self.leases.changed:
            held = self.leases.held()
            free = [task for task in self.store.open_tasks(lease.room + len(held)) if task.key not in held]
            takes_newest = self.store.run().in_flight_weight_updates
            tasks = [task for task in free if takes_newest or task.version == free[0].version][: lease.room]
            if tasks and lease.room > 1:
                count = self.store.count_open(None if takes_newest else tasks[0].version)
                share = -(-count // self.leases.drawers(lease.worker))
                tasks = tasks[: max(0, share - len(lease.holds))]
            self.leases.grant(lease.worker, [task.key for task in tasks])
            self.numbers.leased(len(tasks))
            return tasks

    def _wait(
        self, find: Callable[[], list[_Item]], seconds: float, is_gone: Callable[[], bool], worker: str = ""
    ) -> list[_Item]:
        """Return what `find` finds as soon as it finds something; empty after `seconds`.

        Raises ProtocolError: 499 where the client has gone, 503 where too many wait or the server is ending.
        """
        if (items := find()) or seconds == 0:
            return items
        end = time.monotonic() + min(seconds, LONGEST_WAIT)
        with self.thread_of(self._waiting_threads):
            while not items and (left := end - time.monotonic()) > 0:
                with self.leases.changed:
                    self.leases.changed.wait(min(left, _CHECK_SECONDS))
                self.check_ready()
                self.check_connected(is_gone)
                self.leases.renew(worker)
                items = find()
        return items

    def _check_welcome(self, worker: WorkerState) -> None:
        if worker.is_apart:
            message = f"worker {worker.name[:80]} is set apart: {worker.reason[:250]}: mend and restart it"
            raise ProtocolError(403, "set_apart", message)

    def _refuse(self, name: str, keys: list[Key], error: ProtocolError) -> None:
        """Count a refused upload, and say so where the worker is now set apart."""
        self.numbers.answered(["refused"] * len(keys))
        worker = self.leases.refused(name, keys, error.message)
        if worker.is_apart:
            log.warning("worker %r is set apart: %s", name, worker.reason)

    def _name_run(self) -> None:
        if self.store.has_run():
            self.change_info(model=ModelInfo(self.store.run().name))

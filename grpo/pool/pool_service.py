"""A pool of rollouts: tasks wait for workers, completions wait for the trainer; a run's file keeps both."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from grpo.config.server import ServerConfig
from grpo.pool.database import LEASES
from grpo.pool.files import PIECE_BYTES
from grpo.pool.leases import LEASE_SECONDS, Key, Leases, WorkerState
from grpo.pool.pool_monitor import PoolMonitor
from grpo.pool.protocol import Lease, Task, Version, check_drawn
from grpo.pool.store import Store
from grpo.pool.task_tensors import decode_drawn, decode_results, decode_tasks, encode_drawn, encode_tasks
from grpo.server.http import THREADS
from grpo.server.service import Service
from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.refusals import ProtocolError, check_name, malformed

_MOST_WORK = 24  # requests that are read and stored at once
# Requests that wait for tasks or results; the other threads keep /health quick.
_MOST_WAITING = THREADS - 8 - _MOST_WORK
LONGEST_WAIT = 30.0  # seconds
_CHECK_SECONDS = 0.5  # how often a thread that waits checks whether its client is still connected


class PoolService(Service):
    """The state of a pool: its file, the leases of its workers, and the threads that wait."""

    def __init__(self, config: ServerConfig):
        """Open the pool's file. Raises ConfigError."""
        super().__init__(config, ModelInfo())
        self.store = Store(config.pool_file or config.pool_url, self.fail, config.pool_folder)
        self.leases = Leases(self.store.database)
        self.numbers = PoolMonitor(self.monitor, self.leases, self.store)
        self.work_threads = threading.Semaphore(_MOST_WORK)
        self.asking_threads = threading.Semaphore(_MOST_WORK)  # uploads that wait must not cost workers their leases
        self.waiting_threads = threading.Semaphore(_MOST_WAITING)
        # While they are read, tokens take many times the size of the body: read and store one request at a time.
        self._storing = threading.Lock()

    def load(self) -> None:
        self.change_info(status="ready")

    def description(self) -> str:
        run = self.store.known_run()
        of_run = f"of run {run.name}" if run else "of no run yet"
        return f"a pool of rollouts in {self.store.database.place}, {of_run}"

    def current_info(self) -> ServerInfo:
        """Name the run where other servers name their model."""
        run = self.store.known_run()
        return replace(self.info, model=ModelInfo(name=run.name)) if run else self.info

    def drain(self, seconds: float) -> None:
        if self.leases.changed.acquire(timeout=seconds):  # a database that does not answer may hold it
            self.leases.changed.notify_all()
            self.leases.changed.release()

    def close(self) -> None:
        self.store.close()

    def add_version(self, version: Version) -> None:
        """Keep a version of the policy. Raises ProtocolError, 409, if one of its files is missing."""
        with self._storing, self.leases.changed:  # no worker may lease, or send, a task that is being removed
            self.store.add_version(version)
            self.leases.changed.notify_all()

    def put_tasks(self, body: bytes) -> int:
        """Keep tasks; return their number. Raises ProtocolError, 409, for tasks of another run."""
        with self._storing:
            tasks = decode_tasks(body, self.store.run().vocab_size)
            with self.leases.changed:
                self.store.put_tasks(tasks)
                self.leases.changed.notify_all()
        return len(tasks)

    def lease(self, lease: Lease, is_gone: Callable[[], bool]) -> bytes:
        """Lease tasks to a worker; wait if none is free. Raises ProtocolError: 403 for a suspended worker, 404, 503."""
        run = self.store.run()
        self._check_welcome(self.leases.seen(lease))
        tasks, takes_newest = [], run.in_flight_weight_updates
        if lease.room:
            tasks = self._wait(lambda: self._take(lease, takes_newest), lease.wait, is_gone, lease.worker)
        metadata = {"lease_seconds": f"{LEASE_SECONDS:g}", "run": run.run}
        if tasks or takes_newest:  # the newest is named without tasks too: workers learn of it
            versions = {version.version: version.sha256 for version in self.store.versions()}
            number = max(versions, default=-1) if takes_newest else tasks[0].version
            if number in versions:
                # Also the SHA-256: a run that went back to a checkpoint may make a version of the same number anew.
                metadata |= {"version": str(number), "sha256": versions[number]}
        return encode_tasks(tasks, metadata)

    def groups(self, keys: list[Key], seconds: float, is_gone: Callable[[], bool]) -> bytes:
        """Return the results of these tasks, as bytes; wait until at least one has a result."""
        results = self._wait(lambda: self.store.results(keys, PIECE_BYTES), seconds, is_gone)
        # As lists tokens take ten times the memory.
        return results[0] if len(results) == 1 else encode_drawn([decode_drawn(body)[0] for body in results])

    def add_results(self, body: bytes, worker: str) -> list[str]:
        """Keep completions; return the answer to each group. A group that replaced weights drew is not wanted. Raises
        ProtocolError, and keeps none: 403 for a suspended worker, 422 for what no task's completions can be."""
        check_name("worker", worker)
        self._check_welcome(self.leases.find(worker))
        run = self.store.run()
        with self._storing:
            groups, weights = decode_results(body)
            replaced = self.store.replaced(weights)
            answers, wanted = [], {}
            for drawn in groups:
                task, result = self.store.find_task(drawn.key)
                if result is not None or drawn.key in wanted:
                    answers.append("already there")
                elif task is None or not replaced.isdisjoint(chain(*drawn.versions)):
                    answers.append("not wanted")
                else:
                    answers.append("accepted")
                    wanted[drawn.key] = task, drawn
            keys = [drawn.key for drawn in groups]
            try:
                for task, drawn in wanted.values():
                    check_drawn(drawn, run, task)
            except ProtocolError as error:
                self.store.drop_journal(keys)  # else the next worker would send the same again, and be refused too
                self.numbers.answered(["refused"] * len(groups))
                self.leases.refused(worker, keys, error.message)
                raise
            kept = self.store.add_results([*wanted.values()], worker, weights)
        # Since then another pool on this database may have stored a group, or another trainer's weights.
        late = {key for key in wanted if key not in kept}
        answers = ["not wanted" if drawn.key in late else answer for drawn, answer in zip(groups, answers, strict=True)]
        tokens = sum(wanted[key][1].tokens for key in kept)
        unwanted = {key for key, answer in zip(keys, answers, strict=True) if answer == "not wanted"}
        self.leases.uploaded(worker, {*keys} - unwanted, unwanted=unwanted, groups=len(kept), tokens=tokens)
        self.numbers.answered(answers, tokens)
        return answers

    def add_to_journal(self, key: Key, weights: str, lines: bytes, worker: str) -> bool:
        """Keep what a worker has drawn for episodes of a task; return whether it is wanted. Raises ProtocolError: 403
        for a suspended worker, 400 for half a line."""
        check_name("worker", worker)
        self._check_welcome(self.leases.find(worker))
        if not lines.endswith(b"\n"):
            raise malformed("a journal: send whole lines")
        return self.store.add_to_journal(key, weights, lines)

    def note_drift(self, drifts: dict[int, tuple[float, int]]) -> None:
        """Note how far the log-probs of these groups are from the trainer's: nats a token, and tokens, by group."""
        totals, tokens_of = Counter(), Counter()
        for group, worker in self.store.workers_of(drifts).items():
            drift, tokens = drifts[group]
            totals[worker] += drift * tokens
            tokens_of[worker] += tokens
        means = {worker: total / tokens_of[worker] for worker, total in totals.items()}
        # With in_flight_weight_updates workers draw with versions of different age, and log-probs differ for that.
        self.leases.drifted(means, not self.store.run().in_flight_weight_updates)

    def metrics(self) -> bytes:
        self.numbers.refresh()
        return super().metrics()

    def status(self) -> dict:
        return super().status() | self.numbers.status()

    def summary(self) -> str | None:
        try:
            return self.numbers.summary()
        except ProtocolError:  # the database is away, which is in the log
            return None

    def _take(self, lease: Lease, takes_newest: bool) -> list[Task]:
        """Lease the first free tasks to a worker, all of one version, and no more than its share. Else a worker that
        draws many groups at a time would leave none to those that ask a moment later."""
        with self.leases.changed, self.store.database.transaction(LEASES):
            self.leases.count()  # ends those of silent workers
            free = self.store.free_tasks(lease.room)
            tasks = [task for task in free if takes_newest or task.version == free[0].version]
            if tasks and lease.room > 1:
                count = self.store.count_open(None if takes_newest else tasks[0].version)
                share = -(-count // self.leases.drawers(lease.worker))
                tasks = tasks[: max(0, share - len(lease.holds))]
            self.leases.grant(lease.worker, [task.key for task in tasks])
            self.numbers.leased.inc(len(tasks))
            return tasks

    def _wait(self, find: Callable[[], list], seconds: float, is_gone: Callable[[], bool], worker: str = "") -> list:
        """Call `find` until it returns items, and return them; empty after `seconds`. Raises ProtocolError: 499 if the
        client has gone, 503 if too many wait or the server is ending."""
        if (items := find()) or seconds == 0:
            return items
        end = time.monotonic() + min(seconds, LONGEST_WAIT)
        with self.thread_of(self.waiting_threads):
            while not items and (left := end - time.monotonic()) > 0:
                with self.leases.changed:
                    self.leases.changed.wait(min(left, _CHECK_SECONDS))
                self.check_ready()
                self.check_connected(is_gone)
                self.leases.renew(worker)
                items = find()
        return items

    def _check_welcome(self, worker: WorkerState | None) -> None:
        if worker is not None and worker.is_suspended:
            message = f"worker {worker.name[:80]} is suspended: {worker.reason[:250]}: mend and restart it"
            raise ProtocolError(403, "set_apart", message)

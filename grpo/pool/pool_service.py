"""A pool of rollouts: tasks wait for workers, completions wait for the trainer; a file keeps both. And its metrics."""

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from prometheus_client import Counter, Gauge

from grpo.config.server import ServerConfig
from grpo.pool.database import LEASES
from grpo.pool.files import PIECE_BYTES
from grpo.pool.leases import LEASE_SECONDS, STATES, Key, Leases, WorkerState
from grpo.pool.protocol import Lease, Task, Version, check_drawn
from grpo.pool.store import Store
from grpo.pool.task_tensors import decode_drawn, decode_results, decode_tasks, encode_drawn, encode_tasks
from grpo.server.http import THREADS
from grpo.server.monitor import Monitor
from grpo.server.service import Service
from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.refusals import ProtocolError, check_name, malformed

_MOST_WORK = 24  # requests that are read and stored at once
# Requests that wait for tasks or results; the other threads keep /health quick.
_MOST_WAITING = THREADS - 8 - _MOST_WORK
LONGEST_WAIT = 30.0  # seconds
_CHECK_SECONDS = 0.5  # how often a thread that waits checks whether its client is still connected

_ROUNDS = 8
_OF_WORKER = {
    "tokens_per_second": "Tokens a second that a worker draws, as it says",
    "version": "Version of the policy that a worker has",
    "drift": "Mean distance of a worker's log-probs from the trainer's, in nats a token",
}


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
        totals, tokens_of = Tally(), Tally()
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


class PoolMonitor:
    """Counters of a pool, and the numbers of its page. All methods may be called from any thread."""

    def __init__(self, monitor: Monitor, leases: Leases, store: Store):
        self._monitor, self._leases, self._store = monitor, leases, store
        self.leased = monitor.make(Counter, "pool_leases", "Tasks leased to workers")
        by_answer = "Groups that workers sent, by the answer"
        self._results = monitor.make(Counter, "pool_results", by_answer, labelnames=["answer"])
        self._tokens = monitor.make(Counter, "pool_tokens", "Tokens of the completions that were accepted")
        self._bytes = monitor.make(Counter, "pool_bytes", "Bytes of files and results", labelnames=["direction"])
        self._workers = monitor.make(Gauge, "pool_workers", "Workers", labelnames=["state"])
        self._of_worker = {
            name: monitor.make(Gauge, f"pool_worker_{name}", text, labelnames=["worker"])
            for name, text in _OF_WORKER.items()
        }
        self._tasks = monitor.make(Gauge, "pool_tasks", "Tasks without a result", labelnames=["state"])
        self._reported = time.monotonic(), monitor.sums.copy()

    def answered(self, answers: Sequence[str], tokens: int = 0) -> None:
        """Count uploaded groups by their answers, and the tokens of those that were accepted."""
        for answer, count in Tally(answers).items():
            self._results.labels(answer.replace(" ", "_")).inc(count)
            self._monitor.count(answer, count)
        self._tokens.inc(tokens)
        self._monitor.count("tokens", tokens)

    def transferred(self, direction: str, size: int) -> None:
        """Count bytes that were "received" or "sent"."""
        self._bytes.labels(direction).inc(size)
        self._monitor.count(direction, size)

    def refresh(self) -> None:
        """Bring the gauges up to date, before /metrics shows them."""
        states = self._leases.states()
        for name in STATES:
            self._workers.labels(name).set(states[name])
        for name, count in self._count().items():
            self._tasks.labels(name).set(count)
        workers = [_describe(worker, self._leases.now()) for worker in self._leases.workers()]
        for name, gauge in self._of_worker.items():
            gauge.clear()  # workers come and go, each with a name of its own
            for worker in workers:
                if worker[name] is not None:
                    gauge.labels(worker["name"]).set(worker[name])

    def status(self) -> dict:
        """Return the numbers of the live page; times in seconds, sizes in bytes."""
        now, run = self._leases.now(), self._store.known_run()
        sent = {direction: self._monitor.sums[direction] for direction in ("received", "sent")}
        return {
            "run": run and {"run": run.run, "name": run.name},
            "workers": [_describe(worker, now) for worker in self._leases.workers()],
            "rounds": self._store.rounds(_ROUNDS),
            "versions": [version.version for version in self._store.versions()],
            "tasks": self._count(),
            "bytes": {**sent, "file": self._store.database.size()},
        }

    def summary(self) -> str | None:
        """Return a line on the time since the last call; None if nothing happened."""
        (last_time, last), now = self._reported, time.monotonic()
        self._reported = now, self._monitor.sums.copy()
        new, seconds = self._monitor.sums - last, now - last_time
        states, counts = self._leases.states(), self._count()
        if not new and not any(counts.values()):
            return None
        return (
            f"last {seconds:.0f} s: {new['accepted']} groups, {new['tokens'] / seconds:.0f} tokens/s, {new['refused']} "
            f"refused; {counts['waiting']} tasks wait, {counts['leased']} are drawn by {states['drawing']} workers, "
            f"{states['waiting']} workers wait; {new['received'] >> 20} MiB came, {new['sent'] >> 20} MiB went"
        )

    def _count(self) -> dict[str, int]:
        leased, undrawn = self._leases.count(), self._store.count_open()
        return {"leased": min(leased, undrawn), "waiting": max(0, undrawn - leased)}


def _describe(worker: WorkerState, now: float) -> dict:
    lease = worker.lease
    return {
        "name": worker.name,
        **{name: getattr(lease, name) for name in ("card", "version", "tokens_per_second")},
        "state": worker.state(now),
        "message": lease.message,
        "leases": len(worker.holds),
        "last_seen": now - worker.seen,
        "last_upload": None if worker.uploaded is None else now - worker.uploaded,
        **{name: getattr(worker, name) for name in ("groups", "tokens", "refusals", "reason", "drift")},
    }

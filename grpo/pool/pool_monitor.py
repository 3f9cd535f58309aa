"""A pool's metrics, added to those of every server (grpo/server/monitor.py)."""

import time
from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from grpo.pool.leases import STATES, Leases, WorkerState
from grpo.pool.store import Store
from grpo.server.monitor import Monitor

_ROUNDS = 8
_OF_WORKER = {
    "tokens_per_second": "Tokens a second that a worker draws, as it says",
    "version": "Version of the policy that a worker has",
    "drift": "Mean distance of a worker's log-probs from the trainer's, in nats a token",
}


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

"""The server's numbers: Prometheus metrics, the live page, and a line in the log."""

import logging
import threading
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import prometheus_client
import psutil
from prometheus_client import Counter, Gauge, Histogram

from grpo.wire.refusals import HEALTH_PATH, ROLLOUTS_PATH, TASK_PATHS

log = logging.getLogger("ref_server")

SUMMARY_SECONDS = 60
SAMPLE_SECONDS = 5
POINTS = 120  # points of the page's curves, one every SAMPLE_SECONDS: ten minutes
_LATENCIES = 1000
_CLIENTS = 50
_ERRORS = 20
_DEVICE = ("device", "device_total", "device_peak")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward pass of the scorer."""

    tokens: int  # tokens of all its sequences, a shared prompt counted each time
    padded: int  # tokens that a right-padded batch of the same sequences would have fed
    fed: int  # tokens that went through the model
    budget: int  # most tokens that it could have fed
    seconds: float

    @property
    def saved_by_sharing(self) -> int:
        return max(0, self.tokens - self.fed)

    @property
    def saved_by_packing(self) -> int:
        return max(0, self.padded - max(self.tokens, self.fed))


class Monitor:
    """Counters and curves of the server. All methods may be called from any thread."""

    CONTENT_TYPE = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._registry)
        make = self.make
        self._requests = make(Counter, "requests", "Requests answered", labelnames=["path", "status"])
        text = f"From the last byte of a {' or '.join(TASK_PATHS.values())} request to its answer, where that is a 200"
        buckets = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100]
        self._seconds = make(Histogram, "request_seconds", text, buckets=buckets)
        self._tokens = make(Counter, "tokens", "Tokens of scored sequences, prompts counted each time")
        self._saved = make(Counter, "tokens_saved", "Tokens that no forward pass saw", labelnames=["by"])
        tenths = [x / 10 for x in range(1, 11)]
        self._fill = make(Histogram, "batch_fill", "Tokens fed over max_batch_tokens", buckets=tenths)
        self._forward_seconds = make(Counter, "forward_seconds", "Time in forward passes")
        self._queue_tokens = make(Gauge, "queue_tokens", "Tokens waiting or being scored")
        self._queue_requests = make(Gauge, "queue_requests", "Requests waiting or being scored")
        self._clients_waiting = make(Gauge, "clients", "Clients with a request waiting or being scored")
        self._device_memory = make(Gauge, "device_memory_bytes", "Memory that torch holds on the model's GPUs")
        about_peak = "Most memory that tensors took there since the model was loaded"
        self._device_peak = make(Gauge, "device_memory_peak_bytes", about_peak)
        self.device_memory: Callable[[], tuple[int, int, int]] | None = None
        """returns bytes on the model's GPUs: held, in all, and the peak of tensors; None before the model is loaded"""
        self.device_use: Callable[[], float | None] | None = None  # returns their share of busy time; None for unknown

        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._points: deque[dict[str, float | None]] = deque(maxlen=POINTS)
        self._sampled: Tally[str] = Tally()  # the sums at the last point
        self._unsampled = 0  # answers since then
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._clients: dict[str, dict] = {}  # the last seen last
        self._errors: deque[tuple[float, dict]] = deque(maxlen=_ERRORS)
        self._statuses: Tally[int] = Tally()
        self.sums: Tally[str] = Tally()
        self._reported = (time.monotonic(), Tally(), 0)

    def make(self, kind: type, name: str, text: str, **options) -> Any:
        return kind(f"grpo_ref_{name}", text, registry=self._registry, **options)

    def count(self, name: str, number: int) -> None:
        with self._lock:
            self.sums[name] += number

    def scored(self, done: Pass) -> None:
        self._tokens.inc(done.tokens)
        self._saved.labels("sharing").inc(done.saved_by_sharing)
        self._saved.labels("packing").inc(done.saved_by_packing)
        self._fill.observe(done.fed / done.budget)
        self._forward_seconds.inc(done.seconds)
        with self._lock:
            self.sums.update(vars(done), sharing=done.saved_by_sharing, packing=done.saved_by_packing)

    def answered(
        self, method: str, path: str, status: int, *, seconds: float, address: str, client="", tokens=0, error=None
    ) -> None:
        """Count an answered request. `path` is one of the server's, or "other"; `error` is a ProtocolError, if any."""
        self._requests.labels(path, status).inc()
        is_for_model = path in TASK_PATHS.values()
        scored = is_for_model and status == 200
        is_shown = is_for_model or path.startswith(ROLLOUTS_PATH) or (status >= 400 and path != HEALTH_PATH)
        if scored:
            self._seconds.observe(seconds)
        with self._lock:
            if is_shown:
                self._statuses[status] += 1
            if scored:
                self._latencies.append(seconds)
                self._unsampled += 1
                sender = self._clients.pop(client or address, {"requests": 0, "tokens": 0})
                sender |= {"name": client, "address": address, "last_seen": time.monotonic()}
                sender["requests"] += 1
                sender["tokens"] += tokens
                self._clients[client or address] = sender
                if len(self._clients) > _CLIENTS:
                    del self._clients[next(iter(self._clients))]
            if error is not None and error.code != "no_run":  # the answer to a worker that waits for a trainer
                facts = {"status": status, "code": error.code, "message": error.message[:300]}
                self._errors.append((time.monotonic(), {**facts, "client": client or address}))
        # !r: a client chooses its name, and may put line ends into it.
        log.debug(f"{method} {path} {status} {tokens} tokens {seconds * 1e3:.1f} ms {address} {client!r}")

    def sample(self, held: dict[str, tuple[int, int]]) -> None:
        """Add a point to the curves, every SAMPLE_SECONDS. `held` is as in `to_prometheus`."""
        memory = self.device_memory()[0] if self.device_memory else self._process.memory_info().rss
        device_use = self.device_use() if self.device_use else None
        with self._lock:
            work = self.sums - self._sampled
            p50, p99 = quantiles([*self._latencies][-self._unsampled :] if self._unsampled else [])
            point = {
                "tokens_per_second": work["tokens"] / SAMPLE_SECONDS,
                "busy": min(1.0, work["seconds"] / SAMPLE_SECONDS),
                "batch_fill": work["fed"] / work["budget"] if work["budget"] else None,
                "p50": p50,
                "p99": p99,
                "memory": memory,
                "queue_tokens": add_up(held)[0],
                "device_use": device_use,
            }
            self._points.append(point)
            self._sampled, self._unsampled = self.sums.copy(), 0

    def to_prometheus(self, held: dict[str, tuple[int, int]]) -> bytes:
        """Return metrics in Prometheus' text format. `held`: (tokens, requests) waiting or being scored, by client."""
        tokens, requests = add_up(held)
        self._queue_tokens.set(tokens)
        self._queue_requests.set(requests)
        self._clients_waiting.set(len(held))
        if self.device_memory:
            held_on_device, _, peak = self.device_memory()
            self._device_memory.set(held_on_device)
            self._device_peak.set(peak)
        return prometheus_client.generate_latest(self._registry)

    def status(self, held: dict[str, tuple[int, int]]) -> dict:
        """Return the numbers of the live page: times in seconds, sizes in bytes, curves of POINTS, oldest first."""
        now = time.monotonic()
        device = self.device_memory() if self.device_memory else (None, None, None)
        with self._lock:
            sums, (p50, p99) = self.sums, quantiles(self._latencies)
            padded = sums["padded"] or 1
            unknown, names = [None] * (POINTS - len(self._points)), self._points[0] if self._points else ()
            curves = {name: unknown + [point[name] for point in self._points] for name in names}
            return {
                "time": time.time(),
                "uptime": now - self._began,
                "history": {"seconds": SAMPLE_SECONDS, **curves},
                "latency": {"p50": p50, "p99": p99, "requests": len(self._latencies)},
                "requests": {str(status): count for status, count in sorted(self._statuses.items())},
                "tokens": sums["tokens"],
                "saved_by_sharing": sums["sharing"] / padded,
                "saved_by_packing": sums["packing"] / padded,
                "batch_fill": sums["fed"] / (sums["budget"] or 1),
                "memory": {"resident": self._process.memory_info().rss, **dict(zip(_DEVICE, device, strict=True))},
                "clients": [
                    client | {"waiting": held.get(key, (0, 0))[0], "last_seen": now - client["last_seen"]}
                    for key, client in reversed(self._clients.items())
                ],
                "errors": [{"ago": now - at, **error} for at, error in reversed(self._errors)],
            }

    def summary(self, held: dict[str, tuple[int, int]]) -> str | None:
        """Return a line on the time since the last call; None if nothing happened."""
        with self._lock:
            last_time, last_statuses, last_tokens = self._reported
            now = time.monotonic()
            self._reported = now, self._statuses.copy(), self.sums["tokens"]
            new, scored = self._statuses - last_statuses, self.sums["tokens"] - last_tokens
            p50, p99 = quantiles([*self._latencies][-new[200] :] if new[200] else [])
        if not new and not scored and not held:
            return None
        codes = ", ".join(f"{count} x {status}" for status, count in sorted(new.items())) or "none"
        times = f", p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms" if p50 is not None else ""
        waiting, memory = add_up(held)[0], self._process.memory_info().rss >> 20
        return (
            f"last {now - last_time:.0f} s: answers {codes}{times}; {scored / (now - last_time):.0f} "
            f"tokens/s; {waiting} tokens of {len(held)} clients wait; {memory} MiB"
        )


def add_up(held: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Return the tokens and the requests of all clients."""
    return sum(tokens for tokens, _ in held.values()), sum(requests for _, requests in held.values())


def quantiles(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return p50 and p99, each the smallest value that at least this share of the values does not exceed."""
    return tuple(np.quantile(values, (0.5, 0.99), method="inverted_cdf").tolist()) if values else (None, None)

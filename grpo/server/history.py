"""The curves of the live page: a server's numbers over the last ten minutes, hour and twelve hours."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

POINTS = 120
SECONDS = (5, 30, 360)
"""seconds of a point: ten minutes, an hour and twelve hours have as many points"""
WORK = ("tokens", "fed", "budget", "seconds")
"""sums over forward passes, as in grpo.server.monitor.Pass"""
STATE = ("queue_tokens", "queue_requests", "device_use")
"""sampled and averaged"""
_BINS, _SHORTEST, _RATIO = 128, 1e-3, 1.1  # of latencies: from 1 ms to 181 s, each counted within 5 %
_SLOT = np.dtype(
    [
        *((name, np.float64) for name in (*WORK, *STATE)),
        ("memory", np.float64),
        ("samples", np.uint32),
        ("latencies", np.uint32, _BINS),
    ]
)


class History:
    """The numbers of the last POINTS times `seconds`, in 70 kB. Not safe for threads; times are time.monotonic()."""

    def __init__(self, seconds: int, began: float):
        """`began` is the server's start: earlier points, and the one that it is in, are unknown."""
        self.seconds = seconds
        self._began = self._newest = int(began // seconds)
        self._slots = np.zeros(POINTS + 1, _SLOT)  # and the one that is not over

    def _slot(self, number: int) -> np.void:
        """Return the slot of a time // seconds. A newer one takes the place of the oldest."""
        for new in range(max(self._newest, number - len(self._slots)) + 1, number + 1):
            self._slots[new % len(self._slots)] = np.zeros((), _SLOT)
        self._newest = max(self._newest, number)
        return self._slots[number % len(self._slots)]

    def add_work(self, since: float, now: float, work: Mapping[str, float]) -> None:
        """Add the WORK of forward passes, spread evenly over their time: a pass may be longer than a point."""
        newest = int(now // self.seconds)
        self._slot(newest)
        for number in range(max(int(since // self.seconds), newest - POINTS), newest + 1):
            inside = min(now, (number + 1) * self.seconds) - max(since, number * self.seconds)
            slot = self._slot(number)
            for name in WORK:
                slot[name] += work[name] * inside / (now - since)

    def add_sample(self, now: float, state: Mapping[str, float], memory: float, latencies: list[float]) -> None:
        """Add the STATE and memory of this moment, NaN for unknown, and the seconds that the last answers took."""
        slot = self._slot(int(now // self.seconds))
        slot["samples"] += 1
        slot["memory"] = max(memory, slot["memory"])  # in this order NaN stays
        for name in STATE:
            slot[name] += state[name]
        if latencies:
            bins = np.log(np.maximum(latencies, _SHORTEST) / _SHORTEST) / np.log(_RATIO)
            slot["latencies"] += np.bincount(bins.round().astype(int).clip(max=_BINS - 1), minlength=_BINS).astype("u4")

    def curves(self, now: float) -> dict[str, list[float | None]]:
        """Return POINTS complete numbers of each kind, oldest first; None for unknown."""
        current = int(now // self.seconds)
        self._slot(current)
        numbers = np.arange(current - POINTS, current)
        slots = self._slots[numbers % len(self._slots)]
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 is unknown
            curves = {
                "tokens_per_second": slots["tokens"] / self.seconds,
                "busy": np.minimum(slots["seconds"] / self.seconds, 1),  # the time of a pass is not exact
                "batch_fill": slots["fed"] / slots["budget"],
                "p50": _quantiles(slots["latencies"], 0.5),
                "p99": _quantiles(slots["latencies"], 0.99),
                "memory": np.where(slots["samples"], slots["memory"], np.nan),
                **{name: slots[name] / slots["samples"] for name in STATE},
            }
        known = numbers > self._began
        return {name: _to_json(np.where(known, values, np.nan)) for name, values in curves.items()}


def _quantiles(counts: np.ndarray, share: float) -> np.ndarray:
    """Return for each row of [points, bins] the latency that this share does not exceed; NaN for an empty row."""
    sums = counts.cumsum(1)
    total = sums[:, -1:]
    places = (sums < np.ceil(share * total)).sum(1)
    return np.where(total[:, 0], _SHORTEST * _RATIO**places, np.nan)


def _to_json(values: np.ndarray) -> list[float | None]:
    """Return four digits of each, and None for NaN, which JSON does not have."""
    return [None if value != value else float(f"{value:.4g}") for value in values.tolist()]

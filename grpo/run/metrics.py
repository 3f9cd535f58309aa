"""Gathers the numbers of a step exactly over ranks, and makes metrics of them; books seconds and memory to phases.

The name of added numbers chooses the metric: "kl" is their mean; a colon precedes another statistic, "reward_std:std",
"completions/max_length:max". ":none" keeps numbers for the program and makes no metric. Metrics that TRL has too have
TRL's names.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

STATISTICS = ("mean", "std", "sum", "min", "max", "none")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The sums of a set of numbers, to be added to other sets: a mean of means would weigh ranks, not numbers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    statistic: str = "mean"  # the one of STATISTICS that is the metric

    @classmethod
    def of(cls, values: Any, statistic: str = "mean") -> Stats:
        """Return the stats of an array or tensor of any shape; NaN (a reward that does not apply) is left out."""
        array = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values, np.float64).ravel()
        array = array[~np.isnan(array)]
        total, squares = array.sum().item(), (array**2).sum().item()
        low, high = array.min(initial=math.inf).item(), array.max(initial=-math.inf).item()
        return cls(count=array.size, total=total, squares=squares, low=low, high=high, statistic=statistic)

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            count=self.count + other.count,
            total=self.total + other.total,
            squares=self.squares + other.squares,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            statistic=self.statistic,
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def std(self) -> float:
        """the standard deviation with ddof 1, as torch.std"""
        if self.count < 2:
            return math.nan
        return math.sqrt(max(0.0, self.squares - self.total * self.mean) / (self.count - 1))

    @property
    def metric(self) -> float:
        low, high = (self.low, self.high) if self.count else (math.nan, math.nan)
        return {"mean": self.mean, "std": self.std, "sum": self.total, "min": low, "max": high}[self.statistic]


def add_stats(stats: dict[str, Stats], values: Mapping[str, Any]) -> None:
    """Add numbers to those of the same name. A name may end with a colon and one of STATISTICS; a Stats has its own."""
    for key, value in values.items():
        name, _, statistic = key.rpartition(":")
        # A reward server's host:port is in the name of its rewards, and a name of the user's may end as a statistic.
        if isinstance(value, Stats) or not name or statistic not in STATISTICS:
            name, statistic = key, "mean"
        numbers = value if isinstance(value, Stats) else Stats.of(value, statistic)
        stats[name] = stats[name] + numbers if name in stats else numbers


def step_metrics(stats: Mapping[str, Stats]) -> dict[str, float]:
    return {name: numbers.metric for name, numbers in stats.items() if numbers.statistic != "none"}


class PhaseClock:
    """The seconds of one step by phase, as `time/...`; time in an inner phase does not count for the outer one. On a
    card also the peak memory of each phase in GiB, as `memory/peak_...`, and of all that torch's allocator took."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds, self.memory = defaultdict[str, float](float), defaultdict[str, float](float)
        self.open: list[str] = []  # phases that have not ended, the outermost first
        self.ended = ""  # the last phase that ended and was not within another one

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start, booked_before = time.perf_counter(), sum(self.seconds.values())
        self._note_memory()
        self.open.append(phase)
        yield
        self._note_memory()
        self.open.pop()
        self.ended = self.ended if self.open else phase
        inner = sum(self.seconds.values()) - booked_before
        self.seconds[f"time/{phase}"] += time.perf_counter() - start - inner

    def _note_memory(self) -> None:
        """Book the peak since the last call to the open phase. Reads the allocator's counts: no wait for the device."""
        if not torch.cuda.is_initialized():
            return
        # Memory that is held in a wait is of the phase around it.
        phases = [phase for phase in self.open if not phase.startswith("wait_")]
        if phases:
            peaks = {phases[-1]: torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            for name, peak in peaks.items():
                name = f"memory/peak_{name}"
                self.memory[name] = max(self.memory[name], peak / 2**30)
        torch.cuda.reset_peak_memory_stats()

    def total(self) -> float:
        return time.perf_counter() - self.start

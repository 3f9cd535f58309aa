"""Numbers of a step, gathered exactly over ranks. Whatever is added becomes a metric.

The name under which numbers are added says what the metric is: "kl" is their mean; after a colon stands another
statistic, "reward_std:std", "completions/max_length:max". ":none" keeps numbers for the program and makes no metric.
Names of metrics are TRL's where TRL has the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo.run.collective import gather

STATISTICS = ("mean", "std", "sum", "min", "max", "none")


@dataclass(frozen=True)
class Stats:
    """Enough of a set of numbers to add it to other sets: a mean of means would weigh ranks, not numbers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    statistic: str = "mean"
    """the one of STATISTICS that is the metric"""

    @classmethod
    def of(cls, values: Any, statistic: str = "mean") -> Stats:
        """Return the stats of an array or tensor of any shape; NaN (a reward that does not apply) is left out."""
        array = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values, np.float64).ravel()
        array = array[~np.isnan(array)]
        if array.size == 0:
            return cls(statistic=statistic)
        squares = (array**2).sum().item()
        return cls(array.size, array.sum().item(), squares, array.min().item(), array.max().item(), statistic)

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.low, other.low),
            max(self.high, other.high),
            self.statistic,
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
        values = {"mean": self.mean, "std": self.std, "sum": self.total, "min": low, "max": high}
        return values[self.statistic]


def add_stats(stats: dict[str, Stats], values: Mapping[str, Any]) -> None:
    """Add numbers to those of the same name. A name may end with a colon and one of STATISTICS."""
    for key, value in values.items():
        name, _, statistic = key.rpartition(":")
        if not name or statistic not in STATISTICS:  # a reward server's host:port is in the name of its rewards
            name, statistic = key, "mean"
        numbers = value if isinstance(value, Stats) else Stats.of(value, statistic)
        stats[name] = stats[name] + numbers if name in stats else numbers


def gather_stats(stats: Mapping[str, Stats]) -> dict[str, Stats]:
    """Return every rank's stats, added up. All ranks must call it; all get the result."""
    total: dict[str, Stats] = {}
    for of_rank in gather(dict(stats)):
        add_stats(total, of_rank)
    return total


def step_metrics(stats: Mapping[str, Stats]) -> dict[str, float]:
    """Return a step's metrics by name, from its stats over all ranks."""
    return {name: numbers.metric for name, numbers in stats.items() if numbers.statistic != "none"}

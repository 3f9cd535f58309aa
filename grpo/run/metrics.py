"""Numbers of a run: gathered exactly over ranks, written to JSONL, TensorBoard and wandb. Names are TRL's."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo.run.collective import gather

log = logging.getLogger(__name__)


_MEANS = ("step_time", "cispo_clip_ratio", "vespo/phi_seq_mean", "off_policy_masked", "sampling/policy_lag")


@dataclass(frozen=True)
class Stats:
    """Enough of a set of numbers to add it to other sets: a mean of means would weigh ranks, not numbers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Any) -> Stats:
        """Of an array or tensor of any shape; NaN (a reward that does not apply) is left out."""
        array = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values, np.float64).ravel()
        array = array[~np.isnan(array)]
        if array.size == 0:
            return cls()
        return cls(array.size, array.sum().item(), (array**2).sum().item(), array.min().item(), array.max().item())

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def std(self) -> float:
        """With ddof 1, as torch.std."""
        if self.count < 2:
            return math.nan
        return math.sqrt(max(0.0, self.squares - self.total * self.mean) / (self.count - 1))


def add_stats(into: dict[str, Stats], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        into[name] = into.get(name, Stats()) + (value if isinstance(value, Stats) else Stats.of(value))


def gather_stats(own: Mapping[str, Stats]) -> dict[str, Stats]:
    """Every rank's stats, added up. All ranks must call it; all get the result."""
    together: dict[str, Stats] = {}
    for one in gather(dict(own)):
        add_stats(together, one)
    return together


def step_metrics(stats: Mapping[str, Stats], reward_names: list[str]) -> dict[str, float]:
    """A step's stats over all ranks -> the metrics by TRL's names."""
    length = stats["length"]
    metrics = {"loss": stats["loss"].total if "loss" in stats else 0.0}
    for name in ("reward", "reward_std_within_groups", "frac_reward_zero_std", "kl", "entropy"):
        if name in stats:
            metrics[name] = stats[name].mean
    if "aux_loss" in stats:
        metrics["aux_loss"] = stats["aux_loss"].total
    if "reward" in stats:
        metrics["reward_std"] = stats["reward"].std
    for name in ("sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"):
        if name in stats:
            metrics |= {f"{name}/mean": stats[name].mean, f"{name}/max": stats[name].high}
    if "sampling/importance_sampling_ratio" in stats:
        metrics["sampling/importance_sampling_ratio/min"] = stats["sampling/importance_sampling_ratio"].low
    for name in reward_names:
        metrics[f"rewards/{name}/mean"] = stats[f"rewards/{name}"].mean
        metrics[f"rewards/{name}/std"] = stats[f"rewards/{name}"].std
    metrics["completions/mean_length"] = length.mean
    metrics["completions/min_length"] = length.low
    metrics["completions/max_length"] = length.high
    metrics["completions/mean_terminated_length"] = stats["terminated_length"].mean
    metrics["completions/clipped_ratio"] = stats["clipped_ratio"].mean
    for name in stats:
        if name.startswith(("clip_ratio/", "time/")) or name in _MEANS:
            metrics[name] = stats[name].mean
        elif name.startswith("memory/"):
            metrics[name] = stats[name].high  # the fullest card is the one that fails
    return metrics

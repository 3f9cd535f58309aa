"""Where a run's time went: seconds by phase, over its steps and in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo.report.curves import TIME
from grpo.report.read import Run

MOST_BARS = 150
"""a run with more steps is cut into so many equal stretches, each shown by the mean of its steps"""

OTHER = "other"
"""what step_time has beyond the phases"""


@dataclass
class Phases:
    """One run's time. Evaluation and saving are not part of a step, and so of none of it."""

    steps: list[int]
    """the first step of each bar, and after the last bar the step after it"""
    seconds: dict[str, list[float]]
    """of each phase, for each bar: the mean over its steps"""
    totals: dict[str, float]
    """of each phase, over all steps"""

    @property
    def total(self) -> float:
        return sum(self.totals.values())


def make_phases(runs: Sequence[Run]) -> list[Phases]:
    """Of each run. All have the same phases in the same order, so that colours and rows agree."""
    names = [name for name in dict.fromkeys(name for run in runs for name in run.names) if name.startswith(TIME)]
    return [_phases(run, names) for run in runs]


def _phases(run: Run, names: Sequence[str]) -> Phases:
    rows = {step: row for step, row in run.rows.items() if "step_time" in row or any(name in row for name in names)}
    steps = np.array(list(rows), np.int64)
    table = np.array([[row.get(name, 0.0) for row in rows.values()] for name in names]).reshape(len(names), len(rows))
    whole = np.array([row.get("step_time", 0.0) for row in rows.values()])
    table = np.vstack([table, np.maximum(whole - table.sum(axis=0), 0.0)])
    titles = [*(name.removeprefix(TIME) for name in names), OTHER]
    if not len(steps):
        return Phases([], {title: [] for title in titles}, dict.fromkeys(titles, 0.0))
    starts = np.unique(np.linspace(0, len(steps), min(len(steps), MOST_BARS) + 1).astype(np.int64)[:-1])
    counts = np.diff(starts, append=len(steps))
    means = np.add.reduceat(table, starts, axis=1) / counts
    return Phases(
        [*steps[starts].tolist(), int(steps[-1]) + 1],
        {title: [float(f"{value:.4g}") for value in row] for title, row in zip(titles, means.tolist(), strict=True)},
        dict(zip(titles, table.sum(axis=1).tolist(), strict=True)),
    )

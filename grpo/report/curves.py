"""Which metrics are shown beside each other, and the curves of them: smoothed, and thinned to a bound.

The one place that knows the panels: the report's page and every PNG are drawn from what is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from grpo.report.read import Run

COLOURS = (
    "#3277e0", "#e0601a", "#16976b", "#a05fe0", "#d8437f", "#8f7f10", "#0e93b5", "#9a6a3c", "#7d8590", "#5f9e22",
)  # fmt: skip
"""of the runs, or of a panel's curves where there is one run; a contrast of 3 and more on white and on near black"""

BUCKETS = 200
"""a curve that is longer is cut into so many equal stretches of steps, and each shows 4 points at most"""


@dataclass(frozen=True)
class Panel:
    title: str
    metrics: tuple[str, ...]
    """names, or patterns such as rewards/*/mean; a panel without any of them is left out"""
    overview: bool = False
    """is in curves.png too"""


PANELS = {
    "Reward": [
        Panel("reward", ("reward",), overview=True),
        Panel("reward by function", ("rewards/*/mean",)),
        Panel("spread of rewards", ("reward_std", "reward_std_within_groups")),
        Panel("spread by function", ("rewards/*/std",)),
        Panel("groups without a signal", ("frac_reward_zero_std", "resampled_groups")),
    ],
    "Held-out problems": [
        Panel("held-out problems", ("eval_accuracy", "eval_format"), overview=True),
        Panel("samples of held-out problems", ("eval_avg@*", "eval_pass@*")),
        Panel("held-out completion length", ("eval_completions/mean_length",)),
        Panel("held-out completions cut off", ("eval_completions/clipped_ratio",)),
    ],
    "Policy": [
        Panel("KL to the reference, per token", ("kl",), overview=True),
        Panel("entropy, per token", ("entropy",)),
        Panel("loss", ("loss",)),
        Panel("gradient norm", ("grad_norm",)),
        Panel("steps skipped, or without a token, so far", ("skipped_steps", "masked_steps")),
        Panel("learning rate", ("learning_rate",)),
        Panel("clipped ratios", ("clip_ratio/*", "cispo_clip_ratio")),
        Panel("KL coefficient", ("beta",)),
        Panel("entropy coefficient", ("entropy_coef",)),
        Panel("weight of a sequence (vespo)", ("vespo/*",)),
        Panel("imbalance of the experts", ("aux_loss",)),
        Panel("reference taken at step", ("ref_step",)),
    ],
    "Length": [
        Panel("completion length, tokens", ("completions/mean_length",), overview=True),
        Panel("shortest and longest", ("completions/min_length", "completions/max_length")),
        Panel("length of those that ended", ("completions/mean_terminated_length",)),
        Panel("share cut off", ("completions/clipped_ratio",)),
    ],
    "Sampling": [
        Panel("log-prob, sampler against trainer", ("sampling/sampling_logp_difference/*",)),
        Panel("importance ratio", ("sampling/importance_sampling_ratio/*",)),
        Panel("updates behind", ("sampling/policy_lag",)),
        Panel("masked as off-policy", ("off_policy_masked",)),
        Panel("others of sampling", ("sampling/*",)),
    ],
    "Speed": [
        Panel("tokens per second", ("tokens_per_second",)),
        Panel("seconds per step", ("step_time",)),
        Panel("most memory of a card, GiB", ("memory/peak_*",)),
    ],
}
REST = "Everything else"
TIME = "time/"
"""metrics that begin so are seconds of a phase: see grpo/report/phases.py"""

_EXACT = ("learning_rate", "beta", "entropy_coef", "ref_step", "num_tokens", "skipped_steps", "masked_steps")
"""free of noise, like all that is evaluated: not smoothed"""


@dataclass
class Line:
    """One metric of one run, to be drawn; each list ascending by step."""

    run: int
    """place among the runs"""
    steps: list[int]
    values: list[float]
    errors: list[float]
    """standard error of each value; empty where there are none"""
    smooth_steps: list[int] = field(default_factory=list)
    """empty where the values are not smoothed"""
    smooth_values: list[float] = field(default_factory=list)


@dataclass
class Chart:
    title: str
    overview: bool
    curves: dict[str, list[Line]]
    """by metric"""


def default_window(runs: Sequence[Run]) -> int:
    """Steps of the moving average: a twentieth of the longest run, at least 5."""
    return max(5, max(len(run.rows) for run in runs) // 20 | 1)


def make_charts(runs: Sequence[Run], window: int) -> dict[str, list[Chart]]:
    """Every metric of the runs in exactly one chart, by section; what no panel knows in charts of its own, last."""
    names = list(dict.fromkeys(name for run in runs for name in run.names if not name.startswith(TIME)))
    left = [name for name in names if not (name.endswith("_se") and name[:-3] in names)]  # these are error bars
    sections: dict[str, list[Chart]] = {}
    for section, panels in PANELS.items():
        for panel in panels:
            found = [name for pattern in panel.metrics for name in left if fnmatchcase(name, pattern)]
            if found:
                left = [name for name in left if name not in found]
                sections.setdefault(section, []).append(_chart(panel.title, panel.overview, found, runs, window))
    for name in left:
        sections.setdefault(REST, []).append(_chart(name, False, [name], runs, window))
    return sections


def _chart(title: str, overview: bool, names: Sequence[str], runs: Sequence[Run], window: int) -> Chart:
    curves = {
        name: [_line(place, run, name, window) for place, run in enumerate(runs) if name in run.names]
        for name in dict.fromkeys(names)
    }
    return Chart(title, overview, curves)


def _line(place: int, run: Run, name: str, window: int) -> Line:
    points = [(step, row[name], row.get(f"{name}_se", 0.0)) for step, row in run.rows.items() if name in row]
    steps, values, errors = map(np.array, zip(*points, strict=True))
    kept = thin(steps, values)
    line = Line(place, steps[kept].tolist(), _rounded(values[kept]), _rounded(errors[kept]) if errors.any() else [])
    if window > 1 and len(steps) > 2 and name not in _EXACT and not name.startswith("eval_"):
        smooth = moving_average(values, window)
        kept = thin(steps, smooth)
        line.smooth_steps, line.smooth_values = steps[kept].tolist(), _rounded(smooth[kept])
    return line


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value with (window - 1) // 2 before it and as many after it: float64 [n] -> float64 [n].

    Near an end there are fewer on that side.
    """
    half, count = max(0, (window - 1) // 2), len(values)
    # Missing ones are NaN. A running sum would be faster, but one huge value would drown all that follow it.
    padded = np.pad(np.asarray(values, np.float64), min(half, count - 1), constant_values=np.nan)
    return np.nanmean(sliding_window_view(padded, len(padded) - count + 1), axis=1)


def thin(steps: np.ndarray, values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Places to keep, ascending: all of at most 4 x buckets, else each bucket's first, last, lowest and highest.

    Drawn `buckets` pixels wide, the polyline through these looks as the one through all (M4: Jugel, Jerzak,
    Hackenbroich, Markl 2014, PVLDB 7(10)).
    """
    if len(steps) <= 4 * buckets:
        return np.arange(len(steps))
    bucket = ((steps - steps[0]) * buckets // (steps[-1] - steps[0] + 1)).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    kept: set[int] = set()
    for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True):
        part = values[start:stop]
        kept |= {start, stop - 1, start + int(part.argmin()), start + int(part.argmax())}
    return np.array(sorted(kept))


def _rounded(values: np.ndarray) -> list[float]:
    """Six digits: finer than any screen, and a third of the page's size."""
    return [float(f"{value:.6g}") for value in values.tolist()]

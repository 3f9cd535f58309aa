"""Makes a report's charts: panels of metrics with their curves, smoothed and bounded, and a run's time by phase.

The page and every PNG are drawn from these charts.
"""

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from grpo.report.read import RecordedRun, read_run

COLOURS = (
    "#3277e0", "#e0601a", "#16976b", "#a05fe0", "#d8437f", "#8f7f10", "#0e93b5", "#9a6a3c", "#7d8590", "#5f9e22",
)  # fmt: skip
"""the colour of each run, or of each curve of a panel with a single run; a contrast of at least 3 on white and black"""

MOST_POINTS = 802  # of a curve: of a longer one 400 equal parts show their lowest and highest, beside the two ends
MOST_BARS = 150  # bars of time: in a run with more steps each bar is the mean of several


@dataclass(frozen=True)
class Panel:
    title: str
    metrics: tuple[str, ...]  # names, or patterns such as rewards/*/mean; a panel that matches no metric is left out
    overview: bool = False  # whether curves.png has the panel too
    unless: str = ""  # a metric: curves.png leaves the panel out if the run has it


PANELS = {
    "Reward": [
        Panel("reward", ("reward",), overview=True),
        Panel("reward by function", ("rewards/*/mean",)),
        Panel("spread of rewards", ("reward_std", "reward_std_within_groups")),
        Panel("spread by function", ("rewards/*/std",)),
        Panel("groups without a signal", ("frac_reward_zero_std", "resampled_groups")),
    ],
    "Held-out problems": [
        Panel("held-out problems", ("eval_accuracy", "eval_*_accuracy", "eval_format"), overview=True),
        Panel("held-out reward", ("eval_reward", "eval_*_reward"), overview=True, unless="eval_accuracy"),
        Panel("held-out reward by function", ("eval_rewards/*/mean",)),
        Panel("samples of held-out problems", ("eval_avg@*", "eval_pass@*")),
        Panel("held-out completion length, tokens", ("eval_completions/mean_length",)),
        Panel("share of held-out completions cut off", ("eval_completions/clipped_ratio",)),
    ],
    "Policy": [
        Panel("KL to the reference, nats per token", ("kl",), overview=True),
        Panel("distance from the teacher, nats per token", ("distillation/*",), overview=True),
        Panel("entropy, nats per token", ("entropy",)),
        Panel("loss", ("loss", "policy_loss")),
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
        Panel("shortest and longest, tokens", ("completions/min_length", "completions/max_length")),
        Panel("length of those that ended, tokens", ("completions/*_terminated_length",)),
        Panel("share cut off", ("completions/clipped_ratio",)),
    ],
    "Tools and turns": [
        Panel("calls of tools in a completion", ("tools/call_frequency",)),
        Panel("share of calls that failed", ("tools/failure_frequency",)),
        Panel("length of answers in a completion, tokens", ("tools/mean_length",)),
        Panel("turns of a completion", ("completions/mean_turns",)),
        Panel("calls of tools in a held-out completion", ("eval_tools/call_frequency",)),
        Panel("share of held-out calls that failed", ("eval_tools/failure_frequency",)),
    ],
    "Sampling": [
        Panel("log-prob, sampler against trainer, nats", ("sampling/sampling_logp_difference/*",)),
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
_DASHES = ("-", "--", ":", "-.")
_GREY = "#b8bac0"
REST = "Everything else"
TIME = "time/"  # the prefix of metrics that are seconds of a phase
OTHER = "other"  # the part of step_time that belongs to no phase

# Free of noise, so not smoothed; evaluations are not smoothed either.
_EXACT = ("learning_rate", "beta", "entropy_coef", "ref_step", "num_tokens", "skipped_steps", "masked_steps")


@dataclass(kw_only=True)
class Line:
    """One metric of one run; the lists of steps ascend."""

    run: int  # the run's place among the runs
    steps: list[int]
    values: list[float]
    errors: list[float]  # standard error of each value, or empty
    smooth: list[float]  # moving average at each value; empty if the values are not smoothed


@dataclass
class Chart:
    title: str
    overview: bool
    curves: dict[str, list[Line]]  # the lines of each metric


@dataclass
class Phases:
    """The time of one run's steps. Evaluation and saving are no part of a step."""

    steps: list[int]  # the first step of each bar, and after the last bar the step after it
    seconds: dict[str, list[float]]  # for each phase the height of each bar: the mean over its steps
    totals: dict[str, float]  # for each phase the sum over all steps


def default_window(runs: Sequence[RecordedRun]) -> int:
    """Return the steps of the moving average: a twentieth of the longest run, at least 5."""
    return max(5, max(len(run.rows) for run in runs) // 20 | 1)


def make_charts(runs: Sequence[RecordedRun], window: int) -> dict[str, list[Chart]]:
    """Put every metric into one chart, by section. Those that no panel knows have one each, in the last section."""
    names = [name for name in dict.fromkeys(chain(*(run.names for run in runs))) if not name.startswith(TIME)]
    left = [name for name in names if not (name.endswith("_se") and name[:-3] in names)]  # these are error bars
    sections = PANELS | {REST: [Panel(name, (glob.escape(name),)) for name in left]}
    charts: dict[str, list[Chart]] = {}
    for section, panels in sections.items():
        for panel in panels:
            metrics = [name for pattern in panel.metrics for name in left if fnmatchcase(name, pattern)]
            if metrics:
                left = [name for name in left if name not in metrics]
                curves = {name: _lines(runs, name, window) for name in metrics}
                overview = panel.overview and panel.unless not in names
                charts.setdefault(section, []).append(Chart(panel.title, overview, curves))
    return charts


def _lines(runs: Sequence[RecordedRun], name: str, window: int) -> list[Line]:
    lines = []
    for place, run in enumerate(runs):
        points = [(step, row[name], row.get(f"{name}_se", 0.0)) for step, row in run.rows.items() if name in row]
        if points:
            steps, values, errors = map(np.array, zip(*points, strict=True))
            noisy = window > 1 and len(steps) > 2 and name not in _EXACT and not name.startswith("eval_")
            kept = thin(values)
            smooth = _rounded(moving_average(values, window, kept)) if noisy else []
            errors = _rounded(errors[kept]) if errors.any() else []
            lines.append(
                Line(run=place, steps=steps[kept].tolist(), values=_rounded(values[kept]), errors=errors, smooth=smooth)
            )
    return lines


def moving_average(values: np.ndarray, window: int, places: np.ndarray) -> np.ndarray:
    """Average the value at each place with (window - 1) // 2 before it and as many after it. float64 [n], int [m] ->
    float64 [m]. Near an end there are fewer on that side."""
    half = min((window - 1) // 2, len(values) - 1)
    # Missing ones are NaN. A running sum would be faster, but one huge value would drown all that follow it.
    padded = np.pad(np.asarray(values, np.float64), half, constant_values=np.nan)
    return np.nanmean(sliding_window_view(padded, 2 * half + 1)[places], axis=1)


def thin(values: np.ndarray) -> np.ndarray:
    """Return the places of at most MOST_POINTS values, ascending: all, or the extremes of equal parts and both ends."""
    places = np.arange(len(values))
    if len(values) <= MOST_POINTS:
        return places
    parts = np.array_split(places, MOST_POINTS // 2 - 1)
    extremes = [part[choose(values[part])] for part in parts for choose in (np.argmin, np.argmax)]
    return np.unique([0, *extremes, len(values) - 1])


def _rounded(values: Iterable[float]) -> list[float]:
    """Round to six digits: finer than any screen, and a third of the page's size."""
    return [float(f"{value:.6g}") for value in values]


def make_phases(runs: Sequence[RecordedRun]) -> list[Phases]:
    """Return the time of each run by phase; all runs have the same phases in the same order."""
    names = [name for name in dict.fromkeys(chain(*(run.names for run in runs))) if name.startswith(TIME)]
    return [_phases(run, names) for run in runs]


def _phases(run: RecordedRun, names: Sequence[str]) -> Phases:
    rows = {step: row for step, row in run.rows.items() if not row.keys().isdisjoint([*names, "step_time"])}
    columns = {name.removeprefix(TIME): np.array([row.get(name, 0.0) for row in rows.values()]) for name in names}
    step_time = np.array([row.get("step_time", 0.0) for row in rows.values()])
    columns[OTHER] = np.maximum(step_time - sum(columns.values()), 0.0)
    steps = list(rows)
    bars = [part for part in np.array_split(np.arange(len(steps)), MOST_BARS) if len(part)]
    return Phases(
        [steps[part[0]] for part in bars] + [step + 1 for step in steps[-1:]],
        {phase: _rounded([column[part].mean() for part in bars]) for phase, column in columns.items()},
        {phase: float(column.sum()) for phase, column in columns.items()},
    )


def draw_curves(folder: Path) -> Path:
    """Draw `folder`/metrics.jsonl into `folder`/curves.png (four panels over steps) and return that path."""
    runs = [read_run(folder)]
    sections = make_charts(runs, default_window(runs))
    overview = [chart for charts in sections.values() for chart in charts if chart.overview]
    return draw_charts(overview, [folder.name], folder / "curves.png", columns=2)


def draw_charts(charts: Sequence[Chart], names: Sequence[str], path: Path, columns: int = 3) -> Path:
    """Draw the charts of one or several runs, in rows of `columns` charts, and return `path`. Several runs have a
    colour each, and the metrics of a chart their dashes; of one run each metric has a colour."""
    figure, grid = _figure(len(charts), columns)
    several = len(names) > 1
    for axes, chart in zip(grid, charts, strict=False):
        axes.set_title(chart.title)
        for place, (metric, lines) in enumerate(chart.curves.items()):
            dash = _DASHES[(place if several else place // len(COLOURS)) % len(_DASHES)]
            for line in lines:
                colour = COLOURS[(line.run if several else place) % len(COLOURS)]
                style = {"color": colour, "linestyle": dash, "label": None if several else metric}
                if line.smooth:
                    axes.plot(line.steps, line.values, color=colour, alpha=0.25, linewidth=0.8)
                    axes.plot(line.steps, line.smooth, **style)
                elif line.errors:
                    axes.errorbar(line.steps, line.values, line.errors, marker="o", capsize=3, **style)
                else:
                    axes.plot(line.steps, line.values, marker="o" if len(line.steps) < 25 else None, **style)
            if several and len(chart.curves) > 1:
                axes.plot([], [], color=_GREY, linestyle=dash, label=metric)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    if several:
        _legend(figure, dict(zip(names, COLOURS, strict=False)))
    figure.savefig(path, dpi=120)
    return path


def draw_phases(phases: Sequence[Phases], names: Sequence[str], path: Path) -> Path:
    """Draw each run's seconds per step, stacked by phase, and return `path`."""
    figure, grid = _figure(len(phases), min(2, len(phases)))
    colours = dict(zip(phases[0].totals, cycle(COLOURS), strict=False)) | {OTHER: _GREY}
    for axes, of_run, name in zip(grid, phases, names, strict=False):
        axes.set_title(name if len(phases) > 1 else "time by phase")
        axes.set_ylabel("seconds per step")
        if of_run.steps:
            axes.stackplot(
                of_run.steps,
                # The last height once more: a bar ends at the beginning of the next step.
                *([*seconds, seconds[-1]] for seconds in of_run.seconds.values()),
                colors=colours.values(),
                step="post",
            )
    _legend(figure, colours)
    figure.savefig(path, dpi=120)
    return path


def _figure(count: int, columns: int) -> tuple[Any, list[Any]]:
    """Return a figure with 5 x 3.25 inches for each of `count` charts, and their axes."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rcParams["text.parse_math"] = False  # a metric's name may have dollars
    rows = max(1, -(-count // columns))
    figure = Figure(figsize=(5 * columns, 3.25 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[:count]:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid


def _legend(figure: Any, colours: dict[str, str]) -> None:
    """Explain the colours above all charts."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    columns = int(figure.get_figwidth() // 1.6)
    figure.legend(handles=patches, loc="outside upper center", ncols=columns, frameon=False)

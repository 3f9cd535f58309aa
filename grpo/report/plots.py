"""A run's curves as pictures. Which there are, and what is smoothed, says grpo/report/curves.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.report.curves import COLOURS, Chart, default_window, make_charts
from grpo.report.phases import OTHER, Phases
from grpo.report.read import read_run

DASHES = ("-", "--", ":", "-.")
_EMPTY = "#b8bac0"
"""the colour of the time that is of no phase"""


def draw_curves(folder: Path) -> Path:
    """Draw `folder`/metrics.jsonl into `folder`/curves.png (four panels over steps) and return that path."""
    runs = [read_run(folder)]
    charts = [chart for some in make_charts(runs, default_window(runs)).values() for chart in some if chart.overview]
    return draw_charts(charts, [folder.name], folder / "curves.png", columns=2)


def draw_charts(charts: Sequence[Chart], names: Sequence[str], path: Path, columns: int = 3) -> Path:
    """Draw the charts of one or several runs, in rows of `columns` 5 inches wide, and return `path`.

    Several runs have a colour each, and the metrics of a chart their dashes; of one run each metric has a colour.
    """
    figure, grid = _figure(len(charts), columns)
    for axes, chart in zip(grid, charts, strict=False):
        axes.set_title(_plain(chart.title))
        for place, (metric, lines) in enumerate(chart.curves.items()):
            for line in lines:
                colour = COLOURS[(line.run if len(names) > 1 else place) % len(COLOURS)]
                dash = DASHES[(place if len(names) > 1 else place // len(COLOURS)) % len(DASHES)]
                style: dict[str, Any] = {"color": colour, "linestyle": dash}
                if len(names) == 1:
                    style["label"] = _plain(metric)
                if line.smooth_steps:
                    axes.plot(line.steps, line.values, color=colour, alpha=0.25, linewidth=0.8)
                    axes.plot(line.smooth_steps, line.smooth_values, **style)
                elif line.errors:
                    axes.errorbar(line.steps, line.values, line.errors, marker="o", capsize=3, **style)
                else:
                    axes.plot(line.steps, line.values, marker="o" if len(line.steps) < 25 else None, **style)
            if len(names) > 1 and len(chart.curves) > 1:
                axes.plot([], [], color="#7d8590", linestyle=DASHES[place % len(DASHES)], label=_plain(metric))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    if len(names) > 1:
        _legend(figure, dict(zip(names, COLOURS, strict=False)))
    return _save(figure, path)


def draw_phases(phases: Sequence[Phases], names: Sequence[str], path: Path) -> Path:
    """Draw each run's seconds a step, stacked by phase, and return `path`."""
    figure, grid = _figure(len(phases), min(2, len(phases)))
    colours = {
        phase: _EMPTY if phase == OTHER else COLOURS[place % len(COLOURS)]
        for place, phase in enumerate(phases[0].seconds)
    }
    for axes, one, name in zip(grid, phases, names, strict=False):
        axes.set_title(f"{_plain(name)}: seconds a step by phase")
        below = [0.0] * (len(one.steps) - 1)
        widths = [stop - start for start, stop in zip(one.steps, one.steps[1:], strict=False)]
        for phase, seconds in one.seconds.items():
            axes.bar(one.steps[:-1], seconds, widths, below, align="edge", color=colours[phase])
            below = [low + more for low, more in zip(below, seconds, strict=True)]
    _legend(figure, colours)
    return _save(figure, path)


def _figure(count: int, columns: int) -> tuple[Any, list[Any]]:
    """A figure of 5 x 3.25 inches for each of `count` charts, and their axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

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
    """Above all charts, what each colour means."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=_plain(name)) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=min(6, len(patches)), frameon=False)


def _plain(text: str) -> str:
    """A name may have dollars, between which matplotlib would read a formula."""
    return text.replace("$", r"\$")


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path

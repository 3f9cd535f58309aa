"""The charts of grpo/report/curves.py as PNGs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.report.curves import COLOURS, OTHER, Chart, Phases, default_window, make_charts
from grpo.report.read import read_run

DASHES = ("-", "--", ":", "-.")
_GREY = "#b8bac0"


def draw_curves(folder: Path) -> Path:
    """Draw `folder`/metrics.jsonl into `folder`/curves.png (four panels over steps) and return that path."""
    runs = [read_run(folder)]
    sections = make_charts(runs, default_window(runs))
    overview = [chart for charts in sections.values() for chart in charts if chart.overview]
    return draw_charts(overview, [folder.name], folder / "curves.png", columns=2)


def draw_charts(charts: Sequence[Chart], names: Sequence[str], path: Path, columns: int = 3) -> Path:
    """Draw the charts of one or several runs, in rows of `columns` 5 inches wide, and return `path`.

    Several runs have a colour each, and the metrics of a chart their dashes; of one run each metric has a colour.
    """
    figure, grid = _figure(len(charts), columns)
    several = len(names) > 1
    for axes, chart in zip(grid, charts, strict=False):
        axes.set_title(_plain(chart.title))
        for place, (metric, lines) in enumerate(chart.curves.items()):
            dash = DASHES[(place if several else place // len(COLOURS)) % len(DASHES)]
            for line in lines:
                colour = COLOURS[(line.run if several else place) % len(COLOURS)]
                style: dict[str, Any] = {"color": colour, "linestyle": dash}
                if not several:
                    style["label"] = _plain(metric)
                if line.smooth:
                    axes.plot(line.steps, line.values, color=colour, alpha=0.25, linewidth=0.8)
                    axes.plot(line.steps, line.smooth, **style)
                elif line.errors:
                    axes.errorbar(line.steps, line.values, line.errors, marker="o", capsize=3, **style)
                else:
                    axes.plot(line.steps, line.values, marker="o" if len(line.steps) < 25 else None, **style)
            if several and len(chart.curves) > 1:
                axes.plot([], [], color=_GREY, linestyle=dash, label=_plain(metric))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    if several:
        _legend(figure, dict(zip(names, COLOURS, strict=False)))
    figure.savefig(path, dpi=120)
    return path


def draw_phases(phases: Sequence[Phases], names: Sequence[str], path: Path) -> Path:
    """Draw each run's seconds per step, stacked by phase, and return `path`."""
    figure, grid = _figure(len(phases), min(2, len(phases)))
    colours = {
        phase: _GREY if phase == OTHER else COLOURS[place % len(COLOURS)]
        for place, phase in enumerate(phases[0].totals)
    }
    for axes, of_run, name in zip(grid, phases, names, strict=False):
        axes.set_title(_plain(name) if len(phases) > 1 else "time by phase")
        axes.set_ylabel("seconds per step")
        if of_run.steps:
            axes.stackplot(
                of_run.steps,
                # The last height once more: a bar ends where the next step begins.
                *([*seconds, seconds[-1]] for seconds in of_run.seconds.values()),
                colors=colours.values(),
                step="post",
            )
    _legend(figure, colours)
    figure.savefig(path, dpi=120)
    return path


def _figure(count: int, columns: int) -> tuple[Any, list[Any]]:
    """Return a figure with 5 x 3.25 inches for each of `count` charts, and their axes."""
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
    """Say above all charts what each colour means."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=_plain(name)) for name, colour in colours.items()]
    columns = int(figure.get_figwidth() // 1.6)
    figure.legend(handles=patches, loc="outside upper center", ncols=columns, frameon=False)


def _plain(text: str) -> str:
    """Keep matplotlib from reading a formula between the dollars of a name."""
    return text.replace("$", r"\$")

"""The page of a run or several, and its pictures."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo.config.errors import require
from grpo.config.report import ReportConfig
from grpo.report.curves import COLOURS, PANELS, REST, default_window, make_charts
from grpo.report.phases import OTHER, make_phases
from grpo.report.read import Run, read_completions, read_run

PAGE, UNFINISHED = "report.html", "report.unfinished"
TEMPLATE = Path(__file__).with_name("report.html")
MARK = '<meta name="generator" content="grpo.report">'
"""stands in every page of ours, and in nothing that we may overwrite otherwise"""

COMPLETIONS_BYTES = 6_000_000
"""of completions in a page, all runs together"""


def report(config: ReportConfig) -> Iterator[Path]:
    """Write page and pictures, and yield the path of each when it is there.

    Raises ConfigError, before anything is written, where a run cannot be read or the folder not be used.
    """
    folders = [Path(name) for name in config.runs]
    for place, folder in enumerate(folders):
        same = [other for other in folders[:place] if other.resolve() == folder.resolve()]
        require(not same, "runs", str(folder), "it is named twice")
    runs = [read_run(folder) for folder in folders]
    output = Path(config.output) if config.output else folders[0] / "report"
    check_output(output)

    names, window = run_names(folders), config.smoothing or default_window(runs)
    charts, phases = make_charts(runs, window), make_phases(runs)
    completions = [read_completions(run, COMPLETIONS_BYTES // len(runs)) for run in runs]
    for run in runs:
        for note in run.notes:
            print(f"{run.folder}: {note}", file=sys.stderr)
    data = {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "window": window,
        "colours": COLOURS,
        "other": OTHER,
        "runs": [_summary(run, name, window) for run, name in zip(runs, names, strict=True)],
        "settings": different_settings(runs),
        "sections": [{"title": title, "charts": [asdict(chart) for chart in some]} for title, some in charts.items()],
        "phases": [asdict(one) for one in phases],
        "completions": completions,
    }

    from grpo.report.plots import draw_charts, draw_phases

    output.mkdir(parents=True, exist_ok=True)
    for title in (*PANELS, REST, "time"):  # a picture of an older report that this one has not
        _picture(output, title).unlink(missing_ok=True)
    page = output / PAGE
    (output / UNFINISHED).write_text(make_page(data), encoding="utf-8")
    os.replace(output / UNFINISHED, page)
    yield page
    for title, some in charts.items():
        yield draw_charts(some, names, _picture(output, title))
    if any(one.total for one in phases):
        yield draw_phases(phases, names, _picture(output, "time"))


def _picture(output: Path, title: str) -> Path:
    return output / f"{re.sub('[^a-z]+', '_', title.lower())}.png"


def check_output(folder: Path) -> None:
    """Raises ConfigError unless a report may be written there: a new or empty folder, or that of an older report."""
    remedy = "name a new folder, or that of an older report"
    if not folder.exists():
        return
    require(folder.is_dir(), "output", str(folder), f"it is a file: {remedy}")
    page = folder / PAGE
    old = page.is_file() and MARK in page.read_text(encoding="utf-8", errors="replace")[:2000]
    strangers = [file for file in folder.iterdir() if file.name != UNFINISHED]  # that a full disk or a kill has left
    require(old or not strangers, "output", str(folder), f"it holds something else: {remedy}")


def run_names(folders: Sequence[Path]) -> list[str]:
    """The shortest parts of the paths that tell the runs apart; of a single run the whole path."""
    parts = [folder.parts for folder in folders]
    if len(folders) > 1:
        while min(map(len, parts)) > 1 and len({one[0] for one in parts}) == 1:
            parts = [one[1:] for one in parts]
        while min(map(len, parts)) > 1 and len({one[-1] for one in parts}) == 1:
            parts = [one[:-1] for one in parts]
    return [str(Path(*one)) for one in parts]


def different_settings(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Each setting that is not the same in all the runs, with its value in each; None where it is not there."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "output_dir")
    rows = {name: [_shown(run.settings[name]) if name in run.settings else None for run in runs] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _summary(run: Run, name: str, window: int) -> dict[str, Any]:
    """What the table at the head says of a run: the rewards are means over the first and last `window` steps."""

    def series(metric: str) -> list[float]:
        return [row[metric] for row in run.rows.values() if metric in row]

    rewards, evaluated = series("reward"), [row for row in run.rows.values() if "eval_accuracy" in row]
    return {
        "name": name,
        "folder": str(run.folder),
        "notes": run.notes,
        "steps": max(run.rows),
        "max_steps": most if isinstance(most := run.settings.get("max_steps"), int) else None,
        "reward": [sum(some) / len(some) for some in (rewards[:window], rewards[-window:]) if some],
        "accuracy": [[row["eval_accuracy"], row.get("eval_accuracy_se")] for row in (evaluated[:1] + evaluated[-1:])],
        "tokens": max(series("num_tokens"), default=None),
        "seconds": sum(series("step_time")),
    }


def make_page(data: dict[str, Any]) -> str:
    """The template with the data in it, and with a policy that allows its own script and style and nothing else."""
    page = TEMPLATE.read_text(encoding="utf-8")
    hashes = {
        kind: base64.b64encode(
            hashlib.sha256(re.search(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)[1].encode()).digest()
        ).decode()
        for kind in ("style", "script")
    }
    policy = "; ".join(
        [
            "default-src 'none'",
            *(f"{kind}-src 'sha256-{digest}'" for kind, digest in hashes.items()),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    return page.replace("{{policy}}", policy, 1).replace("{{data}}", embedded(data), 1)


def embedded(data: Any) -> str:
    """JSON that may stand within a <script>: no character of it can end that, and all of it can be written as UTF-8.

    A lone surrogate, which UTF-8 has no bytes for, and what HTML or older JavaScript see a meaning in, is escaped.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)

"""Writes the page of one or several runs, and its pictures; or serves it live to this machine's browser."""

import base64
import hashlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bottle
from waitress.server import BaseWSGIServer, create_server

from grpo.config.console import listen
from grpo.config.errors import ConfigError, require
from grpo.config.programs import ReportConfig
from grpo.report import curves
from grpo.report.read import RecordedRun, read_completions, read_pictures, read_run

PAGE, UNFINISHED = "report.html", "report.unfinished"
TEMPLATE = Path(__file__).with_name("report.html")
SCRIPTS = ("plot.js", "charts.js", "completions.js", "page.js")
MARK = '<meta name="generator" content="grpo.report">'  # the mark of a page of this program, which may be replaced

COMPLETIONS_BYTES = 6_000_000  # room in a page for the completions of all its runs
PICTURES_BYTES = 6_000_000  # room in a page for the pictures of their prompts

HOST = "127.0.0.1"
_THIS_MACHINE = re.compile(r"(localhost|127\.0\.0\.1)(:\d*)?", re.IGNORECASE)
FILES = ("metrics.jsonl", "completions.jsonl", "config.yaml", "starts.jsonl")
SHARE = 0.05
"""the most of one core's time that reading the runs may take; large ones are read less often than they change"""


def report(config: ReportConfig) -> Iterator[Path]:
    """Write the page, and with `png` the pictures; yield each path when it is written. Raises ConfigError before that,
    if a run cannot be read or the folder cannot be used."""
    folders = run_folders(config)
    runs = [read_run(folder) for folder in folders]
    output = Path(config.output) if config.output else folders[0] / "report"
    check_output(output)
    data = page_data(runs, config.smoothing)
    for run in runs:
        for note in run.notes:
            print(f"{run.folder}: {note}", file=sys.stderr)
    output.mkdir(parents=True, exist_ok=True)
    titles = *curves.PANELS, curves.REST, "time"
    pictures = {title: output / f"{re.sub('[^a-z]+', '_', title.lower())}.png" for title in titles}
    for picture in pictures.values():  # those of an older report
        picture.unlink(missing_ok=True)
    (output / UNFINISHED).write_text(make_page(data), encoding="utf-8")
    os.replace(output / UNFINISHED, output / PAGE)
    yield output / PAGE
    if not config.png:
        return
    names, phases = run_names(folders), curves.make_phases(runs)
    for title, charts in curves.make_charts(runs, data["window"]).items():
        yield curves.draw_charts(charts, names, pictures[title])
    if any(sum(of_run.totals.values()) for of_run in phases):
        yield curves.draw_phases(phases, names, pictures["time"])


def run_folders(config: ReportConfig) -> list[Path]:
    """Return the runs' folders. Raises ConfigError if two are the same."""
    folders = [Path(name) for name in config.runs]
    distinct = {folder.resolve() for folder in folders}
    require(len(distinct) == len(folders), "runs", config.runs, "name each run once")
    return folders


def page_data(runs: Sequence[RecordedRun], smoothing: int) -> dict[str, Any]:
    """Return the page's data. Reads the completions, and adds notes about missing ones to the runs."""
    names, window = run_names([run.folder for run in runs]), smoothing or curves.default_window(runs)
    completions = [read_completions(run, COMPLETIONS_BYTES // len(runs)) for run in runs]
    room = PICTURES_BYTES // len(runs)
    pictures = [read_pictures(run, blocks, room) for run, blocks in zip(runs, completions, strict=True)]
    return {
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "window": window,
        "colours": curves.COLOURS,
        "other": curves.OTHER,
        "runs": [summarise(run, name, window) for run, name in zip(runs, names, strict=True)],
        "settings": all_settings(runs),
        "starts": [[{name: _to_text(value) for name, value in start.items()} for start in run.starts] for run in runs],
        "sections": [
            {"title": title, "charts": [asdict(chart) for chart in charts]}
            for title, charts in curves.make_charts(runs, window).items()
        ],
        "phases": [asdict(of_run) for of_run in curves.make_phases(runs)],
        "completions": completions,
        "pictures": pictures,
    }


def check_output(folder: Path) -> None:
    """Raise ConfigError unless the folder is new, empty or that of an older report."""
    page = folder / PAGE
    is_free = page.is_file() and MARK in page.read_text(encoding="utf-8", errors="replace")[:2000]
    if folder.exists() and not is_free:
        # A full disk or a kill may have left an unfinished page.
        is_free = folder.is_dir() and all(path.name == UNFINISHED for path in folder.iterdir())
        require(is_free, "output", str(folder), "it is something else: name a new folder, or that of an older report")


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return each run's path from the folder that all of them are in; of a single run the whole path."""
    if len(folders) == 1:
        return [str(folders[0])]
    common = os.path.commonpath([os.path.dirname(os.path.abspath(folder)) for folder in folders])
    return [os.path.relpath(folder, common) for folder in folders]


def all_settings(runs: Sequence[RecordedRun]) -> dict[str, list[str | None]]:
    """Return each setting but output_dir, with its value in each run; None if a run does not have it."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "output_dir")
    return {name: [_to_text(run.settings[name]) if name in run.settings else None for run in runs] for name in names}


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)


def summarise(run: RecordedRun, name: str, window: int) -> dict[str, Any]:
    """Return a run's row of the table at the top; its rewards are means over the first and the last `window` steps."""

    def values(metric: str) -> list[float]:
        return [row[metric] for row in run.rows.values() if metric in row]

    def first_and_last(metric: str) -> list[list[float | None]]:
        evaluated = [[row[metric], row.get(f"{metric}_se")] for row in run.rows.values() if metric in row]
        return evaluated[:1] + evaluated[-1:]

    rewards, max_steps = values("reward"), run.settings.get("max_steps")
    return {
        "name": name,
        "folder": str(run.folder),
        "notes": run.notes,
        "steps": max(run.rows, default=None),
        "max_steps": max_steps if isinstance(max_steps, int) else None,
        "reward": [sum(part) / len(part) for part in (rewards[:window], rewards[-window:]) if part],
        "accuracy": first_and_last("eval_accuracy"),
        "eval_reward": first_and_last("eval_reward"),
        "tokens": max(values("num_tokens"), default=None),
        "seconds": sum(values("step_time")),
    }


def make_page(data: dict[str, Any]) -> str:
    """Fill the template with data, and with a policy that allows only the page's script, style and pictures. Data with
    a `version` make a live page, which may also ask its server."""
    script = "\n".join(TEMPLATE.with_name(name).read_text(encoding="utf-8") for name in SCRIPTS)
    page = TEMPLATE.read_text(encoding="utf-8").replace("{{script}}", script, 1)
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:"
    policy += "; connect-src 'self'" if "version" in data else ""
    for tag in ("style", "script"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        policy += f"; {tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    return page.replace("{{policy}}", policy, 1).replace("{{data}}", embedded(data), 1)


def embedded(data: Any) -> str:
    """Return JSON for a <script>: escapes lone surrogates, and characters of HTML and line ends of older JavaScript."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


class LivePage:
    """Keep the page's data, and read it again when a browser asks and the runs' files have changed."""

    def __init__(self, folders: Sequence[Path], smoothing: int):
        """Read the runs. Raises ConfigError if a folder is missing."""
        self._folders, self._smoothing = folders, smoothing
        self._lock = threading.Lock()
        self._next_reading = 0.0
        self._state = self._file_state()
        self._data = self._read()

    def data(self) -> dict[str, Any]:
        """Return the page's data; each reading has another `version`. `lost` says why runs cannot be read any more."""
        with self._lock:
            state = self._file_state()  # from before the reading: lines written during it are read the next time
            if state != self._state and time.monotonic() >= self._next_reading:
                self._state = state
                try:
                    self._data = self._read()
                except (ConfigError, OSError) as error:
                    self._data = self._data | {"lost": str(error), "version": str(time.time_ns())}
            return self._data

    def _read(self) -> dict[str, Any]:
        began = time.monotonic()
        runs = [read_run(folder, may_be_empty=True) for folder in self._folders]
        data = page_data(runs, self._smoothing) | {"version": str(time.time_ns())}
        end = time.monotonic()
        self._next_reading = end + (end - began) / SHARE
        return data

    def _file_state(self) -> list[tuple[int, ...]]:
        state = []
        for path in (folder / name for folder in self._folders for name in FILES):
            with suppress(OSError):  # not there yet, or not any more
                stat = path.stat()
                state.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return state


def make_server(config: ReportConfig) -> BaseWSGIServer:
    """Return a server that listens, for `run()`. Raises ConfigError if a run cannot be read or the port is taken."""
    page, app = LivePage(run_folders(config), config.smoothing), bottle.Bottle()

    @app.hook("before_request")
    def refuse_other_names() -> None:
        # A page of another site could let its own name point to this machine, and read the completions by it.
        if not _THIS_MACHINE.fullmatch(bottle.request.get_header("Host", "")):
            bottle.abort(403, f"use http://{HOST} or http://localhost")

    @app.get("/")
    def html() -> str:
        return make_page(page.data())

    @app.get("/data")
    def data() -> str | bottle.HTTPResponse:
        latest = page.data()
        if bottle.request.query.seen == latest["version"]:
            return bottle.HTTPResponse(status=204)
        bottle.response.content_type = "application/json"
        return json.dumps(latest)

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    return create_server(app, sockets=[listen(HOST, config.port)], ident=None)


def serve(config: ReportConfig) -> None:
    """Serve the page until Ctrl-C. Raises ConfigError as `make_server` does."""
    server = make_server(config)
    print(f"http://{HOST}:{server.effective_port}/ shows {', '.join(config.runs)} until Ctrl-C", flush=True)
    server.run()  # returns at Ctrl-C
    server.close()

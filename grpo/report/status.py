"""Tells how runs stand: step, speed and time left; who trains, since when; the servers that they ask.

    grpo status runs/DATE-TIME
    grpo status /shared/run1 /shared/run2

Any machine that has the folders can tell.
"""

from __future__ import annotations

import argparse
import fcntl
import socket
import statistics
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import requests

from grpo.config.errors import program_name
from grpo.report.read import RecordedRun, duration, read_run
from grpo.run.exit import exit_code
from grpo.run.run_folder import LOCK, checkpoints, finished_steps

_LATEST = 20  # steps that speed and time left are computed from


def status(folder: Path) -> list[str]:
    """Return the lines about a run. Raises ConfigError if the folder is none, OSError if it cannot be read."""
    run = read_run(folder, may_be_empty=True)
    process = writer(folder)
    lines = [f"{folder}: {progress(run, process is not None)}"]
    if run.starts:
        start, hosts = run.starts[-1], ", ".join(run.starts[-1].get("hosts", ()))
        began = datetime.fromisoformat(start["time"]).astimezone()
        ended = "it is done" if finished_steps(folder) else "no trainer writes there any more"
        who = f"{process} trains" if process else ended
        lines.append(f"{who}; start {len(run.starts)}, {began:%Y-%m-%d %H:%M}: {start.get('ranks')} ranks on {hosts}")
    if run.rows:
        age = duration(time.time() - (folder / "metrics.jsonl").stat().st_mtime)
        kept = [path.name for path in checkpoints(folder)]
        lines.append(f"last step {age} ago; {kept[-1] if kept else 'no checkpoint yet'}")
    if process:
        authority = run.settings.get("ref_ca_file") or True
        lines += [f"{url}: {answer_of(url, authority)}" for url in servers(run)]
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def progress(run: RecordedRun, is_training: bool) -> str:
    """Return step, reward, speed, and the time left of a run that is training."""
    latest, most = [step for step in run.rows if step > 0][-_LATEST:], run.settings.get("max_steps")
    if not latest:
        return "no step yet"
    rows = [run.rows[step] for step in latest]
    seconds = statistics.mean(row.get("step_time", 0.0) for row in rows)
    parts = [f"step {latest[-1]} of {most}", f"reward {rows[-1].get('reward', float('nan')):.3f}"]
    parts.append(f"{seconds:.1f} s a step")
    drawn = [row["num_tokens"] for row in rows if "num_tokens" in row]
    if len(drawn) > 1 and seconds:
        parts.append(f"{(drawn[-1] - drawn[0]) / (len(drawn) - 1) / seconds:,.0f} tokens a second")
    if most and is_training:
        parts.append(f"about {duration((most - latest[-1]) * seconds)} left")
    return ", ".join(parts)


def writer(folder: Path) -> str | None:
    """Return the process that trains there, as trainer.lock names it, or None if none does."""
    try:
        with open(folder / LOCK, encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return file.read().strip()
            except OSError:
                return f"{file.read().strip()}, if it still lives: this disk has no locks,"
    except FileNotFoundError:
        pass
    return None


def servers(run: RecordedRun) -> list[str]:
    """Return the URLs that the run asks, of references and pool, without those that only its own machines reach."""
    settings = run.settings
    urls = [*(settings.get("ref_servers") or [])] if settings.get("ref") == "server" and settings.get("beta") else []
    is_here = bool(run.starts) and socket.gethostname() in run.starts[-1].get("hosts", ())
    urls += settings["pool"].split(",") if settings.get("pool") else []
    return [url for url in urls if is_here or "//127.0.0.1:" not in url]


def answer_of(url: str, authority: str | bool) -> str:
    """Return what a server says of itself: loading, ready or draining; or that it does not answer."""
    try:
        return str(_ask_health(url, authority).json()["status"])
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return "no answer"


def is_ready(url: str) -> bool:
    """Tell whether a server can answer, also one that tells strangers no more."""
    try:
        return _ask_health(url, True).status_code == 200
    except requests.RequestException:
        return False


def _ask_health(url: str, authority: str | bool) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False  # no proxy of the environment stands between, as in training
        return session.get(f"{url}/health", timeout=5, verify=authority)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=program_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    arguments = parser.parse_args()

    def work() -> None:
        for folder in arguments.runs:
            text = "\n".join(status(folder))
            with suppress(BrokenPipeError):  # its reader, such as head, has read enough
                print(text, flush=True)

    return exit_code(work, (OSError,), "interrupted")


if __name__ == "__main__":
    sys.exit(main())

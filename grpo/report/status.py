"""Tells how runs stand: step, speed and time left; who trains, since when; the servers that they ask. Or stops them.

    grpo status runs/DATE-TIME
    grpo status /shared/run1 /shared/run2
    grpo stop runs/DATE-TIME

Any machine that has the folders can tell. `stop` lets the trainer finish its step, save and end with code 0, so that
nothing starts it again; it waits for that end, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import socket
import statistics
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import requests

from grpo.config.errors import program_name, say_once
from grpo.report.read import RecordedRun, duration, read_run
from grpo.run.exit import exit_code, how_to_continue
from grpo.run.run_folder import LOCK, STOP, checkpoints, finished_steps, is_stop_asked, step_of, writable

_LATEST = 20  # steps that speed and time left are computed from
_LOOK = 0.5  # seconds between two looks at who trains
_NO_LOCKS = ", if it still lives: this disk has no locks,"


def status(folder: Path) -> list[str]:
    """Return the lines about a run. Raises ConfigError if the folder is none, OSError if it cannot be read."""
    run = read_run(folder, may_be_empty=True)
    process = writer(folder)
    lines = [f"{folder}: {progress(run, process is not None)}"]
    if run.starts:
        start, hosts = run.starts[-1], ", ".join(run.starts[-1].get("hosts", ()))
        began = datetime.fromisoformat(start["time"]).astimezone()
        ended = "it is done" if finished_steps(folder) else "no trainer writes there any more"
        trains = f"{process} trains, and is asked to stop" if is_stop_asked(folder) else f"{process} trains"
        who = trains if process else ended
        lines.append(f"{who}; start {len(run.starts)}, {began:%Y-%m-%d %H:%M}: {start.get('ranks')} ranks on {hosts}")
    if run.rows:
        age = duration(max(0.0, time.time() - (folder / "metrics.jsonl").stat().st_mtime))  # by another machine's clock
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
                return f"{file.read().strip()}{_NO_LOCKS}"
    except FileNotFoundError:
        pass
    return None


def stop(folders: list[Path]) -> int:
    """Ask the trainers of runs to stop for good, and wait for their end. Return the exit code: 1 if one does not train,
    or trains again. Raises ConfigError before any is asked if a folder is none."""
    for folder in folders:
        read_run(folder, may_be_empty=True)
    code, asked = 0, {}
    for folder in folders:
        if (process := writer(folder)) is None:
            say_once(
                f"runs='{folder}': nobody trains there: what waits for machines, or starts the run again, is ended by "
                "Ctrl-C, scancel, kubectl delete job or ray job stop"
            )
            code = 1
            continue
        with writable("runs", folder):
            (folder / STOP).touch()
        is_seen = not process.endswith(_NO_LOCKS)
        end = "" if is_seen else f"; grpo status {folder} shows when it is at rest"
        print(f"{folder}: asked {process} to stop after its step{end}", flush=True)
        if is_seen:
            asked[folder] = process
    for folder, process in asked.items():
        while is_stop_asked(folder) and writer(folder) == process:
            time.sleep(_LOOK)
        if (other := writer(folder)) is None:
            print(f"{folder}: {process} has ended; {what_is_kept(folder)}", flush=True)
        else:
            say_once(f"runs='{folder}': {other} has begun there meanwhile: end what started it, or stop it too")
            code = 1
    return code


def what_is_kept(folder: Path) -> str:
    """Return what a run that has ended left: its model, or the last checkpoint and how to continue from it."""
    if finished_steps(folder):
        return f"the run is done: its model is in {folder / 'model'}"
    if not (kept := checkpoints(folder)):
        return "there is no checkpoint: the same command begins again"
    run = read_run(folder, may_be_empty=True)
    started = run.starts[-1]["command"] if run.starts else ""
    is_whole = re.match(r"(grpo |python -m grpo\.)launch( |$)", started)  # other launchers' is not
    way_on = how_to_continue(folder.absolute(), step_of(kept[-1]), started if is_whole else "")
    return f"its last step was {max(run.rows, default=0)}, and it left {kept[-1].name}; {way_on}"


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
    parser.add_argument("--stop", action="store_true", help=argparse.SUPPRESS)  # `grpo stop`
    arguments = parser.parse_args()

    def work() -> int | None:
        if arguments.stop:
            return stop(arguments.runs)
        for folder in arguments.runs:
            text = "\n".join(status(folder))
            with suppress(BrokenPipeError):  # its reader, such as head, has read enough
                print(text, flush=True)
        return None

    interrupted = "no longer waiting: what was asked to stop stops" if arguments.stop else "interrupted"
    return exit_code(work, (OSError,), interrupted)


if __name__ == "__main__":
    sys.exit(main())

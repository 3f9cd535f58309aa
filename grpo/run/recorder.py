"""Writes what a run records: its files, and what its trackers are sent."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from grpo.config.command_line import write_config
from grpo.config.errors import COMMAND
from grpo.config.fields import REPOSITORY
from grpo.config.trainer import TrainerConfig
from grpo.run.collective import gather
from grpo.run.description import LIBRARIES
from grpo.run.folder import SaveError
from grpo.run.json_lines import keep_pictures, read_record, some_of, to_json
from grpo.run.trackers import open_trackers

log = logging.getLogger(__name__)

BAD_STEPS = "bad_steps.jsonl"
"""the file of a run with the completions of the steps that were skipped"""
TABLE_STEPS = 50
"""steps from one step whose completions the trackers are sent to the next; they have those of every evaluation"""


class Recorder:
    """The files of a run: config.yaml, metrics.jsonl, completions.jsonl, bad_steps.jsonl where a step was skipped,
    pictures/ where prompts have some, and what `report_to` names. Rank 0 has the only one."""

    def __init__(self, config: TrainerConfig, folder: Path, after: int):
        """Open the files. The run goes on after step `after` (-1: it begins): what is recorded of later steps is cut
        off, to be recorded again."""
        write_config(config, folder / "config.yaml")  # a run that goes on may have other settings than it began with
        self._folder, self._bad_steps = folder, folder / BAD_STEPS
        for name in ("metrics.jsonl", "completions.jsonl", BAD_STEPS):
            _cut_after(folder / name, after)
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._completions = open(folder / "completions.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._trackers = open_trackers(config, folder, after)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append a step's line. Raises SaveError where the file is no longer in the run's folder."""
        try:
            is_same_file = os.path.samestat(os.stat(self._metrics.name), os.fstat(self._metrics.fileno()))
        except FileNotFoundError:
            is_same_file = False
        if not is_same_file:
            raise SaveError(
                f"{self._metrics.name} was moved, replaced or deleted while the run was writing it: put the run's "
                "folder back and start the run again, or begin a new one"
            )
        self._metrics.write(to_json({"step": step, **values}))
        for tracker in self._trackers:
            tracker.metrics(step, values)

    def completions(self, step: int, phase: str, samples: list[dict[str, Any]]) -> None:
        """Append samples; `phase` is "train" or "eval". The bytes of their pictures go into files beside the record."""
        for sample in keep_pictures(self._folder, samples):
            self._completions.write(to_json({"step": step, "phase": phase, **sample}))
        if phase == "eval" or step % TABLE_STEPS == 1:
            texts = [{name: value for name, value in sample.items() if name != "pictures"} for sample in samples]
            for tracker in self._trackers:
                tracker.completions(step, phase, texts)

    def bad_step(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append the samples of a step that was skipped."""
        with open(self._bad_steps, "a", encoding="utf-8") as file:
            file.writelines(to_json({"step": step, **sample}) for sample in keep_pictures(self._folder, samples))

    def close(self) -> None:
        self._metrics.close()
        self._completions.close()
        for tracker in self._trackers:
            tracker.close()


def _cut_after(path: Path, step: int) -> None:
    """Cut off what follows the last line of this step. A killed run may end within a line. A damaged line before that
    stays, and readers leave it out."""
    if not path.exists():
        if step > 0 and path.name != BAD_STEPS:
            log.warning("%s is not there: what it had of the steps up to %d is missing from now on", path, step)
        return
    damaged: list[int] = []
    with open(path, "rb+") as file:
        kept_bytes = last_kept = bytes_read = 0
        for number, line in enumerate(file, 1):
            bytes_read += len(line)
            record = read_record(line)
            if record is None:
                damaged.append(number)
            elif record["step"] > step or not line.endswith(b"\n"):
                break
            else:
                kept_bytes, last_kept = bytes_read, number
        file.truncate(kept_bytes)
    if damaged := [number for number in damaged if number < last_kept]:
        log.warning("damaged lines of %s that are left out: %s", path, some_of(damaged))


# starts.jsonl: what started a run, and where. A run that was resumed has a line for each start.


_GIT_SECONDS = 10


def describe_start(step: int, device: torch.device) -> dict[str, Any]:
    """Describe this start of a run, which goes on after `step`: time, command line, ranks, hosts, versions, commit.

    All ranks call it together: `hosts` has the device of every rank, by host.
    """
    hosts: dict[str, list[str]] = {}
    devices = gather((socket.gethostname(), torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"))
    for host, name in devices:
        hosts.setdefault(host, []).append(name)
    return {
        "step": step,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "ranks": len(devices),
        "hosts": hosts,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES} | _program(),
        "commit": commit_of(REPOSITORY),
    }


def _command() -> str:
    """Return what the user typed: grpo.launch says it of itself, other launchers only add an option."""
    words = [word for word in sys.argv if not word.startswith("--local_rank=")]
    return os.environ.get(COMMAND) or shlex.join(words)


def record_start(folder: Path, start: dict[str, Any]) -> None:
    """Append a line to the run's starts.jsonl."""
    with open(folder / "starts.jsonl", "a", encoding="utf-8") as file:
        file.write(to_json(start))


def commit_of(repository: Path) -> str | None:
    """Return the git commit that is checked out there, with "-dirty" where a tracked file is changed; None where the
    folder is no checkout or git cannot tell."""
    if not (repository / ".git").exists():  # an installed program may lie within a checkout of something else
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        told = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(repository), *describe],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None


def _program() -> dict[str, str]:
    """Return this program's version where it is installed; a checkout has its commit."""
    try:
        return {"grpo-ref-split": version("grpo-ref-split")}
    except PackageNotFoundError:
        return {}

"""Writes a run's files and sends its numbers to trackers."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
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
from grpo.run.json_lines import keep_pictures, read_record, to_json
from grpo.run.trackers import open_trackers

BAD_STEPS = "bad_steps.jsonl"  # the file of a run with the completions of the steps that were skipped
TABLE_STEPS = 50
"""steps from one step whose completions the trackers are sent to the next; they have those of every evaluation"""


class Recorder:
    """Write config.yaml, metrics.jsonl, completions.jsonl, bad_steps.jsonl (skipped steps) and pictures/, and send to
    the trackers of `report_to`. Only rank 0 has a recorder."""

    def __init__(self, config: TrainerConfig, folder: Path, after: int):
        """Open the files. The run resumes after step `after` (-1: it begins): records of later steps are cut off."""
        write_config(config, folder / "config.yaml")  # a resumed run may have other settings
        self._folder, self._bad_steps = folder, folder / BAD_STEPS
        for name in ("metrics.jsonl", "completions.jsonl", BAD_STEPS):
            _cut_after(folder / name, after)
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._completions = open(folder / "completions.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._trackers = open_trackers(config, folder, after)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append a step's line. Raises SaveError if the file is no longer in the run's folder."""
        path = Path(self._metrics.name)
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self._metrics.fileno())):
            raise SaveError(
                f"{path} was moved, replaced or deleted while the run was writing it: put the run's folder back and "
                "start the run again, or begin a new one"
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
    """Cut off all after the last line of this step. A killed run may end within a line. Damaged lines before it stay:
    readers leave them out."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        kept_bytes = bytes_read = 0
        for line in file:
            bytes_read += len(line)
            if (record := read_record(line)) is None:
                continue
            if record["step"] > step or not line.endswith(b"\n"):
                break
            kept_bytes = bytes_read
        file.truncate(kept_bytes)


def describe_start(step: int, device: torch.device) -> dict[str, Any]:
    """Describe this start of a run, which continues after `step`. All ranks call it together: `hosts` has their devices
    by host."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    with suppress(PackageNotFoundError):  # a checkout is not installed, and has a commit
        versions["grpo-ref-split"] = version("grpo-ref-split")
    hosts = defaultdict[str, list[str]](list)
    devices = gather((socket.gethostname(), torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"))
    for host, name in devices:
        hosts[host].append(name)
    return {
        "step": step,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Of grpo.launch the words that the user typed; other launchers only add an option.
        "command": os.environ.get(COMMAND) or shlex.join(w for w in sys.argv if not w.startswith("--local_rank=")),
        "ranks": len(devices),
        "hosts": hosts,
        "versions": versions,
        "commit": commit_of(REPOSITORY),
    }


def record_start(folder: Path, start: dict[str, Any]) -> None:
    """Append a line to the run's starts.jsonl, which has a line for each start."""
    with open(folder / "starts.jsonl", "a", encoding="utf-8") as file:
        file.write(to_json(start))


def commit_of(repository: Path) -> str | None:
    """Return the checked-out git commit, with "-dirty" if a tracked file is changed; None without a checkout or git."""
    if not (repository / ".git").exists():  # an installed program may lie within a checkout of something else
        return None
    command = ["git", "--no-optional-locks", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        shown = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return shown.stdout.strip() or None

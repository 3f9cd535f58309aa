"""starts.jsonl: what started a run, and where. A run that was resumed has a line for each start."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from grpo.config.errors import COMMAND
from grpo.config.fields import REPOSITORY
from grpo.run.collective import gather
from grpo.run.description import LIBRARIES
from grpo.run.json_lines import to_json

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

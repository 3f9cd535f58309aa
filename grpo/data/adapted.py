"""Reads the tasks of an environment of another package, which the interpreter prints that has the package."""

from __future__ import annotations

import json
import subprocess
import sys

from grpo.config.errors import ConfigError, one_line
from grpo.config.fields import PACKAGE
from grpo.config.sampling_settings import VERIFIERS, AnsweringConfig


def read_tasks(config: AnsweringConfig) -> list[dict[str, str]]:
    """Return a row of each task: "prompt", for people, and "task", which the program gets. Raises ConfigError if the
    environment cannot be opened, or the run has another one: its code is the user's to name."""
    name = config.dataset_name
    is_played = config.agent == name
    config.check(is_played, dataset_name=f"its tasks are played by their environment: add --environment {name}")
    python = config.agent_python or sys.executable
    command = [python, str(PACKAGE / "agents/adapters/verifiers_episodes.py"), name.removeprefix(VERIFIERS)]
    try:
        printed = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"agent_python={python!r}: it cannot be started ({error.strerror}): name another") from None
    if printed.returncode:
        reason = f"{python} cannot open it ({one_line(printed.stderr.strip().rpartition(chr(10))[2])})"
        remedy = "install verifiers and the package there, or name their interpreter as agent_python"
        raise ConfigError(f"environment={name!r}: {reason}: {remedy}")
    rows = [json.loads(line) for line in printed.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise ConfigError(f"environment={name!r}: it has no tasks: correct its settings, or take another")
    return rows

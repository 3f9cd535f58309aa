"""Which checkpoints a run has, and which of them it goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo.config import ConfigError
from grpo.trainer_config import TrainerConfig

PROGRESS = "progress.json"
"""written last: a folder that has it is whole"""


def find_checkpoint(config: TrainerConfig) -> Path | None:
    """The checkpoint to continue from; None where the run begins. Raises ConfigError where there is no such one."""
    asked = config.resume_from_checkpoint
    if asked is None:
        return None
    if asked == "last":
        if config.output_dir is None:
            raise ConfigError("resume_from_checkpoint='last': of which run? set output_dir to its folder")
        return last_checkpoint(Path(config.output_dir))
    path = Path(asked)
    if not (path / PROGRESS).is_file():
        raise ConfigError(
            f"resume_from_checkpoint='{path}': there is no {PROGRESS} in it: name a folder checkpoint-STEP of a run, "
            "or 'last' with its output_dir"
        )
    if config.output_dir is not None and Path(config.output_dir).resolve() != path.resolve().parent:
        raise ConfigError(
            f"resume_from_checkpoint='{path}': it is of the run {path.parent}, not of "
            f"output_dir='{config.output_dir}': leave output_dir out"
        )
    if later := [other.name for other in checkpoints(path.parent) if step_of(other) > step_of(path)]:
        raise ConfigError(
            f"resume_from_checkpoint='{path}': the run has {' and '.join(later)} too, which go another way from there: "
            "delete them, or use 'last'"
        )
    return path


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run's folder, the oldest first."""
    found = [one.parent for one in run.glob(f"checkpoint-*/{PROGRESS}") if one.parent.name[11:].isdecimal()]
    return sorted(found, key=step_of)


def last_checkpoint(run: Path) -> Path | None:
    return next(reversed(checkpoints(run)), None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def ranks_of(checkpoint: Path) -> int:
    """How many saved it."""
    return read_progress(checkpoint)["ranks"]


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What all ranks know alike, and what the checkpoint is of."""
    return json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))


def best(all_of_them: list[Path]) -> Path | None:
    """The newest of those with the highest accuracy."""
    known = {}
    for one in all_of_them:
        if (accuracy := read_progress(one)["accuracy"]) is not None:
            known[one] = accuracy, step_of(one)
    return max(known, key=known.get, default=None)

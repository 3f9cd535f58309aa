"""Writes what a run records: its files, TensorBoard and wandb."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo.config.command_line import write_config
from grpo.config.errors import ConfigError
from grpo.config.records import RecordSection
from grpo.config.trainer import TrainerConfig
from grpo.run.folder import SaveError
from grpo.run.json_lines import read_record, some_of, to_json

log = logging.getLogger(__name__)

BAD_STEPS = "bad_steps.jsonl"
"""the file of a run with the completions of the steps that were skipped"""


class Recorder:
    """The files of a run: config.yaml, metrics.jsonl, completions.jsonl, bad_steps.jsonl where a step was skipped, and
    what `report_to` names. Rank 0 has the only one."""

    def __init__(self, config: TrainerConfig, folder: Path, after: int | None = None):
        """Open the files. `after`: the run goes on after this step (-1: it begins again), and what is recorded of later
        steps is cut off, to be recorded again; None appends to the files as they are."""
        write_config(config, folder / "config.yaml")  # a run that goes on may have other settings than it began with
        self._bad_steps = folder / BAD_STEPS
        for name in ("metrics.jsonl", "completions.jsonl", BAD_STEPS) if after is not None else ():
            _cut_after(folder / name, after)
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._completions = open(folder / "completions.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._tensorboard = self._wandb = None
        if "tensorboard" in config.report_to and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(folder / "tensorboard"), purge_step=None if after is None else after + 1
            )
        if "wandb" in config.report_to:
            import wandb

            self._wandb = wandb.init(project="grpo", dir=str(folder), config=asdict(config))

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
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def completions(self, step: int, phase: str, samples: list[dict[str, Any]]) -> None:
        """Append samples; `phase` is "train" or "eval"."""
        for sample in samples:
            self._completions.write(to_json({"step": step, "phase": phase, **sample}))

    def bad_step(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append the samples of a step that was skipped."""
        with open(self._bad_steps, "a", encoding="utf-8") as file:
            file.writelines(to_json({"step": step, **sample}) for sample in samples)

    def close(self) -> None:
        self._metrics.close()
        self._completions.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


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


def check_report_to(config: RecordSection) -> None:
    """Raise ConfigError where `report_to` names wandb and it is not installed."""
    if "wandb" in config.report_to and importlib.util.find_spec("wandb") is None:
        raise ConfigError("report_to='wandb': it is not installed: 'pip install wandb', or leave it out")

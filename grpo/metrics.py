"""Numbers of a run: gathered exactly over ranks, written to JSONL, TensorBoard and wandb. Names are TRL's."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo.checkpoint import SaveError
from grpo.config import ConfigError
from grpo.run_files import read_record, some_of
from grpo.trainer_config import TrainerConfig

log = logging.getLogger(__name__)

BAD_STEPS = "bad_steps.jsonl"
"""of a run's folder: the completions of the steps that were skipped"""

_MEANS = ("step_time", "cispo_clip_ratio", "vespo/phi_seq_mean", "off_policy_masked", "sampling/policy_lag")


@dataclass(frozen=True)
class Stats:
    """Enough of a set of numbers to add it to other sets: a mean of means would weigh ranks, not numbers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Any) -> Stats:
        """Of an array or tensor of any shape; NaN (a reward that does not apply) is left out."""
        array = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values, np.float64).ravel()
        array = array[~np.isnan(array)]
        if array.size == 0:
            return cls()
        return cls(array.size, array.sum().item(), (array**2).sum().item(), array.min().item(), array.max().item())

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def std(self) -> float:
        """With ddof 1, as torch.std."""
        if self.count < 2:
            return math.nan
        return math.sqrt(max(0.0, self.squares - self.total * self.mean) / (self.count - 1))


def add_stats(into: dict[str, Stats], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        into[name] = into.get(name, Stats()) + (value if isinstance(value, Stats) else Stats.of(value))


def gather(own: Any) -> list[Any]:
    """What each rank has, by rank. All must call it; all get the result. One alone needs no process group."""
    if not dist.is_initialized():
        return [own]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def gather_stats(own: Mapping[str, Stats]) -> dict[str, Stats]:
    """Every rank's stats, added up. All ranks must call it; all get the result."""
    together: dict[str, Stats] = {}
    for one in gather(dict(own)):
        add_stats(together, one)
    return together


def step_metrics(stats: Mapping[str, Stats], reward_names: list[str]) -> dict[str, float]:
    """A step's stats over all ranks -> the metrics by TRL's names."""
    length = stats["length"]
    metrics = {"loss": stats["loss"].total if "loss" in stats else 0.0}
    for name in ("reward", "reward_std_within_groups", "frac_reward_zero_std", "kl", "entropy"):
        if name in stats:
            metrics[name] = stats[name].mean
    if "aux_loss" in stats:
        metrics["aux_loss"] = stats["aux_loss"].total
    if "reward" in stats:
        metrics["reward_std"] = stats["reward"].std
    for name in ("sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"):
        if name in stats:
            metrics |= {f"{name}/mean": stats[name].mean, f"{name}/max": stats[name].high}
    if "sampling/importance_sampling_ratio" in stats:
        metrics["sampling/importance_sampling_ratio/min"] = stats["sampling/importance_sampling_ratio"].low
    for name in reward_names:
        metrics[f"rewards/{name}/mean"] = stats[f"rewards/{name}"].mean
        metrics[f"rewards/{name}/std"] = stats[f"rewards/{name}"].std
    metrics["completions/mean_length"] = length.mean
    metrics["completions/min_length"] = length.low
    metrics["completions/max_length"] = length.high
    metrics["completions/mean_terminated_length"] = stats["terminated_length"].mean
    metrics["completions/clipped_ratio"] = stats["clipped_ratio"].mean
    for name in stats:
        if name.startswith(("clip_ratio/", "time/")) or name in _MEANS:
            metrics[name] = stats[name].mean
        elif name.startswith("memory/"):
            metrics[name] = stats[name].high  # the fullest card is the one that fails
    return metrics


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """One record and a line's end. A number that does not exist (NaN) or is infinite is null: JSON has neither."""

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    finite = {name: known(value) for name, value in record.items()}
    return json.dumps(finite, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"


class PhaseClock:
    """Seconds by phase of one step, as `time/...`. A phase inside another is taken out of it: none counts twice.

    On a card also the most memory of each phase in GiB: that of tensors as `memory/peak_...`, and over all phases what
    torch's allocator took for them as `memory/peak_reserved`. On a CPU nobody counts tensors, so there are none.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self.open: list[str] = []
        """phases that are not over, the outermost first"""
        self.ended = ""
        """the last one that was not within another"""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start, booked = time.perf_counter(), sum(self.seconds.values())
        self._note_memory()
        self.open.append(phase)
        yield
        self._note_memory()
        self.open.pop()
        self.ended = self.ended if self.open else phase
        within = sum(self.seconds.values()) - booked
        own = time.perf_counter() - start - within
        self.seconds[f"time/{phase}"] = self.seconds.get(f"time/{phase}", 0.0) + own

    def _note_memory(self) -> None:
        """Book the peak since the last call to the phase that is open, and begin a new one.

        The allocator's own counts: the device is not waited for.
        """
        if not torch.cuda.is_initialized():
            return
        working = [phase for phase in self.open if phase != "wait_ref"]  # there, what the phase around it has is held
        if working:
            tensors, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            for name, peak in ((working[-1], tensors), ("reserved", reserved)):
                name = f"memory/peak_{name}"
                self.memory[name] = max(self.memory.get(name, 0.0), peak / 2**30)
        torch.cuda.reset_peak_memory_stats()

    def total(self) -> float:
        return time.perf_counter() - self.start


class Recorder:
    """The files of a run, written by rank 0: metrics.jsonl, completions.jsonl, bad_steps.jsonl where there was one, and
    what `report_to` names."""

    def __init__(self, config: TrainerConfig, folder: Path, after: int | None = None):
        """`after`: the run goes on after this step (-1: it begins again); what is recorded of later ones is cut off,
        to be recorded again. None appends to what is there."""
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

            self._wandb = wandb.init(project="grpo", dir=str(folder), config=vars(config) | {"token": None})

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line a step, appended. Raises SaveError where the run's folder is not there any more."""
        try:
            there = os.path.samestat(os.stat(self._metrics.name), os.fstat(self._metrics.fileno()))
        except FileNotFoundError:
            there = False
        if not there:
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
        for sample in samples:
            self._completions.write(to_json({"step": step, "phase": phase, **sample}))

    def bad_step(self, step: int, samples: list[dict[str, Any]]) -> None:
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
    """Leave the lines up to the last of this step. A killed run may end within a line; one that is damaged before that
    stays, and readers leave it out."""
    if not path.exists():
        if step > 0 and path.name != BAD_STEPS:
            log.warning("%s is not there: what it had of the steps up to %d is missing from now on", path, step)
        return
    damaged: list[int] = []
    with open(path, "rb+") as file:
        end = whole = length = 0
        for number, line in enumerate(file, 1):
            length += len(line)
            record = read_record(line)
            if record is None:
                damaged.append(number)
            elif record["step"] > step or not line.endswith(b"\n"):
                break
            else:
                end, whole = length, number
        file.truncate(end)
    if damaged := [number for number in damaged if number < whole]:
        log.warning("damaged lines of %s that are left out: %s", path, some_of(damaged))


def check_report_to(config: TrainerConfig) -> None:
    """Raises ConfigError where `report_to` names wandb and it is not installed."""
    if "wandb" in config.report_to and importlib.util.find_spec("wandb") is None:
        raise ConfigError("report_to='wandb': it is not installed: 'pip install wandb', or leave it out")

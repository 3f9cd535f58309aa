"""Sends a run's numbers to services, by their names in `report_to`."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from grpo.config.errors import ConfigError
from grpo.config.record_settings import RecordSection
from grpo.config.trainer import TrainerConfig

log = logging.getLogger(__name__)

Samples = list[dict[str, Any]]


class Tracker(Protocol):
    """A service that shows a run's numbers."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step's metrics."""

    def completions(self, step: int, phase: str, samples: Samples) -> None:
        """Send samples; `phase` is "train" or "eval"."""

    def close(self) -> None:
        """Send what is left, and end."""


class TensorBoard:
    """Write event files into the run's folder, without completions."""

    def __init__(self, folder: Path, after: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a thread writes them: a kill would lose steps that a checkpoint has

    def completions(self, step: int, phase: str, samples: Samples) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class _Service:
    """Send through a client with wandb's interface."""

    _run: Any
    _table: Any
    """the client's class of a table"""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def completions(self, step: int, phase: str, samples: Samples) -> None:
        self._run.log({f"completions/{phase}": self._show(samples)}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _show(self, samples: Samples) -> Any:
        columns, rows = to_table(samples)
        return self._table(columns=columns, data=rows)


class Wandb(_Service):
    """Weights & Biases."""

    def __init__(self, config: TrainerConfig, folder: Path, run_id: str):
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "grpo"),
            name=os.environ.get("WANDB_NAME", folder.name),
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=asdict(config),
        )


class Trackio(_Service):
    """Trackio. It continues a run by its name, so the name ends with the id."""

    def __init__(self, config: TrainerConfig, folder: Path, run_id: str):
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "grpo"),
            name=f"{folder.name}-{run_id}",
            resume="allow",
            config=asdict(config),
        )


class SwanLab(_Service):
    """SwanLab. It shows a completion as a text below its prompt."""

    def __init__(self, config: TrainerConfig, folder: Path, run_id: str):
        import swanlab

        self._text = swanlab.Text
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", "grpo"),
            name=folder.name,
            id=run_id,
            resume="allow",
            log_dir=str(folder / "swanlog"),
            config=asdict(config),
        )

    def _show(self, samples: Samples) -> Any:
        facts = [name for name in ("reward", "correct") if samples and name in samples[0]]
        return [
            self._text(
                f"{sample['prompt']}\n\n{sample['completion']}",
                caption=", ".join(f"{name} {sample[name]}" for name in facts),
            )
            for sample in samples
        ]


class Mlflow:
    """MLflow. It gives its runs ids of its own, so the run to continue is found by a tag."""

    def __init__(self, config: TrainerConfig, folder: Path, run_id: str):
        """Raises ConfigError if MLflow's store cannot be used."""
        import mlflow

        self._mlflow = mlflow
        try:
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "grpo"))
            before = mlflow.search_runs(filter_string=f"tags.grpo_run_id = '{run_id}'", output_format="list")
            mlflow.start_run(
                run_id=before[0].info.run_id if before else None,
                run_name=folder.name,
                tags={"grpo_run_id": run_id},
            )
            if not before:  # MLflow refuses to change a parameter
                mlflow.log_params(asdict(config))
        except mlflow.MlflowException as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"report_to='mlflow': {mlflow.get_tracking_uri()} cannot be used ({reason}): "
                "set MLFLOW_TRACKING_URI to a server that runs, or to sqlite:///FILE"
            ) from error

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        # MLflow refuses the @ of pass@k.
        names = {re.sub(r"[^\w/.\- :]", "_", name): value for name, value in values.items()}
        self._mlflow.log_metrics(names, step=step, synchronous=False)

    def completions(self, step: int, phase: str, samples: Samples) -> None:
        columns, rows = to_table(samples)
        table = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
        with self._warned():
            self._mlflow.log_table(table, f"completions/{phase}-{step:06}.json")

    def close(self) -> None:
        with self._warned():
            self._mlflow.end_run()

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Warn if the server does not answer. The run continues: its own files have everything."""
        try:
            yield
        except (self._mlflow.MlflowException, OSError) as error:
            log.warning("MLflow: %s", " ".join(str(error).split())[:300])


SERVICES = {"wandb": Wandb, "trackio": Trackio, "swanlab": SwanLab, "mlflow": Mlflow}
"""the services whose clients must be installed, by the client's module"""


def open_trackers(config: TrainerConfig, folder: Path, after: int) -> list[Tracker]:
    """Open the trackers of `report_to`. `after` as in Recorder: a resumed run keeps its id, which is in the file run_id
    of its folder; a new run gets a new id."""
    trackers: list[Tracker] = []
    if "tensorboard" in config.report_to and importlib.util.find_spec("tensorboard"):
        trackers.append(TensorBoard(folder, after))
    services = [service for name, service in SERVICES.items() if name in config.report_to]
    if services:
        kept = folder / "run_id"
        if after == -1 or not kept.exists():
            kept.write_text(secrets.token_hex(4), encoding="utf-8")
        run_id = kept.read_text(encoding="utf-8").strip()
        trackers += [service(config, folder, run_id) for service in services]
    return trackers


def check_report_to(config: RecordSection) -> None:
    """Raise ConfigError if `report_to` names a service whose client is not installed."""
    for name in SERVICES:
        if name in config.report_to and importlib.util.find_spec(name) is None:
            raise ConfigError(f"report_to='{name}': it is not installed: 'pip install {name}', or leave it out")


def to_table(samples: Samples) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows; a cell that a sample does not have is None."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample))
    return columns, [[sample.get(name) for name in columns] for sample in samples]

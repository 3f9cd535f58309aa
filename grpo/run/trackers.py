"""Sends a run's numbers to services, by their names in `report_to`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.config.record_settings import RecordSection
from grpo.config.trainer import TrainerConfig

log = logging.getLogger(__name__)

Samples = list[dict[str, Any]]


class Tracker:
    """A service that shows a run's numbers."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step's metrics."""

    def completions(self, step: int, phase: str, samples: Samples) -> None:
        """Send samples; `phase` is "train" or "eval"."""

    def close(self) -> None:
        """Send what is left, and end."""


class TensorBoard(Tracker):
    """Write event files into the run's folder, without completions."""

    def __init__(self, folder: Path, after: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a thread writes them: a kill would lose steps that a checkpoint has

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases, or a service whose client has the interface of wandb's."""

    def __init__(self, service: str, config: TrainerConfig, folder: Path, run_id: str):
        """`service` is the client's module: wandb, trackio or swanlab."""
        name, options = {
            "wandb": (os.environ.get("WANDB_NAME", folder.name), {"id": run_id, "dir": str(folder)}),
            "trackio": (f"{folder.name}-{run_id}", {}),  # it continues a run by its name
            "swanlab": (folder.name, {"id": run_id, "log_dir": str(folder / "swanlog")}),
        }[service]
        self._client = importlib.import_module(service)
        project = os.environ.get(f"{service.upper()}_PROJECT", "grpo")
        self._run = self._client.init(project=project, name=name, resume="allow", config=asdict(config), **options)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def completions(self, step: int, phase: str, samples: Samples) -> None:
        if self._client.__name__ == "swanlab":  # it has no tables
            shown: Any = [self._text(sample) for sample in samples]
        else:
            columns = to_columns(samples)
            rows = [list(row) for row in zip(*columns.values(), strict=True)]
            shown = self._client.Table(columns=list(columns), data=rows)
        self._run.log({f"completions/{phase}": shown}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _text(self, sample: dict[str, Any]) -> Any:
        caption = ", ".join(f"{name} {sample[name]}" for name in ("reward", "correct") if name in sample)
        return self._client.Text(f"{sample['prompt']}\n\n{sample['completion']}", caption=caption)


class Mlflow(Tracker):
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
        with self._warned():
            self._mlflow.log_table(to_columns(samples), f"completions/{phase}-{step:06}.json")

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


SERVICES = "wandb", "trackio", "swanlab", "mlflow"
"""the services whose clients must be installed, by the client's module"""


def open_trackers(config: TrainerConfig, folder: Path, after: int) -> list[Tracker]:
    """Open the trackers of `report_to`. `after` as in Recorder: a resumed run keeps its id, which is in the file run_id
    of its folder; a new run gets a new id."""
    trackers: list[Tracker] = []
    if "tensorboard" in config.report_to and importlib.util.find_spec("tensorboard"):
        trackers.append(TensorBoard(folder, after))
    services = [service for service in SERVICES if service in config.report_to]
    if services:
        kept = folder / "run_id"
        if after == -1 or not kept.exists():
            kept.write_text(secrets.token_hex(4), encoding="utf-8")
        run_id = kept.read_text(encoding="utf-8").strip()
        for service in services:
            mlflow = service == "mlflow"
            trackers.append(Mlflow(config, folder, run_id) if mlflow else Wandb(service, config, folder, run_id))
    return trackers


def check_report_to(config: RecordSection) -> None:
    """Raise ConfigError if `report_to` names a service whose client is not installed."""
    for name in SERVICES:
        if name in config.report_to and importlib.util.find_spec(name) is None:
            raise ConfigError(f"report_to='{name}': it is not installed: 'pip install {name}', or leave it out")


def to_columns(samples: Samples) -> dict[str, list[Any]]:
    """Return the values of all samples by column; None where a sample does not have it."""
    columns = dict.fromkeys(name for sample in samples for name in sample)
    return {name: [sample.get(name) for sample in samples] for name in columns}

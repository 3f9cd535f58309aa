"""Writes a run's files, and sends its numbers to services, by their names in `report_to`."""

import importlib
import importlib.util
import logging
import os
import platform
import re
import secrets
import shlex
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from grpo.config.command_line import write_config
from grpo.config.errors import COMMAND, ConfigError, one_line
from grpo.config.fields import PROGRAMS
from grpo.config.trainer import RecordSection, TrainerConfig
from grpo.run.collective import gather
from grpo.run.folder import SaveError
from grpo.run.preflight import LIBRARIES
from grpo.run.run_folder import keep_pictures, read_record, to_json

log = logging.getLogger(__name__)

Samples = list[dict[str, Any]]


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


class Wandb:
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
            # wandb's typed columns refuse a message with calls after one without.
            shown = self._client.Table(columns=list(columns), data=rows, allow_mixed_types=True)
        self._run.log({f"completions/{phase}": shown}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _text(self, sample: dict[str, Any]) -> Any:
        caption = ", ".join(f"{name} {sample[name]}" for name in ("reward", "correct") if name in sample)
        return self._client.Text(f"{sample['prompt']}\n\n{sample['completion']}", caption=caption)


class Mlflow:
    """MLflow. It gives its runs ids of its own, so the run to continue is found by a tag."""

    def __init__(self, config: TrainerConfig, folder: Path, run_id: str):
        """Raises ConfigError if MLflow's store cannot be used."""
        import mlflow

        self._mlflow = mlflow
        try:
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "grpo"))
            before = mlflow.search_runs(filter_string=f"tags.grpo_run_id = '{run_id}'", output_format="list")
            known = before[0].info.run_id if before else None
            files = mlflow.MlflowClient().list_artifacts(known, "completions") if before else []
            self._tables = {file.path for file in files}  # of an earlier start
            mlflow.start_run(run_id=known, run_name=folder.name, tags={"grpo_run_id": run_id})
            if not before:  # MLflow refuses to change a parameter
                mlflow.log_params(asdict(config))
        except mlflow.MlflowException as error:
            raise ConfigError(
                f"report_to='mlflow': {mlflow.get_tracking_uri()} cannot be used ({one_line(error)}): "
                "set MLFLOW_TRACKING_URI to a server that runs, or to sqlite:///FILE"
            ) from error

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        # MLflow refuses the @ of pass@k.
        names = {re.sub(r"[^\w/.\- :]", "_", name): value for name, value in values.items()}
        self._mlflow.log_metrics(names, step=step, synchronous=False)

    def completions(self, step: int, phase: str, samples: Samples) -> None:
        name = f"completions/{phase}-{step:06}.json"
        with self._warned():
            if name not in self._tables:  # log_table would append the same again
                self._mlflow.log_table(to_columns(samples), name)

    def close(self) -> None:
        with self._warned():
            self._mlflow.end_run()

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Warn if the server does not answer. The run continues: its own files have everything."""
        try:
            yield
        except (self._mlflow.MlflowException, OSError) as error:
            log.warning("MLflow: %s", one_line(error))


Tracker = TensorBoard | Wandb | Mlflow
SERVICES = "wandb", "trackio", "swanlab", "mlflow"  # by the modules of their clients, which must be installed


def open_trackers(config: TrainerConfig, folder: Path, after: int) -> list[Tracker]:
    """Open the trackers of `report_to`. A run that resumes (`after`) keeps its id, which is in its file run_id."""
    trackers: list[Tracker] = []
    if "tensorboard" in config.report_to and importlib.util.find_spec("tensorboard"):
        trackers.append(TensorBoard(folder, after))
    kept, services = folder / "run_id", [service for service in SERVICES if service in config.report_to]
    if services and (after == -1 or not kept.exists()):
        kept.write_text(secrets.token_hex(4), encoding="utf-8")
    for service in services:
        run_id = kept.read_text(encoding="utf-8").strip()
        is_mlflow = service == "mlflow"
        trackers.append(Mlflow(config, folder, run_id) if is_mlflow else Wandb(service, config, folder, run_id))
    return trackers


def check_report_to(config: RecordSection) -> None:
    """Raise ConfigError if `report_to` names a service whose client is not installed."""
    for name in SERVICES:
        if name in config.report_to and importlib.util.find_spec(name) is None:
            raise ConfigError(f"report_to='{name}': it is not installed: 'pip install {name}', or leave it out")


def to_columns(samples: Samples) -> dict[str, list[Any]]:
    """Return the values of all samples by column; None for a sample without it."""
    columns = dict.fromkeys(name for sample in samples for name in sample)
    return {name: [sample.get(name) for sample in samples] for name in columns}


BAD_STEPS = "bad_steps.jsonl"  # the file of a run with the completions of the steps that were skipped
TABLE_STEPS = 50  # from one step whose completions go to the trackers to the next; they have those of every evaluation


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

    def complete(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to this step's line, the last one, or write it if it is not there."""
        with open(self._metrics.name, "rb+") as file:
            *before, last = file.read().splitlines(keepends=True) or [b""]
            record = read_record(last) or {}
            is_there = record.get("step") == step
            file.seek(sum(map(len, before)) + (0 if is_there else len(last)))
            file.write(to_json({**(record if is_there else {"step": step}), **values}).encode())
            file.truncate()
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
    """Cut off all after the last whole line of this step. Damaged lines before it stay: readers leave them out."""
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


def record_start(folder: Path | None, step: int, device: torch.device) -> None:
    """Append a line about this start, which continues after `step`, to the run's starts.jsonl. `folder` is the run's,
    on rank 0. All ranks call it together: `hosts` has their devices by host."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    with suppress(PackageNotFoundError):  # a checkout is not installed, and has a commit
        versions["grpo-ref-split"] = version("grpo-ref-split")
    hosts = defaultdict[str, list[str]](list)
    devices = gather((socket.gethostname(), torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"))
    for host, name in devices:
        hosts[host].append(name)
    start = {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        # Of grpo.launch the words that the user typed; other launchers only add an option.
        "command": os.environ.get(COMMAND) or shlex.join(w for w in sys.argv if not w.startswith("--local_rank=")),
        "ranks": len(devices),
        "hosts": hosts,
        "versions": versions,
        "commit": commit_of(PROGRAMS),
    }
    if folder is not None:
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

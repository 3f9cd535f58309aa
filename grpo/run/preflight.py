"""Checks before a run that all ranks see the same folder, take the same checkpoint, and have the same inputs."""

from __future__ import annotations

import logging
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.config.fields import REPOSITORY
from grpo.config.record_settings import RecordSection
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example
from grpo.run.collective import from_first, gather, on_first
from grpo.run.description import LIBRARIES
from grpo.run.run_folder import (
    damage,
    find_checkpoints,
    find_run_folder,
    finished_steps,
    make_run_folder,
    nearest_existing,
    writable,
)
from grpo.wire.health import fingerprint
from grpo.wire.picture_files import pictures_of

log = logging.getLogger(__name__)

# Settings that say where something is may differ between machines. Its content is compared, here or by the server.
_PLACES = {
    *("model_name_or_path", "dataset_name", "deepspeed"),
    *("ref_servers", "port", "token_file", "ref_ca_file", "pool", "replay"),
}


def find_run(config: TrainerConfig, rank: int, world_size: int) -> tuple[Path | None, Path, bool]:
    """Return (checkpoint to continue from, run folder, whether the run is done); the checkpoint is None for a new run.

    Rank 0 alone finds the checkpoint, after it has locked the folder: another trainer may still write there. The folder
    of a new run is made later, so that a start that fails or is killed leaves none. Raises ConfigError on every rank:
    as find_run_folder, make_run_folder and whole_checkpoint, if a machine does not see the folder, and if a run that
    has ended would be erased.
    """

    def mark() -> tuple[Path, Path]:
        folder = find_run_folder(config)
        if folder.exists() or config.resume_from_checkpoint is not None:
            make_run_folder(config, folder)
        # A new name: an older file may be seen on another disk.
        marker = nearest_existing(folder) / f"seen-{secrets.token_hex(4)}"
        with writable("output_dir", folder):
            marker.touch()
        return folder, marker

    folder, marker = on_first(rank, mark)
    views = gather((socket.gethostname(), str(marker.parent.absolute()), marker.exists()))
    if rank == 0:
        marker.unlink()
    for host, path, is_visible in views:
        if not is_visible:
            raise ConfigError(
                f"output_dir='{folder}': {host} does not see in its {path} what {views[0][0]} wrote into it: name a "
                "folder on a disk that all machines share, at the same path on each"
            )
    # A named checkpoint is trained from even if the run is done.
    steps = from_first(finished_steps(folder) if config.resume_from_checkpoint == "last" else 0)
    if steps >= config.max_steps:
        return None, folder.absolute(), True
    checkpoint = whole_checkpoint(config, rank, world_size)
    if checkpoint is None and steps:
        raise ConfigError(
            f"max_steps={config.max_steps}: the run in {folder} has ended after {steps}, and there is no checkpoint to "
            "go on from: set output_dir to another folder, or delete this one"
        )
    if checkpoint is None and config.resume_from_checkpoint is not None:
        # The first of many starts by the same command, or a mistyped name.
        log.warning("there is nothing to resume in %s: the run begins at step 0", folder)
    # A reward function may change the directory.
    return checkpoint and checkpoint.absolute(), folder.absolute(), False


def whole_checkpoint(config: RecordSection, rank: int, world_size: int) -> Path | None:
    """Return the newest undamaged checkpoint to continue from, or None without one; rename the newer, damaged ones.
    Raises ConfigError on every rank as find_checkpoints, for a checkpoint of another format, and if all are damaged."""
    damaged: dict[Path, str] = {}
    for checkpoint in on_first(rank, lambda: find_checkpoints(config)):
        try:
            reason: str | ConfigError | None = damage(checkpoint, rank, world_size)
        except ConfigError as error:
            reason = error
        reason = next(filter(None, gather(reason)), None)
        if reason is None:
            on_first(rank, partial(_rename_damaged, damaged, checkpoint))
            return checkpoint
        if isinstance(reason, ConfigError):
            raise reason
        if config.resume_from_checkpoint != "last":
            raise ConfigError(
                f"resume_from_checkpoint='{checkpoint}': it is damaged: {reason}: use 'last', which takes an older one"
            )
        damaged[checkpoint] = reason
    if damaged:
        details = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
        raise ConfigError(
            f"resume_from_checkpoint='last': every checkpoint of {config.output_dir} is damaged: {details}: put back "
            "what was there, or delete them to begin again"
        )
    return None


def _rename_damaged(damaged: Mapping[Path, str], used: Path) -> None:
    for checkpoint, reason in damaged.items():
        new_path = checkpoint.with_name(checkpoint.name + ".damaged")
        log.warning(
            "%s is damaged: %s. It is called %s now, and the run goes on from %s",
            *(checkpoint, reason, new_path.name, used.name),
        )
        with writable("output_dir", checkpoint.parent):
            shutil.rmtree(new_path, ignore_errors=True)
            checkpoint.rename(new_path)


def describe_inputs(
    config: TrainerConfig, ds_config: dict[str, Any], rewards: Mapping[str, Callable | str], data: list[list[Example]]
) -> dict[str, Any]:
    """Describe everything that must be the same on every rank: settings, data, versions, the program's files."""
    values = {name: value for name, value in asdict(config).items() if name not in _PLACES} | {"deepspeed": ds_config}
    for what, examples in zip(("the prompts and answers", "the held-out ones"), data, strict=True):
        rows = ([row.prompt, *map(fingerprint, pictures_of(row.prompt_ids)), row.gold] for row in examples)
        values[f"the fingerprint of {what}"] = fingerprint(*rows)
    values |= {f"the version of {name}": version(name) for name in LIBRARIES}
    paths = [REPOSITORY / "grpo_ref_split.py", *sorted(REPOSITORY.glob("grpo/**/*.py"))]
    files = {str(path.relative_to(REPOSITORY)): path for path in paths}
    for name in (config.loss_type, config.advantage_estimator):
        if ":" in name:
            files[f"the file of {name}"] = Path(name.rpartition(":")[0])
    for name, reward in rewards.items():
        file = getattr(sys.modules.get(reward.__module__), "__file__", None) if callable(reward) else None
        if file:
            files[f"the file of {name}"] = Path(file)
    return values | {f"the fingerprint of {name}": fingerprint(path.read_bytes()) for name, path in files.items()}


def check_alike(local_values: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank, naming the first difference, unless all have the values of rank 0."""
    by_rank = gather((socket.gethostname(), dict(local_values)))
    first_host, first = by_rank[0]
    for rank, (host, values) in enumerate(by_rank):
        for name in [*first, *values]:
            if first.get(name) != values.get(name):
                raise ConfigError(
                    f"{name} is {first.get(name)!r} for rank 0 on {first_host} and {values.get(name)!r} for rank "
                    f"{rank} on {host}: give every machine the same settings, data and programs"
                )

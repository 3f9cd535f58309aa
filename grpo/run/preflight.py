"""What the ranks of a run must have alike, looked at before it begins. On one machine little of it can differ."""

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
from typing import Any, TypeVar

from grpo.config.command_line import write_config
from grpo.config.errors import ConfigError
from grpo.config.fields import REPOSITORY
from grpo.config.trainer import TrainerConfig
from grpo.rollouts.records import Example
from grpo.run.checkpoint_files import damage, find_checkpoints, finished_steps
from grpo.run.checkpoints import LIBRARIES
from grpo.run.collective import from_first, gather
from grpo.run.folder import create_run, writable
from grpo.wire.health import fingerprint

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Where something is may be another place on each machine; what is there is compared, or compared by the server.
_PLACES = {
    *("model_name_or_path", "dataset_name", "deepspeed"),
    *("ref_servers", "port", "token", "token_file", "ref_ca_file"),
}


def open_run(config: TrainerConfig, rank: int, world_size: int) -> tuple[Path | None, Path, bool]:
    """Return the checkpoint to continue from, None where the run begins; its folder; whether the run is done already.

    Rank 0 finds and makes them. Raises ConfigError on every rank: as create_run, where a machine does not see the
    folder, as whole_checkpoint, and where a run that has ended would be erased.
    """

    def create() -> tuple[Path, Path]:
        folder = create_run(config)
        sign = folder / f"seen-{secrets.token_hex(4)}"  # of no earlier run
        with writable("output_dir", folder):
            sign.touch()
        return folder, sign

    folder, sign = _by_first(rank, create)
    looked = gather((socket.gethostname(), str(folder.absolute()), sign.exists()))
    if rank == 0:
        sign.unlink()
    for host, path, seen in looked:
        if not seen:
            raise ConfigError(
                f"output_dir='{folder}': {host} does not see in its {path} what {looked[0][0]} wrote into it: name a "
                "folder on a disk that all machines share, at the same path on each"
            )
    # Whoever names a checkpoint wants to train from there on, done or not.
    steps = from_first(finished_steps(folder) if config.resume_from_checkpoint == "last" else 0)
    if steps >= config.max_steps:
        return None, folder.absolute(), True
    checkpoint = whole_checkpoint(config, rank, world_size)
    if checkpoint is None and steps:
        raise ConfigError(
            f"max_steps={config.max_steps}: the run in {folder} has ended after {steps}, and there is no checkpoint to "
            "go on from: set output_dir to another folder, or delete this one"
        )

    def begin() -> None:
        with writable("output_dir", folder):
            write_config(config, folder / "config.yaml")

    if checkpoint is None:
        _by_first(rank, begin)
    # A reward function may change the directory.
    return checkpoint and checkpoint.absolute(), folder.absolute(), False


def whole_checkpoint(config: TrainerConfig, rank: int, world_size: int) -> Path | None:
    """Return the newest checkpoint to continue from that is as it was written; None where there is none at all.

    What is newer is put aside as `checkpoint-STEP.damaged`. Raises ConfigError on every rank as find_checkpoints, where
    a checkpoint is of another format, and where all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    for checkpoint in _by_first(rank, lambda: find_checkpoints(config)):
        try:
            reason: str | ConfigError | None = damage(checkpoint, rank, world_size)
        except ConfigError as error:
            reason = error
        reasons = list(filter(None, gather(reason)))
        if not reasons:
            _by_first(rank, partial(_put_aside, damaged, checkpoint))
            return checkpoint
        if isinstance(reasons[0], ConfigError):
            raise reasons[0]
        if config.resume_from_checkpoint != "last":
            raise ConfigError(
                f"resume_from_checkpoint='{checkpoint}': it is damaged: {reasons[0]}: use 'last', which takes an older "
                "one"
            )
        damaged[checkpoint] = reasons[0]
    if damaged:
        every = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
        raise ConfigError(
            f"resume_from_checkpoint='last': every checkpoint of {config.output_dir} is damaged: {every}: put back "
            "what was there, or delete them to begin again"
        )
    return None


def _put_aside(damaged: Mapping[Path, str], instead: Path) -> None:
    for checkpoint, reason in damaged.items():
        aside = checkpoint.with_name(checkpoint.name + ".damaged")
        log.warning(
            "%s is damaged: %s. It is called %s now, and the run goes on from %s",
            *(checkpoint, reason, aside.name, instead.name),
        )
        with writable("output_dir", checkpoint.parent):
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.rename(aside)


def _by_first(rank: int, action: Callable[[], _T]) -> _T:
    """Do it on rank 0; return the result, or raise its ConfigError, on every rank."""
    result: _T | ConfigError | None = None
    if rank == 0:
        try:
            result = action()
        except ConfigError as error:
            result = error
    result = from_first(result)
    if isinstance(result, ConfigError):
        raise result
    return result


def given(
    config: TrainerConfig, ds_config: dict[str, Any], rewards: Mapping[str, Callable | str], data: list[list[Example]]
) -> dict[str, Any]:
    """All that this rank was given and that every rank must have: settings, data, versions, the program itself."""
    settings = {name: value for name, value in asdict(config).items() if name not in _PLACES}
    problems = {
        f"the fingerprint of {what}": fingerprint(*([one.prompt, one.columns["answer"]] for one in examples))
        for what, examples in zip(("the prompts and answers", "the held-out ones"), data, strict=True)
    }
    files = {str(one.relative_to(REPOSITORY)): one for one in sorted(REPOSITORY.glob("grpo/**/*.py"))}
    files["grpo_ref_split.py"] = REPOSITORY / "grpo_ref_split.py"
    if ":" in config.loss_type:
        files[f"the file of {config.loss_type}"] = Path(config.loss_type.rpartition(":")[0])
    for name, one in rewards.items():
        written = getattr(sys.modules.get(one.__module__), "__file__", None) if callable(one) else None
        if written:
            files[f"the file of {name}"] = Path(written)
    program = {f"the fingerprint of {name}": fingerprint(path.read_bytes()) for name, path in files.items()}
    versions = {f"the version of {name}": version(name) for name in LIBRARIES}
    return settings | {"deepspeed": ds_config} | problems | versions | program


def check_alike(own: Mapping[str, Any]) -> None:
    """Raises ConfigError on every rank, naming the first difference, unless all have what rank 0 has."""
    everyone = gather((socket.gethostname(), dict(own)))
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"{name} is {first.get(name)!r} for rank 0 on {first_host} and {other.get(name)!r} for rank {rank} "
                    f"on {host}: give every machine the same settings, data and programs"
                )

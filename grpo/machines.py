"""What the ranks of a run must have alike, looked at before it begins. On one machine little of it can differ."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo.checkpoint import create_run
from grpo.checkpoint_list import find_checkpoint
from grpo.config import REPOSITORY, ConfigError
from grpo.metrics import gather
from grpo.protocol import fingerprint
from grpo.ranks import from_first
from grpo.records import Example
from grpo.resume import LIBRARIES
from grpo.trainer_config import TrainerConfig

# Where something is may be another place on each machine; what is there is compared, or compared by the server.
_PLACES = {
    *("model_name_or_path", "dataset_name", "deepspeed"),
    *("ref_servers", "port", "token", "token_file", "ref_ca_file"),
}


def open_run(config: TrainerConfig, rank: int) -> tuple[Path | None, Path]:
    """The checkpoint to continue from, None where the run begins, and its folder: rank 0 finds and makes them.

    Raises ConfigError on every rank: as find_checkpoint, as create_run, and where a machine does not see the folder.
    """
    opened: tuple[Path | None, Path, Path] | ConfigError | None = None
    if rank == 0:
        try:
            checkpoint = find_checkpoint(config)
            folder = create_run(config, checkpoint)
            sign = folder / f"seen-{secrets.token_hex(4)}"  # of no earlier run
            sign.touch()
            opened = checkpoint, folder, sign
        except ConfigError as error:
            opened = error
    opened = from_first(opened)
    if isinstance(opened, ConfigError):
        raise opened
    checkpoint, folder, sign = opened
    looked = gather((socket.gethostname(), str(folder.absolute()), sign.exists()))
    if rank == 0:
        sign.unlink()
    for host, path, seen in looked:
        if not seen:
            raise ConfigError(
                f"output_dir='{folder}': {host} does not see in its {path} what {looked[0][0]} wrote into it: name a "
                "folder on a disk that all machines share, at the same path on each"
            )
    return checkpoint, folder


def given(
    config: TrainerConfig, ds_config: dict[str, Any], rewards: Mapping[str, Callable | str], data: list[list[Example]]
) -> dict[str, Any]:
    """All that this rank was given and that every rank must have: settings, data, versions, the program itself."""
    settings = {name: value for name, value in asdict(config).items() if name not in _PLACES}
    problems = {
        f"the fingerprint of {what}": fingerprint(*([one.prompt, one.columns["answer"]] for one in examples))
        for what, examples in zip(("the prompts and answers", "the held-out ones"), data, strict=True)
    }
    files = {str(one.relative_to(REPOSITORY)): one for one in sorted(REPOSITORY.glob("grpo/*.py"))}
    files["grpo_ref_split.py"] = REPOSITORY / "grpo_ref_split.py"
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

"""Checks before a run: that all ranks see the same folder, take the same checkpoint, and have the same inputs, and that
the checkpoint is of a run with these data and settings."""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.config.fields import PACKAGE, PROGRAMS
from grpo.config.trainer import RecordSection, TrainerConfig
from grpo.data.dataset import weights_of
from grpo.data.records import Example
from grpo.run import run_folder
from grpo.run.collective import from_first, gather, on_first
from grpo.wire.health import fingerprint
from grpo.wire.picture_files import EncodedPicture, key_of, pictures_of

log = logging.getLogger(__name__)

LIBRARIES = "torch", "transformers", "deepspeed"

# The settings that may differ when a run resumes. They change no number, or (the second line) only its rounding.
FREE = {
    *("model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint", "dry_run"),
    *("micro_batch_tokens", "sequence_parallel_size", "gradient_checkpointing", "tiled_mlp", "activation_offloading"),
    *("sequences_per_generate", "cuda_graphs", "fused_kernels"),
    *("sampler", "pool", "pool_deadline", "replay"),
    *("save_steps", "save_total_limit", "report_to", "merge_on_save", "save_system_prompt", "deepspeed"),
    *("push_to_hub", "hub_strategy", "hub_model_id", "hub_private_repo", "callback"),
    *("eval_steps", "eval_samples", "num_generations_eval", "eval_temperature", "log_eval_completions"),
    *("metric_for_best_model", "load_best_model_at_end"),
    *("ref_servers", "teacher_servers", "host", "port", "token_file", "ref_ca_file", "allow_other_reference"),
    *("ref_startup_timeout", "ref_request_timeout", "ref_deadline", "reward_timeout", "tool_timeout"),
    *("agent_python", "agent_timeout", "agent_memory", "max_concurrent_episodes"),
}

# The settings that may name a Python file of the user's, as path/to/file.py:function.
USER_FILES = {"reward_funcs", "tools", "environment", "agent", "loss_type", "advantage_estimator"}
_LENGTH = "max_steps", "num_train_epochs"


class RunDescription:
    """What every rank knows of a run before a model is loaded."""

    def __init__(self, config: TrainerConfig, examples: list[Example], *, ranks: int, stage: int = 2):
        self.config = config
        # Two prompts of one text may have different pictures.
        prompts = [key_of(row.prompt_ids).hex() if pictures_of(row.prompt_ids) else row.prompt for row in examples]
        in_few_bits = config.quantization != "none" or config.optim == "adamw_8bit"
        self.fields: dict[str, Any] = {
            "format": run_folder.FORMAT,
            "ranks": ranks,
            "stage": stage,  # of ZeRO
            "prompts": [len(prompts), fingerprint(prompts)],
            # The arguments of rewards and environments, with the gold answers.
            "columns": {name: _sum_of_column(examples, name) for name in (examples[0].columns if examples else ())},
            "weights": weights_of(config),
            "settings": {name: value for name, value in asdict(config).items() if name not in FREE},
            "directory": os.getcwd(),
            "versions": {name: version(name) for name in (*LIBRARIES, *(["bitsandbytes"] if in_few_bits else []))},
        }
        """the part that a checkpoint keeps, for JSON"""

    def identity(self, model: str) -> str:
        """Return 16 hex digits of model, prompts and settings: equal for every start of a run, different between runs
        with different completions. `model` is the fingerprint of the initial policy."""
        # A default is left out, so that a setting that is added later changes no run's.
        defaults = self._defaults()
        settings = {name: value for name, value in self.fields["settings"].items() if value != defaults[name]}
        if self._longer_changes_nothing():
            for name in _LENGTH:
                settings.pop(name, None)
        return fingerprint(model, self.fields["prompts"], settings)

    def check(self, checkpoint: Path, saved: dict[str, Any]) -> None:
        """Raise ConfigError if the checkpoint, whose progress.json is `saved`, has another format, data or settings."""
        remedy = "use the version of this program that wrote it"
        check, ours = partial(check_same, checkpoint), self.fields
        check("the checkpoint's format", before=saved["format"], now=ours["format"], remedy=remedy)
        # Settings first: some change the prompts. A setting that is newer than the checkpoint had its default.
        before = self._defaults() | saved["settings"]
        for name in sorted(saved["settings"].keys() | ours["settings"].keys()):
            if name in _LENGTH and self._longer_changes_nothing():
                continue
            if name == "warmup_steps" and self.config.lr_scheduler_type == "constant":  # which has none
                continue
            now = ours["settings"].get(name)
            if name in USER_FILES:
                there, here = _absolute(before[name], saved["directory"]), _absolute(now, ours["directory"])
                if there == here:
                    continue
            check(name, before=before[name], now=now, remedy="leave it as it was")
        remedy = "name a DeepSpeed file with the stage that it had"
        check("the stage of ZeRO", before=saved.get("stage", 2), now=ours["stage"], remedy=remedy)
        remedy = "set dataset_name to the same data, or begin a new run"
        check("the prompts' count and sum", before=saved["prompts"], now=ours["prompts"], remedy=remedy)
        before, now = saved["columns"], ours["columns"]
        for name in sorted(before.keys() | now.keys()):
            what = f"the sum of the column {name!r}"
            check(what, before=before.get(name), now=now.get(name), remedy=remedy)
        check("the weights of datasets", before=saved["weights"], now=ours["weights"], remedy=remedy)
        if saved["ranks"] != ours["ranks"] and self.config.optim == "adamw_8bit":
            raise ConfigError(
                f"resume_from_checkpoint='{checkpoint}': it is of {saved['ranks']} ranks, and AdamW's moments in 8 "
                f"bits cannot be rearranged for {ours['ranks']}: start it with {saved['ranks']}"
            )

    def _longer_changes_nothing(self) -> bool:
        """Tell whether the steps are the same with another max_steps: the learning rate does not depend on it."""
        config = self.config
        return config.lr_scheduler_type.startswith("constant") and not 0 < config.warmup_steps < 1

    def _defaults(self) -> dict[str, Any]:
        """Return each setting's default; of a list [], as only lists with that default are newer than a checkpoint."""
        return {field.name: [] if field.default is MISSING else field.default for field in fields(self.config)}


def check_same(checkpoint: Path, what: str, *, before: Any, now: Any, remedy: str) -> None:
    if before != now:
        raise ConfigError(
            f"resume_from_checkpoint='{checkpoint}': {what} is {before!r} there and {now!r} here: {remedy}"
        )


def _absolute(names: str | list[str] | None, directory: str) -> str | list[str] | None:
    if isinstance(names, list):
        return [_absolute(name, directory) for name in names]
    return os.path.realpath(os.path.join(directory, names)) if names and ".py:" in names else names


def _sum_of_column(examples: list[Example], name: str) -> str:
    """Return a fingerprint of a column's values that is the same in every process."""
    values = [example.columns.get(name) for example in examples]
    return fingerprint(json.dumps(values, sort_keys=True, default=_as_text).encode())


def _as_text(value: Any) -> str:
    if isinstance(value, EncodedPicture):
        value = value.file
    if hasattr(value, "tobytes"):  # an array of numpy, or a PIL image
        value = value.tobytes()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))  # an address differs between processes


# Settings that say where something is may differ between machines. Its content is compared, here or by the server.
_PLACES = {
    *("model_name_or_path", "dataset_name", "deepspeed"),
    *("ref_servers", "port", "token_file", "ref_ca_file", "pool", "replay"),
}


def find_run(config: TrainerConfig, rank: int, world_size: int) -> tuple[Path | None, Path, bool]:
    """Return (checkpoint to continue from, None for a new run; run folder; whether the run is done). Rank 0 alone finds
    the checkpoint, after it has locked the folder. The folder of a new run is made later, so that a start that fails or
    is killed leaves none. Raises ConfigError on every rank: for the folder or its checkpoints, if a machine does not
    see it, and if a run that has ended would be erased."""

    def mark() -> tuple[Path, Path]:
        folder = run_folder.find_run_folder(config)
        if folder.exists() or config.resume_from_checkpoint is not None:
            run_folder.make_run_folder(config, folder)
            # Now and not when it is made for good: one that comes while the model loads is for this trainer.
            run_folder.forget_stop(folder)
        # A new name: an older file may be seen on another disk.
        marker = run_folder.nearest_existing(folder) / f"seen-{secrets.token_hex(4)}"
        with run_folder.writable("output_dir", folder):
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
    steps = from_first(run_folder.finished_steps(folder) if config.resume_from_checkpoint == "last" else 0)
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
    Raises ConfigError on every rank as run_folder.find_checkpoints, and if all are damaged."""
    damaged: dict[Path, str] = {}
    for checkpoint in on_first(rank, lambda: run_folder.find_checkpoints(config)):
        log.info("checking the files of %s", checkpoint)
        reason = next(filter(None, gather(run_folder.damage(checkpoint, rank, world_size))), None)
        if reason is None:
            on_first(rank, partial(_rename_damaged, damaged, checkpoint))
            return checkpoint
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
        way_on = f"It is called {new_path.name} now, and the run goes on from {used.name}"
        log.warning("%s is damaged: %s. %s", checkpoint, reason, way_on)
        with run_folder.writable("output_dir", checkpoint.parent):
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
    files = {str(path.relative_to(PACKAGE.parent)): path for path in sorted(PACKAGE.rglob("*.py"))}
    files["grpo_ref_split.py"] = PROGRAMS / "grpo_ref_split.py"
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

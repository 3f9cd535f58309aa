"""A run's folder, and folders in it that are written whole or not at all, even if the process or machine dies."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.command_line import write_config
from grpo.config.errors import ConfigError
from grpo.config.evaluate import EvaluateConfig
from grpo.config.records import RecordSection
from grpo.config.trainer import TrainerConfig
from grpo.model.answering import write_answering
from grpo.model.lora import merged
from grpo.rollouts.chat_template import with_system_prompt
from grpo.run.checkpoint_files import checkpoints, find_checkpoints, write_progress
from grpo.run.json_lines import read_record
from grpo.run.lock import lock_run
from grpo.run.model_card import write_card


class SaveError(RuntimeError):
    """A failed write of what a run leaves. The message says where and why; nothing half written stays behind."""


def find_run_folder(config: RecordSection) -> Path:
    """Return the run's folder, which may not be there yet.

    Raises ConfigError as find_checkpoints, where the folder cannot be written and, unless the run may be resumed, where
    the folder has results.
    """
    checkpoint = next(iter(find_checkpoints(config)), None)
    folder = checkpoint.parent if checkpoint else Path(config.output_dir or time.strftime("runs/%Y%m%d-%H%M%S"))
    if config.resume_from_checkpoint is None:
        check_unused("output_dir", folder, may_have_begun=True)
    check_writable("output_dir", folder)
    return folder


def make_run_folder(config: RecordSection, folder: Path) -> None:
    """Make the run's folder, if it is not there, and lock it for this process.

    Raises ConfigError where it cannot be written, where another trainer writes there, and where it has results by now.
    """
    with writable("output_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock_run(folder)
    if config.resume_from_checkpoint is None:
        check_unused("output_dir", folder, may_have_begun=True)


def new_folder(field: str, folder: Path, config: EvaluateConfig) -> None:
    """Make a folder for results and write the resolved config into it.

    Raises ConfigError where the folder cannot be written or has results.
    """
    check_unused(field, folder)
    with writable(field, folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / "config.yaml")


def check_writable(field: str, folder: Path) -> None:
    """Raise ConfigError where the folder cannot be made or nothing can be written into it. Makes nothing."""
    with writable(field, folder), tempfile.TemporaryFile(dir=nearest_existing(folder)):
        pass


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


@contextmanager
def writable(field: str, folder: Path) -> Iterator[None]:
    """Raise ConfigError where the body of the `with` cannot write into the folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{field}='{folder}': {error.strerror}: name a folder that can be written") from error


def check_unused(field: str, folder: Path, may_have_begun: bool = False) -> None:
    """Raise ConfigError where the folder has an evaluation or a run; with `may_have_begun`, a run that did a step."""
    metrics = folder / "metrics.jsonl"
    has_run = _has_step(metrics) if may_have_begun else metrics.exists()
    if has_run or checkpoints(folder) or (folder / "metrics.json").exists():
        raise ConfigError(f"{field}='{folder}': it holds a run or an evaluation: name another folder, or delete it")


def _has_step(metrics: Path) -> bool:
    """Tell whether a step is recorded there, beside the evaluation before the first."""
    if not metrics.exists():
        return False
    with open(metrics, "rb") as lines:
        return any(record["step"] > 0 for record in map(read_record, lines) if record is not None)


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, config: TrainerConfig, step: int = 0
) -> None:
    """Write model and tokenizer as `from_pretrained` reads them, how they were trained to answer, a model card, and the
    `step` of the run that they are of.

    Of a model with an adapter this writes the adapter alone, or with `merge_on_save` the whole model, merged. Raises
    SaveError; `folder` is then not there.
    """
    with whole_folder(folder, "model") as unfinished:
        write_model(model, tokenizer, unfinished, config, step, config.hub_model_id or "MODEL")
        write_progress(unfinished, {"step": step})


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: TrainerConfig,
    step: int,
    name: str = "MODEL",
) -> None:
    """Write as save_model does, but into a folder that may stay half written. Raises what the libraries raise.

    `name` is what the card calls the model.
    """
    if config.merge_on_save:
        model = merged(model)
    if hasattr(model, "peft_config"):
        model.save_pretrained(folder)
    else:
        # ZeRO keeps all weights in one storage, and transformers would copy each that shares its storage. DLPack gives
        # the same memory a storage of its own. Of weights on a GPU one shard at a time is in the host's memory.
        weights = {name: torch.from_dlpack(weight.detach()) for name, weight in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    if config.save_system_prompt:
        tokenizer = with_system_prompt(tokenizer, config.system_prompt)
    tokenizer.save_pretrained(folder)
    write_answering(config, folder)
    write_card(folder, config, model, tokenizer.chat_template is not None, step, name)


@contextmanager
def whole_folder(folder: Path, what: str) -> Iterator[Path]:
    """Yield a folder to write `what` into, and give it its name when all is written.

    Raises SaveError for whatever goes wrong inside; `folder` is then not there.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        put_in_place(unfinished, folder)
    # safetensors reports a full disk as an error of its own, and transformers as several: whatever it was, nothing half
    # written may stay behind.
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise SaveError(f"the {what} could not be saved to {folder}: {error}: nothing was left there") from error


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Give a written folder its name. An older folder of that name stays readable until then."""
    to_disk(unfinished)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        os.replace(folder, old)
    os.replace(unfinished, folder)
    to_disk(folder.parent, deep=False)
    shutil.rmtree(old, ignore_errors=True)


def to_disk(top: Path, deep: bool = True) -> None:
    """Wait until a file, or the names in a folder and with `deep` all its content, would survive a power cut."""
    for path in [*(top.rglob("*") if deep else ()), top]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

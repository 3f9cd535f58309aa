"""A run's folder, and what is saved in it: whole or not at all, whatever kills the process or the machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.adapters import merged
from grpo.answer_config import EvaluateConfig
from grpo.config import ConfigError, write_config
from grpo.trainer_config import TrainerConfig


class SaveError(RuntimeError):
    """A model could not be written. The message says where, why, and that nothing half-written was left."""


def create_run(config: TrainerConfig, checkpoint: Path | None = None) -> Path:
    """The run's folder: that of the checkpoint it continues from, else a new one. Raises ConfigError as new_folder."""
    if checkpoint is not None:
        return checkpoint.parent
    name = config.output_dir or time.strftime("runs/%Y%m%d-%H%M%S")
    return new_folder("output_dir", name, config, again=config.resume_from_checkpoint is not None)


def new_folder(field: str, name: str, config: TrainerConfig | EvaluateConfig, again: bool = False) -> Path:
    """Make a folder for results and write the resolved config into it.

    Raises ConfigError where it cannot be written or, unless `again`, has results.
    """
    folder = Path(name)
    if not again:
        check_unused(field, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / "config.yaml")
    except OSError as error:
        raise ConfigError(f"{field}='{folder}': {error.strerror}: name a folder that can be written") from error
    return folder


def check_unused(field: str, folder: Path) -> None:
    """Raises ConfigError where the folder has results."""
    if any((folder / results).exists() for results in ("metrics.jsonl", "metrics.json")):
        raise ConfigError(f"{field}='{folder}': it holds a run or an evaluation: name another folder, or delete it")


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, merge_adapter: bool = False
) -> None:
    """Write model and tokenizer as `from_pretrained` reads them. Raises SaveError; `folder` is then not there.

    Of a model with an adapter only the adapter is written, or with `merge_adapter` the whole, merged.
    """
    with whole_folder(folder, "model") as unfinished:
        write_model(model, tokenizer, unfinished, merge_adapter)


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, merge_adapter: bool) -> None:
    """As save_model, file by file, into a folder that may be left half written. Raises what the libraries raise."""
    if merge_adapter:
        model = merged(model)
    if hasattr(model, "peft_config"):
        model.save_pretrained(folder)
    else:
        # ZeRO has all weights in one storage, and transformers would copy each that shares one with others. From DLPack
        # comes the same memory as a storage of its own. Of weights on a GPU one shard is in the host's memory.
        weights = {name: torch.from_dlpack(weight.detach()) for name, weight in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    tokenizer.save_pretrained(folder)


@contextmanager
def whole_folder(folder: Path, what: str) -> Iterator[Path]:
    """A folder to write `what` into, which takes its name when all is written.

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
    """Give a written folder its name. One of that name is there until then."""
    to_disk(unfinished)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        os.replace(folder, old)
    os.replace(unfinished, folder)
    to_disk(folder.parent, deep=False)
    shutil.rmtree(old, ignore_errors=True)


def to_disk(top: Path, deep: bool = True) -> None:
    """Wait until a file, or a folder's names and with `deep` all that is in it, would outlive a power cut."""
    for path in [*(top.rglob("*") if deep else ()), top]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""Folders that are written whole or not at all, even if the process or machine dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.trainer import TrainerConfig
from grpo.model.answering import write_answering
from grpo.model.lora import merged
from grpo.model.pictures import PictureProcessor
from grpo.rollouts.chat_template import with_system_prompt
from grpo.run.checkpoint_files import write_progress
from grpo.run.model_card import write_card
from grpo.run.run_folder import nearest_existing


class SaveError(RuntimeError):
    """A failed write of what a run leaves. The message says where and why; nothing half written stays behind."""


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: TrainerConfig,
    step: int = 0,
    processor: PictureProcessor | None = None,
) -> None:
    """Write model, tokenizer and processor as `from_pretrained` reads them, how they were trained to answer, a model
    card, and the `step` of the run that they are of.

    Of a model with an adapter this writes the adapter alone, or with `merge_on_save` the whole model, merged. Raises
    SaveError; `folder` is then not there.
    """
    with whole_folder(folder, "model") as unfinished:
        write_model(model, tokenizer, unfinished, config, step, config.hub_model_id or "MODEL", processor)
        write_progress(unfinished, {"step": step})


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: TrainerConfig,
    step: int,
    name: str = "MODEL",
    processor: PictureProcessor | None = None,
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
    if processor is not None:
        processor.save(folder)
    write_answering(config, folder)
    has_template, takes_pictures = tokenizer.chat_template is not None, processor is not None
    write_card(folder, config, model, has_template, step, name, takes_pictures)


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
        reason = f"{error}{describe_room(folder)}"
        shutil.rmtree(unfinished, ignore_errors=True)
        raise SaveError(f"the {what} could not be saved to {folder}: {reason}: nothing was left there") from error


def describe_room(folder: Path) -> str:
    """Say how full the folder's disk is, for the end of a failed write's reason, which may not tell of a full disk."""
    try:
        return f" ({shutil.disk_usage(nearest_existing(folder)).free >> 20} MiB of its disk are free)"
    except OSError:  # the disk itself is gone, which the reason tells
        return ""


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

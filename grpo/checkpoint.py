"""A run's folder and the models saved in it: whole or not at all."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.adapters import merged
from grpo.answer_config import EvaluateConfig
from grpo.config import ConfigError, write_config
from grpo.trainer_config import TrainerConfig


class SaveError(RuntimeError):
    """A model could not be written. The message says where, why, and that nothing half-written was left."""


def create_run(config: TrainerConfig) -> Path:
    """Make the run's folder. Raises ConfigError as new_folder."""
    return new_folder("output_dir", config.output_dir or time.strftime("runs/%Y%m%d-%H%M%S"), config)


def new_folder(field: str, name: str, config: TrainerConfig | EvaluateConfig) -> Path:
    """Make a folder for results and write the resolved config into it. Raises ConfigError where it has results."""
    folder = Path(name)
    if any((folder / results).exists() for results in ("metrics.jsonl", "metrics.json")):
        raise ConfigError(f"{field}='{folder}': it holds a run or an evaluation: name another folder, or delete it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / "config.yaml")
    except OSError as error:
        raise ConfigError(f"{field}='{folder}': {error.strerror}: name a folder that can be written") from error
    return folder


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, merge_adapter: bool = False
) -> None:
    """Write model and tokenizer as `from_pretrained` reads them. Raises SaveError; `folder` is then not there.

    Of a model with an adapter only the adapter is written, or with `merge_adapter` the whole, merged.
    """
    with whole_folder(folder, "model") as unfinished:
        (merged(model) if merge_adapter else model).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


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
        os.replace(unfinished, folder)
    # safetensors reports a full disk as an error of its own, and transformers as several: whatever it was, nothing half
    # written may stay behind.
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise SaveError(f"the {what} could not be saved to {folder}: {error}: nothing was left there") from error

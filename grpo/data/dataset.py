"""Loads the rows of a dataset: a file, a folder of files, or a dataset of the hub."""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.config.sampling_settings import AnsweringConfig
from grpo.model.hub import can_ask_hub

_FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_SHOWN = 8  # files of a folder that an error names
_DEFAULT_HUB_CONFIG = {"openai/gsm8k": "main"}
# What `datasets` says of a JSON and a Parquet file without a row.
_WITHOUT_ROWS = "corresponds to no data", "BatchSize must be greater than 0"


def load_rows(config: AnsweringConfig, split: str):
    """Load a split as a `datasets.Dataset`. Raises ConfigError, naming the faulty line, if it cannot be loaded."""
    import datasets

    name, files = config.dataset_name, _files(config, split)
    config.check(
        not files or config.dataset_config is None,
        dataset_config=f"dataset_name {name} is a path, and only datasets of the hub have configurations: leave it out",
    )
    datasets.disable_progress_bars()
    logging.getLogger("datasets").handlers.clear()  # with its own handler and ours each line would be there twice
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # the error has the same text
    try:
        if files:
            kind = _FILE_TYPES[files[0].suffix]
            paths, options = [glob.escape(str(file)) for file in files], _csv_options(config) if kind == "csv" else {}
            return datasets.load_dataset(kind, data_files=paths, split="train", **options)
        if not can_ask_hub("dataset_name", name):
            datasets.config.HF_HUB_OFFLINE = True
        return datasets.load_dataset(name, config.dataset_config or _DEFAULT_HUB_CONFIG.get(name), split=split)
    except ConfigError:
        raise
    except datasets.exceptions.DatasetGenerationError as error:
        raise _cannot_load(config, split, error.__cause__ or error) from error
    # `datasets` raises StopIteration for an empty file, RecursionError for JSON that is too deep.
    except (OSError, ValueError, StopIteration, RecursionError, datasets.exceptions.DatasetsError) as error:
        raise _cannot_load(config, split, error) from error


def _csv_options(config: AnsweringConfig) -> dict[str, Any]:
    """Return how pandas reads CSV: prompts and gold answers as the text that they are, so that 007 stays 007, and NA a
    word; an empty cell of another column as null."""
    columns = config.dataset_prompt_column, config.dataset_answer_column
    return {"converters": dict.fromkeys(columns, str), "keep_default_na": False, "na_values": [""]}


def decoded(config: AnsweringConfig, split: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows. Raises ConfigError if a text is not UTF-8, which shows only when it is read."""
    try:
        yield from rows
    except UnicodeDecodeError as error:
        raise _cannot_load(config, split, error) from error


def _cannot_load(config: AnsweringConfig, split: str, error: BaseException) -> ConfigError:
    files, reason = _files(config, split), " ".join(str(error).split())[:300]
    if any(words in reason for words in _WITHOUT_ROWS):
        reason = "there is no row in it"
    remedy = (
        "give a local file or folder, or a hub id that this machine can reach, and dataset_config if it has several "
        "configurations"
    )
    if files:
        reason = next(filter(None, map(_fault, files)), f"{', '.join(file.name for file in files)}: {reason}")
        remedy = "correct the file, or name another one"
    return ConfigError(f"dataset_name={config.dataset_name!r}: split {split!r} cannot be loaded ({reason}): {remedy}")


def _fault(file: Path) -> str:
    """Return the fault of a JSON file or of the first wrong line of JSON Lines; empty without a fault."""
    if file.stat().st_size == 0:
        return f"{file.name} is empty"
    if file.suffix == ".json":
        try:
            json.loads(file.read_bytes())
            return ""
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # of JSON Lines, after their first line
                return f"{file.name}, line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError) as error:
            return f"{file.name}: {error}"
    with open(file, "rb") as lines:
        for number, line in enumerate(lines if _FILE_TYPES[file.suffix] == "json" else (), 1):
            try:
                row = json.loads(line) if line.strip() else {}
                json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is no text
                reason = "" if isinstance(row, dict) else "not a JSON object"
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", str(error))
            if reason:
                return f"{file.name}, line {number}: {reason}"
    return ""


def _files(config: AnsweringConfig, split: str) -> list[Path]:
    """Return the files of a split: the file itself, or those in a folder called SPLIT.* or SPLIT-*.*, of one type.

    The list is empty if the dataset is no local path. Raises ConfigError if the split has no such files. This is not
    left to `datasets`, which takes every file for the test split if the folder's path has "test" in it.
    """
    path = Path(config.dataset_name).expanduser()
    if not path.exists():
        return []
    if path.is_file():
        if split != config.dataset_train_split:
            raise ConfigError(
                f"dataset_test_split={split!r}: {path} is a single file: give a folder with {split}{path.suffix} "
                f"beside {config.dataset_train_split}{path.suffix}, or set eval_steps to 0"
            )
        files = [path]
    else:
        named = sorted(file for pattern in (f"{split}.*", f"{split}-*.*") for file in path.rglob(pattern))
        # A folder of pictures beside the rows may have train-1.png.
        files = [file for file in named if file.suffix in _FILE_TYPES] or named
    types = ", ".join(_FILE_TYPES)
    if not files:
        others = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
        found = ", ".join([*others[:_SHOWN], *(["..."] if len(others) > _SHOWN else [])])
        is_train = split == config.dataset_train_split
        raise ConfigError(
            f"dataset_name='{path}': split {split!r} needs files of one type, {types}, called {split}.* or {split}-*.*"
            f"; found none{', but ' if others else ''}{found}: rename them, or set "
            f"dataset_{'train' if is_train else 'test'}_split to what their names begin with"
            + ("" if is_train else ", or train with eval_steps 0")
        )
    if len({file.suffix for file in files}) > 1 or files[0].suffix not in _FILE_TYPES:
        raise ConfigError(
            f"dataset_name='{path}': split {split!r} needs files of one type, {types}; found "
            f"{', '.join(file.name for file in files)}: convert or remove those of another type"
        )
    return files

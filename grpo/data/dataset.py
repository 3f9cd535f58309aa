"""Loads the rows of a dataset: a file, a folder of files, a dataset of the hub, the tasks of an environment, or several
of these as one, which a YAML file lists (docs/data.md)."""

import copy
import glob
import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpo.config.command_line import load_yaml
from grpo.config.errors import ConfigError, did_you_mean, one_line
from grpo.config.fields import PACKAGE
from grpo.config.sampling_settings import VERIFIERS, AnsweringConfig, is_adapted
from grpo.model.hub import can_ask_hub

TRL_COLUMN = "prompt"  # what TRL's datasets call the prompt: taken if there is no column of the default name
FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_DEFAULT_HUB_CONFIG = {"openai/gsm8k": "main"}
_SAVED = "state.json", "dataset_info.json"  # the files by which a folder is known that Dataset.save_to_disk wrote
# What `datasets` says of a JSON and a Parquet file without a row.
_WITHOUT_ROWS = "corresponds to no data", "BatchSize must be greater than 0"


def load_rows(config: AnsweringConfig, split: str):
    """Load a split as a `datasets.Dataset`; with eval_holdout a part of the training split, the same rows whatever the
    seed. Raises ConfigError, naming the faulty line, if it cannot be loaded."""
    if config.eval_holdout == 0:
        return _load_split(config, split)
    remedy = f"dataset_test_split={config.dataset_test_split!r} is the split to train on: name another"
    config.check(config.dataset_test_split != config.dataset_train_split, eval_holdout=remedy)
    rows = _load_split(config, config.dataset_train_split)
    size = math.ceil(config.eval_holdout * (len(rows) if config.eval_holdout < 1 else 1))
    config.check(size < len(rows), eval_holdout=f"{config.dataset_name} has {len(rows)} rows: leave some to train on")
    order = np.random.default_rng(0).permutation(len(rows))
    return rows.select(np.sort(order[size:] if split == config.dataset_train_split else order[:size]))


def _load_split(config: AnsweringConfig, split: str):
    import datasets

    if is_adapted(config.dataset_name):
        _check_one_split(config, split, "environment", "")
        return datasets.Dataset.from_list(_read_tasks(config))
    name, files = config.dataset_name, _files(config, split)
    part = split.removeprefix(_without_part(split))
    config.check(
        not files or config.dataset_config is None,
        dataset_config=f"dataset_name {name} is a path, and only datasets of the hub have configurations: leave it out",
    )
    datasets.disable_progress_bars()
    logging.getLogger("datasets").handlers.clear()  # with its own handler and ours each line would be there twice
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # the error has the same text
    if not files and not can_ask_hub("dataset_name", name):
        datasets.config.HF_HUB_OFFLINE = True
    try:
        if files:
            kind, paths, options = FILE_TYPES[files[0].suffix], [glob.escape(str(file)) for file in files], {}
            if kind == "csv":  # prompts and gold answers are text (007, NA), an empty cell elsewhere is null
                columns = config.dataset_prompt_column, TRL_COLUMN, config.dataset_answer_column
                options = {"converters": dict.fromkeys(columns, str), "keep_default_na": False, "na_values": [""]}
            return datasets.load_dataset(kind, data_files=paths, split=f"train{part}", **options)
        return datasets.load_dataset(name, config.dataset_config or _DEFAULT_HUB_CONFIG.get(name), split=split)
    except datasets.exceptions.DatasetGenerationError as error:
        raise _cannot_load(config, split, error.__cause__ or error) from error
    # `datasets` raises StopIteration for an empty file, RuntimeError for a script and for JSON that is too deep.
    except (OSError, ValueError, StopIteration, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _cannot_load(config, split, error) from error


def _read_tasks(config: AnsweringConfig) -> list[dict[str, str]]:
    """Return a row of each task of an environment of another package: "prompt", for people, and "task", which the
    program gets. The interpreter that has the package prints them. Raises ConfigError if the environment cannot be
    opened, or the run has another one: its code is the user's to name."""
    name = config.dataset_name
    is_played = config.agent == name
    config.check(is_played, dataset_name=f"its tasks are played by their environment: add --environment {name}")
    python = config.agent_python or sys.executable
    command = [python, str(PACKAGE / "agents/adapters/verifiers_episodes.py"), name.removeprefix(VERIFIERS)]
    try:
        printed = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"agent_python={python!r}: it cannot be started ({error.strerror}): name another") from None
    if printed.returncode:
        reason = f"{python} cannot open it ({one_line(printed.stderr.strip().rpartition(chr(10))[2])})"
        remedy = "install verifiers and the package there, or name their interpreter as agent_python"
        raise ConfigError(f"environment={name!r}: {reason}: {remedy}")
    rows = [json.loads(line) for line in printed.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise ConfigError(f"environment={name!r}: it has no tasks: correct its settings, or take another")
    return rows


def decoded(config: AnsweringConfig, split: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows. Raises ConfigError if a text is not UTF-8, which shows only when it is read."""
    try:
        yield from rows
    except UnicodeDecodeError as error:
        raise _cannot_load(config, split, error) from error


def _cannot_load(config: AnsweringConfig, split: str, error: BaseException) -> ConfigError:
    files, reason = _files(config, split), one_line(error)
    if not reason or any(words in reason for words in _WITHOUT_ROWS):
        reason = "there is no row in it"
    remedy = "give a local path, or a hub id within reach, and dataset_config if it has several configurations"
    if files:
        reason = next(filter(None, map(_fault, files)), f"{', '.join(file.name for file in files)}: {reason}")
        remedy = "correct the file, or name another one"
    return ConfigError(f"dataset_name={config.dataset_name!r}: split {split!r} cannot be loaded ({reason}): {remedy}")


def _fault(file: Path) -> str:
    """Return the first wrong line of a file of JSON, an array or JSON Lines; empty without one."""
    content = file.read_bytes() if FILE_TYPES[file.suffix] == "json" else b""
    parts = [content] if content.lstrip().startswith(b"[") else content.split(b"\n")
    for number, part in enumerate(parts, 1):
        try:
            # Half of a surrogate pair is no text.
            json.dumps(json.loads(part) if part.strip() else {}, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            line = number + getattr(error, "lineno", 1) - 1
            return f"{file.name}, line {line}: {getattr(error, 'msg', error)}"
    return ""


def _without_part(split: str) -> str:
    """Return the name of a split in `datasets`' notation: of train[:30] or train[10%:] that is train."""
    return split.partition("[")[0]


def is_one_split(name: str) -> bool:
    """Tell whether a dataset has no splits: it is a file, a saved Dataset's folder, or the tasks of an environment."""
    path = Path(name).expanduser()
    return is_adapted(name) or path.is_file() or _is_saved(path)


def _check_one_split(config: AnsweringConfig, split: str, kind: str, end: str) -> None:
    """Raise ConfigError if a split is asked for that a dataset without splits has not. `end`: of a file's name."""
    trained = _without_part(config.dataset_train_split)
    remedy = f"set eval_holdout, or give a folder with {trained}{end} and {split}{end}, or set eval_steps to 0"
    if split != trained:
        reason = f"{config.dataset_name} is a single {kind}"
        raise ConfigError(f"dataset_test_split={split!r}: {reason}: {remedy}")


def _is_saved(folder: Path) -> bool:
    return all((folder / file).is_file() for file in _SAVED)


def _files(config: AnsweringConfig, split: str) -> list[Path]:
    """Return the files of a split, of one type. None if the dataset is no local path. Not left to `datasets`, which
    takes every file for the test split if the folder's path has "test" in it."""
    path, split = Path(config.dataset_name).expanduser(), _without_part(split)
    if not path.exists():
        return []
    if is_one_split(config.dataset_name):
        _check_one_split(config, split, *(("file", path.suffix) if path.is_file() else ("dataset", "")))
    if path.is_file():
        files = [path]
    elif _is_saved(path):
        files = _saved_files(config, path)
    elif _is_saved(path / split):
        files = _saved_files(config, path / split)
    elif saved := sorted(folder.name for folder in path.iterdir() if _is_saved(folder)):
        reason = f"split {split!r} is not among those that were saved, {', '.join(saved)}"
        config.refuse("dataset_name", f"{reason}: set dataset_train_split, dataset_test_split, or eval_steps to 0")
    else:
        files = _files_in(config, path, split)
    if len({file.suffix for file in files}) != 1 or files[0].suffix not in FILE_TYPES:
        found = sorted(str(file.relative_to(path.parent)) for file in [path, *path.rglob("*")] if file.is_file())
        raise ConfigError(
            f"dataset_name='{path}': split {split!r} needs files of one type, {', '.join(FILE_TYPES)}, called "
            f"{split}.* or {split}-*.*, or all in a folder {split}; found {', '.join(found[:8]) or 'none'}: rename or "
            "convert them, or set dataset_train_split, dataset_test_split, or eval_steps to 0"
        )
    return files


def _files_in(config: AnsweringConfig, path: Path, split: str) -> list[Path]:
    """Return the files of a folder that are called SPLIT.* or SPLIT-*.*, or else those in a folder SPLIT, as the hub
    converts datasets. Raises ConfigError if they are in several folders: the hub's configurations have other rows."""
    named = sorted(file for pattern in (f"{split}.*", f"{split}-*.*") for file in path.rglob(pattern))
    files = [file for file in named if file.suffix in FILE_TYPES]  # pictures beside the rows may be train-1.png
    folders = {file.parent for file in files}
    if not files:
        files = sorted(file for file in path.rglob(f"{split}/*") if file.suffix in FILE_TYPES)
        folders = {file.parents[1] for file in files}
    several = " and in ".join(sorted(map(str, folders)))
    reason = f"split {split!r} is in {several}: name one of these, or move the files together"
    config.check(len(folders) <= 1, dataset_name=reason)
    return files or named


def _saved_files(config: AnsweringConfig, folder: Path) -> list[Path]:
    """Return the files that Dataset.save_to_disk wrote into a folder, in the order of the rows."""
    try:
        state = json.loads((folder / _SAVED[0]).read_text(encoding="utf-8"))
        files = [folder / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{folder / _SAVED[0]} cannot be read ({type(error).__name__}: {one_line(error)})"
        config.refuse("dataset_name", f"{reason}: save the dataset again")
    config.check(bool(files), dataset_name=f"there is no row in {folder}: save some, or name another dataset")
    return files


_SETTINGS = {
    "path": "dataset_name",
    "name": "dataset_config",
    "split": "dataset_train_split",
    "test_split": "dataset_test_split",
    "prompt_column": "dataset_prompt_column",
    "answer_column": "dataset_answer_column",
    "image_column": "dataset_image_column",
}  # the setting that each field of an entry of a mixture's file replaces; the first three are TRL's names
_FIELDS = [*_SETTINGS, "label", "weight"]


@dataclass(frozen=True)
class Part:
    """One of the datasets that are mixed."""

    label: str  # in the column `source` and in metrics
    weight: float | None  # its share of the prompts, relative to the others'; None: as many as it has rows
    config: AnsweringConfig  # the settings, with those of the entry


def is_mixture(config: AnsweringConfig) -> bool:
    return config.dataset_name.endswith((".yaml", ".yml"))


def parts_of(config: AnsweringConfig) -> list[Part]:
    """Return the datasets of a mixture; of any other dataset itself, with an empty label. Raises ConfigError."""
    if not is_mixture(config):
        return [Part("", None, config)]
    path = Path(config.dataset_name).expanduser()
    try:
        entries = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        config.refuse("dataset_name", f"{error.strerror}: give the path of a YAML file, a list of datasets")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        config.refuse("dataset_name", f"not YAML: {one_line(error, None)}")
    is_list = isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)
    config.check(bool(is_list), dataset_name="write a list of datasets, '- path: ...' for each")
    parts = [_part(config, path.parent, number, entry) for number, entry in enumerate(entries, 1)]
    labels = [part.label for part in parts]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    config.check(twice is None, dataset_name=f"two datasets are called {twice!r}: give each a label")
    weights = [part.weight for part in parts]
    config.check(None not in weights or not any(weights), dataset_name="give every dataset a weight, or none")
    config.check(None in weights or sum(weights) > 0, dataset_name="every weight is 0: one must be above it")
    return parts


def weights_of(config: AnsweringConfig) -> dict[str, float] | None:
    """Return the weights of the datasets that are trained on, by label; None without weights. Raises ConfigError."""
    trained = [part for part in parts_of(config) if part.weight != 0 and part.config.dataset_train_split]
    weights = {part.label: part.weight for part in trained}
    return None if None in weights.values() else weights


def _part(config: AnsweringConfig, folder: Path, number: int, entry: dict[str, Any]) -> Part:
    place = f"dataset {number}"
    for name, value in entry.items():
        config.check(name in _FIELDS, dataset_name=f"{place}: {name}: no such field{did_you_mean(str(name), _FIELDS)}")
        kind = (int, float) if name == "weight" else str
        is_fit = isinstance(value, kind) and not isinstance(value, bool) and (name != "weight" or 0 <= value < 1e9)
        remedy = "use a number from 0 on" if name == "weight" else "use a text"
        config.check(is_fit, dataset_name=f"{place}: {name}={value!r}: {remedy}")
    config.check(bool(entry.get("path")), dataset_name=f"{place} has no path: add one")
    mine = copy.copy(config)
    for name, setting in _SETTINGS.items():
        if name in entry:
            setattr(mine, setting, entry[name])
    if "test_split" in entry or not mine.dataset_train_split:
        mine.eval_holdout = 0  # it names what is evaluated, or has no rows to hold out
    path = Path(entry["path"])
    beside = folder / path.expanduser()
    if beside.exists():
        mine.dataset_name = str(beside)
    name = path.stem if path.suffix in FILE_TYPES else path.name
    return Part(entry.get("label") or name, entry.get("weight"), mine)

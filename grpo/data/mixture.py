"""Several datasets as one: a YAML file that dataset_name names.

- path: openai/gsm8k        # a hub id, or a file or folder beside this file
  weight: 0.7               # its share of the prompts; without weights the rows of all are shuffled together
- path: mine.jsonl
  prompt_column: problem
  weight: 0.3
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo.config.command_line import load_yaml
from grpo.config.errors import did_you_mean, one_line
from grpo.config.sampling_settings import AnsweringConfig
from grpo.data.dataset import FILE_TYPES

_SETTINGS = {
    "path": "dataset_name",
    "name": "dataset_config",
    "split": "dataset_train_split",
    "test_split": "dataset_test_split",
    "prompt_column": "dataset_prompt_column",
    "answer_column": "dataset_answer_column",
    "image_column": "dataset_image_column",
}  # the setting that each field of an entry replaces; the first three are TRL's names
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

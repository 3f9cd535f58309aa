"""Translates the settings of other trainers into ours (`grpo init --from`). A setting that is in a file is written, or
listed with its value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import yaml

from grpo.config.command_line import check_single
from grpo.config.errors import ConfigError, one_line
from grpo.config.fields import default_of, is_met
from grpo.config.loss_settings import UNUSED_BOUNDS
from grpo.config.other_names import DEFAULTS, OTHER_MEANINGS, TABLES, Rule, Settings
from grpo.config.other_trainers import read_settings
from grpo.config.pieces import JOINS, OnlyTheScriptKnows, Parts
from grpo.config.programs import LaunchConfig
from grpo.config.python_script import Unknown

FIELDS = {each.name: each for each in fields(LaunchConfig)}


@dataclass(frozen=True)
class Translation:
    settings: Settings  # ours; dataset_name is a list of entries, if there are several datasets
    lost: dict[str, tuple[str, str]]  # settings without a counterpart, each with its value, and a hint or ""
    files: list[Path]  # that were read


def translate(trainer: str, path: Path) -> Translation:
    """Read another trainer's YAML, Python script or notebook, or shell command. Raises ConfigError if the file cannot
    be read, or has nothing of that trainer."""
    table = TABLES[trainer]
    if trainer in ("trl", "simple_grpo"):  # which have names of ours
        ours = FIELDS.keys() - OTHER_MEANINGS - table.keys()
        table = table | {name: (name, None) for name in ours}
    try:
        given, files = read_settings(trainer, path, table)
    except OSError as error:
        raise ConfigError(f"from='{path}': {error.strerror}: name the file of {trainer}'s settings") from error
    except ConfigError:
        raise
    except (SyntaxError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"from='{path}': it cannot be read ({one_line(error)}): correct it") from error
    parts = Parts(trainer, path, _gathered(given, table), table)
    if not parts.values and not parts.unknown:
        raise ConfigError(f"from='{path}': it has no setting of {trainer}: name another file")
    settings = {name: value for name, value in parts.values.items() if not name.startswith("_")}
    settings |= {name: value for name, value in DEFAULTS[trainer].items() if not parts.has(name)}
    for join in JOINS[trainer]:
        used = set(parts.used)
        try:
            settings |= {name: value for name, value in join(parts).items() if value is not None}
        except OnlyTheScriptKnows:
            parts.used = used  # those that nothing else uses are listed
    for name, value in settings.items():
        if name != "dataset_name":  # a list of them becomes a file
            check_single(FIELDS[name], value, f"from='{path}': ")
    parts.lose_unused()
    _drop_what_does_nothing(parts, settings)
    in_order = {name: settings[name] for name in FIELDS if name in settings}
    return Translation(settings=in_order, lost=parts.lost, files=files)


def _gathered(given: Settings, table: dict[str, Rule]) -> Settings:
    """Make one setting of the entries of a mapping, which a command gives one by one."""
    result: Settings = {}
    for name, value in given.items():
        mapping, _, entry = name.rpartition(".")
        entries = result.get(mapping, {})
        if mapping in table and isinstance(entries, dict) and not isinstance(value, Unknown):
            result[mapping] = {**entries, entry: value}
        else:
            result[name] = value
    return result


def _drop_what_does_nothing(parts: Parts, settings: Settings) -> None:
    """Take settings away that a launch would refuse, since they do nothing. List those that are given."""
    config = SimpleNamespace(**{name: default_of(each) for name, each in FIELDS.items()} | settings)
    for name, value in list(settings.items()):
        needs = FIELDS[name].metadata["needs"]
        reason = ""
        if needs and value != default_of(FIELDS[name]) and not is_met(config, needs):
            reason = f"it does nothing without {needs}"
        elif name in UNUSED_BOUNDS.get(settings.get("loss_type"), ()):
            reason = f"loss_type {settings['loss_type']} has no such clip"
        if reason:
            del settings[name]
            if name in parts.values:
                parts.lose_part(name, None, reason)

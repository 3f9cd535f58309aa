"""The common part of all programs' settings: a field with help and limits, and the checks. Field names follow TRL's
GRPOConfig, ModelConfig and ScriptArguments."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from grpo.config.errors import ConfigError, require

PACKAGE = Path(__file__).resolve().parents[1]
PROGRAMS = PACKAGE / "programs" if (PACKAGE / "programs").is_dir() else PACKAGE.parent
"""the folder of ref_server.py, grpo_ref_split.py, generate.py, reward.py, ds_config.json and configs/: within an
installed package (pyproject.toml), else the repository's root"""


def find_file(name: str | Path) -> Path:
    """Return a path or, if nothing is there, that of the file of this name that comes with the programs."""
    path, shipped = Path(name), PROGRAMS / name
    return shipped if shipped.exists() and not path.exists() else path


@dataclass(frozen=True)
class Limits:
    """The range of a number: one lower bound, and at most one upper bound."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.at_least <= number <= self.at_most and self.above < number < self.below

    def __str__(self) -> str:
        if self.above > -math.inf:
            return f"a number above {self.above}" + (f", and {self.at_most} at most" if self.at_most < math.inf else "")
        if self.below < math.inf:
            return f"a number from {self.at_least} to below {self.below}"
        if self.at_most < math.inf:
            return f"a number from {self.at_least} to {self.at_most}"
        return f"{self.at_least} or more"


def option(
    default: Any, help: str, common=False, off: str = "", may_be_empty=False, needs: str = "", **limits: float
) -> Any:
    """Return a field with its default, its line of `--help`, and the Limits of its number.

    common: show it in the short `--help`; off: the help of `--no_...`, for a switch that is on by default;
    may_be_empty: a list may have no element; needs: the setting without which this one does nothing, as the user writes
    it: "use_peft", "sampler pool", "beta above 0", "tools or environment". Limits of a list hold for its numbers.
    """
    metadata = {"help": help, "common": common, "off": off, "may_be_empty": may_be_empty, "needs": needs}
    metadata |= {"limits": Limits(**limits) if limits else None}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def is_met(config: Any, needs: str) -> bool:
    """Tell whether a setting that needs this, "sampler pool" or "tools or environment", does something. What this
    program has no setting of counts as met."""
    known = [words for need in needs.split(" or ") if hasattr(config, (words := need.split(" ", 1))[0])]
    return not known or any(_has(config, *words) for words in known)


def _has(config: Any, name: str, wanted: str = "above 0") -> bool:
    value = getattr(config, name)
    return value == wanted or (wanted == "above 0" and value not in (None, False, 0, "", "none", []))


class Section:
    """The base of all settings. A new object checks the limits of all its fields, then their needs. A subclass with a
    HEADING is a group of `--help`, of the fields that it adds, which its words name as a topic."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, limits = getattr(self, field.name), field.metadata["limits"]
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float):
                    require(-math.inf < number < math.inf, field.name, value, "use a finite number")
                    require(limits is None or number in limits, field.name, number, f"use {limits}")
        for field in fields(self):
            needs, value = field.metadata["needs"], getattr(self, field.name)
            if needs and value != default_of(field):
                remedy = f"it does nothing without {needs}: add it, or leave this out"
                require(is_met(self, needs), field.name, value, remedy)

    def read_json(self, name: str) -> None:
        """Make a dict of a setting that the command line gives as JSON. Raises ConfigError."""
        value = getattr(self, name)
        if isinstance(value, str):
            try:
                setattr(self, name, json.loads(value))
            except json.JSONDecodeError as error:
                self.refuse(name, f"{error}: write a JSON object")
        self.check(isinstance(getattr(self, name), dict | None), **{name: "write a JSON object"})

    def check(self, ok: bool, **remedy: str) -> None:
        """Raise ConfigError unless `ok`. `remedy` is one setting, with what to do about its value."""
        if not ok:
            ((field, text),) = remedy.items()
            self.refuse(field, text)

    def refuse(self, field: str, remedy: str) -> NoReturn:
        """Raise ConfigError for a setting, and say what to do."""
        raise ConfigError(f"{field}={getattr(self, field)!r}: {remedy}")

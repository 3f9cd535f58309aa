"""What the settings of every program share: a field with its help and limits, and the check of these limits.

The settings themselves are in the files beside this one. Field names follow TRL's GRPOConfig, ModelConfig and
ScriptArguments where those have the same thing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from grpo.config.errors import require

REPOSITORY = Path(__file__).resolve().parents[2]


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
        return (
            f"a number from {self.at_least} to {self.at_most}"
            if self.at_most < math.inf
            else f"{self.at_least} or more"
        )


def option(
    default: Any, help: str, common: bool = False, off: str = "", may_be_empty: bool = False, **limits: float
) -> Any:
    """Return a field with its default, its line of `--help`, and the Limits of its number.

    `common` settings are in the short `--help`. `off` is what `--no_...` does, of a switch that is on by default. The
    limits of a list are those of each number in it; it has one element at least, unless it `may_be_empty`.
    """
    metadata = {"help": help, "common": common, "off": off, "may_be_empty": may_be_empty}
    metadata["limits"] = Limits(**limits) if limits else None
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_limits(config: Any) -> None:
    """Raise ConfigError where a number of the settings is outside its field's limits, infinite or NaN."""
    for field in fields(config):
        value, limits = getattr(config, field.name), field.metadata["limits"]
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float):
                require(-math.inf < number < math.inf, field.name, value, "use a finite number")
                require(limits is None or number in limits, field.name, number, f"use {limits}")


class Section:
    """The base of all settings. Every class checks itself when it is made: first the limits of all its fields."""

    def __post_init__(self) -> None:
        check_limits(self)

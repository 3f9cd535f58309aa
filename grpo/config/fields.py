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
    default: Any,
    help: str,
    common: bool = False,
    off: str = "",
    may_be_empty: bool = False,
    needs: str = "",
    **limits: float,
) -> Any:
    """Return a field with its default, its line of `--help`, and the Limits of its number.

    `common` settings are in the short `--help`. `off` is what `--no_...` does, of a switch that is on by default. The
    limits of a list are those of each number in it; it has one element at least, unless it `may_be_empty`.
    `needs` says without what the setting does nothing, as the user writes it: "use_peft", "sampler pool", "beta above
    0", "tools or environment".
    """
    metadata = {"help": help, "common": common, "off": off, "may_be_empty": may_be_empty, "needs": needs}
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


def default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_needs(config: Any) -> None:
    """Raise ConfigError where a setting has another value than its default, and what it needs is not there.

    What a program does not have as a setting passes: its file may be another program's too.
    """
    for field in fields(config):
        needs, value = field.metadata["needs"], getattr(config, field.name)
        if needs and value != default_of(field):
            met = any(_is_met(config, *need.split(" ", 1)) for need in needs.split(" or "))
            require(met, field.name, value, f"it does nothing without {needs}: add it, or leave this out")


def _is_met(config: Any, name: str, wanted: str = "above 0") -> bool:
    value = getattr(config, name, wanted)
    return value == wanted or (wanted == "above 0" and value not in (None, False, 0, "", "none", []))


class Section:
    """The base of all settings. Every class checks itself when it is made: first the limits of all its fields, then
    what they need."""

    def __post_init__(self) -> None:
        check_limits(self)
        check_needs(self)

    def check(self, ok: bool, **remedy: str) -> None:
        """Raise ConfigError unless `ok`. `remedy` is one setting, with what to do about its value."""
        if not ok:
            ((field, text),) = remedy.items()
            require(False, field, getattr(self, field), text)

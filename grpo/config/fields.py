"""What the settings of every program share: fields, limits, errors. grpo/config/command_line.py reads them.

The settings themselves are in the files beside this one. Field names follow TRL's GRPOConfig, ModelConfig and
ScriptArguments where those have the same thing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from grpo.config.errors import require

REPOSITORY = Path(__file__).resolve().parents[2]


def option(default: Any, help: str) -> Any:
    """A field with its line of `--help`."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def require_finite(config: Any) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, list) else [value]:
            require(not isinstance(number, float) or math.isfinite(number), field.name, value, "use a finite number")

"""What the settings of every program share: fields, limits, errors. grpo/arguments.py reads them.

The settings themselves are in server_config.py, answer_config.py, loss_config.py and trainer_config.py. Field names
follow TRL's GRPOConfig, ModelConfig and ScriptArguments where those have the same thing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Optional

import yaml

TOKEN_VARIABLE = "GRPO_REF_TOKEN"
REPOSITORY = Path(__file__).resolve().parent.parent


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the field, the value and the remedy."""


def option(default: Any, help: str) -> Any:
    """A field with its line of `--help`."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass
class SharedConfig:
    """Which model, for every program."""

    _argument_group_name = "model"

    model_name_or_path: str = option(
        "Qwen/Qwen2.5-1.5B-Instruct",
        "hub id or local folder, of a model or a LoRA adapter: the trainer's first weights, the server's frozen ones, "
        "those to evaluate or talk to",
    )
    trust_remote_code: bool = option(False, "run model code that comes with the weights")
    dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "weights and forward pass; auto is bfloat16 on a GPU from Ampere on, else float32"
    )
    quantization: Literal["none", "8bit", "4bit"] = option(
        "none",
        "linear layers but the head in 8 or 4 bits, by bitsandbytes: less memory, a slightly different model; in the "
        "trainer 4bit, under an adapter (QLoRA)",
    )


@dataclass
class ConnectionSection:
    """How the server and the trainer find and trust each other."""

    _argument_group_name = "connection (server and trainer)"

    port: int = option(
        59875, "the reference server's TCP port (0 lets the system choose one, and the server says which)"
    )
    token: Optional[str] = option(
        None,
        "shared secret of server and trainer. Others see it in ps: rather use token_file or the environment variable "
        f"{TOKEN_VARIABLE}",
    )
    token_file: Optional[str] = option(None, "file that holds the token, and nothing else")

    def __post_init__(self) -> None:
        if self.token_file is not None:
            token = _read_token(self.token_file)
            require(self.token in (None, token), "token_file", self.token_file, "token says another one")
            self.token = token
        self.token = self.token or os.environ.get(TOKEN_VARIABLE) or None
        require(0 <= self.port < 65536, "port", self.port, "use a number from 0 to 65535")
        require(
            self.token is None or (self.token.isascii() and self.token.isprintable() and " " not in self.token),
            "token",
            "(hidden)",
            "it travels in an HTTP header: use printable ASCII without spaces",
        )


def require(ok: bool, field: str, value: Any, remedy: str) -> None:
    """Raises ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{field}={value!r}: {remedy}")


def require_finite(config: Any) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, list) else [value]:
            require(not isinstance(number, float) or math.isfinite(number), field.name, value, "use a finite number")


def write_config(config: SharedConfig, path: Path) -> None:
    """Write the resolved settings as YAML that `--config` reads again. The token is left out."""
    settings = {
        name: value for name, value in dataclasses.asdict(config).items() if name != "token" and value is not None
    }
    path.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _read_token(path: str) -> str:
    try:
        token = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file={path!r}: cannot be read: {error}") from error
    require(token != "", "token_file", path, "the file is empty: write the token into it")
    return token

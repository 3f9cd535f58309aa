"""Command line and YAML file -> configuration: defaults, overridden by `--config FILE.yaml`, overridden by options.

One flat YAML file serves all programs, so that they cannot disagree: each reads its own fields and passes over the
others'. A key that belongs to none is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import yaml
from transformers import HfArgumentParser

from grpo.config.connection import TOKEN_VARIABLE
from grpo.config.errors import ConfigError, program_name, say_once
from grpo.config.generation import ChatConfig, EvaluateConfig
from grpo.config.model import SharedConfig
from grpo.config.report import ReportConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig

_ConfigT = TypeVar("_ConfigT", ServerConfig, TrainerConfig, EvaluateConfig, ChatConfig, ReportConfig)
_ALL = (ServerConfig, TrainerConfig, EvaluateConfig, ChatConfig, ReportConfig)


def parse_arguments(config_class: type[_ConfigT], description: str, argv: list[str] | None = None) -> _ConfigT:
    """Read `argv` (unset: the command line). On a bad setting print one sentence and exit with 2."""
    sections = [base for base in reversed(config_class.__mro__) if "_argument_group_name" in vars(base)]
    alone = getattr(config_class, "POSITIONAL", None)
    parser = _Parser(
        sections,
        prog=program_name(),
        usage=f"%(prog)s {'RUN [RUN ...] ' if alone else ''}[--config FILE.yaml] [--field value ...]",
        description=description,
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="settings, one 'field: value' a line; for all programs")
    for short, name in getattr(config_class, "SHORT", {}).items():
        parser.add_argument(f"--{short}", dest=name, default=SUPPRESS, help=f"short for --{name}")
    if alone:
        parser.add_argument(alone, nargs="*", default=SUPPRESS, help=SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=SUPPRESS)  # the deepspeed launcher passes it
    arguments = sys.argv[1:] if argv is None else argv
    try:
        file = parser.parse_known_args(arguments)[0].config
        # The file's settings go before the command line's, so that argparse lets the latter win.
        from_file = _yaml_arguments(Path(file), config_class) if file else []
        *parsed, _, unknown = parser.parse_args_into_dataclasses(
            from_file + arguments, return_remaining_strings=True, look_for_args_file=False
        )
        if unknown:
            name = unknown[0]
            raise ConfigError(f"{name}: no such option{_did_you_mean(name.lstrip('-'), config_class)}; see --help")
        config = config_class(**{name: value for section in parsed for name, value in vars(section).items()})
    except ConfigError as error:
        parser.error(str(error))
    if any(word.split("=")[0] == "--token" for word in arguments) and os.environ.get("RANK", "0") == "0":
        print(
            f"{Path(sys.argv[0]).name}: warning: --token shows the token to everyone who can see this machine's "
            f"processes: use --token_file, or the environment variable {TOKEN_VARIABLE}",
            file=sys.stderr,
        )
    return config


class _HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: Action) -> str:
        choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
        return action.option_strings[0] + choices


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        say_once(message)
        raise SystemExit(2)


def _yaml_arguments(path: Path, config_class: type) -> list[str]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config='{path}': {error.strerror}: give the path of a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config='{path}': not YAML: {' '.join(str(error).split())}") from error
    if settings is None:
        return []
    if not isinstance(settings, dict):
        raise ConfigError(f"config='{path}': write one 'field: value' a line")
    # Not the fields' own types, which HfArgumentParser has changed by now.
    hints = {name: str(hint) for program in _ALL for name, hint in get_type_hints(program).items()}
    known = {field.name: hints[field.name] for program in _ALL for field in fields(program)}
    own = {field.name for field in fields(config_class)}
    arguments: list[str] = []
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"{path}: {name}={value!r}: no such field{_did_you_mean(str(name), *_ALL)}; see --help")
        for kind in (dict, list):
            if isinstance(value, kind) and kind.__name__ not in known[name]:
                raise ConfigError(f"{path}: {name}={value!r}: give a single value")
        if name not in own or value is None:
            continue
        if isinstance(value, list):
            arguments += [f"--{name}", *map(_word, value)]
        else:
            arguments.append(f"--{name}={_word(value)}")
    return arguments


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps({str(name): inner for name, inner in value.items()}, default=str)  # YAML has dates too
    return str(value).lower() if isinstance(value, bool) else str(value)


def _did_you_mean(name: str, *config_classes: type) -> str:
    names = [field.name for one in config_classes for field in fields(one)]
    close = difflib.get_close_matches(name.split("=")[0], names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def write_config(config: SharedConfig, path: Path) -> None:
    """Write the resolved settings as YAML that `--config` reads again. The token is left out."""
    settings = {
        name: value for name, value in dataclasses.asdict(config).items() if name != "token" and value is not None
    }
    path.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")

"""Reads settings: defaults, overridden by those saved with a model, by `--config FILE.yaml`, and by options. One flat
YAML file serves all programs: each reads its own fields, and passes over the others'."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pkgutil
import re
import sys
import textwrap
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from yaml.composer import ComposerError

from grpo.config.errors import ConfigError, did_you_mean, is_first_rank, one_line, program_name, say_once
from grpo.config.fields import default_of, find_file

COMMON, ALL = "common", "all"


class _HelpFormatter(argparse.HelpFormatter):
    """Shows `--name KIND` and the help, wrapped at the terminal's width."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return ", ".join(reversed(names)) + (f" {action.metavar}" if action.metavar else "")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs, but not indented ones, which are commands."""
        return "\n\n".join(
            paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, width, break_on_hyphens=False)
            for paragraph in text.strip().split("\n\n")
        )


def load_yaml(text: str) -> Any:
    """Parse YAML. Raises yaml.YAMLError, never another error."""
    try:
        return yaml.load(text, _Loader)
    except (RecursionError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise yaml.YAMLError(f"{error}: correct the value, or put a text in quotes") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, without aliases and equal keys."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):  # a few hundred bytes can become gigabytes
            alias = self.peek_event()
            problem = f"*{alias.anchor} stands for another place's value: write the value itself"
            raise ComposerError(None, None, problem, alias.start_mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":  # YAML's truths are on, off, yes and no too: `on: slurm`
                key.tag = "tag:yaml.org,2002:str"
            if str(key.value) in names:
                raise ComposerError(None, None, f"{key.value} stands twice: leave one of them out", key.start_mark)
            names.add(str(key.value))
        return node


_TRUTH = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)

_KINDS = {int: "INT", float: "FLOAT", str: "TEXT"}

_VALUE = "\0"
"""the beginning of a list's word from a file: a stranger's model must not bring options such as --trust_remote_code"""
_NULL = "\0null"  # a file's null: of several files, or a default that is not None, the last word counts

_ConfigT = TypeVar("_ConfigT")


def parse_arguments(
    config_class: type[_ConfigT],
    description: str,
    argv: list[str] | None = None,
    model_settings: Callable[[str, set[str], set[str]], dict[str, Any]] | None = None,
) -> _ConfigT:
    """Read `argv` (unset: the command line). On a bad setting print one sentence and exit with 2. `model_settings`
    takes a model's name, the names of the program's settings and the names that are given, and returns settings saved
    with the model; the command line and the files of `--config` win over them."""
    parser = _Parser(config_class, description)
    arguments = parser.with_truths(sys.argv[1:] if argv is None else argv)
    settings = {field.name: field for field in fields(config_class)}
    try:
        first, _ = parser.parse_known_args(arguments)
        if first.help:
            parser.end_with_help(first.help)
        from_file = []
        for name in first.config:
            words = _yaml_arguments(Path(name), settings)
            parser.source = f"{name}: "
            parser.parse_known_args(words)  # an error then names the file
            from_file += words
        parser.source = ""
        # The files' settings go before the command line's, so that argparse lets the latter win.
        parsed, unknown = parser.parse_known_args(from_file + arguments)
        if unknown:
            raise _unknown_options(unknown, config_class)
        if model_settings is not None:
            unset = object()
            given, _ = parser.parse_known_args(from_file + arguments, Namespace(**dict.fromkeys(settings, unset)))
            names = {name for name in settings if getattr(given, name) is not unset}
            saved = model_settings(parsed.model_name_or_path, set(settings), names)
            for name, value in saved.items():
                check_single(settings[name], value)
            parsed = parser.parse_args(_as_arguments(saved, settings) + from_file + arguments)
        return config_class(**{name: getattr(parsed, name) for name in settings})
    except ConfigError as error:
        parser.error(str(error))
    except argparse.ArgumentError as error:
        name = error.argument_name.split("/")[0].lstrip("-")
        is_of_value = error.message.startswith(("'", '"'))
        parser.error(f"{name}{'=' if is_of_value else ': '}{error.message}")


def _unknown_options(words: list[str], config_class: type) -> ConfigError:
    """Make the error for what argparse left over: unknown options and their values, which may be secret."""
    if words[0].endswith((".yaml", ".yml")):
        return ConfigError(f"{words[0]}: use --config {words[0]}")
    names = [word.split("=")[0] for word in words if word.startswith("--")] or words[:1]
    known = [*(field.name for field in fields(config_class)), *getattr(config_class, "SHORT", {})]
    return _no_such("option", names, known, getattr(config_class, "INSTEAD", {}))


def _no_such(kind: str, names: Iterable[str], known: Collection[str], instead: Mapping[str, str]) -> ConfigError:
    """Make the error for all unknown names, each with its replacement."""
    listed = []
    for name in names:
        plain = name.lstrip("-").replace("-", "_")
        hint = instead.get(plain) or did_you_mean(plain, known).lstrip("; ")
        listed.append(f"{name} ({hint})" if hint else name)
    return ConfigError(f"{', '.join(listed)}: no such {kind}; see --help all")


class _Parser(ArgumentParser):
    """The parser of a program's settings. Errors begin with `source`, the file that is being read."""

    source = ""

    def __init__(self, config_class: type, description: str, topic: str = ALL):
        self._config_class, positional = config_class, getattr(config_class, "POSITIONAL", None)
        super().__init__(
            prog=program_name(),
            usage=f"%(prog)s {'RUN [RUN ...]' if positional else '[--config FILE.yaml]'} [--field value ...]",
            description=description,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
            add_help=False,
            exit_on_error=False,
        )
        self._negative_number_matcher = re.compile(r"-\.?\d")  # Python's own from 3.14 on; before, it has no exponents
        group = self.add_argument_group("options")
        shows = "show the settings that most people touch, those of a topic, or all (--help all)"
        group.add_argument("--help", "-h", nargs="?", const=COMMON, metavar="[TOPIC]", help=shows)
        reads = "read settings, a line 'field: value' for each; of several files the last one wins"
        group.add_argument("--config", action="append", default=[], metavar="FILE.yaml", help=reads)
        if positional:
            self.add_argument(positional, nargs="*", default=SUPPRESS, help=SUPPRESS)
        self.add_argument("--local_rank", type=int, help=SUPPRESS)  # the deepspeed launcher passes it
        sections = [section for section in reversed(config_class.__mro__) if "HEADING" in vars(section)]
        self._topics = ", ".join(re.findall(r"\w+", section.HEADING)[0] for section in sections)
        short = {name: word for word, name in getattr(config_class, "SHORT", {}).items()}
        uncommon = getattr(config_class, "UNCOMMON", ())
        self._shown = 0
        seen: set[str] = set()
        for section in sections:
            group = self.add_argument_group(section.HEADING)
            hints = get_type_hints(section)
            is_topic = topic == ALL or topic.lower() in re.findall(r"\w+", section.HEADING.lower())
            new = [field for field in fields(section) if field.name not in seen]
            seen |= {field.name for field in new}
            for field in new:
                is_common = field.metadata["common"] and field.name not in uncommon
                shown = is_common if topic == COMMON else is_topic or topic == field.name
                self._shown += shown
                _add_option(group, field, hints[field.name], short.get(field.name), shown)
        if hidden := len(fields(config_class)) - self._shown:
            self.epilog = f"{hidden} more: '--help all' shows all, '--help TOPIC' those of a topic: {self._topics}"

    def with_truths(self, words: list[str]) -> list[str]:
        """Give a switch before a positional argument, `--serve runs/a`, its value, for which argparse takes that."""
        if not hasattr(self._config_class, "POSITIONAL"):
            return words
        switches = {name for action in self._actions if action.type is _read_truth for name in action.option_strings}
        pairs = zip(words, [*words, ""][1:], strict=True)
        return [f"{word}=true" if word in switches and after.lower() not in _TRUTH else word for word, after in pairs]

    def end_with_help(self, topic: str) -> NoReturn:
        parser = _Parser(self._config_class, self.description if topic in (COMMON, ALL) else "", topic)
        if parser._shown == 0:
            self.error(f"--help {topic}: no such topic: use all, a setting's name, or {self._topics}")
        if is_first_rank():
            print(parser.format_help(), end="")
        raise SystemExit(0)

    def error(self, message: str) -> NoReturn:
        say_once(self.source + message)
        raise SystemExit(2)


def _add_option(
    group: argparse._ArgumentGroup, field: dataclasses.Field, kind: Any, short: str | None, shown: bool
) -> None:
    """Add `--field_name`, `--field-name` and `--short`; for a switch that is on also `--no_field_name`."""
    names = [f"--{field.name}"] + ([f"--{field.name.replace('_', '-')}"] if "_" in field.name else [])
    names += [f"--{short}"] if short else []
    default = default_of(field)
    options: dict[str, Any] = {"default": default, "dest": field.name}
    if get_origin(kind) in (Union, UnionType):
        kind = str if str in get_args(kind) else get_args(kind)[0]
    if kind is bool:
        options |= {"type": _read_truth, "nargs": "?", "const": True}
    elif get_origin(kind) is Literal:
        options |= {"type": partial(_read_choice, get_args(kind)), "metavar": "WORD"}
    elif get_origin(kind) is list:
        (kind,) = get_args(kind)
        options |= {"type": partial(_read, kind), "metavar": f"{_KINDS[kind]} [{_KINDS[kind]} ...]"}
        options["nargs"] = "*" if field.metadata["may_be_empty"] else "+"
    else:
        options |= {"type": partial(_read, kind), "metavar": _KINDS[kind]}
    if _is_optional(field):
        options["type"] = partial(_read_optional, options["type"])
    text = describe_option(field, kind)
    group.add_argument(*names, help=text.replace("%", "%%") if shown else SUPPRESS, **options)
    if kind is bool and default:
        off = [f"--no{separator}{field.name.replace('_', separator)}" for separator in "_-"]
        text = field.metadata["off"].replace("%", "%%") if shown else SUPPRESS
        group.add_argument(*off, action="store_false", dest=field.name, default=SUPPRESS, help=text)


def describe_option(field: dataclasses.Field, kind: Any) -> str:
    """Return a setting's line of help, with its limits or choices, its default and its needs; `kind` is its type."""
    default, limits, needs = default_of(field), field.metadata["limits"], field.metadata["needs"]
    details = [str(limits)] if limits else []
    if get_origin(kind) is Literal:
        details.append(" or ".join(get_args(kind)))
    if default not in (None, False, []):
        words = default if isinstance(default, list) else [default]
        details.append(f"default: {' '.join(map(_as_word, words))}")
    if needs:
        details.append(f"needs {needs}")
    return field.metadata["help"] + (f" ({'; '.join(details)})" if details else "")


def _is_optional(field: dataclasses.Field) -> bool:
    """Tell whether a file can set None: a list's null is as if it were not given."""
    return "None" in field.type and "list" not in field.type


def _read_optional(read: Callable[[str], Any], word: str) -> Any:
    return None if word == _NULL else read(word)


def _read(kind: type, word: str) -> Any:
    word = word.removeprefix(_VALUE)
    if kind is str and word.startswith("~/"):
        return os.path.expanduser(word)  # no shell has read a file, nor what stands behind "="
    try:
        return kind(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r}: use a {'whole number' if kind is int else 'number'}") from None


def _read_choice(choices: tuple[str, ...], word: str) -> str:
    if word not in choices:
        raise argparse.ArgumentTypeError(f"{word!r}: use {' or '.join(choices)}")
    return word


def _read_truth(word: str) -> bool:
    if word.lower() not in _TRUTH:
        raise argparse.ArgumentTypeError(f"{word!r}: use true or false")
    return _TRUTH[word.lower()]


def _yaml_arguments(path: Path, program_fields: dict[str, dataclasses.Field]) -> list[str]:
    try:
        settings = load_yaml(find_file(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"config='{path}': {error.strerror}: give the path of a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config='{path}': not YAML: {one_line(error, None)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"config='{path}': write one 'field: value' a line")
    known = program_fields
    if settings.get("lora_dropout") == 0:  # in files for TRL
        del settings["lora_dropout"]
    if settings.keys() - program_fields.keys():
        classes = pkgutil.resolve_name("grpo.config.programs:PROGRAMS")  # not at the top: they import this module
        known = {field.name: field for config in classes for field in fields(config)} | program_fields
        if unknown := [str(name) for name in settings if name not in known]:
            instead = {name: text for config in classes for name, text in getattr(config, "INSTEAD", {}).items()}
            raise ConfigError(f"{path}: {_no_such('field', unknown, known, instead)}")
    for name, value in settings.items():
        check_single(known[name], value, f"{path}: ")
    return _as_arguments({name: value for name, value in settings.items() if name in program_fields}, program_fields)


def check_single(field: dataclasses.Field, value: Any, source: str = "") -> None:
    """Raise ConfigError if a setting that takes no list or mapping gets one, or one of text a truth."""
    if isinstance(value, list | dict) and type(value).__name__ not in field.type:
        raise ConfigError(f"{source}{field.name}={value!r}: give a single value")
    if isinstance(value, bool) and field.type in ("str", "str | None"):
        raise ConfigError(f"{source}{field.name}={value!r}: YAML reads yes, no, on and off so: put the text in quotes")


def _as_arguments(settings: dict[str, Any], known: dict[str, dataclasses.Field]) -> list[str]:
    arguments: list[str] = []
    for name, value in settings.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *(_VALUE + _as_word(each) for each in value)]
        elif value is not None or _is_optional(known[name]):
            arguments.append(f"--{name}={_NULL if value is None else _as_word(value)}")
    return arguments


def _as_word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps({str(name): inner for name, inner in value.items()}, default=str)  # YAML has dates too
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_config(config: Any, path: Path) -> None:
    """Write the resolved settings for `--config`, without `resume_from_checkpoint`, which is this start's alone."""
    new = path.with_name(f"{path.name}.new")  # a full disk leaves the old one
    defaults = {field.name: default_of(field) for field in fields(config)}
    settings = dataclasses.asdict(config) | {"resume_from_checkpoint": None}
    written = {name: value for name, value in settings.items() if value is not None or defaults.get(name) is not None}
    new.write_text(to_yaml(written), encoding="utf-8")
    new.replace(path)


def to_yaml(settings: dict[str, Any]) -> str:
    """Format settings as a file for `--config`."""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)

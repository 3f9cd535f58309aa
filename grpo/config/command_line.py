"""Reads settings: defaults, overridden by `--config FILE.yaml`, overridden by options.

The defaults of a saved model are the settings saved with it (grpo/model/answering.py). One flat YAML file serves all
programs: each reads its own fields, and passes over the others'. A key that no program knows is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pkgutil
import re
import sys
import textwrap
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from grpo.config.errors import ConfigError, did_you_mean, is_first_rank, program_name, say_once
from grpo.config.fields import default_of

COMMON, ALL = "common", "all"


class _HelpAction(argparse.Action):
    """The action of `--help [TOPIC]`: print on the first rank, and end."""

    def __init__(self, **options: Any):
        super().__init__(nargs="?", const=COMMON, **options)

    def __call__(self, parser: Any, namespace: Any, topic: Any, option: str | None = None) -> None:
        text = parser.make_help(topic)
        if is_first_rank():
            print(text, end="")
        raise SystemExit(0)


class _HelpFormatter(argparse.HelpFormatter):
    """Shows `--name KIND` and the help, wrapped at the terminal's width."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return ", ".join(reversed(names)) + (f" {action.metavar}" if action.metavar else "")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs. Indented lines are commands: only long ones are folded."""
        paragraphs = []
        for paragraph in text.strip().split("\n\n"):
            if paragraph.startswith(" "):
                paragraphs.append("\n".join(_fold(line, width) for line in paragraph.splitlines()))
            else:
                paragraphs.append(textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False))
        return "\n\n".join(paragraphs)


def _fold(command: str, width: int) -> str:
    """Fold a shell command with backslashes, an option together with its first word."""
    whole = re.sub(r"(--\w+) (?=[^-\s])", r"\1\0", command)
    parts = textwrap.wrap(whole, width - 2, subsequent_indent=" " * 8, break_on_hyphens=False)
    return " \\\n".join(parts).replace("\0", " ")


def load_yaml(text: str) -> Any:
    """Parse YAML. Raises yaml.YAMLError, never another error."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("too many brackets within each other") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, without aliases and equal keys, and with one kind of error."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):  # a few hundred bytes can become gigabytes
            alias = self.peek_event()
            raise _error(alias, f"*{alias.anchor} stands for another place's value: write the value itself")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise _error(key, f"{key.value} stands twice: leave one of them out")
            names.add(str(key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            text = str(value)  # raises for an integer of more digits than Python writes
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _error(node, f"{node.value!r:.40} is no {kind}: correct it, or put a text in quotes") from error
        if "\0" in text:
            raise _error(node, "a text holds the character NUL: leave it out")
        return value


for _kind in ("binary", "set", "omap", "pairs"):  # no setting is one of these: each would become a text
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_undefined)


def _error(node: yaml.Node | yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_PROGRAMS = (
    "grpo.config.server:ServerConfig",
    "grpo.config.trainer:TrainerConfig",
    "grpo.config.programs:LaunchConfig",
    "grpo.config.programs:EvaluateConfig",
    "grpo.config.sampling_settings:ChatConfig",
    "grpo.config.programs:ReportConfig",
    "grpo.config.programs:WorkerConfig",
)
"""the programs whose settings a file may hold; imported only if a name is not the program's own"""

_TRUTH = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)

_KINDS = {int: "INT", float: "FLOAT", str: "TEXT"}
_REMEDIES = {int: "a whole number", float: "a number", str: "text in UTF-8"}
_QUOTES = "'", '"'
"""the beginning of a message about a word"""
_OPTION = re.compile(r"--|\+*\w+(\.\w+)+=")
"""the beginning of an unknown name, also in verl's form: trainer.nnodes=1"""
_VALUE = "\0"
"""the beginning of a list's word from a file, which is no option even if a dash follows"""

_ConfigT = TypeVar("_ConfigT")


def parse_arguments(
    config_class: type[_ConfigT],
    description: str,
    argv: list[str] | None = None,
    model_settings: Callable[[str, set[str], set[str]], dict[str, Any]] | None = None,
) -> _ConfigT:
    """Read `argv` (unset: the command line). On a bad setting print one sentence and exit with 2.

    `model_settings` takes a model's name, the names of the program's settings and the names that are given, and returns
    settings saved with the model; the command line and the file of `--config` win over them.
    """
    parser = _Parser(config_class, description)
    arguments = sys.argv[1:] if argv is None else argv
    try:
        file = parser.parse_known_args(arguments)[0].config
        from_file = _yaml_arguments(Path(file), config_class) if file else []
        parser.source = f"{file}: "
        parser.parse_known_args(from_file)  # an error then names the file
        parser.source = ""
        # The file's settings go before the command line's, so that argparse lets the latter win.
        parsed, unknown = parser.parse_known_args(from_file + arguments)
        if unknown:
            if unknown[0].endswith((".yaml", ".yml")) and not unknown[0].startswith("-"):
                raise ConfigError(f"{unknown[0]}: use --config {unknown[0]}")
            words = unknown[:1] + [word for word in unknown[1:] if _OPTION.match(word)]
            names = [word.split("=")[0] for word in words]  # a value may be a secret
            known = [*(field.name for field in fields(config_class)), *getattr(config_class, "SHORT", {})]
            raise _no_such("option", names, known, getattr(config_class, "INSTEAD", {}))
        if model_settings is not None:
            given = _given(parser, config_class, from_file + arguments)
            settings = {field.name: field for field in fields(config_class)}
            saved = model_settings(parsed.model_name_or_path, set(settings), given)
            for name, value in saved.items():
                _check_single(settings[name], value)
            parsed = parser.parse_args(_as_arguments(saved) + from_file + arguments)
        return config_class(**{field.name: getattr(parsed, field.name) for field in fields(config_class)})
    except ConfigError as error:
        parser.error(str(error))
    except argparse.ArgumentError as error:
        name = error.argument_name.split("/")[0].lstrip("-")
        parser.error(f"{name}{'=' if error.message.startswith(_QUOTES) else ': '}{error.message}")


def _no_such(kind: str, names: Iterable[str], known: Collection[str], instead: Mapping[str, str]) -> ConfigError:
    """Make the error for all unknown names, each with its replacement."""
    hints = {name: _hint(name, known, instead) for name in names}
    if len(hints) == 1:
        ((name, hint),) = hints.items()
        return ConfigError(f"{name}: no such {kind}{hint}; see --help all")
    listed = ", ".join(name + (f" ({hint.lstrip(':; ')})" if hint else "") for name, hint in hints.items())
    return ConfigError(f"no such {kind}s: {listed}; see --help all")


def _hint(name: str, known: Collection[str], instead: Mapping[str, str]) -> str:
    """Return what to use instead of an unknown name, as the next part of a sentence, or ""."""
    section, _, name = name.lstrip("-+").replace("-", "_").rpartition(".")
    if section and name in known:
        return f": use {name}"
    return f": {instead[name]}" if name in instead else did_you_mean(name, known)


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
        group.add_argument(
            "--help",
            "-h",
            action=_HelpAction,
            metavar="[TOPIC]",
            help="show the settings that most people touch, those of a topic, or all (--help all)",
        )
        group.add_argument(
            "--config",
            metavar="FILE.yaml",
            type=partial(_read, str),
            help="read settings, a line 'field: value' for each",
        )
        if positional:
            self.add_argument(positional, nargs="*", type=partial(_read, str), default=SUPPRESS, help=SUPPRESS)
        self.add_argument("--local_rank", type=int, help=SUPPRESS)  # the deepspeed launcher passes it
        sections = [section for section in reversed(config_class.__mro__) if "HEADING" in vars(section)]
        self._topics = ", ".join(re.findall(r"\w+", section.HEADING)[0] for section in sections)
        short = {name: word for word, name in getattr(config_class, "SHORT", {}).items()}
        uncommon = getattr(config_class, "UNCOMMON", ())
        self._shown = 0
        for section in sections:
            group = self.add_argument_group(section.HEADING)
            hints = get_type_hints(section)
            for field in fields(section):
                shown = (
                    field.metadata["common"] and field.name not in uncommon
                    if topic == COMMON
                    else topic in (ALL, field.name) or topic.lower() in re.findall(r"\w+", section.HEADING.lower())
                )
                self._shown += shown
                _add_option(group, field, hints[field.name], short.get(field.name), shown)
        if hidden := len(fields(config_class)) - self._shown:
            self.epilog = (
                f"{hidden} more: '--help all' shows all settings, '--help TOPIC' those of a topic: {self._topics}"
            )

    def make_help(self, topic: str) -> str:
        parser = _Parser(self._config_class, self.description if topic in (COMMON, ALL) else "", topic)
        if parser._shown == 0:
            self.error(f"--help {topic}: no such topic: use all, a setting's name, or {self._topics}")
        return parser.format_help()

    def error(self, message: str) -> NoReturn:
        say_once(self.source + message)
        raise SystemExit(2)


def _given(parser: ArgumentParser, config_class: type, arguments: list[str]) -> set[str]:
    unset = object()
    parsed, _ = parser.parse_known_args(arguments, Namespace(**{field.name: unset for field in fields(config_class)}))
    return {field.name for field in fields(config_class) if getattr(parsed, field.name) is not unset}


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
    details = [str(field.metadata["limits"])] if field.metadata["limits"] else []
    if kind is bool:
        options |= {"type": _read_truth, "nargs": "?", "const": True}
    elif get_origin(kind) is Literal:
        choices = get_args(kind)
        listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
        options |= {"type": partial(_read_choice, choices, listed), "metavar": "WORD"}
        details.append(listed)
    elif get_origin(kind) is list:
        word = _KINDS[get_args(kind)[0]]
        options |= {"type": partial(_read, get_args(kind)[0]), "metavar": f"{word} [{word} ...]"}
        options["nargs"] = "*" if field.metadata["may_be_empty"] else "+"
    else:
        options |= {"type": partial(_read, kind), "metavar": _KINDS[kind]}
    if default not in (None, False, []):
        words = default if isinstance(default, list) else [default]
        details.append(f"default: {' '.join(map(_as_word, words))}")
    if field.metadata["needs"]:
        details.append(f"needs {field.metadata['needs']}")
    text = field.metadata["help"] + (f" ({'; '.join(details)})" if details else "")
    group.add_argument(*names, help=text.replace("%", "%%") if shown else SUPPRESS, **options)
    if kind is bool and default:
        off = [f"--no{separator}{field.name.replace('_', separator)}" for separator in "_-"]
        text = field.metadata["off"].replace("%", "%%") if shown else SUPPRESS
        group.add_argument(*off, action="store_false", dest=field.name, default=SUPPRESS, help=text)


def _read(kind: type, word: str) -> Any:
    word = word.removeprefix(_VALUE)
    try:
        word.encode()  # what files record must be writable
        return kind(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r}: use {_REMEDIES[kind]}") from None


def _read_choice(choices: tuple[str, ...], listed: str, word: str) -> str:
    if word not in choices:
        raise argparse.ArgumentTypeError(f"{word!r}: use {listed}")
    return word


def _read_truth(word: str) -> bool:
    if word.lower() not in _TRUTH:
        raise argparse.ArgumentTypeError(f"{word!r}: use true or false")
    return _TRUTH[word.lower()]


def _yaml_arguments(path: Path, config_class: type) -> list[str]:
    try:
        settings = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config='{path}': {error.strerror}: give the path of a YAML file") from error
    except yaml.MarkedYAMLError as error:
        place, remedy = error.problem_mark, ": use spaces, no tabs" if "'\\t'" in error.problem else ""
        where = f"line {place.line + 1}, column {place.column + 1}"
        raise ConfigError(f"config='{path}': not YAML: {where}: {error.problem}{remedy}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config='{path}': not YAML: {' '.join(str(error).split())}") from error
    if settings is None:
        return []
    if not isinstance(settings, dict):
        raise ConfigError(f"config='{path}': write one 'field: value' a line")
    program_fields = known = {field.name: field for field in fields(config_class)}
    if settings.get("lora_dropout") == 0:  # in files for TRL
        del settings["lora_dropout"]
    if settings.keys() - program_fields.keys():
        classes = [*map(pkgutil.resolve_name, _PROGRAMS)]
        known = {field.name: field for config in classes for field in fields(config)} | program_fields
        if unknown := [*_unknown(settings, known)]:
            instead = {name: text for config in classes for name, text in getattr(config, "INSTEAD", {}).items()}
            raise ConfigError(f"{path}: {_no_such('field', unknown, known, instead)}")
    read: dict[str, Any] = {}
    for name, value in settings.items():
        _check_single(known[name], value, f"{path}: ")
        if name in program_fields:
            read[name] = value
    return _as_arguments(read)


def _unknown(settings: dict[Any, Any], known: Collection[str], section: str = "") -> Iterator[str]:
    """Yield the names that no program knows. Sections, as in other trainers' files, yield all their names."""
    for name, value in settings.items():
        if section or name not in known:
            path = f"{section}.{name}" if section else str(name)
            yield from _unknown(value, known, path) if isinstance(value, dict) and value else [path]


def _check_single(field: dataclasses.Field, value: Any, source: str = "") -> None:
    """Raise ConfigError if a setting that takes no list or mapping gets one."""
    for kind in (dict, list):
        if isinstance(value, kind) and kind.__name__ not in field.type:
            raise ConfigError(f"{source}{field.name}={value!r}: give a single value")


def _as_arguments(settings: dict[str, Any]) -> list[str]:
    """Return the settings as words of a command line."""
    arguments: list[str] = []
    for name, value in settings.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *(_VALUE + _as_word(each) for each in value)]
        elif value is not None:
            arguments.append(f"--{name}={_as_word(value)}")
    return arguments


def _as_word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps({str(name): inner for name, inner in value.items()}, default=str)  # YAML has dates too
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_config(config: Any, path: Path) -> None:
    """Write the resolved settings for `--config`, without `resume_from_checkpoint`, which is this start's alone."""
    path.write_text(to_yaml(dataclasses.asdict(config) | {"resume_from_checkpoint": None}), encoding="utf-8")


def to_yaml(settings: dict[str, Any]) -> str:
    """Format settings as a file for `--config`, without unset ones."""
    settings = {name: value for name, value in settings.items() if value is not None}
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)

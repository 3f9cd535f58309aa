"""Reads the files of other trainers: YAML, the command in a shell script, a Python script or notebook. Runs nothing."""

from __future__ import annotations

import ast
import os
import re
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import yaml

from grpo.config.command_line import load_yaml
from grpo.config.errors import ConfigError, one_line
from grpo.config.python_script import Given, Unknown, evaluate, parse_script, plain_settings, trl_settings

_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_PIECE = rf"""'[^']*' | "(?:\\.|[^"\\])*" | \\. | \$\{{[^}}]*\}} | \${_PARENTHESES} | `[^`]*` | [^\s\\'"`;&|()]"""
_TOKEN = re.compile(
    rf"""\#[^\n]* | <<-?\s*(?P<quote>['"]?)(?P<end>\w+)(?P=quote).*?^\s*(?P=end)$ | (?P<stop>[\n;&|()])
    | (?P<word>(?:{_PIECE})+)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)  # a comment, a here-document, the end of a command, or a word
_VARIABLE = re.compile(r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?:(?P<unset>:?[-=])(?P<default>[^${}]*))?\})")
_HIDDEN = str.maketrans("$`", "\0\1")  # of a text that is no expression any more
_OPEN, _CLOSE = {"if", "for", "while", "until", "case", "select", "{"}, {"fi", "done", "esac", "}"}
_BEFORE_COMMAND = _OPEN | {"then", "do", "else", "elif", "!", "time", "export", "local", "declare", "readonly"}


def read_settings(trainer: str, path: Path, wanted: Collection[str]) -> tuple[Given, list[Path]]:
    """Return the settings in a file of another trainer by its names, and the files that were read. `wanted` are the
    names that are more than one of its YAML's levels deep, or taken from anywhere in simple_GRPO's script. Raises
    ConfigError or OSError, and ValueError, SyntaxError or YAMLError for a file that is none of its kind."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(text, trainer, wanted), [path]
    if path.suffix not in (".py", ".ipynb"):
        return _from_shell(text, trainer, path, wanted)
    tree = parse_script(text, path)
    return trl_settings(path, tree) if trainer == "trl" else plain_settings(tree, wanted), [path]


def _from_yaml(text: str, trainer: str, wanted: Collection[str]) -> Given:
    """Return the leaves of verl's and EasyR1's tree, but mappings of wanted names as they are; TRL's has one level."""
    tree = load_yaml(text) or {}
    if not isinstance(tree, dict):
        raise ValueError("it has no settings by name")
    if trainer not in ("verl", "easyr1"):
        return {str(name): _number(value) for name, value in tree.items()}
    given = dict(_leaves("", tree, wanted))
    return {name: _referred(value, given) for name, value in given.items()}


def _leaves(prefix: str, tree: dict[str, Any], wanted: Collection[str]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value and f"{prefix}{name}" not in wanted:
            yield from _leaves(f"{prefix}{name}.", value, wanted)
        else:
            yield f"{prefix}{name}", _number(value)


def _referred(value: Any, given: Given) -> Any:
    """Return the value of the setting that `${data.max_prompt_length}` refers to, or else its own text, as unknown."""
    if not isinstance(value, str) or "${" not in value:
        return value
    name = value.removeprefix("${").removesuffix("}")
    found = given.get(name, value) if value == f"${{{name}}}" else value
    return Unknown(value) if isinstance(found, str) and "${" in found else found


def _number(value: Any) -> Any:
    """Return 1e-6 as a number, which YAML 1.1 reads as text."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?\d+\.?\d*[eE][+-]?\d+", value)
    return float(value) if is_number else value


def _from_shell(text: str, trainer: str, path: Path, wanted: Collection[str]) -> tuple[Given, list[Path]]:
    """Return the `a.b=c` of a command, or TRL's options, on top of the file that the command names."""
    commands = commands_of(text)
    words = [word for command in commands for word in command]
    own = _options(commands, wanted) if trainer == "trl" else _overrides(words)
    base = own.pop("config", None)
    if trainer == "verl":
        name, folder = _value_after("--config-name", words), _value_after("--config-path", words) or "config"
        base = _found(path, f"{folder}/{name.removesuffix('.yaml')}.yaml") if name else None
        if name and base is None:  # one of verl's own, or not at hand
            own["--config-name"] = name
    if base is None:
        return own, [path]
    if isinstance(base, Unknown):
        raise ConfigError(f"from='{path}': config={one_line(base)}: only the script knows that file: write its path")
    if (file := _found(path, str(base))) is None:
        reason = "it is not beside the script, nor in a folder above it, nor here: start from the folder that has it"
        raise ConfigError(f"from='{path}': config={one_line(base)}: {reason}")
    return _from_yaml(file.read_text(encoding="utf-8"), trainer, wanted) | own, [path, file]


def _found(script: Path, name: str) -> Path | None:
    """Return the file that a script names: beside it, in a folder above it, or here."""
    places = [*script.absolute().parents, Path()]
    return next((place / name for place in places if (place / name).is_file()), None)


def _overrides(words: list[str]) -> Given:
    given: Given = {}
    for word in words:
        if match := re.fullmatch(r"\+{0,2}(config|[A-Za-z_]\w*(?:\.\w+)+)=(.*)", word, re.DOTALL):
            given[match[1]] = _typed(_rest(word, word[: match.start(2)]))
        elif re.fullmatch(r"~\w+(\.\w+)+", word):  # Hydra's sign for a setting that is taken away
            given[word] = None
    return given


def _value_after(option: str, words: list[str]) -> str | None:
    """Return the value of the last `--option VALUE` or `--option=VALUE`."""
    pairs = list(zip(words, [*words[1:], ""], strict=True))
    values = [after if word == option else word.partition("=")[2] for word, after in pairs if word.startswith(option)]
    return values[-1] if values else None


def _options(commands: list[list[str]], wanted: Collection[str]) -> Given:
    """Return the options of the script that a command starts, and of lists of options; accelerate's stand before. Of
    several scripts it is the one with grpo in its name, or else with most of the wanted options."""
    lists: dict[str, list[Any]] = {}
    runs: list[tuple[str, dict[str, list[Any]]]] = []
    for command in commands:
        script = next((number for number, word in enumerate(command) if word.endswith(".py") or word == "grpo"), None)
        if script is None and not (command and command[0].startswith("--")):
            continue
        given = lists
        if script is not None:
            given = {}
            runs.append((command[script], given))
        values: list[Any] = []
        for word in command[0 if script is None else script + 1 :]:
            if word.startswith("--"):
                option, _, value = word.partition("=")
                name = option[2:].replace("-", "_")
                if not value and name.startswith("no_") and name[3:] in wanted:  # HfArgumentParser's "off"
                    given[name[3:]] = [False]
                    continue
                values = given[name] = [_typed(_rest(word, f"{option}="))] if value else []
            elif not re.match(r"\$[@*{]|\d*[<>]", word):  # more options, or a file for the output
                values.append(_typed(word))
    _, chosen = max(runs, key=lambda run: ("grpo" in run[0], len({*run[1]} & {*wanted})), default=("", {}))
    return {name: _joined(values) for name, values in (lists | chosen).items()}


def _joined(values: list[Any]) -> Any:
    """Return the value of an option: a switch has none, a list several."""
    if any(isinstance(value, Unknown) for value in values):
        return Unknown(" ".join(map(str, values)))
    return values[0] if len(values) == 1 else values or True


def _rest(word: str, start: str) -> str:
    """Return a word without its start, unknown if it was."""
    return type(word)(word.removeprefix(start))


def _typed(text: str) -> Any:
    """Return the value of a text in an override: a number, a truth, a list, null, or the text itself."""
    if isinstance(text, Unknown):
        return text
    try:
        value = _number(load_yaml(text))
    except yaml.YAMLError:
        return text
    return value if text and isinstance(value, int | float | bool | list | str | None) else text


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command of a script, without comments and quotes. Plain assignments and the environment
    give the values of variables; a word with another variable is Unknown, and so is what a condition or loop assigns.
    """
    variables: ChainMap[str, str] = ChainMap({}, os.environ)
    commands: list[list[str]] = [[]]
    depth, stop, is_first, previous = 0, "", True, ""
    for token in _TOKEN.finditer(text):
        if token["stop"]:
            stop, is_first, previous = token["stop"], True, ""
            commands.append([])
        if not (raw := (token["word"] or "").replace("\\\n", "")):  # lines are continued
            continue
        word = _expanded(raw, variables)
        depth += is_first and (raw in _OPEN) - (raw in _CLOSE)
        if previous in ("for", "read", "select"):
            variables[raw] = Unknown(f"${raw}")
        assigned = re.fullmatch(r"([A-Za-z_]\w*)(\+?)=(.*)", word, re.DOTALL)
        if is_first and assigned:
            name, more, value = assigned.groups()
            may_be_skipped = depth > 0 or stop in ("&", "|")
            if more or (may_be_skipped and variables.get(name) != value):
                value = Unknown(f"${name}")
            variables[name] = Unknown(value) if isinstance(word, Unknown) else value
        else:
            is_first = is_first and raw in _BEFORE_COMMAND
        is_list = _VARIABLE.fullmatch(raw) and not isinstance(word, Unknown)
        commands[-1] += word.split() if is_list else [word]
        previous = raw
    return commands


def _expanded(word: str, variables: MutableMapping[str, str]) -> str:
    """Return what a shell makes of a word."""
    before, text, is_unknown = None, "", False
    for piece in re.findall(_PIECE, word, re.VERBOSE | re.DOTALL):
        if piece[0] == "'":
            text += piece[1:-1].translate(_HIDDEN)
        elif piece[0] == '"':
            text += re.sub(r'\\(["\\$`\n])', lambda match: match[1].strip("\n").translate(_HIDDEN), piece[1:-1])
        else:
            text += piece[1:].strip("\n").translate(_HIDDEN) if piece[0] == "\\" else piece

    def value_of(match: re.Match) -> str:
        nonlocal is_unknown
        name, unset = match["plain"] or match["name"], match["unset"] or ""
        value = variables.get(name)
        if unset and (value is None or (value == "" and ":" in unset)):
            value = match["default"].strip("'\"")
            if "=" in unset:
                variables[name] = value
        is_unknown |= value is None or isinstance(value, Unknown)
        return (match[0] if value is None else value).translate(_HIDDEN)

    while before != text:  # ${a:-${b}} has another inside
        before, text = text, _VARIABLE.sub(value_of, text)
    text = re.sub(rf"\$\({_PARENTHESES}\)", lambda match: _computed(match[0], variables), text)
    is_unknown |= "$" in text or "`" in text
    text = text.replace("\0", "$").replace("\1", "`")
    return Unknown(text) if is_unknown else text


def _computed(expression: str, variables: Mapping[str, str]) -> str:
    """Return the number of `$((a * 2))`, or the expression if it cannot be computed."""
    try:
        values = {name: ast.Constant(int(variables[name])) for name in re.findall(r"[A-Za-z_]\w*", expression)}
        return str(evaluate(ast.parse(expression[3:-2].strip().replace("/", "//"), mode="eval").body, values))
    except (KeyError, ValueError, SyntaxError):
        return expression

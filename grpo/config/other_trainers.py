"""Reads the files of other trainers: YAML, the command in a shell script, a Python script or notebook."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo.config.command_line import load_yaml
from grpo.config.errors import ConfigError, one_line
from grpo.config.python_script import Given, Unknown, parse_script, plain_settings, trl_settings
from grpo.config.shell_script import commands_of


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
    """Return the value of the setting that `${data.max_prompt_length}` refers to, or else what it says, as unknown."""
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
    own = _options(commands) if trainer == "trl" else _overrides(words)
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


def _options(commands: list[list[str]]) -> Given:
    """Return the options of the script that a command starts, and of lists of options; accelerate's stand before."""
    given: dict[str, list[Any]] = {}
    for command in commands:
        script = next((number for number, word in enumerate(command) if word.endswith(".py") or word == "grpo"), None)
        if script is None and not (command and command[0].startswith("--")):
            continue
        values: list[Any] = []
        for word in command[0 if script is None else script + 1 :]:
            if word.startswith("--"):
                name, _, value = word.partition("=")
                values = given[name[2:]] = [_typed(_rest(word, f"{name}="))] if value else []
            elif not re.match(r"\$[@*{]|\d*[<>]", word):  # more options, or a file for the output
                values.append(_typed(word))
    return {name: _joined(values) for name, values in given.items()}


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

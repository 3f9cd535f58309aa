"""Reads and writes a model's grpo.yaml: its training's settings, which grpo.evaluate and grpo.chat take as defaults."""

import reprlib
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from grpo.config.command_line import load_yaml, to_yaml
from grpo.config.errors import ConfigError, is_first_rank, one_line, program_name, require
from grpo.config.loss_settings import RewardSection, is_users_own
from grpo.config.sampling_settings import AnswerSection, DataSection, TurnsSection

ANSWERING = "grpo.yaml"  # the file in a model's folder, with the settings by which it was trained
SECTIONS = AnswerSection, DataSection, RewardSection, TurnsSection

# Settings that a model's file cannot make: it must not choose code that a program runs.
CODE = "tools", "environment", "agent"
_OF_AGENT = "agent", "agent_history", "agent_may_sample", "agent_failure_reward"
_NAMES = [*(field.name for section in SECTIONS for field in fields(section)), *_OF_AGENT]
_OF_TOOLS = {field.name for field in fields(TurnsSection)} - {"max_turns", "tool_call_parser", *CODE}
_TURNS = {*(field.name for field in fields(TurnsSection)), *_OF_AGENT}
_HEADER = "# How this model was trained to answer: grpo.evaluate and grpo.chat ask as this file says.\n"


def write_answering(config: Any, folder: Path) -> None:
    """Write grpo.yaml into a model's folder. Raises OSError."""
    names = [name for name in _NAMES if config.has_turns or name not in _TURNS]
    settings = {name: value for name in names if (value := getattr(config, name)) is not None}
    (folder / ANSWERING).write_text(_HEADER + to_yaml(settings), encoding="utf-8")


def read_answering(model: str) -> tuple[str, dict[str, Any]]:
    """Return the path of a model's grpo.yaml and its known settings; without such a file ("", {}). Raises
    ConfigError if the file cannot be read, or `model` is a path that does not exist."""
    folder = Path(model).expanduser()
    path = folder / ANSWERING if folder.exists() else _find_on_hub(model)
    if path is None or not path.is_file():
        return "", {}
    try:
        settings = load_yaml(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise yaml.YAMLError("write one 'field: value' a line")
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = f"its {ANSWERING} cannot be read ({one_line(error, None)})"
        raise ConfigError(f"model_name_or_path={model!r}: {reason}: mend or delete it") from error
    # A newer version may write more settings, and a stranger's file must not reach others, such as trust_remote_code.
    return str(path), {name: value for name, value in settings.items() if name in _NAMES}


def model_settings(model: str, known: set[str], given: set[str]) -> dict[str, Any]:
    """Return the settings of a model's grpo.yaml that a program knows and its user has not given, and show them. Raises
    ConfigError as `read_answering`, and if the file names reward functions outside reward.py."""
    path, settings = read_answering(model)
    if "reward_funcs" in given:  # weights are for the functions that they were written with
        settings.pop("reward_weights", None)
    if "dataset_name" in given:  # another dataset has other configurations and splits
        for name in ("dataset_config", "dataset_train_split", "dataset_test_split", "eval_holdout"):
            settings.pop(name, None)
    if "dataset_test_split" in given:  # in place of the rows that the run kept
        settings.pop("eval_holdout", None)
    used = {name: value for name in CODE if (value := settings.pop(name, None))}
    without = given.isdisjoint(CODE)
    if given.isdisjoint(("agent", "environment")):  # an environment may be an agent
        settings = {name: value for name, value in settings.items() if name not in _OF_AGENT[1:]}
    elif given.isdisjoint(("tools", "environment")):  # the limits of tools are none of an agent's
        settings = {name: value for name, value in settings.items() if name not in _OF_TOOLS}
    settings = {name: settings[name] for name in settings if name in known - given and not (without and name in _TURNS)}
    if used and without and known.issuperset(CODE):
        code = " and ".join(f"{name} {value}" for name, value in used.items())
        _say(f"the model was trained with {code}, and is asked without: code is yours to name, so add it")
    functions = settings.get("reward_funcs") or []
    functions = [str(name) for name in (functions if isinstance(functions, list) else [functions])]
    for name in functions:
        # A model that was downloaded must not choose code that this program runs, or where completions are sent.
        reason = f"{path} names it as the training's, but code, models and servers are yours to name"
        remedy = f"add --reward_funcs {' '.join(functions)}, or others"
        require(not is_users_own(name), "reward_funcs", name, f"{reason}: {remedy}")
    if settings:
        shown = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in settings.items())
        _say(f"asked as in training, by {path}: {shown}")
    return settings


def _say(text: str) -> None:
    if is_first_rank():
        print(f"{program_name()}: {text}", file=sys.stderr)


def _find_on_hub(model: str) -> Path | None:
    from grpo.model.hub import can_ask_hub, find_file

    can_ask_hub("model_name_or_path", model)
    try:
        path = find_file(model, ANSWERING)
    except OSError:  # there is no such model: loading it fails next, with the reason
        return None
    return path and Path(path)

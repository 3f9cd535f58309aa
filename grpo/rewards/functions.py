"""A reward function of the user's: find it, call it, look at what it returned. Its worker processes need no more."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import signal
import sys
from collections.abc import Callable, Iterable
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo.config.errors import ConfigError

SHOWN_CHARACTERS = 500


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is not one reward for each completion."""


def load_function(name: str) -> Callable:
    """A function of the top-level `reward.py`, or "path/to/file.py:function".

    Raises ConfigError if there is no such file or function.
    """
    path, _, function_name = name.rpartition(":")
    module = _load_file(path, name) if path else importlib.import_module("reward")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"reward_funcs names {name!r}, but {path or 'reward.py'} has no such function: "
            f"define it there, name one that it defines ({', '.join(_reward_functions(module)) or 'none yet'}), "
            "name one elsewhere as path/to/file.py:function, or a reward model as ./folder or org/model."
        )
    return function


def attempt(
    function: Callable, prompts: list[str], completions: list[str], columns: dict[str, list]
) -> list | BaseException:
    """One reward for each completion, or the exception that prevented it, sys.exit's too."""
    try:
        return one_each(function(**arguments(prompts, completions, columns)), completions)
    except BaseException as error:  # the user's code may raise anything; the caller says on which completion it did
        # Where another handler stands, Ctrl-C raises nothing: then the function has raised it.
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        return error


def arguments(prompts: list[str], completions: list[str], columns: dict[str, list]) -> dict[str, list]:
    """Copy what a function is called with: what it changes there, no other function and no later step may see."""
    return {"prompts": [*prompts], "completions": [*completions], **copy.deepcopy(columns)}


def one_each(returned: Iterable, completions: list[str]) -> list:
    """What a function returned, as a list. Raises ValueError where that is not one for each completion."""
    rewards = list(returned)
    if len(rewards) != len(completions):
        raise ValueError(f"returned {len(rewards)} rewards for {len(completions)} completions")
    return rewards


def first_to_fail(function: Callable, prompts: list[str], completions: list[str], columns: dict[str, list]) -> str:
    for i, completion in enumerate(completions):
        if isinstance(attempt(function, *row(i, prompts, completions, columns)), BaseException):
            return f"on {quote(completion)}"
    return f"on the batch of {len(completions)} completions, though on none of them alone"


def row(
    i: int, prompts: list[str], completions: list[str], columns: dict[str, list]
) -> tuple[list[str], list[str], dict[str, list]]:
    """One completion of a batch, as a batch of its own."""
    return prompts[i : i + 1], completions[i : i + 1], {name: values[i : i + 1] for name, values in columns.items()}


def is_reward(reward: Any) -> bool:
    return reward is None or (isinstance(reward, Real) and math.isfinite(reward))


def no_reward(name: str, shown: str, completion: str) -> RewardError:
    """The error of a function that returned something else; `shown` is its repr."""
    return RewardError(
        f"Reward function {name!r} returned {shown} for {quote(completion)}: "
        "a reward is a finite number, or None where the function does not apply."
    )


def quote(completion: str, characters: int = SHOWN_CHARACTERS) -> str:
    return f"the completion {completion[:characters]!r}" + ("..." if len(completion) > characters else "")


def _load_file(path: str, name: str) -> ModuleType:
    if not Path(path).is_file() or not path.endswith(".py"):
        raise ConfigError(
            f"reward_funcs names {name!r}, but {path} is not a Python file: "
            "write it as path/to/file.py:function, with a path that exists from the current directory."
        )
    module_name = str(Path(path).resolve())
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module_name])
    return sys.modules[module_name]


def _reward_functions(module: ModuleType) -> list[str]:
    """Names of the module's functions that take `completions`, as a reward function must."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return [name for name, function in functions if "completions" in inspect.signature(function).parameters]

"""Find the reward functions that the configuration names, call them on a batch, and add up what they return."""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType

import numpy as np

from grpo.config import ConfigError

SHOWN_CHARACTERS = 500


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is not one reward for each completion."""


def load_reward_funcs(names: Sequence[str]) -> dict[str, Callable]:
    """The functions in the order of `names`, keyed by function name.

    A name is a function of the top-level `reward.py`, or "path/to/file.py:function". Raises ConfigError if there is no
    such file or function, or if two names have the same key.
    """
    functions: dict[str, Callable] = {}
    for name in names:
        path, _, function_name = name.rpartition(":")
        if function_name in functions:
            raise ConfigError(
                f"reward_funcs names {function_name!r} twice, the second time as {name!r}: "
                "remove or rename one, because each reward is logged under its function's name."
            )
        module = _load_file(path, name) if path else importlib.import_module("reward")
        function = getattr(module, function_name, None)
        if not callable(function):
            raise ConfigError(
                f"reward_funcs names {name!r}, but {path or 'reward.py'} has no such function: "
                f"define it there, name one that it defines ({', '.join(_reward_functions(module)) or 'none yet'}), "
                "or name one elsewhere as path/to/file.py:function."
            )
        functions[function_name] = function
    return functions


def compute_rewards(
    functions: dict[str, Callable], prompts: list[str], completions: list[str], columns: dict[str, list]
) -> np.ndarray:
    """Call each function once on the whole batch, with the dataset's columns as keyword arguments.

    Returns float64 [len(functions), len(completions)], NaN where a function returned None: it does not apply there.
    Raises RewardError, with the function's name and the completion at fault, if a function raises, or returns the wrong
    number of rewards or a reward that is not a finite number.
    """
    rewards = np.full((len(functions), len(completions)), np.nan)
    for row, (name, function) in zip(rewards, functions.items(), strict=True):
        returned = _attempt(function, prompts, completions, columns)
        if isinstance(returned, Exception):
            culprit = _first_to_fail(function, prompts, completions, columns)
            raise RewardError(f"Reward function {name!r} failed {culprit}: {returned!r}") from returned
        for i, reward in enumerate(returned):
            if reward is None:
                continue
            if not isinstance(reward, Real) or not math.isfinite(reward):
                raise RewardError(
                    f"Reward function {name!r} returned {reward!r} for {_quote(completions[i])}: "
                    "a reward is a finite number, or None where the function does not apply."
                )
            row[i] = reward
    return rewards


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


def _attempt(
    function: Callable, prompts: list[str], completions: list[str], columns: dict[str, list]
) -> list | Exception:
    """One reward for each completion, or the exception that prevented it."""
    try:
        returned = list(function(prompts=prompts, completions=completions, **columns))
        if len(returned) != len(completions):
            raise ValueError(f"returned {len(returned)} rewards for {len(completions)} completions")
    except Exception as error:  # the user's code may raise anything; the caller says on which completion it did
        return error
    return returned


def _first_to_fail(function: Callable, prompts: list[str], completions: list[str], columns: dict[str, list]) -> str:
    for i, completion in enumerate(completions):
        column_values = {column: values[i : i + 1] for column, values in columns.items()}
        if isinstance(_attempt(function, prompts[i : i + 1], [completion], column_values), Exception):
            return f"on {_quote(completion)}"
    return f"on the batch of {len(completions)} completions, though on none of them alone"


def _quote(completion: str) -> str:
    shown = repr(completion[:SHOWN_CHARACTERS])
    return f"the completion {shown}" + ("..." if len(completion) > SHOWN_CHARACTERS else "")

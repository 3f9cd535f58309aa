"""Load a reward function of the user's, call it, check what it returns. Worker processes import no more than this."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import signal
from collections.abc import Callable, Iterable
from numbers import Real
from types import ModuleType
from typing import Any

from grpo.config.errors import ConfigError
from grpo.config.user_files import load_file

SHOWN_CHARACTERS = 500


class RewardError(RuntimeError):
    """A reward function that raised, or that returned something else than one reward per completion."""


def load_function(name: str) -> Callable:
    """Return a function of the top-level `reward.py`, or of another file: "path/to/file.py:function".

    Raises ConfigError where there is no such file or function.
    """
    path, _, function_name = name.rpartition(":")
    module = load_file("reward_funcs", name, path) if path else importlib.import_module("reward")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"reward_funcs names {name!r}, but {path or 'reward.py'} has no such function: "
            f"define it there, name one that it defines ({', '.join(_list_reward_functions(module)) or 'none yet'}), "
            "name one elsewhere as path/to/file.py:function, or a reward model as ./folder or org/model."
        )
    return function


def call_function(
    function: Callable, prompts: list[str], completions: list[str], columns: dict[str, list]
) -> list | BaseException:
    """Return one reward per completion, or the exception that prevented it, even sys.exit's."""
    try:
        return check_count(function(**copy_arguments(prompts, completions, columns)), completions)
    except BaseException as error:  # the user's code may raise anything; the caller names the completion at fault
        # With a signal handler of our own, Ctrl-C raises nothing: then the function raised it.
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        return error


def copy_arguments(prompts: list[str], completions: list[str], columns: dict[str, list]) -> dict[str, list]:
    """Copy the arguments of a call: no other function and no later step may see what a function changes in them."""
    return {"prompts": [*prompts], "completions": [*completions], **copy.deepcopy(columns)}


def check_count(rewards: Iterable, completions: list[str]) -> list:
    """Return the rewards as a list. Raises ValueError unless there is one per completion."""
    rewards = list(rewards)
    if len(rewards) != len(completions):
        raise ValueError(f"returned {len(rewards)} rewards for {len(completions)} completions")
    return rewards


def find_failing_completion(
    function: Callable, prompts: list[str], completions: list[str], columns: dict[str, list]
) -> str:
    """Call a function that failed on a batch again, on each completion alone; return where it fails, in words."""
    for i, completion in enumerate(completions):
        batch_of_one = select_completion(i, prompts, completions, columns)
        if isinstance(call_function(function, *batch_of_one), BaseException):
            return f"on {quote_completion(completion)}"
    return f"on the batch of {len(completions)} completions, though on none of them alone"


def select_completion(
    i: int, prompts: list[str], completions: list[str], columns: dict[str, list]
) -> tuple[list[str], list[str], dict[str, list]]:
    """Return completion `i` of a batch, as a batch of one."""
    return prompts[i : i + 1], completions[i : i + 1], {name: values[i : i + 1] for name, values in columns.items()}


def is_reward(reward: Any) -> bool:
    return reward is None or (isinstance(reward, Real) and math.isfinite(reward))


def invalid_reward(name: str, shown: str, completion: str) -> RewardError:
    """Make the error for a function that returned something else than a reward; `shown` is its repr."""
    return RewardError(
        f"Reward function {name!r} returned {shown} for {quote_completion(completion)}: "
        "a reward is a finite number, or None where the function does not apply."
    )


def quote_completion(completion: str, characters: int = SHOWN_CHARACTERS) -> str:
    return f"the completion {completion[:characters]!r}" + ("..." if len(completion) > characters else "")


def _list_reward_functions(module: ModuleType) -> list[str]:
    """Return the names of the module's functions that take `completions`, as a reward function must."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return [name for name, function in functions if "completions" in inspect.signature(function).parameters]

"""Loads the user's environment class, and checks its form and its methods' results.

Its form is TRL's, with methods that the policy calls as tools, or a game's: beside `reset`, `get_reward` and `close` it
has only `step`, which takes the policy's text. Processes for the user's code import only this.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from grpo.config.errors import ConfigError
from grpo.config.user_code import load_function
from grpo.rewards.functions import Misuse, is_reward

_OURS = {"reset", "get_reward", "close"}


class EnvironmentClass:
    """The class that `environment` names."""

    def __init__(self, name: str):
        """Load it. Raises ConfigError if there is no such class, or it has neither form's methods."""
        loaded = load_function("environment", name, "class")
        methods = dict(inspect.getmembers(loaded, _is_method)) if inspect.isclass(loaded) else {}
        if "reset" not in methods:
            raise ConfigError(f"environment={name!r}: it is no class with a method reset: write one")
        public = {method for method in methods if not method.startswith("_")} - _OURS
        if not public:
            raise ConfigError(
                f"environment={name!r}: it has no method that answers: add methods to call as tools, or "
                "step(text) -> (observation, reward, done)"
            )
        self.name, self.type = name, loaded
        self.label: str = loaded.__name__
        self.is_game = public == {"step"}
        self.methods = {} if self.is_game else {method: _bind(loaded, method) for method in sorted(public)}
        """the tools, without an instance: for their signatures"""
        self.has_get_reward = "get_reward" in methods
        self.gives_reward = self.is_game or self.has_get_reward


def _is_method(member: Any) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member)  # of a class, a class method is one already


def _bind(of: type, method: str) -> Callable:
    """Return a class's method without the argument `self`, for its signature."""
    if isinstance(inspect.getattr_static(of, method), staticmethod | classmethod):
        return getattr(of, method)
    return types.MethodType(getattr(of, method), object())


def read_observation(returned: Any) -> str:
    """Return the result of `reset` as text. Raises Misuse unless it is text or None."""
    if returned is not None and not isinstance(returned, str):
        raise Misuse(f"returned {returned!r:.200}: reset must return a text, or None")
    return returned or ""


def read_step(returned: Any) -> tuple[str, float, bool]:
    """Check the result of `step`. Raises Misuse unless it is (observation, reward, done)."""
    if (
        isinstance(returned, tuple | list)
        and len(returned) == 3
        and (returned[0] is None or isinstance(returned[0], str))
        and returned[1] is not None
        and is_reward(returned[1])
        and returned[2] in (True, False)
    ):
        return returned[0] or "", float(returned[1]), bool(returned[2])
    raise Misuse(
        f"returned {returned!r:.200}: step must return (observation, reward, done): a text or None, a finite number, "
        "and True where the completion is over"
    )


def read_reward(returned: Any) -> float | None:
    """Check the result of `get_reward`. Raises Misuse if it is no reward."""
    if not is_reward(returned):
        raise Misuse(f"returned {returned!r:.200}: get_reward must return a finite number, or None")
    return None if returned is None else float(returned)

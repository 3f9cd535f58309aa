"""Loads the user's environment class, calls the user's code, and returns plain data.

Processes for the user's code import only this. A session has one caller at a time. Tasks and their arguments are

    tool          name, arguments    a function of `tools`
    method        name, arguments    a method of the environment that is a tool
    reset         columns            an instance is made and reset
    step          text
    get_reward
    close                            the instance is closed

and a reply is {"text", "failed"} of a tool or method, {"text"} of reset, {"text", "reward", "done"} of step, {"reward"}
of get_reward, {} of close, or {"raised"} where one of these four failed; with "error", the exception's type, and
"traceback" where something was raised.
"""

import asyncio
import copy
import inspect
import json
import types
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from grpo.config.errors import require
from grpo.config.user_code import Key, load_function, signature_of, user_code
from grpo.rewards.functions import Misuse, format_user_stack, is_reward, repr_of, to_plain

Reply = dict[str, Any]
_OURS = {"reset", "get_reward", "close"}


class EnvironmentClass:
    """The class that `environment` names. Its form is TRL's, with methods that the policy calls as tools, or a game's:
    beside `reset`, `get_reward` and `close` it has only `step`, which takes the policy's text."""

    def __init__(self, name: str):
        """Load it. Raises ConfigError if there is no such class, or it has neither form's methods."""
        loaded = load_function("environment", name, "class")
        # A class method is a method of the class already.
        members = inspect.getmembers(loaded) if inspect.isclass(loaded) else []
        methods = {method for method, member in members if inspect.isfunction(member) or inspect.ismethod(member)}
        require("reset" in methods, "environment", name, "it is no class with a method reset: write one")
        public = {method for method in methods if not method.startswith("_")} - _OURS
        remedy = "add methods to call as tools, or step(text) -> (observation, reward, done)"
        require(bool(public), "environment", name, f"it has no method that answers: {remedy}")
        self.name, self.type = name, loaded
        self.label: str = loaded.__name__
        self.is_game = public == {"step"}
        self.methods = {} if self.is_game else {method: _bind(loaded, method) for method in sorted(public)}
        """the tools, without an instance: for their signatures"""
        self.has_get_reward = "get_reward" in methods
        self.gives_reward = self.is_game or self.has_get_reward


def _bind(of: type, method: str) -> Callable:
    """Return a class's method without the argument `self`, for its signature."""
    if isinstance(inspect.getattr_static(of, method), staticmethod | classmethod):
        return getattr(of, method)
    return types.MethodType(getattr(of, method), object())


class Session:
    """The tools, and an instance of the environment while there is one."""

    def __init__(self, functions: Mapping[str, Callable], environment: EnvironmentClass | None, longest: int):
        """`longest` is `max_tool_response_length`."""
        self._functions, self._environment, self._longest = functions, environment, longest
        self._instance: Any = None

    def start(self, task: str, *arguments: Any) -> Reply | Awaitable:
        """Do the task; return its reply, or an awaitable for `finish`. Raises no error of the user's."""
        try:
            returned = self._call(task, *arguments)
            return returned if inspect.isawaitable(returned) else self._make_reply(task, returned)
        except BaseException as error:  # the user's code may raise anything, sys.exit's too
            return self._explain(task, error)

    async def finish(self, task: str, awaitable: Awaitable) -> Reply:
        try:
            return self._make_reply(task, await awaitable)
        except BaseException as error:  # the same
            return self._explain(task, error)

    def _call(self, task: str, *arguments: Any) -> Any:
        match task, arguments:
            case "tool", (name, values):
                return self._functions[name](**copy.deepcopy(values))  # the caller keeps the policy's own
            case "method", (name, values):
                return getattr(self._instance, name)(**copy.deepcopy(values))
            case "reset", (columns,):
                self._instance = self._environment.type()
                return self._reset(copy.deepcopy(columns))  # of an EncodedPicture the copy is a PIL image
            case "close", ():
                instance, self._instance = self._instance, None
                return getattr(instance, "close", lambda: None)()
            case _:
                return getattr(self._instance, task)(*arguments)

    def _reset(self, columns: dict[str, Any]) -> Any:
        reset = self._instance.reset
        if self._environment.is_game:
            return reset(columns)
        try:
            signature_of(reset, follow_wrapped=False).bind(**columns)
        except TypeError as error:
            given = ", ".join(columns) or "nothing"
            reason = f"cannot be called: {error}: it is given {given}: name some, and end with **kwargs"
            raise Misuse(reason) from None
        return reset(**columns)

    def _make_reply(self, task: str, returned: Any) -> Reply:
        match task:
            case "tool" | "method":
                return {"text": self._cut(_to_text(returned)), "failed": False}
            case "reset":
                if not isinstance(returned, str | None):
                    raise Misuse(f"returned {returned!r:.200}: reset must return a text, or None")
                return {"text": clean(returned or "")}
            case "step":
                text, reward, done = _read_step(returned)
                return {"text": self._cut(text), "reward": reward, "done": done}
            case "get_reward":
                if not is_reward(returned := to_plain(returned)):
                    raise Misuse(f"returned {returned!r:.200}: get_reward must return a finite number, or None")
                return {"reward": None if returned is None else float(returned)}
        return {}

    def _explain(self, task: str, error: BaseException) -> Reply:
        reply = {"error": type(error).__name__, "traceback": format_user_stack(error)}
        if task in ("tool", "method"):
            return reply | {"text": self._cut(describe_failure(_reason_of(error))), "failed": True}
        reason = str(error) if isinstance(error, Misuse) else f"failed: {repr_of(error)}"
        return reply | {"raised": f"{task} {reason}"}

    def _cut(self, text: str) -> str:
        """Cut a text to `longest` characters and a mark of the cut."""
        if (missing := len(text) - self._longest) > 0:
            text = f"{text[: self._longest]}... ({missing} more characters)"
        return clean(text)


def _read_step(returned: Any) -> tuple[str, float, bool]:
    """Check the result of `step`. Raises Misuse unless it is (observation, reward, done)."""
    match [*map(to_plain, returned)] if isinstance(returned, tuple | list) else returned:
        case [str() | None as text, reward, True | False | 0 | 1 as done] if reward is not None and is_reward(reward):
            return text or "", float(reward), bool(done)
    raise Misuse(
        f"returned {returned!r:.200}: step must return (observation, reward, done): a text or None, a finite number, "
        "and True where the completion is over"
    )


def _to_text(returned: Any) -> str:
    """Return a tool's result as text: JSON, unless it is text."""
    if isinstance(returned, str):
        return returned
    try:
        return json.dumps(returned, ensure_ascii=False, default=_to_json)
    except (TypeError, ValueError):  # other keys than JSON's, or a circle
        return str(returned)


def _to_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # NumPy's and pandas' numbers and arrays


def describe_failure(reason: str) -> str:
    """Return the answer to a call that failed."""
    return json.dumps({"error": reason}, ensure_ascii=False)


def _reason_of(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # an error of the user's has a method of its own for this
        return type(error).__name__


def clean(text: str) -> str:
    """Replace what UTF-8 does not have, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


class TurnsService:
    """Does the tasks of a session in a process."""

    def __init__(self, tools: list[str], environment: str | None, longest: int):
        """The arguments are the settings `tools`, `environment` and `max_tool_response_length`."""
        functions = {function.__name__: function for name in tools for function in [load_function("tools", name)]}
        self._session = Session(functions, EnvironmentClass(environment) if environment else None, longest)
        self._loop = asyncio.new_event_loop()

    def answer(self, key: Key, *task: Any) -> Reply:
        """Return the reply to a task; `key` seeds its random numbers."""
        with user_code(*key):
            started = self._session.start(*task)
            if isinstance(started, dict):
                return started
            return self._loop.run_until_complete(self._session.finish(task[0], started))

"""Loads the functions that the policy may call, makes their schemas, and checks calls' arguments."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.config.errors import ConfigError, one_line, require
from grpo.config.user_code import load_function

_TYPES = dict(string=str, integer=int, number=(int, float), boolean=bool, array=list, object=dict, null=type(None))


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function, or a method of the environment, that the policy may call."""

    name: str
    function: Callable
    schema: dict[str, Any]
    """as a chat template takes it: {"type": "function", "function": {"name", "description", "parameters"}}"""
    signature: inspect.Signature
    is_async: bool
    is_method: bool  # whether it is the environment's

    def find_misfit(self, arguments: dict[str, Any]) -> str:
        """Describe the fault in a call's arguments, or return ""."""
        try:
            self.signature.bind(**arguments)
        except TypeError as error:
            return f"the arguments do not fit {self.name}{self.signature}: {error}"
        properties = self.schema["function"]["parameters"]["properties"]
        for name, value in arguments.items():
            expected = properties.get(name, {})
            if not _fits(value, expected):
                kinds = {key: expected[key] for key in ("type", "items", "enum") if key in expected}
                return f"the argument {name} of {self.name} is {value!r:.200}, which does not fit {kinds}"
        return ""


def make_tool(field: str, value: str, function: Callable, is_method: bool = False) -> Tool:
    """Make a tool of a function, which the setting `field` names by `value`. Raises ConfigError unless it has type
    hints, a docstring with a line for each argument, and named arguments alone."""
    from transformers.utils import get_json_schema

    is_function = hasattr(function, "__name__") and not inspect.isclass(function)
    require(is_function, field, value, "it is no function: name a function, or wrap it in one")
    try:
        schema = get_json_schema(function)
        name = schema["function"]["name"]
        signature = inspect.signature(function)
    except Exception as error:  # it reads the user's hints, which may be anything
        raise ConfigError(
            f"{field}={value!r}: a model cannot be told what {function.__name__} does ({one_line(error)}): "
            "give each argument a type hint, and the docstring a first line and Args: with a line for each argument"
        ) from error
    for parameter in signature.parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        reason = f"a call gives each argument by its name, which {name} cannot take as {parameter}"
        require(by_name, field, value, f"{reason}: write its arguments without *, ** and /")
    return Tool(
        name=name,
        function=function,
        schema=schema,
        signature=signature,
        is_async=inspect.iscoroutinefunction(function),
        is_method=is_method,
    )


def load_tools(names: Sequence[str]) -> dict[str, Tool]:
    """Return the functions of `tools` by name. Raises ConfigError if one is missing, unfit, or named twice."""
    loaded: dict[str, Tool] = {}
    for name in names:
        tool = make_tool("tools", name, load_function("tools", name))
        reason = f"there is a tool {tool.name!r} already: remove or rename one"
        require(tool.name not in loaded, "tools", name, reason)
        loaded[tool.name] = tool
    return loaded


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Tell whether a value of JSON is of the schema's type; a bool is no number here."""
    if value is None and schema.get("nullable"):
        return True
    names = schema.get("type", [])
    for name in [names] if isinstance(names, str) else names:
        if name not in _TYPES:  # such as "any"
            return True
        if isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool)):
            items = value if name == "array" else []
            return value in schema.get("enum", [value]) and all(_fits(item, schema.get("items", {})) for item in items)
    return not names

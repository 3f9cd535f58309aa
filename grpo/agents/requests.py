"""A request for a chat completion in OpenAI's form, read strictly.

Each field is taken over, or changes nothing that is drawn, or is refused by its name. A null field is an absent one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from grpo.wire.json_fields import find_unrecordable, is_number, shown
from grpo.wire.tool_outcomes import DEEPEST_ARGUMENTS

_DEEPEST_FIELD = DEEPEST_ARGUMENTS + 5  # most lists and objects within each other: what a run can record of messages
_LARGEST_WHOLE = 2**63 - 1  # largest signed integer of 64 bits
_MOST_CHOICES = 64
_MOST_STOPS = 4
_MISSING = "it is missing or null"
_LONGEST_SHOWN = 60  # most characters of an unknown field's name in a message

_READ = (
    *("messages", "tools", "n", "stop", "max_tokens", "max_completion_tokens", "seed", "logprobs", "stream"),
    *("stream_options", "temperature", "top_p", "model", "parallel_tool_calls"),
)
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""the values that change nothing in what is drawn, of fields whose other values are refused"""

_MESSAGE_FIELDS = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    # The last two are what clients such as litellm add to an answer. They say nothing to the policy, and are left out.
    "assistant": (
        *("role", "content", "name", "reasoning_content", "tool_calls", "annotations", "provider_specific_fields"),
    ),
    "tool": ("role", "content", "name", "tool_call_id"),
}
# The openai package sends back more of a stream, or of a parsed answer: `index` of a call, its arguments once more.
_CALL_FIELDS = ("id", "type", "function", "index")
_CALLED_FUNCTION_FIELDS = ("name", "arguments", "parsed_arguments")


class Refused(Exception):
    """The refusal of a request: an HTTP status, a sentence, the field that is wrong, a code for programs."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_json(self) -> bytes:
        """Return the body of the answer, in the form of OpenAI's errors."""
        error = {"message": self.message, "type": "invalid_request_error", "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request whose every value is checked. `temperature` and `top_p` are not compared with the run's."""

    messages: list[dict[str, Any]]
    """at least one: {"role", "content"}, and perhaps "name", "tool_call_id", "reasoning_content", and "tool_calls":
    [{"id", "type": "function", "function": {"name", "arguments"}}]. `arguments` and `content` are texts, each perhaps
    "", and `role` is system, user, assistant or tool"""
    tools: list[dict[str, Any]]
    """{"type": "function", "function": {"name", "description", "parameters"}}, a description only where one was sent,
    in this order of names: a chat template shows them to the policy in the order that they have"""
    may_call: bool  # False: the answer is text, whatever is drawn; the policy sees the tools all the same
    n: int  # from 1 to 64
    stop: list[str]  # 4 at most, none of them empty
    max_tokens: int | None
    seed: int | None  # of 64 bits, signed
    logprobs: bool
    stream: bool
    include_usage: bool  # in the stream's last chunk
    temperature: float | None
    top_p: float | None


def read_request(body: bytes) -> ChatRequest:
    """Read the body of a request. Raises Refused for all but a request that can be drawn as it says."""
    top = _read_object("", _read_json(body))
    top.refuse_others((*_READ, *_WITHOUT_EFFECT, *_NEUTRAL))
    for name, values in _NEUTRAL.items():
        _check_neutral(top, name, values)
    if "model" in top.fields:
        top.text("model")
    top.flag("parallel_tool_calls")
    stream_options = _read_object("stream_options", top.mapping("stream_options"))
    stream_options.refuse_others(("include_usage",))
    messages = [_read_message(place, message) for place, message in top.items("messages")]
    if not messages:
        raise _wrong("messages", "no message was sent", "send a list of at least one message")
    return ChatRequest(
        messages=messages,
        tools=_read_tools(top),
        may_call=top.fields.get("tool_choice") != "none",
        n=top.whole("n", 1, _MOST_CHOICES) or 1,
        stop=_read_stop(top),
        max_tokens=_read_max_tokens(top),
        seed=top.whole("seed", -_LARGEST_WHOLE - 1, _LARGEST_WHOLE),
        logprobs=top.flag("logprobs"),
        stream=top.flag("stream"),
        include_usage=stream_options.flag("include_usage"),
        temperature=top.number("temperature"),
        top_p=top.number("top_p"),
    )


@dataclass(frozen=True)
class _Object:
    """An object of the body. What reads a field of it raises Refused for a value of another kind."""

    place: str  # in the body; "" for the body itself
    fields: dict[str, Any]  # those that are not null

    def place_of(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def refuse_others(self, known: tuple[str, ...]) -> None:
        """Refuse a field of any other name."""
        for name in self.fields:
            if name not in known:
                place = self.place_of(name[:_LONGEST_SHOWN])
                raise _wrong(place, "this field is not known here", "leave it out", code="unsupported_parameter")

    def wrong(self, name: str, expected: str) -> Refused:
        """Return the refusal of a field's value."""
        fault = f"{shown(self.fields[name])} is not allowed" if name in self.fields else _MISSING
        return _wrong(self.place_of(name), fault, f"send {expected}")

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def choice(self, name: str, values: tuple[str, ...]) -> str:
        value = self.fields.get(name)
        if value not in values:
            raise self.wrong(name, " or ".join(map(repr, values)))
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; false for a field that is missing."""
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def whole(self, name: str, least: int, most: int) -> int | None:
        value = self.fields.get(name)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float | None:
        value = self.fields.get(name)
        if value is not None and not is_number(value):
            raise self.wrong(name, "a number")
        return value

    def items(self, name: str) -> list[tuple[str, Any]]:
        """Return (place, value) of each item of a list; none for a list that is missing."""
        value = self.fields.get(name, [])
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return [(f"{self.place_of(name)}[{number}]", item) for number, item in enumerate(value)]

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object with all its fields; an empty one for a field that is missing."""
        value = self.fields.get(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def inner(self, name: str) -> _Object:
        return _read_object(self.place_of(name), self.fields.get(name))


def _wrong(place: str | None, fault: str, remedy: str, code: str = "invalid_value") -> Refused:
    return Refused(f"{place or 'the body'}: {fault}: {remedy}", param=place or None, code=code)


def _read_object(place: str, value: object) -> _Object:
    if not isinstance(value, dict):
        fault = _MISSING if value is None else f"{shown(value)} is not allowed"
        raise _wrong(place, fault, "send an object")
    return _Object(place, {name: inner for name, inner in value.items() if inner is not None})


def _read_json(body: bytes) -> Any:
    """Return the value of a body that any reader of JSON takes, and that is not too deep to copy."""
    try:
        value = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise _wrong(None, f"it is no JSON in UTF-8 ({error})", "send a JSON object") from None
    if not isinstance(value, dict):
        return value
    if fault := find_unrecordable([*value], 1):
        raise _wrong(None, f"the name of a field has {fault}", "send whole characters")
    for name, field in value.items():
        if fault := find_unrecordable(field, _DEEPEST_FIELD):
            raise _wrong(name[:_LONGEST_SHOWN], f"it has {fault}", "send none")
    return value


def _check_neutral(top: _Object, name: str, values: tuple[Any, ...]) -> None:
    value = top.fields.get(name)
    if value is not None and (isinstance(value, bool) or value not in values):
        reason = "the policy draws freely"
        if name == "top_logprobs":
            reason = "log-probs are those of the drawn tokens alone"
        fault = f"{shown(value)} is not supported, {reason}"
        raise _wrong(name, fault, "leave it out", code="unsupported_parameter")


def _read_message(place: str, value: object) -> dict[str, Any]:
    message = _read_object(place, value)
    role = message.choice("role", (*_MESSAGE_FIELDS,))
    message.refuse_others(_MESSAGE_FIELDS[role])
    if role == "tool" and "tool_call_id" not in message.fields:
        raise message.wrong("tool_call_id", "the id of the call that it answers")
    content = _read_content(message, is_needed=role != "assistant")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if calls := [_read_call(*item) for item in message.items("tool_calls")]:
        made["tool_calls"] = calls
    texts = ("tool_call_id", "name", "reasoning_content")
    return made | {name: message.text(name) for name in texts if name in message.fields}


def _read_content(message: _Object, is_needed: bool) -> str:
    """Return the text of a message, its parts joined; "" for one of the assistant that has none."""
    content = message.fields.get("content", None if is_needed else "")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise message.wrong("content", "a text, or a list of parts of type text")
    return "".join(_read_part(*item) for item in message.items("content"))


def _read_part(place: str, value: object) -> str:
    part = _read_object(place, value)
    if part.text("type") != "text":
        fault = f"a part of type {shown(part.fields['type'])} is not read"
        remedy = "send text: pictures are not drawn from here"
        raise _wrong(part.place_of("type"), fault, remedy, code="unsupported_parameter")
    part.refuse_others(("type", "text"))
    return part.text("text")


def _read_call(place: str, value: object) -> dict[str, Any]:
    """Return a call of a tool. Its arguments may be no JSON: they come back as the policy drew them."""
    call = _read_object(place, value)
    call.refuse_others(_CALL_FIELDS)
    call.choice("type", ("function",))
    function = call.inner("function")
    function.refuse_others(_CALLED_FUNCTION_FIELDS)
    called = {"name": function.text("name"), "arguments": function.text("arguments")}
    return {"id": call.text("id"), "type": "function", "function": called}


def _read_tools(top: _Object) -> list[dict[str, Any]]:
    tools, names = [], set()
    for place, value in top.items("tools"):
        tool = _read_object(place, value)
        tool.refuse_others(("type", "function"))
        tool.choice("type", ("function",))
        function = _read_function(tool.inner("function"))
        if function["name"] in names:
            fault = f"{shown(function['name'])} is the name of two tools"
            raise _wrong(f"{place}.function.name", fault, "give each a name of its own")
        names.add(function["name"])
        tools.append({"type": "function", "function": function})
    return tools


def _read_function(function: _Object) -> dict[str, Any]:
    """Return a tool's function as the policy sees it: without `strict`, which is about a way to draw."""
    function.refuse_others(("name", "description", "parameters", "strict"))
    function.flag("strict")
    made: dict[str, Any] = {"name": function.text("name")}
    if not made["name"]:
        raise function.wrong("name", "a text of at least one character")
    if "description" in function.fields:
        made["description"] = function.text("description")
    return made | {"parameters": function.mapping("parameters") or {"type": "object", "properties": {}}}


def _read_stop(top: _Object) -> list[str]:
    value = top.fields.get("stop", [])
    stops = value if isinstance(value, list) else [value]
    if len(stops) > _MOST_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise top.wrong("stop", f"a text, or a list of up to {_MOST_STOPS} texts, none of them empty")
    return stops


def _read_max_tokens(top: _Object) -> int | None:
    limits = {top.whole(name, 1, _LARGEST_WHOLE) for name in ("max_tokens", "max_completion_tokens")} - {None}
    if len(limits) > 1:
        raise _wrong("max_tokens", "max_completion_tokens is another number", "send one of them")
    return limits.pop() if limits else None

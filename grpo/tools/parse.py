"""Reads a turn of the policy, its text and the calls of tools in it, by the tokenizer's response template if it has
one, else by the format that is set."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError
from grpo.tools.template import render_call
from grpo.wire.json_fields import find_unrecordable
from grpo.wire.tool_outcomes import DEEPEST_ARGUMENTS

log = logging.getLogger(__name__)

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_BETWEEN_CALLS = re.compile(r"[; \n]*")  # in llama3_json
_NOT_JSON = ValueError, RecursionError  # json's errors, the second for too many levels


@dataclass(frozen=True)
class Call:
    """A call of a tool, as the policy wrote it."""

    name: str
    arguments: dict[str, Any]
    error: str = ""  # why it cannot be read, or empty


@dataclass(frozen=True)
class Turn:
    """The policy's text between two answers."""

    content: str  # without special tokens, and without the calls that can be read
    calls: list[Call] = field(default_factory=list)
    reasoning: str = ""

    def to_message(self) -> dict[str, Any]:
        """Return it as a chat template takes it. A malformed call is a part of its content."""
        read = [{"name": call.name, "arguments": call.arguments} for call in self.calls if not call.error]
        return {
            "role": "assistant",
            "content": self.content,
            **({"reasoning_content": self.reasoning} if self.reasoning else {}),
            **({"tool_calls": [{"type": "function", "function": function} for function in read]} if read else {}),
        }


class TurnReader:
    """Reads turns of a model by its tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int], schemas: list[dict], parser: str
    ):
        """`schemas`: those of the tools, if calls are to be read; `parser`: `tool_call_parser`. Raises ConfigError if
        "auto" finds no format in the chat template."""
        self._tokenizer, self._eos, self._schemas = tokenizer, frozenset(eos_token_ids), schemas
        # The tokenizer names one end of a turn, and the model may have others.
        ends = [token for token in eos_token_ids if not tokenizer.decode([token], skip_special_tokens=True)]
        self._special = [*tokenizer.all_special_tokens, *(self._decode([token]) for token in ends)]
        self._read_calls: Callable[[str, bool], tuple[str, list[Call]]] | None = None
        if schemas and getattr(tokenizer, "response_template", None) is None:
            self._read_calls = _FORMATS[_choose_format(parser, tokenizer, eos_token_ids, schemas)]

    def is_whole(self, ids: Sequence[int]) -> bool:
        """Tell whether the policy ended the turn itself."""
        return bool(ids) and ids[-1] in self._eos

    def read_text(self, ids: Sequence[int]) -> Turn:
        return Turn(self._tokenizer.decode(ids, skip_special_tokens=True))

    def read(self, ids: list[int], before: list[int]) -> Turn:
        """Read a whole turn. `before` are the ids before it: the prompt's, or the last answer's."""
        if not self._schemas:
            return self.read_text(ids)
        if self._read_calls is None:
            return self._read_by_template(ids, before)
        text = self._decode(ids[:-1])
        # `before` may be long: it is decoded only if needed.
        in_thought = "</think>" in text and self._decode(before).rstrip().endswith("<think>")
        content, calls = self._read_calls(text, in_thought)
        if not calls:
            return self.read_text(ids)
        return Turn(self._remove_special(content), calls)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _read_by_template(self, ids: list[int], before: list[int]) -> Turn:
        try:
            parsed = self._tokenizer.parse_response(ids, prefix=before, tools=self._schemas)
        except (*_NOT_JSON, KeyError, TypeError) as error:
            reason = str(error).splitlines()[0]
            return Turn(self.read_text(ids).content, [_failed(f"the call cannot be read: {reason}")])
        called = parsed.get("tool_calls") or []
        calls = [_make_call(call.get("function", call) if isinstance(call, dict) else call) for call in called]
        content, reasoning = parsed.get("content") or "", parsed.get("reasoning_content") or ""
        return Turn(self._remove_special(content), calls, self._remove_special(reasoning))

    def _remove_special(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        return text


def _read_hermes(text: str, in_thought: bool) -> tuple[str, list[Call]]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, after the reasoning.
    `in_thought`: the text before has begun the reasoning."""
    reasoning, mark, rest = text.partition("</think>")
    before, first_call, _ = reasoning.partition("<tool_call>")
    # Reasoning may mention a call, and an argument of a call may have </think> in it.
    if not mark or (first_call and not in_thought and "<think>" not in before):
        reasoning, mark, rest = "", "", text
    calls: list[Call] = []

    def take_out(match: re.Match) -> str:
        body, end = match.groups()
        try:
            calls.append(_make_call(json.loads(body)) if end else _failed("the call has no </tool_call>"))
        except _NOT_JSON as error:
            calls.append(_failed(f"the call is not JSON: {error}"))
        return match.group() if calls[-1].error else ""

    return (reasoning + mark + _HERMES.sub(take_out, rest)).strip(), calls


def _read_llama3(text: str, _: bool) -> tuple[str, list[Call]]:
    """Read `{"name": ..., "parameters": {...}}`, perhaps after <|python_tag|>, several with ; between them."""
    stripped = text.strip()
    body = stripped.removeprefix("<|python_tag|>").lstrip()
    if body == stripped and not re.match(r'\{\s*"name"', body):
        return text, []
    calls, place = [], 0
    while place < len(body):
        try:
            value, place = json.JSONDecoder().raw_decode(body, place)
        except _NOT_JSON as error:
            calls.append(_failed(f"the call is not JSON: {error}"))
            break
        calls.append(_make_call(value))
        place = _BETWEEN_CALLS.match(body, place).end()
    return stripped if any(call.error for call in calls) else "", calls


def _read_mistral(text: str, _: bool) -> tuple[str, list[Call]]:
    """Read `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`."""
    content, mark, body = text.partition("[TOOL_CALLS]")
    if not mark:
        return text, []
    try:
        values = json.loads(body)
    except _NOT_JSON as error:
        return text.strip(), [_failed(f"the calls are not JSON: {error}")]
    calls = [_make_call(value) for value in (values if isinstance(values, list) else [values])]
    return (text if any(call.error for call in calls) else content).strip(), calls


_FORMATS = {"hermes": _read_hermes, "llama3_json": _read_llama3, "mistral": _read_mistral}


def _choose_format(
    parser: str, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int], schemas: list[dict]
) -> str:
    """Return the format of `tool_call_parser`; "auto" is the one that reads the chat template's own call. Raises
    ConfigError if none does."""
    call = Call(schemas[0]["function"]["name"], {"argument": "ValueOfTheArgument"})
    texts = render_call(tokenizer, eos_token_ids, schemas, call.arguments)
    readable = (name for name, read in _FORMATS.items() if any(read(text, False)[1] == [call] for text in texts))
    written = next(readable, None)
    if parser == "auto" and written is None:
        reason = f"the chat template of {tokenizer.name_or_path} writes calls in no known format"
        remedy = f"set it to one of {', '.join(_FORMATS)}, or use a tokenizer with a response_template"
        raise ConfigError(f"tool_call_parser='auto': {reason}: {remedy}")
    if parser != "auto" and written not in (None, parser):
        message = "tool_call_parser=%r: the chat template writes calls as %s does, and such calls are not read"
        log.warning(message, parser, written)
    return written if parser == "auto" else parser


def _make_call(value: Any) -> Call:
    """Make a call of a JSON value; the first missing or wrong part is its error."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _failed('a call is an object with "name" and "arguments"')
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    if isinstance(arguments, str):  # some models write them as JSON in JSON
        try:
            arguments = json.loads(arguments)
        except _NOT_JSON as error:
            return _failed(f"the arguments are not JSON: {error}", value["name"])
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return _failed("the arguments are no object", value["name"])
    if fault := find_unrecordable([value["name"], arguments], DEEPEST_ARGUMENTS + 1):
        return _failed(f"the call has {fault}", value["name"])
    return Call(value["name"], arguments)


def _failed(error: str, name: str = "unknown") -> Call:  # as in TRL
    return Call(name, {}, error)

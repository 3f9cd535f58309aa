"""The text of turns: answers as the chat template writes them, as token ids, and calls of tools as the policy writes
them, read by the tokenizer's response template if it has one, else by the format that is set.

The policy's own tokens are never rendered: a short conversation is, whose text after the policy's turn is the answer.
"""

import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError, one_line, require
from grpo.data.chat_template import place_pictures, render_chat
from grpo.wire.json_fields import find_unrecordable
from grpo.wire.tool_outcomes import DEEPEST_ARGUMENTS

log = logging.getLogger(__name__)

_MARK, _ANSWER = "MarkOfTheTurn", "MarkOfTheAnswer"
_CALL_ID = "call00000"  # some templates ask for nine letters and digits
_FORMS = [*itertools.product((False, True), repeat=2)]
"""whether messages are in parts, and whether a call's arguments are JSON as text"""

Messages = list[dict[str, Any]]


class AnswerTemplate:
    """Writes answers as the model's chat template does, or as plain text without one."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        schemas: list[dict],
        template_kwargs: dict[str, Any] | None,
        answers_as_user: bool,
    ):
        """Try the template with tools, and with an environment's messages if `answers_as_user`. Raises ConfigError if
        it leaves out tools or answers, or ends a turn otherwise than the policy."""
        self._tokenizer, self._schemas = tokenizer, schemas
        self._kwargs = {**(template_kwargs or {}), **({"tools": schemas} if schemas else {})}
        self._ends = [tokenizer.decode([token], skip_special_tokens=False) for token in eos_token_ids]
        self._in_parts, self._text_arguments = _FORMS[0]
        if tokenizer.chat_template is None:
            remedy = "use a model that was trained to call them, or an environment with step alone"
            reason = f"it has no chat template for tools: {remedy}"
            return require(not schemas, "model_name_or_path", tokenizer.name_or_path, reason)
        tool = [{"role": "tool", "name": schema["function"]["name"], "content": _ANSWER} for schema in schemas[:1]]
        self._find_form([*tool, *([{"role": "user", "content": _ANSWER}] if answers_as_user else [])])

    def render(self, answers: Messages) -> str:
        """Return the text of the answers to a turn: of tools, or a message of the user."""
        return self._split(answers)[1]

    def encode(self, answers: Messages, after_cut: bool = False) -> list[int]:
        """Return the ids of that text after the end of a turn. `after_cut`: the turn was cut, and its end is needed
        too."""
        end, text = self._split(answers)
        # Together, as some ends take the line end after them, and some tokenizers put a space before a text.
        ids = self._tokenizer(end + text, add_special_tokens=False, verbose=False)["input_ids"]
        if after_cut:
            return ids
        ends = self._tokenizer(end, add_special_tokens=False)["input_ids"]
        return ids[len(ends) :]

    def _split(self, answers: Messages) -> tuple[str, str]:
        """Return the text that ends a turn, and the text after it. Raises _Unfit if the template has none."""
        if self._tokenizer.chat_template is None:
            return "", "".join(f"\n\n{answer['content']}\n\n" for answer in answers)
        turn: dict[str, Any] = {"role": "assistant", "content": _MARK}
        if answers[0]["role"] == "tool":
            turn = _make_call_turn(answers[0]["name"], {_MARK: _MARK}, self._text_arguments)
            answers = [answer | {"tool_call_id": _CALL_ID} for answer in answers]
        _, mark, rest = self._render([{"role": "user", "content": "?"}, turn, *answers]).partition(_MARK)
        if not mark:
            raise _Unfit("leaves out the turns that answers follow")
        places = {rest.find(end): end for end in self._ends if end in rest}
        if not places:
            raise _Unfit(f"ends a turn with none of {', '.join(self._ends)}, as the model does")
        end = places[min(places)]
        return end, rest[min(places) + len(end) :]

    def _find_form(self, answers: Messages) -> None:
        """Find the form in which the template takes tools and answers. Raises ConfigError if it takes them in none."""
        reasons = []
        for self._in_parts, self._text_arguments in _FORMS:
            try:
                shown = self._render([{"role": "user", "content": "?"}])
                if not all(schema["function"]["name"] in shown for schema in self._schemas):
                    raise _Unfit("leaves out the tools")
                if not all(_ANSWER in self.render([answer]) for answer in answers):
                    raise _Unfit("leaves out the answers")
                return
            except Exception as error:  # a template is a program that comes with the model: it may raise anything
                reasons.append(str(error) if isinstance(error, _Unfit) else f"refuses them ({error})")
        roles = " and ".join(answer["role"] for answer in answers)
        reason = f"its chat template cannot write tools and answers of {roles}: it {one_line(reasons[0])}"
        remedy = "use a model that was trained with them"
        raise ConfigError(f"model_name_or_path={self._tokenizer.name_or_path!r}: {reason}: {remedy}")

    def _render(self, messages: Messages) -> str:
        if self._in_parts:
            messages = place_pictures(messages, None)
        return render_chat(self._tokenizer, messages, add_generation_prompt=True, **self._kwargs)


def render_call(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int], schemas: list[dict], arguments: dict[str, str]
) -> list[str]:
    """Return the policy's text of a call of the first tool, in each form that the chat template takes. If the template
    begins that turn otherwise than the policy does, the text includes the template's beginning."""
    ends = [tokenizer.decode([token], skip_special_tokens=False) for token in eos_token_ids]
    name, texts = schemas[0]["function"]["name"], []
    for in_parts, text_arguments in _FORMS:
        messages = [{"role": "user", "content": _MARK}, _make_call_turn(name, arguments, text_arguments)]
        if in_parts:
            messages = place_pictures(messages, None)
        render = functools.partial(render_chat, tokenizer, tools=schemas)
        try:
            prompt, whole = render(messages[:1], add_generation_prompt=True), render(messages)
        except Exception:  # a template is a program that comes with the model: it may raise anything
            continue
        text = whole.partition(_MARK)[2].removeprefix(prompt.partition(_MARK)[2]).strip()
        for end in ends:
            text = text.removesuffix(end)
        if all(value in text for value in arguments.values()):
            texts.append(text)
    return texts


def _make_call_turn(name: str, arguments: dict[str, str], text_arguments: bool) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments) if text_arguments else arguments}
    call = {"type": "function", "id": _CALL_ID, "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class _Unfit(Exception):
    """A template without a place for answers. The message follows it in a sentence."""


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


_LLAMA3_CALL = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"')


def _read_llama3(text: str, _: bool) -> tuple[str, list[Call]]:
    """Read `{"name": ..., "parameters": {...}}`, perhaps after <|python_tag|>, several with ; between them."""
    stripped = text.strip()
    body = stripped.removeprefix("<|python_tag|>").lstrip()
    if body == stripped and not _LLAMA3_CALL.match(body):
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

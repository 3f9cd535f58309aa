"""The text that the model's chat template makes of a program's messages, and how a drawn segment is read as a message.

The messages of a new conversation are rendered whole. Messages after a drawn segment are rendered alone, and their ids
follow the ids that were drawn, which are never rendered.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from grpo.agents.requests import Refused
from grpo.config.errors import ConfigError, one_line
from grpo.data.chat_template import render_prompt, tokenize_prompt
from grpo.tools.turn_text import AnswerTemplate, Messages, TurnReader

_MOST_TOOL_LISTS = 256  # whose templates and readers are kept: a program may make other tools for each row


class Formats:
    """The templates and readers of a run, by the tools of a request."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        parser: str,
        template_kwargs: dict[str, Any] | None,
        history: Literal["drawn", "rendered"] = "drawn",
    ):
        """`end_ids` end a turn of the policy; `parser` is `tool_call_parser`, `template_kwargs` `chat_template_kwargs`.

        `history` is how a conversation continues where the template writes its past otherwise than it was drawn, as
        Qwen3's, which leaves out the thinking of earlier turns. "drawn": on the ids that were drawn, so that the policy
        sees all that it wrote; a server that renders each request anew, as most do, shows a deployed model less.
        "rendered": in a new branch, of the template's text: the policy sees what a deployed model sees, and each
        turn may become a sequence of its own."""
        self.tokenizer, self.history = tokenizer, history
        self._ends, self._parser, self._kwargs = [*end_ids], parser, template_kwargs
        self._template = functools.lru_cache(_MOST_TOOL_LISTS)(self._make_template)
        self._reader = functools.lru_cache(_MOST_TOOL_LISTS)(self._make_reader)

    def reader(self, tools: list[dict]) -> TurnReader:
        """Return the reader of turns that may call these tools. Raises Refused if the template cannot write them."""
        with _refusing("tools"):
            return self._reader(json.dumps(tools))

    def render(self, messages: Messages, tools: list[dict]) -> list[int]:
        """Return the ids of a conversation that an assistant's turn follows. Raises Refused."""
        numbered, failure = _number_calls(messages), None
        render = functools.partial(render_prompt, self.tokenizer, system_prompt="", template_kwargs=self._kwargs)
        with _refusing("messages"):
            # Some templates take a call's arguments as JSON in text alone.
            for form in (numbered, [*map(_write_arguments, numbered)]):
                try:
                    text = render(prompt=form, tools=tools, place="them", continues_last=False)
                    return tokenize_prompt(self.tokenizer, text)
                except ConfigError as error:
                    failure = failure or error
            raise failure

    def continue_on(self, drawn: list[int], tail: Messages, tools: list[dict]) -> list[int]:
        """Return the ids of messages that follow a drawn segment, with an end of its turn if it was cut. Raises
        Refused."""
        with _refusing("messages"):
            return self._template(json.dumps(tools)).encode(tail, after_cut=drawn[-1] not in self._ends)

    def is_same_text(self, ids: list[int], others: list[int]) -> bool:
        """Tell whether ids are another spelling of the same text."""
        return ids == others or self._decode(ids) == self._decode(others)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _make_template(self, tools: str) -> AnswerTemplate:
        return AnswerTemplate(self.tokenizer, self._ends, json.loads(tools), self._kwargs, True)

    def _make_reader(self, tools: str) -> TurnReader:
        schemas = json.loads(tools)
        if schemas:
            self._template(tools)  # its refusal says best how the chat template falls short
        return TurnReader(self.tokenizer, self._ends, schemas, self._parser)


def read_messages(messages: Messages) -> Messages:
    """Return a request's messages as chat templates take them: arguments of calls are objects, where they are JSON of
    one, and an answer to a call has the name of its tool."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        if calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            message = message | {"tool_calls": [*map(_read_arguments, calls)]}
        elif message["role"] == "tool":
            message = message | {"name": names.get(message.get("tool_call_id")) or message.get("name", "unknown")}
        made.append(message)
    return made


def _read_arguments(call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}}


def _write_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not (calls := message.get("tool_calls")):
        return message
    return message | {"tool_calls": [call | {"function": write_function(call["function"])} for call in calls]}


def write_function(function: dict[str, Any]) -> dict[str, Any]:
    """Return a called function with its arguments as JSON in text."""
    if isinstance(function["arguments"], str):
        return function
    return function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _number_calls(messages: Messages) -> Messages:
    """Give calls ids of nine letters and digits, as some templates ask for, which follow from their order alone."""
    numbers, ids, made = itertools.count(), {}, []
    for message in messages:
        if calls := message.get("tool_calls"):
            ids |= {call["id"]: f"call{next(numbers):05}" for call in calls}
            message = message | {"tool_calls": [call | {"id": ids[call["id"]]} for call in calls]}
        elif message.get("tool_call_id") in ids:
            message = message | {"tool_call_id": ids[message["tool_call_id"]]}
        made.append(message)
    return made


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Turn a failure of the chat template into Refused."""
    try:
        yield
    except ConfigError as error:
        raise Refused(f"{param}: {error}", param=param) from error
    except Exception as error:  # a template is a program that comes with the model: it may raise anything
        raise Refused(f"{param}: the chat template cannot write them: {one_line(error)}", param=param) from error

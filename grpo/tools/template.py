"""Renders answers as token ids: the chat template's text between two turns of the policy.

The policy's own tokens are never rendered: a short conversation is, whose text after the policy's turn is the answer.
"""

import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError, one_line, require
from grpo.data.chat_template import place_pictures, render_chat

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

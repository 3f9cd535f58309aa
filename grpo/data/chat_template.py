"""Renders a prompt, text or a chat, to the text and the token ids that the model continues."""

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError, one_line, require
from grpo.model.load import render_chat
from grpo.model.pictures import PictureProcessor
from grpo.wire.picture_files import PicturedPrompt
from grpo.wire.rewards import Message

MARK = "<image>"  # marks the place of a picture in a user's text

# A message whose content is text, or a list of parts: {"type": "text", "text": ...} and {"type": "image"}.
PartMessage = dict[str, Any]


class PictureCountError(ValueError):
    """A prompt that has more or fewer places for pictures than pictures. The text is the rest of a sentence."""


def chat_messages(prompt: str | list[PartMessage], system_prompt: str) -> list[PartMessage]:
    """Return the prompt as a chat that begins with a system message, its own or `system_prompt` (none where empty)."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def place_pictures(messages: Sequence[PartMessage], pictures: int | None) -> list[PartMessage]:
    """Return a chat with all content in parts, `pictures` of which are pictures; None: without, and `<image>` is text.
    They take the places of the messages' picture parts and of `<image>` in a user's text; else they stand before the
    user's first text. Raises PictureCountError."""
    placed = [message | {"content": _parts_of(message, pictures is not None)} for message in messages]
    count = sum(part["type"] == "image" for message in placed for part in message["content"])
    first = next((message for message in placed if message["role"] == "user"), None)
    if count == 0 and pictures and first is not None:
        first["content"] = [{"type": "image"}] * pictures + first["content"]
    elif count != (pictures or 0):
        raise PictureCountError(f"places for pictures: {count}, pictures: {pictures or 0}")
    return placed


def text_of_messages(messages: Sequence[PartMessage]) -> list[Message]:
    """Return a chat with all content as text, without the pictures of content in parts."""
    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": "".join(part["text"] for part in message["content"] if part["type"] == "text")}
        for message in messages
    ]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[PartMessage],
    system_prompt: str,
    template_kwargs: dict[str, Any] | None = None,
    place: str = "the conversation",
    pictures: int | None = None,
    tools: list[dict[str, Any]] | None = None,
    continues_last: bool = True,
) -> str:
    """Render a prompt (text, or chat messages) to the text the model continues; plain text without a chat template. A
    last message of the assistant is continued, as TRL's `apply_chat_template` does, or followed by another one if
    `continues_last` is False. `place` names the prompt in an error. The model's placeholder stands for each of
    `pictures`, which are placed as `place_pictures` does; a prompt without pictures is rendered in parts only if the
    template takes no text. Raises ConfigError if the template does not take the prompt, PictureCountError."""
    messages = chat_messages(prompt, system_prompt)
    in_parts = place_pictures(messages, pictures)
    template_kwargs = (template_kwargs or {}) | ({"tools": tools} if tools else {})
    forms = [in_parts] if pictures else [text_of_messages(messages), in_parts]
    continued = continues_last and messages[-1]["role"] == "assistant"
    if tokenizer.chat_template is None:
        require(not template_kwargs, "chat_template_kwargs", template_kwargs, "the model has no template: leave it out")
        reason = "it has no chat template, so no picture has a place: use another model"
        require(not pictures, "model_name_or_path", tokenizer.name_or_path, reason)
        return "\n\n".join(message["content"] for message in forms[0]) + ("" if continued else "\n\n")

    options = dict(add_generation_prompt=not continued, continue_final_message=continued)
    render = partial(render_chat, tokenizer, **options, **template_kwargs)
    reasons = []
    for form in forms:
        try:
            rendered = render(form)
            if not _leaves_out_question(render, form, rendered):
                return rendered
            reasons.append("leaves out the user's text")
        except Exception as error:  # a template is a program that comes with the model: it may raise anything
            reasons.append(f"refuses {place} ({type(error).__name__}: {error})")
    remedy = "change the messages, set system_prompt to '' if it knows no system message, or use another model"
    raise ConfigError(
        f"model_name_or_path={tokenizer.name_or_path!r}: its chat template {one_line(reasons[0])}: {remedy}"
    )


def add_observation(prompt: str | list[PartMessage], observation: str) -> str | list[PartMessage]:
    """Append an environment's observation to the last message of a prompt, as TRL does."""
    if isinstance(prompt, str):
        return prompt + observation
    content = prompt[-1]["content"]
    added = content + observation if isinstance(content, str) else [*content, {"type": "text", "text": observation}]
    return [*prompt[:-1], prompt[-1] | {"content": added}]


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    processor: PictureProcessor | None = None,
    pictures: Sequence[bytes] = (),
) -> list[int] | PicturedPrompt:
    """Return the ids of the text that `render_prompt` returned; with pictures, which the model's processor expands.
    Raises PictureCountError if the text itself has the model's placeholder, PictureError for an unusable picture."""
    if processor is not None:
        if (count := prompt.count(mark := processor.placeholder)) != len(pictures):
            raise PictureCountError(f"places for pictures ({mark}): {count}, pictures: {len(pictures)}")
        piece = tokenizer.convert_ids_to_tokens(processor.token_id)
        if piece != mark and piece in prompt:
            raise PictureCountError(f"places for pieces of pictures are in the text itself: {piece}")
    # A chat template has written every special token already.
    is_plain = tokenizer.chat_template is None
    if pictures:
        return processor.encode(prompt, pictures, is_plain and not _begins_with_bos(tokenizer, prompt))
    return tokenize_text(tokenizer, prompt) if is_plain else tokenizer(prompt, add_special_tokens=False)["input_ids"]


def tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text that no template has written, with the special tokens that the tokenizer adds, but no
    second one where the text begins with the token of a beginning."""
    return tokenizer(text, add_special_tokens=not _begins_with_bos(tokenizer, text))["input_ids"]


def _begins_with_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)


def with_system_prompt(tokenizer: PreTrainedTokenizerBase, system_prompt: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a chat template that puts the system prompt before a chat without a system message."""
    text = json.dumps(system_prompt, ensure_ascii=False)  # Jinja reads JSON's escapes
    add = f"{{% set messages = [{{'role': 'system', 'content': {text}}}] + messages %}}"
    copied = copy.copy(tokenizer)
    # transformers leaves out the line end after a block, so that the model's own template begins as it did.
    added = f"{{% if messages[0]['role'] != 'system' %}}{add}{{% endif %}}"
    copied.chat_template = f"{added}\n{tokenizer.get_chat_template()}"
    return copied


def _parts_of(message: PartMessage, marked: bool) -> list[dict[str, str]]:
    """Return a message's content as parts; if `marked`, `<image>` in a user's text is a picture's place."""
    if not isinstance(content := message["content"], str):
        # Rows of a dataset have null for fields of other parts.
        return [{name: value for name, value in part.items() if value is not None} for part in content]
    texts = content.split(MARK) if marked and message["role"] == "user" else [content]
    parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return [part for part in parts if part != {"type": "text", "text": ""}] or [{"type": "text", "text": ""}]


def _leaves_out_question(
    render: Callable[[Sequence[PartMessage]], str], messages: Sequence[PartMessage], rendered: str
) -> bool:
    """Tell whether another question of the user would give the same text, as of a template for content in parts."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        return False
    content = messages[last]["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    if all(text.strip() in rendered for text in texts):
        return False
    question = {"type": "text", "text": "?"}
    changed = "?" if isinstance(content, str) else [part if part["type"] == "image" else question for part in content]
    return render([*messages[:last], messages[last] | {"content": changed}, *messages[last + 1 :]]) == rendered

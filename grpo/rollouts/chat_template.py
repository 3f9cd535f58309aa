"""Renders a prompt, text or a chat, to the text and the token ids that the model continues."""

from __future__ import annotations

import copy
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError, require
from grpo.wire.rewards import Message


def chat_messages(prompt: str | list[Message], system_prompt: str) -> list[Message]:
    """Return the prompt as a chat that begins with a system message, its own or `system_prompt` (none where empty)."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[Message],
    system_prompt: str,
    template_kwargs: dict[str, Any] | None = None,
    place: str = "the conversation",
) -> str:
    """Render a prompt (text, or chat messages) to the text the model continues; plain text without a chat template.

    A last message of the assistant is continued, not followed by another one, as TRL's `apply_chat_template` does.
    The template can read `template_kwargs`. `place` tells in an error where the prompt is. Raises ConfigError where the
    template does not take the prompt.
    """
    messages = chat_messages(prompt, system_prompt)
    continued = messages[-1]["role"] == "assistant"
    if tokenizer.chat_template is None:
        require(not template_kwargs, "chat_template_kwargs", template_kwargs, "the model has no template: leave it out")
        return "\n\n".join(message["content"] for message in messages) + ("" if continued else "\n\n")

    def render(messages: list[Message]) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            **(template_kwargs or {}),
        )

    model, left_out = f"model_name_or_path={tokenizer.name_or_path!r}", False
    try:
        rendered = render(messages)
        # A template for content in parts goes through a text character by character, and writes nothing.
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is not None and messages[last]["content"].strip() not in rendered:
            changed = messages[last] | {"content": "?"}
            left_out = render([*messages[:last], changed, *messages[last + 1 :]]) == rendered
    except Exception as error:  # a template is a program that comes with the model: it may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if system_prompt and messages[0]["content"] == system_prompt:
            raise ConfigError(
                f"system_prompt={system_prompt[:40]!r}: the model's chat template refuses {place} ({reason}): if it "
                "knows no system message, set system_prompt to '' and put the instructions into the prompts"
            ) from error
        raise ConfigError(
            f"{model}: its chat template refuses {place} ({reason}): change the messages, or use another model"
        ) from error
    if left_out:
        raise ConfigError(
            f"{model}: its chat template leaves out what the user says: use a model whose template takes a message's "
            "content as text"
        )
    return rendered


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the ids of the text that `render_prompt` returned."""
    # A chat template has written every special token already.
    return tokenizer(prompt, add_special_tokens=tokenizer.chat_template is None)["input_ids"]


def with_system_prompt(tokenizer: PreTrainedTokenizerBase, system_prompt: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a chat template that puts the system prompt before a chat without a system message.

    `render_prompt` gives every chat a system message where it is told one, so that this one is not put in twice.
    """
    text = json.dumps(system_prompt, ensure_ascii=False)  # Jinja reads JSON's escapes
    add = f"{{% set messages = [{{'role': 'system', 'content': {text}}}] + messages %}}"
    copied = copy.copy(tokenizer)
    # transformers leaves out the line end after a block, so that the model's own template begins as it did.
    copied.chat_template = (
        f"{{% if messages[0]['role'] != 'system' %}}{add}{{% endif %}}\n{tokenizer.get_chat_template()}"
    )
    return copied

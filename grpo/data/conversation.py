"""Keeps the questions and answers of a chat, and makes the prompt of each next question."""

import contextlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError
from grpo.config.sampling_settings import ChatConfig
from grpo.data.chat_template import PictureCountError, add_observation, place_pictures, render_prompt, tokenize_prompt
from grpo.data.dataset_pictures import encode_picture
from grpo.data.records import Example, Responder, Rollout
from grpo.model.pictures import PictureProcessor

NEW = "/new"  # the line that begins a new conversation


class NotAsked(ConfigError):
    """A line of the user that leads to no question. The text says why, and what to do."""


class Conversation:
    """The questions and answers so far, and the pictures that go with the next question."""

    def __init__(
        self,
        config: ChatConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: PictureProcessor | None,
        longest: int,
        turns: Responder | None,
    ):
        """`longest`: tokens that the model takes, an answer's first one included."""
        self._config, self._tokenizer, self._processor, self._turns = config, tokenizer, processor, turns
        self.longest = longest
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self._messages: list[dict[str, Any]] = []
        self._pictures: list[bytes] = []
        self._next_pictures: list[bytes] = []

    def add_picture(self, path: str) -> None:
        """Add a picture to the next question. Raises NotAsked if it cannot be used."""
        if self._processor is None:
            raise NotAsked(f"the picture {path} is not taken: {self._config.model_name_or_path} takes text alone")
        try:
            picture = encode_picture(Path(path).expanduser().read_bytes())
            self._processor.count([picture])  # decodes it, and lets the model's processor refuse it
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~nobody
            reason = getattr(error, "strerror", None) or error
            raise NotAsked(f"the picture {path} cannot be used ({reason})") from error
        self._next_pictures.append(picture)

    def ask(self, line: str) -> Example:
        """Return the prompt with the question of a line. Raises NotAsked, and RewardError if the environment fails."""
        question, columns, tools = line, {}, None
        if self._turns is not None:
            question, columns = row_of(line)
            question = add_observation(question, self._turns.observe(columns))
            tools = self._turns.tools
        if not self._config.keep_history:
            self._messages, self._pictures = [], []
        pictures = [*self._pictures, *self._next_pictures]
        try:
            # Without a picture to place, `<image>` is text.
            new = place_pictures([{"role": "user", "content": question}], len(self._next_pictures) or None)
            messages = [*self._messages, *new]
            prompt = render_prompt(
                self._tokenizer,
                messages,
                self._config.system_prompt,
                template_kwargs=self._config.chat_template_kwargs,
                pictures=len(pictures),
                tools=tools,
            )
            prompt_ids = tokenize_prompt(self._tokenizer, prompt, self._processor, pictures)
        except PictureCountError as error:
            raise NotAsked(f"the question has other places than pictures ({error}): ask it again") from error
        except ConfigError as error:
            if not self._messages:
                raise
            # A template may refuse the calls of earlier turns: Mistral's wants ids.
            raise NotAsked(f"{error}; begin a new conversation with {NEW}, or use --no_keep_history") from error
        if len(prompt_ids) >= self.longest:
            excess = f"the conversation has {len(prompt_ids)} tokens, and the model takes at most {self.longest}"
            raise NotAsked(f"{excess}: ask less at a time, begin a new one with {NEW}, or use --no_keep_history")
        self._messages, self._pictures, self._next_pictures = messages, pictures, []
        return Example(index=0, prompt=prompt, prompt_ids=prompt_ids, columns=columns)

    def answered(self, answer: Rollout) -> None:
        if answer.outcome is None:
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self._messages += answer.outcome.messages


def row_of(line: str) -> tuple[str, dict[str, Any]]:
    """Return the question of a line, and the columns of its row if the line is a JSON object. Raises NotAsked."""
    columns = None
    with contextlib.suppress(ValueError):
        columns = json.loads(line)
    if not isinstance(columns, dict):
        return line, {}
    question = columns.get("question", columns.get("prompt"))
    if not isinstance(question, str):
        raise NotAsked("the row has no text as `question` or `prompt`: add it")
    return question, columns

"""Talk to a saved model. Its answers appear token by token.

    python -m grpo.chat --model runs/DATE-TIME/model
    echo "What is 2+2?" | python -m grpo.chat --model runs/DATE-TIME/model

A line is a question. The model is asked as in training, as its grpo.yaml says where a run has saved it, and answers
from the distribution that it was trained on: its temperature, nothing cut off, no penalties; --temperature 0 is greedy.
The model sees the earlier lines too. /new begins a new conversation, Ctrl-C stops an answer, Ctrl-D ends. /image PATH
adds a picture to the next question, for a vision-language model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError, say_once
from grpo.config.generation import ChatConfig
from grpo.model.answering import model_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo.model.pictures import PictureProcessor
    from grpo.wire.pictures import PicturedPrompt

NEW, IMAGE = "/new", "/image"


def talk(config: ChatConfig, interactive: bool) -> None:
    """Answer the lines of stdin. Raises ConfigError where the model cannot be asked."""
    from grpo.model.devices import refuse_shortage
    from grpo.model.load import NO_LIMIT, eos_token_ids, length_limits, load_model, load_settings, load_tokenizer
    from grpo.model.pictures import Vision, load_processor
    from grpo.rollouts.local import LocalSampler
    from grpo.rollouts.records import Example
    from grpo.run.collective import own_place

    _, _, device = own_place()
    tokenizer = load_tokenizer(config)
    processor = load_processor(config, load_settings(config), tokenizer)
    model = load_model(config, device)
    vision = Vision(processor, model) if processor is not None else None
    # An answer is a batch by itself, so that the limits that exist for batches of several do not hold.
    longest = length_limits(model.config).get("max_position_embeddings", NO_LIMIT)
    ends = eos_token_ids(model, tokenizer)
    if interactive:
        picture = f"{IMAGE} PATH adds a picture, " if processor is not None else ""
        end = "Ctrl-C stops an answer, Ctrl-D ends"
        print(f"{config.model_name_or_path}: {picture}{NEW} begins a new conversation, {end}")

    conversation = Conversation(config, tokenizer, processor, longest)
    for turn, question in enumerate(questions(interactive)):
        if question == NEW:
            conversation.begin()
            continue
        try:
            if question.split()[0] == IMAGE:
                conversation.add_picture(question.removeprefix(IMAGE).strip().strip("'\""))
                continue
            prompt, prompt_ids = conversation.ask(question)
        except NotAsked as error:
            if not interactive:
                raise ConfigError(str(error)) from error
            print(f"({error})")
            continue
        room = longest - len(prompt_ids)
        sampler = LocalSampler(model, tokenizer, ends, min(config.max_completion_length, room), vision=vision)
        shortage = refuse_shortage("max_completion_length", config.max_completion_length, "use a smaller one")
        with shortage, stopped_by_ctrl_c(interactive) as stopped:
            printer, example = AnswerPrinter(tokenizer.decode, stopped), Example(turn, prompt, prompt_ids, {})
            # Another seed for each question, or the same question would get the same answer.
            rollout = sampler.stream(example, config.temperature, config.seed + turn, printer)
        printer.finish()
        if interactive and not (rollout.finished or stopped):
            print(f"(cut off after {len(rollout.completion_ids)} tokens)")
        conversation.answered(rollout.text)


class NotAsked(Exception):
    """A line of the user that leads to no question. The text says why, and what to do."""


class Conversation:
    """The questions and answers so far, and the pictures that go with the next question."""

    def __init__(
        self,
        config: ChatConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: PictureProcessor | None,
        longest: int,
    ):
        """`longest`: tokens that the model takes, an answer's first one included."""
        self._config, self._tokenizer, self._processor, self._longest = config, tokenizer, processor, longest
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self._messages: list[dict[str, Any]] = []
        self._pictures: list[bytes] = []
        self._next_pictures: list[bytes] = []

    def add_picture(self, path: str) -> None:
        """Add a picture to the next question. Raises NotAsked where it cannot be used."""
        from grpo.rollouts.pictures import encode_picture

        if self._processor is None:
            raise NotAsked(f"the picture {path} is not taken: {self._config.model_name_or_path} takes text alone")
        try:
            picture = encode_picture(Path(path).expanduser().read_bytes())
            self._processor.count([picture])  # decodes it, and lets the model's processor refuse it
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~nobody
            raise NotAsked(
                f"the picture {path} cannot be used ({getattr(error, 'strerror', None) or error})"
            ) from error
        self._next_pictures.append(picture)

    def ask(self, question: str) -> tuple[str, list[int] | PicturedPrompt]:
        """Return the prompt with the question, and its ids. Raises NotAsked where the model cannot be asked it."""
        from grpo.rollouts.chat_template import PictureCountError, place_pictures, render_prompt, tokenize_prompt

        if not self._config.keep_history:
            self._messages, self._pictures = [], []
        pictures = [*self._pictures, *self._next_pictures]
        try:
            # Without a picture to place, `<image>` is text.
            new = place_pictures([{"role": "user", "content": question}], len(self._next_pictures) or None)
            messages = [*self._messages, *new]
            config = self._config
            prompt = render_prompt(
                self._tokenizer, messages, config.system_prompt, config.chat_template_kwargs, pictures=len(pictures)
            )
            prompt_ids = tokenize_prompt(self._tokenizer, prompt, self._processor, pictures)
        except PictureCountError as error:
            raise NotAsked(f"the question has other places than pictures ({error}): ask it again") from error
        if len(prompt_ids) >= self._longest:
            raise NotAsked(
                f"the conversation has {len(prompt_ids)} tokens, and the model takes at most {self._longest}: ask "
                f"less at a time, begin a new one with {NEW}, or use --no_keep_history"
            )
        self._messages, self._pictures, self._next_pictures = messages, pictures, []
        return prompt, prompt_ids

    def answered(self, text: str) -> None:
        """Add the answer to the last question."""
        self._messages.append({"role": "assistant", "content": text})


def questions(interactive: bool) -> Iterator[str]:
    """Yield the lines of stdin that are not empty. At a terminal Ctrl-C only abandons the line."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() then edits lines and remembers them
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            continue
        if line:
            yield line


class AnswerPrinter:
    """The printer of an answer while it grows. A character of several tokens is held back until it is whole."""

    def __init__(self, decode: Callable[..., str], stopped: list[int]):
        self._decode, self._stopped, self._ids = decode, stopped, []
        # The tokens that were printed last are decoded with the new ones, whose text may depend on them.
        self._from = self._printed = 0

    def __call__(self, ids: list[int]) -> bool:
        """Print the text of the new ids, given all ids so far. Return whether the answer is to stop."""
        self._ids = ids
        if (new := self._new_text()) and not new.endswith("\ufffd"):
            self._print(new)
        return bool(self._stopped)

    def finish(self) -> None:
        """Print the rest, and end the line."""
        self._print(self._new_text() + "\n")

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._from : self._printed], skip_special_tokens=True)
        return self._decode(self._ids[self._from :], skip_special_tokens=True)[len(before) :]

    def _print(self, text: str) -> None:
        print(text, end="", flush=True)
        self._from, self._printed = self._printed, len(self._ids)


@contextlib.contextmanager
def stopped_by_ctrl_c(interactive: bool) -> Iterator[list[int]]:
    """At a terminal, let the first Ctrl-C only add its number to the list; a second Ctrl-C ends the program."""
    stopped: list[int] = []
    if not interactive:
        yield stopped
        return

    def note(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> int:
    config = parse_arguments(ChatConfig, __doc__, model_settings=model_settings)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdin.reconfigure(errors="replace")
    try:
        talk(config, interactive)
    except ConfigError as error:
        say_once(str(error))
        return 2
    except BrokenPipeError:  # the reader of the answers has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

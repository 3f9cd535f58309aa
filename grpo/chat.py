"""Talk to a saved model. Its answers appear token by token.

    python -m grpo.chat --model runs/DATE-TIME/model
    echo "What is 2+2?" | python -m grpo.chat --model runs/DATE-TIME/model

A line is a question. The model is asked as in training, as its grpo.yaml says where a run has saved it, and answers
from the distribution that it was trained on: its temperature, nothing cut off, no penalties; --temperature 0 is greedy.
The model sees the earlier lines too. /new begins a new conversation, Ctrl-C stops an answer, Ctrl-D ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError, say_once
from grpo.config.generation import ChatConfig
from grpo.model.answering import model_settings

NEW = "/new"


def talk(config: ChatConfig, interactive: bool) -> None:
    """Answer the lines of stdin. Raises ConfigError where the model cannot be asked."""
    from grpo.model.devices import refuse_shortage
    from grpo.model.load import NO_LIMIT, eos_token_ids, length_limits, load_model, load_tokenizer
    from grpo.rollouts.chat_template import render_prompt, tokenize_prompt
    from grpo.rollouts.local import LocalSampler
    from grpo.rollouts.records import Example
    from grpo.run.collective import own_place

    _, _, device = own_place()
    tokenizer, model = load_tokenizer(config), load_model(config, device)
    # An answer is a batch by itself, so that the limits that exist for batches of several do not hold.
    longest = length_limits(model.config).get("max_position_embeddings", NO_LIMIT)
    ends = eos_token_ids(model, tokenizer)
    if interactive:
        print(f"{config.model_name_or_path}: {NEW} begins a new conversation, Ctrl-C stops an answer, Ctrl-D ends")

    messages: list[dict[str, str]] = []
    for turn, question in enumerate(questions(interactive)):
        if question == NEW or not config.keep_history:
            messages = []
        if question == NEW:
            continue
        messages.append({"role": "user", "content": question})
        prompt = render_prompt(tokenizer, messages, config.system_prompt, config.chat_template_kwargs)
        prompt_ids = tokenize_prompt(tokenizer, prompt)
        room = longest - len(prompt_ids)
        if room < 1:
            too_long = f"the conversation has {len(prompt_ids)} tokens, and the model takes at most {longest}"
            if not interactive:
                raise ConfigError(f"{too_long}: ask less at a time, or use --no_keep_history")
            print(f"({too_long}: {NEW} begins a new one)")
            messages.pop()
            continue
        sampler = LocalSampler(model, tokenizer, ends, min(config.max_completion_length, room))
        shortage = refuse_shortage("max_completion_length", config.max_completion_length, "use a smaller one")
        with shortage, stopped_by_ctrl_c(interactive) as stopped:
            printer, example = AnswerPrinter(tokenizer.decode, stopped), Example(turn, prompt, prompt_ids, {})
            # Another seed for each question, or the same question would get the same answer.
            rollout = sampler.stream(example, config.temperature, config.seed + turn, printer)
        printer.finish()
        if interactive and not (rollout.finished or stopped):
            print(f"(cut off after {len(rollout.completion_ids)} tokens)")
        messages.append({"role": "assistant", "content": rollout.text})


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

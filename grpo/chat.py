"""Talk to a saved model. Its answers appear token by token.

    grpo chat --model runs/DATE-TIME/model
    echo "What is 2+2?" | grpo chat --model runs/DATE-TIME/model

A line is a question. A run's model is asked as in training, as its grpo.yaml says, and answers from the distribution
that it was trained on: its temperature, nothing cut off, no penalties; --temperature 0 is greedy.
The model sees the earlier lines too. /new begins a new conversation, Ctrl-C stops an answer, Ctrl-D ends. /image PATH
adds a picture to the next question, for a vision-language model.

With --tools or --environment the model calls as in training, and the answers to it are shown in brackets. A line that
is a JSON object is then a row of a dataset: its `question` or `prompt` is asked, and the environment gets all of it.

With --agent each line, or row, is an episode of its own of the program; what was said in it is shown when it has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

from grpo.config.command_line import parse_arguments
from grpo.config.console import end_now
from grpo.config.errors import ConfigError, RewardError, ending_at_ctrl_c, say_once, wake_main_thread
from grpo.config.sampling_settings import ChatConfig
from grpo.model.answering import model_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo.data.conversation import Conversation
    from grpo.data.records import Dialogue, Example, Responder, Rollout
    from grpo.model.pictures import Vision

IMAGE = "/image"
_AGENT_CONTEXT, _AGENT_ROWS = 8192, 4  # of an agent: tokens of a request with its answer; requests at a time
_LOOK = 0.1  # seconds from one look at Ctrl-C to the next, while a tool or environment is waited for


def talk(config: ChatConfig, interactive: bool) -> None:
    """Answer the lines of stdin. Raises ConfigError if the model cannot be asked."""
    from grpo.data.conversation import NEW, Conversation
    from grpo.model.load import NO_LIMIT, length_limits, load_end_ids, load_model, load_settings, load_tokenizer
    from grpo.model.pictures import Vision, load_processor
    from grpo.run.collective import own_place
    from grpo.tools.dialogue import start_turns

    if config.agent is not None:
        return talk_to_agent(config, interactive)
    _, _, device = own_place()
    tokenizer = load_tokenizer(config)
    settings = load_settings(config)
    processor = load_processor(config, settings, tokenizer)
    ends = load_end_ids(config, settings, tokenizer)
    turns = start_turns(config, tokenizer, ends)
    try:
        model = load_model(config, device)
        vision = Vision(processor, model) if processor is not None else None
        # An answer is a batch by itself, so that the limits that exist for batches of several do not hold.
        longest = length_limits(model.config).get("max_position_embeddings", NO_LIMIT)
        conversation = Conversation(config, tokenizer, processor, longest, turns)
        answerer = Answerer(config=config, model=model, tokenizer=tokenizer, end_ids=ends, vision=vision, turns=turns)
        if interactive:
            picture = f"{IMAGE} PATH adds a picture, " if processor is not None else ""
            end = "Ctrl-C stops an answer, Ctrl-D ends"
            print(f"{config.model_name_or_path}: {picture}{NEW} begins a new conversation, {end}")
        answer_lines(config, interactive, conversation, answerer)
    finally:
        if turns is not None:
            turns.close()  # Python would wait for a call that hangs


def talk_to_agent(config: ChatConfig, interactive: bool) -> None:
    """Let the program of an agent have an episode for each line of stdin. Raises as `talk`, and if the agent cannot be
    run."""
    from grpo.agents.episodes import Agent
    from grpo.data.conversation import NotAsked, row_of
    from grpo.data.records import Example
    from grpo.model.load import length_limits, load_end_ids, load_model, load_settings, load_tokenizer
    from grpo.model.trial import make_batcher
    from grpo.run.collective import own_place
    from grpo.sampling.self_check import make_sampler

    _, _, device = own_place()
    tokenizer = load_tokenizer(config)
    ends = load_end_ids(config, load_settings(config), tokenizer)
    model = load_model(config, device)
    context = min([_AGENT_CONTEXT, *length_limits(model.config).values()])
    agent = Agent(config, tokenizer, ends, context=context, rows=_AGENT_ROWS)
    try:
        agent.start()
        sampler = make_sampler(
            model,
            tokenizer,
            config.max_completion_length,
            rows=_AGENT_ROWS,
            packs=make_batcher(model, tokenizer.pad_token_id).packs,
            turns=agent,
        )
        if interactive:
            print(f"{config.model_name_or_path} answers {agent.label}: Ctrl-C stops an episode, Ctrl-D ends")
        for turn, line in enumerate(questions(interactive)):
            try:
                question, columns = row_of(line)
                example = Example(index=turn, prompt=question, prompt_ids=[], columns=columns or {"question": line})
                if config.temperature == 0:
                    [rollout] = sampler.greedy([example])
                else:
                    [[rollout]] = sampler.sample([example], 1, config.temperature, seed=config.seed, ids=[turn])
            except (NotAsked, KeyboardInterrupt) as error:
                if not interactive:
                    raise
                print(f"({str(error) or 'stopped'})")
            else:
                show_episode(rollout)
    finally:
        agent.close()


def show_episode(rollout: Rollout) -> None:
    """Print the model's messages, those to it in brackets, and how the episode ended."""
    from grpo.data.records import show_answer

    outcome = rollout.outcome
    for message in outcome.messages:
        if message["role"] != "assistant":
            print(show_answer(message | {"name": message.get("name", message["role"])}))
            continue
        calls = [call["function"] for call in message.get("tool_calls", ())]
        texts = [message["content"], *(f"{call['name']}({json.dumps(call['arguments'])})" for call in calls)]
        print("\n".join(filter(None, texts)))
    ended = f"failed: {outcome.failure}" if outcome.failure else "ended"
    counts = f"{rollout.turns} turns, {len(rollout.branches)} branches, {rollout.drawn_tokens} tokens"
    given = "".join(f", {name} {value:g}" for name, value in (outcome.rewards | outcome.parts).items())
    print(f"(the episode {ended}: {counts}{given})", flush=True)


def answer_lines(config: ChatConfig, interactive: bool, conversation: Conversation, answerer: Answerer) -> None:
    from grpo.data.conversation import NEW, NotAsked
    from grpo.model.devices import refuse_shortage

    for turn, question in enumerate(questions(interactive)):
        if question == NEW:
            conversation.begin()
            continue
        try:
            if question.split()[0] == IMAGE:
                conversation.add_picture(question.removeprefix(IMAGE).strip().strip("'\""))
                continue
            example = conversation.ask(question)
        except (NotAsked, RewardError) as error:
            if not interactive:
                raise
            remedy = ": give the environment a row, as a JSON object" if isinstance(error, RewardError) else ""
            print(f"({error}{remedy})")
            continue
        limit = min(config.max_completion_length, conversation.longest - len(example.prompt_ids))
        shortage = refuse_shortage("max_completion_length", config.max_completion_length, "use a smaller one")
        with shortage, stopped_by_ctrl_c(interactive) as stopped:
            # Another seed for each question, or the same question would get the same answer.
            answer = answerer.answer(example, limit=limit, seed=config.seed + turn, stopped=stopped)
        if interactive and not (answer.finished or stopped):
            print(f"(cut off after {len(answer.completion_ids)} tokens)")
        conversation.answered(answer)


@dataclass(kw_only=True)
class Answerer:
    """Draw and print answers of the model, with those of tools or an environment in brackets between its turns."""

    config: ChatConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: list[int]  # that end a turn of the model
    vision: Vision | None
    turns: Responder | None  # None without tools and environment

    def answer(self, example: Example, *, limit: int, seed: int, stopped: list[int]) -> Rollout:
        """Draw and print an answer of at most `limit` tokens, which ends without an outcome when `stopped` is no longer
        empty. Raises RewardError if the environment fails."""
        from grpo.data.records import make_rollout, show_answer
        from grpo.wire.picture_files import with_more

        if self.turns is None:
            return self._draw(example, room=limit, seed=seed, stopped=stopped)
        dialogue, shown, awaited = self.turns.begin(example, (seed, 0, 0)), 0, None
        ids: list[int] = []
        drawn: list[bool] = []
        try:
            for turn in itertools.count():
                longer = replace(example, prompt_ids=with_more(example.prompt_ids, ids))
                # Other random numbers for each turn.
                room, other_seed = limit - len(ids), seed + (turn << 32)
                segment = self._draw(longer, room=room, seed=other_seed, stopped=stopped).completion_ids
                ids += segment
                drawn += [True] * len(segment)
                awaited = None if stopped else dialogue.answer(segment, limit - len(ids))
                while awaited is not None and not stopped and not wait([awaited], _LOOK).done:
                    pass
                if stopped or awaited is None or (answer := awaited.result()) is None:
                    break
                ids += answer
                drawn += [False] * len(answer)
                for message in dialogue.messages[shown:]:
                    if message["role"] != "assistant":
                        print(show_answer(message), flush=True)
                shown = len(dialogue.messages)
        finally:
            if awaited is not None and not awaited.done():  # a call that may hang
                threading.Thread(target=_close_late, args=[dialogue], name="close", daemon=True).start()
            else:
                dialogue.close()
        return make_rollout(
            self.tokenizer,
            self.end_ids,
            ids=ids,
            logprobs=[],
            policy_version=0,
            drawn=drawn,
            outcome=dialogue.outcome,
        )

    def _draw(self, example: Example, *, room: int, seed: int, stopped: list[int]) -> Rollout:
        from grpo.sampling.generate import LocalSampler

        sampler = LocalSampler(self.model, self.tokenizer, self.end_ids, room, vision=self.vision)
        printer = AnswerPrinter(self.tokenizer.decode, stopped)
        rollout = sampler.stream(example, self.config.temperature, seed, printer)
        printer.finish()
        return rollout


def _close_late(dialogue: Dialogue) -> None:
    """Close the dialogue after the running call, unless the program ends before."""
    with contextlib.suppress(CancelledError, RuntimeError):  # of a pool of processes that is closed
        dialogue.close()


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
    """Print a growing answer. A character of several tokens is held back until it is whole."""

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
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        signal.signal(signal.SIGINT, before)

    if interactive:
        signal.signal(signal.SIGINT, note)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> int:
    with ending_at_ctrl_c():  # the hub may be asked
        config = parse_arguments(ChatConfig, __doc__, model_settings=model_settings)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdin.reconfigure(errors="replace")
    wake_main_thread()
    try:
        talk(config, interactive)
    except ConfigError as error:
        say_once(str(error))
        return 2
    except RewardError as error:
        say_once(str(error), error.traceback)
        return 1
    except BrokenPipeError:  # the reader of the answers has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    end_now(main())

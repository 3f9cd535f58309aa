"""Completions with calls of a tool: both samplers of the trainer beside TRL's own loop, and beside no tool at all.

    python -m benchmarks.tools                        everything, about 20 minutes on two cores
    python -m benchmarks.tools --part sampling        drawn tokens beside TRL's loop and beside one segment
    python -m benchmarks.tools --part latency         a round with tools that take a while

Needs trl (written for 1.16.0). Every way draws the same tokens: a script says what each completion writes in each of
its turns. The models have random weights but a head of zeros, so that all tokens are as likely, and the random number
chooses one. The samplers get the script as random numbers, TRL's generate as what torch.multinomial returns, after it
has drawn. So all products are computed, all of each side's own code runs, and both sides must come to the same ids and
the same mask of what was drawn. TRL's side is `GRPOTrainer._generate`, with the tokenizer's response template that TRL
sets for Qwen2.5's chat template; ours reads calls by that too.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import logging as transformers_logging

from benchmarks.common import machine, qwen, random_model, ratios, skewed, spread, table
from demo.model import START, train_tokenizer
from grpo.config.trainer import TrainerConfig
from grpo.config.user_code import load_function
from grpo.data.records import Example
from grpo.model.trial import make_batcher
from grpo.sampling import continuous
from grpo.sampling import generate as local
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.generate import LocalSampler
from grpo.sampling.sampler import Name
from grpo.tools.dialogue import UserResponder, start_turns

PROMPTS, COPIES, LENGTH = 8, 8, 768
WORDS = (8, 60)  # tokens of a turn before its call
SHAPES = {
    "demo": dict(layers=2, hidden_size=64, intermediate_size=192, num_attention_heads=4, vocabulary=512),
    "deep": dict(layers=12, hidden_size=128, intermediate_size=384, num_attention_heads=4, vocabulary=2048),
}
TOOL = '''
import asyncio, time

{define} calculate(expression: str) -> str:
    """
    Work a sum out.

    Args:
        expression: two numbers with + between them
    """
    {sleep}
    first, second = expression.split("+")
    return str(int(first) + int(second))
'''
CALL = '\n<tool_call>\n{"name": "calculate", "arguments": {"expression": "%d + %d"}}\n</tool_call>'
OURS, PLAIN, TRL, ONE = "continuous", "generate", "TRL's loop", "continuous, one segment"
Segments = list[list[int]]
"""the ids that the policy draws in each turn of a completion"""


@dataclass(frozen=True)
class Drawn:
    """What a way to sample came to."""

    ids: list[list[int]]
    """of each completion, answers among them"""
    masks: list[list[bool]]
    """which of those were drawn"""

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.masks))


@dataclass(frozen=True)
class Measured:
    """Ways that took turns, and the completions of the last turn."""

    wall: dict[str, list[float]]
    """seconds"""
    cpu: dict[str, list[float]]
    """seconds of this process's threads"""
    drawn: dict[str, Drawn]


@dataclass
class Work:
    """PROMPTS prompts with COPIES completions each, of 2 or 3 calls; one model, and one tool."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tool: str
    """path/to/file.py:calculate"""
    timeout: float | None = None
    """tool_timeout: calls run in processes"""
    turns: UserResponder = field(init=False)

    def __post_init__(self):
        self.trainer = make_trainer(self.model, self.tokenizer, load_function("tools", self.tool))
        self.conversations = [[{"role": "user", "content": f"Question {n}: how many?"}] for n in range(PROMPTS)]
        ids, _, _ = self.trainer._tokenize_prompts(self.conversations)
        self.examples = [
            Example(index=place, prompt="", prompt_ids=prompt, columns={}) for place, prompt in enumerate(ids)
        ]
        self.vocabulary, self.end = self.model.config.vocab_size, self.tokenizer.eos_token_id
        self.script = make_script(self.tokenizer)
        self.tokens = sum(len(ids) for segments in self.script for ids in segments)
        config = TrainerConfig(model_name_or_path="model", tools=[self.tool], tool_timeout=self.timeout)
        self.turns = start_turns(config, self.tokenizer, [self.end])
        make_batcher(self.model, self.tokenizer.pad_token_id)  # switches packed attention on
        self.numbers = [self._to_numbers(ids) for ids in map(self._play, range(len(self.script)))]
        # All drawn tokens, as one segment.
        ones = [[token for ids in segments for token in ids[:-1]] for segments in self.script]
        self.one_segment = [
            self._to_numbers([*ids, *[ids[0]] * len(segments[1:]), self.end])
            for ids, segments in zip(ones, self.script, strict=True)
        ]

    def sample(self, kind: type[LocalSampler] = ContinuousSampler, in_segments: bool = True) -> Drawn:
        """Draw with one of the samplers."""
        turns = self.turns if in_segments else None
        sampler = kind(self.model, self.tokenizer, [self.end], LENGTH, rows=PROMPTS * COPIES, turns=turns)
        numbers = self.numbers if in_segments else self.one_segment
        with scripted_numbers(numbers):
            groups = sampler.sample(self.examples, COPIES, 1.0, 0)
        rollouts = [rollout for group in groups for rollout in group]
        ids = [rollout.completion_ids for rollout in rollouts]
        return Drawn(ids, [rollout.drawn or [True] * len(rollout.completion_ids) for rollout in rollouts])

    def sample_by_trl(self) -> Drawn:
        """Draw as TRL's trainer does, up to where it has ids and masks."""
        self.model.train()
        trainer, rows = self.trainer, PROMPTS * COPIES
        # As `_generate_and_score_completions` sets them.
        kinds = [{}, {"calculate": trainer.tools[0]}]
        is_async = trainer._has_async_funcs
        trainer._sync_tool_dicts, trainer._async_tool_dicts = [kinds[not is_async]] * rows, [kinds[is_async]] * rows
        prompts = [conversation for conversation in self.conversations for _ in range(COPIES)]
        with scripted_multinomial(self.script):
            _, ids, masks, *_ = trainer._generate(prompts)
        return Drawn(ids, [[bool(drawn) for drawn in mask] for mask in masks])

    def ways(self) -> dict[str, Callable[[], Drawn]]:
        return {
            OURS: self.sample,
            TRL: self.sample_by_trl,
            PLAIN: partial(self.sample, LocalSampler),
            ONE: partial(self.sample, in_segments=False),
        }

    def check(self, drawn: dict[str, Drawn]) -> None:
        """Print how much was drawn. Raises ValueError where two ways differ, or drew other tokens than the script's."""
        tokens = {name: done.tokens for name, done in drawn.items()}
        if {*tokens.values()} != {self.tokens}:
            raise ValueError(f"{self.tokens} tokens are in the script, but these were drawn: {tokens}")
        if not drawn[OURS] == drawn[PLAIN] == drawn[TRL]:
            raise ValueError("the ways drew different completions")
        answers = sum(len(ids) for ids in drawn[OURS].ids) - self.tokens
        print(
            f"{len(self.script)} completions, {sum(map(len, self.script)) - len(self.script)} calls, {self.tokens:,} "
            f"tokens drawn, {answers:,} of answers, prompts of {len(self.examples[0].prompt_ids)}: all ways have the "
            "same ids and masks\n"
        )

    def close(self) -> None:
        self.turns.close()

    def _play(self, number: int) -> list[int]:
        """Return all ids of a completion, with the tool's answers."""
        dialogue, ids = self.turns.begin(self.examples[number // COPIES]), []
        try:
            for segment in self.script[number]:
                ids += segment
                answer = dialogue.answer(segment, LENGTH - len(ids))
                ids += [] if answer is None else answer.result()
        finally:
            dialogue.close()
        return ids

    def _to_numbers(self, ids: list[int]) -> np.ndarray:
        """Return the random numbers by which these are drawn, where all tokens are as likely."""
        return (np.pad(ids, (0, LENGTH - len(ids))) + 0.5) / self.vocabulary


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Return a small tokenizer with the chat template of Qwen2.5, and the response template that TRL has for it."""
    import trl
    from trl.chat_template_utils import add_response_schema

    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    tokenizer = train_tokenizer(iter([template, TOOL, CALL] * 100), [START], [], template)
    return add_response_schema(tokenizer)


def make_model(layers: int, vocabulary: int, **shape) -> PreTrainedModel:
    model = random_model(qwen(layers, vocabulary, tie_word_embeddings=False, **shape))
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def make_trainer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tool: Callable):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        return GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                folder,
                use_cpu=True,
                bf16=False,
                report_to="none",
                num_generations=COPIES,
                per_device_train_batch_size=PROMPTS * COPIES,
                max_completion_length=LENGTH,
                gradient_checkpointing=False,
                beta=0.0,
            ),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "?"}]] * PROMPTS}),
            processing_class=tokenizer,
            tools=[tool],
        )


def make_script(tokenizer: PreTrainedTokenizerBase) -> list[Segments]:
    """Return the segments of each completion: 2 or 3 that end with a call, and a last one."""
    draw = random.Random(0)
    words = tokenizer("the apples and then some more of them are in a box", add_special_tokens=False)["input_ids"]
    script = []
    for _ in range(PROMPTS * COPIES):
        segments: Segments = []
        calls = draw.choice([2, 3])
        for turn, length in enumerate(skewed(calls + 1, *WORDS, draw)):
            text = CALL % (draw.randrange(100), draw.randrange(100)) if turn < calls else "\n"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            segments.append([*draw.choices(words, k=length), *ids, tokenizer.eos_token_id])
        script.append(segments)
    return script


@contextmanager
def scripted_numbers(numbers: list[np.ndarray]) -> Iterator[None]:
    """Give completions of the samplers these random numbers."""

    def scripted(name: Name, count: int) -> np.ndarray:
        _, group, copy = name
        return numbers[group * COPIES + copy][:count]

    with patch.object(continuous, "uniforms", scripted), patch.object(local, "uniforms", scripted):
        yield


@contextmanager
def scripted_multinomial(script: list[Segments]) -> Iterator[None]:
    """Let torch.multinomial draw, and return the script's tokens, call by call of transformers' generate."""
    multinomial = torch.multinomial
    turn, place, left = 0, 0, script

    def scripted(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        nonlocal turn, place, left
        drawn = multinomial(weights, num_samples)
        if place == max(len(segments[turn]) for segments in left):  # a new call, of the rows that have called the tool
            turn, place = turn + 1, 0
            left = [segments for segments in left if len(segments) > turn]
        for row, segments in enumerate(left):
            drawn[row] = segments[turn][min(place, len(segments[turn]) - 1)]
        place += 1
        return drawn

    with patch.object(torch, "multinomial", scripted):
        yield


@contextmanager
def work_of(shape: str, seconds: float = 0.0, is_async: bool = False, timeout: float | None = None) -> Iterator[Work]:
    """A model of a shape with a tool that takes so many seconds, without computing anything in that time."""
    sleep = f"await asyncio.sleep({seconds})" if is_async else f"time.sleep({seconds})"
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "calculator.py"
        file.write_text(TOOL.format(define="async def" if is_async else "def", sleep=sleep if seconds else "pass"))
        work = Work(make_model(**SHAPES[shape]), make_tokenizer(), f"{file}:calculate", timeout)
        try:
            yield work
        finally:
            work.close()


def measure(ways: dict[str, Callable[[], Drawn]], repeats: int) -> Measured:
    """Let the ways take turns: a b, b a, a b, ..."""
    measured = Measured({name: [] for name in ways}, {name: [] for name in ways}, {})
    for turn in range(repeats):
        for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
            start, start_cpu = time.perf_counter(), time.process_time()
            measured.drawn[name] = ways[name]()
            measured.wall[name].append(time.perf_counter() - start)
            measured.cpu[name].append(time.process_time() - start_cpu)
            print(f"{name}: {measured.wall[name][-1]:.2f} s, {measured.cpu[name][-1]:.2f} s of CPU", file=sys.stderr)
    return measured


def part_sampling(shape: str, repeats: int) -> None:
    print(f"\n### Sampling with a tool: {shape}, {repeats} rounds\n")
    with work_of(shape) as work:
        measured, tokens = measure(work.ways(), repeats), work.tokens
        work.check(measured.drawn)
    rows = [
        [
            name,
            spread([tokens / value for value in measured.wall[name]], 0),
            spread([1e6 * value / tokens for value in measured.cpu[name]], 0),
            spread(ratios(measured.cpu[name], measured.cpu[OURS])),
        ]
        for name in measured.wall
    ]
    print(table(["way", "drawn tokens/s", "CPU microseconds a drawn token", f"CPU, times {OURS}'s"], rows))


def part_latency(shape: str, repeats: int, latencies: list[float]) -> None:
    rows = []
    print(f"\n### Seconds of a round with a tool that takes a while: {shape}, {repeats} rounds\n")
    for seconds in latencies:
        for is_async, timeout in ((True, None), (False, None), (False, 60.0)):
            with work_of(shape, seconds, is_async, timeout) as work:
                ways = {name: way for name, way in work.ways().items() if name != ONE}
                if timeout is not None:  # TRL has no processes: its loop is in the row above
                    del ways[TRL]
                work.sample()  # processes start
                wall = measure(ways, repeats).wall
            kind = "async" if is_async else "sync" if timeout is None else "sync, tool_timeout=60"
            rows.append(
                [
                    f"{1000 * seconds:g} ms, {kind}",
                    *(spread(wall[name]) if name in wall else "" for name in (OURS, PLAIN, TRL)),
                    spread(ratios(wall[TRL], wall[OURS]), 1) if TRL in wall else "",
                ]
            )
    print(table(["tool", OURS, PLAIN, TRL, f"{TRL} / {OURS}"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["sampling", "latency", "all"], default="all")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 0.01, 0.1], help="seconds of a call")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(machine())
    for shape in arguments.shapes:
        if arguments.part in ("sampling", "all"):
            part_sampling(shape, arguments.repeats)
        if arguments.part in ("latency", "all"):
            part_latency(shape, arguments.repeats, arguments.latencies)


if __name__ == "__main__":
    main()

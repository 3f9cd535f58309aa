"""The tasks of benchmarks/real.py: the demo's sums, three words backwards, answering in one short sentence, sums with
the rewards of Burkov's tutorial, and GSM8K: of the hub, or of a folder that the variable GSM8K names."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from demo.real import SYSTEM, Sum, sums
from demo.real import write_dataset as write_sums
from demo.task import is_held_out, write_splits
from reward import text_of

WORDS = [
    "apple", "ball", "bread", "cat", "chair", "dog", "door", "ear", "egg", "fire", "fish", "goat", "grape", "hat",
    "horse", "house", "ice", "ink", "jar", "juice", "key", "king", "kite", "lamp", "leaf", "lion", "milk", "moon",
    "mouse", "nest", "nut", "orange", "owl", "pen", "pig", "queen", "rain", "river", "ship", "sun", "tent", "tree",
    "van", "wall", "water", "wolf", "yard", "zoo",
]  # fmt: skip
BACKWARDS = [
    SYSTEM,
    {"role": "user", "content": "Write backwards, last word first: tree, milk, pig"},
    {"role": "assistant", "content": "pig, milk, tree"},
]
SHORT = [
    SYSTEM,
    {"role": "user", "content": "What is tea? Answer in one short sentence."},
    {"role": "assistant", "content": "Tea is a hot drink made from leaves."},
]
TAGGED = [
    SYSTEM,
    {"role": "user", "content": "What is 25 + 47?"},
    {"role": "assistant", "content": "<think>25 + 47 = 72</think><answer>72</answer>"},
]
ASKED = (
    "What is {}?", "Tell me about {}.", "Describe {}.", "Why do people like {}?", "Where do you find {}?",
    "What do you think of {}?", "How would you explain {} to a child?", "What is special about {}?",
)  # fmt: skip
THINGS = [
    "bread", "music", "rain", "the moon", "a bicycle", "coffee", "a library", "football", "winter", "the sea",
    "a mountain", "a garden", "a train", "cheese", "a violin", "the desert", "snow", "a bridge", "chess",
    "a river", "honey", "a castle", "summer", "a forest", "a museum", "rice", "a horse", "an island", "paper",
    "a clock", "glass", "a market", "dancing", "a volcano", "salt", "a school", "painting", "a cat", "gold",
    "a lighthouse", "soup", "a telescope", "the wind", "a farm", "poetry", "a kite", "chocolate", "a robot", "silk",
    "a waterfall", "a dog", "thunder", "a candle", "an orchestra", "a map", "a whale", "autumn", "a windmill",
    "sleep",
]  # fmt: skip
SENTENCE = re.compile(r"[^.!?\n]+\.")
LONGEST_SENTENCE = 12  # words


class Words(NamedTuple):
    """Words to write backwards."""

    words: tuple[str, ...]

    @property
    def question(self) -> str:
        return f"Write backwards, last word first: {', '.join(self.words)}"


def word_lists(rng: random.Random, held_out: bool) -> Iterator[Words]:
    """Draw without end from one side of the split: which three words, in any order, is on one side."""
    while True:
        drawn = Words(tuple(rng.sample(WORDS, 3)))
        if is_held_out(" ".join(sorted(drawn.words))) == held_out:
            yield drawn


def backwards_row(task: Words) -> dict:
    return {"prompt": [*BACKWARDS, {"role": "user", "content": task.question}], "answer": ", ".join(task.words[::-1])}


class Request(NamedTuple):
    """A request for an answer of any content."""

    question: str


def requests(rng: random.Random, held_out: bool) -> Iterator[Request]:
    """Draw without end from one side of the split, which the thing asked for decides."""
    while True:
        thing = rng.choice(THINGS)
        if is_held_out(thing) == held_out:
            yield Request(rng.choice(ASKED).format(thing))


def request_row(task: Request) -> dict:
    return {"prompt": [*SHORT, {"role": "user", "content": f"{task.question} Answer in one short sentence."}]}


def tagged_row(task: Sum) -> dict:
    question = f"What is {task.a} + {task.b}?"
    return {"prompt": [*TAGGED, {"role": "user", "content": question}], "answer": str(task.a + task.b)}


def backwards_reward(completions, answer, **kwargs) -> list[float]:
    """Return 1.0 for exactly the words in their order, else 0.0."""
    found = [", ".join(re.findall("[a-z]+", text_of(completion).lower())) for completion in completions]
    return [float(words == gold) for words, gold in zip(found, answer, strict=True)]


def sentence_reward(completions, **kwargs) -> list[float]:
    """Return 1.0 for one sentence of at most 12 words that ends with a full stop, else 0.0."""
    texts = [text_of(completion).strip() for completion in completions]
    return [float(bool(SENTENCE.fullmatch(text)) and len(text.split()) <= LONGEST_SENTENCE) for text in texts]


backwards_reward.is_verdict = sentence_reward.is_verdict = True


@dataclass(frozen=True)
class Task:
    """A task: what results.md says of it, its data, and its options beside those of configs/demo_real.yaml."""

    title: str
    about: str
    write_dataset: Callable[[Path, int], None]
    options: str


TASKS = {
    "sums": Task("SmolLM2-135M-Instruct learns to add", "", write_sums, ""),
    "few_sums": Task(
        "Few questions, each seen often",
        "The sums again, but only 64 to train on, each of which comes three times, and no reference.",
        lambda folder, seed: write_sums(folder, seed, train_size=64),
        "--beta 0",
    ),
    "backwards": Task(
        "Three words backwards",
        "Exactly the words, the last one first, earn 1.",
        lambda folder, seed: write_splits(folder, seed, word_lists, backwards_row, train_size=2048, test_size=200),
        "--reward_funcs benchmarks/real_tasks.py:backwards_reward",
    ),
    "sentence": Task(
        "One short sentence",
        "No gold answers: one sentence of at most 12 words that ends with a full stop earns 1.",
        lambda folder, seed: write_splits(folder, seed, requests, request_row, train_size=400, test_size=40),
        "--reward_funcs benchmarks/real_tasks.py:sentence_reward --max_completion_length 40 --max_prompt_length 96",
    ),
    "burkov": Task(
        "Burkov's rewards",
        "The sums; 2 for the right answer, 0.2 for each of four tags, as in his tutorial.",
        lambda folder, seed: write_splits(folder, seed, sums, tagged_row, train_size=2048, test_size=200),
        "--reward_funcs correctness_reward format_reward --max_completion_length 40 --max_prompt_length 96",
    ),
    "gsm8k": Task(
        "GSM8K",
        "Grade-school problems in words, asked as they are; the last number of the answer counts. 8 questions x 8 "
        "completions of at most 160 tokens a step, rate 1e-5, no reference; accuracy of greedy answers to 500 of the "
        "test split. It did not learn: a group of 8 seldom has a right answer.",
        lambda folder, seed: None,
        f"--dataset_name {os.environ.get('GSM8K', 'openai/gsm8k')} --dataset_prompt_column question --beta 0 "
        "--reward_funcs last_number_reward --max_prompt_length 256 --max_completion_length 160 --learning_rate 1e-5 "
        "--max_steps 30 --eval_steps 30 --eval_samples 500",
    ),
}

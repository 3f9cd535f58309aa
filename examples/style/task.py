"""Answer in one short sentence: a reward for style alone, without gold answers."""

import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from reward import text_of

TRAIN, TEST = 80, 20
SENTENCE = re.compile(r"[^.!?\n]+\.")
LONGEST = 8  # words
THINGS = {
    "bread": "food", "a bicycle": "a vehicle", "coffee": "a drink", "football": "a game", "a violin": "an instrument",
    "snow": "frozen water", "chess": "a game", "honey": "food", "a castle": "a building", "rice": "food",
    "a horse": "an animal", "a train": "a vehicle", "tea": "a drink", "a school": "a building", "a cat": "an animal",
    "soup": "food", "a flute": "an instrument", "a whale": "an animal", "a tram": "a vehicle", "milk": "a drink",
}  # fmt: skip
MORE = "which many people like", "as everybody knows", "and there is a lot to say about it", "if you ask me"
ASKED = "What is {}?", "Tell me what {} is.", "Say what {} is.", "Do you know what {} is?"


class Problem(NamedTuple):
    """A thing to say something about."""

    thing: str
    asked: str

    @property
    def question(self) -> str:
        return self.asked.format(self.thing)


def problems(rng: random.Random, held_out: bool) -> Iterator[Problem]:
    """Draw without end: one wording of five is kept for the test."""
    while True:
        yield Problem(rng.choice([*THINGS]), "Explain {}." if held_out else rng.choice(ASKED))


def row_of(problem: Problem) -> dict:
    return {"question": problem.question}


def reward(completions, **kwargs) -> list[float]:
    """Return 1.0 for one sentence of at most eight words that ends with a full stop, else 0.0."""
    texts = [text_of(completion).strip() for completion in completions]
    return [float(bool(SENTENCE.fullmatch(text)) and len(text.split()) <= LONGEST) for text in texts]


reward.is_verdict = True  # evaluation counts it as accuracy


def right(problem: Problem, rng: random.Random) -> str:
    """Return a solution, for the tiny model of examples/prepare.py."""
    thing = problem.thing
    return f"{thing[0].upper()}{thing[1:]} is {THINGS[thing]}."


def wrong(problem: Problem, rng: random.Random) -> str:
    """Return what the tiny model mostly says instead: more than was asked for, or no full stop."""
    sentence = right(problem, rng).rstrip(".")
    return rng.choice([sentence, f"{sentence}, {rng.choice(MORE)}, {rng.choice(MORE)}.", f"{sentence}. It is good."])

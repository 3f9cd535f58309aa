"""The demo's task: word problems of two additions or subtractions. All numbers are from 2 to 9, and both results are
from 0 to 15. One calculation in ten, chosen by a hash of its text, is held out: no problem of the training split and no
demonstration has it, in any story."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ["Tom", "Ana", "Ben", "Mia", "Sam", "Eva", "Leo", "Zoe", "Max", "Ida"]
THINGS = ["apples", "books", "coins", "pens", "stamps", "shells", "cards", "stones", "cakes", "balls"]

# Each story with the words for its two calculations: those that add {n} and those that take {n} away.
STORIES = {
    "purse": (
        "{name} has {a} {things}, {first} and {second}. How many {things} does {name} have now?",
        {"+": ["buys {n}", "finds {n}", "wins {n}"], "-": ["loses {n}", "sells {n}", "gives away {n}"]},
    ),
    "box": (
        "A box holds {a} {things}. {name} {first}, then {second}. How many {things} are in it now?",
        {"+": ["puts in {n}", "adds {n}"], "-": ["takes out {n}", "removes {n}"]},
    ),
    "bus": (
        "A bus carries {a} people. First {first}, then {second}. How many people are on it now?",
        {"+": ["{n} get on", "{n} climb in"], "-": ["{n} get off", "{n} climb out"]},
    ),
    "pond": (
        "{a} frogs sit in a pond. First {first}, then {second}. How many frogs are in it now?",
        {"+": ["{n} hop in", "{n} swim in"], "-": ["{n} hop out", "{n} swim off"]},
    ),
    "game": (
        "{name} scores {a} points, {first} and {second}. How many points does {name} have now?",
        {"+": ["gains {n}", "earns {n}"], "-": ["drops {n}", "forfeits {n}"]},
    ),
}


@dataclass(frozen=True)
class Problem:
    """A word problem and its calculation."""

    story: str
    question: str
    numbers: tuple[int, int, int]
    operations: tuple[str, str]

    @property
    def results(self) -> tuple[int, int]:
        """The result of the first operation, and of both."""
        a, b, c = self.numbers
        first = a + b if self.operations[0] == "+" else a - b
        return first, first + c if self.operations[1] == "+" else first - c

    @property
    def answer(self) -> str:
        return str(self.results[1])

    @property
    def calculation(self) -> str:
        """The text that decides the split, such as `7+3-4`."""
        a, b, c = self.numbers
        return f"{a}{self.operations[0]}{b}{self.operations[1]}{c}"


def steps(problem: Problem) -> str:
    """Return a completion that works out the answer, one operation at a time."""
    (a, b, c), (op1, op2), (first, last) = problem.numbers, problem.operations, problem.results
    return f"<think>{a}{op1}{b}={first}, {first}{op2}{c}={last}</think><answer>{last}</answer>"


def blurt(problem: Problem) -> str:
    """Return a completion with the tags but without the work."""
    return f"<think>easy</think><answer>{problem.answer}</answer>"


def untagged(problem: Problem) -> str:
    """Return a completion without the tags and without the work."""
    return f"The answer is {problem.answer}."


def problems(rng: random.Random, held_out: bool = False, stories: Sequence[str] = tuple(STORIES)) -> Iterator[Problem]:
    """Draw problems without end from one side of the split."""
    while True:
        story = rng.choice(stories)
        text, words = STORIES[story]
        a, b, c = (rng.randint(2, 9) for _ in range(3))
        op1, op2 = (rng.choice("+-") for _ in range(2))
        question = text.format(
            name=rng.choice(NAMES),
            things=rng.choice(THINGS),
            a=a,
            first=rng.choice(words[op1]).format(n=b),
            second=rng.choice(words[op2]).format(n=c),
        )
        problem = Problem(story, question, (a, b, c), (op1, op2))
        if all(0 <= result <= 15 for result in problem.results) and in_test_split(problem.calculation) == held_out:
            yield problem


def write_dataset(folder: Path, seed: int, train_size: int = 4096, test_size: int = 256) -> None:
    """Write train.jsonl and test.jsonl: distinct problems with the columns `question` and `answer`, both text."""
    write_splits(
        folder,
        seed,
        problems,
        lambda p: {"question": p.question, "answer": p.answer},
        train_size=train_size,
        test_size=test_size,
    )


def in_test_split(text: str) -> bool:
    """Tell on which side a problem of a tiny model is: one in ten is held out, as the whole digest of its text says."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") % 10 == 0


def is_held_out(text: str) -> bool:
    """Tell on which side of the split a problem of this text is: one in ten is held out."""
    return hashlib.sha256(text.encode()).digest()[0] % 10 == 0


def write_splits(
    folder: Path,
    seed: int,
    draw: Callable[[random.Random, bool], Iterator[Any]],
    row_of: Callable[[Any], dict[str, str]],
    *,
    train_size: int,
    test_size: int,
) -> None:
    """Write train.jsonl and test.jsonl with rows of distinct questions that `draw` yields, the test's held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size, held_out in [("train", train_size, False), ("test", test_size, True)]:
        chosen: dict[str, Any] = {}
        for problem in draw(random.Random(f"{name} {seed}"), held_out):
            chosen[problem.question] = problem
            if len(chosen) == size:
                break
        lines = [json.dumps(row_of(problem)) + "\n" for problem in chosen.values()]
        (folder / f"{name}.jsonl").write_text("".join(lines))

"""Countdown: make a number of three others. Any way that is right earns the reward; no row has an answer."""

import ast
import hashlib
import operator
import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from reward import text_of

TRAIN, TEST = 1024, 128
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Problem(NamedTuple):
    """Three numbers, and the one to make of some of them."""

    numbers: tuple[int, int, int]
    target: int

    @property
    def question(self) -> str:
        return f"Make {self.target} of {', '.join(map(str, self.numbers))}."


def problems(rng: random.Random, held_out: bool) -> Iterator[Problem]:
    """Draw without end from one side of the split: problems that the sum or difference of two numbers solves."""
    while True:
        numbers = tuple(rng.sample(range(1, 10), 3))
        first, second = rng.sample(numbers, 2)
        problem = Problem(numbers, rng.choice([first + second, abs(first - second)]))
        if (hashlib.sha256(repr(problem).encode()).digest()[0] % 10 == 0) == held_out:
            yield problem


def row_of(problem: Problem) -> dict:
    return {"question": problem.question, "numbers": problem.numbers, "target": problem.target}


def reward(completions, numbers, target, **kwargs) -> list[float]:
    """Return 1.0 for an expression of some of the numbers, each at most once, that has the target's value, else 0.0."""
    texts = [text_of(completion).strip() for completion in completions]
    return [float(solves(text, *row)) for text, *row in zip(texts, numbers, target, strict=True)]


reward.is_verdict = True  # evaluation counts it as accuracy


def solves(text: str, numbers: list[int], target: int) -> bool:
    """Tell whether a text is such an expression. Nothing of it is run: only + - * / of whole numbers are computed."""
    if len(text) > 100:  # ast would follow thousands of brackets
        return False
    try:
        used: Counter[int] = Counter()
        value = compute(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    return used <= Counter(numbers) and value == target


def compute(node: ast.expr, used: Counter[int]) -> float:
    """Return an expression's value, and count its numbers. Raises ValueError for anything else in it."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](compute(node.left, used), compute(node.right, used))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return node.value
    raise ValueError(f"{type(node).__name__} is no calculation")


def right(problem: Problem, rng: random.Random) -> str:
    """Return a solution, for the tiny model of examples/prepare.py."""
    pairs = [(first, second) for first in problem.numbers for second in problem.numbers if first != second]
    texts = [f"{first}{sign}{second}" for first, second in pairs for sign in "+-"]
    return rng.choice([text for text in texts if solves(text, problem.numbers, problem.target)])


def wrong(problem: Problem, rng: random.Random) -> str:
    """Return what the tiny model mostly says instead."""
    first, second = rng.sample(problem.numbers, 2)
    return rng.choice([f"{first}{rng.choice('+-*')}{second}", str(problem.target)])

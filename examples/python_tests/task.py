"""Write a Python function that passes tests. Each completion runs in a process with limits, never in the trainer.

The limits stop what a model writes by accident: endless loops, gigabytes, full disks. They do not stop an attacker: the
process may read files and open connections. For models that are good at that run the trainer in a container.
"""

import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from reward import text_of

TRAIN, TEST = 400, 40
SECONDS = 2
LIMITS = """
import resource
for limit, value in (("CPU", 2), ("AS", 512 << 20), ("FSIZE", 1 << 20), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
"""
"""seconds of a processor, bytes of memory, bytes of a file, no core dump: set before the completion's code begins"""
ASKED = """
import json
print()
print(json.dumps([f(x) for x in {inputs}]))
"""
VERBS = {"add {n}": "x + {n}", "subtract {n}": "x - {n}", "multiply by {n}": "x * {n}", "square it": "x * x"}


class Problem(NamedTuple):
    """What a function has to do, in words and in Python."""

    words: str
    expression: str

    @property
    def question(self) -> str:
        return f"Write f(x): {self.words}."


def problems(rng: random.Random, held_out: bool) -> Iterator[Problem]:
    """Draw without end from one side of the split."""
    while True:
        (first, inner), (second, outer) = rng.choices([*VERBS.items()], k=2)
        a, b = rng.choices(range(2, 10), k=2)
        inner, outer = inner.format(n=a), outer.format(n=b)
        problem = Problem(f"{first.format(n=a)}, then {second.format(n=b)}", outer.replace("x", f"({inner})"))
        if (hashlib.sha256(problem.words.encode()).digest()[0] % 10 == 0) == held_out:
            yield problem


def row_of(problem: Problem) -> dict:
    inputs = [-3, 0, 1, 2, 10]
    return {
        "question": problem.question,
        "inputs": inputs,
        "outputs": [eval(problem.expression, {"x": x}) for x in inputs],  # of our own text
    }


def reward(completions, inputs, outputs, **kwargs) -> list[float]:
    """Return the share of the tests that each completion passes."""
    texts = [text_of(completion) for completion in completions]
    with ThreadPoolExecutor() as pool:  # threads wait for the processes
        return list(pool.map(share_passed, texts, inputs, outputs))


def share_passed(code: str, inputs: list[int], outputs: list[int]) -> float:
    """Run the code in a process of its own, and compare what f returns with the outputs."""
    program = LIMITS + code + ASKED.format(inputs=inputs)
    words = [sys.executable, "-I", "-S", "-c", program]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with open(f"{folder}/output", "w+b") as output:  # a file, to which the limit of size applies
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.DEVNULL}
                subprocess.run(words, timeout=SECONDS, cwd=folder, env={}, **streams)
                output.seek(0)
                results = json.loads(output.read().splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, ValueError):  # too slow; no output; a NUL, or no JSON
            return 0.0
    if not isinstance(results, list) or len(results) != len(outputs):
        return 0.0
    return sum(result == output for result, output in zip(results, outputs, strict=True)) / len(outputs)


def right(problem: Problem, rng: random.Random) -> str:
    """Return a solution, for the tiny model of examples/prepare.py."""
    return f"def f(x):\n    return {problem.expression}"


def wrong(problem: Problem, rng: random.Random) -> str:
    """Return what the tiny model mostly writes instead: a fault, or another function."""
    other = next(problems(rng, False)).expression
    return rng.choice([f"def f(x)\n    return {problem.expression}", f"def f(x):\n    return {other}"])

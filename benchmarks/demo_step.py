"""A whole step of the demo (configs/demo_cpu.yaml) beside TRL's GRPOTrainer: same model, data, rewards, loss and cores.

    python -m benchmarks.demo_step --seeds 0 1 2 3 4

Ours runs as `python -m demo` runs it: the reference server and two trainer ranks, one thread each. TRL, with its own
reference model in the process, runs twice: two DDP ranks with one thread each, and one process with two threads. The
faster of the two counts. For each seed the three take turns, from seed to seed in another order. Needs trl (written for
1.16.0).

A step's seconds cover sampling, rewards, reference and optimizer step, and leave out logging and evaluation: ours by
`step_time` of metrics.jsonl, TRL's by the clock from its on_step_begin to its on_step_end. (TRL's own `step_time` lacks
the optimizer step.) Final models are loaded again, and grpo.trainer.evaluation says how many held-out problems each
solves.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

import reward
from benchmarks import trl_side
from benchmarks.common import REPOSITORY, machine, spread, table
from demo.__main__ import TEXT, places, prepare, train
from grpo.config.trainer import TrainerConfig
from grpo.model.load import load_model, load_tokenizer

OURS, WITH_TOOLS, TWO, ONE = "ours", "ours, tools in the trainer", "TRL, 2 processes", "TRL, 1 process"
PROCESSES = {TWO: 2, ONE: 1}


@dataclass(frozen=True)
class Run:
    seconds: list[float]
    """of each step"""
    tokens: list[float]
    """completion tokens of each step"""
    accuracy: float
    """held-out, greedy, after the last step"""

    @property
    def ms(self) -> float:
        return 1000 * statistics.median(self.seconds)

    @property
    def ms_per_1000_tokens(self) -> float:
        return 1e6 * statistics.median(one / count for one, count in zip(self.seconds, self.tokens, strict=True))


def settings(folder: Path, seed: int) -> TrainerConfig:
    return trl_side.settings(TEXT, folder, seed)


def run_ours(folder: Path, seed: int) -> Run:
    train(folder, seed)
    seconds, tokens = of_metrics(folder, settings(folder, seed))
    return Run(seconds, tokens, accuracy(folder, seed, folder / "run/model"))


def of_metrics(folder: Path, config: TrainerConfig) -> tuple[list[float], list[float]]:
    """Return the seconds and the completion tokens of each step of our run in a demo's folder."""
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    sequences = config.prompts_per_step * config.num_generations
    return [step["step_time"] for step in steps], [step["completions/mean_length"] * sequences for step in steps]


def run_theirs(folder: Path, seed: int, processes: int) -> Run:
    output = folder / f"trl-{processes}"
    words = ["--worker", folder, output, "--seeds", seed]
    measured = trl_side.start("benchmarks.demo_step", output, processes, words)
    return Run(measured["seconds"], measured["tokens"], accuracy(folder, seed, output / "model"))


def worker(folder: Path, output: Path, seed: int) -> None:
    """Do one process's part of TRL's side, to the end of its training."""
    trl_side.train(settings(folder, seed), [reward.correctness_reward, reward.format_reward], output)


def accuracy(folder: Path, seed: int, model_folder: Path) -> float:
    config = settings(folder, seed)
    config.model_name_or_path = str(model_folder)
    tokenizer, model = load_tokenizer(config), load_model(config, torch.device("cpu"))
    return trl_side.held_out_metrics(config, model, tokenizer)["eval_accuracy"]


def report(runs: dict[int, dict[str, Run]], before: dict[int, float], sequences: int) -> None:
    sides = [side for side in (OURS, WITH_TOOLS, TWO, ONE) if side in next(iter(runs.values()))]
    medians = {side: statistics.median(run[side].ms for run in runs.values()) for side in sides}
    best = min(PROCESSES.keys() & medians, key=lambda side: medians[side])
    steps = len(next(iter(runs.values()))[OURS].seconds)
    print(
        f"\n### A step of the demo, {sequences} completions; medians over {steps} steps. TRL's faster way: {best[5:]}\n"
    )
    rows = []
    for seed, run in runs.items():
        rows.append([seed, *(f"{run[side].ms:.0f}" for side in sides)])
        rows[-1].append(f"{run[best].ms / run[OURS].ms:.2f}")
        rows[-1] += [f"{run[side].ms_per_1000_tokens:.0f}" for side in (OURS, best)]
        rows[-1].append(f"{run[best].ms_per_1000_tokens / run[OURS].ms_per_1000_tokens:.2f}")
        rows[-1] += [f"{statistics.mean(run[side].tokens):.0f}" for side in (OURS, best)]
    head = ["seed", *(f"{side}, ms" for side in sides), "ratio", "ours, ms per 1,000 tokens", "TRL", "ratio"]
    print(table([*head, "ours, tokens a step", "TRL"], rows))
    step_ratios = [run[best].ms / run[OURS].ms for run in runs.values()]
    token_ratios = [run[best].ms_per_1000_tokens / run[OURS].ms_per_1000_tokens for run in runs.values()]
    print(f"\nratio, median (least to most): a step {spread(step_ratios)}, 1,000 tokens {spread(token_ratios)}")
    print("Tokens are those of completions.")

    print(f"\n### Held-out accuracy, greedy, after {steps * sequences:,} completions\n")
    columns = {"before": list(before.values())}
    columns |= {side: [run[side].accuracy for run in runs.values()] for side in sides}
    rows = [[seed, *(f"{values[row]:.3f}" for values in columns.values())] for row, seed in enumerate(runs)]
    rows.append(["mean ± standard error", *map(mean_and_error, columns.values())])
    print(table(["seed", *columns], rows))


def mean_and_error(values: list[float]) -> str:
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_step", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of model, data and training")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/demo"), help="for all that is made")
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.chdir(REPOSITORY)
    if arguments.worker:
        warnings.filterwarnings("ignore")
        worker(*arguments.worker, arguments.seeds[0])
        return

    os.environ |= places()
    logging.disable(logging.WARNING)
    sides = {OURS: run_ours} | {side: partial(run_theirs, processes=count) for side, count in PROCESSES.items()}
    with redirect_stdout(sys.stderr):
        for seed in arguments.seeds:
            prepare(arguments.folder / f"seed{seed}", seed)
        runs, before = measure(arguments.folder, arguments.seeds, sides, accuracy)
    config = settings(arguments.folder / f"seed{arguments.seeds[0]}", arguments.seeds[0])
    print(machine())
    report(runs, before, config.prompts_per_step * config.num_generations)


def measure(
    root: Path,
    seeds: list[int],
    sides: dict[str, Callable[[Path, int], Run]],
    accuracy: Callable[[Path, int, Path], float],
) -> tuple[dict[int, dict[str, Run]], dict[int, float]]:
    """Return every side's run for each seed, in turns, and each seed's accuracy before training. Sides and accuracy
    are given a seed's folder and the seed, accuracy the model's folder too."""
    runs: dict[int, dict[str, Run]] = {}
    before: dict[int, float] = {}
    for turn, seed in enumerate(seeds):
        folder = root / f"seed{seed}"
        before[seed] = accuracy(folder, seed, folder / "model")
        order = [*sides]
        runs[seed] = {}
        for side in order[turn % len(order) :] + order[: turn % len(order)]:
            print(f"seed {seed}: {side}", file=sys.stderr)
            runs[seed][side] = sides[side](folder, seed)
            print(f"seed {seed}: {side}: {runs[seed][side].ms:.0f} ms a step", file=sys.stderr)
        (folder / "measured.json").write_text(json.dumps({side: asdict(run) for side, run in runs[seed].items()}))
    return runs, before


if __name__ == "__main__":
    main()

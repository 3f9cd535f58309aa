"""A real model learns a task: each side's runs with each seed, kept as numbers in benchmarks/results/TASK.json.

    python -m benchmarks.real --task sums --sides GRPO TRL --seeds 0 1 2 3 4
    python -m benchmarks.real --sides GSPO --max_steps 12 --eval_steps 4           more settings, for each side
    GPU=1 python -m benchmarks.real                         on a CUDA card, server and one trainer process
    python -m benchmarks.results                            makes docs/results.md of all files of numbers

Every side trains SmolLM2-135M-Instruct on a task of benchmarks/real_tasks.py with the settings of `make demo-real`
(configs/demo_real.yaml), as many completions a step, and the same held-out questions, in float32; bfloat16 is what the
demo takes where that is faster. Ours are two trainer processes and the reference server, one thread each. TRL's
GRPOTrainer has the same loss, rate, groups and reference (in its process). The sides take turns, seed by seed, so that
a slow minute of the machine hits all. What the file has already is not run again: delete a run from it to repeat that.

Seconds of a step leave out evaluation and logging on both sides, as in benchmarks/demo_step.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import warnings
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path

import yaml

from benchmarks import trl_side
from benchmarks.common import REPOSITORY, machine
from benchmarks.real_tasks import TASKS
from demo.__main__ import ON_CARD, REAL, places, prepare, train, workers
from demo.english import compare
from grpo.rewards.compute import load_reward_funcs

RESULTS = REPOSITORY / "benchmarks/results"
GRPO, TRL, SIMPLE = "GRPO", "TRL", "simple_GRPO's"
POOL, BFLOAT16 = "pool, lag 1", "bfloat16"
DRAWS, REPLACED, ADAPTIVE = "16 drawn, 8 trained on", "groups replaced", "adaptive order"
SIDES = {
    GRPO: "",
    TRL: None,
    SIMPLE: "--temperature 0.9 --steps_per_generation 4 --reward_tolerance 1e-4 --max_resample 4",
    "no reference": "--beta 0",
    "DAPO": "--beta 0 --loss_type dapo --epsilon_high 0.28 --max_resample 4",
    "Dr. GRPO": "--beta 0 --loss_type dr_grpo --scale_rewards none",
    "GSPO": "--importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 --steps_per_generation 4",
    "RLOO": "--advantage_estimator rloo",
    "REINFORCE++": "--advantage_estimator reinforce++ --loss_type dapo --kl_in_reward true --kl_estimator k1",
    "LoRA, rank 16": "--use_peft --lora_r 16 --learning_rate 1e-3",
    POOL: "--sampler pool --max_policy_lag 1",
    DRAWS: "--num_draws 16",
    REPLACED: "--max_resample 4",
    ADAPTIVE: "--dataset_order adaptive",
    BFLOAT16: "--dtype bfloat16",
}
"""each side's options beside the demo's"""
WORKERS = 2  # that draw for the pool
KEPT = "step", "eval_accuracy", "eval_accuracy_se", "eval_n"


def run_ours(folder: Path, seed: int, side: str, options: list[str]) -> dict:
    options = ["--dtype", "float32", *SIDES[side].split(), *options]
    if side == POOL:
        with workers(folder, WORKERS) as (url, _):
            train(folder, seed, *options, "--pool", url, demo=REAL)
    else:
        train(folder, seed, *options, demo=REAL)
    return measure(folder)


def measure(folder: Path) -> dict:
    """Return the numbers of the run in a folder of ours."""
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    config = yaml.safe_load((folder / "run/config.yaml").read_text())
    started = json.loads((folder / "run/starts.jsonl").read_text().splitlines()[0])["time"]
    return {
        "seconds": [row["step_time"] for row in steps],
        "tokens": [drawn_tokens(row, config) for row in steps],
        "reward": [row["reward"] for row in steps],
        "kl": [row.get("kl", 0.0) for row in steps],
        "evaluations": [{name: row[name] for name in KEPT} for row in rows if "eval_accuracy" in row],
        "wall_seconds": (folder / "run/metrics.jsonl").stat().st_mtime - datetime.fromisoformat(started).timestamp(),
        "english": english(folder),
    }


def drawn_tokens(row: dict, config: dict) -> float:
    """Return the completion tokens of a step, at the mean length, with its share of groups that its round replaced."""
    groups = config["prompts_per_step"] + row.get("resampled_groups", 0) / config["steps_per_generation"]
    return row["completions/mean_length"] * groups * (config.get("num_draws") or config["num_generations"])


def english(folder: Path) -> dict:
    """Return both models' general answers, and how far the second is from the first: KL of the next token, nats."""
    answers, kl = compare(REAL.model_folder(folder), folder / "run/model")
    return {"answers": answers, "kl": kl}


def run_theirs(task_name: str, folder: Path, seed: int, options: list[str], processes: int) -> dict:
    output = folder / "trl"
    words = ["--worker", folder, output, "--task", task_name, "--seeds", seed, *options]
    start = time.monotonic()
    measured = trl_side.start("benchmarks.real", output, processes, words)
    return measured | {"wall_seconds": time.monotonic() - start}


def worker(folder: Path, output: Path, seed: int, options: list[str]) -> None:
    """Do one process's part of TRL's side."""
    config = trl_side.settings(REAL, folder, seed, *options)
    trl_side.train(config, list(load_reward_funcs(config.reward_funcs).values()), output, evaluates=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[GRPO, TRL], help="what to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of data and training")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/real"), help="for all that is made")
    parser.add_argument("--trl_processes", type=int, choices=[1, 2], default=1, help="one with two threads is faster")
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    os.chdir(REPOSITORY)
    if arguments.worker:
        warnings.filterwarnings("ignore")
        worker(*arguments.worker, arguments.seeds[0], options)
        return

    os.environ |= places()
    path = RESULTS / f"{arguments.task}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for turn, seed in enumerate(arguments.seeds):
        first = turn % len(arguments.sides)
        for side in arguments.sides[first:] + arguments.sides[:first]:
            runs = results.setdefault(side, {})
            if str(seed) in runs:
                continue
            folder = arguments.folder / f"seed{seed}"
            with redirect_stdout(sys.stderr):
                measured = run(arguments.task, side, folder, seed, options, arguments.trl_processes)
            runs[str(seed)] = measured | {"machine": machine(ON_CARD)}
            write(path, results)
            for made in ("run", "trl"):
                shutil.rmtree(folder / made, ignore_errors=True)
            print(f"{side}, seed {seed}: {summary(runs[str(seed)])}", flush=True)


def run(task_name: str, side: str, folder: Path, seed: int, options: list[str], trl_processes: int) -> dict:
    """Run a side to its end, and return its numbers."""
    task = TASKS[task_name]
    options = [*task.options.split(), *options]
    prepare(folder, seed, REAL)
    task.write_dataset(folder / "data", seed)
    if side == TRL:
        return run_theirs(task_name, folder, seed, options, trl_processes)
    return run_ours(folder, seed, side, options)


def write(path: Path, results: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(path)


def summary(measured: dict) -> str:
    shares = [evaluation["eval_accuracy"] for evaluation in measured["evaluations"]]
    steps, whole = sum(measured["seconds"]), measured["wall_seconds"]
    return f"held-out {' -> '.join(f'{share:.3f}' for share in shares)}, {steps:.0f} s in steps, {whole:.0f} s in all"


if __name__ == "__main__":
    main()

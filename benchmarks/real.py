"""A real model learns a task: each side's runs with each seed, kept as numbers in benchmarks/results/TASK.json.

    python -m benchmarks.real --task sums --sides GRPO TRL --seeds 0 1 2 3 4       (after make demo-real)
    python -m benchmarks.results                            makes docs/results.md of all files of numbers

Every side trains SmolLM2-135M-Instruct on a task of benchmarks/real_tasks.py with the settings of `make demo-real`
(configs/demo_real.yaml), as many completions a step, and the same held-out questions. GRPO is the demo itself: two
trainer processes and the reference server, one thread each. TRL's GRPOTrainer has the same loss, rate, groups and
reference (in its process). The sides take turns, seed by seed, so that a slow minute of the machine hits all. What the
file has already is not run again: delete a run from it to repeat that.

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
from pathlib import Path

from benchmarks import trl_side
from benchmarks.common import REPOSITORY, machine
from benchmarks.real_tasks import TASKS, Task
from demo.__main__ import ENVIRONMENT, REAL, prepare, train
from demo.english import compare
from grpo.rewards.compute import load_reward_funcs

RESULTS = REPOSITORY / "benchmarks/results"
GRPO, TRL = "GRPO", "TRL"
SIDES = {
    GRPO: "",
    TRL: None,
    "no reference": "--beta 0",
    "DAPO": "--beta 0 --loss_type dapo --epsilon_high 0.28 --max_resample 4",
    "Dr. GRPO": "--beta 0 --loss_type dr_grpo --scale_rewards none",
    "RLOO": "--advantage_estimator rloo",
    "REINFORCE++": "--advantage_estimator reinforce++ --loss_type dapo --kl_in_reward true --kl_estimator k1",
    "LoRA, rank 16": "--use_peft --lora_r 16 --learning_rate 1e-4",
}
"""each side's options beside the demo's"""
KEPT = "step", "eval_accuracy", "eval_accuracy_se", "eval_n"


def run_ours(task: Task, folder: Path, seed: int, options: str) -> dict:
    train(folder, seed, *task.options.split(), *options.split(), demo=REAL)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    config = trl_side.settings(REAL, folder, seed, *task.options.split())
    sequences = config.prompts_per_step * config.num_generations
    return {
        "seconds": [row["step_time"] for row in steps],
        "tokens": [row["completions/mean_length"] * sequences for row in steps],
        "reward": [row["reward"] for row in steps],
        "kl": [row.get("kl", 0.0) for row in steps],
        "evaluations": [{name: row[name] for name in KEPT} for row in rows if "eval_accuracy" in row],
    }


def english(folder: Path) -> dict:
    """Return both models' general answers, and how likely the first one's are to each, in nats a token."""
    answers, log_probs = compare(REAL.model_folder(folder), folder / "run/model")
    return {"answers": answers, "log_probs": log_probs}


def run_theirs(task_name: str, folder: Path, seed: int, processes: int) -> dict:
    output = folder / "trl"
    words = ["--worker", folder, output, "--task", task_name, "--seeds", seed]
    return trl_side.start("benchmarks.real", output, processes, words)


def worker(task: Task, folder: Path, output: Path, seed: int) -> None:
    """Do one process's part of TRL's side."""
    config = trl_side.settings(REAL, folder, seed, *task.options.split())
    trl_side.train(config, list(load_reward_funcs(config.reward_funcs).values()), output, evaluates=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[GRPO, TRL], help="what to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of data and training")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/real"), help="for all that is made")
    parser.add_argument("--trl_processes", type=int, choices=[1, 2], default=1, help="one with two threads is faster")
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.chdir(REPOSITORY)
    if arguments.worker:
        warnings.filterwarnings("ignore")
        worker(TASKS[arguments.task], *arguments.worker, arguments.seeds[0])
        return

    os.environ |= {name: ENVIRONMENT[name] for name in ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE")}
    path = RESULTS / f"{arguments.task}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for turn, seed in enumerate(arguments.seeds):
        first = turn % len(arguments.sides)
        for side in arguments.sides[first:] + arguments.sides[:first]:
            runs = results.setdefault(side, {})
            if str(seed) in runs:
                continue
            with redirect_stdout(sys.stderr):
                runs[str(seed)] = run(
                    arguments.task, side, arguments.folder / f"seed{seed}", seed, arguments.trl_processes
                )
            write(path, results)
            print(f"{side}, seed {seed}: {summary(runs[str(seed)])}", flush=True)


def run(task_name: str, side: str, folder: Path, seed: int, trl_processes: int) -> dict:
    """Run a side to its end, and return what it measured; what it wrote is deleted."""
    task = TASKS[task_name]
    prepare(folder, seed, REAL)
    task.write_dataset(folder / "data", seed)
    start = time.monotonic()
    if side == TRL:
        measured = run_theirs(task_name, folder, seed, trl_processes)
    else:
        measured = run_ours(task, folder, seed, SIDES[side])
    measured |= {"wall_seconds": time.monotonic() - start, "machine": machine()}
    if side != TRL:
        measured["english"] = english(folder)
    for made in ("run", "trl"):
        shutil.rmtree(folder / made, ignore_errors=True)
    return measured


def write(path: Path, results: dict) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(path)


def summary(measured: dict) -> str:
    shares = [evaluation["eval_accuracy"] for evaluation in measured["evaluations"]]
    steps, whole = sum(measured["seconds"]), measured["wall_seconds"]
    return f"held-out {' -> '.join(f'{share:.3f}' for share in shares)}, {steps:.0f} s in steps, {whole:.0f} s in all"


if __name__ == "__main__":
    main()

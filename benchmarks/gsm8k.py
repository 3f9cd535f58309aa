"""GSM8K with a Qwen2.5: a run of a side, kept as numbers in benchmarks/results/qwen.json.

    python -m benchmarks.gsm8k --seed 0                            the recipe, as `make gsm8k` runs it
    python -m benchmarks.gsm8k --side "simple_GRPO's" --seed 0     the settings of another
    python -m benchmarks.gsm8k --side "its teacher"                answers of the 1.5B model itself
    python -m benchmarks.gsm8k --side TRL                          the recipe by TRL, for the steps of an hour
    python -m benchmarks.gsm8k --side "beside TRL" --max_steps 6   and by ours, so many steps
    python -m benchmarks.results                                   makes docs/results.md of all files of numbers

Every side trains the model of `make gsm8k` on the same questions, and the same functions measure all. All but "taught
by 1.5B" and "GRPO of as many tokens" have as many steps of as many completions of at most the same length. A run takes
hours: after a stop the same command goes on. Other options go to `grpo launch`. The questions are those of the variable
GSM8K, or the hub's, as in demo/gsm8k.py.

TRL (written for 1.16.0) cannot choose the completions of a group that it trains on: both sides train on all there. Its
GRPOTrainer multiplies in bfloat16 and keeps the weights in float32, as ours; a micro-batch has four completions, the
process 15.5 GB. Seconds leave out evaluation and logging, as in benchmarks/demo_step.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import yaml

from benchmarks import trl_side
from benchmarks.common import REPOSITORY, machine
from benchmarks.real import GRPO, RESULTS, SIMPLE, TRL, drawn_tokens, write
from demo.__main__ import ON_CARD, dtype_words
from demo.distill import teacher
from demo.gsm8k import CONFIG, ENVIRONMENT, FOLDER, PACKED, WIDTH, build, questions_of, train, words_of
from grpo.config.command_line import parse_arguments
from grpo.config.programs import LaunchConfig
from grpo.config.trainer import TrainerConfig
from grpo.rewards.compute import load_reward_funcs

NAME = "qwen"  # of the file of numbers
BURKOV, TAUGHT, TEACHER, BESIDE_TRL = "Burkov's", "taught by 1.5B", "its teacher", "beside TRL"
SAME_TOKENS = "GRPO of as many tokens"  # as the side TAUGHT has
MEASURED = "last_number_reward demo/gsm8k.py:in_tags_reward"
ALL_TRAINED = "--num_generations 8 --eval_steps 0 --save_steps 0"
HOUR, MICRO_BATCHES = 3600.0, 16  # of TRL, each of four completions
TAGS = "Write reasoning and answer within tags, like this: "
SIDES = {
    GRPO: "",
    SIMPLE: "--num_draws 8 --num_generations 8 --temperature 0.9 --steps_per_generation 4 --reward_tolerance 1e-4 "
    "--max_resample 4 --loss_type grpo --scale_rewards group --learning_rate 1e-6 --lr_scheduler_type constant "
    "--warmup_steps 0 "
    f"--beta 0.04 --reward_funcs correctness_reward format_reward {MEASURED} --reward_weights 1 1 0 0 "
    f"--system_prompt '{TAGS}<think>reasoning here</think><answer>answer here</answer>'",
    BURKOV: "--num_draws 14 --num_generations 14 --prompts_per_step 5 --temperature 1 --epsilon 0.1 --loss_type grpo "
    "--scale_rewards group --learning_rate 5e-6 --lr_scheduler_type constant --warmup_steps 0 --beta 0.04 "
    f"--reward_funcs correctness_reward 'format_reward(reasoning, answer)' {MEASURED} --reward_weights 1 1 0 0 "
    f"--system_prompt '{TAGS}<reasoning>...</reasoning><answer>...</answer>'",
    TAUGHT: "--distillation_loss reverse_kl --reward_weights 0 0 0 --beta 0 --num_draws 1 --num_generations 1 "
    "--prompts_per_step 32 --max_steps 20 --eval_steps 20 --learning_rate 2e-5 --micro_batch_tokens 1024",
    SAME_TOKENS: "--max_steps 11 --eval_steps 11",
    TEACHER: "--eval_samples 100",
    BESIDE_TRL: ALL_TRAINED,
    TRL: ALL_TRAINED,
}
"""each side's options beside those of configs/gsm8k_cpu.yaml: numbers of configs/simple_grpo.yaml and burkov.yaml; a
teacher, which takes memory beside, teaches alone, at the rate of TRL's GKD"""
OF_STEP = {
    "seconds": "step_time",
    "reward": "reward",
    "length": "completions/mean_length",
    "cut": "completions/clipped_ratio",
    "right": "rewards/in_tags_reward/mean",
    "last number": "rewards/last_number_reward/mean",
    "kl": "kl",
    "to teacher": "distillation/reverse_kl",
}
OF_EVALUATION = {
    "right": "eval_rewards/in_tags_reward/mean",
    "last number": "eval_rewards/last_number_reward/mean",
    "form": "eval_format",
    "length": "eval_completions/mean_length",
    "cut": "eval_completions/clipped_ratio",
    "questions": "eval_n",
}


def measure(run: Path) -> dict:
    """Return what the run in a folder measured: of each step, and of each evaluation."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    config = yaml.safe_load((run / "config.yaml").read_text())
    evaluations = [row for row in rows if "eval_n" in row]
    return {name: [row.get(key, 0.0) for row in steps] for name, key in OF_STEP.items()} | {
        "form": [form_of(row) for row in steps],
        "tokens": [row["num_tokens"] for row in steps],
        "drawn": [drawn_tokens(row, config) for row in steps],
        "evaluations": [
            {"step": row["step"]} | {name: row[key] for name, key in OF_EVALUATION.items()} for row in evaluations
        ],
        "machine": machine(ON_CARD),
    }


def form_of(row: dict) -> float:
    """Return the share of the form: the recipe's has one pair of tags, that of the others two, 0.2 for each tag."""
    return row.get("rewards/tags_reward/mean", row.get("rewards/format_reward/mean", 0.0) / 0.8)


@contextmanager
def taught(model: Path, run: Path) -> Iterator[list[str]]:
    """Serve the larger model; give the options of a run that it teaches."""
    build(PACKED["1.5b"], model)
    log = run.with_name(f"{run.name}-teacher.log")
    with teacher("--model_name_or_path", model, *dtype_words(WIDTH), log=log, environment=ENVIRONMENT) as url:
        yield ["--teacher_servers", url]


def run_ours(run: Path, words: list[object], teacher_model: Path | None) -> dict:
    """Train as far as the settings say, where a model is given taught by it; return what the run measured."""
    with taught(teacher_model, run) if teacher_model else nullcontext([]) as teacher_words:
        train(words_of(run, [*words, *teacher_words]))
    return measure(run)


def run_teacher(run: Path, model: Path, words: list[object]) -> dict:
    """Return what the teacher's own answers earn, asked as the policy is."""
    build(PACKED["1.5b"], model)
    config = parse_arguments(LaunchConfig, "", ["--config", CONFIG, *map(str, words)])
    names = ["dataset_name", "dataset_prompt_column", "max_prompt_length", "max_completion_length"]
    names += ["eval_samples", "reward_funcs", "reward_weights"]
    settings = {name: getattr(config, name) for name in names}
    file = run.with_name(f"{run.name}.yaml")
    file.write_text(yaml.safe_dump(settings | {"model_name_or_path": str(model)}))
    command = [sys.executable, "-m", "grpo.evaluate", "--config", file, "--output", run, *dtype_words(WIDTH)]
    subprocess.run([*map(str, command)], env=ENVIRONMENT, check=True)
    metrics = json.loads((run / "metrics.json").read_text())
    evaluation = {name: metrics[key] for name, key in OF_EVALUATION.items()}
    return {"evaluations": [{"step": 0} | evaluation], "machine": machine(ON_CARD)}


def run_theirs(run: Path, words: list[str]) -> dict:
    """Return what TRL's side measured, in the run's folder."""
    measured = trl_side.start("benchmarks.gsm8k", run, 1, ["--worker", run, *words])
    return {
        "seconds": measured["seconds"],
        "reward": measured["reward"],
        "drawn": measured["tokens"],
        "machine": machine(ON_CARD),
    }


def worker(run: Path, words: list[str]) -> None:
    """Do the part of TRL's process: train for an hour."""
    warnings.filterwarnings("ignore")
    config = parse_arguments(TrainerConfig, "", words)
    trl_side.train(
        config,
        [*load_reward_funcs(config.reward_funcs).values()],
        run,
        micro_batches=MICRO_BATCHES,
        most_seconds=HOUR,
        reward_weights=config.reward_weights,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gsm8k", description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=SIDES, default=GRPO)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for all that is made (default: {FOLDER})")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    if arguments.worker:
        worker(arguments.worker, [*options, "--seed", str(arguments.seed)])
        return
    folder = arguments.folder.absolute() / "0.5b"
    os.chdir(REPOSITORY)
    name = "".join(filter(str.isalnum, arguments.side)).lower()
    run = folder / (f"seed{arguments.seed}/run" if arguments.side == GRPO else f"{name}-seed{arguments.seed}")
    larger = folder.parent / "1.5b/model"
    build(PACKED["0.5b"], folder / "model")
    words = ["--dataset_name", questions_of(folder.parent), "--model_name_or_path", folder / "model"]
    words += ["--seed", arguments.seed, *shlex.split(SIDES[arguments.side]), *options]
    if arguments.side == TRL:
        measured = run_theirs(run, ["--config", CONFIG, *dtype_words(WIDTH), *words])
    elif arguments.side == TEACHER:
        measured = run_teacher(run, larger, words)
    else:
        measured = run_ours(run, words, larger if arguments.side == TAUGHT else None)
    path = RESULTS / f"{NAME}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results.setdefault(arguments.side, {})[str(arguments.seed)] = measured
    write(path, results)


if __name__ == "__main__":
    main()

"""GSM8K with a Qwen2.5: a run of a side, kept as numbers in benchmarks/results/qwen.json.

    python -m benchmarks.gsm8k --seed 0                            the recipe, as `make gsm8k` runs it
    python -m benchmarks.gsm8k --side "simple_GRPO's" --seed 0     the settings of another
    python -m benchmarks.results                                   makes docs/results.md of all files of numbers

Every side trains the model of `make gsm8k` in as many steps of as many completions of at most the same length, on the
same questions, and the same functions measure all. A run takes hours: after a stop the same command goes on. Other
options go to `grpo launch`. The questions are those of the variable GSM8K, or the hub's, as in demo/gsm8k.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.common import REPOSITORY, machine
from benchmarks.real import GRPO, RESULTS, SIMPLE, write
from demo.__main__ import ON_CARD, dtype_words
from demo.distill import teacher
from demo.gsm8k import ENVIRONMENT, FOLDER, PACKED, WIDTH, build, questions_of, train, words_of

NAME = "qwen"  # of the file of numbers
BURKOV, TAUGHT = "Burkov's", "taught by 1.5B"
MEASURED = "last_number_reward demo/gsm8k.py:in_tags_reward"
TAGS = "Write reasoning and answer within tags, like this: "
SIDES = {
    GRPO: "",
    SIMPLE: "--num_draws 8 --num_generations 8 --temperature 0.9 --steps_per_generation 4 --reward_tolerance 1e-4 "
    "--max_resample 4 --loss_type grpo --scale_rewards group --learning_rate 1e-6 --lr_scheduler_type constant "
    f"--beta 0.04 --reward_funcs correctness_reward format_reward {MEASURED} --reward_weights 1 1 0 0 "
    f"--system_prompt '{TAGS}<think>reasoning here</think><answer>answer here</answer>'",
    BURKOV: "--num_draws 14 --num_generations 14 --prompts_per_step 5 --temperature 1 --epsilon 0.1 --loss_type grpo "
    "--scale_rewards group --learning_rate 5e-6 --lr_scheduler_type constant --beta 0.04 --reward_funcs "
    f"correctness_reward 'format_reward(reasoning, answer)' {MEASURED} --reward_weights 1 1 0 0 "
    f"--system_prompt '{TAGS}<reasoning>...</reasoning><answer>...</answer>'",
    TAUGHT: "--distillation_loss reverse_kl --reward_weights 0 0 0 --beta 0 --num_draws 1 --num_generations 1 "
    "--prompts_per_step 32 --max_steps 20 --eval_steps 20 --learning_rate 2e-5 --micro_batch_tokens 1024",
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
    evaluations = [row for row in rows if "eval_n" in row]
    return {name: [row.get(key, 0.0) for row in steps] for name, key in OF_STEP.items()} | {
        "form": [form_of(row) for row in steps],
        "tokens": [row["num_tokens"] for row in steps],
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gsm8k", description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=SIDES, default=GRPO)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for all that is made (default: {FOLDER})")
    arguments, options = parser.parse_known_args()
    folder = arguments.folder.absolute() / "0.5b"
    os.chdir(REPOSITORY)
    name = "".join(filter(str.isalnum, arguments.side)).lower()
    run = folder / (f"seed{arguments.seed}/run" if arguments.side == GRPO else f"{name}-seed{arguments.seed}")
    build(PACKED["0.5b"], folder / "model")
    words = ["--dataset_name", questions_of(folder.parent), "--model_name_or_path", folder / "model"]
    words += ["--seed", arguments.seed, *shlex.split(SIDES[arguments.side]), *options]
    with taught(folder.parent / "1.5b/model", run) if arguments.side == TAUGHT else nullcontext([]) as teacher_words:
        train(words_of(run, [*words, *teacher_words]))
    path = RESULTS / f"{NAME}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results.setdefault(arguments.side, {})[str(arguments.seed)] = measure(run)
    write(path, results)


if __name__ == "__main__":
    main()

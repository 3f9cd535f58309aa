"""What each option that changes learning does to the demo (configs/demo_cpu.yaml), beside the demo as it is.

    python -m benchmarks.options --seeds 0 1 2                    every option: about 25 s each and seed on two cores
    python -m benchmarks.options --seeds 0 --only dapo "k1"       those whose name has one of these in it
    python -m benchmarks.options --rows 64 --only demo adaptive resample            of 64 prompts, each seen often

Prints a table: the first step at which held-out accuracy was 80 % or more (it is looked at every fifth step), the
tokens drawn by then, those of replaced groups too, and the mean of the last five steps' KL to the reference (by the
run's own estimator), completion length and entropy. Steps are optimizer updates, so an option that trains on a
completion twice has drawn half as many by then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import yaml

from benchmarks.common import machine, table
from benchmarks.real import drawn_tokens
from demo.__main__ import prepare, train
from demo.task import write_dataset

OPTIONS = {
    "the demo as it is (grpo, k3)": "",
    "loss_type dapo": "--loss_type dapo",
    "loss_type dr_grpo, scale_rewards none": "--loss_type dr_grpo --scale_rewards none",
    "loss_type cispo, 2 iterations": "--loss_type cispo --num_iterations 2",
    "loss_type sapo, 2 iterations": "--loss_type sapo --num_iterations 2",
    "GSPO, 4 steps a round": "--importance_sampling_level sequence --steps_per_generation 4 "
    "--epsilon 0.0003 --epsilon_high 0.0004",
    "loss_type luspo, 2 iterations": "--loss_type luspo --importance_sampling_level sequence --num_iterations 2",
    "loss_type vespo, 2 iterations": "--loss_type vespo --num_iterations 2",
    "num_iterations 2": "--num_iterations 2",
    "num_iterations 2, epsilon_high 0.28, delta 4": "--num_iterations 2 --epsilon_high 0.28 --delta 4",
    "steps_per_generation 4": "--steps_per_generation 4",
    "scale_rewards batch": "--scale_rewards batch",
    "advantage_estimator rloo": "--advantage_estimator rloo",
    "advantage_estimator reinforce++_baseline": "--advantage_estimator reinforce++_baseline",
    "advantage_estimator reinforce++, 128 prompts, 1 completion": "--advantage_estimator reinforce++ "
    "--num_generations 1 --prompts_per_step 128",
    "advantage_estimator remax": "--advantage_estimator remax",
    "advantage_estimator opo": "--advantage_estimator opo",
    "advantage_estimator passk": "--advantage_estimator passk",
    "normalize_then_sum": "--multi_objective_aggregation normalize_then_sum",
    "kl_estimator k1": "--kl_estimator k1",
    "kl_estimator k2": "--kl_estimator k2",
    "kl_estimator k3+": "--kl_estimator k3+",
    "use_bias_correction_kl": "--use_bias_correction_kl",
    "kl_in_reward (k1)": "--kl_in_reward --kl_estimator k1",
    "beta 0.4": "--beta 0.4",
    "entropy_coef 0.05": "--entropy_coef 0.05",
    "use_adaptive_entropy, entropy_target 0.5": "--use_adaptive_entropy --entropy_target 0.5",
    "top_entropy_quantile 0.2": "--top_entropy_quantile 0.2",
    "mask_truncated_completions": "--mask_truncated_completions",
    "soft_punish_cache 30": "--soft_punish_cache 30",
    "max_resample 4": "--max_resample 4",
    "num_draws 16": "--num_draws 16",
    "dataset_order adaptive": "--dataset_order adaptive",
    "importance_sampling_mode token_truncate": "--importance_sampling_mode token_truncate",
    "off_policy_mask_threshold 0.01, 4 iterations": "--off_policy_mask_threshold 0.01 --num_iterations 4",
    "ref_update_steps 20": "--ref_update_steps 20",
    "ref_update_steps 20, ref_mixup_alpha 0.5": "--ref_update_steps 20 --ref_mixup_alpha 0.5",
    "LoRA, adapter_off, learning rate 5e-3": "--use_peft --ref adapter_off --lora_target_modules all-linear "
    "--learning_rate 0.005",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.options", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of model, data and training")
    parser.add_argument("--only", nargs="+", default=[""], help="options whose name has one of these in it")
    parser.add_argument("--rows", type=int, default=4096, help="prompts to train on")
    parser.add_argument("--folder", type=Path, default=Path("runs/options"), help="for all that is made")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the demo builds its model: on a loaded machine two wait for each other
    chosen = [name for name in OPTIONS if any(part in name for part in arguments.only)]
    runs: dict[str, list[list[dict]]] = {name: [] for name in chosen}
    for seed in arguments.seeds:
        folder = (arguments.folder / f"seed{seed}").absolute()
        prepare(folder, seed)
        write_dataset(folder / "data", seed, train_size=arguments.rows)
        for name in chosen:
            shared = ["--update_folder", str(folder / "updates"), "--eval_steps", "5", "--report_to", "none"]
            train(folder, seed, *shared, *OPTIONS[name].split())
            config = yaml.safe_load((folder / "run/config.yaml").read_text())
            run = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
            runs[name].append([row | {"tokens": drawn_tokens(row, config) if row["step"] else 0.0} for row in run])
            print(f"seed {seed}: {name}: {'; '.join(columns(runs[name][-1:]))}", file=sys.stderr, flush=True)
    print(f"{machine()}; seeds {' '.join(map(str, arguments.seeds))}\n")
    head = [
        "option",
        "steps to 80 %",
        "thousand tokens",
        "accuracy at the end",
        "final KL",
        "final length",
        "final entropy",
    ]
    print(table(head, [[name, *columns(runs[name])] for name in chosen]))


def columns(runs: list[list[dict]]) -> list[str]:
    """A number a seed, for each column."""

    def last(run: list[dict], name: str) -> float:
        return statistics.mean(row[name] for row in run[-5:])

    firsts = [next((row["step"] for row in run if row.get("eval_accuracy", 0) >= 0.8), None) for run in runs]
    reached = ["never" if first is None else str(first) for first in firsts]
    drawn = [
        "" if first is None else f"{sum(row['tokens'] for row in run if row['step'] <= first) / 1000:.1f}"
        for first, run in zip(firsts, runs, strict=True)
    ]
    accuracy = [f"{run[-1]['eval_accuracy']:.2f}" for run in runs]
    kl = [f"{last(run, 'kl'):.3f}" for run in runs]
    length = [f"{last(run, 'completions/mean_length'):.1f}" for run in runs]
    entropy = [f"{last(run, 'entropy'):.2f}" for run in runs]
    return [", ".join(values) for values in (reached, drawn, accuracy, kl, length, entropy)]


if __name__ == "__main__":
    main()

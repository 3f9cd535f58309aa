"""Distillation: the model that `make demo` trained teaches the model that it was trained from.

    python -m demo.distill               GRPO, then its pupil; exit code 0 only if that learned in half of the steps
    python -m demo.distill --prepare     only the teacher, the model and the data of configs/demo_distill.yaml

GRPO says of a completion whether it was right. A teacher says of each token what it would have written there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from demo.__main__ import ENVIRONMENT, REPOSITORY, TEXT, DemoError, check_place, prepare, start, train
from grpo.config.console import free_port
from grpo.config.trainer import settings_in

FOLDER, CONFIG = Path("runs/demo-distill"), "configs/demo_distill.yaml"
RIGHT = 0.90  # the accuracy to reach
AT_MOST = 0.5  # of GRPO's steps, and of the tokens that it drew


@dataclass(frozen=True)
class Curve:
    """A run's held-out accuracy by step, and by the tokens that it had drawn until then."""

    name: str
    steps: list[int]
    tokens: list[float]
    accuracy: list[float]

    @classmethod
    def of(cls, name: str, run: Path) -> Curve:
        settings = settings_in(run)
        completions, drawn, points = settings["prompts_per_step"] * settings["num_generations"], 0.0, []
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            drawn += completions * row.get("completions/mean_length", 0.0)
            if "eval_accuracy" in row:
                points.append((row["step"], drawn, row["eval_accuracy"]))
        steps, tokens, accuracy = map(list, zip(*points, strict=True))
        return cls(name=name, steps=steps, tokens=tokens, accuracy=accuracy)

    def reached(self) -> tuple[int, float]:
        """Return the first step with the accuracy, and the tokens drawn until then. Raises DemoError without one."""
        for step, tokens, accuracy in zip(self.steps, self.tokens, self.accuracy, strict=True):
            if accuracy >= RIGHT:
                return step, tokens
        raise DemoError(f"{self.name} reached {max(self.accuracy):.3f} of the held-out problems, and not {RIGHT}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.distill", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the trainings (default: 0)")
    parser.add_argument("--folder", type=Path, help=f"folder of model, data and runs (default: {FOLDER}/seedN)")
    parser.add_argument("--prepare", action="store_true", help="build model and data, and train the teacher only")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the `finally` blocks end the child processes
    sys.stdout.reconfigure(line_buffering=True)  # in order with the output of the programs
    folder = arguments.folder.absolute() if arguments.folder else FOLDER / f"seed{arguments.seed}"
    os.chdir(REPOSITORY)
    os.environ |= ENVIRONMENT  # before `prepare` imports torch
    try:
        check_place()
        prepare(folder, arguments.seed)
        print("the teacher learns by GRPO, as in make demo")
        train(folder, arguments.seed, "--eval_steps", "1", name="grpo")
        if arguments.prepare:
            print(f"teacher, model and data are in {folder}")
            return 0
        with teacher("--model_name_or_path", folder / "grpo/model", log=folder / "teacher.log") as url:
            print("the same model learns from the teacher alone")
            learn(folder, arguments.seed, url)
        report(folder)
    except DemoError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; run it again to start the trainings anew", file=sys.stderr)
        return 130
    return 0


@contextmanager
def teacher(*options: object, log: Path, environment: dict[str, str] = ENVIRONMENT) -> Iterator[str]:
    """Serve the model that the options name; give its address."""
    port = free_port()
    process = start(["ref_server.py", "--port", port, *options], log, environment)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def learn(folder: Path, seed: int, url: str) -> None:
    """Train the model that GRPO began with by the teacher at this address. Raises DemoError."""
    train(folder, seed, "--teacher_servers", url, demo=replace(TEXT, config=CONFIG), name="distill")


def report(folder: Path) -> None:
    """Draw both curves, and print what each run needed. Raises DemoError where the promise was not kept."""
    curves = [Curve.of("GRPO", folder / "grpo"), Curve.of("distillation", folder / "distill")]
    draw(curves, folder / "curves.png")
    print(f"\nboth curves: {folder / 'curves.png'}")
    reached = [curve.reached() for curve in curves]
    for curve, (step, tokens) in zip(curves, reached, strict=True):
        last = f"{curve.accuracy[-1]:.3f} at the end"
        print(f"{curve.name}: {RIGHT:.0%} after {step} steps and {tokens:,.0f} drawn tokens; {last}")
    shares = [taught / alone for alone, taught in zip(*reached, strict=True)]
    print(f"distillation needed {shares[0]:.0%} of GRPO's steps and {shares[1]:.0%} of its tokens")
    if max(shares) > AT_MOST:
        raise DemoError(f"each should be {AT_MOST:.0%} at most")


def draw(curves: list[Curve], path: Path) -> None:
    """Write a PNG of the accuracy by step, and by drawn tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_step, by_tokens = figure.subplots(1, 2, sharey=True)
    for curve in curves:
        by_step.plot(curve.steps, curve.accuracy, label=curve.name)
        by_tokens.plot([tokens / 1000 for tokens in curve.tokens], curve.accuracy)
    for axes, label in ((by_step, "step"), (by_tokens, "drawn tokens, thousands")):
        axes.axhline(RIGHT, color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel=label, ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    by_step.set_ylabel("accuracy on held-out problems")
    by_step.legend(loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())

"""The parts `tests`, `demo` and `kernels` of benchmarks/gpu.py: is all right on this card?"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.card import Clock, Tables
from benchmarks.gpu_real import run, settings
from demo.__main__ import TEXT, prepare

TESTS = "tests/model/test_tree_attention.py", "tests/sampling/test_continuous.py"
KILLED_AFTER, SAVED_EVERY = 25, 10  # steps


def tests(tiny: bool, clock: Clock, tables: Tables) -> None:
    """Run the tests that a card alone can run."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "gpu", *TESTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(1.0, clock.left()))
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0:
        print("\n".join(lines[-40:]) + done.stderr)
    tables.head("tests", "result")
    tables.row("-k gpu", lines[-1] if lines else f"code {done.returncode}")


def demo(tiny: bool, clock: Clock, tables: Tables) -> None:
    """Train the demo's model in bf16 on a card: as it is, killed and resumed, which must be equal, and by ZeRO-3."""
    words = ["--config", TEXT.config, "--deterministic", "--save_steps", str(SAVED_EVERY)]
    if tiny:
        words += ["--max_steps", str(KILLED_AFTER + 2), "--eval_steps", "27", "--eval_samples", "8"]
    tables.head("demo", "held-out accuracy", "seconds a step, median", "lines of metrics, beside the first run's")
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, 0)
        for name, killed, more in (
            ("as it is", 0, []),
            (f"killed after step {KILLED_AFTER} and resumed", KILLED_AFTER, []),
            ("ZeRO-3", 0, ["--deepspeed", "configs/ds_zero3.json"]),
        ):
            if clock.over(name):
                return
            runs.append(run([*settings(folder), *words, *more], folder, clock, killed))
            if not runs[-1]:
                tables.row(name, "failed: see above")
                return
            shares = (f"{row['eval_accuracy']:.3f}" for row in runs[-1] if "eval_accuracy" in row)
            median = statistics.median(row["step_time"] for row in runs[-1] if "step_time" in row)
            equal = "equal" if numbers(runs[0]) == numbers(runs[-1]) else "failed: they differ"
            tables.row(
                name,
                ", ".join(shares),
                f"{median:.2f}",
                f"{len(runs[-1])}" if more else f"{len(runs[-1])}, {equal}",
            )


def kernels(tiny: bool, clock: Clock, tables: Tables) -> None:
    """Count the kernels of a drawn token and time it, by both passes."""
    from benchmarks import kernels as both  # sets Triton's interpreter on a CPU: for this part alone

    both.counts(tables)
    both.times(tiny, clock, tables)


def numbers(rows: list[dict]) -> list[dict]:
    """Leave out what a clock or a counter of memory gave."""
    timed = re.compile("time|memory|tokens_per_second")
    return [{name: value for name, value in row.items() if not timed.search(name)} for row in rows]

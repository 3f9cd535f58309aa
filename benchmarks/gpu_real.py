"""The parts `sums`, `fits`, `shapes` and `gsm8k` of benchmarks/gpu.py: a real model, and shapes of real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from benchmarks.card import Clock, Tables
from benchmarks.gpu_train import save_random, write_prompts
from demo import real
from demo.__main__ import REAL, rise_of
from grpo.config.console import free_port

LORA = ["--use_peft", "--lora_r", "16", "--ref", "adapter_off"]
CASES = [
    ("Qwen2.5-1.5B", "whole", [], "one card of 24 GB (EasyR1); QLoRA: 5 GB (Unsloth)"),
    ("Qwen2.5-1.5B", "whole, no server", ["--ref", "local"], ""),
    ("Qwen2.5-3B", "whole", [], "one card of 40 GB (EasyR1)"),
    ("Qwen2.5-3B", "AdamW on the CPU", ["--deepspeed", "configs/ds_offload.json", "--beta", "0"], ""),
    ("Qwen2.5-7B", "LoRA r 16", LORA, "whole: four cards of 40 GB (EasyR1)"),
    ("Qwen2.5-7B", "LoRA r 16, less memory", [*LORA, "--tiled_mlp", "--activation_offloading"], ""),
]
"""shapes, how each is trained, and what others publish: EasyR1's README for bf16, Unsloth's announcement of February
2025"""
FITS = [
    ("Qwen2.5-1.5B", "configs/lora_24gb.yaml", []),
    ("Qwen2.5-7B", "configs/qlora_24gb.yaml", []),
    ("Qwen2.5-1.5B", "configs/whole_7b_24gb.yaml", ["--prompts_per_step", "4"]),
    ("Qwen2.5-3B", "configs/whole_7b_24gb.yaml", ["--prompts_per_step", "4"]),
]
"""shapes, and the files of settings for one card of 24 GB that they are trained with; the number of prompts changes no
peak"""
STEP = ["--num_generations", "8", "--prompts_per_step", "8", "--save_steps", "0", "--report_to", "none"]
COLUMNS = (
    "generate, s", "wait_ref, s", "update, s", "optimizer, s", "step, s", "peak allocated, GiB", "reserved, GiB",
    "the dry run's promise, GiB",
)  # fmt: skip
LAUNCH = [sys.executable, "-m", "grpo.launch", "--nproc_per_node", "1"]
Build = Callable[[str, bool], PreTrainedModel]


def sums(build: Build, tiny: bool, clock: Clock, tables: Tables) -> None:
    """Train what `make demo-real` trains, as its file of settings says, with five seeds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(build, tiny, folder / "model")
        words = ["--max_steps", "2", "--eval_steps", "1", "--eval_samples", "4"] if tiny else []
        tables.head("seed", "before", "after", "rise, points", "seconds a step, median")
        for seed in range(5):
            if clock.over(f"seed {seed}"):
                return
            real.write_dataset(folder / "data", seed)
            rows = run([*settings(folder), "--config", REAL.config, "--seed", str(seed), *words], folder, clock)
            learned(str(seed), rows, tables)


def gsm8k(build: Build, tiny: bool, clock: Clock, tables: Tables) -> None:
    """Train SmolLM2-135M-Instruct on GSM8K, of the hub or of a folder that the variable GSM8K names."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(build, tiny, folder / "model")
        if tiny:
            (folder / "data").mkdir()
            for split in ("train", "test"):
                write_prompts(folder / f"data/{split}.jsonl", (20, 40))
        data = str(folder / "data") if tiny else os.environ.get("GSM8K", "openai/gsm8k")
        steps, samples, length = ("2", "4", "8") if tiny else ("500", "500", "256")
        words = ["--dataset_name", data, "--max_steps", steps, "--eval_steps", steps, "--eval_samples", samples]
        words += ["--max_completion_length", length, "--learning_rate", "1e-5", "--warmup_steps", "0", *STEP]
        words += ["--system_prompt", "", "--reward_funcs", "last_number_reward"]  # it never writes README's tags
        tables.head("GSM8K", "before", "after", "rise, points", "seconds a step, median")
        learned("seed 0", run([*settings(folder), *words], folder, clock), tables)


def shapes(build: Build, tiny: bool, clock: Clock, tables: Tables) -> None:
    """Train random weights for five steps in each shape, and compare the peak with the dry run's promise."""
    new = "8" if tiny else "400"
    tables.head("shape", "how", *COLUMNS, "published")
    for shape, how, options, published in CASES:
        if clock.over(f"{shape}, {how}"):
            return
        words = [*options, *STEP, "--max_steps", "5", "--max_completion_length", new]
        tables.row(shape, how, *step_cells(build, shape, tiny, words, clock), published)


def fits(build: Build, tiny: bool, clock: Clock, tables: Tables) -> None:
    """Train random weights by the files of settings for cards of 24 GB; torch may hold no more than such a card has."""
    tables.head("shape", "settings", *COLUMNS)
    short = ["--max_completion_length", "8", "--quantization", "none"] if tiny else []
    for shape, config, options in FITS:
        if clock.over(f"{shape}, {config}"):
            return
        words = ["--config", config, "--callback", "benchmarks/small_card.py:limit", "--max_steps", "3"]
        words += ["--save_steps", "0", "--report_to", "none", *options, *short]
        tables.row(shape, config, *step_cells(build, shape, tiny, words, clock))


def step_cells(build: Build, shape: str, tiny: bool, words: list[str], clock: Clock) -> list[str]:
    """Train random weights; return the cells of COLUMNS: means of the steps after the first, which warms up."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_random(build(shape, tiny), folder / "model")
        write_prompts(folder / "data.jsonl", (20, 40) if tiny else (100, 200))
        words = [*words, *settings(folder), "--dataset_name", str(folder / "data.jsonl")]
        words += ["--eval_steps", "0", "--system_prompt", ""]
        promise = promised(words)
        steps = run(words, folder, clock)[1:]
    if not steps:
        return ["failed: see above"]
    phases = [f"time/{phase}" for phase in ("generate", "wait_ref", "update", "optimizer")]
    means = [statistics.mean(step.get(phase, 0.0) for step in steps) for phase in (*phases, "step_time")]
    peaks = {name: value for name, value in steps[-1].items() if name.startswith("memory/peak_")}
    reserved = peaks.pop("memory/peak_reserved", 0.0)
    return [f"{x:.2f}" for x in (*means, max(peaks.values(), default=0.0), reserved, promise)]


def settings(folder: Path) -> list[str]:
    return [
        *("--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "data")),
        *("--output_dir", str(folder / "run"), "--port", str(free_port())),
    ]


def run(words: list[str], folder: Path, clock: Clock, killed_after: int = 0) -> list[dict]:
    """Run `grpo launch words` for as long as there is time; return the metrics, none if it failed. Kill all its
    processes after the step `killed_after`, if that is not 0, and let it continue from its last checkpoint."""
    log, metrics = folder / "log", folder / "run/metrics.jsonl"
    shutil.rmtree(folder / "run", ignore_errors=True)
    with open(log, "w") as output:
        if killed_after:
            killed = subprocess.Popen(
                [*LAUNCH, *words], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            while clock.left() > 0 and killed.poll() is None and not has_done(metrics, killed_after):
                time.sleep(0.1)
            if killed.poll() is None:
                os.killpg(killed.pid, signal.SIGKILL)
                killed.wait()
            words = [*words, "--port", str(free_port()), "--resume_from_checkpoint", "last"]
        process = subprocess.Popen([*LAUNCH, *words], stdout=output, stderr=subprocess.STDOUT)
    try:
        code = process.wait(max(1.0, clock.left()))
    except subprocess.TimeoutExpired:
        code = "none, its time was over"
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code != 0:
        print(f"\nended with code {code}:\n" + "\n".join(log.read_text().splitlines()[-30:]), flush=True)
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def has_done(metrics: Path, step: int) -> bool:
    return metrics.exists() and f'"step": {step},' in metrics.read_text()


def promised(words: list[str]) -> float:
    """Return the memory that the dry run says the trainer's rank needs on this machine, GiB."""
    done = subprocess.run([*LAUNCH, "--dry_run", *words], capture_output=True, text=True, check=False)
    found = re.search(r"^  together +([0-9,]+)", done.stdout, re.MULTILINE)
    if not found:
        print(done.stdout + done.stderr)
        return float("nan")
    return int(found[1].replace(",", "")) / 1024


def learned(name: str, rows: list[dict], tables: Tables) -> None:
    """Add a row of what a run learned, if it ended."""
    if not rows:
        tables.row(name, "failed: see above")
        return
    rise, error = rise_of(rows[0], rows[-1])
    shares = (f"{100 * row['eval_accuracy']:.1f} %" for row in (rows[0], rows[-1]))
    median = statistics.median(row["step_time"] for row in rows if "step_time" in row)
    tables.row(name, *shares, f"{100 * rise:.1f} ± {100 * error:.1f}", f"{median:.2f}")


def save_model(build: Build, tiny: bool, folder: Path) -> None:
    """Write SmolLM2-135M-Instruct out of its package, or if `tiny` random weights."""
    if tiny:
        save_random(build("Qwen2.5-1.5B", tiny), folder)
    else:
        real.build(folder, seed=0)

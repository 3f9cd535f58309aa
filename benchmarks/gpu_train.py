"""The part `train` of benchmarks/gpu.py: server and trainer together on one card, at simple_GRPO's settings."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel

from benchmarks.card import Clock, Tables, free
from benchmarks.common import spread
from demo.model import build_tokenizer
from demo.task import problems
from grpo.config.console import free_port


def train(shape: str, build: Callable[[], PreTrainedModel], tiny: bool, clock: Clock, tables: Tables) -> None:
    missing = [name for name in ("deepspeed", "bottle", "waitress", "datasets") if not importlib.util.find_spec(name)]
    if missing:
        print(f"\nnot measured: {' and '.join(missing)} must be installed")
        return
    steps, new, rounds = (8, 8, 2) if tiny else (60, 400, 10)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_random(build(), folder / "model")
        write_prompts(folder / "train.jsonl", (20, 40) if tiny else (100, 200))
        settings = {
            "dataset_name": folder / "train.jsonl",
            "output_dir": folder / "run",
            "system_prompt": "",
            "num_generations": 8,
            "prompts_per_step": 1,
            "steps_per_generation": rounds,
            "sequences_per_generate": 8 * rounds,
            "max_completion_length": new,
            "temperature": 0.9,
            "beta": 0.04,
            "learning_rate": 1e-6,
            "max_steps": steps,
            "eval_steps": 0,
            "save_steps": 0,
            "report_to": "none",
        }
        finished = run_both(folder, steps, settings, clock)
    measured = finished[rounds:]  # the first round warms up
    if not measured:
        print(f"\nnot measured: {len(finished)} steps were done in time; what the programs said last is above")
        return
    tables.head("phase", f"seconds a step, mean of {len(measured)}")
    phases = "generate", "reward", "old_logprobs", "wait_ref", "update", "optimizer"
    for phase in (*(f"time/{name}" for name in phases), "step_time"):
        if values := [step[phase] for step in measured if phase in step]:
            # A round draws for `rounds` steps: its phases are in the first step's line alone.
            tables.row(phase, f"{sum(values) / len(measured):.3f}")
    update = [step["time/update"] for step in measured]
    tables.row("time/update, median (least to most)", spread(update, 3))
    mean = statistics.mean(step["step_time"] for step in measured)
    length = statistics.mean(step["completions/mean_length"] for step in measured)
    tables.head("", "model", "cards", f"{steps} steps", "what a step is")
    tables.row(
        "ours",
        f"{shape}, random weights" + (" (tiny)" if tiny else ""),
        "1, the reference on it too",
        f"{steps * mean / 60:.1f} min" + ("" if len(finished) == steps else f" (from {len(measured)} steps)"),
        f"8 completions of {length:.0f} tokens, scored, an optimizer update; drawn {rounds} steps at a time",
    )
    tables.row(
        "simple_GRPO, its README",
        "Qwen2.5-3B, trained weights",
        "2 A800 80 GB",
        "12 min 34 s",
        "8 completions scored and a backward pass; an update every 2 (grpo_ref_split.py) or 4 (grpo_vllm_one.py) steps",
    )
    print(
        "\nWhat differs: simple_GRPO's reference has a card of its own. Its samples come from weights up to 10 steps "
        "old (from vLLM: older), may have 512 (700) tokens and end when the model ends them; random weights go on to "
        "the limit. It throws away groups with equal rewards unscored. Its optimizer is offloaded to the CPU. It does "
        "not say which of its two scripts gave the time."
    )


def run_both(folder: Path, steps: int, settings: dict[str, object], clock: Clock) -> list[dict]:
    """Run the real programs; return the metrics of the steps that they finish in time."""
    port = free_port()
    shared = ["--model_name_or_path", str(folder / "model"), "--port", str(port)]
    pairs = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    trainer, metrics = None, folder / "run/metrics.jsonl"
    with open(folder / "server.log", "w") as output:
        server = subprocess.Popen(
            [sys.executable, "ref_server.py", *shared], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        with open(folder / "trainer.log", "w") as output:
            trainer = subprocess.Popen(
                [sys.executable, "grpo_ref_split.py", *shared, *pairs],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        while trainer.poll() is None and clock.left() > 0 and count_lines(metrics) < steps:
            time.sleep(0.5)
    finally:
        failed = count_lines(metrics) < steps
        for process in (trainer, server):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        for name in ("server.log", "trainer.log") if failed else ():
            if (log := folder / name).exists():
                print(f"\n{name}:\n" + "\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr, flush=True)
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def save_random(model: PreTrainedModel, folder: Path) -> None:
    """Write a model of random weights with the demo's tokenizer, and free its memory."""
    tokenizer = build_tokenizer(seed=0)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    free(model)


def write_prompts(path: Path, lengths: tuple[int, int]) -> None:
    """Write made-up problems, several to a prompt, of so many of the demo's tokens: about as many as GSM8K's have."""
    tokenizer = build_tokenizer(seed=0)
    stories = problems(random.Random(0))
    draw = random.Random(1)
    with open(path, "w") as file:
        for _ in range(200):
            wanted, text = draw.randint(*lengths), ""
            while len(tokenizer(text)["input_ids"]) < wanted:
                text += next(stories).question + " "
            file.write(json.dumps({"question": text, "answer": "1"}) + "\n")


def count_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0

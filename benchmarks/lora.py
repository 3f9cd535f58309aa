"""Memory of the trainer with and without LoRA, and the cost of a reference without a server: whole runs on a CPU.

    python -m benchmarks.lora              # all ways, one after the other
    python -m benchmarks.lora --layers 1

Each way is `grpo_ref_split.py` in a process of its own, one rank in fp32: Qwen2.5-0.5B's widths with few layers, random
weights and a small vocabulary, so that layers are nearly all of it. Most resident memory of the process, and medians
over the steps of its record. Needs peft. Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import REPOSITORY, machine, qwen, random_model, table
from demo.model import build_tokenizer
from demo.task import write_dataset

LORA = ["--use_peft", "--lora_target_modules", "all-linear"]
WAYS = {
    "whole model": ["--beta", "0"],
    "LoRA": ["--beta", "0", *LORA],
    "LoRA, adapter_off": ["--ref", "adapter_off", *LORA],
    "DoRA": ["--beta", "0", *LORA, "--use_dora"],
}
STEP = {
    "prompts_per_step": 2,
    "num_generations": 8,
    "max_completion_length": 32,
    "max_prompt_length": 96,
    "micro_batch_tokens": 1024,
    "warmup_steps": 0,
    "eval_steps": 0,
    "system_prompt": "",
    "report_to": "none",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = build_tokenizer(seed=0)
        model = random_model(qwen(options.layers, len(tokenizer)))
        count = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        write_dataset(folder / "data", seed=0)
        rows = [[way, *measure(folder, way, arguments, options.steps)] for way, arguments in WAYS.items()]
    print(f"{machine()}, one rank, {count / 1e6:.0f} M parameters\n")
    print(table(["", "peak, MiB", "sampling, s", "update, s", "reference, s", "saved, MB"], rows))


def measure(folder: Path, way: str, arguments: list[str], steps: int) -> list[str]:
    out = folder / way
    words = [f"--{name}={value}" for name, value in STEP.items()]
    where = ["--model_name_or_path", folder / "model", "--dataset_name", folder / "data", "--output_dir", out]
    process = subprocess.Popen(
        [sys.executable, "grpo_ref_split.py", *map(str, where), *words, *arguments, "--max_steps", str(steps)],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "CUDA_VISIBLE_DEVICES": ""},
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{way} ended with {status}")
    record = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = [
        f"{statistics.median(row.get(name, 0.0) for row in record):.2f}"
        for name in ("time/generate", "time/update", "time/ref_logprobs")
    ]
    saved = sum(path.stat().st_size for path in (out / "model").glob("*.safetensors"))
    return [f"{usage.ru_maxrss / 1024:.0f}", *seconds, f"{saved / 1e6:.1f}"]


if __name__ == "__main__":
    main()

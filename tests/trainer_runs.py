"""Runs of the trainer to test with: their options, processes and records."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from conftest import ENVIRONMENT, REPOSITORY, free_port, launcher, running_server
from safetensors.torch import load_file
from servers import wait_until


def options(model_name_or_path, dataset_name, output_dir, **changes) -> list[str]:
    settings = {"model_name_or_path": model_name_or_path, "dataset_name": dataset_name, "output_dir": output_dir}
    settings |= {"system_prompt": "", "max_prompt_length": 96, "max_completion_length": 24, "num_generations": 4}
    settings |= {"prompts_per_step": 4, "max_steps": 3, "warmup_steps": 0, "learning_rate": 1e-3, "eval_steps": 2}
    settings |= {"eval_samples": 10, "ref_startup_timeout": 20, "micro_batch_tokens": 400}
    settings |= {"no_gradient_checkpointing": None} | changes
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in settings.items()]


PIPED = {"cwd": REPOSITORY, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def start(*arguments, environment: dict | None = None) -> subprocess.Popen:
    """One rank without the launcher."""
    command = [sys.executable, "grpo_ref_split.py", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT | (environment or {}), **PIPED)


def plain_python(*arguments) -> subprocess.CompletedProcess:
    process = start(*arguments)
    output, _ = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def run_ranks(
    count: int, *words: str, environment: dict | None = None, seconds: float = 240
) -> subprocess.CompletedProcess:
    """Run a script on so many ranks to its end, without the launcher, which rests for two seconds and costs imports.

    As the launcher it ends the other ranks when one fails; then the exit code is that rank's.
    """
    shared = ENVIRONMENT | (environment or {})
    sizes = {"WORLD_SIZE": count, "LOCAL_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command, ranks = [sys.executable, "-u", *words], []
    with tempfile.TemporaryFile("w+") as output:
        try:
            for rank in range(count):
                place = {name: str(value) for name, value in (sizes | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                ranks.append(subprocess.Popen(command, env=shared | place, **PIPED | {"stdout": output}))
            deadline = time.monotonic() + seconds
            while None in (codes := [process.poll() for process in ranks]) and not any(codes):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            for process in ranks:
                if any(codes):
                    process.terminate()
                process.wait(timeout=60)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        output.seek(0)
        return subprocess.CompletedProcess(command, next(filter(None, codes), 0), output.read())


def lines(path) -> list[dict]:
    written = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in written if line.endswith("\n")]  # the last one may be half written


def timeless(run) -> list[dict]:
    """A run's recorded steps without times."""
    timed = ("step_time", "tokens_per_second", "eval_runtime")
    return [
        {name: value for name, value in row.items() if not name.startswith("time/") and name not in timed}
        for row in lines(run / "metrics.jsonl")
    ]


def one_line(output: str) -> str:
    """The program's own last word: one line, no traceback."""
    assert "Traceback" not in output, output
    errors = [line for line in output.splitlines() if line.startswith("grpo_ref_split.py: error:")]
    assert len(errors) == 1, output
    return errors[0]


def wait_for_steps(process, run, count) -> None:
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(lines(metrics)) >= count, 120, process)


STEPS = 10

# Rounds of two steps, each trained on twice, and checkpoints in the middle of them.
OPTIONS = {"max_steps": STEPS, "save_steps": 2, "eval_steps": 5, "steps_per_generation": 2, "num_iterations": 2}
OPTIONS |= {"use_adaptive_entropy": None, "entropy_coef": 0.1, "entropy_target": 6.04, "kl_target": 1e-4}
OPTIONS |= {"weight_decay": 0.1, "report_to": "none", "ref_deadline": 120}
KINDS = {
    "full": {},
    "reference updates": {"ref_update_steps": 4, "ref_mixup_alpha": 0.6},
    "LoRA": {"use_peft": None, "ref": "adapter_off", "lora_target_modules": "all-linear", "learning_rate": 1e-2},
    "shared rows": {"sequence_parallel_size": 2},
}
KINDS["LoRA, taught"] = KINDS["LoRA"] | {"distillation_loss": "jsd", "distillation_top_k": 5}  # by the first weights


def reference(model_folder: Path, folder: Path):
    """A server whose answers do not depend on what else waits, and that takes updates."""
    folder.mkdir()
    words = ["--deterministic", "true", "--update_folder", str(folder / "new")]
    return running_server(model_folder, folder, *words)


@contextmanager
def training(ranks: int, words: list[str], *program: str):
    """A trainer on its way, in a process group of its own. `program` stands before its options."""
    command = [*(launcher(ranks) if ranks > 1 else [sys.executable]), *(program or ["grpo_ref_split.py"]), *words]
    process = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **PIPED)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(ranks: int, words: list[str], *program: str) -> str:
    """Run to a good end; return the output."""
    ended = run_ranks(ranks, *(program or ["grpo_ref_split.py"]), *words)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def equal(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> bool:
    return here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in there)


def check_weights(folder: Path, other: Path) -> None:
    assert equal(weights(folder), weights(other))


def check_drawn_alike(run: Path, other: Path) -> None:
    """Hold two runs to the same completions and weights, to the bit."""
    assert (run / "completions.jsonl").read_text() == (other / "completions.jsonl").read_text()
    check_weights(run / "model", other / "model")


def check_alike(run: Path, other: Path) -> None:
    """Hold two runs to the same numbers, completions and weights, to the bit."""
    assert timeless(run) == timeless(other)
    check_drawn_alike(run, other)


def check_same(run: Path, undisturbed: Path) -> None:
    check_alike(run, undisturbed)
    check_weights(run / "checkpoint-10", undisturbed / "checkpoint-10")
    left = {path.name for path in run.iterdir() if path.is_dir() and not path.name.startswith("reference-")}
    assert sorted(left - {"tensorboard"}) == ["checkpoint-10", "checkpoint-8", "model"]


def begun_again(process: subprocess.Popen, run: Path) -> bool:
    """Wait until it writes into the run's files. False where it ends without: the run is done."""
    recorded = run / "metrics.jsonl"
    before = recorded.stat().st_mtime_ns if recorded.exists() else 0

    def begun() -> bool:
        return recorded.exists() and recorded.stat().st_mtime_ns != before

    wait_until(lambda: process.poll() == 0 or begun(), 120, process)
    return begun()


def reach(process: subprocess.Popen, run: Path, step: int) -> None:
    """Wait until this step is recorded, of this process: it begins with cutting off what is beyond where it goes on."""
    begun_again(process, run)
    row = f'{{"step": {step},'
    wait_until(lambda: any(row in line for line in (run / "metrics.jsonl").read_text().splitlines()), 120, process)


def went_on(output: str) -> int:
    steps = re.findall(r"goes on after step (\d+)", output)
    return int(steps[0]) if steps else 0

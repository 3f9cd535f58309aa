"""A run whose completions a worker with vLLM draws: each comes from the weights that its task names.

VLLM_PYTHON names the interpreter of an environment with vLLM (`make test-vllm`).
"""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pictured
import psutil
import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY
from processes import left_of
from recorded import write_rows
from servers import wait_until
from test_vllm_engine import ON_CPU, VLLM_PYTHON, save_model
from trainer_runs import lines, options, run_ranks, timeless, training
from transformers import AutoModelForImageTextToText

from grpo.model.pictures import vision_parameters

no_vllm = pytest.mark.skipif(not VLLM_PYTHON, reason="VLLM_PYTHON names no environment with vLLM")
pytestmark = [pytest.mark.slow, no_vllm]


@contextmanager
def drawing(url: str, folder: Path) -> Iterator[subprocess.Popen]:
    """A worker with vLLM, ended by SIGTERM; its words are in the file `log`."""
    command = [VLLM_PYTHON, "generate.py", "--pool", url, "--engine", "vllm", "--vllm_args=--enforce-eager"]
    command += ["--weights_folder", str(folder / "worker")]
    with open(folder / "log", "wb") as log:
        worker = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT | ON_CPU, stdout=log, stderr=log)
    try:
        yield worker
        below = [child.pid for child in psutil.Process(worker.pid).children(recursive=True)]
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        assert not left_of(below)
    finally:
        worker.kill()
        worker.wait()


def test_a_run_trains_on_what_vllm_draws(pool, model, tokenizer, data_folder, letters, tmp_path):
    """At each of 20 steps vLLM has the policy of that step: its log-probs are the trainer's."""
    policy = save_model(model, tokenizer, tmp_path / "policy")
    settings = {"max_steps": 20, "save_steps": 0, "eval_steps": 0, "beta": 0, "report_to": "none", "temperature": 0.9}
    words = options(policy, data_folder, tmp_path / "run", sampler="pool", pool=pool.url, **settings)
    with drawing(pool.url, tmp_path):
        trained = run_ranks(1, "grpo_ref_split.py", *words, *letters, seconds=900)
    assert trained.returncode == 0, trained.stdout
    steps = timeless(tmp_path / "run")
    assert [row["step"] for row in steps] == [*range(1, 21)]
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps) < 1e-4


def test_a_run_whose_vision_tower_is_trained_trains_on_what_vllm_draws(pool, letters, tmp_path):
    """In the middle vLLM is killed, and starts again."""
    policy = pictured.save("qwen2_5_vl", tmp_path / "policy", 0, pictured.for_vllm("qwen2_5_vl"))
    (data := tmp_path / "data").mkdir()
    rows = []
    for number in range(16):
        (data / f"{number}.png").write_bytes(pictured.drawing(24 + number, 40, seed=number))
        rows.append({"question": "<image>Which?", "answer": f"#### {number}", "images": [f"{number}.png"]})
    write_rows(data / "train.jsonl", rows)
    settings = {"max_steps": 8, "save_steps": 0, "eval_steps": 0, "beta": 0, "report_to": "none"}
    words = options(policy, data, tmp_path / "run", sampler="pool", pool=pool.url, **settings)
    with training(1, [*words, *letters]) as trainer:
        with drawing(pool.url, tmp_path) as worker:
            metrics = tmp_path / "run/metrics.jsonl"
            wait_until(lambda: metrics.exists() and len(lines(metrics)) > 2, 600, trainer)
            engine_of(worker).kill()
            wait_until(lambda: trainer.poll() is not None, seconds=600)
        assert trainer.returncode == 0, trainer.communicate()
    steps = timeless(tmp_path / "run")
    assert [row["step"] for row in steps] == [*range(1, 9)]
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps) < 5e-4
    before, after = (AutoModelForImageTextToText.from_pretrained(path) for path in (policy, tmp_path / "run/model"))
    assert not any(map(torch.equal, vision_parameters(before), vision_parameters(after)))


def engine_of(worker: subprocess.Popen) -> psutil.Process:
    return next(child for child in psutil.Process(worker.pid).children() if "--model" in child.cmdline())

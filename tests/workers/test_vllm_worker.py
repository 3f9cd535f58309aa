"""A worker that draws with vLLM, or with the stand-in: each completion comes from the weights that its task names.

VLLM_PYTHON names the interpreter of an environment with vLLM (`make test-vllm`).
"""

import copy
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pictured
import psutil
import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY
from pools import Trainer, distances
from processes import left_of
from recorded import write_rows
from servers import wait_until
from test_vllm_engine import FAKE, ON_CPU, VLLM_PYTHON, save_model
from trainer_runs import lines, options, run_ranks, timeless, training
from transformers import AutoModelForImageTextToText

from grpo.config.programs import WorkerConfig
from grpo.model.pictures import vision_parameters
from grpo.pool.client import PoolClient
from grpo.pool.protocol import Task
from grpo.workers import loop
from grpo.workers.loop import GenerationWorker
from grpo.workers.vllm_engine import VllmEngine

pytestmark = pytest.mark.slow


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """A folder with one for the trainer and one for the worker, whose engine starts with the tests' environment."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "worker").mkdir()
    return tmp_path


@contextmanager
def running(pool, folder: Path, fault: str) -> Iterator[VllmEngine]:
    """A worker whose engine has a fault."""
    engine = VllmEngine(FAKE, folder / "vllm.log", ["--fault", fault])
    worker = GenerationWorker(WorkerConfig(pool=pool.url), engine, folder / "worker")
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield engine
    finally:
        worker.close()
        thread.join()


def distance(trainer: Trainer, tasks: list[Task], seconds: float) -> float:
    """Wait for what workers draw; return the largest difference of its log-probs from the trainer's."""
    groups, policies = trainer.wait(tasks, seconds), {tasks[0].version: trainer.model}
    return max(max(distances(*pair, trainer.run.temperature, policies)) for pair in zip(tasks, groups, strict=True))


def test_a_swap_in_the_middle_of_completions_is_in_their_tokens_versions(pool, model_folder, folders, monkeypatch):
    monkeypatch.setattr(loop, "POLL", 0.2)
    changes = {"max_completion_length": 100, "in_flight_weight_updates": True}
    trainer = Trainer(PoolClient(pool.url), model_folder, folders / "trainer", **changes)
    trainer.publish(0)
    tasks, policies = trainer.put_tasks(0, range(3)), [copy.deepcopy(trainer.model)]
    with running(pool, folders, "awaits_weights") as engine:
        wait_until(lambda: engine.drawing and engine.server.count_tokens())
        trainer.learn(seed=1)
        trainer.publish(1, whole=False, delta=True)
        policies.append(trainer.model)
        groups = trainer.wait(tasks)
    for task, group in zip(tasks, groups, strict=True):
        assert max(distances(task, group, trainer.run.temperature, dict(enumerate(policies)))) < 1e-4
    assert any({*row} == {0, 1} for group in groups for row in group.versions)


needs_vllm = pytest.mark.skipif(not VLLM_PYTHON, reason="VLLM_PYTHON names no environment with vLLM")


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


@needs_vllm
def test_vllm_draws_what_a_pool_asks_for_also_after_it_was_killed(pool, model, tokenizer, tmp_path):
    policy = save_model(model, tokenizer, tmp_path / "policy")
    trainer = Trainer(PoolClient(pool.url), policy, tmp_path / "trainer", temperature=1.0)
    with drawing(pool.url, tmp_path) as worker:
        for version in range(3):
            trainer.learn(seed=version)
            trainer.publish(version, whole=version == 0, delta=version > 0)
            tasks = trainer.put_tasks(version, range(6 * version, 6 * version + 6))
            assert distance(trainer, tasks, 600.0) < 1e-4
            if version == 1:
                engine_of(worker).kill()
    log = (tmp_path / "log").read_text()
    assert "starting it again" in log and log.count("groups at a time") == 2, log


@needs_vllm
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


@needs_vllm
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

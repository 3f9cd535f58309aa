"""The demo learns: the real programs on the shipped settings, with the accuracy promised. A seed takes a minute.

`python -m demo` itself checks where held-out accuracy begins and ends; the tests look at what it says and leaves.
"""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import trainer_runs
from conftest import ENVIRONMENT, REPOSITORY
from processes import left_of, processes_below
from rounding import NO_KL

from demo.__main__ import TEXT

pytestmark = pytest.mark.slow


def start(folder, *options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "demo", "--folder", str(folder), *options],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(folder, *options) -> str:
    """Run the demo to its end; its output."""
    process = start(folder, *options)
    output, errors = process.communicate(timeout=550)
    assert process.returncode == 0, output + errors
    return output


def lines(folder) -> list[dict]:
    return trainer_runs.lines(folder / "run/metrics.jsonl")


def test_a_model_is_built_with_one_thread_however_many_the_machine_claims():
    script = """
import sys
import demo.__main__ as demo
def prepare(*_):
    import torch
    print(torch.get_num_threads())
demo.prepare = prepare
sys.argv[1:] = ["--prepare"]
demo.main()
"""
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "7"}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert ended.stdout.startswith("1\n"), ended.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of seed 0 after a whole run, and what the run printed."""
    folder = tmp_path_factory.mktemp("demo") / "seed0"
    return folder, run(folder, "--seed", "0")


def check(folder, output) -> None:
    rows = lines(folder)
    assert TEXT.before[0] <= rows[0]["eval_accuracy"] <= TEXT.before[1]
    assert rows[-1]["eval_accuracy"] >= TEXT.after and rows[-1]["eval_n"] == 256
    assert rows[1]["kl"] < NO_KL
    assert f"{rows[-1]['eval_accuracy']:.3f} ±" in output and output.count("before: ") == 4
    assert (folder / "run/curves.png").stat().st_size > 10_000 and str(folder / "run/curves.png") in output


def test_the_demo_learns_with_the_shipped_seed(built):
    check(*built)


def test_the_trained_model_has_the_accuracy_that_its_run_recorded(built, tmp_path):
    folder, _ = built
    command = [sys.executable, "-m", "grpo.evaluate", "--config", f"{folder}/run/config.yaml"]
    command += ["--model", f"{folder}/run/model", "--output", str(tmp_path / "out"), "--num_generations_eval", "4"]
    ended = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found, recorded = json.loads((tmp_path / "out/metrics.json").read_text()), lines(folder)[-1]
    for name in ("eval_accuracy", "eval_accuracy_se", "eval_n", "eval_format", "eval_completions/mean_length"):
        assert found[name] == recorded[name]
    assert found["eval_avg@4"] > 0.5 and found["eval_avg@4"] < found["eval_pass@4"] <= 1
    assert f"accuracy, greedy {100 * recorded['eval_accuracy']:.1f} %" in " ".join(ended.stdout.split())


@pytest.mark.rare
@pytest.mark.plain_start
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_learns_with_other_seeds(tmp_path, seed):
    check(tmp_path / "demo", run(tmp_path / "demo", "--seed", str(seed)))


@pytest.mark.rare
def test_the_demo_learns_from_what_workers_draw_though_one_is_killed(built, tmp_path):
    shutil.copytree(built[0] / "model", tmp_path / "demo/model")
    output = run(tmp_path / "demo", "--pool")
    check(tmp_path / "demo", output)
    assert "worker-3 is killed after step 20" in output
    assert {row["sampling/policy_lag"] for row in lines(tmp_path / "demo")[2:]} == {1}


@pytest.mark.rare
def test_a_second_run_uses_what_was_built_and_is_right_again(built):
    folder, _ = built
    weights = folder / "model/model.safetensors"
    before = weights.stat().st_mtime_ns
    output = run(folder, "--seed", "0")
    check(folder, output)
    assert "using the model that is in" in output and weights.stat().st_mtime_ns == before


@pytest.mark.rare
def test_a_demo_that_does_not_learn_fails(built):
    """The trained model as the one to start from: it is right too often to show any learning."""
    folder, _ = built
    shutil.copytree(folder / "run/model", folder.with_name("clever") / "model")
    process = start(folder.with_name("clever"))
    _, errors = process.communicate(timeout=550)
    assert process.returncode == 1
    assert "it should begin between 0.1 and 0.4 and reach 0.9" in errors.splitlines()[-1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_no_process_behind(built, number, code):
    folder, _ = built
    shutil.rmtree(folder / "run")
    process = start(folder)
    deadline = time.monotonic() + 120
    while not (folder / "run/metrics.jsonl").exists() or not lines(folder):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    below = processes_below(process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert below and not left_of(below)

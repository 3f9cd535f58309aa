"""Training continues, bit for bit, whatever happens to its reference servers. Real processes, on the demo's settings
and a model of random weights.

Every run is compared with one that nothing disturbed: each step once, and the same numbers except times. It needs a
deterministic server, whose answers do not depend on what else waits in its queue.
"""

import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from conftest import running_server
from proxy import accidents, proxy
from trainer_runs import lines, reach, timeless, training

pytestmark = pytest.mark.slow

FEWER = 16  # the learning rate does not depend on max_steps: these are the first steps of the undisturbed run


def deterministic(folder: Path, tmp_path: Path, port: int | None = None):
    """A ready server whose answers do not depend on what else waits."""
    return running_server(folder, tmp_path, "--deterministic", "true", port=port)


@pytest.fixture(scope="module")
def words(model_folder, data_folder, letters):
    """`words(run, *urls, max_steps, **changes)`: the trainer's options, with the demo's settings."""

    def make(run: Path, *urls: str, max_steps: int = FEWER, **changes) -> list[str]:
        settings = {"config": "configs/demo_cpu.yaml", "model_name_or_path": model_folder, "dataset_name": data_folder}
        settings |= {"output_dir": run, "report_to": "none", "eval_steps": 0, "max_completion_length": 24}
        settings |= {"max_steps": max_steps, "ref_deadline": 200} | changes
        return [*(f"--{name}={value}" for name, value in settings.items()), *letters, "--ref_servers", *urls]

    return make


@pytest.fixture(scope="module")
def steady(model_folder, tmp_path_factory):
    """A server that nobody ends."""
    with deterministic(model_folder, tmp_path_factory.mktemp("steady")) as server:
        yield server


@pytest.fixture(scope="module")
def steps(request) -> int:
    """Steps of the run that nothing disturbs."""
    return FEWER if request.config.option.thin else 60


def end_well(process, run: Path, steps: int) -> str:
    """Wait for a good end with so many steps; return the output."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert [row["step"] for row in timeless(run)] == list(range(1, steps + 1))
    return output


@pytest.fixture(scope="module")
def undisturbed(words, steady, steps, tmp_path_factory) -> Path:
    """The folder of a run."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    with training(2, words(run, steady.url, max_steps=steps)) as process:
        assert "out of rotation" not in end_well(process, run, steps)
    rows = timeless(run)
    assert all(row["kl"] > 0 for row in rows[12:]) and len({row["grad_norm"] for row in rows}) == steps
    return run


def check(process, run: Path, undisturbed: Path, steps: int = FEWER) -> str:
    """Hold a run to the undisturbed one's first steps, their numbers and completions; return the output."""
    output = end_well(process, run, steps)
    assert timeless(run) == timeless(undisturbed)[:steps]
    completions = lines(run / "completions.jsonl")
    assert len(completions) == steps * 8 and completions == lines(undisturbed / "completions.jsonl")[: steps * 8]
    return output


@pytest.mark.timeout(1200)
def test_a_server_killed_every_third_step_changes_nothing(model_folder, words, undisturbed, steps, tmp_path):
    chance, kills = random.Random(os.environ["TEST_SEED"]), steps // 3
    moments = sorted(chance.sample(range(1, steps - 4), kills))
    run = tmp_path / "run"
    with ExitStack() as servers:
        server = servers.enter_context(deterministic(model_folder, tmp_path))
        process = servers.enter_context(training(2, words(run, server.url, max_steps=steps)))
        for step in moments:
            reach(process, run, step)
            time.sleep(chance.uniform(0, 0.5))
            assert server.process.poll() is None and process.poll() is None
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
            server = servers.enter_context(deterministic(model_folder, tmp_path, server.port))
        assert check(process, run, undisturbed, steps).count("out of rotation") >= kills // 2


def test_one_of_two_servers_killed_for_good_changes_nothing(model_folder, words, steady, undisturbed, tmp_path):
    run = tmp_path / "run"
    with deterministic(model_folder, tmp_path) as killed, training(2, words(run, killed.url, steady.url)) as process:
        reach(process, run, 7)
        metrics = requests.get(killed.url + "/metrics", timeout=5).text
        assert 'grpo_ref_requests_total{path="/v1/logprobs",status="200"}' in metrics  # it is in use
        killed.end(signal.SIGKILL)
        output = check(process, run, undisturbed)
        # Rank 0 alone says it, if it asks that server once more: it asks the faster of the two.
        assert output.count(f"{killed.url} cannot be reached") <= 1 and "answers again" not in output


@pytest.mark.rare
def test_a_network_that_delays_cuts_and_swallows_changes_nothing(words, steady, undisturbed, tmp_path):
    run = tmp_path / "run"
    with (
        proxy(steady.port, accidents(seed=0, longest=4000)) as network,
        training(2, words(run, network.url, ref_request_timeout=2)) as process,
    ):
        output = check(process, run, undisturbed)
    for kind in ("answer cut", "answer reset", "request cut", "request reset", "delay"):
        assert network.happened[kind] >= 5, network.happened
    assert network.happened["black hole"] >= 1 and output.count("out of rotation") >= 10

"""Training continues, bit for bit, whatever happens to its reference servers. Real processes, on the demo's settings
and a model of random weights.

Every run is compared with one that nothing disturbed: each step once, and the same numbers except times. It needs a
deterministic server, whose answers do not depend on what else waits in its queue.
"""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import requests
from conftest import ENVIRONMENT, REPOSITORY, launcher, running_server
from proxy import accidents, proxy
from trainer_runs import timeless

from grpo.client.reference import ReferenceClient
from grpo.config.trainer import TrainerConfig

pytestmark = pytest.mark.slow

FEWER = 16  # the learning rate does not depend on max_steps: these are the first steps of the undisturbed run


class Training:
    """A running trainer with two ranks."""

    def __init__(self, process: subprocess.Popen, run: Path, log: Path):
        self.process, self.run, self.log = process, run, log

    def steps(self) -> list[dict]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written

    def reach(self, step: int) -> None:
        deadline = time.monotonic() + 200
        while len(self.steps()) < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def finish(self) -> tuple[list[dict], list[str]]:
        """Wait for exit code 0. Returns the numbers of each step without times, and the samples with their rewards."""
        assert self.process.wait(timeout=300) == 0, self.log.read_text()
        return timeless(self.run), (self.run / "completions.jsonl").read_text().splitlines()

    def count_logged(self, words: str) -> int:
        """Return how often the words are in the log."""
        return self.log.read_text().count(words)


@contextmanager
def training(words: list[str], run: Path, *urls: str, max_steps: int, **changes):
    settings = {
        "config": "configs/demo_cpu.yaml",
        "output_dir": run,
        "report_to": "none",
        "eval_steps": 0,
        "max_completion_length": 24,
        "max_steps": max_steps,
        "ref_deadline": 200,
    } | changes
    command = [
        *launcher(2),
        "grpo_ref_split.py",
        *(word for name, value in settings.items() for word in (f"--{name}", value)),
    ]
    log = run.with_suffix(".log")
    with open(log, "w") as output:
        process = subprocess.Popen(
            list(map(str, [*command, *words, "--ref_servers", *urls])),
            cwd=REPOSITORY,
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Training(process, run, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def deterministic(folder: Path, tmp_path: Path, port: int | None = None):
    return running_server(folder, tmp_path, "--deterministic", "true", port=port)


@pytest.fixture(scope="module")
def words(model_folder, data_folder, letters) -> list[str]:
    """Model, data and rewards, as the trainer's options."""
    return ["--model_name_or_path", str(model_folder), "--dataset_name", str(data_folder), *letters]


@pytest.fixture(scope="module")
def steady(model_folder, tmp_path_factory):
    """A server that nobody ends."""
    with deterministic(model_folder, tmp_path_factory.mktemp("steady")) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def steps(request) -> int:
    """Steps of the run that nothing disturbs."""
    return FEWER if request.config.option.thin else 60


@pytest.fixture(scope="module")
def undisturbed(words, steady, steps, tmp_path_factory):
    with training(words, tmp_path_factory.mktemp("undisturbed") / "run", steady.url, max_steps=steps) as run:
        rows, samples = run.finish()
        assert run.count_logged("out of rotation") == 0
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["kl"] > 0 for row in rows[12:]) and len({row["grad_norm"] for row in rows}) == steps
    return rows, samples


def check(run: Training, undisturbed, steps: int) -> None:
    rows, samples = run.finish()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row, same in zip(rows, undisturbed[0], strict=False):
        assert row == same
    assert len(samples) == steps * 8 and samples == undisturbed[1][: len(samples)]


@pytest.mark.timeout(1200)
def test_a_server_killed_every_third_step_changes_nothing(model_folder, words, undisturbed, steps, tmp_path):
    chance, kills = random.Random(os.environ["TEST_SEED"]), steps // 3
    moments = sorted(chance.sample(range(1, steps - 4), kills))
    with ExitStack() as servers:
        server = servers.enter_context(deterministic(model_folder, tmp_path))
        server.wait_ready()
        run = servers.enter_context(training(words, tmp_path / "run", server.url, max_steps=steps))
        for step in moments:
            run.reach(step)
            time.sleep(chance.uniform(0, 0.5))
            assert server.process.poll() is None and run.process.poll() is None
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
            server = servers.enter_context(deterministic(model_folder, tmp_path, server.port))
            server.wait_ready()
        check(run, undisturbed, steps)
        assert run.count_logged("out of rotation") >= kills // 2


def test_one_of_two_servers_killed_for_good_changes_nothing(model_folder, words, steady, undisturbed, tmp_path):
    with deterministic(model_folder, tmp_path) as killed:
        killed.wait_ready()
        with training(words, tmp_path / "run", killed.url, steady.url, max_steps=FEWER) as run:
            run.reach(7)
            metrics = requests.get(killed.url + "/metrics", timeout=5).text
            assert 'grpo_ref_requests_total{path="/v1/logprobs",status="200"}' in metrics  # it is in use
            killed.end(signal.SIGKILL)
            check(run, undisturbed, FEWER)
            # Rank 0 alone says it, if it asks that server once more: it asks the faster of the two.
            assert run.count_logged(f"{killed.url} cannot be reached") <= 1 and run.count_logged("answers again") == 0


@pytest.mark.rare
def test_a_network_that_delays_cuts_and_swallows_changes_nothing(words, steady, undisturbed, tmp_path):
    with (
        proxy(steady.port, accidents(seed=0, longest=4000)) as network,
        training(words, tmp_path / "run", network.url, max_steps=FEWER, ref_request_timeout=2) as run,
    ):
        check(run, undisturbed, FEWER)
        for kind in ("answer cut", "answer reset", "request cut", "request reset", "delay"):
            assert network.happened[kind] >= 5, network.happened
        assert network.happened["black hole"] >= 1
        assert run.count_logged("out of rotation") >= 10


@pytest.mark.rare  # 20 s of waiting; the other tests here stop and kill servers too
def test_a_server_stopped_for_longer_than_the_timeout_changes_nothing(words, steady, undisturbed, tmp_path):
    with training(words, tmp_path / "run", steady.url, max_steps=FEWER, ref_request_timeout=2) as run:
        for step in (4, 9):
            run.reach(step)
            steady.process.send_signal(signal.SIGSTOP)
            try:
                time.sleep(5)
                assert len(run.steps()) <= step + 2  # it did wait
            finally:
                steady.process.send_signal(signal.SIGCONT)
        check(run, undisturbed, FEWER)
        assert run.count_logged("did not answer in time; out of rotation") == 2 == run.count_logged("answers again")


def test_a_request_sent_again_to_a_restarted_server_has_the_very_same_answer(model_folder, tmp_path):
    chance = np.random.default_rng(0)
    prompts = [chance.integers(5, 60, chance.integers(2, 40)).tolist() for _ in range(24)]
    completions = [[chance.integers(5, 60, chance.integers(1, 60)).tolist() for _ in range(4)] for _ in prompts]
    with ExitStack() as servers:
        server = servers.enter_context(deterministic(model_folder, tmp_path))
        server.wait_ready()
        client = ReferenceClient(TrainerConfig(ref_servers=[server.url]))
        servers.callback(client.close)
        groups = [("g", *group) for group in zip(prompts, completions, strict=True)]
        separately = [client.request_groups([group])[0].result() for group in groups]
        server.process.send_signal(signal.SIGSTOP)  # so that none is answered before the end
        together = [client.request_groups([group])[0] for group in groups]
        time.sleep(0.5)
        server.end(signal.SIGKILL)
        assert not any(future.done() for future in together)
        servers.enter_context(deterministic(model_folder, tmp_path, server.port))
        for rows, future in zip(separately, together, strict=True):
            for row, again in zip(rows, future.result(timeout=60), strict=True):
                np.testing.assert_array_equal(row, again)

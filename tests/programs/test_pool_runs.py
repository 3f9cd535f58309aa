"""A run whose completions workers draw, behind a pool. Real processes: two ranks, a pool, workers with transformers."""

import os
import random
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from pool_runs import Worker, drawn, pool, workers
from processes import ranks_of
from trainer_runs import finish, options, timeless, training, weights

pytestmark = pytest.mark.slow

STEPS = 6
LAG = {"sampler": "pool", "max_policy_lag": 1}


@pytest.fixture(scope="module")
def words(model_folder, data_folder, letters):
    """`words(run, **changes)`: the trainer's options."""

    def make(run: Path, **changes) -> list[str]:
        settings = {"max_steps": STEPS, "save_steps": 2, "eval_steps": 0, "beta": 0, "report_to": "none"}
        return [*options(model_folder, data_folder, run, **(settings | changes)), *letters]

    return make


def numbers(run: Path) -> list[dict]:
    """What a run recorded of each step, but for the distance of sampler and trainer, which rounding changes."""
    return [{name: row[name] for name in row if "logp_difference" not in name} for row in timeless(run)]


def check_same(run: Path, expected: Path) -> None:
    ours, theirs = weights(run / "model"), weights(expected / "model")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert numbers(run) == numbers(expected)
    assert (run / "completions.jsonl").read_text() == (expected / "completions.jsonl").read_text()


def test_what_workers_draw_for_the_newest_policy_is_what_the_trainer_draws_itself(words, tmp_path):
    """With replaced groups, rounds of two steps and several updates from each."""
    changes = {
        "max_resample": 1,
        "reward_tolerance": 0.15,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "importance_sampling_mode": "none",
    }
    finish(2, words(tmp_path / "own", **changes))
    with pool(tmp_path) as served, workers(served.url, tmp_path, "a", "b"):
        served.wait_ready()
        finish(2, words(tmp_path / "run", sampler="pool", pool=served.url, **changes))
    check_same(tmp_path / "run", tmp_path / "own")
    assert sum(row["resampled_groups"] for row in timeless(tmp_path / "run")) > 0
    distances = [row["sampling/sampling_logp_difference/max"] for row in timeless(tmp_path / "run")[:2]]
    assert max(distances) < 1e-5


@pytest.fixture(scope="module")
def undisturbed(words, tmp_path_factory):
    """A folder with a run of lag 1 whose pool and workers nobody ends, and with its pool's file."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pool(folder) as served, workers(served.url, folder, "a", "b", "c"):
        served.wait_ready()
        finish(2, words(folder / "run", pool=served.url, **LAG))
    return folder


def end_one(kind: str, chance: random.Random, crew: list[Worker], process: subprocess.Popen) -> None:
    """Kill a process of this kind as `kill -9` would; a worker is replaced by another."""
    if kind == "worker":
        old = crew.pop(chance.randrange(len(crew)))
        old.end()
        crew.append(Worker(old.url, old.folder, old.name))
    elif kind == "rank" and (ranks := ranks_of(process)):
        os.kill(chance.choice(ranks), signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGKILL)


def check_survives(kinds: list[str], seed: str, words, undisturbed: Path, folder: Path) -> None:
    """Kill processes of these kinds, each after a while, and compare what the run leaves with the undisturbed run's."""
    chance, killed = random.Random(seed), []
    with ExitStack() as running:
        served = running.enter_context(pool(folder))
        crew = running.enter_context(workers(served.url, folder, "a", "b", "c"))
        settings = words(folder / "run", pool=served.url, resume_from_checkpoint="last", **LAG)
        kinds = [*kinds]
        while kinds:
            with training(2, settings) as process:
                time.sleep(chance.uniform(1, 4))
                while kinds and process.poll() is None:
                    killed.append(kind := kinds.pop())
                    if kind == "pool":
                        served.end()
                        time.sleep(chance.uniform(0, 1))
                        served = running.enter_context(pool(folder, served.port))
                    else:
                        end_one(kind, chance, crew, process)
                    if kind in ("rank", "trainer"):
                        process.communicate(timeout=60)
                        assert process.returncode != 0
                    time.sleep(chance.uniform(0, 1.5))
                if process.returncode == 0:
                    break
        finish(2, settings)
    assert len(killed) >= 2
    check_same(folder / "run", undisturbed / "run")
    assert drawn(folder) == drawn(undisturbed)


def test_whatever_is_killed_the_run_ends_with_the_same_bits(words, undisturbed, tmp_path):
    seed = os.environ["TEST_SEED"]
    kinds = random.Random(seed).sample([random.Random(seed).choice(["rank", "trainer"]), "pool", "worker"], 3)
    check_survives(kinds, seed, words, undisturbed, tmp_path)


@pytest.mark.rare
@pytest.mark.parametrize("number", range(5))
def test_whatever_is_killed_at_many_instants_the_run_ends_with_the_same_bits(number, words, undisturbed, tmp_path):
    kinds = ["rank", "trainer", "pool", "worker"]
    random.Random(number).shuffle(kinds)
    check_survives(kinds, f"many {number}", words, undisturbed, tmp_path)

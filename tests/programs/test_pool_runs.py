"""A run whose completions workers draw, behind a pool. Real processes: two ranks, a pool, workers with transformers."""

from pathlib import Path

import pytest
import torch
from pool_runs import pool, workers
from trainer_runs import finish, options, timeless, weights

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

"""A run whose completions workers draw, behind a pool. Real processes: two ranks, a pool, workers with transformers."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from altered_trainer import killed_at
from conftest import running_server
from pools import Worker, drawn, running_pool, workers
from processes import ranks_of
from rounding import assert_rounded
from servers import exact, status, wait_until
from sharded import ON_CARDS, in_layers
from trainer_runs import (
    KINDS,
    check_drawn_alike,
    finish,
    one_line,
    options,
    plain_python,
    reference,
    run_ranks,
    start,
    timeless,
    training,
    went_on,
)
from transformers import AutoModelForCausalLM

from grpo.pool.store import Recording

pytestmark = pytest.mark.slow

STEPS = 6
LAG = {"sampler": "pool", "max_policy_lag": 1, "max_resample": 1, "reward_tolerance": 0.15}
LAG |= {"dataset_order": "adaptive", "num_draws": 5}
PROMPTS = 8  # two steps: later ones draw by the record of these


@pytest.fixture(scope="module")
def words(model_folder, data_folder, letters, tmp_path_factory):
    """`words(run, **changes)`: the trainer's options."""
    data = tmp_path_factory.mktemp("few") / "train.jsonl"
    data.write_text("".join((data_folder / data.name).read_text().splitlines(keepends=True)[:PROMPTS]))

    def make(run: Path, **changes) -> list[str]:
        settings = {"max_steps": STEPS, "save_steps": 2, "eval_steps": 0, "beta": 0, "report_to": "none"}
        return [*options(model_folder, data.parent, run, **(settings | changes)), *letters]

    return make


def numbers(run: Path) -> list[dict]:
    """What a run recorded of each step, but for the distance of sampler and trainer, which rounding changes."""
    return [{name: row[name] for name in row if "logp_difference" not in name} for row in timeless(run)]


def check_same(run: Path, expected: Path) -> None:
    check_drawn_alike(run, expected)
    assert numbers(run) == numbers(expected)


@contextmanager
def drawing(folder: Path, *names: str):
    """A ready pool with workers."""
    with running_pool(folder) as served, workers(served.url, folder, *names):
        yield served


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["whole", "shared out", "shared out, with an adapter"])
def test_what_workers_draw_for_the_newest_policy_is_what_the_trainer_draws_itself(words, model_folder, tmp_path, kind):
    """With replaced groups, rounds of two steps and two updates from each, and another pool for the second round. Ranks
    that share out the weights have them whole to draw, and never where workers draw. The adapter has a teacher."""
    changes = {"max_resample": 1, "reward_tolerance": 0.15, "steps_per_generation": 2, "num_iterations": 2}
    changes |= {"importance_sampling_mode": "none"}
    if kind != "whole":
        changes |= {"deepspeed": in_layers(ON_CARDS, tmp_path)}
    with ExitStack() as running:
        if "adapter" in kind:
            teacher = running.enter_context(reference(model_folder, tmp_path / "teacher"))
            changes |= KINDS["LoRA, taught"] | {"teacher_servers": teacher.url}
        finish(2, words(tmp_path / "own", **changes))
        for steps, names in ((4, "ab"), (STEPS, "c")):
            folder = tmp_path / f"pool-{steps}"
            folder.mkdir()
            with drawing(folder, *names) as served:
                more = {"sampler": "pool", "pool": served.url, "max_steps": steps, "resume_from_checkpoint": "last"}
                finish(2, words(tmp_path / "run", **changes, **more))
                drifts = [worker["drift"] for worker in status(served)["workers"]]
            assert drifts != [] and max(drift for drift in drifts if drift is not None) < 1e-3
    check_same(tmp_path / "run", tmp_path / "own")
    assert sum(row["resampled_groups"] for row in timeless(tmp_path / "run")) > 0
    distances = [row["sampling/sampling_logp_difference/max"] for row in timeless(tmp_path / "run")[:2]]
    assert_rounded(distances, [0.0, 0.0])


@pytest.fixture(scope="module")
def undisturbed(words, tmp_path_factory):
    """A folder with a run of lag 1 whose pool and workers nobody ends, all its checkpoints, and its pool's file."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with drawing(folder, "a", "b", "c") as served:
        finish(2, words(folder / "run", pool=served.url, save_steps=1, save_total_limit=0, **LAG))
    assert sum(row["resampled_groups"] for row in timeless(folder / "run")) > 0
    first_draws = [prompt for _, attempt, _, prompt, _ in drawn(folder) if attempt == 0]
    counts = Counter(first_draws).values()
    assert len(counts) == PROMPTS and len({*counts}) > 1  # some were left out
    return folder


def test_a_round_is_drawn_by_the_policy_of_the_round_before_and_by_no_other(undisturbed, model_folder):
    """By plain transformers in float64, with the weights of each checkpoint."""
    folders = [model_folder, *(undisturbed / f"run/checkpoint-{step}" for step in range(1, STEPS))]
    policies = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]
    keys = [(group, attempt) for group, attempt, *_ in drawn(undisturbed)]
    with closing(Recording(str(undisturbed / "run.sqlite"))) as recording:
        found = [recording.find(key) for key in keys]
    for task, group in found:
        now = task.group // 4  # a round is a step of four groups
        assert task.version == max(0, now - 1) and group.versions[0][0] == task.version
        for ids, logprobs in zip(group.completions, group.logprobs, strict=True):
            right, newer = (exact(policies[version], task.prompt_ids, [ids]) for version in (task.version, now))
            assert_rounded(logprobs, right)
            assert now == 0 or (newer - torch.tensor(logprobs)).abs().max() > 1e-3
    assert [row["sampling/policy_lag"] for row in timeless(undisturbed / "run")] == [0, *[1] * (STEPS - 1)]


def test_a_replay_needs_no_pool_and_ends_with_the_same_bits(words, undisturbed, tmp_path):
    before = (undisturbed / "run.sqlite").read_bytes()
    finish(2, words(tmp_path / "run", replay=undisturbed / "run.sqlite", **LAG))
    check_same(tmp_path / "run", undisturbed / "run")
    assert (undisturbed / "run.sqlite").read_bytes() == before
    ended = plain_python(*words(tmp_path / "other", replay=undisturbed / "run.sqlite", seed=1, **LAG))
    assert ended.returncode == 2
    refusal = f"replay='{undisturbed / 'run.sqlite'}': it is of run run, which had another model"
    assert refusal in one_line(ended.stdout)


def test_workers_that_always_take_the_newest_policy_draw_rounds_of_several_and_a_replay_has_their_bits(
    words, tmp_path, model_folder
):
    """Killed in the middle it goes on with what the pool has; plain transformers give each token its log-prob."""
    rolling = {**LAG, "max_policy_lag": 2, "in_flight_weight_updates": True, "max_steps": 4, "save_steps": 1}
    rolling["save_total_limit"] = 0
    settings = words(tmp_path / "run", resume_from_checkpoint="last", **rolling)
    with drawing(tmp_path, "a", "b") as served:
        moment = "grpo.trainer.publish_policy:PoolRun.publish:before:3"
        killed = run_ranks(1, *killed_at(moment), *settings, "--pool", served.url)
        assert killed.returncode == -signal.SIGKILL
        before = drawn(tmp_path)
        assert went_on(finish(1, [*settings, "--pool", served.url])) == 2
    rows = {row[:2]: row for row in drawn(tmp_path)}
    assert all(rows[row[:2]] == row for row in before if row[-1])
    folders = [model_folder, *(tmp_path / f"run/checkpoint-{step}" for step in range(1, 4))]
    policies = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]
    with closing(Recording(str(tmp_path / "run.sqlite"))) as recording:
        found = [recording.find(key) for key in rows]
    ages = set()
    for task, group in found:
        now = task.group // 4  # a round is a step of four groups
        for ids, logprobs, versions in zip(group.completions, group.logprobs, group.versions, strict=True):
            (version,) = {*versions}  # this engine changes weights between groups
            assert max(0, now - 2) <= version
            assert_rounded(logprobs, exact(policies[version], task.prompt_ids, [ids]))
            ages.add(now - version)
    assert len(ages) > 1 and max(ages) <= 2
    assert all(0 <= row["sampling/policy_lag"] <= 2 for row in timeless(tmp_path / "run"))
    finish(1, words(tmp_path / "again", replay=tmp_path / "run.sqlite", **rolling))
    check_same(tmp_path / "again", tmp_path / "run")


@pytest.mark.rare
def test_a_run_goes_on_with_another_number_of_ranks_and_what_its_other_bits_do_not_draw_is_drawn_anew(words, tmp_path):
    with drawing(tmp_path, "a", "b") as served:
        changes = {"resume_from_checkpoint": "last", "max_steps": 7, "save_steps": 4}
        settings = words(tmp_path / "run", pool=served.url, **changes, **LAG)
        moment = "grpo.trainer.publish_policy:PoolRun.publish:before:7"
        assert run_ranks(2, *killed_at(moment), *settings).returncode == -signal.SIGKILL
        before = {row[:2]: row for row in drawn(tmp_path)}
        output = finish(1, settings)
    assert went_on(output) == 4
    after = {row[:2]: row for row in drawn(tmp_path)}
    assert {*before} <= {*after} and {group for group, _ in after} == {*range(7 * 4)}
    # Version 5 is drawn with after the checkpoint: one rank rounds it otherwise than two.
    kept = [key for key, (*_, version, _, completions) in before.items() if version <= 4 and completions]
    newer = [key for key, (*_, version, _, completions) in before.items() if version == 5 and completions]
    assert all(after[key] == before[key] for key in kept)
    assert not newer or any(after[key] != before[key] for key in newer)
    assert [row["step"] for row in timeless(tmp_path / "run")] == [*range(1, 8)]


def test_with_a_lag_another_pools_file_is_refused(words, undisturbed, tmp_path):
    ended_run = shutil.ignore_patterns("model", f"checkpoint-{STEPS}")
    shutil.copytree(undisturbed / "run", tmp_path / "run", ignore=ended_run)
    with running_pool(tmp_path) as served:
        settings = words(tmp_path / "run", pool=served.url, resume_from_checkpoint="last", **LAG)
        ended = run_ranks(2, "grpo_ref_split.py", *settings)
    assert ended.returncode == 1
    lacks = f"{served.url} lacks version {STEPS - 2} of the policy, which draws round {STEPS - 1} and which the run has"
    assert lacks in ended.stdout and f"goes on after step {STEPS - 1}" in ended.stdout.splitlines()[-1]


def test_a_signal_ends_a_wait_for_workers_also_where_the_pool_has_gone(words, tmp_path):
    with running_pool(tmp_path) as served:
        process = start(*words(tmp_path / "run", sampler="pool", pool=served.url))
        wait_until(lambda: status(served)["rounds"] or process.poll() is not None, seconds=60)
        served.end()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped while round 0 waited for workers; nothing is lost" in output


@pytest.mark.parametrize("pool_config", ["postgres", pytest.param("bucket", marks=pytest.mark.rare)], indirect=True)
def test_a_run_through_two_pools_on_one_database_is_the_same_when_one_of_them_and_the_database_die(
    words, undisturbed, tmp_path, postgres, pool_config
):
    options = ["--task", "rollouts", "--pool_url", pool_config.pool_url, "--pool_folder", pool_config.pool_folder]
    with ExitStack() as running:
        own = {"environment": {"TMPDIR": str(tmp_path)}}  # where pieces of files wait that go to a bucket
        of_trainer, other = (running.enter_context(running_server(None, tmp_path, *options, **own)) for _ in range(2))
        for served, names in ((of_trainer, "a"), (other, "bc")):
            running.enter_context(workers(served.url, tmp_path, *names))
        settings = words(tmp_path / "run", pool=f"{other.url},{of_trainer.url}", **LAG)
        process = running.enter_context(training(2, settings))
        wait_until(lambda: len(status(other)["versions"]) > 1 or process.poll() is not None, seconds=90)
        other.end()
        time.sleep(1)
        running.enter_context(running_server(None, tmp_path, *options, port=other.port, **own))
        postgres.stop(signal.SIGQUIT)
        time.sleep(1)
        postgres.start()
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    check_same(tmp_path / "run", undisturbed / "run")


def check_survives(kinds: list[str], seed: str, words, undisturbed: Path, folder: Path) -> None:
    """Kill processes of these kinds as `kill -9` would, each after a while; a pool and a worker come back. Compare what
    the run leaves with the undisturbed run's."""
    chance, killed = random.Random(seed), []
    with ExitStack() as running:
        served = running.enter_context(running_pool(folder, awaited=False))
        crew = running.enter_context(workers(served.url, folder, "a", "b", "c"))
        settings = words(folder / "run", pool=served.url, resume_from_checkpoint="last", **LAG)
        kinds = [*kinds]
        while kinds:
            with training(2, settings) as process:
                time.sleep(chance.uniform(0.5, 3))
                while kinds and process.poll() is None:
                    killed.append(kind := kinds.pop())
                    if kind == "pool":
                        served.end()
                        time.sleep(chance.uniform(0, 1))
                        served = running.enter_context(running_pool(folder, port=served.port, awaited=False))
                    elif kind == "worker":
                        worker = crew.pop(chance.randrange(len(crew)))
                        worker.end()
                        crew.append(Worker(worker.url, worker.folder, worker.name))
                    else:
                        with suppress(ProcessLookupError):  # it may have ended
                            if kind == "rank" and (ranks := ranks_of(process)):
                                os.kill(chance.choice(ranks), signal.SIGKILL)
                            else:
                                os.killpg(process.pid, signal.SIGKILL)
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

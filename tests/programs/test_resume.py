"""A run that was killed goes on as if nothing had happened: the same numbers, the same weights, bit for bit."""

import copy
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import time
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import numpy as np
import PIL.Image
import psutil
import pytest
from altered_trainer import altered, killed_at
from pictured import encoded
from processes import left_of, processes_below, ranks_of
from rounding import NO_KL
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_runs import (
    STEPS,
    begun_again,
    check_alike,
    check_same,
    finish,
    lines,
    reach,
    reference,
    timeless,
    training,
    went_on,
)

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example
from grpo.run.checkpoints import Checkpoints
from grpo.run.folder import remove
from grpo.run.preflight import RunDescription
from grpo.run.recorder import Recorder
from grpo.run.run_folder import (
    checkpoints,
    damage,
    find_checkpoints,
    finished_steps,
    read_progress,
    step_of,
    sum_files,
    write_progress,
)
from grpo.wire.picture_files import EncodedPicture


@pytest.fixture(scope="module")
def undisturbed(setting, model_folder, tmp_path_factory):
    """`undisturbed(ranks, kind)`: the folder of a run from beginning to end."""
    known: dict[tuple[int, str], Path] = {}

    def of(ranks: int, kind: str) -> Path:
        if (ranks, kind) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            with reference(model_folder, folder / "server") as server:
                finish(ranks, setting(folder / "run", kind, ref_servers=server.url))
            rows = timeless(folder / "run")
            assert [row["step"] for row in rows] == list(range(STEPS + 1))
            assert len({row["grad_norm"] for row in rows[1:]}) == STEPS and len({row["beta"] for row in rows[1:]}) > 2
            assert len({row["entropy_coef"] for row in rows[1:]}) > 2
            known[ranks, kind] = folder / "run"
        return known[ranks, kind]

    return of


@pytest.fixture
def resumable(setting, model_folder, tmp_path):
    """`with resumable(kind, **changes) as (words, server)`: the options of tmp_path/run, and a server of its own."""
    folders = (tmp_path / f"server-{number}" for number in itertools.count())

    @contextmanager
    def start(kind: str = "full", **changes):
        with reference(model_folder, next(folders)) as server:
            changes = {"ref_servers": server.url, "resume_from_checkpoint": "last"} | changes
            yield setting(tmp_path / "run", kind, **changes), server

    return start


@pytest.mark.rare
def test_a_copy_of_the_first_weights_is_the_servers_reference_also_after_a_kill(setting, undisturbed, tmp_path):
    run = tmp_path / "run"
    words = setting(run, "full", ref="local", resume_from_checkpoint="last")
    with training(2, words, *killed_at("grpo.run.checkpoints:Checkpoints.save:after:3")) as process:
        process.communicate(timeout=120)
    assert "ref is local: no reference server" in finish(2, words)
    for row, expected in zip(timeless(run), timeless(undisturbed(2, "full")), strict=True):
        for name in ("reward", "loss", "kl", "grad_norm") if row["step"] else ():
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), (row["step"], name)


@pytest.mark.rare
def test_ranks_that_share_rows_from_a_checkpoint_on_train_as_those_that_do_not(resumable, undisturbed, tmp_path):
    with resumable() as (words, _):
        with training(2, words, *killed_at("grpo.run.checkpoints:Checkpoints.save:after:2")) as process:
            process.communicate(timeout=120)
        finish(2, [*words, "--sequence_parallel_size=2"])
    rows = zip(timeless(tmp_path / "run"), timeless(undisturbed(2, "full")), strict=True)
    for row, expected in itertools.islice(rows, 1, None):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert row[name] == (value if value is None else pytest.approx(value, rel=1e-3, abs=1e-6)), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "ranks, kind, kills",
    [(1, "reference updates", 10), (2, "full", 5), (2, "LoRA, taught", 5), (2, "sharded", 5), (2, "shared rows", 5)],
)
def test_killed_at_any_moment_it_ends_with_the_same_weights(ranks, kind, kills, resumable, undisturbed, tmp_path, few):
    expected, run, killed = undisturbed(ranks, kind), tmp_path / "run", 0
    with resumable(kind) as (words, _):
        for kill in few(range(kills), (kills + 2) // 3):
            chance = random.Random(f"{ranks} {kind} {kill}")
            with training(ranks, words) as process:
                if not begun_again(process, run):
                    break
                time.sleep(chance.uniform(0, 0.3))  # it has a second or two to its end
                killed += process.poll() is None
                with suppress(ProcessLookupError):  # it may have ended
                    if ranks == 2 and chance.random() < 0.5 and (alive := ranks_of(process)):
                        os.kill(chance.choice(alive), signal.SIGKILL)
                        process.communicate(timeout=60)
                        assert process.returncode != 0
                    else:
                        os.killpg(process.pid, signal.SIGKILL)
        finish(ranks, words)
    assert killed
    check_same(run, expected)


@pytest.mark.slow
def test_after_a_full_disk_or_damage_the_run_goes_on_from_the_checkpoint_before(resumable, undisturbed, tmp_path):
    """A limit to what one file may have stands in for the full disk. The damage is one bit of the optimizer's moments:
    DeepSpeed would load it without a word."""
    run = tmp_path / "run"
    with resumable() as (words, _):
        with training(2, words, *killed_at("grpo.run.checkpoints:Checkpoints.save:after:1")) as process:
            process.communicate(timeout=120)
        with training(2, words, *altered("limit_files", "400")) as process:
            output, _ = process.communicate(timeout=120)
        assert process.returncode != 0
        errors = [line for line in output.splitlines() if "could not be saved" in line]
        assert len(errors) == 1 and errors[0].startswith("grpo_ref_split.py: error: ")
        assert "checkpoint-4 could not be saved: " in errors[0] and ": make room; " in errors[0]
        assert "MiB of its disk are free) (rank " in errors[0] and "--resume_from_checkpoint last" in errors[0]
        assert [path.name for path in run.iterdir() if path.is_dir()] == ["checkpoint-2"]

        with training(2, words, *killed_at("grpo.run.checkpoints:Checkpoints.save:after:2")) as process:
            process.communicate(timeout=120)
        newest = run / "checkpoint-6"
        named = json.loads((newest / "progress.json").read_text())["files"]
        files = {str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()}
        assert named.keys() == files - {"progress.json"}
        (moments,) = newest.glob("engine/*_rank_1_*optim_states.pt")
        content = bytearray(moments.read_bytes())
        content[len(content) // 2] ^= 4
        moments.write_bytes(content)
        output = finish(2, words)
    warning = f"{newest} is damaged: engine/{moments.name} is not as it was written. It is called "
    assert output.count(warning + "checkpoint-6.damaged now, and the run goes on from checkpoint-4") == 1
    assert went_on(output) == 4
    assert [start["step"] for start in lines(run / "starts.jsonl")] == [0, 2, 2, 4]
    assert (run / "checkpoint-6.damaged" / moments.relative_to(newest)).read_bytes() == content
    shutil.rmtree(run / "checkpoint-6.damaged")
    check_same(run, undisturbed(2, "full"))


SIGNALS = [("all", signal.SIGINT), ("the launcher", signal.SIGTERM), ("all", signal.SIGTERM)]
SIGNALS += [("one rank", signal.SIGTERM), ("the launcher", signal.SIGINT), ("all", signal.SIGHUP)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stopped_by_any_signal_it_saves_and_goes_on(resumable, undisturbed, tmp_path, few):
    """To all, to the launcher alone, to one rank: each ends all, and nothing is lost."""
    run, kept = tmp_path / "run", 0
    with resumable(max_steps=3 * STEPS) as (words, _):
        for receiver, number in few(SIGNALS, 3):
            with training(2, words) as process:
                reach(process, run, kept + 1)
                alive = ranks_of(process)
                below = processes_below(process)
                if receiver == "all":
                    os.killpg(process.pid, number)
                else:
                    os.kill(process.pid if receiver == "the launcher" else alive[1], number)
                output, _ = process.communicate(timeout=60)  # until nobody has it open any more
            assert process.returncode != 0 and len(alive) == 2, (receiver, output)
            assert not left_of(below), receiver
            steps = re.findall(r": stopped by signal \d+; .*last --output_dir .* goes on after step (\d+)", output)
            assert len(steps) == 1 and int(steps[0]) > kept, (receiver, output)
            kept = int(steps[0])
            assert (run / f"checkpoint-{kept}").is_dir()
        assert went_on(finish(2, words)) == kept
    rows = timeless(run)
    assert [row["step"] for row in rows] == list(range(3 * STEPS + 1))
    assert rows[: STEPS + 1] == timeless(undisturbed(2, "full"))


def has_unread(port: int) -> bool:
    """Tell whether a server has not read all that came for it."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and not row[4].endswith(":00000000") for row in rows)


def hold_with_a_request(server, process) -> None:
    """Stop a server so that a request lies before it unread: a step now takes for ever."""
    for _ in range(20):
        server.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            if has_unread(server.port):
                return
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        server.process.send_signal(signal.SIGCONT)  # it had the request already
    pytest.fail("no request came")


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_a_dead_rank_ends_the_others(resumable, tmp_path):
    with resumable(max_steps=10**6, save_steps=0, eval_steps=0) as (words, server):
        for name in ("twice", "dead"):
            words[2] = f"--output_dir={tmp_path / name}"
            with training(2, words) as process:
                reach(process, tmp_path / name, 1)
                alive = ranks_of(process)
                below = processes_below(process)
                hold_with_a_request(server, process)
                if name == "twice":
                    os.killpg(process.pid, signal.SIGINT)
                    time.sleep(1)
                    assert all(psutil.pid_exists(pid) for pid in alive)
                    os.killpg(process.pid, signal.SIGINT)
                else:
                    os.kill(alive[1], signal.SIGKILL)
                process.communicate(timeout=40)  # 5 on a machine that has nothing else to do; ref_deadline is 120
            assert not left_of(below)
            server.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_mistake_on_one_rank_ends_all_and_is_the_last_to_be_seen(setting, tmp_path):
    words = setting(tmp_path / "run", "full", beta=0.0, eval_steps=0, save_steps=0, max_steps=10**6)
    words = [word for word in words if not word.startswith("--kl_")]
    with training(2, words, *killed_at("grpo.trainer.round:Rounds.collect:raises:2", rank=1)) as process:
        reach(process, tmp_path / "run", 4)  # all that the first round feeds
        below = processes_below(process)
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and not left_of(below)
    others = ("grpo.trainer.record: step", "grpo_ref_split.py: another rank has ended")  # rank 0 may be a step behind
    printed = [line for line in output.splitlines() if line.strip() and not any(words in line for words in others)]
    assert "launch.py" in printed[-1] and printed[-2] == "[rank1]: LookupError: a mistake of ours", output


@pytest.mark.slow
@pytest.mark.parametrize("machine_shuts_down", [False, True])
def test_a_reference_that_is_lost_costs_no_step(machine_shuts_down, resumable, undisturbed, tmp_path):
    """The machine ends the server as well as the trainer, which does not wait for it until it is killed."""
    run, hasty = tmp_path / "run", altered("set_values", "grpo.client.balancer:AFTER_STOP=1")
    with resumable(ref_deadline=300 if machine_shuts_down else 3) as (words, server):
        with training(2, words, *hasty) as process:
            reach(process, run, 3)
            server.end(signal.SIGKILL)
            if machine_shuts_down:
                time.sleep(1)
                os.killpg(process.pid, signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        steps = re.findall(r": no log-probs for .*ref_deadline .*; .* goes on after step (\d+)", output)
        assert len(steps) == 1 and server.url in output, output
        assert machine_shuts_down or "after 3 s" in output, output
    with resumable() as (words, _):
        assert went_on(finish(2, words)) == int(steps[0])
    check_alike(run, undisturbed(2, "full"))


# When it is killed (altered_trainer.py; calls counted from each start), and the last step that was not lost then.
MOMENTS = {
    "deepspeed:DeepSpeedEngine.save_checkpoint:after:1": 0,
    "grpo.run.checkpoints:put_in_place:after:1": 2,
    "grpo.client.connection:Commit:before:1": 2,
    "grpo.client.balancer:Balancer.send_weights:before:2": 2,
    "grpo.client.balancer:Balancer.send_weights:after:2": 2,
    "grpo.run.checkpoints:write_model:before:2": 4,
    "grpo.run.recorder:Recorder.metrics:after:2": 4,
    "grpo.run.checkpoints:write_model:after:2": 6,
    "grpo.trainer.publish_reference:write_weights:before:1": 6,
    "grpo.run.checkpoints:put_in_place:before:1": 6,
    "grpo.run.checkpoints:Checkpoints.delete_old:before:1": 8,
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_in_the_middle_of_all_that_is_written(resumable, undisturbed, tmp_path):
    kind, run, kept = "reference updates", tmp_path / "run", 0
    expected = undisturbed(1, kind)
    with resumable(kind, report_to="tensorboard") as (words, _):
        for moment, step in MOMENTS.items():
            with training(1, words, *killed_at(moment)) as process:
                output, _ = process.communicate(timeout=120)
            assert process.returncode == -signal.SIGKILL, (moment, output)
            assert went_on(output) in (0, kept), moment  # 0: killed before it said so
            kept = step
        assert went_on(finish(1, words)) == kept
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward")] == list(range(1, STEPS + 1))
    check_same(run, expected)


@pytest.mark.rare
def test_what_was_the_last_step_makes_its_reference_once_there_are_more(setting, resumable, undisturbed, tmp_path):
    kind, run = "reference updates", tmp_path / "run"
    with resumable(kind, max_steps=8) as (words, _):
        finish(1, words)
        finish(1, [*words, f"--max_steps={STEPS}"])
    expected = timeless(undisturbed(1, kind))
    for row, other in zip(timeless(run)[9:], expected[9:], strict=True):
        assert row["ref_step"] == 8 and row == other


@pytest.mark.slow
def test_without_a_checkpoint_it_begins_again_with_the_first_reference_until_done(setting, resumable, tmp_path):
    changes = {"ref_update_steps": 2, "max_steps": 4, "save_steps": 0, "eval_steps": 0}
    changes |= {"steps_per_generation": 1, "num_iterations": 1}
    run, straight = tmp_path / "run", tmp_path / "straight"
    with resumable() as (_, server):
        finish(1, setting(straight, "full", ref_servers=server.url, **changes))
    with resumable(**changes) as (words, _):
        with training(1, words, *killed_at("grpo.run.recorder:Recorder.metrics:after:3")) as process:
            process.communicate(timeout=120)
        assert sorted(path.name for path in run.glob("reference-*")) == ["reference-0", "reference-2"]
        finish(1, words)
    rows = timeless(run)
    assert [row["ref_step"] for row in rows] == [0, 0, 2, 2] and abs(rows[0]["kl"]) < NO_KL
    check_alike(run, straight)

    def content() -> dict[str, bytes]:
        files = [path for path in run.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in files if path.name not in ("trainer.lock", "curves.png")}

    before = content()
    (run / "curves.png").unlink()
    (run / "curves.png").mkdir()  # so that they cannot be drawn
    output = finish(1, words)  # no server is there any more
    assert content() == before
    error = f"[Errno 21] Is a directory: '{run}/curves.png'"
    assert f"done: model in {run}/model, but no curves ({error}): 'grpo report" in output.splitlines()[-1]


@pytest.fixture
def whole(tmp_path):
    """`whole(step, accuracy, **changes)`: a folder that is a checkpoint by its name and progress."""

    def make(step: int, accuracy: float | None = None, **changes) -> Path:
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        about = {"model": "m"} | RunDescription(TrainerConfig(), [], ranks=1).fields
        evaluated = {} if accuracy is None else {"eval_accuracy": accuracy, "eval_reward": -accuracy}
        write_progress(folder, about | {"reference": "r", "evaluated": evaluated, "files": {}, **changes})
        return folder

    return make


def checkpoints_of(config: TrainerConfig, folder: Path, best_by: str = "") -> Checkpoints:
    return Checkpoints(
        config=config,
        folder=folder,
        tokenizer=None,
        description=RunDescription(config, [], ranks=1),
        model="m",
        reference="r",
        rank=0,
        best_by=best_by,
    )


def test_the_last_one_is_the_newest_that_is_whole(whole, tmp_path):
    run = tmp_path / "run"

    def found(name: str, output_dir: Path | None = None) -> list[Path]:
        given = None if output_dir is None else str(output_dir)
        return [*find_checkpoints(TrainerConfig(resume_from_checkpoint=name, output_dir=given))]

    assert found("last", run) == []
    whole(9), whole(10)
    for name in ("checkpoint-30", "checkpoint-40.unfinished", "checkpoint-x", "model", "checkpoint-9.damaged"):
        (run / name).mkdir()
    for name in ("checkpoint-40.unfinished", "model", "checkpoint-9.damaged"):
        (run / name / "progress.json").touch()
    assert found("last", run)[0] == found(f"{run}/checkpoint-10")[0] == run / "checkpoint-10"
    for name, output_dir, reason in [
        ("last", None, "of which run"),
        (f"{run}/checkpoint-30", None, "there is no progress.json in it"),
        (f"{run}/model", None, "it is no checkpoint-STEP"),
        (f"{run}/checkpoint-9.damaged", None, "it is no checkpoint-STEP"),
        (f"{run}/checkpoint-10", tmp_path, "leave output_dir out"),
        (f"{run}/checkpoint-9", None, "the run has checkpoint-10 too"),
    ]:
        with pytest.raises(ConfigError, match=f"^resume_from_checkpoint=.*{reason}"):
            found(name, output_dir)


def test_the_newest_and_the_best_are_kept_and_what_cannot_be_read_stops_nothing(whole, tmp_path):
    for step, accuracy in ((2, 0.5), (4, 0.9), (6, 0.9), (8, None), (10, 0.7), (12, None)):
        whole(step, accuracy, ref_step=step)
    run = tmp_path / "run"
    whole(14, math.nan, ref_step=14)
    for limit, best_by, kept in (
        (0, "eval_accuracy", [2, 4, 6, 8, 10, 12, 14]),
        (6, "eval_accuracy", [4, 6, 8, 10, 12, 14]),
        (3, "eval_accuracy", [6, 10, 12, 14]),
        (2, "eval_reward", [10, 12, 14]),
        (1, "eval_reward", [10, 14]),
        (1, "eval_rewards/nothing/mean", [14]),
    ):
        checkpoints_of(TrainerConfig(save_total_limit=limit), run, best_by).delete_old()
        assert [step_of(path) for path in checkpoints(run)] == kept
        assert len([*run.iterdir()]) == len(kept)
    for step, accuracy, content in ((4, 0.9, ""), (6, 0.5, None), (8, None, "{}")):
        folder = whole(step, accuracy, ref_step=step)
        if content is not None:
            (folder / "progress.json").write_text(content)
    left = checkpoints_of(TrainerConfig(save_total_limit=2), run, "eval_accuracy")
    left.delete_old()
    assert left.references() == {6, 14}
    assert [step_of(path) for path in checkpoints(run)] == [6, 14]


def test_a_checkpoint_that_was_moved_and_linked_is_one_and_only_its_link_is_deleted(whole, tmp_path, caplog):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for step in (2, 4, 6):
        whole(step)
    (run / "checkpoint-2").rename(elsewhere)
    (run / "checkpoint-2").symlink_to(elsewhere)
    (run / "checkpoint-9.unfinished").symlink_to(elsewhere)
    checkpoints_of(TrainerConfig(save_total_limit=2), run).delete_old()
    assert {path.name for path in run.iterdir()} == {"checkpoint-4", "checkpoint-6"}
    assert (elsewhere / "progress.json").exists()
    for step in (4, 6):
        (run / f"checkpoint-{step}").rename(tmp_path / f"{step}")
        (run / f"checkpoint-{step}").symlink_to(tmp_path / f"{step}")
    resumed = TrainerConfig(resume_from_checkpoint=f"{run}/checkpoint-6", output_dir=str(run))
    assert find_checkpoints(resumed) == [run / "checkpoint-6"]
    remove(tmp_path / "nowhere")
    assert "nowhere cannot be deleted: [Errno 2]" in caplog.text


def test_a_start_removes_its_own_leftovers_alone_and_a_run_that_trains_is_not_done(whole, tmp_path):
    run = whole(50).parent
    for name in ("model", "checkpoint-60.unfinished", "reference-4.old", "model.unfinished", "notes.old"):
        (run / name).mkdir()
    (run / "metrics.jsonl.old").touch()
    write_progress(run / "model", {"step": 100})
    assert finished_steps(run) == 100
    checkpoints_of(TrainerConfig(), run)
    assert {path.name for path in run.iterdir()} == {"checkpoint-50", "model", "notes.old", "metrics.jsonl.old"}
    assert finished_steps(run) == 0  # else `last` would find the old model, and nothing to do


def test_no_damage_to_a_checkpoint_is_overlooked(tmp_path):
    folder, chance = tmp_path / "checkpoint-5", random.Random(0)
    (folder / "engine").mkdir(parents=True)
    sizes = {"engine/large": 3_000_000, "model": 70_000, "rank-0.pickle": 5, "empty": 0}
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(range(250)) * (size // 250) + b"x" * (size % 250))
    progress = {"step": 5, "evaluated": {"eval_reward": math.nan}, "beta": 0.1 + 0.2}
    write_progress(folder, progress | {"files": sum_files(folder, sizes)})
    assert damage(folder) is None and [damage(folder, share, 3) for share in range(3)] == [None] * 3

    def check(path: Path, reason: str = "") -> None:
        found = damage(folder)
        assert found.startswith(f"{path.relative_to(folder)} {reason}"), (path, found)
        assert found in [damage(folder, share, 3) for share in range(3)]

    for path, content in {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}.items():
        for damaged in (content[: len(content) // 2], bytes(len(content)), content + b"x"):
            path.write_bytes(damaged)
            if damaged != content:
                check(path)
        for place in chance.sample(range(len(content)), min(len(content), 60 if path.name == "progress.json" else 3)):
            flipped = bytes([content[place] ^ 1 << chance.randrange(8)])
            path.write_bytes(content[:place] + flipped + content[place + 1 :])
            if path.name != "progress.json" or json_of(path) != json_of(content):
                check(path, "is not as it was written")
        path.unlink()
        check(path, "cannot be read (No such file or directory)")
        path.write_bytes(content)
    for text in ("", "[]", "{}", "[" * 10_000, '{"format": 4, "files": {}}'):
        (folder / "progress.json").write_text(text)
        check(folder / "progress.json", "is not as it was written")
    with pytest.raises(ConfigError, match="^resume_from_checkpoint='.*/checkpoint-5': .* is 5 there and 6 here: use"):
        RunDescription(TrainerConfig(), [], ranks=1).check(folder, {"format": 5})


def json_of(content: Path | bytes):
    """None where it is none. Blanks between its words may be others without a harm."""
    try:
        return json.dumps(json.loads(content if isinstance(content, bytes) else content.read_bytes()))
    except ValueError:
        return None


@pytest.mark.parametrize(
    "saved, changes, words",
    [
        ({"model": "x"}, {}, "the model's fingerprint is 'x' there and 'm' here: set model_name_or_path"),
        ({"reference": "x"}, {}, "the reference's fingerprint is 'x' there and 'r' here: start the reference server"),
        ({"prompts": [3, "x"]}, {}, "the prompts' count and sum is .3, 'x'. there and .0"),
        ({"model": "x", "prompts": [3, "x"]}, {"beta": 0}, "beta is 0.04 there and 0 here: leave it as it was"),
        ({}, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs is None there and {'enable_"),
        ({}, {"max_steps": 7, "lr_scheduler_type": "linear"}, "lr_scheduler_type is 'constant_with_warmup' there"),
    ],
)
def test_another_model_data_or_setting_is_refused_with_the_difference(whole, tmp_path, saved, changes, words):
    checkpoint, config = whole(5, **saved), TrainerConfig(**changes)
    with pytest.raises(ConfigError, match=f"^resume_from_checkpoint='.*/checkpoint-5': {words}"):
        RunDescription(config, [], ranks=1).check(checkpoint, read_progress(checkpoint))
        checkpoints_of(config, tmp_path).load(checkpoint, None)


COLUMNS = {
    "answer": ("7", "8"),
    "tests": ([{"input": "1", "output": None}], [{"input": "1", "output": 2}]),
    "picture": ([EncodedPicture(encoded())], [EncodedPicture(b"another")]),
    "inner": ({"image": PIL.Image.new("RGB", (3, 2), "red")}, {"image": PIL.Image.new("RGB", (3, 2), "blue")}),
    "bytes": (b"\x00\xff", b"\x00\xfe"),
    "date": (datetime(2026, 1, 2), datetime(2026, 1, 3)),
    "array": (np.arange(3000), np.arange(3000) + (np.arange(3000) == 1500)),
    "object": (object(), "no object"),
}
"""values of a row that JSON does not know, and others, with other ones"""


@pytest.mark.parametrize("name", [*COLUMNS, "hint"])
def test_other_gold_answers_and_columns_are_refused_by_their_name(tmp_path, name):
    def description(**changes) -> RunDescription:
        values = {column: copy.deepcopy(value) for column, (value, _) in COLUMNS.items()}  # as another start reads them
        return RunDescription(
            TrainerConfig(), [Example(index=0, prompt="3 + 4?", prompt_ids=[1], columns=values | changes)], ranks=1
        )

    saved = description().fields
    description().check(tmp_path, saved)
    changed = description(**{name: COLUMNS[name][1] if name in COLUMNS else "a column that was not there"})
    with pytest.raises(ConfigError, match=f"^resume_from_checkpoint=.*: the sum of the column '{name}' is .* the same"):
        changed.check(tmp_path, saved)


def test_a_run_by_epochs_may_be_made_longer_unless_its_rate_follows_from_them(tmp_path):
    def description(**changes) -> RunDescription:
        config = TrainerConfig(**{"lr_scheduler_type": "constant", "warmup_steps": 0} | changes)
        return RunDescription(config, [], ranks=1)

    saved, identity = description(num_train_epochs=1.0, max_steps=7).fields, description().identity("m")
    for changes in ({"num_train_epochs": 2.0, "max_steps": 14}, {"max_steps": 9}):
        description(**changes).check(tmp_path, saved)
        assert description(**changes).identity("m") == identity
    saved = description(num_train_epochs=1.0, max_steps=7, lr_scheduler_type="linear").fields
    with pytest.raises(ConfigError, match="max_steps is 7 there and 14 here: leave it as it was"):
        description(num_train_epochs=2.0, max_steps=14, lr_scheduler_type="linear").check(tmp_path, saved)


def test_a_file_of_the_users_may_be_given_by_another_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").touch()
    (tmp_path / "below").mkdir()

    def description(folder: Path, path: str, **changes) -> RunDescription:
        monkeypatch.chdir(folder)
        files = {"reward_funcs": ["format_reward", f"{path}:good"], "loss_type": f"{path}:loss"}
        files |= {"tools": [f"{path}:tool"], "environment": f"{path}:Game"}
        return RunDescription(TrainerConfig(**files | changes), [], ranks=1)

    saved = json.loads(json.dumps(description(tmp_path, "mine.py").fields))
    description(tmp_path / "below", "../mine.py").check(tmp_path, saved)
    description(tmp_path / "below", str(tmp_path / "mine.py")).check(tmp_path, saved)
    (tmp_path / "below/mine.py").touch()
    description(tmp_path / "below", "mine.py").check(tmp_path, saved)  # as where a project was moved
    for changes in ({"environment": "../mine.py:Other"}, {"reward_funcs": ["../mine.py:good", "format_reward"]}):
        with pytest.raises(ConfigError, match=f"{next(iter(changes))} is .* leave it as it was"):
            description(tmp_path / "below", "../mine.py", **changes).check(tmp_path, saved)


def test_a_setting_that_a_checkpoint_does_not_know_had_its_default_there(tmp_path):
    plain = RunDescription(TrainerConfig(), [], ranks=1)
    saved = copy.deepcopy(plain.fields)
    identity = plain.identity("m")
    for newer in ("max_policy_lag", "optim", "tools"):
        del saved["settings"][newer]
    plain.check(tmp_path, saved)
    plain.fields = saved
    assert plain.identity("m") == identity
    ahead = TrainerConfig(sampler="pool", pool="http://a:1", max_policy_lag=1, importance_sampling_mode="none")
    with pytest.raises(ConfigError, match="max_policy_lag is 0 there and 1 here: leave it as it was"):
        RunDescription(ahead, [], ranks=1).check(tmp_path, saved)


def test_a_run_is_the_same_for_a_pool_if_what_it_draws_is():
    example = Example(index=0, prompt="1 + 1?", prompt_ids=[1], columns={})

    def identity(model: str = "m", examples: list = (example,), ranks: int = 1, **changes) -> str:
        return RunDescription(TrainerConfig(**changes), [*examples], ranks=ranks).identity(model)

    pool = {"sampler": "pool", "pool": "http://a:1", "importance_sampling_mode": "none"}
    assert identity() == identity(ranks=2) == identity(**pool) == identity(micro_batch_tokens=99, output_dir="x")
    assert identity(max_steps=7) == identity()
    linear = {"lr_scheduler_type": "linear"}
    others = [{"model": "n"}, {"examples": [example, example]}, {"seed": 1}, {"beta": 0}]
    others += [linear, linear | {"max_steps": 7}, pool | {"max_policy_lag": 1}]
    assert len({identity(), *(identity(**other) for other in others)}) == len(others) + 1


def test_a_killed_runs_records_are_cut_where_it_goes_on_and_a_damaged_line_costs_itself_alone(tmp_path):
    rows = [{"step": step, "reward": 0.5} for step in range(6)]
    texts = [json.dumps(row) + "\n" for row in rows]
    for after, end, kept in ((3, "", 4), (9, '{"step": 6, "rew', 6), (9, "\x00\x00\n", 6), (-1, "", 0)):
        (tmp_path / "metrics.jsonl").write_text("".join(texts) + end)
        recorder = Recorder(TrainerConfig(report_to=["none"]), tmp_path, after=after)
        recorder.metrics(7, {"reward": 1.0})
        recorder.close()
        assert lines(tmp_path / "metrics.jsonl") == [*rows[:kept], {"step": 7, "reward": 1.0}]
    texts[2] = "{garbled}\n"
    (tmp_path / "metrics.jsonl").write_text("".join(texts))
    Recorder(TrainerConfig(report_to=["none"]), tmp_path, after=4).close()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(texts[:5])

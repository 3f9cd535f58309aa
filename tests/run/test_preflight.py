"""The checks before a run, between two real processes whose settings, data, files or disks differ."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, REPOSITORY

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.config.user_code import module_name
from grpo.data.records import Example
from grpo.rewards.compute import load_reward_funcs
from grpo.run.collective import own_place
from grpo.run.preflight import check_alike, describe_inputs, find_run
from grpo.run.run_folder import LOCK, is_stop_asked, make_run_folder, sum_files, write_progress

PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment, wrong",
    [
        ({"WORLD_SIZE": "2"}, "RANK=None"),
        ({"RANK": "0"}, "LOCAL_RANK=None"),
        ({name: value for name, value in PLACE.items() if name != "MASTER_PORT"}, "MASTER_PORT=None"),
        (PLACE | {"RANK": "2"}, "RANK='2'"),
        (PLACE | {"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        (PLACE | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        (PLACE | {"MASTER_PORT": "99999"}, "MASTER_PORT='99999'"),
    ],
)
def test_a_place_that_no_launcher_gives_is_refused(environment, wrong, monkeypatch):
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{wrong}: a launcher sets .* or unset RANK, LOCAL_RANK and WORLD_SIZE$"):
        own_place()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOCAL_SIZE": "2"}, 8),
        ({"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}, 4),
        ({"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "3"}, None),
        ({"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}, None),
    ],
)
def test_ranks_with_cards_share_the_cores_for_adamw_on_the_cpu(environment, expected, monkeypatch):
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (PLACE | {"RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0"} | environment).items():
        monkeypatch.setenv(name, value)
    for name, value in {"is_available": True, "device_count": 8, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))  # the first kernel on the card
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))  # what SLURM gives, not the machine's
    assert own_place()[2].type == "cuda"
    assert threads == [expected] * (expected is not None)


def examples(answers: str) -> list[Example]:
    return [
        Example(index=place, prompt="2+2?", prompt_ids=[1], columns={}, gold=answer)
        for place, answer in enumerate(answers)
    ]


def compare(differs: bool, settings: dict | None = None, train="45", held_out="6", engine=None, own="") -> None:
    """Compare this rank's inputs with the other rank's; `differs` is True on the rank whose inputs are changed."""
    settings = {"reward_funcs": ["own.py:own"]} | ((settings or {}) if differs else {})
    Path("own.py").write_text("def own(completions, **_):\n    return [0.0 for _ in completions]\n" + own * differs)
    sys.modules.pop(module_name("own.py"), None)
    config = TrainerConfig(**settings)
    data = [examples(train if differs else "45"), examples(held_out if differs else "6")]
    ds_config = (engine if differs else None) or {"stage": 2}
    check_alike(describe_inputs(config, ds_config, load_reward_funcs(config.reward_funcs), data))


PLACES = {"model_name_or_path": "/a", "dataset_name": "/b", "ref_servers": ["http://c:1"], "deepspeed": "/e.json"}
# What differs on the second rank, and the message on both.
CASES = [
    ({"settings": PLACES}, None),
    ({"settings": {"learning_rate": 2e-6}}, "learning_rate is 1e-06 for rank 0 on .* and 2e-06 for rank 1 on "),
    ({"settings": {"output_dir": "x"}}, "output_dir is None for rank 0 .* and 'x' for rank 1 "),
    ({"train": "46"}, "the fingerprint of the prompts and answers is '"),
    ({"train": "4"}, "the fingerprint of the prompts and answers is '"),
    ({"held_out": "7"}, "the fingerprint of the held-out ones is '"),
    ({"engine": {"stage": 1}}, "deepspeed is {'stage': 2} for rank 0 .* and {'stage': 1} for rank 1 "),
    ({"own": "# another file"}, "the fingerprint of the file of own is '"),
]


def rank_of_two(rank: int, folder: Path) -> None:
    """Run as one of two ranks. Each has its own current directory, so that relative paths are on different disks."""
    os.chdir(folder / str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results = []

    def attempt(action, *arguments, **options) -> None:
        try:
            results.append([str(value) for value in action(*arguments, **options) or ()])
        except ConfigError as error:
            results.append(str(error))

    for changes, _ in CASES:
        attempt(compare, rank == 1, **changes)
    for path in (str(folder / "shared"), "runs", str(folder / "used")):
        attempt(find_run, TrainerConfig(output_dir=path), rank, 2)
    # Only rank 0 looks for the checkpoint: the other one may see an older state of the disk.
    again = {"output_dir": str(folder / "used"), "resume_from_checkpoint": "last"}
    attempt(find_run, TrainerConfig(**again), rank, 2)
    for damage in ("checkpoint-3/large", "checkpoint-2/progress.json"):
        dist.barrier()
        if rank == 0:
            (folder / "used" / damage).write_bytes(b"")
        dist.barrier()
        attempt(find_run, TrainerConfig(**again), rank, 2)
    dist.destroy_process_group()
    (folder / f"results-{rank}").write_text(json.dumps(results))


@pytest.mark.slow
def test_ranks_with_other_settings_data_programs_or_disks_are_refused_together(tmp_path):
    used = tmp_path / "used"
    for name in ("0", "1/runs", "used/checkpoint-2", "used/checkpoint-3"):  # the second one has no disk in common
        (tmp_path / name).mkdir(parents=True)
    for step in (2, 3):
        checkpoint = used / f"checkpoint-{step}"
        (checkpoint / "large").write_bytes(b"12"), (checkpoint / "small").write_bytes(b"1")
        write_progress(checkpoint, {"files": sum_files(checkpoint, ["large", "small"])})
    command = [sys.executable, "tests/run/test_preflight.py"]
    environment = ENVIRONMENT | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    ranks = [subprocess.Popen([*command, rank, tmp_path], cwd=REPOSITORY, env=environment) for rank in "01"]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    results, second_results = (json.loads((tmp_path / f"results-{rank}").read_text()) for rank in range(2))
    assert results == second_results
    alike, (shared, hidden, refused, *resumed) = results[: len(CASES)], results[len(CASES) :]
    assert alike.pop(0) == []
    for (changes, expected), result in zip(CASES[1:], alike, strict=True):
        assert re.match(expected, result) and result.endswith("the same settings, data and programs"), changes
    assert shared == ["None", str(tmp_path / "shared"), "False"]
    assert not (tmp_path / "shared").exists() and not (tmp_path / "0/runs").exists()  # made at the first record
    assert not [*tmp_path.rglob("seen-*")]
    assert hidden.startswith("output_dir='runs': ") and f" does not see in its {tmp_path}/1 what " in hidden
    assert refused.startswith(f"output_dir='{used}': it holds a run")
    assert resumed[:2] == [[str(used / f"checkpoint-{step}"), str(used), "False"] for step in (3, 2)]
    damaged = "damaged: checkpoint-2: progress.json is not as it was written: put back what was there, or delete them"
    assert resumed[2].startswith(f"resume_from_checkpoint='last': every checkpoint of {used} is {damaged}")
    assert (used / "checkpoint-3.damaged/large").exists() and not (used / "checkpoint-3").exists()


def test_a_folder_is_made_when_the_run_is_opened_and_not_when_it_is_found(tmp_path, caplog):
    """A start that fails or is killed in between leaves nothing."""
    settings = TrainerConfig(output_dir=str(tmp_path / "a/run"))
    assert find_run(settings, 0, 1) == (None, tmp_path / "a/run", False)
    assert not [*tmp_path.iterdir()] and not caplog.messages
    make_run_folder(settings, tmp_path / "a/run")
    assert [path.name for path in (tmp_path / "a/run").iterdir()] == ["trainer.lock"]
    # In which a checkpoint is looked for must be locked by then: another start may do the first steps there.
    settings = TrainerConfig(output_dir=str(tmp_path / "b/run"), resume_from_checkpoint="last")
    assert find_run(settings, 0, 1) == (None, tmp_path / "b/run", False)
    assert [path.name for path in (tmp_path / "b/run").iterdir()] == ["trainer.lock"]
    assert caplog.messages == [f"there is nothing to resume in {tmp_path}/b/run: the run begins at step 0"]


def test_the_next_trainer_removes_the_file_of_grpo_stop_and_heeds_one_that_comes_while_it_loads(tmp_path):
    settings = TrainerConfig(output_dir=str(tmp_path))
    (tmp_path / "stop").touch()
    find_run(settings, 0, 1)
    assert not is_stop_asked(tmp_path)
    (tmp_path / "stop").touch()
    make_run_folder(settings, tmp_path)  # the run is opened; the file makes the folder no used one
    assert is_stop_asked(tmp_path)


def test_a_run_that_has_ended_is_done_unless_more_steps_are_asked(tmp_path):
    def last(max_steps: int):
        asked = {"output_dir": str(tmp_path), "resume_from_checkpoint": "last", "max_steps": max_steps}
        return find_run(TrainerConfig(**asked), 0, 1)

    assert last(4) == (None, tmp_path, False)
    (tmp_path / LOCK).touch()
    (tmp_path / "model").mkdir()
    assert last(4) == (None, tmp_path, False)  # a model, but who knows of which step
    write_progress(tmp_path / "model", {"step": 4})
    assert last(4) == last(3) == (None, tmp_path, True)
    with pytest.raises(ConfigError, match="^max_steps=5: the run in .* has ended after 4, and there is no"):
        last(5)
    (tmp_path / "checkpoint-2").mkdir()
    write_progress(tmp_path / "checkpoint-2", {"files": {}})
    assert last(4) == (None, tmp_path, True)
    assert last(5) == (tmp_path / "checkpoint-2", tmp_path, False)
    named = TrainerConfig(resume_from_checkpoint=str(tmp_path / "checkpoint-2"), max_steps=4)
    assert find_run(named, 0, 1) == (tmp_path / "checkpoint-2", tmp_path, False)
    write_progress(tmp_path / "checkpoint-2", {"files": {"weights": [1, ""]}})
    with pytest.raises(
        ConfigError, match="/checkpoint-2': it is damaged: weights cannot be read .*: use 'last', which"
    ):
        find_run(named, 0, 1)


if __name__ == "__main__":
    rank_of_two(int(sys.argv[1]), Path(sys.argv[2]))

"""A run's folder is new, and has one trainer at a time; a model is saved whole or not at all."""

import errno
import fcntl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from conftest import REPOSITORY
from servers import wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.run.folder import SaveError, save_model
from grpo.run.preflight import find_run
from grpo.run.run_folder import LOCK, check_unused, find_run_folder, lock_run, make_run_folder


def test_a_saved_model_loads_and_is_the_same_whatever_an_interrupted_save_left(model, tokenizer, tmp_path):
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished/rubbish").touch()
    save_model(model, tokenizer, tmp_path / "model", TrainerConfig())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tokenizer.get_vocab()
    assert not (tmp_path / "model/rubbish").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_save_says_where_and_leaves_nothing(model, tokenizer, tmp_path):
    (tmp_path / "model").write_text("a file is in the way")
    reason = rf"could not be saved to {tmp_path / 'model'}: .* \(\d+ MiB of its disk are free\): nothing was left"
    with pytest.raises(SaveError, match=reason):
        save_model(model, tokenizer, tmp_path / "model", TrainerConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_that_is_given_no_folder_has_one_below_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_run_folder(TrainerConfig()).parent.name == "runs"


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    settings = TrainerConfig(output_dir=str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')  # a run that failed in its first step
    make_run_folder(settings, find_run_folder(settings))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    for refuse in (lambda: find_run_folder(settings), lambda: make_run_folder(settings, tmp_path)):
        with pytest.raises(ConfigError, match="output_dir=.*holds a run or"):
            refuse()


def test_what_a_user_has_under_a_runs_names_is_not_replaced(tmp_path):
    """As where grpo init or demo.model wrote: the model that is trained, and settings with comments."""
    for name in ("config.yaml", "model"):
        folder = tmp_path / f"of {name}"
        (folder / name).mkdir(parents=True)
        for resumed in (None, "last"):
            with pytest.raises(ConfigError, match=f"output_dir=.*: its {name} would be replaced: name another folder"):
                find_run_folder(TrainerConfig(output_dir=str(folder), resume_from_checkpoint=resumed))
    settings = TrainerConfig(output_dir=str(tmp_path / "run"))
    make_run_folder(settings, find_run_folder(settings))
    (tmp_path / "run/config.yaml").touch()  # of a start that failed
    find_run_folder(settings)
    with pytest.raises(ConfigError, match="output=.*: its config.yaml would be replaced"):
        check_unused("output", tmp_path / "of config.yaml")


@pytest.mark.parametrize(
    "name, reason",
    [
        ("file/run", "Not a directory"),
        ("/proc/self/run", "No such file or directory"),
        (300 * "a", "File name too long"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_made(tmp_path, name, reason):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"output_dir='.*/{name.lstrip('/')}': {reason}: name a folder that can be"):
        find_run_folder(TrainerConfig(output_dir=str(tmp_path / name)))
    find_run_folder(TrainerConfig(output_dir=str(tmp_path / "a/run")))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


HOLD = """
import os, sys, time
from pathlib import Path
from grpo.run.run_folder import lock_run
lock_run(Path(sys.argv[1]))
child = os.fork()  # such as a reward function's, which outlives the trainer
if child:
    print(child, flush=True)
time.sleep(60)
"""


@contextmanager
def holder(folder):
    """Another trainer, which has forked off a process."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            subprocess.run(["kill", "-9", str(process.pid), str(child)], check=False)


def test_a_second_trainer_is_refused_and_one_after_its_death_is_let_in(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.run.run_folder._WAIT", 0.3)
    settings = TrainerConfig(output_dir=str(tmp_path))
    with holder(tmp_path) as trainer:
        message = rf"^output_dir='{tmp_path}': another trainer \(process {trainer.pid} on .+\) writes there: wait for"
        with pytest.raises(ConfigError, match=message):
            find_run(settings, 0, 1)
        assert (tmp_path / LOCK).read_text().startswith(f"process {trainer.pid} on ")
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
        (tmp_path / LOCK).write_text("process 7 on node-9\n")  # NFS keeps the locks of a lost machine for a while
        monkeypatch.setattr("grpo.run.run_folder._WAIT_FOR_MACHINE", 1.4)
        began = time.monotonic()
        with pytest.raises(ConfigError, match="another trainer .process 7 on node-9. writes there"):
            find_run(settings, 0, 1)
        assert time.monotonic() - began > 1.4
        (tmp_path / LOCK).write_text(f"process {trainer.pid} on here\n")
        trainer.kill(), trainer.wait()
        lock_run(tmp_path)  # its fork still lives, and holds nothing
        assert not (tmp_path / LOCK).read_text().startswith(f"process {trainer.pid} on ")


def test_one_that_is_about_to_end_is_waited_for(tmp_path, caplog):
    caplog.set_level("INFO")

    def end_when_waited_for(trainer: subprocess.Popen) -> None:
        wait_until(lambda: "waiting" in caplog.text)
        trainer.kill()

    with holder(tmp_path) as trainer, ThreadPoolExecutor(1) as threads:
        ended = threads.submit(end_when_waited_for, trainer)
        lock_run(tmp_path)
        ended.result()
    assert caplog.text.count("waiting at most 20 s for the end of the trainer (process ") == 1


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def lockf(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock_run(tmp_path)
    assert "cannot be locked (No locks available)" in caplog.text

"""One trainer a run's folder: who comes second is refused, who comes after a death is let in."""

import errno
import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from conftest import REPOSITORY
from servers import wait_until

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.run.preflight import find_run
from grpo.run.run_folder import LOCK, lock_run

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
        trainer.kill(), trainer.wait()
        lock_run(tmp_path)  # what it has forked off still lives, and holds nothing
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

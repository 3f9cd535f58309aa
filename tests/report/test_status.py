"""`grpo status` and `grpo stop`: how runs stand, and how they are stopped, from their folders."""

import errno
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from conftest import ENVIRONMENT, REPOSITORY, free_port, run_python
from processes import end_by_ctrl_c, wait_for_file
from recorded import write_rows

from grpo.config.errors import ConfigError
from grpo.report.status import status, stop, what_is_kept, writer
from grpo.run.run_folder import write_progress

STEPS = [{"step": step, "reward": step / 100, "num_tokens": 600 * step, "step_time": 30.0} for step in range(1, 41)]
TRAINS = """
import sys, time
from pathlib import Path
from grpo.run.run_folder import lock_run
lock_run(Path(sys.argv[1]))
Path(sys.argv[1], "locked").touch()
while not Path(sys.argv[1], "stop").exists():
    time.sleep(0.05)
"""


@contextmanager
def training(folder: Path, at_stop: str):
    """A process that has the lock of a run's folder, and does this once it is asked to stop."""
    with subprocess.Popen([sys.executable, "-c", TRAINS + at_stop, str(folder)], cwd=REPOSITORY) as trainer:
        try:
            wait_for_file(folder / "locked", trainer)
            yield f"process {trainer.pid} on {socket.gethostname()}"
        finally:
            trainer.kill()


def test_a_run_trains_is_killed_and_is_done(tmp_path, server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody: servers of a run are asked without
    nobody = f"http://127.0.0.1:{free_port()}"
    settings = {"max_steps": 100, "ref": "server", "beta": 0.04, "ref_servers": [server.url, nobody], "pool": None}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    write_rows(tmp_path / "metrics.jsonl", [{"step": 0, "eval_n": 8, "eval_accuracy": 0.5}, *STEPS])
    start = {"step": 0, "time": "2026-11-27T08:00:00+00:00", "ranks": 3, "hosts": {socket.gethostname(): 2 * ["cpu"]}}
    write_rows(tmp_path / "starts.jsonl", [start, start | {"step": 20, "hosts": start["hosts"] | {"node-2": ["cpu"]}}])
    (tmp_path / "checkpoint-30").mkdir()
    write_progress(tmp_path / "checkpoint-30", {"step": 30})

    with training(tmp_path, "time.sleep(60)") as process:
        lines = status(tmp_path)
        (tmp_path / "stop").touch()
        stopping = status(tmp_path)
    speed = "step 40 of 100, reward 0.400, 30.0 s a step, 20 tokens a second"
    assert lines[0] == f"{tmp_path}: {speed}, about 30 min left"
    assert lines[1].startswith(f"  {process} trains; start 2, 2026-11-27 ")
    assert " trains, and is asked to stop; start 2, " in stopping[1] and "asked" not in lines[1]
    assert lines[1].endswith(f": 3 ranks on {socket.gethostname()}, node-2")
    assert re.fullmatch(r"  last step \d+ s ago; checkpoint-30", lines[2])
    assert lines[3:] == [f"  {server.url}: ready", f"  {nobody}: no answer"]

    killed = status(tmp_path)
    assert killed[0] == f"{tmp_path}: {speed}" and len(killed) == 3
    assert killed[1].startswith("  no trainer writes there any more; start 2, ")
    (tmp_path / "model").mkdir()
    write_progress(tmp_path / "model", {"step": 40})
    assert status(tmp_path)[1].startswith("  it is done; start 2, ")


def test_a_run_without_a_step_and_a_folder_without_a_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    done = run_python("-m", "grpo", "status", tmp_path, tmp_path / "none")
    assert done.stdout == f"{tmp_path}: no step yet\n" and done.returncode == 2
    assert f"grpo status: error: runs='{tmp_path}/none': there is no metrics.jsonl" in done.stderr


SAVES = """
from grpo.run.run_folder import write_progress
kept = Path(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "checkpoint-7")
kept.mkdir()
write_progress(kept, {"step": 7})
"""


def test_a_stopped_run_is_waited_for_and_its_command_is_said(tmp_path):
    write_rows(tmp_path / "run/metrics.jsonl", [{"step": step} for step in range(1, 8)])
    words = "--config my.yaml --output_dir=runs/old --resume_from_checkpoint last"
    write_rows(tmp_path / "run/starts.jsonl", [{"step": 0, "command": f"python -m grpo.launch {words}"}])
    with training(tmp_path / "run", SAVES) as process:
        done = run_python("-m", "grpo", "stop", "run", folder=tmp_path, environment={"PYTHONPATH": str(REPOSITORY)})
    way_on = f"--resume_from_checkpoint last --output_dir {tmp_path}/run goes on after step 7"
    assert done.stdout.splitlines() == [
        f"run: asked {process} to stop after its step",
        f"run: {process} has ended; its last step was 7, and it left checkpoint-7; "
        f"python -m grpo.launch --config my.yaml {way_on}",
    ]
    assert done.returncode == 0, done.stderr


def test_a_launch_without_options_is_said_and_a_clock_that_is_ahead_is_no_age(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", [{"step": 7}])
    write_rows(tmp_path / "starts.jsonl", [{"step": 0, "time": "2026-11-27T08:00:00+00:00", "command": "grpo launch"}])
    (tmp_path / "checkpoint-7").mkdir()
    write_progress(tmp_path / "checkpoint-7", {"step": 7})
    way_on = f"grpo launch --resume_from_checkpoint last --output_dir {tmp_path} goes on after step 7"
    assert what_is_kept(tmp_path) == f"its last step was 7, and it left checkpoint-7; {way_on}"
    later = time.time() + 30
    os.utime(tmp_path / "metrics.jsonl", (later, later))
    assert status(tmp_path)[2] == "  last step 0 s ago; checkpoint-7"


@pytest.mark.parametrize(
    "at_stop, told",
    [
        ("", "; there is no checkpoint"),
        (SAVES.replace("checkpoint-7", "model"), "; the run is done: its model is in"),
        (SAVES, " left checkpoint-7; --resume_from_checkpoint last --output_dir {} goes on after step 7\n"),
    ],
)
def test_what_another_launcher_started_may_end_anywhere_and_its_command_is_not_said(at_stop, told, tmp_path, capsys):
    write_rows(tmp_path / "starts.jsonl", [{"step": 0, "command": "grpo_ref_split.py --max_steps 9"}])
    with training(tmp_path, at_stop):
        assert stop([tmp_path]) == 0
    assert told.format(tmp_path) in capsys.readouterr().out


def test_where_nobody_trains_nothing_is_written(tmp_path, capsys):
    (tmp_path / "ended").mkdir(), (tmp_path / "run").mkdir()
    with training(tmp_path / "run", SAVES) as process:
        with pytest.raises(ConfigError, match="runs='.*/none': there is no metrics.jsonl of a run"):
            stop([tmp_path / "run", tmp_path / "none"])
        assert not (tmp_path / "run/stop").exists()
        assert stop([tmp_path / "ended", tmp_path / "run"]) == 1
    assert not [*(tmp_path / "ended").iterdir()]
    told = capsys.readouterr()
    assert f"error: runs='{tmp_path}/ended': nobody trains there: " in told.err
    assert f"run: {process} has ended; " in told.out


def test_a_run_that_something_starts_again_is_not_waited_for(tmp_path, capsys):
    """In a container the new trainer may have the old one's number."""
    with training(tmp_path, "Path(sys.argv[1], 'stop').unlink()\ntime.sleep(60)") as process:
        assert stop([tmp_path]) == 1
    assert f"runs='{tmp_path}': {process} has begun there meanwhile: " in capsys.readouterr().err


def test_ctrl_c_ends_the_waiting_alone(tmp_path):
    command, pipes = [sys.executable, "-m", "grpo", "stop", str(tmp_path)], {"stderr": subprocess.PIPE, "text": True}
    with training(tmp_path, "time.sleep(60)"):
        with subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, **pipes) as waits:
            end_by_ctrl_c(waits, tmp_path / "stop")
            assert waits.stderr.read().endswith("no longer waiting: what was asked to stop stops\n")
        assert (tmp_path / "stop").exists() and writer(tmp_path)


def test_a_disk_without_locks_hides_no_run_and_nobody_waits_for_its_end(tmp_path, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "trainer.lock").write_text("process 7 on node-1\n")
    monkeypatch.setattr("fcntl.lockf", fail)
    assert stop([tmp_path]) == 0 and (tmp_path / "stop").exists()
    process = "process 7 on node-1, if it still lives: this disk has no locks,"
    end = f"; grpo status {tmp_path} shows when it is at rest\n"
    assert capsys.readouterr().out == f"{tmp_path}: asked {process} to stop after its step{end}"

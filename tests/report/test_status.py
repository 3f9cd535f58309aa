"""`grpo status`: how runs stand, from their folders."""

import errno
import re
import socket
import subprocess
import sys

import yaml
from conftest import ENVIRONMENT, REPOSITORY, free_port, run_python
from processes import wait_for_file
from recorded import write_rows

from grpo.report.status import status, writer
from grpo.run.run_folder import write_progress

STEPS = [{"step": step, "reward": step / 100, "num_tokens": 600 * step, "step_time": 30.0} for step in range(1, 41)]
TRAINS = """
import sys, time
from pathlib import Path
from grpo.run.run_folder import lock_run
lock_run(Path(sys.argv[1]))
Path(sys.argv[1], "locked").touch()
time.sleep(60)
"""


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

    command = [sys.executable, "-c", TRAINS, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT) as trainer:
        wait_for_file(tmp_path / "locked", trainer)
        lines = status(tmp_path)
        trainer.kill()
    speed = "step 40 of 100, reward 0.400, 30.0 s a step, 20 tokens a second"
    assert lines[0] == f"{tmp_path}: {speed}, about 30 min left"
    assert lines[1].startswith(f"  process {trainer.pid} on {socket.gethostname()} trains; start 2, 2026-11-27 ")
    assert lines[1].endswith(f": 3 ranks on {socket.gethostname()}, node-2")
    assert re.fullmatch(r"  last step \d+ s ago; checkpoint-30", lines[2])
    assert lines[3:] == [f"  {server.url}: ready", f"  {nobody}: no answer"]

    killed = status(tmp_path)
    assert killed[0] == f"{tmp_path}: {speed}" and len(killed) == 3
    assert killed[1].startswith("  no trainer writes there any more; start 2, ")
    (tmp_path / "model").mkdir()
    write_progress(tmp_path / "model", {"step": 40})
    assert status(tmp_path)[1].startswith("  it is done; start 2, ")


def test_a_disk_without_locks_hides_no_run(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "trainer.lock").write_text("process 7 on node-1\n")
    monkeypatch.setattr("fcntl.lockf", fail)
    assert writer(tmp_path) == "process 7 on node-1, if it still lives: this disk has no locks,"


def test_a_run_without_a_step_and_a_folder_without_a_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    done = run_python("-m", "grpo", "status", tmp_path, tmp_path / "none")
    assert done.stdout == f"{tmp_path}: no step yet\n" and done.returncode == 2
    assert f"grpo status: error: runs='{tmp_path}/none': there is no metrics.jsonl" in done.stderr

"""A forked program against the same one started by the interpreter: seen from outside they are alike."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import ENVIRONMENT, REPOSITORY, run_python, running_server
from forkserver import PlainPopen
from trainer_runs import check_alike, lines, one_line, options, run_ranks

# It is taken for a program of ours by its second line; what follows tells of itself.
PROGRAM = """
import grpo.run.exit, os, signal, sys, time
print(os.getcwd(), sys.argv, os.environ["ASKED"], os.getsid(0) == os.getpid(), flush=True)
print(sys.stdin.read(), "to stderr", file=sys.stderr)
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit({"fails": 300, "says": "a sentence"}.get(sys.argv[1]))
"""


def program(popen, tmp_path, what: str, **options):
    variables = ENVIRONMENT | {"ASKED": "yes", "PYTHONPATH": str(REPOSITORY)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", PROGRAM, what, "two words"]
    return popen(command, cwd=tmp_path, env=variables, **pipes, text=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["succeeds", "fails", "says"])
def test_a_fork_has_its_own_words_folder_environment_files_and_exit_code(tmp_path, what):
    seen = []
    for popen in (subprocess.Popen, PlainPopen):
        process = program(popen, tmp_path, what, start_new_session=True)
        seen.append((*process.communicate("typed", timeout=60), process.returncode))
    assert seen[0] == seen[1]
    assert str(tmp_path) in seen[0][0] and "typed to stderr" in seen[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_fork_is_a_child_with_a_name_and_dies_of_signals(tmp_path, number):
    ends = []
    for popen in (subprocess.Popen, PlainPopen):
        with program(popen, tmp_path, "wait") as process:
            process.stdin.close()
            assert "'wait'" in process.stdout.readline()
            there = psutil.Process(process.pid)
            assert there.ppid() == os.getpid() and [word for word in there.cmdline() if word][-1] == "two words"
            assert "to stderr" in process.stderr.readline()
            process.send_signal(number)
            ends.append(process.wait(timeout=60))
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "forked"), [({"ASKED": "no"}, True), ({"HF_HOME": "/nowhere"}, False)])
def test_an_environment_that_libraries_read_when_imported_is_started_plainly(changes, forked):
    script = "import sys; print('torch' in sys.modules)  # grpo.run.exit"
    assert run_python("-c", script, environment=changes).stdout == f"{forked}\n"


@pytest.mark.rare
def test_a_forked_run_has_the_numbers_of_a_plain_one(model_folder, data_folder, tmp_path, launch, monkeypatch):
    """Two ranks under the launcher, all of them forks, and a server; then all of them plain."""
    for kind, popen in (("forked", subprocess.Popen), ("plain", PlainPopen)):
        monkeypatch.setattr(subprocess, "Popen", popen)
        with running_server(model_folder, tmp_path, "--deterministic", "true") as server:
            words = options(model_folder, data_folder, tmp_path / kind, ref_servers=server.url, num_generations_eval=2)
            ended = launch(2, "grpo_ref_split.py", *words)
            assert ended.returncode == 0, ended.stdout
    check_alike(tmp_path / "forked", tmp_path / "plain")


@pytest.mark.rare
def test_ranks_without_the_launcher_do_what_launched_ones_do(model_folder, data_folder, letters, tmp_path, launch):
    for name, start in (("launched", launch), ("alone", run_ranks)):
        settings = options(model_folder, data_folder, tmp_path / name, beta=0, max_steps=2, report_to="none")
        words = ["grpo_ref_split.py", *settings, *letters]
        ended = start(2, *words)
        assert ended.returncode == 0, ended.stdout
        refused = start(2, *words)
        assert refused.returncode == 2 and "it holds a run" in one_line(refused.stdout)
    assert lines(tmp_path / "alone/metrics.jsonl")[1]["grad_norm"] > 0
    check_alike(tmp_path / "launched", tmp_path / "alone")

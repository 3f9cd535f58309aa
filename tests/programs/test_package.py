"""The wheel in an environment and a folder of its own, away from the repository: the command `grpo`."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, REPOSITORY, free_port, run_python
from trainer_runs import lines, options

from grpo import __version__
from grpo.__main__ import COMMANDS

ELSEWHERE = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}


def run(*words: str | Path, folder: Path) -> str:
    done = subprocess.run(list(map(str, words)), cwd=folder, env=ELSEWHERE, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An empty folder beside the environment whose command `grpo` comes from the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "pip", "wheel", REPOSITORY, "--no-deps", "--no-build-isolation", "-w", folder]
    run(*build, folder=folder)
    (wheel,) = folder.glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"grpo", f"grpo_ref_split-{__version__}.dist-info"}
    venv.create(folder / "venv", symlinks=True)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    # The dependencies are those of the tests; the repository is not on this path.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    pip = [sys.executable, "-m", "pip", "--python", folder / "venv/bin/python"]
    run(*pip, "install", "--no-deps", "--no-index", wheel, folder=folder)
    (folder / "work").mkdir()
    return folder / "work"


@pytest.mark.slow
def test_the_installed_command_trains_and_evaluates_away_from_the_repository(installed, model_folder, data_folder):
    grpo = installed.parent / "venv/bin/grpo"
    assert run(grpo, "--version", folder=installed).startswith(f"grpo {__version__}\ntorch ")
    where = run(installed.parent / "venv/bin/python", "-c", "import grpo; print(grpo.__file__)", folder=installed)
    assert where.startswith(str(installed.parent / "venv"))
    words = options(model_folder, data_folder, "run", nproc_per_node=1, max_steps=2, port=free_port())
    assert "talk to it:    " in run(grpo, "launch", "--config", "configs/dr_grpo.yaml", *words, folder=installed)
    assert [row["step"] for row in lines(installed / "run/metrics.jsonl")][-1] == 2
    assert lines(installed / "run/starts.jsonl")[0]["command"].startswith("grpo launch --config configs/dr_grpo.yaml ")
    (installed / "mine.py").write_text(
        "from reward import text_of\n\ndef length(completions, **kwargs):\n"
        "    return [float(len(text_of(text))) for text in completions]\n"
    )
    rewards = ["--reward_funcs", "mine.py:length"]
    answers = run(grpo, "eval", "--model", "run/model", "--eval_samples", "4", *rewards, folder=installed)
    assert "on 4 problems" in answers and "    length " in answers


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_calls_itself_by_its_name(installed, command):
    grpo = installed.parent / "venv/bin/grpo"
    assert run(grpo, command, "--help", folder=installed).startswith(f"usage: grpo {command} ")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["launch", "status"])  # one with a configuration, one without
def test_a_command_refuses_an_option_by_its_name(installed, command):
    words = [installed.parent / "venv/bin/grpo", command, "--no_such_option"]
    wrong = subprocess.run(words, cwd=installed, env=ELSEWHERE, capture_output=True, text=True)
    error = next(line for line in wrong.stderr.splitlines() if not line.startswith("usage: "))
    assert wrong.returncode == 2 and error.startswith(f"grpo {command}: error: ")


def test_a_command_that_there_is_not_is_refused_with_those_that_there_are():
    done = run_python("-m", "grpo", "trian")
    assert done.returncode == 1 and "trian: no such command: choose from " in done.stderr

"""An environment of verifiers as a run's agent: the settings, and with `make test-verifiers` the package itself."""

import os
import shlex
import sys

import callers
import pytest
from trainer_runs import finish, lines, options, timeless

from grpo.agents.journal import read_program
from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.programs import WorkerConfig
from grpo.config.sampling_settings import ChatConfig, label_of
from grpo.config.trainer import TrainerConfig
from grpo.data.dataset import load_rows

PYTHON = os.environ.get("VERIFIERS_PYTHON")  # of an interpreter with verifiers and tests/verifiers_shop
real = pytest.mark.skipif(PYTHON is None, reason="make test-verifiers runs it")


def read(words: str) -> TrainerConfig:
    return parse_arguments(TrainerConfig, "", shlex.split(words))


def test_the_environment_is_an_agent_with_its_own_tasks():
    config = read("--environment verifiers:will/math-env --agent_python python3 --eval_steps 0")
    assert config.agent == config.dataset_name == "verifiers:will/math-env"
    assert config.environment is None and config.reward_funcs == [] and config.system_prompt == ""
    assert label_of(config.agent) == "math-env"
    assert read("--environment verifiers:settings/math.toml --dataset_name rows").dataset_name == "rows"
    worker = parse_arguments(WorkerConfig, "", ["--environment", "verifiers:math-env", "--pool", "http://localhost:1"])
    assert worker.agent == "verifiers:math-env"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tools": ["reward.py:f"]}, "agent='verifiers:x': the program has its own tools: leave out tools"),
        ({"agent": "reward.py:f"}, "agent='reward.py:f': environment verifiers:x is one: name one of them"),
        ({"system_prompt": "Hi"}, "system_prompt='Hi': the agent writes its messages itself: leave it out"),
    ],
)
def test_what_it_does_not_go_with_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        TrainerConfig(environment="verifiers:x", **settings)
    assert str(error.value) == message


def test_a_chat_has_no_tasks_of_it():
    with pytest.raises(ConfigError, match="ask the model by grpo eval"):
        ChatConfig(environment="verifiers:x")


def test_another_file_of_settings_is_another_program(tmp_path):
    path = tmp_path / "shop.toml"
    programs = []
    for turns in (2, 3):
        path.write_text(f"agent.max_turns = {turns}\n")
        programs.append(read_program(f"verifiers:{path}"))
    assert programs[0] != programs[1] and read_program("verifiers:shop") == []


@pytest.mark.parametrize(
    "words, split, message",
    [
        (
            "--dataset_name verifiers:x",
            "train",
            "dataset_name='verifiers:x': its tasks are played by their environment: add --environment verifiers:x",
        ),
        (
            "--environment verifiers:x",
            "test",
            "dataset_test_split='test': verifiers:x is a single environment: set eval_holdout, or give a folder with ",
        ),
        (
            "--environment verifiers:x --agent_python no/python",
            "train",
            "agent_python='no/python': it cannot be started (No such file or directory): name another",
        ),
        (
            "--environment verifiers:x",
            "train",
            f"environment='verifiers:x': {sys.executable} cannot open it (ModuleNotFoundError: No module named 'verifi",
        ),
    ],
)
def test_tasks_that_cannot_be_read_are_refused(words, split, message):
    with pytest.raises(ConfigError) as error:
        load_rows(read(words), split)
    assert str(error.value).startswith(message)


@real
@pytest.mark.slow
def test_a_run_trains_it_and_counts_what_failed(tmp_path):
    folder = callers.write(tmp_path)
    (tmp_path / "shop.toml").write_text('[env]\ntaskset.id = "verifiers-shop"\nagent.harness.id = "null"\n')
    with open(tmp_path / "shop.toml", "a") as file:
        file.write('agent.runtime.type = "subprocess"\nagent.max_turns = 2\n')
    settings = {"max_steps": 2, "beta": 0, "prompts_per_step": 4, "dataset_order": "as_is", "report_to": "none"}
    settings |= {"max_completion_length": 30, "max_prompt_length": 480, "eval_holdout": 2, "eval_steps": 2}
    name = f"verifiers:{tmp_path}/shop.toml"
    settings |= {"environment": name, "agent_python": PYTHON}
    output = finish(1, options(folder / "model", name, tmp_path / "run", **settings))
    rows = timeless(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["sampling/sampling_logp_difference/max"] < 1e-4
    records = [row for row in lines(tmp_path / "run/completions.jsonl") if row["phase"] == "train"]
    assert {record["prompt"].split("user\n")[-1][:1] for record in records} <= set("01234567")
    for record in records:
        turns = len(record["tree"])
        is_closed = record["prompt"].split("user\n")[-1].startswith("3:")
        assert record["failure"] == ("RuntimeError" if is_closed else "")
        assert record["rewards/shop"] == (None if is_closed else 0.25 + 2 * (turns > 1))
        assert turns <= 2
    assert 1 <= output.count("LookupError: this shop is closed") <= 2
    assert any(row.get("agent/parts/turns", 0) > 1 for row in rows) and any(len(r["tree"]) == 2 for r in records)


@real
@pytest.mark.slow
def test_what_verifiers_refuses_is_one_line():
    config = read(f"--environment verifiers:no-such-shop --agent_python {PYTHON}")
    with pytest.raises(ConfigError, match="cannot open it .ModuleNotFoundError: taskset 'no-such-shop' not found"):
        load_rows(config, "train")

"""The table at the end of a run."""

import json

import pytest
from recorded import write_rows

from grpo.report.read import summary

BEFORE = {"step": 0, "eval_n": 64, "eval_accuracy": 0.25, "eval_accuracy_se": 0.054}
AFTER = {"eval_n": 64, "eval_accuracy": 0.9, "eval_accuracy_se": 0.037}
STEPS = [{"step": step, "reward": step / 10, "num_tokens": 1000 * step, "step_time": 2000.0} for step in (1, 2, 3)]


def write(folder, rows):
    write_rows(folder / "metrics.jsonl", rows)
    return summary(folder).splitlines()


def words(line: str) -> str:
    return " ".join(line.split())


def test_first_and_last_numbers_stand_beside_each_other(tmp_path):
    folder = tmp_path / "my run"
    lines = write(folder, [BEFORE, *STEPS[:2], STEPS[2] | AFTER])
    assert words(lines[0]) == "64 held-out problems, greedy before after"
    assert words(lines[1]) == "accuracy 0.250 ± 0.054 0.900 ± 0.037"
    assert words(lines[3]) == "mean reward 0.100 0.300"
    assert lines[4] == "3 steps, 3,000 tokens, 1 h 40 min in steps."
    assert lines[-1].endswith(f"grpo report '{folder}'")  # to be copied
    assert f"'{folder}'/model/README.md" in lines[-2]


def test_without_evaluations_and_rewards_there_is_no_table_of_them(tmp_path):
    lines = write(tmp_path, [step | {"reward": None, "completions/mean_length": 9.0} for step in STEPS])
    assert [words(line) for line in lines[:3]] == [
        "training, sampled first step last step",
        "tokens per completion 9.000 9.000",
        "3 steps, 3,000 tokens, 1 h 40 min in steps.",
    ]


def test_the_commands_name_the_tools_and_the_environment_of_the_run(tmp_path):
    (tmp_path / "config.yaml").write_text("tools: [my shop.py:price, shop.py:stock]\nenvironment: game.py:Game\n")
    talk, evaluate = write(tmp_path, STEPS)[-4:-2]
    for line in (talk, evaluate):
        assert line.endswith(f"{tmp_path}/model --tools 'my shop.py:price' shop.py:stock --environment game.py:Game")


def test_the_commands_name_the_program_of_an_agents_run(tmp_path):
    (tmp_path / "config.yaml").write_text("agent: my agent.py:solve\nagent_python: env/python\nreward_funcs: []\n")
    for line in write(tmp_path, STEPS)[-4:-2]:
        assert line.endswith(f"{tmp_path}/model --agent 'my agent.py:solve' --agent_python env/python")
    (tmp_path / "config.yaml").write_text("agent: verifiers:wordle\nreward_funcs: []\n")
    *_, evaluate, _, _ = told = write(tmp_path, STEPS)
    assert evaluate.endswith("/model --agent verifiers:wordle") and not any("grpo chat" in line for line in told)


@pytest.mark.parametrize(
    "rewards, weights, words",
    [
        (["correctness_reward", "format_reward"], [1.0, 0.5], ""),
        (["format_reward", "my own.py:good"], [1.0, 1.0], " format_reward 'my own.py:good'"),
        (["a.py:b", "./c"], [1.0, -0.5], " a.py:b ./c --reward_weights 1.0 -0.5"),
        (["http://a:1"], None, " http://a:1"),
    ],
)
def test_the_command_to_evaluate_names_rewards_that_it_would_not_take_from_the_model(tmp_path, rewards, weights, words):
    (tmp_path / "config.yaml").write_text(json.dumps({"reward_funcs": rewards, "reward_weights": weights}))
    talk, evaluate = write(tmp_path, STEPS)[-4:-2]
    assert evaluate.endswith(f"{tmp_path}/model" + (words and f" --reward_funcs{words}")) and talk.endswith("/model")

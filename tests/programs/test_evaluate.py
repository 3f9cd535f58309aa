"""`python -m grpo.evaluate` as a user runs it: its table, its folder, its mistakes, alone and under the launcher."""

import json
import subprocess
import sys

import callers
import pictured
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY, run_python
from processes import end_by_ctrl_c, left_of
from trainer_runs import finish, lines
from trainer_runs import options as trainer_options

import reward
from grpo import evaluate
from grpo.config.command_line import parse_arguments
from grpo.config.programs import EvaluateConfig
from grpo.model.shared_cache import SharedCache


def options(model_folder, data, **changes) -> list[str]:
    settings = {"model": model_folder, "dataset": data, "system_prompt": "", "max_prompt_length": 96}
    settings |= {"max_completion_length": 24, "eval_samples": 10, "sequences_per_generate": 4} | changes
    return [f"--{name}={value}" for name, value in settings.items()]


def result(folder) -> tuple[dict, list[dict]]:
    """Metrics without the time they took, and completions."""
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics.pop("eval_runtime") > 0
    return metrics, lines(folder / "completions.jsonl")


@pytest.fixture
def main(monkeypatch):
    """`main(*options)`: the program's exit code, in this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or it would take all cores

    def run(*arguments) -> int:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
        try:
            return evaluate.main()
        except SystemExit as ended:
            return ended.code

    return run


def test_a_table_a_folder_and_every_completion_with_its_verdict(main, capsys, model_folder, data_folder, tmp_path):
    out = tmp_path / "out"
    arguments = options(model_folder, data_folder, num_generations_eval=3, output=out)
    assert main(*arguments) == 0
    metrics, completions = result(out)
    assert [(row["problem"], row["sample"]) for row in completions] == [(p, s) for p in range(10) for s in range(4)]
    problems = lines(data_folder / "test.jsonl")
    for row in completions:
        assert problems[row["problem"]]["question"] in row["prompt"]
        assert row["answer"] == problems[row["problem"]]["answer"]
        assert row["correct"] == (reward.score_answer(row["completion"], row["answer"]) > 0)
        assert row["format"] == (reward.score_format(row["completion"], row["prompt"]) == 0.8)
    assert metrics["eval_n"] == 10 and metrics["eval_pass@3"] >= metrics["eval_avg@3"]
    assert metrics["eval_num_tokens"] == sum(row["tokens"] for row in completions)

    table = capsys.readouterr().out.splitlines()
    assert table[0] == f"{model_folder} on 10 problems of {data_folder} (test)"
    assert f"{100 * metrics['eval_accuracy']:.1f} % ± {100 * metrics['eval_accuracy_se']:.1f}" in table[1]
    names = [
        *("accuracy", "avg@3, temperature 1", "pass@1", "pass@2", "pass@3", "reward, greedy", "  correctness_reward"),
        *("  format_reward", "format", "cut off", "tokens a completion"),
    ]
    assert all(line.startswith(f"  {name}") for line, name in zip(table[1:], names, strict=False))
    assert f"{metrics['eval_num_tokens']:,} tokens in" in table[-1] and len(table) == 13

    config = parse_arguments(EvaluateConfig, "", ["--config", str(out / "config.yaml")])
    assert config == parse_arguments(EvaluateConfig, "", arguments)


def test_problems_with_pictures_are_asked_with_them(main, tmp_path):
    pictures = [pictured.drawing(32, 24, 0), pictured.drawing(24, 32, 1, "JPEG")]
    rows = [{"question": "What is <image>?", "answer": "4", "images": [picture]} for picture in pictures]
    rows.append({"question": "What is it?", "answer": "4", "images": []})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    model, answers = pictured.save("qwen2_5_vl", tmp_path / "model"), []
    for sampler in ("continuous", "generate"):  # the second is transformers' own
        out = tmp_path / sampler
        assert main(*options(model, tmp_path / "rows.parquet", max_prompt_length=300, sampler=sampler, output=out)) == 0
        completions = result(out)[1]
        answers.append([completion["completion"] for completion in completions])
        names = [name for completion in completions for name in completion.get("pictures", ["none"])]
        assert [name[-4:] for name in names] == [".png", ".jpg", "none"]
        assert [(out / "pictures" / name).read_bytes() for name in names[:2]] == pictures
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]


def test_prompts_alone_get_rewards_and_no_accuracy(main, capsys, model_folder, tmp_path):
    (tmp_path / "rows.csv").write_text("question\n2+2?\n3+3?\n")
    words = options(model_folder, tmp_path / "rows.csv", output=tmp_path / "out")
    assert main(*words) == 2
    assert "reward_funcs='correctness_reward': it asks for gold answers, and " in capsys.readouterr().err
    assert main(*words, "--reward_funcs", "format_reward") == 0
    metrics, completions = result(tmp_path / "out")
    assert "eval_accuracy" not in metrics and {"eval_reward", "eval_completions/mean_length"} < metrics.keys()
    assert [completion["answer"] for completion in completions] == ["", ""]
    assert "accuracy" not in capsys.readouterr().out


def test_rewards_of_ones_own_are_the_numbers(main, capsys, model_folder, data_folder, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import time\n"
        "def letters(prompts, completions, **columns):\n    return [len(text) / 100 for text in completions]\n"
        "def hangs(prompts, completions, answer, **_):\n    time.sleep(600 * (answer[0] == '0'))\n    return [4]\n"
    )
    (tmp_path / "data.jsonl").write_text("".join(f'{{"question": "{i}+0?", "answer": "{i}"}}\n' for i in range(4)))
    arguments = options(model_folder, tmp_path / "data.jsonl", output=tmp_path / "out", reward_timeout=1)
    named = ["--reward_funcs", f"{own}:letters", f"{own}:hangs", "--reward_weights", "1", "0.5"]
    assert main(*arguments, *named) == 0
    metrics, completions = result(tmp_path / "out")
    letters = sum(len(row["completion"]) / 100 for row in completions) / 4
    assert metrics["eval_rewards/letters/mean"] == pytest.approx(letters)
    assert metrics["eval_rewards/hangs/mean"] == 3 * 4 / 4
    assert metrics["eval_reward"] == pytest.approx(letters + 0.5 * 3)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith(f"  reward, greedy {' ' * 13}{metrics['eval_reward']:8.3f} ± ")
    assert shown[2].split() == ["letters", f"{metrics['eval_rewards/letters/mean']:.3f}"]
    assert not [line for line in shown if "accuracy" in line or "format" in line]


def test_the_output_is_where_the_command_began_though_a_reward_function_changes_the_folder(
    main, model_folder, data_folder, tmp_path, monkeypatch
):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "own.py").write_text(
        "import os\ndef moves(completions, **_):\n    os.chdir('scratch')\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = options(model_folder, data_folder, eval_samples=2, output="out", reward_funcs="own.py:moves")
    assert main(*words) == 0
    assert result(tmp_path / "out")[0]["eval_rewards/moves/mean"] == 1.0


HANGS = """
import time

def hang(*_, **columns):
    open({begun!r}, "w").close()
    time.sleep(600)

class Shop:
    reset = hang

    def price(self, item: str) -> int:
        \"\"\"
        Return the price.

        Args:
            item: what is sold
        \"\"\"
        return 7
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a reward", "a reset as the data is read"])
def test_ctrl_c_ends_it_while_a_call_hangs(model_folder, data_folder, tmp_path, what):
    begun, file = tmp_path / "begun", tmp_path / "hangs.py"
    file.write_text(HANGS.format(begun=str(begun)))
    if what == "a reward":
        settings, model = [f"--reward_funcs={file}:hang", "--reward_timeout=300"], model_folder
    else:
        settings, model = [f"--environment={file}:Shop", "--tool_timeout=300"], callers.write(tmp_path) / "model"
    command = [sys.executable, "-m", "grpo.evaluate", *options(model, data_folder, eval_samples=1), *settings]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, **pipes) as process:
        below = end_by_ctrl_c(process, begun)
        *_, last = process.stderr.read().splitlines()
    assert last.endswith("error: interrupted")
    assert below and not left_of(below)


@pytest.fixture
def failed(main, capsys):
    """`failed(*options)`: the exit code and the one line that was said."""

    def run(*arguments) -> tuple[int, str]:
        code = main(*arguments)
        (error,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
        return code, error.partition(": error: ")[2]

    return run


def test_what_cannot_be_evaluated_is_said_in_one_line(failed, model_folder, data_folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("seed: 1\n")
    (tmp_path / "run/metrics.jsonl").touch()
    (tmp_path / "file").write_text("")
    for changes, reason in [
        (dict(model="/no/model"), "model_name_or_path='/no/model'"),
        (dict(dataset="/no/data"), "dataset_name='/no/data'"),
        (dict(split="validation"), "split 'validation' needs files"),
        (dict(dataset_answer_column="gold"), "dataset_answer_column='gold'"),
        (dict(temperature=0), "temperature=0.0: "),
        (dict(reward_funcs="format_reward", num_generations_eval=2), "num_generations_eval=2: avg@k and pass@k count"),
        (dict(reward_funcs="nothing"), "reward_funcs='nothing': "),
        (dict(max_completion_length=500), "max_completion_length=500: "),
        (dict(learning_rate=1), "--learning_rate: no such option"),
        (dict(output=tmp_path / "run"), "it holds a run or an evaluation"),
        (dict(output=tmp_path / "file/out"), f"output='{tmp_path / 'file/out'}': Not a directory"),
    ]:
        code, line = failed(*options(model_folder, data_folder, **changes))
        assert code == 2 and reason in line, line
    assert (tmp_path / "run/config.yaml").read_text() == "seed: 1\n"


def test_too_little_memory_is_said_with_the_setting_to_lower(failed, monkeypatch, model_folder, data_folder):
    step, calls = SharedCache.step, 0

    def no_room(*arguments, **state):
        nonlocal calls
        calls += 1
        if calls > 12:  # beyond the trial at the start
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB")
        return step(*arguments, **state)

    monkeypatch.setattr(SharedCache, "step", no_room)
    code, line = failed(*options(model_folder, data_folder, eval_samples=80))
    assert (code, line) == (2, "sequences_per_generate=4: out of memory: use a smaller one")


def test_a_single_file_is_taken_whole(main, capsys, model_folder, data_folder):
    file = data_folder / "test.jsonl"
    assert main(*options(model_folder, file, eval_samples=0, max_completion_length=1, sequences_per_generate=256)) == 0
    assert f"{model_folder} on 256 problems of {file}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_saved_model_has_the_numbers_that_its_run_recorded(model_folder, data_folder, tmp_path):
    own = tmp_path / "own.py"  # a reward that random weights earn, so that they move
    own.write_text(
        "def letters(prompts, completions, **columns):\n    return [len(text) for text in completions]\n\n"
        "def even(prompts, completions, **columns):\n    return [len(text) % 2 for text in completions]\n\n"
        "even.is_verdict = True\n"
    )
    functions = ["--reward_funcs", f"{own}:letters", f"{own}:even"]
    steps = {"max_steps": 1, "eval_steps": 1, "save_steps": 1, "learning_rate": 1e-2, "temperature": 0.8, "beta": 0}
    held_out = {"eval_samples": 20, "num_generations_eval": 4}
    trained = finish(1, trainer_options(model_folder, data_folder, tmp_path / "run", **steps, **held_out) + functions)
    assert "held-out accuracy" in trained and ", pass@4 " in trained
    _, after = lines(tmp_path / "run/metrics.jsonl")
    recorded = lines(tmp_path / "run/completions.jsonl")

    where = ["--config", str(tmp_path / "run/config.yaml"), "--output", str(tmp_path / "out")]
    ended = run_python("-m", "grpo.evaluate", *where, "--model", tmp_path / "run/model")
    assert ended.returncode == 0, ended.stderr
    metrics, completions = result(tmp_path / "out")
    assert metrics == {name: value for name, value in after.items() if name.startswith("eval_")}
    greedy = [row for row in completions if row["sample"] == 0]
    first, last = ([row for row in recorded if row["phase"] == "eval" and row["step"] == step] for step in (0, 1))
    assert [{"step": 1, "phase": "eval", **row} for row in greedy] == last and len(last) == 20
    assert [row["completion"] for row in greedy] != [row["completion"] for row in first], "the weights have moved"

    refused = run_python("-m", "grpo.evaluate", "--model", tmp_path / "run/model")
    assert refused.returncode == 2 and f"add --reward_funcs {own}:letters {own}:even, or others" in refused.stderr

    # A checkpoint, as a saved model, knows how it was trained to answer: nobody needs to say it again.
    out, extent = tmp_path / "again", [f"--{name}={value}" for name, value in held_out.items()]
    words = ["--model", tmp_path / "run/checkpoint-1", *extent, f"--output={out}", *functions]
    same = run_python("-m", "grpo.evaluate", *words)
    assert same.returncode == 0, same.stderr
    assert f"asked as in training, by {tmp_path}/run/checkpoint-1/grpo.yaml: system_prompt=''," in same.stderr
    assert result(out) == (metrics, completions)

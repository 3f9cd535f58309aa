"""The demos learn: the real programs on the shipped settings, with the accuracy promised. A seed takes minutes.

`python -m demo` itself checks where held-out accuracy begins and ends; the tests look at what it says and leaves.
"""

import json
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec

import datasets
import pytest
import trainer_runs
from conftest import ENVIRONMENT, REPOSITORY, run_python
from PIL import Image
from processes import left_of, processes_below, wait_for_file
from rounding import NO_KL

from demo import distill
from demo.__main__ import REAL, TEXT, TOOLS, VISION, lines_of, pair_completions, rise_of, train
from demo.english import QUESTIONS
from demo.pictures import MOST, png
from demo.real import PACKAGE

pytestmark = pytest.mark.slow

KINDS = {"text": (TEXT, []), "tools": (TOOLS, ["--tools"]), "vision": (VISION, ["--vision"])}


def start(folder, *options, environment: dict | None = None) -> subprocess.Popen:
    command = [sys.executable, "-m", "demo", "--folder", str(folder), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    shared = ENVIRONMENT | (environment or {})
    return subprocess.Popen(command, cwd=REPOSITORY, env=shared, start_new_session=True, **pipes)


def run(folder, *options, seconds=580) -> str:
    """Run the demo to its end; its output."""
    process = start(folder, *options)
    output, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, output + errors
    return output


def test_a_completion_with_another_language_s_line_end_is_one_record(tmp_path):
    (tmp_path / "run").mkdir()
    records = [{"phase": "eval", "step": step, "completion": "a\u2028b"} for step in (0, 9)]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (tmp_path / "run/completions.jsonl").write_text(text, encoding="utf-8")
    assert pair_completions(tmp_path, 9) == [tuple(records)]


@pytest.mark.rare
def test_a_card_that_is_not_there_is_refused(tmp_path):
    process = start(tmp_path, environment={"GPU": "1"})
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and not output
    assert errors == "demo: error: GPU=1: torch finds no CUDA card: leave GPU=1 out, or install torch for CUDA\n"


def lines(folder) -> list[dict]:
    return trainer_runs.lines(folder / "run/metrics.jsonl")


def check(kind: str, folder, output: str) -> None:
    demo, _ = KINDS[kind]
    rows = lines(folder)
    first, last = rows[0], rows[-1]
    assert demo.before[0] <= first["eval_accuracy"] <= demo.before[1]
    assert last["eval_accuracy"] >= demo.after and last["eval_n"] == 256
    assert f"{last['eval_accuracy']:.3f} ±" in output and output.count("before: ") == 5
    assert "points (95 % interval)" in output
    if kind == "text":
        assert rows[1]["kl"] < NO_KL
        assert (folder / "run/curves.png").stat().st_size > 10_000 and str(folder / "run/curves.png") in output
    elif kind == "tools":
        calls = "eval_rewards/right_call_reward/mean"
        assert first[calls] < 0.4 and last[calls] > 0.9
        assert last["tools/failure_frequency"] < rows[1]["tools/failure_frequency"]
        assert "share of held-out problems with the right call: 0." in output
    else:
        assert str(folder / "run/pictures.png") in output
        with Image.open(folder / "run/pictures.png") as image:
            assert min(image.size) > 500


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of seed 0 after a whole run, and its output."""
    folder = tmp_path_factory.mktemp("demo") / "seed0"
    return folder, run(folder, "--seed", "0")


def test_the_demo_learns_with_the_shipped_seed(built):
    check("text", *built)


def test_what_grpo_trained_teaches_the_model_that_it_was_trained_from(built, tmp_path, capsys):
    """The second half of `make demo-distill`."""
    (tmp_path / "grpo").symlink_to(built[0] / "run")
    for name in ("model", "data"):
        (tmp_path / name).symlink_to(built[0] / name)
    with distill.teacher("--model_name_or_path", tmp_path / "grpo/model", log=tmp_path / "teacher.log") as url:
        distill.learn(tmp_path, 0, url)
    distill.report(tmp_path)
    assert "distillation: 90% after " in capsys.readouterr().out
    curve = distill.Curve.of("distillation", tmp_path / "distill")
    assert curve.steps == [*range(13)] and curve.accuracy[-1] > 0.9
    drawn = [line for line in trainer_runs.lines(tmp_path / "distill/metrics.jsonl") if line["step"]]
    assert curve.tokens[-1] == sum(32 * line["completions/mean_length"] for line in drawn)
    with Image.open(tmp_path / "curves.png") as image:
        assert min(image.size) > 300


@pytest.mark.rare
@pytest.mark.parametrize("seed", range(3))
def test_a_pupil_needs_half_of_the_steps_and_tokens_with_any_seed(tmp_path, seed):
    ended = run_python("-m", "demo.distill", "--folder", tmp_path, "--seed", str(seed))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.rare
@pytest.mark.plain_start
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_the_demos_learn_with_any_seed(tmp_path, kind, seed):
    folder = tmp_path / "demo"
    check(kind, folder, run(folder, *KINDS[kind][1], "--seed", str(seed)))
    shutil.rmtree(folder)


@pytest.mark.rare
@pytest.mark.timeout(1600)
@pytest.mark.skipif(find_spec(PACKAGE) is None, reason="make demo-real installs the model's package")
def test_a_model_that_others_made_learns_to_add_and_still_speaks_english(tmp_path):
    folder = tmp_path / "demo"
    output = run(folder, "--real", "--seed", "0", seconds=1500)
    rows = lines(folder)
    assert REAL.before[0] <= rows[0]["eval_accuracy"] < rows[-1]["eval_accuracy"] - REAL.rise
    assert rows[-1]["eval_n"] == 200 and rows[-1]["kl"] > 0
    english = (folder / "run/english.md").read_text()
    assert english.count("\n") == len(QUESTIONS) + 2 and "The capital of France is Paris." in english
    assert "KL divergence of the next token" in output


@pytest.mark.rare
def test_with_blank_pictures_it_stays_at_chance(tmp_path, monkeypatch):
    """The same model and problems with blank pictures, for a third of the steps: in those it learns with pictures."""
    seeing, blind = tmp_path / "seeing", tmp_path / "blind"
    run(seeing, "--vision")
    (blind / "data").mkdir(parents=True)
    for split in ("train", "test"):
        rows = datasets.load_dataset("parquet", data_files=str(seeing / f"data/{split}.parquet"), split="train")
        blank = [{"bytes": png(Image.new("RGB", (48, 48), "white")), "path": None}]
        columns = {"images": [blank] * len(rows), "problem": rows["problem"], "answer": rows["answer"]}
        datasets.Dataset.from_dict(columns, features=rows.features).to_parquet(blind / f"data/{split}.parquet")
    shutil.copytree(seeing / "model", blind / "model")
    monkeypatch.chdir(REPOSITORY)
    train(blind, 0, "--max_steps", "20", demo=VISION)
    last, same_step = lines(blind)[-1], lines(seeing)[20]
    assert last["step"] == same_step["step"] == 20
    assert last["eval_accuracy"] < 1 / (MOST + 1) + 0.1 < same_step["eval_accuracy"] - 0.2


@pytest.mark.rare
def test_the_demo_learns_from_what_workers_draw_though_one_is_killed(built, tmp_path):
    shutil.copytree(built[0] / "model", tmp_path / "demo/model")
    output = run(tmp_path / "demo", "--pool")
    check("text", tmp_path / "demo", output)
    assert "worker-3 is killed after step 20" in output
    assert {row["sampling/policy_lag"] for row in lines(tmp_path / "demo")[2:]} == {1}


@pytest.mark.rare
def test_a_second_run_uses_what_was_built_and_is_right_again(built):
    folder, _ = built
    weights = folder / "model/model.safetensors"
    before = weights.stat().st_mtime_ns
    output = run(folder, "--seed", "0")
    check("text", folder, output)
    assert "using the model that is in" in output and weights.stat().st_mtime_ns == before


@pytest.mark.rare
def test_a_demo_that_does_not_learn_fails(built):
    """The trained model as the one to start from: it is right too often to show any learning."""
    folder, _ = built
    shutil.copytree(folder / "run/model", folder.with_name("clever") / "model")
    process = start(folder.with_name("clever"))
    _, errors = process.communicate(timeout=550)
    assert process.returncode == 1
    assert "it should begin between 0.1 and 0.4 and reach 0.9, and rise by" in errors.splitlines()[-1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_no_process_behind(built, number, code):
    folder, _ = built
    shutil.rmtree(folder / "run")
    process = start(folder)
    wait_for_file(folder / "run/metrics.jsonl", process, seconds=120)
    below = processes_below(process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert below and not left_of(below)


def test_a_conversation_is_printed_turn_by_turn():
    messages = [{"role": "assistant"}, {"role": "tool", "content": "52"}, {"role": "assistant"}]
    sample = {"completion": "call\n<answer>52</answer>", "messages": messages}
    assert lines_of(sample) == ["call", "-> 52", "<answer>52</answer>"]
    assert lines_of({"completion": "<answer>52</answer>"}) == ["<answer>52</answer>"]


def test_a_rise_has_the_errors_of_both_shares():
    before, after = ({"eval_accuracy": share, "eval_accuracy_se": error} for share, error in ((0.3, 0.03), (0.7, 0.04)))
    assert rise_of(before, after) == (pytest.approx(0.4), pytest.approx(1.96 * 0.05))

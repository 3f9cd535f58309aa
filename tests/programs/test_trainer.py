"""The trainer as a user runs it: real launcher, real server, few steps; what it records, and how it fails."""

import math
import os
import signal
import socket

import pytest
import torch
from conftest import REPOSITORY, free_port, running_server, write_model
from rounding import NO_KL
from servers import status
from trainer_runs import check_alike, finish, lines, one_line, options, plain_python, start, timeless, wait_for_steps
from transformers import AutoModelForCausalLM, AutoTokenizer

import reward
from grpo.config.command_line import parse_arguments
from grpo.config.trainer import TrainerConfig
from grpo.run.run_folder import write_progress

REWARDS = ("correctness_reward", "format_reward", "letters")
NAMES = {
    *("loss", "kl", "entropy", "grad_norm", "learning_rate", "skipped_steps", "num_tokens"),
    *("reward", "reward_std", "reward_std_within_groups", "frac_reward_zero_std", "step_time", "tokens_per_second"),
    *(f"rewards/{name}/{what}" for name in REWARDS for what in ("mean", "std")),
    *(f"completions/{what}_{length}" for what in ("mean", "min", "max") for length in ("length", "terminated_length")),
    *(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")),
    *(f"time/{phase}" for phase in ("generate", "reward", "wait_ref", "update")),
    "completions/clipped_ratio",
}


def check_record(run, model, steps, evaluated, per_step) -> None:
    """Every part of the record of a run is there, and its numbers agree with each other."""
    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert [row["step"] for row in rows if "eval_accuracy" in row] == evaluated
    for row in rows[1:]:
        assert row.keys() >= NAMES
        assert all(value is None or math.isfinite(value) for value in row.values())
        assert row["reward"] == pytest.approx(sum(row[f"rewards/{name}/mean"] for name in REWARDS))
        assert row["completions/min_length"] <= row["completions/mean_length"] <= row["completions/max_length"]
        phases = sum(value for name, value in row.items() if name.startswith("time/"))
        assert phases <= row["step_time"] + 1e-3
    for row in rows:
        if "eval_accuracy" in row:
            p, n = row["eval_accuracy"], row["eval_n"]
            assert row["eval_accuracy_se"] == pytest.approx(math.sqrt(p * (1 - p) / n))
    assert abs(rows[1]["kl"]) < NO_KL and rows[-1]["kl"] > 1e-8  # the same weights at first, other ones later

    samples = lines(run / "completions.jsonl")
    for sample in samples:
        assert sample["phase"] in ("train", "eval") and sample["prompt"] and sample["answer"]
        if sample["phase"] == "train":
            columns = dict(prompts=[sample["prompt"]], completions=[sample["completion"]])
            correct = reward.correctness_reward(answer=[sample["answer"]], **columns)[0]
            expected = correct + reward.format_reward(**columns)[0] + len(sample["completion"]) / 100
            assert sample["reward"] == pytest.approx(expected)
        else:
            assert sample["correct"] == (reward.score_answer(sample["completion"], sample["answer"]) > 0)
    trained = [sample["step"] for sample in samples if sample["phase"] == "train"]
    assert trained == [step for step in range(1, steps + 1) for _ in range(per_step)]

    assert {path.name for path in run.iterdir()} >= {"config.yaml", "curves.png", "tensorboard", "model"}
    assert not list(run.glob("*.unfinished"))
    before = AutoModelForCausalLM.from_pretrained(model)
    after = AutoModelForCausalLM.from_pretrained(run / "model")
    AutoTokenizer.from_pretrained(run / "model")
    assert not any(map(torch.equal, before.parameters(), after.parameters()))


def test_two_ranks_and_a_server(launch, server, model_folder, data_folder, letters, tmp_path):
    run = tmp_path / "two-ranks"
    # Four at a time, so that both ranks have a share of the ten held-out problems.
    changes = {"ref_servers": server.url, "save_steps": 2, "sequences_per_generate": 4}
    settings = options(model_folder, data_folder, run, **changes)
    ended = launch(2, "grpo_ref_split.py", *settings, *letters)
    assert ended.returncode == 0, ended.stdout
    check_record(run, model_folder, steps=3, evaluated=[0, 2, 3], per_step=4)
    for line in (
        "importing torch",
        f"reading split train of {data_folder}",
        f"loading {model_folder}",
        "starting DeepSpeed on 2 x cpu",
        "step 0: evaluating 10 held-out problems",
        f"saved {run}/checkpoint-2",
    ):
        assert ended.stdout.count(f": {line}") == 1, line
    assert "\r" not in ended.stdout  # no bars in a log file
    assert AutoModelForCausalLM.from_pretrained(run / "checkpoint-2").dtype == torch.float32
    parse_arguments(TrainerConfig, "", ["--config", str(run / "config.yaml")])
    assert lines(run / "metrics.jsonl")[0]["eval_n"] == 10
    assert ended.stdout.count(f"the reference server is ready; to watch it, open {server.url}/ in") == 1, ended.stdout
    clients = [client["name"].split(" #")[0] for client in status(server)["clients"]]
    assert {f"two-ranks, rank {rank} of 2, {socket.gethostname()[:32]}" for rank in (0, 1)} <= {*clients}, clients
    (start,) = lines(run / "starts.jsonl")
    assert (start["step"], start["ranks"], [*start["hosts"].values()]) == (0, 2, [["cpu", "cpu"]])
    assert "max_steps" in start["command"] and "local_rank" not in start["command"], start["command"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_beta_0_needs_no_reference(model_folder, data_folder, letters, tmp_path):
    changes = {"beta": 0, "max_steps": 2, "report_to": "none"}
    for name, seed in (("first", 1), ("same", 1), ("other", 2)):
        output = finish(1, [*options(model_folder, data_folder, tmp_path / name, seed=seed, **changes), *letters])
        assert "beta is 0: no KL term, no reference server" in output
    check_alike(tmp_path / "same", tmp_path / "first")
    rows = timeless(tmp_path / "first")
    assert rows != timeless(tmp_path / "other")
    assert "kl" not in rows[1] and not (tmp_path / "first/tensorboard").exists()


@pytest.mark.slow
def test_bfloat16_with_a_linear_warm_up(data_folder, letters, tmp_path):
    """Masters in fp32 let weights move by less than bfloat16 can show in one step."""
    folder = write_model(tmp_path / "model", seed=0)
    with running_server(folder, tmp_path, "--dtype", "bfloat16") as server:
        run = tmp_path / "run"
        changes = {"dtype": "bfloat16", "max_steps": 4, "warmup_steps": 3, "learning_rate": 1e-4}
        finish(2, [*options(folder, data_folder, run, ref_servers=server.url, eval_steps=0, **changes), *letters])
    rows = lines(run / "metrics.jsonl")
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.0, 1e-4 / 3, 2e-4 / 3, 1e-4])
    # The same weights, in batches of other shapes: bfloat16's rounding and no more.
    assert 0 <= rows[0]["kl"] < 1e-3
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    after = AutoModelForCausalLM.from_pretrained(run / "model")
    assert after.dtype == torch.bfloat16
    assert sum(not same for same in map(torch.equal, before.parameters(), after.parameters())) > 20


@pytest.mark.slow
def test_what_can_be_known_before_a_model_is_loaded_is_refused_by_then(model_folder, data_folder, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1}\n')
    begun = tmp_path / "begun/checkpoint-1"
    begun.mkdir(parents=True)
    write_progress(begun, {"ranks": 1, "settings": {}, "directory": "", "files": {}})  # of other settings
    cases = [
        (dict(max_completion_length=500), "max_completion_length=500"),  # the model's config.json says it
        (dict(model_name_or_path="/no/model"), "model_name_or_path='/no/model'"),
        (dict(ref_servers=f"http://127.0.0.1:{free_port()}", ref_startup_timeout=1), "no reference server at"),
        (dict(output_dir=tmp_path / "old"), "it holds a run or an evaluation"),
        (dict(output_dir=begun.parent, resume_from_checkpoint="last"), "here: leave it as it was"),
    ]
    for changes, words in cases:
        settings = {"model_name_or_path": model_folder, "dataset_name": data_folder, "output_dir": tmp_path / "run"}
        ended = plain_python(*options(**(settings | changes)))
        assert ended.returncode in (1, 2), ended.stdout
        assert words in one_line(ended.stdout) and ": loading" not in ended.stdout
    assert not (tmp_path / "run").exists()


FAILS = """
import os

def grade(prompts, completions, trainer_state, log_metric, **columns):
    log_metric("rank", float(os.environ["RANK"]))
    if (os.environ["RANK"], trainer_state.global_step) == FAILING:
        raise KeyError("a mistake")
    return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_a_reward_that_fails_on_one_rank_only_costs_no_step(launch, model_folder, data_folder, tmp_path):
    """In the third step, and in the evaluation after the last, which rank 0 does alone. Both launchers end the other
    rank before it says the same."""
    file, run, steps = tmp_path / "own.py", tmp_path / "run", {"max_steps": 4, "eval_steps": 4, "save_steps": 100}
    words = options(model_folder, data_folder, run, **steps, reward_funcs=f"{file}:grade", beta=0)
    words += ["--resume_from_checkpoint", "last"]
    for rank, done in (("1", 2), ("0", 4)):
        file.write_text(FAILS.replace("FAILING", repr((rank, done))))
        launcher = (2, "grpo_ref_split.py") if done == 2 else (1, "-m", "grpo.launch", "--nproc_per_node=2")
        ended = launch(*launcher, *words)
        assert ended.returncode != 0
        (error,) = [line for line in ended.stdout.splitlines() if line.startswith("grpo_ref_split.py: error:")]
        assert "Reward function 'grade' failed: KeyError('a mistake'); " in error
        assert error.endswith(f"--resume_from_checkpoint last --output_dir {run} goes on after step {done}")
        assert ended.stdout.count("Traceback") == 1 and 'raise KeyError("a mistake")' in ended.stdout
        assert (run / f"checkpoint-{done}").is_dir()
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    file.write_text(FAILS.replace("FAILING", "None"))
    finish(1, words)
    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 4] and "loss" in rows[-1] and len(rows) == 5
    assert [row["rank"] for row in rows[1:]] == [0.5] * 4  # of a round that was drawn again nothing counts twice


@pytest.mark.slow
@pytest.mark.parametrize(("call", "name"), [("exit()", "sys.exit"), ("_exit(0)", "_exit(0)")])
def test_an_end_that_is_not_the_runs_is_no_success(model_folder, data_folder, tmp_path, call, name):
    file, heads = tmp_path / "own.py", "from os import _exit, fork\nfrom sys import exit"
    file.write_text(f"{heads}\ndef main():\n    fork() or _exit(0)\n    {call}\n\nmain()\n")
    ended = plain_python(*options(model_folder, data_folder, tmp_path / "run", reward_funcs=f"{file}:f", beta=0))
    assert ended.returncode == 1
    assert f"{name} was called at {file}:5 in main, before the work was done" in one_line(ended.stdout)


LEAVES = """
import os, tempfile, threading, time

def leaves(prompts, completions, **columns):
    gone = tempfile.mkdtemp()
    os.chdir(gone)
    os.rmdir(gone)
    threading.Thread(target=time.sleep, args=(600,)).start()
    return [len(text) / 100 for text in completions]
"""


@pytest.mark.slow
def test_a_reward_that_changes_the_directory_and_leaves_threads_changes_no_run(model_folder, data_folder, tmp_path):
    (tmp_path / "own.py").write_text(LEAVES)
    run = tmp_path / "run"
    names = [os.path.relpath(path, REPOSITORY) for path in (model_folder, data_folder, run, tmp_path / "own.py")]
    output = finish(1, options(*names[:3], reward_funcs=f"{names[3]}:leaves", beta=0, save_steps=2))
    assert "done: model in" in output
    assert {path.name for path in run.iterdir()} >= {"checkpoint-2", "model", "curves.png"}
    assert len(lines(run / "metrics.jsonl")) == 4


@pytest.mark.slow
def test_two_ranks_say_a_mistake_once(launch, model_folder, data_folder, tmp_path):
    ended = launch(2, "grpo_ref_split.py", *options(model_folder, data_folder, tmp_path / "run", prompts_per_step=3))
    assert ended.returncode != 0
    assert "prompts_per_step=3: 2 ranks cannot share it equally: use 2 or 4" in one_line(ended.stdout)


# A stand-in for its client, which writes down each step and the end.
WANDB = """
from pathlib import Path
from types import SimpleNamespace

def note(text):
    with open(Path(__file__).with_name("calls"), "a") as file:
        print(text, file=file)

def init(**settings):
    return SimpleNamespace(log=lambda values, step: note(step), finish=lambda: note("finish"))

Table = SimpleNamespace
"""


@pytest.mark.slow
def test_ctrl_c_ends_in_one_line(model_folder, data_folder, tmp_path):
    run = tmp_path / "run"
    (tmp_path / "wandb.py").write_text(WANDB)
    settings = options(model_folder, data_folder, run, beta=0, max_steps=10**6, eval_steps=0, report_to="wandb")
    process = start(*settings, environment={"PYTHONPATH": str(tmp_path)})
    wait_for_steps(process, run, 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    last_line = output.splitlines()[-1]
    assert last_line.startswith("grpo_ref_split.py: stopped by signal 2; --resume_from_checkpoint last")
    assert "error" not in output and "Traceback" not in output
    step = last_line.split()[-1]
    assert (run / f"checkpoint-{step}").is_dir()
    *_, last_step, end = (tmp_path / "calls").read_text().splitlines()
    assert (last_step, end) == (step, "finish")

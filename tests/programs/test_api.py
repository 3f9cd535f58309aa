"""`grpo.train` in scripts as users write them: what a run returns, mistakes, Ctrl-C, ranks; and `grpo.RefClient`."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial, update_wrapper
from pathlib import Path

import datasets
import nbformat
import numpy as np
import pytest
import torch
import yaml
from conftest import ENVIRONMENT, REPOSITORY, free_port
from nbclient import NotebookClient
from rounding import FORMULA, assert_rounded
from servers import exact, wait_until
from trainer_runs import lines

import grpo
from grpo.rewards.compute import load_reward_funcs
from grpo.run.run_folder import write_progress

ELSEWHERE = ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}
BEGIN = """
import json, os, subprocess
import datasets, grpo

MARK = "z"

def counted(text):
    return text.count(MARK)

def marks(completions, source, **kwargs):
    assert set(source) <= {"mine"}
    return [float(counted(completion)) for completion in completions]

marks.is_verdict = True

def judge(completions, **kwargs):
    print("sleeper", subprocess.Popen(["sleep", "300"], start_new_session=True).pid, flush=True)
    os.write(1, b"\\xff bytes that are no text\\nprog.cpp:3:5: error: of a compiler\\n")
    return [0.0 for _ in completions]

def ran_out(completions, **kwargs):
    raise ValueError("the judge is asleep")

rows = [{"question": f"What is {a} plus 3?", "answer": str(a + 3), "source": "mine"} for a in range(12)]
small = dict(num_generations=4, prompts_per_step=4, max_prompt_length=96, max_completion_length=8, system_prompt="",
             warmup_steps=0, beta=0, gradient_checkpointing=False, report_to="none")
mine = small | dict(beta=0.1)
"""


def script(folder: Path, text: str, *words: str, environment: dict | None = None) -> subprocess.Popen:
    (folder / "script.py").write_text(BEGIN + text)
    command = [sys.executable, *words, "script.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=ELSEWHERE | (environment or {}), **streams)


def ended(process: subprocess.Popen, code: int = 0) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


@pytest.mark.slow
def test_the_page_s_script_trains_evaluates_asks_and_draws(model_folder, tmp_path):
    """A program that stays in the background with the run's stdout is not waited for."""
    (text,) = re.findall(r"```python\n(import grpo\n.*?)```", (REPOSITORY / "docs/python.md").read_text(), re.DOTALL)
    for old, new in {
        '"Qwen/Qwen2.5-0.5B-Instruct"': repr(str(model_folder)),
        "rows,  # or": "datasets.Dataset.from_list(rows),  # or",
        "max_steps=100": f"num_train_epochs=0.08, eval_steps=2, output_dir='run', port={free_port()}, **mine",
        "run.plot().show()": "print(json.dumps([run.metrics, run.plot().size, run.metrics._repr_html_()]))",
        "print(run.evaluate(rows[:5]),": "print(json.dumps([run.evaluate(rows[:5], **other), run.evaluate()]),",
        "if __name__": "other = dict(reward_funcs=[judge, brevity], output='out')\n\nif __name__",
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    output = ended(script(tmp_path, text))
    metrics, size, table = json.loads(output.splitlines()[-1])
    assert [row["step"] for row in metrics] == [0, 1, 2] and metrics == lines(tmp_path / "run/metrics.jsonl")
    assert "the reference server is ready" in output and "kl" in metrics[2] and "<table" in table and size[0] > 600
    (asked,) = [line for line in output.splitlines() if line.startswith('[{"eval_n": 5')]
    (few, own), end = json.JSONDecoder().raw_decode(asked)
    assert few["eval_n"] == 5 and own["eval_n"] == 20 and (tmp_path / "out/metrics.json").exists()
    assert "bytes that are no text" in output and "of a compiler" in output
    assert own["eval_rewards/brevity/mean"] == metrics[2]["eval_rewards/brevity/mean"]
    assert asked[end:].endswith(f" {tmp_path}/run/model") and len(asked[end:]) > len(f"  {tmp_path}/run/model")
    sleepers = re.findall("sleeper ([0-9]+)", output)
    for pid in sleepers:
        os.kill(int(pid), signal.SIGKILL)  # fails if it is gone
    assert sleepers


@pytest.mark.rare
def test_a_mistake_is_the_sentence_of_the_command_and_a_failed_run_its_last_one(model_folder, tmp_path):
    text = """
def refused(error, **settings):
    try:
        grpo.train(MODEL, **{"train_dataset": rows, "reward_funcs": marks, **small, **settings})
    except error as reason:
        print("refused:", reason)

if __name__ == "__main__":
    refused(grpo.SettingsError, learing_rate=1)
    refused(grpo.SettingsError, output_dir="old")
    refused(grpo.SettingsError, reward_funcs=lambda completions, **kwargs: [0.0])
    refused(grpo.SettingsError, train_dataset=iter(rows))
    refused(grpo.SettingsError, eval_dataset="elsewhere")
    refused(grpo.SettingsError, temperature=object())
    refused(grpo.SettingsError, train_dataset=[{"question": "1?", "answer": 1}, {"question": "2?", "answer": "two"}])
    refused(grpo.SettingsError, train_dataset=[{"answer": "1"}])
    refused(grpo.RunError, reward_funcs=ran_out)
"""
    (tmp_path / "old").mkdir()
    (tmp_path / "old/metrics.jsonl").write_text('{"step": 1}\n')
    output = ended(script(tmp_path, text.replace("MODEL", repr(str(model_folder)))))
    assert not (tmp_path / "old.inputs").exists()
    sentences = [line.removeprefix("refused: ") for line in output.splitlines() if line.startswith("refused: ")]
    expected = (
        "learing_rate (did you mean learning_rate?): no such field",
        "output_dir='old': it holds a run",
        "reward_funcs=<lambda>: define it with a name",
        "train_dataset=list_iterator: give a datasets.Dataset, a list of rows that are dicts, or a name",
        "eval_dataset: give rows with rows",
        "a setting is no text, number or list of such: <object object",
        "train_dataset: ",
        "dataset_prompt_column='question': ",
        "Reward function 'ran_out' failed: ValueError",
    )
    assert len(sentences) == len(expected)
    for sentence, part in zip(sentences, expected, strict=True):
        assert part in sentence
    assert 'raise ValueError("the judge is asleep")' in output  # the user's part of the stack is seen


def test_rows_that_cannot_be_trained_on_are_refused_before_a_run_begins(tmp_path):
    rows = datasets.Dataset.from_list([{"question": "1?", "answer": "1"}])
    for given, reason in (
        ([], "there is no row in it: give one at least"),
        (rows.select([]), "there is no row in it: give one at least"),
        (["1?", "2?"], "=list: give a datasets.Dataset, a list of rows that are dicts, or a name"),
        (datasets.DatasetDict({"train": rows}), "=DatasetDict: give one of its splits, 'train'"),
    ):
        for names in {"train_dataset": given}, {"train_dataset": rows, "eval_dataset": given}:
            with pytest.raises(grpo.SettingsError, match=f"^{[*names][-1]}:? ?{reason}$"):
                grpo.train("model", output_dir=tmp_path / "run", **names)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_used_is_a_mistake_and_the_current_one_can(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(grpo.SettingsError, match="output_dir='/proc/nope/run.*: name a folder that can be written"):
        grpo.train("model", output_dir="/proc/nope/run")
    with pytest.raises(grpo.SettingsError, match="there is no row in it"):
        grpo.train("model", output_dir=".", train_dataset=[])


def test_each_of_several_partials_and_objects_has_a_name_and_a_users_module_may_have_any(tmp_path, monkeypatch):
    """Also with the name that update_wrapper gives them, Open-R1's way."""

    def scaled(completions, scale, **kwargs):
        return [float(scale) for _ in completions]

    class Judge:
        def __init__(self, reward):
            self.reward = reward

        def __call__(self, completions, **kwargs):
            return [self.reward for _ in completions]

    monkeypatch.setattr("grpo.api._follow", lambda *_: None)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "functions.py").write_text(
        "def of_module(completions, **kwargs):\n    return [5.0 for _ in completions]\n"
    )
    given = [partial(scaled, scale=1), update_wrapper(partial(scaled, scale=2), scaled), Judge(3.0), Judge(4.0)]
    given += [importlib.import_module("functions").of_module, partial(scaled, scale=6)]
    given[-1].__name__ = "sixfold"
    grpo.train("model", reward_funcs=given, output_dir=tmp_path / "run", dry_run=True)
    named = yaml.safe_load((tmp_path / "run.inputs/config.yaml").read_text())["reward_funcs"]
    returned = {name: function(["a"]) for name, function in load_reward_funcs(named).items()}
    names = "scaled", "scaled_2", "Judge", "Judge_2", "of_module", "sixfold"
    assert returned == {name: [float(number)] for number, name in enumerate(names, 1)}
    twice = [lambda completions, **kwargs: [0.0], lambda completions, **kwargs: [1.0]]
    for function in twice:
        function.__name__ = "reward"
    with pytest.raises(
        grpo.SettingsError, match="^reward_funcs=reward: another function has this name: rename one, or"
    ):
        grpo.train("model", reward_funcs=twice, output_dir=tmp_path / "run", dry_run=True)


def test_a_run_that_grpo_stop_ended_is_not_returned_as_done(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)

    def end_early(*_: object) -> None:
        (run / "config.yaml").write_text("max_steps: 9\n")
        (run / "stop").touch()

    monkeypatch.setattr("grpo.api._follow", end_early)
    with pytest.raises(grpo.RunError, match=f"^{run}: grpo stop ended it: the same call with resume_from_checkpoint="):
        grpo.train("model", output_dir=run)
    write_progress(run / "model", {"step": 9})  # it was in its last step
    assert grpo.train("model", output_dir=run, resume_from_checkpoint="last").model_path.exists()
    assert grpo.train("model", resume_from_checkpoint=f"{run}/checkpoint-9").folder == run
    with pytest.raises(grpo.SettingsError, match="^resume_from_checkpoint='last': of which run"):
        grpo.train("model", resume_from_checkpoint="last")


@pytest.mark.rare
def test_ctrl_c_saves_and_the_same_call_goes_on(model_folder, tmp_path):
    text = """
if __name__ == "__main__":
    run = grpo.train(MODEL, train_dataset=rows, reward_funcs=marks, output_dir="run", max_steps=STEPS,
                     resume_from_checkpoint=FROM, **small)
    print(len(run.metrics))
"""
    text = text.replace("MODEL", repr(str(model_folder)))
    process = script(tmp_path, text.replace("STEPS", "500").replace("FROM", "None"))
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(lines(metrics)) >= 2, 60)
    os.kill(process.pid, signal.SIGINT)
    output = ended(process, -signal.SIGINT)
    assert "KeyboardInterrupt" in output and "stopping after this step" in output
    done = len(lines(metrics))
    settings = yaml.safe_load((tmp_path / "run.inputs/config.yaml").read_text())
    assert (
        settings["reward_funcs"] == [f"{tmp_path}/run.inputs/given_functions.py:marks"] and settings["eval_steps"] == 0
    )
    changed = text.replace("STEPS", str(done + 1)).replace("FROM", "'last'")
    assert ended(script(tmp_path, changed)).splitlines()[-1] == str(done + 1)
    assert [row["step"] for row in lines(metrics)] == [*range(1, done + 2)]


@pytest.mark.rare
def test_under_torchrun_all_ranks_train_one_run(model_folder, tmp_path):
    text = """
if __name__ == "__main__":
    run = grpo.train(MODEL, train_dataset=rows, reward_funcs=marks, max_steps=2, **small, **FOLDER)
    print("steps:", len(run.metrics), run.evaluate(rows[:5])["eval_n"])
"""
    text = text.replace("MODEL", repr(str(model_folder)))
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    output = ended(script(tmp_path, text.replace("FOLDER", "{'output_dir': 'run'}"), *words))
    assert output.count("steps: 2 5") == 2
    (start,) = lines(tmp_path / "run/starts.jsonl")
    assert start["ranks"] == 2
    environment = {"RANK": "0", "WORLD_SIZE": "1"}
    unnamed = ended(script(tmp_path, text.replace("FOLDER", "{}"), environment=environment), 1)
    assert "output_dir=None: name a folder: all ranks must have the same" in unnamed


def test_the_client_of_a_reference_scores_ids(server, model):
    prompt, completions = [5, 6, 7], [[8, 9, 10], [11], [12, 13]]
    with grpo.RefClient(server.url, temperature=0.7) as reference:
        rows = reference.logprobs(prompt, completions)
        assert reference.model.vocab_size == model.config.vocab_size
    assert [(row.dtype, len(row)) for row in rows] == [(np.float32, len(ids)) for ids in completions]
    assert_rounded(torch.from_numpy(np.concatenate(rows)), exact(model, prompt, completions, 0.7), FORMULA)


def test_the_package_is_imported_without_what_takes_long():
    program = (
        "import sys, grpo; print(sorted({'torch', 'requests', 'yaml', 'datasets'} & set(sys.modules)), dir(grpo)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ELSEWHERE, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ")
    with pytest.raises(AttributeError, match="module 'grpo' has no attribute 'trian'"):
        grpo.trian  # noqa: B018


@pytest.mark.rare
def test_the_notebook_ends_with_a_model_that_learned(tmp_path):
    path = REPOSITORY / "examples/first_run.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    (printed,) = [cell.outputs for cell in notebook.cells if cell.source.startswith("print(json")]
    accuracies = json.loads(printed[0]["text"])
    assert accuracies[0] < 0.5 and accuracies[1] > 0.9

"""Runs that learn from a teacher: with it alone, with several, and what is refused."""

import json
import signal
import time

import numpy as np
import pytest
import torch
from conftest import running_server, write_model
from trainer_runs import finish, lines, one_line, options, plain_python, training, wait_for_steps
from transformers import AutoModelForCausalLM, AutoTokenizer

ALONE = {"beta": 0, "reward_funcs": None, "eval_steps": 0, "num_generations": 1, "prompts_per_step": 16}
ALONE |= {"report_to": "none"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A server with another model than the policy, of the same tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    with running_server(write_model(folder / "model", seed=1), folder) as server:
        server.folder = folder / "model"
        yield server


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings",
    [{"distillation_coef": 0.5}, {"distillation_loss": "reverse_kl"}, {"distillation_loss": "forward_kl"}],
    ids=["advantage", "reverse_kl", "forward_kl"],
)
def test_with_a_teacher_alone_the_policy_becomes_like_it(model_folder, data_folder, teacher, tmp_path, settings):
    """No reward, no reference, one completion a prompt."""
    words = options(
        model_folder, data_folder, tmp_path / "run", teacher_servers=teacher.url, max_steps=30, **ALONE, **settings
    )
    output = finish(1, words)
    assert f"the teacher is {teacher.folder}" in output and "no reference server" in output
    assert "has no reward" not in output and "taught nothing" not in output
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert all(("distillation/loss" in row) == ("distillation_loss" in settings) for row in rows)

    prompts = sorted({line["prompt"] for line in lines(tmp_path / "run/completions.jsonl")})[:8]
    before, after = (distance(folder, teacher.folder, prompts) for folder in (model_folder, tmp_path / "run/model"))
    assert after < 0.8 * before


@torch.no_grad()
def distance(policy, teacher, prompts: list[str]) -> float:
    """The reverse KL over whole vocabularies, in nats, the mean over 24 tokens that the policy draws of each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    policy, teacher = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (policy, teacher))
    torch.manual_seed(0)
    values = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        drawn = policy.generate(ids, do_sample=True, top_k=0, max_new_tokens=24)
        p, q = (torch.log_softmax(model(drawn).logits[0, ids.shape[1] - 1 : -1], -1) for model in (policy, teacher))
        values.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(values).mean().item()


@pytest.mark.slow
def test_each_source_has_its_teacher_and_a_teacher_may_come_and_go(model_folder, data_folder, teacher, tmp_path):
    """One dataset has a teacher, the other none. It is killed in the middle of the run, and comes back."""
    settings = ALONE | {"num_generations": 2, "max_steps": 40, "max_completion_length": 8, "ref_deadline": 60}
    mixture = tmp_path / "mixture.yaml"
    parts = [{"path": str(data_folder), "label": label} for label in ("taught", "alone")]
    mixture.write_text(json.dumps(parts))
    with running_server(teacher.folder, tmp_path) as own:
        words = options(model_folder, mixture, tmp_path / "run", teacher_servers=f"taught={own.url}", **settings)
        with training(1, words) as process:
            wait_for_steps(process, tmp_path / "run", 2)
            own.process.send_signal(signal.SIGKILL)
            own.process.wait()
            time.sleep(1)
            assert process.poll() is None, "it waits"
            with running_server(teacher.folder, tmp_path, port=own.port):
                output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 40 and all(np.isfinite(row["distillation/reverse_kl"]) for row in rows)
    assert "the teacher of taught is" in output


@pytest.mark.slow
def test_a_teacher_that_does_not_fit_is_refused_in_one_line(model_folder, data_folder, tmp_path):
    other = write_model(tmp_path / "other", seed=2)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_special_tokens({"additional_special_tokens": [next(iter(tokenizer.get_vocab()))]})
    tokenizer.save_pretrained(other)
    with running_server(other, tmp_path) as server:
        for named, reason in (
            (f"maths={server.url}", "no prompt is of 'maths'; the sources are one dataset, without a label"),
            ("http://127.0.0.1:9", "no teacher server at http://127.0.0.1:9 "),
            (server.url, "other special tokens or other rules: save the policy's tokenizer with the teacher"),
        ):
            settings = ALONE | {"ref_startup_timeout": 1, "teacher_servers": named}
            ended = plain_python(*options(model_folder, data_folder, tmp_path / "run", **settings))
            assert reason in one_line(ended.stdout)
    assert not (tmp_path / "run").exists()

"""Steps whose loss or gradient is not finite: skipped, counted, kept, and after some in a row the end."""

import re

import pytest
from trainer_runs import finish, lines, one_line, options, plain_python

from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import PromptStream

ALONE = {"beta": 0.0, "eval_steps": 0}

REWARD = """
from pathlib import Path

def own(prompts, completions, answer, trainer_state, log_extra, log_metric, **columns):
    log_extra("gold", answer)
    log_metric("done", trainer_state.global_step / trainer_state.max_steps)
    for text in completions:
        log_metric("letters", len(text))
    spoiled = Path(__file__).with_name("spoiled").read_text().splitlines()
    rewards = [float(len(text)) for text in completions]
    return [
        1e99 if gold in spoiled and place % 2 else reward for place, (gold, reward) in enumerate(zip(answer, rewards))
    ]
"""


@pytest.mark.slow
def test_bad_steps_are_skipped_and_end_the_run_after_some_in_a_row(launch, model_folder, data_folder, tmp_path):
    """A reward out of scale on the prompts of steps 2 and 4 to 8, mended then."""
    run, changes = tmp_path / "run", {"max_steps": 9, "scale_rewards": "none", "resume_from_checkpoint": "last"}
    words = options(model_folder, data_folder, run, **ALONE, **changes, reward_funcs=f"{tmp_path / 'own.py'}:own")
    (tmp_path / "own.py").write_text(REWARD)
    answers = [line["answer"].rsplit("#### ")[-1] for line in lines(data_folder / "train.jsonl")]
    stream = PromptStream(answers, 4, TrainerConfig().seed)
    drawn = {step: {*stream.examples_of(step - 1)} for step in range(1, 9)}
    spoiled = {next(iter(drawn[step] - drawn[1] - drawn[3])) for step in (2, *range(4, 9))}
    (tmp_path / "spoiled").write_text("\n".join(spoiled))

    ended = launch(2, "grpo_ref_split.py", *words)
    assert ended.returncode != 0
    (error,) = [line for line in ended.stdout.splitlines() if "error: steps" in line]
    assert (
        "steps 4, 5, 6, 7, 8 taught the policy nothing: the last is skipped: its loss or gradient is not finite"
        in error
    )
    assert str(run / "bad_steps.jsonl") in error
    assert error.endswith(f"--resume_from_checkpoint last --output_dir {run} goes on after step 8")
    assert ended.stdout.count("is skipped: its loss or gradient is not finite; its 16 completions are in") == 6 + 1

    (tmp_path / "spoiled").write_text("")
    finish(2, words)
    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 10)]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 2, 3, 4, 5, 6, 6]
    assert [row["loss"] is None for row in rows] == [row["grad_norm"] is None for row in rows]
    assert [row["loss"] is None for row in rows] == [False, True, False, *[True] * 5, False]
    assert [row["done"] for row in rows] == [step / 9 for step in range(9)]
    for row in (rows[0], rows[2], rows[8]):
        assert row["letters"] == row["rewards/own/mean"]
    assert all(sample["gold"] == sample["answer"] for sample in lines(run / "completions.jsonl"))
    kept = lines(run / "bad_steps.jsonl")
    assert [sample["step"] for sample in kept] == [step for step in (2, 4, 5, 6, 7, 8) for _ in range(16)]
    assert {sample["answer"] for sample in kept if sample["reward"] == 1e99} == spoiled
    assert all(sample["prompt"] and "advantage" in sample for sample in kept)


NONE = """
import os

calls = -1  # the first call is the one before the run

def none(prompts, completions, **columns):
    global calls
    calls += 1
    applies = calls in (1, 3)
    return [float(len(text)) if applies and place else None for place, text in enumerate(completions)]

def never(prompts, completions, **columns):
    return [None for _ in completions]

def clashes(completions, trainer_state, log_metric, **kwargs):
    if trainer_state.global_step == 1:
        log_metric("reward", 1.0)
    return [float(len(text)) for text in completions]

def loss(inputs, settings):
    return -inputs.logprobs, inputs.entropy, {"tokens": inputs.entropy}

def terminate(step, metrics, completions, **kwargs):
    if step == 2:
        os.kill(os.getpid(), 15)

def flat(completions, trainer_state, **kwargs):
    step = trainer_state.global_step + 1
    return [place / 10 if step == 2 else 0.5 for place, _ in enumerate(completions)]
"""


@pytest.fixture
def train(model_folder, data_folder, tmp_path):
    """`train(*functions, **changes)`: the output of a run on functions of NONE, its last error and its metrics."""
    (tmp_path / "own.py").write_text(NONE)

    def run(*functions: str, code: int = 1, **changes) -> tuple[str, str, list[dict]]:
        words = options(model_folder, data_folder, tmp_path / "run", **ALONE, **changes)
        named = [f"{tmp_path / 'own.py'}:{name}" for name in functions]
        ended = plain_python(*words, *(["--reward_funcs", *named] if named else []))
        assert ended.returncode == code, ended.stdout
        return ended.stdout, one_line(ended.stdout) if code == 1 else "", lines(tmp_path / "run/metrics.jsonl")

    return run


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["reward function", "loss"])
def test_a_metric_with_the_name_of_the_runs_ends_it_after_that_step_with_a_checkpoint(train, tmp_path, kind):
    if kind == "loss":
        _, error, rows = train("never", loss_type=f"{tmp_path}/own.py:loss", reward_weights=0)
        assert "the loss returns 'tokens', a metric that the run has: choose another name" in error
    else:
        _, error, rows = train("clashes")
        assert "a reward function logs 'reward', a metric that the run has: choose another name" in error
    assert error.endswith(f"goes on after step {len(rows)}") and len(rows) == (1 if kind == "loss" else 2)
    assert rows[-1]["reward"] is None or rows[-1]["reward"] > 1


@pytest.mark.slow
def test_a_signal_after_a_steps_update_ends_the_run_after_that_step(train, tmp_path):
    """As one that comes in an evaluation: another step may take longer than the time left."""
    output, _, rows = train(code=143, max_steps=4, callback=f"{tmp_path / 'own.py'}:terminate")
    assert output.splitlines()[-1].endswith("goes on after step 2") and [row["step"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_steps_without_any_reward_are_shown_and_end_the_run_after_some_in_a_row(train, tmp_path):
    """One function's are missing in steps 2 and 4 to 8, the other's always; a punishment for length is no reward."""
    output, error, rows = train("none", "never", max_steps=9, soft_punish_cache=4)
    why = f"has no reward: none, never returned None for every completion of {tmp_path}/run/completions.jsonl: see "
    why += "'Steps have no reward' in docs/troubleshooting.md"
    assert f"steps 4, 5, 6, 7, 8 taught the policy nothing: the last {why}" in error
    assert error.endswith(f"--resume_from_checkpoint last --output_dir {tmp_path / 'run'} goes on after step 8")
    lost = re.findall(": step (.* has no reward.*)", output)
    assert lost == [f"{step} {why}" for step in (2, *range(4, 9))]
    assert "an advantage of 0" not in output
    assert [row["rewards/none/mean"] is None for row in rows] == [False, True, False, *[True] * 5]


@pytest.mark.slow
def test_five_steps_in_a_row_with_one_reward_for_all_are_shown_once(train):
    output, _, rows = train("flat", code=0, max_steps=9)
    assert [row["frac_reward_zero_std"] for row in rows] == [1, 0, *[1] * 7]
    (line,) = [line for line in output.splitlines() if "an advantage of 0" in line]
    assert "in steps 3 to 7 every completion had an advantage of 0 (mean reward 0.5), so they taught" in line
    assert "flat gives 0.5 for the gold answer of the first prompt" in output


@pytest.mark.slow
def test_steps_without_a_token_to_train_on_end_the_run_after_some_in_a_row(train):
    _, error, rows = train(max_steps=6, max_completion_length=1, mask_truncated_completions=None)
    assert (
        "steps 1, 2, 3, 4, 5 taught the policy nothing: the last does nothing: all 16 completions are cut, at max_com"
        in error
    )
    assert error.endswith("goes on after step 5")
    assert [row["masked_steps"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_weights_that_one_update_has_ruined_are_not_saved(train, tmp_path):
    _, error, _ = train(learning_rate=1e25, max_grad_norm=0, save_steps=0, reward_funcs="format_reward")
    assert "logits are NaN" in error
    assert error.endswith("usable: lower learning_rate; no checkpoint was saved: begin again")
    assert not [*(tmp_path / "run").glob("checkpoint-*")]

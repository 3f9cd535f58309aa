"""What the options that change learning do in a real run: rounds of generation, dynamic sampling, KL in the reward."""

import math
import re
import shutil
import zlib

import numpy as np
import pytest
import requests
import torch
from trainer_runs import check_weights, equal, finish, lines, options, timeless, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.algorithm.advantages import group_advantages

pytestmark = pytest.mark.slow


REWARDS = """
import zlib

def letters(prompts, completions, **columns):
    return [len(text) / 100 for text in completions]

def picky(prompts, completions, **columns):
    return [(zlib.crc32(p.encode()) % 2) * len(c) for p, c in zip(prompts, completions)]

def best_after_three(prompts, completions, trainer_state, **columns):
    return [len(text) / 100 - 1000 * abs(trainer_state.global_step - 3) for text in completions]
"""
"""functions that even the text of random weights earns something from"""


CALLBACK = """
import json

def follow(step, metrics, completions, **more):
    with open(FILE, "a") as file:
        file.write(json.dumps([step, metrics, completions]) + "\\n")
    return {1: None, 2: ANSWER, 3: "save", 4: "stop"}[step]
"""


@pytest.fixture
def run(model_folder, data_folder, server, tmp_path):
    """`run(name, reward, ranks, **changes)`: train without evaluation; return the output and the metrics a step."""
    (tmp_path / "own.py").write_text(REWARDS)

    def train(name: str = "run", reward: str = "letters", ranks: int = 1, **changes) -> tuple[str, list[dict]]:
        changes = {"ref_servers": server.url, "eval_steps": 0, "report_to": "none"} | changes
        changes |= {"reward_funcs": f"{tmp_path / 'own.py'}:{reward}"}
        output = finish(ranks, options(model_folder, data_folder, tmp_path / name, **changes))
        return output, lines(tmp_path / name / "metrics.jsonl")

    return train


def by_step(output) -> dict[int, list[dict]]:
    """The recorded completions of each step."""
    steps: dict[int, list[dict]] = {}
    for sample in lines(output / "completions.jsonl"):
        steps.setdefault(sample["step"], []).append(sample)
    return steps


def test_a_round_of_generation_feeds_several_steps_several_times(run, tmp_path):
    _, rows = run(steps_per_generation=2, num_iterations=2, max_steps=5, beta=0.5, kl_target=1e-4)
    check_beta(rows, 0.5, iterations=2)
    assert rows[1]["beta"] < rows[0]["beta"]  # no KL yet: below the target
    assert [row["sampling/policy_lag"] for row in rows] == [0, 1, 2, 3, 0] and "resampled_groups" not in rows[0]
    assert ["time/generate" in row for row in rows] == [True, False, False, False, True]
    # The old log-probs of every step are those of the policy that drew, however far training has gone since.
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    assert rows[0]["clip_ratio/region_mean"] == 0 < rows[3]["clip_ratio/region_mean"]
    assert rows[0]["num_tokens"] < rows[1]["num_tokens"] == rows[2]["num_tokens"] == rows[3]["num_tokens"]
    steps = by_step(tmp_path / "run")
    texts = {step: [sample["completion"] for sample in samples] for step, samples in steps.items()}
    assert texts[1] == texts[3] != texts[2] == texts[4] and texts[5] not in (texts[1], texts[2])


def test_prompts_without_signal_are_replaced(run, tmp_path):
    """Half of all prompts reward every completion alike. Two ranks, which seldom have equally many of them."""
    _, rows = run("resampled", "picky", 2, prompts_per_step=8, max_resample=12)
    assert [row["frac_reward_zero_std"] for row in rows] == [0, 0, 0]
    assert all(row["resampled_groups"] >= 1 for row in rows)
    prompts = {sample["prompt"] for samples in by_step(tmp_path / "resampled").values() for sample in samples}
    assert all(zlib.crc32(prompt.encode()) % 2 for prompt in prompts)


def test_more_are_drawn_than_trained_on_and_the_reference_is_asked_about_these_alone(run, server, tmp_path):
    """On two ranks, and goes on bit for bit with the same."""
    changes = {"num_draws": 6, "num_generations": 2, "steps_per_generation": 2, "max_steps": 4, "save_steps": 1}
    changes |= {"save_total_limit": 0, "ranks": 2}
    before = scored(server)
    _, rows = run(**changes)
    assert 0.25 < (scored(server) - before) / rows[-1]["num_tokens"] < 0.4  # two of six
    for samples in by_step(tmp_path / "run").values():
        for start in range(0, len(samples), 6):
            group = samples[start : start + 6]
            trained = [sample for sample in group if sample["advantage"] is not None]
            assert len({sample["prompt"] for sample in group}) == 1 and len(trained) == 2
            rewards = [sample["reward"] for sample in group]
            assert {sample["reward"] for sample in trained} == {min(rewards), max(rewards)}
            assert sum(sample["advantage"] for sample in trained) == pytest.approx(0)
    check_resumed(run, tmp_path / "run", range(2, 5), changes)


def test_a_callback_follows_a_run_saves_and_ends_it_with_its_best_model(run, data_folder, tmp_path):
    """The best one is that which it saved. A wrong answer ends the run in a line, and it goes on without it."""
    mine, seen = tmp_path / "mine.py", tmp_path / "seen.jsonl"
    mine.write_text(f"FILE, ANSWER = {str(seen)!r}, 'halt'\n{CALLBACK}")
    changes = {"reward": "best_after_three", "ranks": 2, "beta": 0, "max_steps": 9, "data_seed": 5, "eval_steps": 1}
    changes |= {"callback": f"{mine}:follow", "save_steps": 2, "save_total_limit": 0, "log_eval_completions": 3}
    changes |= {"load_best_model_at_end": None}
    with pytest.raises(AssertionError, match="callback returned 'halt' after step 2: return 'save', 'stop' or None"):
        run(**changes)
    mine.write_text(mine.read_text().replace("'halt'", "None"))
    output, rows = run(**changes, resume_from_checkpoint="last")
    assert "the run's model is that of checkpoint-3, the best by eval_reward" in output
    check_weights(tmp_path / "run/model", tmp_path / "run/checkpoint-3")
    assert not equal(weights(tmp_path / "run/model"), weights(tmp_path / "run/checkpoint-4"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    called = lines(seen)
    assert [step for step, *_ in called] == [1, 2, 3, 4]
    for (step, metrics, _), row in zip(called, rows[1:], strict=True):
        assert {"step": step} | {name: None if math.isnan(value) else value for name, value in metrics.items()} == row
    recorded = by_step(tmp_path / "run")
    first = [sample for sample in recorded[1] if sample["phase"] == "train"]
    assert [len(completions) for *_, completions in called] == [4 * 4] * 4
    assert called[0][2][:4] == [{k: v for k, v in s.items() if k not in ("step", "phase")} for s in first[:4]]
    held_out = [[sample for sample in samples if sample["phase"] == "eval"] for samples in recorded.values()]
    assert [len(samples) for samples in held_out] == [3] * 5
    prompts = [row["question"] for row in lines(data_folder / "train.jsonl")]
    order = np.random.default_rng((5, 0)).permutation(len(prompts))
    assert all(prompts[place] in sample["prompt"] for place, sample in zip(order, called[0][2][::4], strict=False))
    shutil.rmtree(tmp_path / "run/model")  # as after a kill while it was being saved
    output, rows = run(**changes, resume_from_checkpoint="last")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and (tmp_path / "run/model/model.safetensors").exists()
    del changes["callback"]
    _, rows = run(**changes, resume_from_checkpoint=tmp_path / "run/checkpoint-4")  # whoever names it trains on
    assert [row["step"] for row in rows] == [*range(10)]


def test_the_step_that_a_callback_makes_the_last_is_evaluated_as_the_last(run, tmp_path):
    (tmp_path / "mine.py").write_text("def follow(step, **more):\n    return 'stop' if step == 2 else None\n")
    changes = {"beta": 0, "max_steps": 9, "eval_steps": 5, "save_steps": 2, "callback": f"{tmp_path}/mine.py:follow"}
    _, rows = run(**changes)
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 2] and len(rows) == 3


def scored(server) -> float:
    """The tokens that the server has scored."""
    text = requests.get(f"{server.url}/metrics", timeout=10).text
    return float(re.search(r"^grpo_ref_tokens_total ([\d.e+]+)", text, re.MULTILINE)[1])


def test_the_kl_in_the_reward_moves_the_advantages(run, tmp_path):
    """Half of all prompts reward every completion alike: there the KL alone tells them apart, where no std divides."""
    changes = {"kl_in_reward": None, "kl_estimator": "k1", "beta": 1.0, "max_steps": 4, "scale_rewards": "none"}
    _, rows = run("run", "picky", **changes, kl_target=1e-4)

    def distance(step: int) -> float:
        """Between the advantages that were used and those of the rewards alone."""
        samples = by_step(tmp_path / "run")[step]
        rewards = torch.tensor([[sample["reward"] for sample in samples]], dtype=torch.float64)
        used = torch.tensor([[sample["advantage"] for sample in samples]], dtype=torch.float64)
        return (group_advantages(rewards, "none") - used).abs().max().item()

    assert distance(1) < 1e-2  # the same weights still, so no KL beyond rounding
    assert distance(4) > 0.1
    assert abs(rows[0]["kl"]) < 1e-5 < abs(rows[3]["kl"])
    assert [row["frac_reward_zero_std"] for row in rows[1:]] == [0, 0, 0]
    assert all("time/old_logprobs" in row for row in rows)
    check_beta(rows, 1.0)


def check_beta(rows: list[dict], beta: float, iterations: int = 1) -> None:
    """Hold it to Ziegler et al. 2019, section 2.2, with a target of 1e-4: a completion counts once."""
    for row in rows:
        assert row["beta"] == pytest.approx(beta)
        beta *= 1 + min(max(row["kl"] / 1e-4 - 1, -0.2), 0.2) * 16 / iterations / 10_000


def test_a_step_whose_completions_are_all_cut_does_nothing(run, tmp_path):
    """No weight moves, in the first step and in later ones."""
    changes = {"mask_truncated_completions": None, "top_entropy_quantile": 0.5, "prompts_per_step": 2, "max_steps": 6}
    changes |= {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "save_steps": 1, "save_total_limit": 0}
    changes["seed"] = 3  # such a step first and at last, others between
    _, rows = run(**changes)
    masked = [row["completions/clipped_ratio"] == 1 for row in rows]
    assert masked[0] and not all(masked) and masked[-1]
    assert [row["masked_steps"] for row in rows] == [sum(masked[: number + 1]) for number in range(6)]

    for step, row in enumerate(rows[1:], 2):
        before, after = (weights(tmp_path / f"run/checkpoint-{number}") for number in (step - 1, step))
        assert equal(before, after) == masked[step - 1]
        assert (row["grad_norm"] == row["loss"] == 0) == masked[step - 1] == ("kl" not in row)
    # A run goes on from such a step, too.
    output = check_resumed(run, tmp_path / "run", range(2, 7), changes)
    assert "step 2 does nothing: all 8 completions are cut" in output


def check_resumed(run, folder, lost, changes: dict) -> str:
    """Remove the checkpoints of these steps, and the model, with which the run would be done, and hold the run to the
    same numbers when it goes on. Return its output."""
    straight = timeless(folder)
    for path in (folder / "model", *(folder / f"checkpoint-{step}" for step in lost)):
        shutil.rmtree(path)
    output, _ = run(**changes, resume_from_checkpoint="last")
    assert "goes on after step 1" in output and timeless(folder) == straight
    return output


def test_what_is_whitened_over_the_round_is_the_same_on_two_ranks(run, tmp_path):
    """One completion a prompt: nothing but the other prompts to compare it with."""
    changes = {"advantage_estimator": "reinforce++", "num_generations": 1, "prompts_per_step": 8, "max_steps": 2}
    _, rows = run("one", **changes)
    run("two", ranks=2, **changes)
    for row, cut in zip(rows, lines(tmp_path / "two/metrics.jsonl"), strict=True):
        assert row["frac_reward_zero_std"] == cut["frac_reward_zero_std"] == 0 < row["grad_norm"]
        assert cut["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-3)
        assert cut["reward"] == pytest.approx(row["reward"])
    whole, cut = (by_step(tmp_path / name) for name in ("one", "two"))
    for step in (1, 2):
        whole_step = [sample["advantage"] for sample in whole[step]]
        assert [sample["advantage"] for sample in cut[step]] == pytest.approx(whole_step, abs=1e-9)
        assert any(whole_step)


def test_a_greedy_completion_is_the_baseline_and_a_run_goes_on_bit_for_bit(run, model_folder, tmp_path):
    changes = {"reward": "picky", "advantage_estimator": "remax", "num_generations": 3, "max_resample": 12}
    changes |= {"steps_per_generation": 2, "max_steps": 4, "save_steps": 1, "save_total_limit": 0}
    _, rows = run(**changes)
    # Where a prompt's completions all earn nothing, the greedy one too, there is no signal.
    assert all(row["grad_norm"] > 0 == row["frac_reward_zero_std"] for row in rows)
    assert rows[0]["resampled_groups"] > 0
    samples = by_step(tmp_path / "run")[1]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompt = tokenizer(samples[0]["prompt"], add_special_tokens=False, return_tensors="pt")
    policy = AutoModelForCausalLM.from_pretrained(model_folder)  # as the round began
    ids = policy.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    greedy = len(tokenizer.decode(ids, skip_special_tokens=True))
    assert [s["reward"] - s["advantage"] for s in samples] == pytest.approx([greedy] * 3) and greedy > 0
    check_resumed(run, tmp_path / "run", range(2, 5), changes)


def test_many_options_at_once_and_the_settings_kept_of_a_run_start_the_same_again(run, tmp_path):
    changes = {"loss_type": "cispo", "num_iterations": 2, "max_steps": 4, "soft_punish_cache": 10}
    changes |= {"mask_truncated_completions": None, "importance_sampling_mode": "sequence_truncate"}
    changes |= {"off_policy_mask_threshold": 0.01, "top_entropy_quantile": 0.5, "entropy_coef": 0.01}
    _, rows = run(**changes, scale_rewards="batch", max_completion_length=60)
    for row in rows:
        parts = [row["rewards/letters/mean"], row["rewards/soft_overlong_punishment/mean"]]
        assert row["reward"] == pytest.approx(sum(parts)) and -1 <= parts[1] <= 0
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert 0 <= row["off_policy_masked"] <= 1 and row["cispo_clip_ratio"] == 0
        assert row["completions/clipped_ratio"] < 1  # else nothing would be left to train on
    assert rows[0]["off_policy_masked"] == 0 and rows[0]["grad_norm"] > 0
    finish(1, ["--config", str(tmp_path / "run/config.yaml"), "--output_dir", str(tmp_path / "again")])
    (first, *_), (again, *_) = timeless(tmp_path / "run"), timeless(tmp_path / "again")
    assert first["loss"] == again["loss"] and first["grad_norm"] == again["grad_norm"]

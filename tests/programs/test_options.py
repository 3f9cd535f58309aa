"""What the options that change learning do in a real run: rounds of generation, dynamic sampling, KL in the reward."""

import json
import shutil
import zlib

import pytest
import torch
from trainer_runs import lines, options, plain_python, run_ranks, timeless
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.algorithm.advantages import group_advantages

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def own_rewards(tmp_path_factory):
    """Reward functions that even the text of random weights earns something from."""
    path = tmp_path_factory.mktemp("rewards") / "own.py"
    path.write_text(
        "import zlib\n"
        "def letters(prompts, completions, **columns):\n"
        "    return [len(text) / 100 for text in completions]\n"
        "def picky(prompts, completions, **columns):\n"
        "    return [(zlib.crc32(p.encode()) % 2) * len(c) for p, c in zip(prompts, completions)]\n"
    )
    return path


@pytest.fixture
def settings(model_folder, data_folder, server, own_rewards, tmp_path):
    """`settings(name, reward, **changes)`: the trainer's options for a run into that folder, without evaluation."""

    def make(name: str = "run", reward: str = "letters", **changes) -> list[str]:
        changes = {"ref_servers": server.url, "eval_steps": 0, **changes}
        own = ["--reward_funcs", f"{own_rewards}:{reward}", "--report_to", "none"]
        return [*options(model_folder, data_folder, tmp_path / name, **changes), *own]

    return make


@pytest.fixture
def run(settings, tmp_path):
    """`run(name, reward, **changes)`: one rank of the trainer; its metrics a step."""

    def rows(name: str = "run", reward: str = "letters", **changes) -> list[dict]:
        ended = plain_python(*settings(name, reward, **changes))
        assert ended.returncode == 0, ended.stdout
        return lines(tmp_path / name / "metrics.jsonl")

    return rows


def by_step(output) -> dict[int, list[dict]]:
    """The recorded completions of each step."""
    steps: dict[int, list[dict]] = {}
    for sample in lines(output / "completions.jsonl"):
        steps.setdefault(sample["step"], []).append(sample)
    return steps


def test_a_round_of_generation_feeds_several_steps_several_times(run, tmp_path):
    rows = run(steps_per_generation=2, num_iterations=2, max_steps=5)
    assert [row["sampling/policy_lag"] for row in rows] == [0, 1, 2, 3, 0]
    assert ["time/generate" in row for row in rows] == [True, False, False, False, True]
    # The old log-probs of every step are those of the policy that drew, however far training has gone since.
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    assert rows[0]["clip_ratio/region_mean"] == 0 < rows[3]["clip_ratio/region_mean"]
    assert rows[0]["num_tokens"] < rows[1]["num_tokens"] == rows[2]["num_tokens"] == rows[3]["num_tokens"]
    steps = by_step(tmp_path / "run")
    texts = {step: [sample["completion"] for sample in samples] for step, samples in steps.items()}
    assert texts[1] == texts[3] != texts[2] == texts[4] and texts[5] not in (texts[1], texts[2])


def test_prompts_without_signal_are_replaced(run, settings, tmp_path):
    """Half of all prompts reward every completion alike. Two ranks, which seldom have equally many of them."""
    plain = run("plain", "picky", prompts_per_step=8)
    assert sum(row["frac_reward_zero_std"] for row in plain) > 0 and "resampled_groups" not in plain[0]
    resampled = settings("resampled", "picky", prompts_per_step=8, max_resample=12)
    ended = run_ranks(2, "grpo_ref_split.py", *resampled)
    assert ended.returncode == 0, ended.stdout
    rows = lines(tmp_path / "resampled/metrics.jsonl")
    assert [row["frac_reward_zero_std"] for row in rows] == [0, 0, 0]
    assert all(row["resampled_groups"] >= 1 for row in rows)
    prompts = {sample["prompt"] for samples in by_step(tmp_path / "resampled").values() for sample in samples}
    assert all(zlib.crc32(prompt.encode()) % 2 for prompt in prompts)


def test_the_kl_in_the_reward_moves_the_advantages(run, tmp_path):
    """Half of all prompts reward every completion alike: there the KL alone tells them apart, where no std divides."""
    rows = run("run", "picky", kl_in_reward=None, kl_estimator="k1", beta=1.0, max_steps=4, scale_rewards="none")

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


@pytest.mark.parametrize("place", [{}, {"kl_in_reward": None}], ids=["in the loss", "in the reward"])
def test_beta_follows_the_target(run, place):
    rows = run(beta=0.5, kl_target=1e-4, max_steps=5, **place)
    expected = 0.5
    for row in rows:
        assert row["beta"] == pytest.approx(expected)
        expected *= 1 + min(max(row["kl"] / 1e-4 - 1, -0.2), 0.2) * 16 / 10_000  # Ziegler et al. 2019, section 2.2
    assert rows[1]["beta"] < rows[0]["beta"]  # no KL yet: below the target
    assert rows[-1]["beta"] > min(row["beta"] for row in rows)


def test_a_step_whose_completions_are_all_cut_does_nothing(run, settings, tmp_path):
    """Neither the weights nor what AdamW keeps of them nor the schedule moves, in the first step and in later ones."""
    changes = {
        "mask_truncated_completions": None,
        "top_entropy_quantile": 0.5,
        "prompts_per_step": 2,
        "max_steps": 6,
        "seed": 3,  # such a step first and at last, others between
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "save_steps": 1,
        "save_total_limit": 0,
    }
    rows = run(**changes)
    masked = [row["completions/clipped_ratio"] == 1 for row in rows]
    assert masked[0] and not all(masked) and masked[-1]
    assert [row["masked_steps"] for row in rows] == [sum(masked[: number + 1]) for number in range(6)]

    def state(step: int) -> list[torch.Tensor]:
        """The weights in float32, AdamW's moments, and the rate of the next step."""
        saved = tmp_path / f"run/checkpoint-{step}/engine"
        optimizer = torch.load(next(saved.glob("*optim_states.pt")), weights_only=False)["optimizer_state_dict"]
        of_torch = optimizer["base_optimizer_state"]
        moments = [value for one in of_torch["state"].values() for value in one.values()]
        rates = [group["lr"] for group in of_torch["param_groups"]]
        return [*optimizer["single_partition_of_fp32_groups"], *moments, torch.tensor(rates)]

    for step, row in enumerate(rows[1:], 2):
        before, after = state(step - 1), state(step)
        assert all(map(torch.equal, before, after)) == masked[step - 1]
        assert (row["grad_norm"] == row["loss"] == 0) == masked[step - 1] == ("kl" not in row)
    # A run goes on from such a step, too.
    straight = timeless(tmp_path / "run")
    for step in range(2, 7):
        shutil.rmtree(tmp_path / f"run/checkpoint-{step}")
    shutil.rmtree(tmp_path / "run/model")  # with it the run would be done
    ended = plain_python(*settings(**changes, resume_from_checkpoint="last"))
    assert ended.returncode == 0 and "step 2 does nothing: all 8 completions are cut" in ended.stdout, ended.stdout
    assert timeless(tmp_path / "run") == straight


def test_what_is_whitened_over_the_round_is_the_same_on_two_ranks(run, settings, tmp_path):
    """One completion a prompt: nothing but the other prompts to compare it with."""
    changes = {"advantage_estimator": "reinforce++", "num_generations": 1, "prompts_per_step": 8, "max_steps": 2}
    rows = run("one", **changes)
    ended = run_ranks(2, "grpo_ref_split.py", *settings("two", **changes))
    assert ended.returncode == 0, ended.stdout
    for row, cut in zip(rows, lines(tmp_path / "two/metrics.jsonl"), strict=True):
        assert row["frac_reward_zero_std"] == cut["frac_reward_zero_std"] == 0 < row["grad_norm"]
        assert cut["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-3)
        assert cut["reward"] == pytest.approx(row["reward"])
    whole, cut = (by_step(tmp_path / name) for name in ("one", "two"))
    for step in (1, 2):
        assert (
            [sample["advantage"] for sample in cut[step]]
            == [pytest.approx(sample["advantage"], abs=1e-9) for sample in whole[step]]
            != [0.0]
        )


def test_a_greedy_completion_is_the_baseline_and_a_run_goes_on_bit_for_bit(run, settings, model_folder, tmp_path):
    changes = {
        "reward": "picky",
        "advantage_estimator": "remax",
        "num_generations": 3,
        "max_resample": 12,
        "steps_per_generation": 2,
        "max_steps": 4,
        "save_steps": 1,
        "save_total_limit": 0,
    }
    rows = run(**changes)
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
    straight = timeless(tmp_path / "run")
    for step in (2, 3, 4):
        shutil.rmtree(tmp_path / f"run/checkpoint-{step}")
    shutil.rmtree(tmp_path / "run/model")
    ended = plain_python(*settings(**changes, resume_from_checkpoint="last"))
    assert ended.returncode == 0 and "goes on after step 1" in ended.stdout, ended.stdout
    assert timeless(tmp_path / "run") == straight


def test_many_options_at_once(run):
    rows = run(
        loss_type="cispo",
        num_iterations=2,
        max_steps=4,
        soft_punish_cache=10,
        mask_truncated_completions=None,
        importance_sampling_mode="sequence_truncate",
        off_policy_mask_threshold=0.01,
        top_entropy_quantile=0.5,
        entropy_coef=0.01,
        scale_rewards="batch",
        max_completion_length=60,
    )
    for row in rows:
        parts = [row["rewards/letters/mean"], row["rewards/soft_overlong_punishment/mean"]]
        assert row["reward"] == pytest.approx(sum(parts)) and -1 <= parts[1] <= 0
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert 0 <= row["off_policy_masked"] <= 1 and row["cispo_clip_ratio"] == 0
        assert row["completions/clipped_ratio"] < 1  # else nothing would be left to train on
    assert rows[0]["off_policy_masked"] == 0 and rows[0]["grad_norm"] > 0


def test_the_resolved_settings_of_a_run_are_kept(run, tmp_path):
    """config.yaml of a run with such options starts the same run again."""
    first = run("one", loss_type="dapo", delta=4, max_steps=1)
    ended = plain_python("--config", str(tmp_path / "one/config.yaml"), "--output_dir", str(tmp_path / "two"))
    assert ended.returncode == 0, ended.stdout
    again = json.loads((tmp_path / "two/metrics.jsonl").read_text())
    assert again["loss"] == first[0]["loss"] and again["grad_norm"] == first[0]["grad_norm"]

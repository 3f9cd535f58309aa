"""A loss type of the user's own: a copy of a built-in one equals it to the bit; what cannot be used is refused."""

from pathlib import Path

import pytest
import torch
from careless import unchanged
from ragged import completions, compute, documented, gradients

from grpo.algorithm.loss import try_loss
from grpo.algorithm.loss_types import LOSSES
from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.loss_settings import LOSS_TYPES, LossSection
from grpo.config.trainer import TrainerConfig
from grpo.run.metrics import add_stats, step_metrics
from grpo.run.preflight import describe_inputs

COPIES = """  # GRPO's loss and VESPO's, written out.

import torch
from careless import change_modes


def careless_grpo(inputs, settings):
    terms = copy_of_grpo(inputs, settings)
    change_modes()
    return terms


def copy_of_grpo(inputs, settings):
    within = inputs.ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon)
    policy = -torch.minimum(inputs.ratio * inputs.advantages, within * inputs.advantages)
    shares = 1.0 / (inputs.lengths.clamp(min=1) * inputs.step.sequences)
    stopped = inputs.ratio.gt(1 + settings.epsilon) & inputs.advantages.gt(0)
    return policy, inputs.to_tokens(shares.float()), {"stopped": stopped, "longest:max": inputs.lengths.float()}


def copy_of_vespo(inputs, settings):
    log_ratio = inputs.to_sequences(inputs.logprobs.detach() - inputs.old_logprobs)
    good = inputs.sequence_advantages >= 0
    power, rate = torch.where(good, 2.0, 3.0), torch.where(good, 3.0, 2.0)
    weight = torch.exp(rate + power * log_ratio - rate * log_ratio.exp())
    policy = -inputs.to_tokens(weight * inputs.sequence_advantages) * inputs.logprobs
    return policy, torch.full_like(policy, 1.0 / inputs.step.tokens, dtype=torch.float32), {}
"""


@pytest.fixture
def copies(tmp_path) -> str:
    (tmp_path / "copies.py").write_text(COPIES)
    return f"{tmp_path}/copies.py"


def computed(loss_type: str, kind: dict, **options) -> tuple[torch.Tensor, tuple, dict]:
    value, metrics, tokens = compute(completions(seed=3, **kind), LossSection(loss_type=loss_type, **options))
    return value.detach(), gradients(value, tokens), metrics


def test_the_settings_name_every_built_in_loss():
    assert set(LOSS_TYPES) == set(LOSSES)


def test_a_copy_of_a_built_in_loss_is_that_loss_to_the_bit(copies, tmp_path):
    cases = [
        ("grpo", f"{copies}:copy_of_grpo", {}),
        ("grpo", f"{copies}:careless_grpo", {}),
        ("vespo", f"{copies}:copy_of_vespo", {}),
        ("cispo", documented(tmp_path, "mine.py"), {"epsilon_high": 2.0}),
    ]
    around = [
        ({}, {"off_policy": False}),
        ({"use_bias_correction_kl": True, "entropy_coef": 0.02, "off_policy_mask_threshold": 0.05}, {"sampled": True}),
    ]
    for built_in, loss_type, own_options in cases:
        for options, kind in around:
            value, slopes, metrics = computed(built_in, kind, **options, **own_options)
            with unchanged():
                copied, own_slopes, own_metrics = computed(loss_type, kind, **options)
            case = f"{built_in}, {options}"
            assert torch.equal(copied, value) and value != 0, case
            assert all(map(torch.equal, own_slopes, slopes)), case
            assert all(torch.equal(own_metrics[name], metrics[name]) for name in ("kl", "entropy")), case


def test_its_metrics_are_recorded_under_their_names(tmp_path):
    _, _, metrics = computed(documented(tmp_path, "mine.py"), {})
    stats: dict = {}
    add_stats(stats, metrics)
    numbers = step_metrics(stats)
    assert 0 < numbers["truncated"] < 1 and numbers["largest_ratio"] == metrics["largest_ratio:max"].max() > 2


# What a file has, and how it is refused.
REFUSED = [
    ("loss = 1", "has no such function: define it there"),
    ("def loss(inputs): ...", r"failed on three small sequences \(TypeError"),
    (
        "def loss(inputs, settings): return inputs.logprobs",
        r"for 5 tokens it returned tensor\(\[-1.0.*: return \(policy, weights, metrics\)",
    ),
    ("def loss(inputs, settings): return inputs.logprobs.sum(), inputs.entropy, {}", "it returned .*: return "),
    (
        "def loss(inputs, settings): return inputs.logprobs, inputs.entropy, {'a': inputs.entropy.mean()}",
        r"{'a': tensor\(1.*}\): return ",
    ),
    (
        "def loss(inputs, settings): return inputs.logprobs, inputs.entropy, {'kl:max': inputs.entropy}",
        "it returns the metric 'kl:max', which every loss has: choose another name",
    ),
    (
        "def loss(inputs, settings): return inputs.logprobs.detach(), inputs.entropy, {}",
        "policy with the gradient of inputs.logprobs",
    ),
]


def test_what_cannot_be_used_is_refused_before_the_run(tmp_path):
    for place, (text, reason) in enumerate(REFUSED):
        file = tmp_path / f"loss{place}.py"
        file.write_text(text)
        settings = LossSection(loss_type=f"{file}:loss")
        with pytest.raises(ConfigError, match=f"^loss_type='{file}:loss': .*{reason}"):
            try_loss(settings)


def test_it_is_the_file_that_was_tried_wherever_a_reward_function_goes(copies, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try_loss(LossSection(loss_type="copies.py:copy_of_grpo"))
    monkeypatch.chdir("/")
    value, *_ = computed("copies.py:copy_of_grpo", {})
    assert torch.equal(value, computed("grpo", {})[0])


def test_the_files_of_loss_and_estimator_must_be_the_same_on_every_machine(copies):
    options = ["--loss_type", f"{copies}:copy_of_grpo", "--advantage_estimator", f"{copies}:compare"]
    config = parse_arguments(TrainerConfig, "", options)
    first = describe_inputs(config, {}, {}, [[], []])
    Path(copies).write_text(COPIES + "\n")
    second = describe_inputs(config, {}, {}, [[], []])
    changed = {f"the fingerprint of the file of {copies}:{name}" for name in ("copy_of_grpo", "compare")}
    assert {name for name in first if first[name] != second[name]} == changed

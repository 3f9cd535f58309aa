"""Losses against the papers' formulas in Python floats (oracle.py), gradients by finite differences."""

import dataclasses
import math
import random

import pytest
import torch
from oracle import Completion, gradient, loss, mark_high_entropy
from ragged import BOUNDS, EVERYTHING, LOSS_TYPES, completions, gradients, step_of, tokens_of

from grpo.algorithm.entropy import adapt_entropy_coef, applied_entropy_coef
from grpo.algorithm.kl import adapt_beta, kl_divergence
from grpo.algorithm.loss import grpo_loss
from grpo.algorithm.tokens import StepSize, Tokens
from grpo.config.loss import LossSection
from grpo.run.metrics import Stats

CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
LEVELS = ["token", "sequence"]
BETA, LONGEST = 0.3, 12

# What is set beside loss_type, level and estimator; and what the sequences are like.
MODES = {
    "as drawn": ({}, {"off_policy": False}),
    "off-policy": ({"epsilon_high": 0.28}, {}),
    "far off": ({}, {"far": True}),
    "other powers": ({"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.0, "vespo_lambda_neg": 4.0}, {}),
    "delta": ({"delta": 1.7}, {"far": True}),
    "bias corrected": ({"use_bias_correction_kl": True}, {}),
    "entropy bonus": ({"entropy_coef": 0.02}, {}),
    "top entropies": ({"entropy_coef": 0.02, "top_entropy_quantile": 0.3}, {}),
    "off-policy mask": ({"off_policy_mask_threshold": 0.05}, {}),
    "off-policy mask, sampler": ({"off_policy_mask_threshold": 0.05}, {"sampled": True}),
    "sampler, not corrected": ({}, {"sampled": True}),
    "token_truncate": ({"importance_sampling_mode": "token_truncate", **BOUNDS}, {"sampled": True}),
    "token_mask": ({"importance_sampling_mode": "token_mask", **BOUNDS}, {"sampled": True}),
    "sequence_truncate": ({"importance_sampling_mode": "sequence_truncate", **BOUNDS}, {"sampled": True}),
    "sequence_mask": ({"importance_sampling_mode": "sequence_mask"}, {"sampled": True}),
    "as drawn, corrected": (
        {"importance_sampling_mode": "token_truncate", **BOUNDS, "off_policy_mask_threshold": 0.05},
        {"sampled": True, "off_policy": False},
    ),
    "everything": (EVERYTHING, {"sampled": True}),
}


def drawn(settings: LossSection, seed: int, **kind) -> list[Completion]:
    some = completions(seed, **kind)
    return mark_high_entropy(some, settings.top_entropy_quantile) if settings.top_entropy_quantile < 1 else some


def ours(some: list[Completion], settings: LossSection, beta=BETA) -> tuple[torch.Tensor, dict, Tokens]:
    tokens = tokens_of(some)
    value, metrics = grpo_loss(tokens, step_of(some), settings, beta=beta, **constants(settings))
    return value, metrics, tokens


def constants(settings: LossSection) -> dict:
    return {"entropy_coef": settings.entropy_coef, "max_completion_length": LONGEST}


# The other estimators meet nothing else in the modes that are left out.
OTHERS = ["as drawn", "off-policy", "far off", "bias corrected", "everything"]
ESTIMATED = [("k3", mode) for mode in MODES] + [(name, mode) for name in ("k1", "k2", "k3+") for mode in OTHERS]


@pytest.mark.parametrize("estimator, mode", ESTIMATED)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_value_and_gradient_are_the_papers(loss_type, level, estimator, mode):
    options, kind = MODES[mode]
    settings = LossSection(loss_type=loss_type, importance_sampling_level=level, kl_estimator=estimator, **options)
    some = drawn(settings, seed=7, **kind)
    value, _, tokens = ours(some, settings)
    assert value.item() == pytest.approx(loss(some, settings, BETA, LONGEST), rel=1e-6)
    slopes = [gradient(one, step_of(some), settings, BETA, LONGEST) for one in some]
    for own, expected in zip(gradients(value, tokens), zip(*slopes, strict=True), strict=True):
        assert own.tolist() == pytest.approx([slope for row in expected for slope in row], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_without_a_reference_there_is_no_kl(loss_type, seed):
    settings = LossSection(loss_type=loss_type)
    some = [dataclasses.replace(one, ref=None) for one in completions(seed)]
    value, metrics, _ = ours(some, settings)
    assert value.item() == pytest.approx(loss(some, settings, BETA, LONGEST), rel=1e-6)
    assert "kl" not in metrics


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_with_the_kl_in_the_reward_it_is_reported_and_not_in_the_loss(loss_type):
    some = completions(seed=2)
    within, metrics, tokens = ours(some, LossSection(loss_type=loss_type, kl_in_reward=True))
    without, _, other = ours([dataclasses.replace(one, ref=None) for one in some], LossSection(loss_type=loss_type))
    assert within.item() == without.item() and torch.equal(gradients(within, tokens)[0], gradients(without, other)[0])
    assert torch.equal(metrics["kl"], ours(some, LossSection(loss_type=loss_type))[1]["kl"])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_as_drawn_the_gradient_is_the_advantage(loss_type, level):
    settings = LossSection(loss_type=loss_type, importance_sampling_level=level)
    some = [dataclasses.replace(one, ref=None) for one in completions(seed=3, off_policy=False)]
    value, _, tokens = ours(some, settings)
    every = sum(len(one.logp) for one in some)
    expected = []
    for one in some:
        count = len(some)
        lengths = {"grpo": len(one.logp), "sapo": len(one.logp), "dr_grpo": LONGEST, "luspo": 1}
        expected += [-one.advantage / (count * lengths.get(loss_type, every / count)) for _ in one.logp]
    assert gradients(value, tokens)[0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss_type", CLIPPED)
def test_delta_bounds_what_a_bad_token_can_weigh(loss_type):
    settings = LossSection(loss_type=loss_type, delta=3.0)
    size = StepSize(sequences=1, tokens=1)
    for ratio in (0.1, 0.9, 1.1, 2.9, 3.1, 1e6):
        for advantage in (-2.0, 2.0):
            one = Completion(advantage, [-1.0], [0.0], old=[-1.0 - math.log(ratio)])
            value = grpo_loss(tokens_of([one]), size, settings, beta=0.0, entropy_coef=0.0, max_completion_length=1)[
                0
            ].item()
            clipped = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            assert value == pytest.approx(-(max(clipped, 3 * advantage) if advantage < 0 else clipped), rel=1e-9)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_only_bad_sequences_beyond_the_threshold_are_dropped(loss_type):
    """DeepSeek-V3.2 eq. 9 drops what is above the threshold: the mean over tokens, so 0.125 of 0, 0.25 is still in."""
    settings = LossSection(loss_type=loss_type, off_policy_mask_threshold=0.125)
    moves = [(0.0, 0.0), (0.0, 0.25), (0.0, 0.3125), (0.25, 0.25), (-0.25, -0.25)]
    some = [
        Completion(sign, [-1.0, -1.0], [0.0, 0.0], [-1.0, -1.0], sampling=[-1.0 + move for move in pair])
        for sign in (-1.0, 1.0)
        for pair in moves
    ]
    value, _, tokens = ours(some, settings)
    kept = gradients(value, tokens)[0].view(-1, 2).ne(0).all(dim=1).tolist()
    assert kept == [True, True, False, False, True] + [True] * 5


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_of_one_token_sequences_the_sequence_level_is_the_token_level(loss_type):
    some = [
        dataclasses.replace(one, **{name: getattr(one, name)[:1] for name in ("logp", "old", "ref", "entropy")})
        for one in completions(seed=4)
    ]
    token, _, at_token = ours(some, LossSection(loss_type=loss_type))
    sequence, _, at_sequence = ours(some, LossSection(loss_type=loss_type, importance_sampling_level="sequence"))
    assert token.item() == pytest.approx(sequence.item(), rel=1e-12)
    torch.testing.assert_close(gradients(token, at_token)[0], gradients(sequence, at_sequence)[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_policy_term_is_linear_in_the_advantages_scale(loss_type, level):
    settings = LossSection(loss_type=loss_type, importance_sampling_level=level)
    some = [dataclasses.replace(one, ref=None) for one in completions(seed=5)]
    scaled = [dataclasses.replace(one, advantage=3 * one.advantage) for one in some]
    assert ours(scaled, settings)[0].item() == pytest.approx(3 * ours(some, settings)[0].item(), rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_only_differences_of_log_probs_matter(loss_type, level):
    """Of the gradient: the value of CISPO's loss is not one of differences."""
    settings = LossSection(loss_type=loss_type, importance_sampling_level=level, use_bias_correction_kl=True)
    some = completions(seed=6)
    shifted = [
        dataclasses.replace(one, **{name: [v - 2 for v in getattr(one, name)] for name in ("logp", "old", "ref")})
        for one in some
    ]
    (one, _, at_one), (other, _, at_other) = ours(some, settings), ours(shifted, settings)
    torch.testing.assert_close(gradients(one, at_one)[0], gradients(other, at_other)[0])


@pytest.mark.parametrize("mode", ["off-policy", "everything"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_any_cut_in_any_order_adds_up_to_the_whole(loss_type, level, mode):
    options, kind = MODES[mode]
    settings = LossSection(loss_type=loss_type, importance_sampling_level=level, **options)
    some = drawn(settings, seed=8, **kind)
    step = step_of(some)
    whole, _, tokens = ours(some, settings)
    rows = [list(torch.cat([t]).split([len(one.logp) for one in some])) for t in gradients(whole, tokens)]
    for seed in range(3):
        order = random.Random(seed).sample(range(len(some)), len(some))
        cuts = [order[:1], order[1:3], order[3:3], order[3:]]
        total = 0.0
        for cut in cuts:
            own = tokens_of([some[index] for index in cut])
            part, _ = grpo_loss(own, step, settings, beta=BETA, **constants(settings))
            total += part.item()
            for own_gradient, expected in zip(gradients(part, own), rows, strict=True):
                together = torch.cat([expected[index] for index in cut]) if cut else torch.zeros(0).double()
                torch.testing.assert_close(own_gradient, together, rtol=1e-12, atol=1e-15)
        assert total == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.parametrize("mode", ["off-policy", "everything"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_token_at_all_gives_zero_and_not_nan(loss_type, level, mode):
    options, kind = MODES[mode]
    settings = LossSection(loss_type=loss_type, importance_sampling_level=level, **options)
    empty = drawn(settings, seed=1, **kind)[0]
    for some in ([], [empty], [empty, empty]):
        value, metrics, _ = ours(some, settings)
        value.backward()
        assert value.item() == 0.0
        assert all(math.isfinite(Stats.of(values).total) for values in metrics.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_number_is_fetched_from_the_device(loss_type, level, mode):
    """Device meta has none, and raises where one is asked for."""
    options, kind = MODES[mode]
    more = {"use_adaptive_entropy": True} if "entropy_coef" in options else {}
    settings = LossSection(loss_type=loss_type, importance_sampling_level=level, **options, **more)
    tokens = tokens_of(some := drawn(settings, seed=1, **kind))
    values = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
    apart = Tokens(**{name: value if value is None else value.to("meta") for name, value in values.items()})
    grpo_loss(apart, step_of(some), settings, beta=BETA, **constants(settings))


@pytest.mark.parametrize("distance", [1e3, -1e3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_extreme_ratios_stay_finite_in_float32(loss_type, level, distance):
    settings = LossSection(
        loss_type=loss_type,
        importance_sampling_level=level,
        use_bias_correction_kl=True,
        importance_sampling_mode="sequence_truncate",
    )
    some = [Completion(a, [-1.0] * 3, [1.0] * 3, *[[-1.0 + distance] * 3] * 2, [-1.0 - distance] * 3) for a in (1, -1)]
    tokens = tokens_of(some, torch.float32)
    value, metrics = grpo_loss(tokens, step_of(some), settings, beta=BETA, **constants(settings))
    assert torch.isfinite(value) and torch.isfinite(gradients(value, tokens)[0]).all()
    assert all(torch.isfinite(values).all() for values in metrics.values())


def test_the_farthest_tokens_keep_their_pull():
    """k3 and its slope by the log-prob, 1 - e^d, as they are up to d = ref - logp = 20; then the slope stays."""
    for distance in (-1e3, -30.0, -20.0, -1.0, 19.9, 20.1, 30.0, 1e3):
        logprobs = torch.zeros(1, requires_grad=True)
        value = kl_divergence(logprobs, torch.tensor([distance]), "k3")
        at = min(distance, 20.0)
        expected = math.exp(at) * (1 + distance - at) - distance - 1
        assert value.item() == pytest.approx(expected, rel=1e-6)
        (slope,) = torch.autograd.grad(value.sum(), logprobs)
        assert slope.item() == pytest.approx(1 - math.exp(at), rel=1e-6)


def test_equal_models_have_no_kl():
    some = [dataclasses.replace(one, ref=one.logp) for one in completions(seed=2)]
    metrics = ours(some, LossSection())[1]
    assert metrics["kl"].tolist() == [0.0] * sum(len(one.logp) for one in some)


@pytest.mark.parametrize("loss_type", CLIPPED)
def test_clipping_is_counted_where_it_stops_the_gradient(loss_type):
    some = [
        Completion(advantage, [-1.0], [0.0], old=[-1.0 - change])
        for change, advantage in ((0.5, 1.0), (0.5, -1.0), (-0.5, 1.0), (-0.5, -1.0))
    ]
    value, metrics, tokens = ours(some, LossSection(loss_type=loss_type))
    assert metrics["clip_ratio/high_mean"].tolist() == [1, 0, 0, 0]
    assert metrics["clip_ratio/low_mean"].tolist() == [0, 0, 0, 1]
    assert metrics["clip_ratio/region_mean"].tolist() == [1, 0, 0, 1]
    assert (gradients(value, tokens)[0] == 0).tolist() == [True, False, False, True]


def test_an_adaptive_entropy_coefficient_acts_only_at_or_below_the_target():
    """Skywork-OR1, arXiv:2505.22312: it grows at or below the target and shrinks above it, within its bounds."""
    settings = LossSection(
        use_adaptive_entropy=True,
        entropy_coef=0.01,
        entropy_coef_min=0.005,
        entropy_coef_max=0.02,
        entropy_coef_delta=0.006,
        entropy_target=0.5,
    )
    coefficient, last, seen = settings.entropy_coef, None, []
    for entropy in (0.4, 0.5, 0.3, 0.51, 0.9, 2.0, 0.1):
        seen.append((applied_entropy_coef(coefficient, last, settings), coefficient))
        coefficient, last = adapt_entropy_coef(coefficient, entropy, settings), entropy
    acted, known = zip(*seen, strict=True)
    assert known == pytest.approx((0.01, 0.016, 0.02, 0.02, 0.014, 0.008, 0.005))
    assert acted == pytest.approx((0.0, 0.016, 0.02, 0.02, 0.0, 0.0, 0.0))
    assert applied_entropy_coef(0.01, None, LossSection(entropy_coef=0.01)) == 0.01


@pytest.mark.parametrize("kl, error", [(0.05, -0.2), (0.09, -0.1), (0.1, 0.0), (0.115, 0.15), (3.0, 0.2), (-1.0, -0.2)])
def test_an_adaptive_beta_follows_the_kl_by_a_fifth_at_most(kl, error):
    """Ziegler et al. 2019, arXiv:1909.08593, section 2.2, with the horizon in completions."""
    assert adapt_beta(0.04, kl, sequences=500, target=0.1, horizon=10_000) == pytest.approx(0.04 * (1 + error * 0.05))

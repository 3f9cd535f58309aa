"""Losses against the papers' formulas in Python floats (oracle.py), gradients by finite differences."""

import dataclasses
import math
import random
from itertools import product

import pytest
import torch
from conftest import REPOSITORY
from oracle import Completion, divisors, gradient, loss, mark_high_entropy, shares, size
from ragged import (
    LEVELS,
    LONGEST,
    LOSS_TYPES,
    MODES,
    cases,
    completions,
    compute,
    gradients,
    level_of,
    named,
    step_of,
    tokens_of,
)

from grpo.algorithm.advantages import advantages
from grpo.algorithm.loss import adapt_beta, grpo_loss, kl_divergence
from grpo.config.command_line import parse_arguments
from grpo.config.loss_settings import LossSection
from grpo.config.trainer import TrainerConfig
from grpo.run.metrics import Stats

BETA = 0.3


def make_batch(settings: LossSection, seed: int, **kind) -> list[Completion]:
    batch = completions(seed, **kind)
    return mark_high_entropy(batch, settings.top_entropy_quantile) if settings.top_entropy_quantile < 1 else batch


# The other estimators meet nothing else in the modes that are left out.
ESTIMATED = ["as drawn", "off-policy", "far off", "KL, bias corrected", "everything"]


@pytest.mark.parametrize("mode", MODES)
def test_value_and_gradient_are_the_papers(mode):
    options, _, kind = MODES[mode]
    estimators = ["k3", "k1", "k2", "k3+"] if mode in ESTIMATED else ["k3"]
    for (loss_type, level, allowed), estimator in product(cases(options), estimators):
        settings = LossSection(loss_type=loss_type, importance_sampling_level=level, kl_estimator=estimator, **allowed)
        batch = make_batch(settings, seed=7, **kind)
        with named(loss_type, level, estimator):
            value, _, tokens = compute(batch, settings)
            assert value.item() == pytest.approx(loss(batch, settings, BETA, LONGEST), rel=1e-6)
            slopes = [gradient(completion, step_of(batch), settings, BETA, LONGEST) for completion in batch]
            for slope, expected in zip(gradients(value, tokens), zip(*slopes, strict=True), strict=True):
                expected = [number for of_completion in expected for number in of_completion]
                assert slope.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_with_the_kl_in_the_reward_it_is_reported_and_not_in_the_loss():
    batch = completions(seed=2)
    for loss_type in LOSS_TYPES:
        with named(loss_type):
            settings = LossSection(
                loss_type=loss_type, importance_sampling_level=level_of(loss_type), kl_in_reward=True
            )
            value, metrics, tokens = compute(batch, settings)
            without_kl = dataclasses.replace(settings, kl_in_reward=False)
            alone = [dataclasses.replace(completion, ref=None) for completion in batch]
            plain, _, plain_tokens = compute(alone, without_kl)
            assert value.item() == plain.item()
            assert torch.equal(gradients(value, tokens)[0], gradients(plain, plain_tokens)[0])
            assert torch.equal(metrics["kl"], compute(batch, without_kl)[1]["kl"])


@pytest.mark.parametrize("mode", ["off-policy", "everything"])
def test_any_cut_in_any_order_adds_up_to_the_whole(mode):
    options, _, kind = MODES[mode]
    for loss_type, level, allowed in cases(options):
        settings = LossSection(loss_type=loss_type, importance_sampling_level=level, **allowed)
        batch = make_batch(settings, seed=8, **kind)
        step, lengths = step_of(batch), [len(completion.logp) for completion in batch]
        whole, _, tokens = compute(batch, settings)
        rows = [slope.split(lengths) for slope in gradients(whole, tokens)]
        for seed in range(3):
            order = random.Random(seed).sample(range(len(batch)), len(batch))
            total = 0.0
            with named(loss_type, level, seed):
                for cut in (order[:1], order[1:3], order[3:3], order[3:]):
                    part, _, part_tokens = compute([batch[index] for index in cut], settings, step=step)
                    total += part.item()
                    for slope, expected in zip(gradients(part, part_tokens), rows, strict=True):
                        expected = torch.cat([torch.zeros(0).double(), *(expected[index] for index in cut)])
                        torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-15)
                assert total == pytest.approx(whole.item(), rel=1e-12)


BRANCHES = [[0, 1], [2, 3, 4], [], [5], [6, 7]]  # of each episode, its sequences: some without a token, one none


@pytest.mark.parametrize("weighting, count", [("tokens", 4), ("branches", 8)])
@pytest.mark.parametrize("mode", ["off-policy", "far off", "sequence_mask", "everything"])
def test_branches_are_weighed_as_their_episode_or_each_by_itself(mode, weighting, count):
    """Whatever the cut: branches of an episode may be apart."""
    options, _, kind = MODES[mode]
    for loss_type, level, allowed in cases(options):
        settings = LossSection(
            loss_type=loss_type, importance_sampling_level=level, branch_weighting=weighting, **allowed
        )
        batch = make_batch(settings, seed=9, **kind)
        of_episode = [next(branches for branches in BRANCHES if place in branches) for place in range(len(batch))]
        batch = [
            dataclasses.replace(each, advantage=batch[branches[-1]].advantage)
            for each, branches in zip(batch, of_episode, strict=True)
        ]
        whole = [sum(len(batch[place].logp) for place in branches) for branches in of_episode]
        step, ours = size(batch), dataclasses.replace(step_of(batch), sequences=count)
        by = divisors([[batch[place] for place in branches] for branches in BRANCHES], settings, LONGEST)
        pairs = [*zip(batch, by, strict=True)]
        expected = math.fsum(
            term for each, own in pairs for term in shares(each, step, settings, BETA, LONGEST, divisor=own)
        )
        slopes = [gradient(each, step, settings, BETA, LONGEST, divisor=own)[0] for each, own in pairs]
        for order in ([*range(8)], [7, 2, 0, 5, 4, 1, 6, 3]):
            total, found = 0.0, {}
            for cut in (order[:1], order[1:4], order[4:]):
                tokens = tokens_of([batch[place] for place in cut])
                if weighting == "tokens":
                    tokens = dataclasses.replace(
                        tokens, completion_lengths=torch.tensor([whole[place] for place in cut])
                    )
                value, _ = grpo_loss(
                    tokens,
                    ours,
                    settings,
                    beta=BETA,
                    entropy_coef=settings.entropy_coef,
                    max_completion_length=LONGEST,
                )
                total += value.item()
                parts = gradients(value, tokens)[0].split(tokens.lengths.tolist())
                found |= zip(cut, [part.tolist() for part in parts], strict=True)
            with named(loss_type, level, order):
                assert total == pytest.approx(expected, rel=1e-6)
                for place, slope in enumerate(slopes):
                    assert found[place] == pytest.approx(slope, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("mode", ["off-policy", "everything"])
def test_no_token_at_all_gives_zero_and_not_nan(mode):
    options, _, kind = MODES[mode]
    for (loss_type, level, allowed), count in product(cases(options), range(3)):
        settings = LossSection(loss_type=loss_type, importance_sampling_level=level, **allowed)
        batch = [make_batch(settings, seed=1, **kind)[0]] * count  # the first is empty
        with named(loss_type, level, count):
            value, metrics, _ = compute(batch, settings)
            value.backward()
            assert value.item() == 0.0
            assert all(math.isfinite(Stats.of(values).total) for values in metrics.values())


@pytest.mark.parametrize("mode", MODES)
def test_no_number_is_fetched_from_the_device(mode):
    """Device meta has none, and raises where one is asked for."""
    options, _, kind = MODES[mode]
    adaptive = {"use_adaptive_entropy": True} if "entropy_coef" in options else {}
    for loss_type, level, allowed in cases(options):
        settings = LossSection(loss_type=loss_type, importance_sampling_level=level, **allowed, **adaptive)
        with named(loss_type, level):
            compute(make_batch(settings, seed=1, **kind), settings, device="meta")


def test_extreme_ratios_stay_finite_in_float32():
    for (loss_type, level), distance in product(LEVELS, (1e3, -1e3)):
        settings = LossSection(
            loss_type=loss_type,
            importance_sampling_level=level,
            use_bias_correction_kl=True,
            importance_sampling_mode="token_truncate" if loss_type == "vespo" else "sequence_truncate",
        )
        far, farther = [-1.0 + distance] * 3, [-1.0 - distance] * 3
        batch = [Completion(sign, [-1.0] * 3, [1.0] * 3, far, far, farther) for sign in (1, -1)]
        with named(loss_type, level, distance):
            value, metrics, tokens = compute(batch, settings, dtype=torch.float32)
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


def test_far_below_the_reference_the_corrected_kl_pulls_by_the_distance_in_float32():
    """d / dlogp (k3 ratio) = -ratio d: both slopes of the product are e^d and more."""
    settings = LossSection(use_bias_correction_kl=True)
    for distance, log_ratio in product((0.5, 10.0, 18.0), (0.0, -0.75)):
        logp = [-distance - 0.5]
        batch = [Completion(0.0, logp, [1.0], [logp[0] - log_ratio], ref=[-0.5])]
        value, _, tokens = compute(batch, settings, beta=1.0, dtype=torch.float32)
        assert gradients(value, tokens)[0].item() == pytest.approx(-math.exp(log_ratio) * distance, rel=1e-5)


def test_the_recipe_of_rloo_is_reinforce_with_the_mean_of_the_others_as_baseline():
    """Ahmadian et al. 2024, arXiv:2402.14740: the slope of -(R - baseline) log p of each whole completion."""
    config = parse_arguments(TrainerConfig, "", ["--config", str(REPOSITORY / "configs/rloo.yaml")])
    batch = [dataclasses.replace(completion, old=None) for completion in completions(seed=3)[1:5]]
    rewards = [1.0, 0.0, 0.0, 1.0]
    kl = [config.beta * math.fsum(map(float.__sub__, completion.logp, completion.ref)) for completion in batch]
    less = [reward - penalty for reward, penalty in zip(rewards, kl, strict=True)]
    expected = [reward - (math.fsum(less) - reward) / 3 for reward in less]
    penalty = config.beta * torch.stack(
        [kl_divergence(*map(torch.tensor, (c.logp, c.ref)), config.kl_estimator).double().sum() for c in batch]
    )
    unit = torch.ones(1, dtype=torch.float64)
    found = advantages(unit * torch.tensor([[rewards]]), unit, config, penalty)[0].tolist()
    assert found == pytest.approx(expected, rel=1e-5)
    value, _, tokens = compute([dataclasses.replace(c, advantage=a) for c, a in zip(batch, found, strict=True)], config)
    slopes = [-advantage / 4 for advantage, c in zip(expected, batch, strict=True) for _ in c.logp]
    assert gradients(value, tokens)[0].tolist() == pytest.approx(slopes, rel=1e-5)


def test_an_adaptive_beta_follows_the_kl_by_a_fifth_at_most():
    """Ziegler et al. 2019, arXiv:1909.08593, section 2.2, with the horizon in completions."""
    for kl, error in ((0.05, -0.2), (0.09, -0.1), (0.1, 0.0), (0.115, 0.15), (3.0, 0.2), (-1.0, -0.2)):
        with named(kl):
            beta = adapt_beta(0.04, kl, sequences=500, target=0.1)
            assert beta == pytest.approx(0.04 * (1 + error * 0.05))

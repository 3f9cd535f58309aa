"""Advantages and the loss against the paper's formulas, computed one number at a time in Python floats."""

import math
import statistics

import pytest
import torch

from grpo.loss import group_advantages, grpo_loss, token_weights


def test_advantages_are_normalised_within_each_group():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.3]], dtype=torch.float64)
    for row, group in zip(group_advantages(rewards), rewards.tolist(), strict=True):
        mean, std = statistics.mean(group), statistics.stdev(group)
        assert row.tolist() == pytest.approx([(reward - mean) / (std + 1e-4) for reward in group], rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 2.8, 1e9])
def test_a_group_with_equal_rewards_gives_exactly_zero(value):
    assert group_advantages(torch.full((1, 7), value, dtype=torch.float64)).tolist() == [[0.0] * 7]


def test_weights_are_the_mean_over_sequences_of_token_means():
    weights = token_weights(torch.tensor([4, 0, 1]), sequences=3)
    assert weights.tolist() == pytest.approx([1 / 12] * 4 + [1 / 3])


def test_weights_of_any_cut_are_those_of_the_whole():
    lengths = [3, 1, 0, 5, 2, 8]
    whole = token_weights(torch.tensor(lengths), 6)
    parts = [token_weights(torch.tensor(lengths[start:end]), 6) for start, end in ((0, 1), (1, 4), (4, 6))]
    assert torch.equal(whole, torch.cat(parts))


def test_no_token_at_all_gives_zero_and_not_nan():
    weights = token_weights(torch.tensor([0, 0]), 2)
    nothing = torch.zeros(0, requires_grad=True)
    loss, metrics = grpo_loss(nothing, nothing, nothing, nothing, weights, epsilon=0.2, epsilon_high=0.2, beta=0.04)
    assert loss.item() == 0.0 and all(len(values) == 0 for values in metrics.values())


def formula(logp, old, ref, advantage, epsilon, epsilon_high, beta):
    """DeepSeekMath (arXiv:2402.03300), equations 3 and 4, one token."""
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - epsilon), 1 + epsilon_high)
    kl = math.exp(ref - logp) - (ref - logp) - 1
    return -min(ratio * advantage, clipped * advantage) + beta * kl, kl


def random_tokens(count, seed, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    logp = -torch.rand(count, generator=generator, dtype=torch.float64) * 5
    old = logp + torch.randn(count, generator=generator, dtype=torch.float64) * spread
    ref = logp + torch.randn(count, generator=generator, dtype=torch.float64) * spread
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, generator=generator, dtype=torch.float64)
    return logp, old, ref, advantages, weights


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_the_papers(seed):
    settings = dict(epsilon=0.2, epsilon_high=0.28, beta=0.04)
    logp, old, ref, advantages, weights = random_tokens(200, seed)
    loss, metrics = grpo_loss(logp, old, ref, advantages, weights, **settings)
    rows = zip(*(values.tolist() for values in (logp, old, ref, advantages)), strict=True)
    values, kls = zip(*(formula(*row, **settings) for row in rows), strict=True)
    expected = sum(value * weight for value, weight in zip(values, weights.tolist(), strict=True))
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert metrics["kl"].tolist() == pytest.approx(kls, rel=1e-4, abs=1e-6)


def test_the_gradient_is_the_papers_by_finite_differences():
    settings = dict(epsilon=0.2, epsilon_high=0.28, beta=0.04)
    logp, old, ref, advantages, weights = random_tokens(50, seed=9)
    logp.requires_grad_()
    grpo_loss(logp, old, ref, advantages, weights, **settings)[0].backward()
    step = 1e-6
    for place, (lp, *rest) in enumerate(zip(*(v.tolist() for v in (logp, old, ref, advantages)), strict=True)):
        rise = formula(lp + step, *rest, **settings)[0] - formula(lp - step, *rest, **settings)[0]
        assert logp.grad[place].item() == pytest.approx(rise / (2 * step) * weights[place].item(), rel=1e-4, abs=1e-7)


def test_on_policy_the_gradient_is_the_advantage():
    logp, _, _, advantages, weights = random_tokens(30, seed=1)
    logp.requires_grad_()
    grpo_loss(logp, logp.detach(), None, advantages, weights, epsilon=0.2, epsilon_high=0.2, beta=0.0)[0].backward()
    torch.testing.assert_close(logp.grad, -advantages * weights)


def test_clipping_is_counted_where_it_stops_the_gradient():
    old = torch.zeros(4)
    logp = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, metrics = grpo_loss(logp, old, None, advantages, torch.ones(4), epsilon=0.2, epsilon_high=0.2, beta=0.0)
    loss.backward()
    assert metrics["clip_ratio/high_mean"].tolist() == [1, 0, 0, 0]
    assert metrics["clip_ratio/low_mean"].tolist() == [0, 0, 0, 1]
    assert metrics["clip_ratio/region_mean"].tolist() == [1, 0, 0, 1]
    assert (logp.grad == 0).tolist() == [True, False, False, True]


@pytest.mark.parametrize("distance", [1e3, -1e3])
def test_extreme_ratios_stay_finite(distance):
    logp = torch.tensor([-1.0], requires_grad=True)
    far = torch.tensor([-1.0 + distance])
    loss, _ = grpo_loss(logp, far, far, torch.ones(1), torch.ones(1), epsilon=0.2, epsilon_high=0.2, beta=0.04)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logp.grad).all()


def test_equal_models_have_no_kl():
    logp = torch.tensor([-3.0, -0.1])
    _, metrics = grpo_loss(logp, logp, logp, torch.ones(2), torch.ones(2), epsilon=0.2, epsilon_high=0.2, beta=0.04)
    assert metrics["kl"].tolist() == [0.0, 0.0]

"""Estimates the KL from the reference by sampled tokens; adapts the coefficients of KL and entropy."""

from __future__ import annotations

import torch

from grpo.algorithm.loss_types import LOG_RATIO_LIMIT
from grpo.config.loss_settings import LossSection

HORIZON = 10_000  # completions over which an adaptive beta follows: Ziegler et al.'s, and verl's


def kl_divergence(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) from single tokens, with d = ref - logp (Schulman 2020, "Approximating KL
    divergence", http://joschu.net/blog/kl-approx.html):

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1

    k3+ has the value of k3 and the gradient of k2, which is unbiased on-policy (k3's is not). All shapes equal.

    Above d = 20 the tangent e^20 (d - 19) replaces exp: it cannot overflow, and keeps the slope at 20. Below no bound
    is needed: k3's slope goes to 1.
    """
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    bounded = difference.clamp(max=LOG_RATIO_LIMIT)
    k3 = torch.exp(bounded) * (1 + difference - bounded) - difference - 1
    if estimator == "k3":
        return k3
    k2 = difference.square() / 2
    return k3.detach() + k2 - k2.detach()


def adapt_beta(beta: float, kl: float, sequences: int, target: float) -> float:
    """Return the next step's KL coefficient: it grows if the measured KL (nats a token) is above the target.

    Ziegler et al. 2019, arXiv:1909.08593, section 2.2; as in verl, a step of n sequences counts n times.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * sequences / HORIZON)


def applied_entropy_coef(entropy_coef: float, last_entropy: float | None, settings: LossSection) -> float:
    """Return the coefficient of the entropy bonus in a step.

    An adaptive one (Skywork-OR1, He et al. 2025, arXiv:2505.22312) acts only if the last step's entropy, None before
    the first, was at or below the target.
    """
    if not settings.use_adaptive_entropy:
        return entropy_coef
    return entropy_coef if last_entropy is not None and last_entropy <= settings.entropy_target else 0.0


def adapt_entropy_coef(entropy_coef: float, entropy: float, settings: LossSection) -> float:
    """Return the next step's coefficient: up if the entropy was at or below the target, else down, within bounds."""
    if entropy <= settings.entropy_target:
        return min(entropy_coef + settings.entropy_coef_delta, settings.entropy_coef_max)
    return max(entropy_coef - settings.entropy_coef_delta, settings.entropy_coef_min)

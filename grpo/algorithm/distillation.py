"""Computes how far the policy is from a teacher, at each token. Pure functions of tensors, without ranks."""

import math

import torch
from torch import Tensor

# Sums of probabilities in float32 are that exact: the other tokens have at least this.
_LEAST_REST = 1e-7


def divergence(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """Return a divergence of two distributions at each position, float32 [T], with the gradient of `student`.

    student, teacher: float32 [T, k], both models' log-probs of the teacher's k likeliest tokens; all other tokens are
    one more. With p the student's and q the teacher's k + 1 probabilities (Agarwal et al. 2024, "On-Policy
    Distillation of Language Models", arXiv:2306.13649, section 2):

        reverse_kl  sum p log(p / q)        forward_kl  sum q log(q / p)
        jsd         (forward_kl of q and m + forward_kl of p and m) / 2, with m = (p + q) / 2
    """
    student, teacher = _with_rest(student), _with_rest(teacher)
    if kind == "reverse_kl":
        distance = _kl(student, teacher)
    elif kind == "forward_kl":
        distance = _kl(teacher, student)
    else:
        middle = torch.logaddexp(student, teacher) - math.log(2)
        distance = (_kl(student, middle) + _kl(teacher, middle)) / 2
    return distance.float()


def _kl(of: Tensor, to: Tensor) -> Tensor:
    return (of.exp() * (of - to)).sum(dim=1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Add the log of the rest of the probability: [T, k] -> float64 [T, k + 1]."""
    logprobs = logprobs.double()
    rest = (1 - logprobs.exp().sum(dim=1, keepdim=True)).clamp(min=_LEAST_REST).log()
    return torch.cat([logprobs, rest], dim=1)

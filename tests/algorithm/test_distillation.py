"""Divergences from a teacher, against float64 over whole vocabularies and against TRL's own functions."""

import math
import warnings

import pytest
import torch
from rounding import GRADIENT, assert_rounded

from grpo.algorithm.loss import grpo_loss, teacher_divergence
from grpo.algorithm.loss_types import StepSize, Tokens
from grpo.config.loss_settings import LossSection

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL warns that these may change
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

TRL_BETA = {"forward_kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}
KINDS = [*TRL_BETA]


def logits(positions: int = 6, vocabulary: int = 40, sharpness: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(positions + vocabulary)
    both = torch.randn(2, positions, vocabulary, generator=draw) * sharpness
    return both[0].requires_grad_(), both[1]


def of_top(student: torch.Tensor, teacher: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    known = torch.log_softmax(teacher, -1).topk(top_k)
    return torch.log_softmax(student, -1).gather(1, known.indices), known.values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 7, 20])
def test_the_divergence_is_that_of_the_likeliest_tokens_and_the_rest(kind, top_k):
    student, teacher = logits()
    apart = teacher_divergence(*of_top(student, teacher, top_k), kind)
    (slope,) = torch.autograd.grad(apart.sum(), student)

    exact = student.detach().double().requires_grad_()
    by_token = zip(torch.softmax(exact, -1), torch.softmax(teacher.double(), -1), strict=True)
    expected = []
    for p, q in by_token:
        order = q.argsort(descending=True)
        pairs = [(p[i], q[i]) for i in order[:top_k]] + [(p[order[top_k:]].sum(), q[order[top_k:]].sum())]
        terms = {
            "reverse_kl": lambda p, q: p * torch.log(p / q),
            "forward_kl": lambda p, q: q * torch.log(q / p),
            "jsd": lambda p, q: (p * torch.log(2 * p / (p + q)) + q * torch.log(2 * q / (p + q))) / 2,
        }
        expected.append(sum(terms[kind](*pair) for pair in pairs))
    assert apart.dtype == torch.float32
    assert_rounded(apart, torch.stack(expected))
    assert_rounded(slope, torch.autograd.grad(sum(expected), exact)[0], GRADIENT)


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_tokens_it_is_the_loss_of_trls_gkd(kind):
    student, teacher = logits(vocabulary=32)
    ours = teacher_divergence(*of_top(student, teacher, 32), kind).sum()
    theirs = GKDTrainer.generalized_jsd_loss(
        student[None].double(), teacher[None].double(), beta=TRL_BETA[kind], reduction="sum"
    )
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-4)  # what is left for the rest
    both = [torch.autograd.grad(loss, student)[0] for loss in (ours, theirs)]
    assert (both[0] - both[1]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 8])
def test_with_some_tokens_it_is_that_of_trls_distillation_from_a_server(kind, top_k):
    student, teacher = logits(positions=9)
    known = [of.double() for of in of_top(student, teacher, top_k)]
    (ours_student, mask), (ours_teacher, _) = (_add_tail_bucket(of, torch.ones_like(of, dtype=bool)) for of in known)
    theirs = _jsd_divergence(ours_student, ours_teacher, TRL_BETA[kind], mask).sum(-1)
    ours = teacher_divergence(*of_top(student, teacher, top_k), kind)
    assert_rounded(ours, theirs)
    slopes = [torch.autograd.grad(loss.sum(), student, retain_graph=True)[0] for loss in (ours, theirs)]
    assert_rounded(*slopes, GRADIENT)


@pytest.mark.parametrize("kind", KINDS)
def test_certainty_makes_no_infinite_numbers(kind):
    student = torch.tensor([[0.0, 90.0, 0.0], [90.0, 0.0, 0.0]], requires_grad=True)
    apart = teacher_divergence(*of_top(student, torch.tensor([[90.0, 0.0, 0.0]] * 2), 2), kind)
    assert apart.isfinite().all() and torch.autograd.grad(apart.sum(), student)[0].isfinite().all()
    assert apart[0] > math.log(2) / 2 > abs(apart[1].item())


def test_the_advantage_of_drawn_tokens_has_on_average_the_gradient_of_the_reverse_kl():
    """All tokens of the vocabulary, each by its probability, against the divergence over all of them."""
    student, teacher = logits(positions=1, vocabulary=12)
    policy, of_teacher = (torch.log_softmax(of, -1)[0] for of in (student.double(), teacher.double()))
    slopes = []
    for token in range(12):
        tokens = Tokens(
            lengths=torch.tensor([1]),
            advantages=torch.zeros(1, dtype=torch.float64),
            logprobs=policy[token : token + 1],
            entropy=torch.zeros(1),
            teacher_logprobs=of_teacher[token : token + 1],
        )
        size, settings = StepSize(sequences=1, tokens=1), LossSection(distillation_coef=1.5)
        loss, metrics = grpo_loss(tokens, size, settings, beta=0.0, entropy_coef=0.0, max_completion_length=1)
        assert metrics["distillation/reverse_kl"].item() == pytest.approx((policy - of_teacher)[token].item())
        slopes.append(policy[token].exp() * torch.autograd.grad(loss, student, retain_graph=True)[0])
    exact = 1.5 * (policy.exp() * (policy - of_teacher)).sum()
    assert_rounded(sum(slopes), torch.autograd.grad(exact, student)[0], GRADIENT)


def test_a_share_of_clipped_ratios_is_of_all_tokens_where_each_has_its_own_advantage():
    """A ratio of the sequence is clipped for a token by the sign of that token's advantage."""
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    old = logprobs.detach() - math.log(1.5)
    tokens = Tokens(
        lengths=torch.tensor([4]),
        advantages=torch.zeros(1),
        logprobs=logprobs,
        old_logprobs=old,
        entropy=torch.zeros(4),
        teacher_logprobs=logprobs.detach() + torch.tensor([-1.0, 1.0, 1.0, 1.0]),
    )
    size, settings = StepSize(sequences=1, tokens=4), LossSection(importance_sampling_level="sequence")
    _, metrics = grpo_loss(tokens, size, settings, beta=0.0, entropy_coef=0.0, max_completion_length=4)
    assert metrics["clip_ratio/region_mean"].tolist() == [0.75]

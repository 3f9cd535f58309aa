"""The loss against TRL's own: `GRPOTrainer._compute_loss` on the same numbers, padded as TRL has them.

One micro-batch is the whole step there: TRL's divisors are those of a micro-batch for some losses. TRL has numbers of
what tools answered too, and a `tool_mask`; ours is never given them.
"""

import math
import random
import warnings
from collections import defaultdict
from functools import partial
from itertools import product
from types import SimpleNamespace

import oracle
import pytest
import torch
from ragged import LONGEST, LOSS_TYPES, MODES, cases, completions, compute, gradients, level_of, named

from grpo.algorithm.advantages import soft_overlong_punishment
from grpo.algorithm.loss import adapt_entropy_coef, applied_entropy_coef
from grpo.config.loss_settings import LossSection
from grpo.run.metrics import Stats, add_stats

ANSWERED = 6  # places of answers before a completion's last token, at most
WIDTH = LONGEST + ANSWERED + 2


@pytest.fixture(scope="module")
def trl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's imports, not ours
        from accelerate import Accelerator
        from trl import GRPOConfig
        from trl.rewards import get_soft_overlong_punishment
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.utils import nanstd

        return SimpleNamespace(
            trainer=GRPOTrainer,
            accelerator=Accelerator(cpu=True),
            soft_overlong_punishment=get_soft_overlong_punishment,
            nanstd=nanstd,
            fixed={  # its defaults of what is constant here
                name: field.default
                for name, field in GRPOConfig.__dataclass_fields__.items()
                if name.startswith(("sapo_", "vespo_"))
            },
        )


def places(batch: list[oracle.Completion], answers: bool) -> list[list[int]]:
    """Return where the drawn tokens of each completion stand, others being those of answers."""
    draw, extra = random.Random(4), ANSWERED if answers else 0
    lengths = [len(completion.logp) for completion in batch]
    return [sorted(draw.sample(range(length + extra), length)) for length in lengths]


def padded(rows: list[list[float]], drawn: list[list[int]], filling: float = -0.5) -> torch.Tensor:
    """Wider than the longest; what stands in the padding and in the answers must not matter."""
    table = torch.full((len(rows), WIDTH), filling, dtype=torch.float64)
    for of_table, row, of_row in zip(table, rows, drawn, strict=True):
        of_table[of_row] = torch.tensor(row, dtype=torch.float64)
    return table


def trls_trainer(trl, settings: LossSection, beta: float) -> SimpleNamespace:
    """What `_compute_loss` asks of its trainer."""
    corrected = settings.importance_sampling_mode not in (None, "none")
    trainer = SimpleNamespace(
        args=SimpleNamespace(**vars(settings), **trl.fixed, steps_per_generation=1),
        loss_type=settings.loss_type,
        importance_sampling_level=settings.importance_sampling_level,
        epsilon_low=settings.epsilon,
        epsilon_high=oracle.upper(settings),
        beta=beta,
        off_policy_mask_threshold=settings.off_policy_mask_threshold,
        top_entropy_quantile=settings.top_entropy_quantile,
        entropy_coef=settings.entropy_coef,
        use_adaptive_entropy=settings.use_adaptive_entropy,
        _entropy_bonus_enabled=settings.entropy_coef != 0.0 or settings.use_adaptive_entropy,
        _last_world_entropy=float("inf"),
        _entropy_window_stats=None,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        accelerator=trl.accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=trl.trainer.get_off_policy_mask,
        get_gamma_weights=trl.trainer.get_gamma_weights,
    )
    trainer.get_high_entropy_mask = partial(trl.trainer.get_high_entropy_mask, trainer)
    return trainer


def theirs(trl, batch: list[oracle.Completion], settings: LossSection, beta: float, trainer=None, answers=False):
    """TRL's loss, its gradients by log-probs and entropies (flat, as ours), the metrics it logs."""
    drawn = places(batch, answers)
    logp = padded([completion.logp for completion in batch], drawn).requires_grad_()
    entropy = padded([completion.entropy for completion in batch], drawn).requires_grad_()
    mask = torch.tensor([[place in of_row for place in range(WIDTH)] for of_row in drawn]).long()
    whole = torch.tensor([[place <= max(of_row, default=-1) for place in range(WIDTH)] for of_row in drawn]).long()
    prompts = torch.zeros(len(batch), 1, dtype=torch.long)
    corrected = settings.importance_sampling_mode not in (None, "none")
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts + 1,
        "completion_ids": whole,
        "completion_mask": whole,
        "advantages": torch.tensor([completion.advantage for completion in batch], dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
        **({"tool_mask": mask + 1 - whole} if answers else {}),  # 1 in the padding, as TRL has it
    }
    if batch[0].old is not None:
        inputs["old_per_token_logps"] = padded([completion.old for completion in batch], drawn)
    if batch[0].sampling is not None:
        inputs["sampling_per_token_logps"] = padded([completion.sampling for completion in batch], drawn)
    if beta:
        inputs["ref_per_token_logps"] = padded([completion.ref for completion in batch], drawn)
    if corrected:
        # Computed in another method of TRL's, which also generates; the same formula is the oracle's.
        inputs["importance_sampling_ratio"] = padded(
            [oracle.importance(completion, completion, settings) for completion in batch], drawn, 1.0
        )
    trainer = trainer or trls_trainer(trl, settings, beta)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, entropy, None)
    value = trl.trainer._compute_loss(trainer, trainer.model, inputs)
    slopes = torch.autograd.grad(value, (logp, entropy), materialize_grads=True)
    return value.item(), [slope[mask.bool()] for slope in slopes], trainer._metrics["train"]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "far off"])
def test_value_and_gradient_are_trls(trl, mode):
    options, beta, kind = MODES[mode]
    for (loss_type, level, allowed), seed in product(cases(options), range(3)):
        settings = LossSection(loss_type=loss_type, importance_sampling_level=level, **allowed)
        if loss_type == "cispo" and settings.epsilon_high is not None:
            settings.epsilon_high += 1  # there it bounds the ratio itself
        with named(loss_type, level, seed):
            check_against_trl(trl, settings, beta, completions(seed, **kind), answers=seed > 0)


def check_against_trl(trl, settings: LossSection, beta: float, batch: list[oracle.Completion], answers: bool) -> None:
    value, slopes, metrics = theirs(trl, batch, settings, beta, answers=answers)
    if not beta:
        batch = [oracle.replace(completion, ref=None) for completion in batch]
    if settings.top_entropy_quantile < 1:
        batch = oracle.mark_high_entropy(batch, settings.top_entropy_quantile)
    our_value, our_metrics, tokens = compute(batch, settings, beta)
    check_value_and_slopes(our_value, gradients(our_value, tokens), value, slopes)
    add_stats(stats := {}, our_metrics)
    both = stats.keys() & metrics.keys()
    assert {"entropy", *(["kl"] if beta else [])} <= both
    for name in both:
        # TRL's mean over sequences has the empty ones in it.
        of_sequences = settings.importance_sampling_level == "sequence" and name.endswith(("_mean", "clip_ratio"))
        count = len(batch) / stats[name].count if of_sequences else 1
        assert stats[name].metric / count == pytest.approx(metrics[name][0], rel=1e-5), name


def check_value_and_slopes(our_value: torch.Tensor, our_slopes, value: float, slopes) -> None:
    assert our_value.item() == pytest.approx(value, rel=1e-6)
    for our_slope, slope in zip(our_slopes, slopes, strict=True):
        torch.testing.assert_close(our_slope, slope, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("quantile", [1.0, 0.4])
def test_the_adaptive_entropy_bonus_is_trls(trl, quantile):
    """Step after step with one trainer: when it acts, with what coefficient, and what it is afterwards."""
    settings = LossSection(
        use_adaptive_entropy=True,
        entropy_coef=0.02,
        entropy_coef_min=0.01,
        entropy_coef_max=0.03,
        entropy_coef_delta=0.006,
        entropy_target=1.0 if quantile == 1 else 1.7,
        top_entropy_quantile=quantile,
    )
    trainer, coefficient, last, seen = trls_trainer(trl, settings, 0.0), settings.entropy_coef, None, []
    for seed, scale in enumerate([0.2, 0.3, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 1.0]):
        batch = [
            oracle.replace(completion, ref=None, entropy=[scale * value for value in completion.entropy])
            for completion in completions(seed)
        ]
        value, slopes, metrics = theirs(trl, batch, settings, 0.0, trainer)
        marked = oracle.mark_high_entropy(batch, quantile) if quantile < 1 else batch
        applied = applied_entropy_coef(coefficient, last, settings)
        our_value, our_metrics, tokens = compute(marked, settings, beta=0.0, entropy_coef=applied)
        last = our_metrics["entropy_acted_on:none"].double().nanmean().item()
        coefficient = adapt_entropy_coef(coefficient, last, settings)
        check_value_and_slopes(our_value, gradients(our_value, tokens), value, slopes)
        assert coefficient == metrics["entropy_coef"][-1]
        seen.append(applied)
    assert 0.0 in seen[1:] and len({*seen}) > 2  # it rests, and it moves


def test_both_report_the_same_metrics(trl):
    batch = completions(seed=1)
    for loss_type in LOSS_TYPES:
        for entropy_coef in (0.0, 0.1):
            level = level_of(loss_type)
            settings = LossSection(loss_type=loss_type, importance_sampling_level=level, entropy_coef=entropy_coef)
            _, _, metrics = theirs(trl, batch, settings, beta=0.3)
            _, ours, _ = compute(batch, settings)
            with named(loss_type, entropy_coef):
                names = {name.partition(":")[0] for name in ours}
                assert names == metrics.keys() - {"entropy_coef"}  # a coefficient is none of the loss's numbers


def test_the_rewards_deviation_is_trls(trl):
    """Of all rewards of a step, gathered from ranks with unequally many, without those that no function gave."""
    ranks = [[0.5, 2.0, math.nan, 2.0], [math.nan, math.nan], [0.1, 0.1, -3.0]]
    stats = sum((Stats.of(rewards) for rewards in ranks), Stats())
    expected = trl.nanstd(torch.tensor([reward for rewards in ranks for reward in rewards]))
    assert stats.std == pytest.approx(expected.item(), rel=1e-6)


def test_overlong_punishment_is_trls(trl):
    lengths = range(0, 30)
    for cache in (1, 5, 20):
        expected = trl.soft_overlong_punishment(20, cache)([[0] * length for length in lengths])
        assert soft_overlong_punishment(torch.tensor(lengths), 20, cache).tolist() == pytest.approx(expected, rel=1e-6)

"""Random ragged sequences for the tests of the loss, lists for the oracles and tensors for ours; settings to try."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch
from conftest import REPOSITORY
from oracle import Completion, size

from grpo.algorithm.loss import grpo_loss
from grpo.algorithm.loss_types import LOSSES, StepSize, Tokens
from grpo.config.loss_settings import UNUSED_BOUNDS, LossSection

LONGEST = 12
LENGTHS = [0, 1, 7, 1, 12, 3, 0, 6]
LOSS_TYPES = [*LOSSES]
LEVELS = [
    *product([loss_type for loss_type in LOSS_TYPES if loss_type != "luspo"], ["token"]),
    *product([loss_type for loss_type in LOSS_TYPES if loss_type != "vespo"], ["sequence"]),
]
"""each (loss_type, importance_sampling_level) that may be set"""


def cases(options: dict) -> Iterator[tuple[str, str, dict]]:
    """Yield (loss_type, importance_sampling_level, those of the options that may be set with both)."""
    for loss_type, level in LEVELS:
        if loss_type == "vespo" and options.get("importance_sampling_mode", "").startswith("sequence"):
            continue
        unused = UNUSED_BOUNDS.get(loss_type, ())
        yield loss_type, level, {name: options[name] for name in options if name not in unused}


def documented(folder: Path, file: str) -> str:
    """Write a file of docs/recipes.md to a folder; return its function as settings name it."""
    text = (REPOSITORY / "docs/recipes.md").read_text()
    (example,) = re.findall(rf"```python\n(# {file}.*?)```", text, re.DOTALL)
    (folder / file).write_text(example)
    return f"{folder / file}:{re.search(r'def (.*?)[(]', example)[1]}"


def level_of(loss_type: str) -> str:
    return "sequence" if loss_type == "luspo" else "token"


BOUNDS = {"importance_sampling_clip_max": 1.5, "importance_sampling_clip_min": 0.6}
EVERYTHING = {
    "delta": 1.7,
    "epsilon_high": 0.28,
    "use_bias_correction_kl": True,
    "entropy_coef": 0.02,
    "top_entropy_quantile": 0.4,
    "off_policy_mask_threshold": 0.05,
    "importance_sampling_mode": "token_mask",
}
"""settings that act on a loss, as many as go together"""
# Of each: what is set beside loss_type, level and estimator; beta; and what the sequences are like.
MODES = {
    "as drawn": ({}, 0.0, {"off_policy": False}),
    "off-policy": ({"epsilon_high": 0.28}, 0.0, {}),
    "far off": ({}, 0.3, {"far": True}),
    "delta": ({"delta": 1.3}, 0.0, {}),
    "KL": ({}, 0.3, {}),
    "KL as drawn": ({}, 0.3, {"off_policy": False}),
    "KL, bias corrected": ({"use_bias_correction_kl": True}, 0.3, {}),
    "entropy bonus": ({"entropy_coef": 0.02}, 0.0, {}),
    "top entropies": ({"top_entropy_quantile": 0.3}, 0.3, {}),
    "top entropies, bonus": ({"top_entropy_quantile": 0.3, "entropy_coef": 0.02}, 0.0, {}),
    "off-policy mask": ({"off_policy_mask_threshold": 0.05}, 0.3, {}),
    "off-policy mask, sampler": ({"off_policy_mask_threshold": 0.05}, 0.3, {"sampled": True}),
    **{
        mode: ({"importance_sampling_mode": mode, **BOUNDS}, 0.3, {"sampled": True})
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "as drawn, corrected": (
        {"importance_sampling_mode": "token_truncate", **BOUNDS, "off_policy_mask_threshold": 0.05},
        0.3,
        {"sampled": True, "off_policy": False},
    ),
    "everything": (EVERYTHING, 0.3, {"sampled": True}),
}
FAR = 25.0  # in log: beyond where ratios are clamped


def completions(seed: int, off_policy=True, sampled=False, far=False) -> list[Completion]:
    """Make sequences: some empty or of one token, one with advantage 0, a sampler that did not know every log-prob.

    `far`: log-ratios beyond the clamp both ways, of single tokens and of a whole sequence.
    """
    draw = random.Random(seed)
    made = []
    for number, length in enumerate(LENGTHS):
        logp = [-draw.uniform(0.01, 6) for _ in range(length)]
        old, ref, sampling = ([value + draw.gauss(0, 0.5) for value in logp] for _ in range(3))
        entropy = [draw.uniform(0, 4) for _ in logp]
        advantage = 0.0 if number == 5 else draw.gauss(0, 1)
        sampling = [math.nan if draw.random() < 0.2 else value for value in sampling]
        if far and length == 12:
            old = [value + draw.choice([-1, 1]) * FAR for value in logp[:6]] + old[6:]
            ref = ref[:6] + [value + draw.choice([-1, 1]) * FAR for value in logp[6:]]
        if far and length == 7:
            old = [value - FAR for value in logp]
        made.append(
            Completion(advantage, logp, entropy, old if off_policy else None, ref, sampling if sampled else None)
        )
    return made


def flat(rows: list[list[float] | None], dtype=torch.float64) -> torch.Tensor | None:
    if any(row is None for row in rows):
        return None
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def tokens_of(batch: list[Completion], dtype=torch.float64) -> Tokens:
    return Tokens(
        lengths=torch.tensor([len(completion.logp) for completion in batch], dtype=torch.int64),
        advantages=torch.tensor([completion.advantage for completion in batch], dtype=dtype),
        logprobs=flat([completion.logp for completion in batch], dtype).requires_grad_(),
        entropy=flat([completion.entropy for completion in batch], dtype).requires_grad_(),
        old_logprobs=flat([completion.old for completion in batch], dtype),
        ref_logprobs=flat([completion.ref for completion in batch], dtype),
        sampling_logprobs=flat([completion.sampling for completion in batch], dtype),
        high_entropy=flat([completion.high_entropy for completion in batch], torch.bool),
    )


def step_of(batch: list[Completion]) -> StepSize:
    step = size(batch)
    return StepSize(sequences=step.sequences, tokens=step.tokens, high_entropy_tokens=step.high_entropy_tokens)


def compute(
    batch: list[Completion], settings: LossSection, beta=0.3, dtype=torch.float64, device="cpu", **changes
) -> tuple[torch.Tensor, dict, Tokens]:
    """Compute our loss of sequences that are a whole step; return it with its metrics and what it depends on."""
    with torch.device(device):
        tokens = tokens_of(batch, dtype)
    step = {"step": step_of(batch), "entropy_coef": settings.entropy_coef, "max_completion_length": LONGEST} | changes
    return *grpo_loss(tokens, settings=settings, beta=beta, **step), tokens


def gradients(loss: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by log-probs and by entropies, zeros where the loss does not depend on them."""
    return torch.autograd.grad(loss, (tokens.logprobs, tokens.entropy), materialize_grads=True)


@contextmanager
def named(*case: object) -> Iterator[None]:
    """Begin the message of whatever fails inside with the case."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{', '.join(map(str, case))}: {error}") from error

"""A model on trial before the run: what it says of a sequence in any batch must be what it says of it alone.

Each trial feeds some forty tokens at a time: on a GPU all take well below a second, on a CPU the time to read the
weights about twelve times. Gradients are taken of vectors alone (norms, biases), which are small beside any matrix.

In 16 bit equal things differ: another kernel or another shape rounds otherwise, and layer after layer makes more of it.
How much is the model's own, so the trials measure it by what a different prompt does to the same completions. Last bits
changed by chance in every product of a trained model of 30 layers move log-probs 0.11 times as far, those of attention
alone 0.07 times; completions that see each other, positions that count on through the row, or a mask that is off by one
0.42 times and more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from transformers import (
    PreTrainedModel,
)

from grpo.config.errors import ConfigError
from grpo.model.load import NO_LIMIT
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher, Ids
from grpo.model.tree_attention import switch_off, switch_on, variants_for

log = logging.getLogger(__name__)

SAME = 0.2  # times as far as a different prompt moves log-probs in 16 bit: beyond, a batch goes a slower way
REFUSED = 0.3  # beyond, there is no run
SAME_GRADIENT = 0.6  # of its norm in 16 bit: the noise above makes 0.3, a gradient that is missing 1


@dataclass(frozen=True)
class Answer:
    """What a model gives for one batch."""

    logprobs: torch.Tensor
    slopes: list[torch.Tensor | None]
    """the gradient by each vector of the model, None by one that takes no part; none where nothing is trained"""


@dataclass(frozen=True)
class Padded:
    """What a model gives for a padded batch, which others are held against."""

    answer: Answer
    effect: float
    """how far different prompts move the log-probs"""


def check_padded(model: PreTrainedModel, pad_token_id: int) -> Padded:
    """Try padded batches, the update's forward pass among them, and return what one gives.

    Raises ConfigError where a token's log-prob depends on what stands behind it, or on whether gradients are taken.
    """
    batcher, sequences = Batcher(pad_token_id, longest_packed=0), _sequences(model)
    group = sequences[4:]
    with torch.no_grad():
        padded, _ = token_logprobs(model, batcher.make(sequences, model.device), 1.0)
        begun, _ = token_logprobs(
            model, batcher.make([(prompt, rest[:2]) for prompt, rest in group], model.device), 1.0
        )
        moved, _ = token_logprobs(model, batcher.make(_sequences(model, prompts_at=5), model.device), 1.0)
    name, effect = type(model).__name__, _apart(moved, padded)
    of_group = padded.split([len(rest) for _, rest in sequences])[4:]
    difference = _apart(begun, torch.cat([logprobs[:2] for logprobs in of_group]))
    if not difference <= _refusal(model, effect):
        raise ConfigError(
            f"{name} gives a token another log-prob when other tokens follow it (by {difference:.1e} on average), so "
            "it is no causal model: use another one"
        )
    answer = _answer(model, batcher)
    if not (difference := _apart(answer.logprobs, padded)) <= _refusal(model, effect):
        raise ConfigError(
            f"gradient_checkpointing=True: {name} gives other log-probs while its layers recompute their activations "
            f"(by {difference:.1e} on average): set it to false"
        )
    return Padded(answer, effect)


def packed_differs(model: PreTrainedModel, padded: Padded) -> str | None:
    """None where a packed batch gives what a padded one gave, else what went wrong."""
    try:
        packed = _answer(model, Batcher(0, longest_packed=2**31 - 1))
    # A model whose code takes no tree may fail in any way; the padded path is then the answer, and the log says why.
    except Exception as error:
        return f"takes no packed batch ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    difference = _apart(packed.logprobs, padded.answer.logprobs)
    if not difference <= (1e-4 if model.dtype == torch.float32 else SAME * padded.effect):
        compared = f"by {difference:.1e} on average, different prompts by {padded.effect:.1e}"
        return f"gives other log-probs in packed batches ({compared})"
    # Equal log-probs may hide what only training shows: Doge's masks begin as ones, and learn.
    difference = _distance(packed.slopes, padded.answer.slopes)
    if not difference <= (1e-3 if model.dtype == torch.float32 else SAME_GRADIENT):
        return f"gives other gradients in packed batches (by {difference:.1e} of their size)"
    return None


def _sequences(model: PreTrainedModel, prompts_at: int = 0) -> list[tuple[Ids, Ids]]:
    """Two groups of four, no sequence longer than 8 tokens: no window is so small. `prompts_at=5`: different prompts.

    Several completions that follow others in their row, so that most log-probs show what a mask or a position does.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = [(7919 * place + 13) % vocabulary for place in range(43)]
    prompts, rest = iter(ids[prompts_at:]), iter(ids[10:])
    groups = {3: (5, 3, 5, 5), 2: (4, 4, 4, 3)}
    return [
        (prompt, [*islice(rest, length)])
        for tokens, lengths in groups.items()
        for prompt in [[*islice(prompts, tokens)]]
        for length in lengths
    ]


def _refusal(model: PreTrainedModel, effect: float) -> float:
    """How far apart log-probs may be in a run; 0.2 also where nothing that precedes a token moves them much."""
    return 1e-2 if model.dtype == torch.float32 else max(0.2, REFUSED * effect)


def _apart(logprobs: torch.Tensor, others: torch.Tensor) -> float:
    """The root mean square of the difference."""
    return (logprobs - others).square().mean().sqrt().item()


def _answer(model: PreTrainedModel, batcher: Batcher) -> Answer:
    """Of `_sequences`; with gradients where the model is to be trained."""
    batch = batcher.make(_sequences(model), model.device)
    if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in model.parameters()):
        with torch.no_grad():
            return Answer(token_logprobs(model, batch, 1.0)[0], [])
    with _vectors_trained(model) as vectors:
        logprobs, _ = token_logprobs(model, batch, 1.0)
        loss = (logprobs * torch.linspace(-1, 2, len(logprobs), device=logprobs.device)).sum()
        slopes = torch.autograd.grad(loss, vectors, allow_unused=True) if vectors else []
    return Answer(logprobs.detach(), [*slopes])


@contextmanager
def _vectors_trained(model: PreTrainedModel) -> Iterator[list[nn.Parameter]]:
    """Within, gradients are taken of the model's vectors and of nothing else, so that no matrix needs room for one."""
    weights = [*model.parameters()]
    trained = [weight.requires_grad for weight in weights]
    vectors = [weight for weight in weights if weight.ndim < 2]
    model.requires_grad_(False)
    try:
        for vector in vectors:
            vector.requires_grad_()
        yield vectors
    finally:
        for weight, was_trained in zip(weights, trained, strict=True):
            weight.requires_grad_(was_trained)


def _distance(slopes: list[torch.Tensor | None], others: list[torch.Tensor | None]) -> float:
    """The norm of the difference over that of `others`; infinite where another vector takes part."""
    if [slope is None for slope in slopes] != [other is None for other in others]:
        return torch.inf
    pairs = [(slope.float(), other.float()) for slope, other in zip(slopes, others, strict=True) if slope is not None]
    error = sum((slope - other).square().sum().item() for slope, other in pairs)
    size = sum(other.square().sum().item() for _, other in pairs)
    return (error / size) ** 0.5 if size else 0.0


def make_batcher(model: PreTrainedModel, pad_token_id: int) -> Batcher:
    """Packed batches with shared prompts where the model allows them, padded ones where it does not; says which once.

    What a model's configuration does not tell is tried (grpo/model/trial.py). Raises ConfigError where even padded
    batches cannot be trusted.
    """
    longest, reason = _longest_packed(model)
    padded, name = check_padded(model, pad_token_id), type(model).__name__
    variants = variants_for(model) if longest else []
    for variant in variants:
        switch_on(model, variant)
        if (reason := packed_differs(model, padded)) is None:
            limit = "" if longest == NO_LIMIT else f" up to {longest} tokens a sequence, its attention's window"
            log.info("log-probs in packed batches, each prompt once (%s)%s", variant, limit)
            return Batcher(pad_token_id, longest)
        switch_off(model)
        if variant != variants[-1]:
            log.warning("attention over packed batches goes a slower way than %s: %s %s", variant, name, reason)
    if variants and model.device.type != "cpu":
        lost = "Scoring and updates take several times as long as packed: each completion's prompt is computed again"
        log.warning("log-probs in padded batches: %s %s. %s", name, reason, lost)
    else:
        log.info("log-probs in padded batches: %s %s", name, reason)
    return Batcher(pad_token_id, longest_packed=0)


def _longest_packed(model: PreTrainedModel) -> tuple[int, str]:
    """How long a sequence may be to be packed, and where that is 0, why."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    if other := kinds - {"full_attention", "sliding_attention"}:
        return 0, f"has layers of type {min(other)}"
    window = getattr(config, "sliding_window", None)
    if window is None or (kinds and "sliding_attention" not in kinds):
        return NO_LIMIT, ""
    return window, ""  # nothing is out of sight of a sequence that fits the window

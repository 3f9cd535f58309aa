"""Checks of a model at the start of a run: its log-probs of a sequence must not depend on the batch.

Each check feeds about forty tokens at a time: on a GPU all checks take well below a second, on a CPU the time to read
the weights about twelve times. Gradients are computed for vectors alone (norms, biases), which are small beside any
matrix.

In 16 bit equal computations differ: another kernel or another shape rounds differently, and every layer amplifies the
difference. By how much depends on the model, so the checks compare it with the effect of a different prompt on the same
completions. Random last bits in every product of a trained model of 30 layers move log-probs 0.11 times as far, those
of attention alone 0.07 times; completions that see each other, positions that count on through the row, or a mask that
is off by one, 0.42 times and more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo.config.errors import ConfigError
from grpo.model.devices import is_out_of_memory
from grpo.model.load import NO_LIMIT
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher, Ids
from grpo.model.pictures import PictureProcessor, Vision
from grpo.model.tree_attention import switch_off, switch_on, variants_for

log = logging.getLogger(__name__)

# In 16 bit, as shares of how far a different prompt moves log-probs:
SAME = 0.2  # a larger difference makes batches use a slower way
REFUSED = 0.3  # a larger difference refuses the model
SAME_GRADIENT = 0.6  # share of the gradient's norm in 16 bit: the noise above makes 0.3, a missing gradient 1


@dataclass(frozen=True)
class TrialResult:
    """The log-probs and gradients of one batch."""

    logprobs: Tensor
    slopes: list[Tensor | None]
    """the gradient of each vector of the model, None for one that takes no part; empty without training"""
    effect: float = 0.0
    """of a padded batch: how far different prompts move the log-probs"""


def check_padded(model: PreTrainedModel, pad_token_id: int, vision: Vision | None = None) -> TrialResult:
    """Check padded batches, also with the update's forward pass, and return the result of one.

    Raises ConfigError if a token's log-prob depends on later tokens, or on whether gradients are computed, and if the
    model does not compute all of its gradient.
    """
    batcher, sequences = Batcher(pad_token_id, longest_packed=0, vision=vision), trial_sequences(model, vision)
    others, group = trial_sequences(model, vision, prompts_at=5), sequences[4:]
    with torch.no_grad():
        padded, _ = token_logprobs(model, batcher.make(sequences, model.device), 1.0)
        cut_off = [(prompt, completion[:2]) for prompt, completion in group]
        shortened, _ = token_logprobs(model, batcher.make(cut_off, model.device), 1.0)
        moved, _ = token_logprobs(model, batcher.make(others, model.device), 1.0)
    name, effect = type(model).__name__, distance(moved, padded)
    of_group = padded.split([len(completion) for _, completion in sequences])[4:]
    difference = distance(shortened, torch.cat([logprobs[:2] for logprobs in of_group]))
    if not difference <= refused_distance(model, effect):
        raise ConfigError(
            f"{name} gives a token another log-prob when other tokens follow it (by {difference:.1e} on average), so "
            "it is no causal model: use another one"
        )
    answer = _answer(model, batcher)
    if not (difference := distance(answer.logprobs, padded)) <= refused_distance(model, effect):
        raise ConfigError(
            f"gradient_checkpointing=True: {name} gives other log-probs while its layers recompute their activations "
            f"(by {difference:.1e} on average): set it to false"
        )
    return replace(answer, effect=effect)


def packed_differs(model: PreTrainedModel, padded: TrialResult, vision: Vision | None = None) -> str | None:
    """Return None if a packed batch gives the answer of a padded one, else the reason as part of a sentence."""
    try:
        packed = _answer(model, Batcher(0, longest_packed=2**31 - 1, vision=vision))
    # A model whose code takes no tree may fail in any way; then batches are padded, and the log says why.
    except Exception as error:
        if is_out_of_memory(error):  # says nothing about the model
            raise
        return f"takes no packed batch ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    difference = distance(packed.logprobs, padded.logprobs)
    if not difference <= (1e-4 if model.dtype == torch.float32 else SAME * padded.effect):
        compared = f"by {difference:.1e} on average, different prompts by {padded.effect:.1e}"
        return f"gives other log-probs in packed batches ({compared})"
    # Equal log-probs may hide what only training shows: Doge's masks begin as ones and are trained.
    difference = _gradient_distance(packed.slopes, padded.slopes)
    if not difference <= (1e-3 if model.dtype == torch.float32 else SAME_GRADIENT):
        return f"gives other gradients in packed batches (by {difference:.1e} of their size)"
    return None


def trial_sequences(model: PreTrainedModel, vision: Vision | None = None, prompts_at: int = 0) -> list[tuple[Ids, Ids]]:
    """Make two groups of four sequences of at most 8 tokens: no window is so small. `prompts_at=5`: different prompts.

    Several completions follow others in their row, so that masks and positions show in most log-probs. A model that
    takes pictures gets a third group, with two pictures of different sizes before its prompt, or with one if two do not
    fit its attention's window.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = ((7919 * place + 13) % vocabulary for place in count())
    # A text that has the id of a picture's piece would be taken for more of the picture.
    ids = [*islice((value for value in ids if vision is None or value != vision.token_id), 43)]
    prompts, completions = iter(ids[prompts_at:]), iter(ids[10:])
    groups = {3: (5, 3, 5, 5), 2: (4, 4, 4, 3)}
    sequences = [
        (prompt, [*islice(completions, length)])
        for tokens, lengths in groups.items()
        for prompt in [[*islice(prompts, tokens)]]
        for length in lengths
    ]
    if vision is None:
        return sequences
    for pictures in (2, 1):
        prompt = vision.trial_prompt(pictures, sequences[-1][0], seed=prompts_at)
        pictured = [(prompt, completion) for _, completion in sequences[:4]]
        if _longest(pictured) <= longest_packed(model)[0]:
            break
    return sequences + pictured


def _longest(sequences: list[tuple[Ids, Ids]]) -> int:
    return max(len(prompt) + len(completion) for prompt, completion in sequences)


def refused_distance(model: PreTrainedModel, effect: float) -> float:
    """Return the largest distance of log-probs in a run; in 16 bit at least 0.2, even if prompts move them little."""
    return 1e-2 if model.dtype == torch.float32 else max(0.2, REFUSED * effect)


def distance(logprobs: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference."""
    return (logprobs - expected).square().mean().sqrt().item()


def _answer(model: PreTrainedModel, batcher: Batcher) -> TrialResult:
    """Compute the answer for `trial_sequences`, with gradients if the model is to be trained.

    Raises ConfigError if no vector has a gradient: HRM-Text's only one begins its first cycle, which its code runs
    under torch.no_grad.
    """
    batch = batcher.make(trial_sequences(model, batcher.vision), model.device)
    if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in model.parameters()):
        with torch.no_grad():
            return TrialResult(token_logprobs(model, batch, 1.0)[0], [])
    with _vectors_trained(model) as vectors:
        logprobs, _ = token_logprobs(model, batch, 1.0)
        loss = (logprobs * torch.linspace(-1, 2, len(logprobs), device=logprobs.device)).sum()
        if vectors and not loss.requires_grad:
            raise ConfigError(
                f"{type(model).__name__} computes parts of its log-probs without gradients, so an update would follow "
                "only a part of theirs: use another model"
            )
        slopes = torch.autograd.grad(loss, vectors, allow_unused=True) if vectors else []
    return TrialResult(logprobs.detach(), [*slopes])


@contextmanager
def _vectors_trained(model: PreTrainedModel) -> Iterator[list[nn.Parameter]]:
    """Compute gradients of the model's vectors alone within, so that no matrix needs memory for one."""
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


def _gradient_distance(slopes: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """Return the norm of the difference over that of `expected`; infinite where other vectors take part."""
    if [slope is None for slope in slopes] != [slope is None for slope in expected]:
        return torch.inf
    pairs = [(slope.float(), right.float()) for slope, right in zip(slopes, expected, strict=True) if slope is not None]
    error = sum((slope - right).square().sum().item() for slope, right in pairs)
    size = sum(right.square().sum().item() for _, right in pairs)
    return (error / size) ** 0.5 if size else 0.0


def make_batcher(model: PreTrainedModel, pad_token_id: int, processor: PictureProcessor | None = None) -> Batcher:
    """Choose packed batches with shared prompts if the model allows them, else padded ones, and log the choice.

    With the model's `processor` it takes prompts with pictures too. A model's configuration does not tell enough, so
    the model is tried. Raises ConfigError if even padded batches cannot be trusted.
    """
    longest, reason = longest_packed(model)
    vision = Vision(processor, model) if processor is not None else None
    padded, name = check_padded(model, pad_token_id, vision), type(model).__name__
    if longest and _longest(trial_sequences(model, vision)) > longest:
        longest, reason = 0, f"has an attention window of {longest} tokens, and a picture more"
    variants = variants_for(model) if longest else []
    for variant in variants:
        switch_on(model, variant)
        if (reason := packed_differs(model, padded, vision)) is None:
            limit = "" if longest == NO_LIMIT else f" up to {longest} tokens a sequence, its attention's window"
            log.info("log-probs in packed batches, each prompt once (%s)%s", variant, limit)
            return Batcher(pad_token_id, longest, vision)
        switch_off(model)
        if variant != variants[-1]:
            log.warning("attention over packed batches goes a slower way than %s: %s %s", variant, name, reason)
    if variants and model.device.type != "cpu":
        lost = "Scoring and updates take several times as long as packed: each completion's prompt is computed again"
        log.warning("log-probs in padded batches: %s %s. %s", name, reason, lost)
    else:
        log.info("log-probs in padded batches: %s %s", name, reason)
    return Batcher(pad_token_id, 0, vision)


def longest_packed(model: PreTrainedModel) -> tuple[int, str]:
    """Return the tokens of the longest sequence that may be packed, and for 0 the reason."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or [])
    if unknown := layer_types - {"full_attention", "sliding_attention"}:
        return 0, f"has layers of type {min(unknown)}"
    window = getattr(config, "sliding_window", None)
    if window is None or (layer_types and "sliding_attention" not in layer_types):
        return NO_LIMIT, ""
    return window, ""  # a sequence that fits the window sees all its tokens

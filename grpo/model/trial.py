"""Checks of a model at the start of a run: its log-probs of a sequence must not depend on the batch.

Each check feeds about forty tokens at a time. Gradients are computed for vectors alone (norms, biases), or for an
adapter: they are small beside the model's matrices.

In 16 bit equal computations differ: another kernel or another shape rounds differently, and every layer amplifies the
difference. By how much depends on the model, so the checks compare it with the effect of a different prompt on the same
completions. Random last bits in every product of a trained model of 30 layers move log-probs 0.11 times as far, those
of attention alone 0.07 times; completions that see each other, positions that count on through the row, or a mask that
is off by one, 0.42 times and more.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from grpo.config.errors import ConfigError, one_line, require
from grpo.model.devices import is_out_of_memory
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher, Ids, RowRanks
from grpo.model.pictures import PictureProcessor, Vision, takes_pictures
from grpo.model.sharded import shape_of
from grpo.model.tree_attention import switch_off, switch_on, variants_for

log = logging.getLogger(__name__)

# In 16 bit, as shares of how far a different prompt moves log-probs:
SAME = 0.2  # a larger difference makes batches use a slower way
REFUSED = 0.3  # a larger difference refuses the model
SAME_GRADIENT = 0.6  # share of the gradient's norm in 16 bit: the noise above makes 0.3, a missing gradient 1
WINDOW = 5  # tokens of an attention's window in a trial


@dataclass(frozen=True)
class TrialResult:
    """The log-probs and gradients of one batch."""

    logprobs: Tensor
    slopes: list[Tensor | None]
    """the gradient of each trained vector or adapter, None for one that takes no part; empty without training"""
    effect: float = 0.0  # of a padded batch: how far different prompts move the log-probs


def check_padded(model: PreTrainedModel, pad_token_id: int, vision: Vision | None = None) -> TrialResult:
    """Check padded batches, also with the update's forward pass, and return the result of one. Raises ConfigError if a
    token's log-prob depends on later tokens or on whether gradients are computed."""
    batcher, sequences = Batcher(pad_token_id, packs=False, vision=vision), trial_sequences(model, vision)
    cut_off = [(prompt, completion[:2]) for prompt, completion in sequences[4:]]
    others = trial_sequences(model, vision, prompts_at=5)
    with torch.no_grad():
        padded, shortened, moved = (
            token_logprobs(model, batcher.make(rows, model.device), 1.0)[0] for rows in (sequences, cut_off, others)
        )
    name, effect = type(model).__name__, distance(moved, padded)
    of_group = padded.split([len(completion) for _, completion in sequences])[4:]
    difference = distance(shortened, torch.cat([logprobs[:2] for logprobs in of_group]))
    if not difference <= refused_distance(model, effect):
        reason = f"gives a token another log-prob when other tokens follow it (by {difference:.1e} on average)"
        raise ConfigError(f"{name} {reason}, so it is no causal model: use another one")
    answer = _answer(model, batcher)
    difference = distance(answer.logprobs, padded)
    reason = f"{name} gives other log-probs (by {difference:.1e} on average) while its layers recompute activations"
    same = difference <= refused_distance(model, effect)
    require(same, "gradient_checkpointing", True, f"{reason}: set it to false")
    return replace(answer, effect=effect)


def packed_differs(model: PreTrainedModel, padded: TrialResult, vision: Vision | None = None) -> str | None:
    """Return None if a packed batch gives the answer of a padded one, else the reason as part of a sentence."""
    try:
        packed = _answer(model, Batcher(0, packs=True, vision=vision))
    # A model whose code takes no tree may fail in any way; then batches are padded, and the log says why.
    except Exception as error:
        if is_out_of_memory(error):  # says nothing about the model
            raise
        return f"takes no packed batch ({type(error).__name__}: {one_line(error)})"
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
    """Make two groups of four sequences of at most 8 tokens. `prompts_at=5`: different prompts. A third group has two
    pictures before its prompt."""
    vocabulary = shape_of(model.get_input_embeddings().weight)[0]
    # A text that has the id of a picture's piece would be taken for more of the picture.
    piece = vision.token_id if vision is not None else None
    ids = [token for place in range(90) if (token := (7919 * place + 13) % vocabulary) != piece]
    completions = iter(ids[10:])
    groups = (ids[prompts_at : prompts_at + 3], (5, 3, 5, 5)), (ids[prompts_at + 3 : prompts_at + 5], (4, 4, 4, 3))
    sequences = [(prompt, [*islice(completions, length)]) for prompt, lengths in groups for length in lengths]
    if vision is None:
        return sequences
    prompt = vision.trial_prompt(2, sequences[-1][0], seed=prompts_at)
    return sequences + [(prompt, completion) for _, completion in sequences[:4]]


@contextmanager
def small_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shrink the windows of the model's attention, so that within even a trial's tokens are beyond them."""
    holders = [model.config.get_text_config(), *model.modules()]
    windows = [(holder, window) for holder in holders if (window := getattr(holder, "sliding_window", None))]
    try:
        for holder, _ in windows:
            holder.sliding_window = WINDOW
        yield
    finally:
        for holder, window in windows:
            holder.sliding_window = window


def refused_distance(model: PreTrainedModel, effect: float) -> float:
    """Return the largest distance of log-probs in a run; in 16 bit at least 0.2, even if prompts move them little."""
    return 1e-2 if model.dtype == torch.float32 else max(0.2, REFUSED * effect)


def distance(logprobs: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference."""
    return (logprobs - expected).square().mean().sqrt().item()


def _answer(model: PreTrainedModel, batcher: Batcher) -> TrialResult:
    """Compute the answer for `trial_sequences`, with gradients if the model is to be trained."""
    batch = batcher.make(trial_sequences(model, batcher.vision), model.device)
    logprobs, _ = token_logprobs(model, batch, 1.0)
    if not logprobs.requires_grad:
        return TrialResult(logprobs, [])
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    vectors = [weight for weight in trained if weight.ndim < 2]
    if not vectors:  # an adapter's matrices are small; of a model without weights of norms a few must do
        vectors = trained if hasattr(model, "peft_config") else sorted(trained, key=Tensor.numel)[:8]
    loss = (logprobs * torch.linspace(-1, 2, len(logprobs), device=logprobs.device)).sum()
    slopes = torch.autograd.grad(loss, vectors, allow_unused=True)
    return TrialResult(logprobs.detach(), [*slopes])


def _gradient_distance(slopes: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """Return the norm of the difference over that of `expected`; infinite where other vectors take part."""
    if [slope is None for slope in slopes] != [slope is None for slope in expected]:
        return torch.inf
    error = size = 0.0
    for slope, right in zip(slopes, expected, strict=True):
        if slope is not None:
            right = right.float()
            error += (slope.float() - right).square().sum().item()
            size += right.square().sum().item()
    return (error / size) ** 0.5 if size else 0.0


def make_batcher(model: PreTrainedModel, pad_token_id: int, processor: PictureProcessor | None = None) -> Batcher:
    """Choose packed batches with shared prompts if the model allows them, else padded ones, and log the choice. A
    configuration does not tell enough, so the model is tried. Raises ConfigError if even padded batches cannot be
    trusted. With the model's `processor` the batches take prompts with pictures too."""
    vision = Vision(processor, model) if processor is not None else None
    with small_windows(model):
        padded, name, reason = check_padded(model, pad_token_id, vision), type(model).__name__, never_packed(model)
        variants = [] if reason else variants_for(model)
        for variant in variants:
            switch_on(model, variant)
            if (reason := packed_differs(model, padded, vision)) is None:
                log.info("log-probs in packed batches, each prompt once (%s)", variant)
                return Batcher(pad_token_id, packs=True, vision=vision)
            switch_off(model)
            if variant != variants[-1]:
                log.warning("attention over packed batches goes a slower way than %s: %s %s", variant, name, reason)
    level = logging.WARNING if variants and model.device.type != "cpu" else logging.INFO
    log.log(level, "log-probs in padded batches, which compute each completion's prompt again: %s %s", name, reason)
    return Batcher(pad_token_id, packs=False, vision=vision)


def check_shares(config: PreTrainedConfig, ranks: int) -> None:
    """Raise ConfigError if so many ranks cannot share rows of the model."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    fits = heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)
    reason = f"the model has {heads} attention heads and {keys} key heads, which so many ranks cannot share equally"
    require(fits, "sequence_parallel_size", ranks, f"{reason}: use another number")
    reason = "the model takes pictures, whose pieces are not shared out"
    require(not takes_pictures(config), "sequence_parallel_size", ranks, f"{reason}: leave it out")


@torch.no_grad()
def share_rows(batcher: Batcher, model: PreTrainedModel, size: int) -> Batcher:
    """Return a batcher whose rows `size` ranks share; all call it together. Refuses a model that does not allow it."""
    if size == 1:
        return batcher
    setting, name = ("sequence_parallel_size", size), type(model).__name__
    require(batcher.packs, *setting, f"{name} takes no packed batches: leave it out")
    shared = replace(batcher, ranks=RowRanks.of(size))
    rows, others = trial_sequences(model), trial_sequences(model, prompts_at=5)
    in_parts, whole, moved = (
        token_logprobs(model, of.make(sequences, model.device), 1.0)[0]
        for of, sequences in ((shared, rows), (batcher, rows), (batcher, others))
    )
    difference = distance(in_parts, whole)
    same = 1e-4 if model.dtype == torch.float32 else SAME * distance(moved, whole)
    reason = f"{name} gives other log-probs in shared rows (by {difference:.1e} on average)"
    require(difference <= same, *setting, f"{reason}: leave it out")
    return shared


def never_packed(model: PreTrainedModel) -> str:
    """Return why the model's batches are padded, as part of a sentence; empty if the trial is to tell."""
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    unknown = layer_types - {"full_attention", "sliding_attention"}
    return f"has layers of type {min(unknown)}" if unknown else ""

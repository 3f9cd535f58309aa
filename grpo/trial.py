"""A model on trial before the run: what it says of a sequence in any batch must be what it says of it alone.

Each trial feeds some twenty tokens at a time: on a GPU all take well below a second, on a CPU the time to read the
weights about twelve times. Gradients are taken of vectors alone (norms, biases), which are small beside any matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo.batch import Batcher, Ids
from grpo.config import ConfigError
from grpo.logprobs import token_logprobs
from grpo.records import Example
from grpo.rollout import Sampler


@dataclass(frozen=True)
class Answer:
    """What a model gives for one batch."""

    logprobs: torch.Tensor
    slopes: list[torch.Tensor | None]
    """the gradient by each vector of the model, None by one that takes no part; none where nothing is trained"""


def check_padded(model: PreTrainedModel, pad_token_id: int) -> Answer:
    """Try padded batches, the update's forward pass among them, and return what one gives.

    Raises ConfigError where a token's log-prob depends on what stands behind it, or on whether gradients are taken.
    """
    batcher, sequences = Batcher(pad_token_id, longest_packed=0), _sequences(model)
    *_, shortest = sequences
    with torch.no_grad():
        padded, _ = token_logprobs(model, batcher.make(sequences, model.device), 1.0)
        alone, _ = token_logprobs(model, batcher.make([shortest], model.device), 1.0)
    name = type(model).__name__
    if not (difference := _mean(padded[-len(alone) :] - alone)) <= _rounding(model, 1e-2, 0.2):
        raise ConfigError(
            f"{name} gives a token another log-prob when other tokens follow it (by {difference:.1e} on average), so "
            "it is no causal model: use another one"
        )
    answer = _answer(model, batcher)
    if not (difference := _mean(answer.logprobs - padded)) <= _rounding(model, 1e-2, 0.2):
        raise ConfigError(
            f"gradient_checkpointing=True: {name} gives other log-probs while its layers recompute their activations "
            f"(by {difference:.1e} on average): set it to false"
        )
    return answer


def packed_differs(model: PreTrainedModel, padded: Answer) -> str | None:
    """None where a packed batch gives what a padded one gave, else what went wrong."""
    try:
        packed = _answer(model, Batcher(0, longest_packed=2**31 - 1))
    # A model whose code takes no tree may fail in any way; the padded path is then the answer, and the log says why.
    except Exception as error:
        return f"takes no packed batch ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    difference = _mean(packed.logprobs - padded.logprobs)
    if not difference <= _rounding(model, 1e-4, 0.1):
        return f"gives other log-probs in packed batches (by {difference:.1e} on average)"
    # Equal log-probs may hide what only training shows: Doge's masks begin as ones, and learn.
    difference = _distance(packed.slopes, padded.slopes)
    if not difference <= _rounding(model, 1e-3, 0.3):
        return f"gives other gradients in packed batches (by {difference:.1e} of their size)"
    return None


def check_sampling(model: PreTrainedModel, sampler: Sampler, pad_token_id: int) -> None:
    """Try two completions of a prompt that is drawn for beside a longer one, so that it is padded on the left.

    Raises ConfigError where the model cannot draw them, or the log-probs that they are drawn with are not those that
    the loss gives them.
    """
    *_, (longer, rest), (prompt, _) = _sequences(model)
    examples = [Example(0, "", [*ids], {}) for ids in (prompt, [*longer, *rest])]
    try:
        drawn, _ = sampler.sample(model, examples, 2, 1.0, seed=0)
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    # generate() runs the model's own code, which may fail in any way.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"{type(model).__name__} cannot draw tokens ({reason}): use another model") from error
    sequences = [(prompt, rollout.completion_ids) for rollout in drawn]
    with torch.no_grad():
        scored, _ = token_logprobs(model, Batcher(pad_token_id, longest_packed=0).make(sequences, model.device), 1.0)
    difference = _mean(scored.cpu() - torch.tensor([value for rollout in drawn for value in rollout.sampling_logprobs]))
    if not difference <= _rounding(model, 1e-2, 0.2):
        raise ConfigError(
            f"{type(model).__name__} draws tokens with other log-probs (by {difference:.1e} on average) than it gives "
            "them afterwards, in a batch with a longer prompt: use another model"
        )


def _sequences(model: PreTrainedModel) -> list[tuple[Ids, Ids]]:
    """Two groups of two, no longer than 8 tokens: no window is so small. The last is half as long."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = [(7919 * place + 13) % vocabulary for place in range(24)]
    return [(ids[:4], ids[6:10]), (ids[:4], ids[10:13]), (ids[4:6], ids[13:19]), (ids[4:6], ids[19:21])]


def _rounding(model: PreTrainedModel, single: float, half: float) -> float:
    """How far apart equal things may be, by dtype.

    16 bit: another order of the same sums moves a log-prob by some hundredths; another context, by whole units. A
    limit beyond which a run is refused is wider than one beyond which it goes a slower way.
    """
    return single if model.dtype == torch.float32 else half


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


def _mean(difference: torch.Tensor) -> float:
    return difference.abs().mean().item()


def _distance(slopes: list[torch.Tensor | None], others: list[torch.Tensor | None]) -> float:
    """The norm of the difference over that of `others`; infinite where another vector takes part."""
    if [slope is None for slope in slopes] != [other is None for other in others]:
        return torch.inf
    pairs = [(slope.float(), other.float()) for slope, other in zip(slopes, others, strict=True) if slope is not None]
    error = sum((slope - other).square().sum().item() for slope, other in pairs)
    size = sum(other.square().sum().item() for _, other in pairs)
    return (error / size) ** 0.5 if size else 0.0

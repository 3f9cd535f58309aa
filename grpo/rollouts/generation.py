"""transformers' `generate`, made to draw from what the loss scores, and how long after each token it may.

Left padding is in here only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, count

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from grpo.model.logprobs import Head, text_at
from grpo.model.lora import frozen_norms
from grpo.model.pictures import Vision
from grpo.rollouts.draw import draw, in_blocks

LOOK_EVERY = 16  # tokens
HALF = (torch.bfloat16, torch.float16)


def generate(
    model: PreTrainedModel,
    contexts: Sequence[tuple[Sequence[int], list[int]]],
    draws: Draws,
    tokens: int,
    eos_token_ids: list[int],
    pad_token_id: int,
    vision: Vision | None,
    criteria: Sequence[StoppingCriteria] = (),
) -> torch.Tensor:
    """Draw up to `tokens` tokens after each context, a prompt and what there is of its completion.

    Returns int64 [contexts, width + tokens drawn]; `width` is the longest context's length. A row that has ended goes
    on with padding.
    """
    # Every token is drawn in `Draws`; generate() takes the one with the highest score.
    settings = GenerationConfig(do_sample=False, max_new_tokens=tokens)
    settings.eos_token_id, settings.pad_token_id = eos_token_ids, pad_token_id
    width = max(len(prompt) + len(begun) for prompt, begun in contexts)
    input_ids = torch.full((len(contexts), width), pad_token_id, dtype=torch.int64)
    attention_mask, is_begun = torch.zeros_like(input_ids), torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (prompt, begun) in enumerate(contexts):
        start = width - len(prompt) - len(begun)
        input_ids[row, start:] = torch.tensor([*prompt, *begun])
        attention_mask[row, start:] = 1
        is_begun[row, width - len(begun) :] = True
    # A completion may have ids that stand for a piece of a picture: they are text.
    places = None
    if vision is not None and (text := is_begun & (input_ids == vision.token_id)).any():
        places = text.flatten().nonzero()[:, 0].to(model.device)
    # generate() fills what we leave unset from the model's own generation config (Qwen2.5: a repetition penalty), which
    # would draw from another distribution than the loss scores. So it has none while we draw.
    models_config, model.generation_config = model.generation_config, settings
    try:
        with (
            policy_that_draws(model),
            _exact_head(model),
            text_at(model, input_ids.to(model.device), places) as shown,
        ):
            pictures = vision.for_generate([prompt for prompt, _ in contexts], shown) if vision is not None else {}
            ids = model.generate(
                input_ids=shown,
                attention_mask=attention_mask.to(model.device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([draws]),
                stopping_criteria=StoppingCriteriaList([*criteria]),
                **pictures,
            )
    finally:
        model.generation_config = models_config
    return ids


class Draws(LogitsProcessor):
    """Draws each token itself, from what dividing the logits by the temperature makes, and leaves no other choice."""

    def __init__(self, temperature: float, numbers: torch.Tensor | None):
        """`numbers`: float64 [rows, tokens]; None draws greedily."""
        self._temperature, self._numbers = temperature, numbers
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._temperature != 1:
            scores = scores / self._temperature
        numbers = None if self._numbers is None else self._numbers[:, len(self._columns)]
        tokens, logprobs = draw(in_blocks(scores), numbers)
        self._columns.append(logprobs)
        return torch.zeros_like(scores).scatter_(1, tokens.unsqueeze(1), 1.0)

    def logprobs(self) -> torch.Tensor:
        """Return float32 [rows, tokens drawn so far]."""
        return torch.stack(self._columns, dim=1)


class TokenStream(StoppingCriteria):
    """A criterion that shows a single completion's ids after each token, and stops where `on_token` returns True."""

    def __init__(self, prompt_length: int, on_token: Callable[[list[int]], bool]):
        self._prompt_length, self._on_token = prompt_length, on_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options) -> torch.Tensor:
        stop = self._on_token(input_ids[0, self._prompt_length :].tolist())
        return torch.tensor([stop], device=input_ids.device)


class FinishedGroups(StoppingCriteria):
    """A criterion that stops nothing: at every LOOK_EVERY-th token it finds the groups whose rows have all ended.

    To look, the host waits for the device, which then idles until it is given the next token to compute.
    """

    def __init__(
        self,
        rows: int,
        copies: int,
        width: int,
        eos_token_ids: torch.Tensor,
        finish_groups: Callable[[Iterable[int], torch.Tensor], None],
    ):
        self._copies, self._width, self._eos, self._finish_groups = copies, width, eos_token_ids, finish_groups
        self._stops = torch.zeros(rows, dtype=torch.bool, device=eos_token_ids.device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options) -> torch.Tensor:
        drawn = input_ids[:, self._width :]
        if drawn.shape[1] % LOOK_EVERY == 0:
            ended = torch.isin(drawn, self._eos).any(dim=1).view(-1, self._copies).all(dim=1).tolist()
            self._finish_groups(compress(count(), ended), input_ids)
        return self._stops


@contextmanager
def policy_that_draws(model: PreTrainedModel) -> Iterator[None]:
    """Set a model that is trained to draw completions within."""
    model.eval()  # layers that recompute their activations would switch the KV cache off
    with _without_gradients(model), frozen_norms(model):
        yield


@contextmanager
def _without_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Switch torch.inference_mode on, less work for the host than no_grad, for a model that learns afterwards.

    Autograd takes no tensor that was made within. A model may keep such tensors (positions by a dynamic RoPE): at the
    end they become ordinary ones.
    """
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in model.modules():
            for state in (vars(module), module._buffers):
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.is_inference():
                        state[name] = value.clone()


@contextmanager
def _exact_head(model: PreTrainedModel) -> Iterator[None]:
    """Let a head of 16 bits give the last position's logits in fp32, as the loss computes them, and no others.

    The head's own logits are rounded to 16 bits: another distribution. In fp32 nothing changes. A head that is more
    than nn.Linear (quantised, adapted, spread over devices) stays as it is.
    """
    linear = model.get_output_embeddings()
    plain = getattr(getattr(linear, "forward", None), "__func__", None) is nn.Linear.forward
    if not plain or type(linear.weight) is not nn.Parameter or linear.weight.dtype not in HALF:
        yield
        return

    def exact(hidden: torch.Tensor) -> torch.Tensor:
        # Whatever the model does to its logits after the head, it does to these too.
        head = Head(linear.weight, linear.bias, scale=1.0, softcap=None, temperature=1.0)
        return head.all_logits(hidden[:, -1]).unsqueeze(1)

    linear.forward = exact
    try:
        yield
    finally:
        del linear.forward

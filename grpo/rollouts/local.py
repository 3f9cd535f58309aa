"""The plain sampler of the trainer's own process: transformers' `generate` with the policy.

Left padding is in here only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress, count

import numpy as np
import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from grpo.model.logprobs import Head
from grpo.model.lora import frozen_norms
from grpo.model.pictures import Vision
from grpo.rollouts.draw import draw, in_blocks, uniforms
from grpo.rollouts.records import Example, Rollout
from grpo.rollouts.sampler import Sampler

LOOK_EVERY = 16  # tokens
HALF = (torch.bfloat16, torch.float16)

Name = tuple[int, int, int]
"""what a completion's random numbers follow from: seed, group, number in the group"""


class LocalSampler(Sampler):
    """The sampler that holds the policy itself, in this process, and calls transformers' own `generate`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: list[int],
        max_completion_length: int,
        rows: int = 64,
        vision: Vision | None = None,
    ):
        """`rows`: the completions that are drawn at a time; the copies of an example are drawn together."""
        self._model, self._tokenizer, self._eos, self._rows = model, tokenizer, eos_token_ids, rows
        self._vision = vision
        self._max_new_tokens, self._policy_version = max_completion_length, 0

    def sample(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        seed: int,
        on_group: Callable[[int, list[Rollout]], None] | None = None,
        ids: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Do what Sampler.sample says. `on_group` is called soon: within LOOK_EVERY tokens of a group's end."""
        names = [(seed, group, copy) for group in ids or range(len(examples)) for copy in range(copies)]
        return self._draw(examples, copies, temperature, names, on_group) if examples else []

    def greedy(self, examples: Sequence[Example]) -> list[Rollout]:
        """Do what Sampler.greedy says."""
        return [rollout for (rollout,) in self._draw(examples, 1, 1.0, None, None)]

    def stream(self, example: Example, temperature: float, seed: int, on_token: Callable[[list[int]], bool]) -> Rollout:
        """Do what Sampler.stream says."""
        names = [(seed, 0, 0)] if temperature else None
        criteria = [_TokenStream(len(example.prompt_ids), on_token)]
        return self._generate([example], 1, temperature or 1.0, names, criteria=criteria)[0][0]

    def update_weights(self, version: int) -> None:
        """Note the version. The model is the very one that the updates change, so it is there already."""
        self._policy_version = version

    def _draw(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        names: list[Name] | None,
        on_group: Callable[[int, list[Rollout]], None] | None,
    ) -> list[list[Rollout]]:
        """Draw `copies` completions of each example, with the random numbers of these names; greedily without names."""
        groups: list[list[Rollout]] = []
        at_once = max(1, self._rows // copies)
        for start in range(0, len(examples), at_once):
            part = slice(start, start + at_once)
            of_rows = None if names is None else names[start * copies : (start + at_once) * copies]
            report = None if on_group is None else partial(_shifted, on_group, start)
            groups += self._generate(examples[part], copies, temperature, of_rows, report)
        return groups

    def _generate(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        names: list[Name] | None,
        on_group: Callable[[int, list[Rollout]], None] | None = None,
        criteria: Sequence[StoppingCriteria] = (),
    ) -> list[list[Rollout]]:
        """Draw all at once."""
        model = self._model
        # Every token is drawn in `_Draws`; generate() takes the one with the highest score.
        settings = GenerationConfig(do_sample=False, max_new_tokens=self._max_new_tokens)
        settings.eos_token_id, settings.pad_token_id = self._eos, self._tokenizer.pad_token_id
        prompts = [example.prompt_ids for example in examples for _ in range(copies)]
        width = max(map(len, prompts))
        input_ids = torch.full((len(prompts), width), self._tokenizer.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1
        pictures = self._vision.for_generate(prompts, input_ids) if self._vision is not None else {}
        groups: dict[int, list[Rollout]] = {}
        numbers = None
        if names is not None:
            numbers = np.stack([uniforms(*name, self._max_new_tokens) for name in names])
            numbers = torch.from_numpy(numbers).to(model.device)
        draws = _Draws(temperature, numbers)

        def finish_groups(finished: Iterable[int], ids: torch.Tensor) -> None:
            """Make the rollouts of these examples, where that is not done yet, and hand them over."""
            if not (new := [index for index in finished if index not in groups]):
                return
            drawn, logprobs = ids[:, width:].tolist(), draws.logprobs().tolist()
            for index in new:
                rows = slice(index * copies, (index + 1) * copies)
                groups[index] = [self._rollout(*pair) for pair in zip(drawn[rows], logprobs[rows], strict=True)]
                if on_group is not None:
                    on_group(index, groups[index])

        # generate() fills what we leave unset from the model's own generation config (Qwen2.5: a repetition penalty),
        # which would draw from another distribution than the loss scores. So it has none while we draw.
        models_config, model.generation_config = model.generation_config, settings
        try:
            with policy_that_draws(model), _exact_head(model):
                if on_group is not None:
                    eos = torch.tensor(self._eos, device=model.device)
                    criteria = [*criteria, _FinishedGroups(len(prompts), copies, width, eos, finish_groups)]
                ids = model.generate(
                    input_ids=input_ids.to(model.device),
                    attention_mask=attention_mask.to(model.device),
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([draws]),
                    stopping_criteria=StoppingCriteriaList([*criteria]),
                    **pictures,
                )
                finish_groups(range(len(examples)), ids)
        finally:
            model.generation_config = models_config
        return [groups[index] for index in range(len(examples))]

    def _rollout(self, ids: list[int], logprobs: list[float]) -> Rollout:
        """Make the rollout of a row of drawn ids: cut it after its first eos."""
        end = next((place for place, token in enumerate(ids) if token in self._eos), None)
        kept = ids if end is None else ids[: end + 1]
        if math.isnan(sum(logprobs[: len(kept)])):
            raise FloatingPointError("the model's logits are NaN: its weights or its dtype are unusable")
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return Rollout(kept, end is not None, text, logprobs[: len(kept)], self._policy_version)


def _shifted(on_group: Callable[[int, list[Rollout]], None], start: int, index: int, rollouts: list[Rollout]) -> None:
    on_group(start + index, rollouts)


class _Draws(LogitsProcessor):
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


class _TokenStream(StoppingCriteria):
    """A criterion that shows a single completion's ids after each token, and stops where `on_token` returns True."""

    def __init__(self, prompt_length: int, on_token: Callable[[list[int]], bool]):
        self._prompt_length, self._on_token = prompt_length, on_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options) -> torch.Tensor:
        stop = self._on_token(input_ids[0, self._prompt_length :].tolist())
        return torch.tensor([stop], device=input_ids.device)


class _FinishedGroups(StoppingCriteria):
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

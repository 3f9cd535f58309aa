"""Prompts -> sampled completions, by transformers' own `generate`. Left padding exists in here only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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

from grpo.adapters import frozen_norms
from grpo.logprobs import Head
from grpo.records import Example, Rollout

HALF = (torch.bfloat16, torch.float16)


class Sampler:
    """Draws completions from a model exactly as the loss assumes: softmax(logits / temperature), nothing cut off."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int], max_completion_length: int):
        self._tokenizer, self._eos, self._max_new_tokens = tokenizer, eos_token_ids, max_completion_length

    def sample(
        self,
        model: PreTrainedModel,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        seed: int,
        policy_version: int = 0,
        on_group: Callable[[int, list[Rollout]], None] | None = None,
    ) -> list[list[Rollout]]:
        """`copies` completions of each example, in order. The seed decides what is drawn, whatever was drawn before.

        `on_group(place, rollouts)` is called once for each example, the moment its last completion ends, while the
        others are still being drawn.
        """
        torch.manual_seed(seed)
        return self._generate(model, examples, copies, _settings(temperature), policy_version, on_group)

    def greedy(self, model: PreTrainedModel, examples: Sequence[Example]) -> list[Rollout]:
        """The most likely completion of each example, token by token."""
        return [one for (one,) in self._generate(model, examples, 1, _settings(0))]

    def stream(
        self,
        model: PreTrainedModel,
        example: Example,
        temperature: float,
        seed: int,
        on_token: Callable[[list[int]], bool],
    ) -> Rollout:
        """One completion; a temperature of 0 is greedy. After each token `on_token(ids so far)` may stop it: True."""
        torch.manual_seed(seed)
        watch = [_EachToken(len(example.prompt_ids), on_token)]
        return self._generate(model, [example], 1, _settings(temperature), watch=watch)[0][0]

    @torch.no_grad()
    def _generate(
        self,
        model: PreTrainedModel,
        examples: Sequence[Example],
        copies: int,
        settings: GenerationConfig,
        policy_version: int = 0,
        on_group: Callable[[int, list[Rollout]], None] | None = None,
        watch: Sequence[StoppingCriteria] = (),
    ) -> list[list[Rollout]]:
        settings.max_new_tokens = self._max_new_tokens
        settings.eos_token_id, settings.pad_token_id = self._eos, self._tokenizer.pad_token_id
        prompts = [example.prompt_ids for example in examples for _ in range(copies)]
        width = max(map(len, prompts))
        input_ids = torch.full((len(prompts), width), self._tokenizer.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1
        groups: dict[int, list[Rollout]] = {}
        drawn_with = _DrawnWith(settings.temperature if settings.do_sample else 1.0)

        def hand_over(place: int, ids: torch.Tensor) -> None:
            if place not in groups:
                rows = slice(place * copies, (place + 1) * copies)
                drawn, logprobs = ids[rows, width:].tolist(), drawn_with.logprobs(ids)[rows].tolist()
                groups[place] = [self._rollout(*one, policy_version) for one in zip(drawn, logprobs, strict=True)]
                if on_group is not None:
                    on_group(place, groups[place])

        if on_group is not None:
            watch = [*watch, _GroupsEnd(copies, self._eos, hand_over)]
        # generate() fills what we leave unset from the model's own generation config (Qwen2.5: a repetition penalty),
        # which would draw from another distribution than the loss scores. So it has none while we draw.
        own, model.generation_config = model.generation_config, settings
        model.eval()  # layers that recompute their activations would switch the KV cache off
        try:
            with frozen_norms(model), _exact_head(model):
                drawn = model.generate(
                    input_ids=input_ids.to(model.device),
                    attention_mask=attention_mask.to(model.device),
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([drawn_with]),
                    stopping_criteria=StoppingCriteriaList([*watch]),
                )
        finally:
            model.generation_config = own
        for place in range(len(examples)):
            hand_over(place, drawn)
        return [groups[place] for place in range(len(examples))]

    def _rollout(self, ids: list[int], logprobs: list[float], policy_version: int) -> Rollout:
        end = next((place for place, token in enumerate(ids) if token in self._eos), None)
        kept = ids if end is None else ids[: end + 1]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return Rollout(kept, end is not None, text, logprobs[: len(kept)], policy_version)


class _DrawnWith(LogitsProcessor):
    """Looks on while tokens are drawn and keeps each one's log-prob. Changes nothing.

    transformers runs it before its own temperature, so the logits that it sees are the model's.
    """

    def __init__(self, temperature: float):
        self._temperature = temperature
        self._distribution: torch.Tensor | None = None  # [rows, vocabulary], of the token that is drawn next
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._take(input_ids)
        self._distribution = torch.log_softmax(scores / self._temperature, dim=-1)
        return scores

    def logprobs(self, input_ids: torch.Tensor) -> torch.Tensor:
        """float32 [rows, tokens drawn so far], the last column of input_ids being the last of them."""
        self._take(input_ids)
        return torch.stack(self._columns, dim=1)

    def _take(self, input_ids: torch.Tensor) -> None:
        if self._distribution is not None:
            self._columns.append(self._distribution.gather(1, input_ids[:, -1:]).squeeze(1))
            self._distribution = None


def _settings(temperature: float) -> GenerationConfig:
    if temperature == 0:
        return GenerationConfig(do_sample=False)
    return GenerationConfig(do_sample=True, temperature=temperature, top_p=1.0, top_k=0)


class _EachToken(StoppingCriteria):
    """Shows the ids of a single completion as they come, and stops where it is told to."""

    def __init__(self, prompt_length: int, on_token: Callable[[list[int]], bool]):
        self._prompt_length, self._on_token = prompt_length, on_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options) -> torch.Tensor:
        stop = self._on_token(input_ids[0, self._prompt_length :].tolist())
        return torch.tensor([stop], device=input_ids.device)


class _GroupsEnd(StoppingCriteria):
    """Looks on while tokens are drawn and names each group whose rows have all ended. Stops nothing."""

    def __init__(self, copies: int, eos_token_ids: list[int], hand_over: Callable[[int, torch.Tensor], None]):
        self._copies, self._eos, self._hand_over = copies, eos_token_ids, hand_over
        self._ended: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options) -> torch.Tensor:
        ends = torch.isin(input_ids[:, -1], torch.tensor(self._eos, device=input_ids.device))
        self._ended = ends if self._ended is None else self._ended | ends
        for place in self._ended.view(-1, self._copies).all(dim=1).nonzero().flatten().tolist():
            self._hand_over(place, input_ids)
        return torch.zeros_like(ends)


@contextmanager
def _exact_head(model: PreTrainedModel) -> Iterator[None]:
    """Within, a head of 16 bits gives the last position's logits in fp32, as the loss computes them, and no others.

    Its own are rounded to 16 bits: another distribution. In fp32 nothing changes. A head that is more than nn.Linear
    (quantised, adapted, spread over devices) stays as it is.
    """
    linear = model.get_output_embeddings()
    plain = getattr(getattr(linear, "forward", None), "__func__", None) is nn.Linear.forward
    if not plain or type(linear.weight) is not nn.Parameter or linear.weight.dtype not in HALF:
        yield
        return

    def exact(hidden: torch.Tensor) -> torch.Tensor:
        # What the model does to its logits after the head, it does to these.
        head = Head(linear.weight, linear.bias, scale=1.0, softcap=None, temperature=1.0)
        return head.all_logits(hidden[:, -1]).unsqueeze(1)

    linear.forward = exact
    try:
        yield
    finally:
        del linear.forward

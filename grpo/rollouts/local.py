"""Prompts -> sampled completions, by transformers' own `generate`. Left padding exists in here only."""

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
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from grpo.model.logprobs import Head
from grpo.model.lora import frozen_norms
from grpo.rollouts.records import Example, Rollout

LOOK_EVERY = 16  # tokens
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

        `on_group(place, rollouts)` is called once for each example, less than LOOK_EVERY tokens after its last
        completion ends, while the others are still being drawn.
        """
        torch.manual_seed(seed)
        return self._generate(model, examples, copies, temperature, policy_version, on_group)

    def greedy(self, model: PreTrainedModel, examples: Sequence[Example]) -> list[Rollout]:
        """The most likely completion of each example, token by token."""
        return [one for (one,) in self._generate(model, examples, 1, temperature=0)]

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
        return self._generate(model, [example], 1, temperature, watch=watch)[0][0]

    def _generate(
        self,
        model: PreTrainedModel,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        policy_version: int = 0,
        on_group: Callable[[int, list[Rollout]], None] | None = None,
        watch: Sequence[StoppingCriteria] = (),
    ) -> list[list[Rollout]]:
        settings = GenerationConfig(do_sample=False)
        if temperature:  # it is applied where the log-probs are taken (`_DrawnWith`)
            settings = GenerationConfig(do_sample=True, temperature=1.0, top_p=1.0, top_k=0)
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
        drawn_with = _DrawnWith(temperature or 1.0)

        def hand_over(places: Iterable[int], ids: torch.Tensor) -> None:
            if not (places := [place for place in places if place not in groups]):
                return
            drawn, logprobs = ids[:, width:].tolist(), drawn_with.logprobs(ids).tolist()
            for place in places:
                rows = slice(place * copies, (place + 1) * copies)
                pairs = zip(drawn[rows], logprobs[rows], strict=True)
                groups[place] = [self._rollout(*pair, policy_version) for pair in pairs]
                if on_group is not None:
                    on_group(place, groups[place])

        # generate() fills what we leave unset from the model's own generation config (Qwen2.5: a repetition penalty),
        # which would draw from another distribution than the loss scores. So it has none while we draw.
        own, model.generation_config = model.generation_config, settings
        model.eval()  # layers that recompute their activations would switch the KV cache off
        try:
            with _without_gradients(model), frozen_norms(model), _exact_head(model):
                if on_group is not None:
                    ends = torch.tensor(self._eos, device=model.device)
                    watch = [*watch, _GroupsEnd(len(prompts), copies, width, ends, hand_over)]
                drawn = model.generate(
                    input_ids=input_ids.to(model.device),
                    attention_mask=attention_mask.to(model.device),
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([drawn_with]),
                    stopping_criteria=StoppingCriteriaList([*watch]),
                )
                hand_over(range(len(examples)), drawn)
        finally:
            model.generation_config = own
        return [groups[place] for place in range(len(examples))]

    def _rollout(self, ids: list[int], logprobs: list[float], policy_version: int) -> Rollout:
        end = next((place for place, token in enumerate(ids) if token in self._eos), None)
        kept = ids if end is None else ids[: end + 1]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return Rollout(kept, end is not None, text, logprobs[: len(kept)], policy_version)


class _DrawnWith(LogitsProcessor):
    """Divides the logits by the temperature and keeps each token's log-prob in the distribution that this makes."""

    def __init__(self, temperature: float):
        self._temperature = temperature
        self._distribution: torch.Tensor | None = None  # [rows, vocabulary], of the token that is drawn next
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._take(input_ids)
        if self._temperature != 1:
            scores = scores / self._temperature
        self._distribution = torch.log_softmax(scores, dim=-1)
        return scores

    def logprobs(self, input_ids: torch.Tensor) -> torch.Tensor:
        """float32 [rows, tokens drawn so far], the last column of input_ids being the last of them."""
        self._take(input_ids)
        return torch.cat(self._columns, dim=1)

    def _take(self, input_ids: torch.Tensor) -> None:
        if self._distribution is not None:
            self._columns.append(self._distribution.gather(1, input_ids[:, -1:]))
            self._distribution = None


class _EachToken(StoppingCriteria):
    """Shows the ids of a single completion as they come, and stops where it is told to."""

    def __init__(self, prompt_length: int, on_token: Callable[[list[int]], bool]):
        self._prompt_length, self._on_token = prompt_length, on_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options) -> torch.Tensor:
        stop = self._on_token(input_ids[0, self._prompt_length :].tolist())
        return torch.tensor([stop], device=input_ids.device)


class _GroupsEnd(StoppingCriteria):
    """Looks at every LOOK_EVERY-th token and names the groups whose rows have all ended. Stops nothing.

    To look, the host waits for the device, which then idles until it is given the next token to compute.
    """

    def __init__(
        self,
        rows: int,
        copies: int,
        width: int,
        eos_token_ids: torch.Tensor,
        hand_over: Callable[[Iterable[int], torch.Tensor], None],
    ):
        self._copies, self._width, self._eos, self._hand_over = copies, width, eos_token_ids, hand_over
        self._stops = torch.zeros(rows, dtype=torch.bool, device=eos_token_ids.device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options) -> torch.Tensor:
        drawn = input_ids[:, self._width :]
        if drawn.shape[1] % LOOK_EVERY == 0:
            ended = torch.isin(drawn, self._eos).any(dim=1).view(-1, self._copies).all(dim=1).tolist()
            self._hand_over(compress(count(), ended), input_ids)
        return self._stops


@contextmanager
def _without_gradients(model: PreTrainedModel) -> Iterator[None]:
    """torch.inference_mode, less work for the host than no_grad, for a model that learns afterwards.

    Autograd takes no tensor that was made within. A model may keep such tensors (positions by a dynamic RoPE): they
    become ordinary ones.
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

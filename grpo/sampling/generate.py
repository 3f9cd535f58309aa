"""The plain sampler of the trainer's own process: transformers' `generate` with the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from grpo.data.records import Dialogue, Example, Responder, Rollout, close_all, make_rollout
from grpo.model.logprobs import Head, computing, text_at
from grpo.model.lora import frozen_norms
from grpo.model.packing import Ids
from grpo.model.pictures import Vision
from grpo.sampling.draw import check_drawn, draw, in_blocks, uniforms
from grpo.sampling.sampler import Groups, OnGroups, Order, Sampler

LOOK_EVERY = 16  # tokens
HALF = (torch.bfloat16, torch.float16)
OnTokens = Callable[[Tensor], bool]
"""called after each token with those drawn so far, int64 [rows, tokens]; True stops every row"""


class Draws(LogitsProcessor):
    """Draws each token itself, from logits divided by the temperature, and leaves generate no other choice."""

    def __init__(self, temperature: float, numbers: Tensor | None):
        """`numbers`: float64 [rows, tokens]; None draws greedily."""
        self._temperature, self._numbers = temperature, numbers
        self._columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._temperature != 1:
            scores = scores / self._temperature
        numbers = None if self._numbers is None else self._numbers[:, len(self._columns)]
        tokens, logprobs = draw(in_blocks(scores), numbers)
        self._columns.append(logprobs)
        return torch.zeros_like(scores).scatter_(1, tokens.unsqueeze(1), 1.0)

    def logprobs(self) -> Tensor:
        """Return float32 [rows, tokens drawn so far]."""
        return torch.stack(self._columns, dim=1)


@contextmanager
def policy_that_draws(model: PreTrainedModel) -> Iterator[None]:
    """Set a model that is trained to draw completions within, in torch.inference_mode. Autograd takes no tensor that
    was made there. A model may keep some (positions by a dynamic RoPE): they are cloned."""
    model.eval()  # layers that recompute their activations would switch the KV cache off
    try:
        with torch.inference_mode(), frozen_norms(model):
            yield
    finally:
        for module in model.modules():
            for state in (vars(module), module._buffers):
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.is_inference():
                        state[name] = value.clone()


@contextmanager
def _exact_head(model: PreTrainedModel) -> Iterator[None]:
    """Let a head of 16 bits give the last position's logits in fp32, as the loss computes them, and no others. The
    head's own logits are rounded to 16 bits: another distribution. In fp32 nothing changes. A head that is more than
    nn.Linear (quantised, adapted, spread over devices) stays as it is."""
    linear = model.get_output_embeddings()
    plain = getattr(getattr(linear, "forward", None), "__func__", None) is nn.Linear.forward
    if not plain or type(linear.weight) is not nn.Parameter or linear.weight.dtype not in HALF:
        yield
        return

    def exact(hidden: Tensor) -> Tensor:
        # Whatever the model does to its logits after the head, it does to these too.
        head = Head(weight=linear.weight, bias=linear.bias, scale=1.0, softcap=None, temperature=1.0)
        return head.all_logits(hidden[:, -1]).unsqueeze(1)

    with computing(linear, exact):
        yield


class LocalSampler(Sampler):
    """The sampler that holds the policy itself, in this process, and calls transformers' own `generate`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: list[int],
        max_completion_length: int,
        *,
        rows: int = 64,
        vision: Vision | None = None,
        turns: Responder | None = None,
    ):
        """`rows`: the completions that are drawn at a time. With `turns`, `sample` and `greedy` draw completions of
        several segments, and `stream` one segment."""
        self._model, self._tokenizer, self.eos_token_ids, self._rows = model, tokenizer, eos_token_ids, rows
        self._vision, self._turns = vision, turns
        self._max_new_tokens, self._policy_version = max_completion_length, 0

    def sample(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        seed: int,
        on_groups: OnGroups | None = None,
        ids: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Do what Sampler.sample says. `on_groups` is called soon: within LOOK_EVERY tokens of a group's end."""
        if not examples:
            return []
        names = [(seed, group, copy) for group in ids or range(len(examples)) for copy in range(copies)]
        order = Order(examples=examples, copies=copies, temperature=temperature, names=names, on_groups=on_groups)
        return self._draw(order)

    def greedy(self, examples: Sequence[Example]) -> list[Rollout]:
        return [rollout for (rollout,) in self._draw(Order(examples=examples))]

    def stream(self, example: Example, temperature: float, seed: int, on_token: Callable[[list[int]], bool]) -> Rollout:
        names = [(seed, 0, 0)] if temperature else None
        order = Order(examples=[example], temperature=temperature or 1.0, names=names)
        return self._draw_by_generate(order, None, lambda drawn: on_token(drawn[0].tolist()))[0][0]

    def update_weights(self, version: int) -> None:
        """Note the version. The model is the very one that the updates change."""
        self._policy_version = version

    def _draw(self, order: Order) -> list[list[Rollout]]:
        return self._draw_by_generate(order, self._turns)

    def _draw_by_generate(
        self, order: Order, turns: Responder | None, on_tokens: OnTokens | None = None
    ) -> list[list[Rollout]]:
        """Draw a segment of each completion in a call, which the next one continues, or feeds the answer."""
        groups, total = Groups(order), len(order.examples) * order.copies
        at_once = max(1, self._rows // order.copies) * order.copies
        for start in range(0, total, at_once):
            begun: list[_Completion] = []
            try:
                for number in range(start, min(start + at_once, total)):
                    example, name = order.examples[number // order.copies], order.name(number)
                    numbers = None if name is None else uniforms(name, self._max_new_tokens)
                    dialogue = None if turns is None else turns.begin(example, name)
                    begun.append(
                        _Completion(number=number, prompt=example.prompt_ids, numbers=numbers, dialogue=dialogue)
                    )
                left = begun
                while left:
                    self._draw_on(left, order, groups, on_tokens)
                    if turns is not None:
                        self._take_answers_in(left, groups)
                    left = [completion for completion in left if not completion.is_over]
                    groups.hand_over()
            finally:
                close_all(completion.dialogue for completion in begun if completion.dialogue)
        return groups.all

    def _draw_on(
        self, completions: list[_Completion], order: Order, groups: Groups, on_tokens: OnTokens | None
    ) -> None:
        """Draw more of each segment, as far as the fullest completion has room: the call draws as many for every row,
        and some models cannot compute more than a sequence's largest length."""
        tokens = min(map(self._room, completions))
        numbers, device = None, self._model.device
        if order.names is not None:
            numbers = np.stack([each.numbers[len(each.ids) :][:tokens] for each in completions])
            numbers = torch.from_numpy(numbers).to(device)
        draws, eos = Draws(order.temperature, numbers), torch.tensor(self.eos_token_ids, device=device)
        is_last = completions[0].dialogue is None

        def take(rows: Sequence[int], drawn: Tensor) -> None:
            """Add to these completions what was drawn, up to the first eos."""
            ids, logprobs = drawn.tolist(), draws.logprobs().tolist()
            for row in rows:
                end = next((place for place, token in enumerate(ids[row], 1) if token in self.eos_token_ids), None)
                completions[row].add(ids[row][:end], logprobs[row][:end], drawn=True)
                if is_last:
                    self._end(completions[row], groups)

        def look(drawn: Tensor) -> bool:
            """Hand over the groups whose rows have all ended. The host waits for the device, which idles meanwhile."""
            if drawn.shape[1] % LOOK_EVERY == 0:
                ended = torch.isin(drawn, eos).any(dim=1).view(-1, order.copies).all(dim=1).tolist()
                if rows := [row for row in _left(completions) if ended[row // order.copies]]:
                    take(rows, drawn)
                    groups.hand_over()
            return False

        contexts = [(completion.prompt, completion.ids) for completion in completions]
        drawn = self._generate(contexts, draws, tokens, look if is_last and order.on_groups else on_tokens)
        take(_left(completions), drawn)

    def _take_answers_in(self, completions: list[_Completion], groups: Groups) -> None:
        """Wait for the answers to the segments that have ended."""
        ended = [each for each in completions if each.ids[-1] in self.eos_token_ids or self._room(each) == 0]
        futures = [each.dialogue.answer(each.ids[each.begun :], self._room(each)) for each in ended]
        for completion, future in zip(ended, futures, strict=True):
            if future is not None and (answer := future.result()) is not None:
                completion.add(answer, [math.nan] * len(answer), drawn=False)
                completion.begun = len(completion.ids)
            else:
                self._end(completion, groups)
                completion.dialogue.close()

    def _end(self, completion: _Completion, groups: Groups) -> None:
        completion.is_over = True
        rollout = self._rollout(completion.ids, completion.logprobs, completion.drawn, completion.dialogue)
        groups.add(completion.number, rollout)

    def _room(self, completion: _Completion) -> int:
        return self._max_new_tokens - len(completion.ids)

    def _generate(
        self, contexts: Sequence[tuple[Ids, list[int]]], draws: Draws, tokens: int, on_tokens: OnTokens | None
    ) -> Tensor:
        """Draw up to `tokens` tokens after each context, a prompt and the completion so far: int64 [contexts, tokens
        drawn]. A row that has ended gets padding."""
        # Every token is drawn in `Draws`; generate() takes the one with the highest score.
        settings = GenerationConfig(do_sample=False, max_new_tokens=tokens)
        settings.eos_token_id, settings.pad_token_id = self.eos_token_ids, self._tokenizer.pad_token_id
        model, vision = self._model, self._vision
        width = max(len(prompt) + len(begun) for prompt, begun in contexts)
        input_ids = torch.full((len(contexts), width), settings.pad_token_id, dtype=torch.int64)
        attention_mask, is_begun = torch.zeros_like(input_ids), torch.zeros_like(input_ids, dtype=torch.bool)
        for row, (prompt, begun) in enumerate(contexts):
            start = width - len(prompt) - len(begun)
            input_ids[row, start:] = torch.tensor([*prompt, *begun])
            attention_mask[row, start:] = 1
            is_begun[row, width - len(begun) :] = True
        criteria = [] if on_tokens is None else [lambda ids, _, **options: on_tokens(ids[:, width:])]
        # A completion may have ids that stand for a piece of a picture: they are text.
        places = None
        if vision is not None and (text := is_begun & (input_ids == vision.token_id)).any():
            places = text.flatten().nonzero()[:, 0].to(model.device)
        # generate() fills our unset settings from the model's own generation config (Qwen2.5: a repetition penalty),
        # and would draw from another distribution than the loss scores. So the model has none while we draw.
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
                    logits_processor=[draws],
                    stopping_criteria=criteria,
                    **pictures,
                )
                return ids[:, width:]
        finally:
            model.generation_config = models_config

    def _rollout(self, ids: list[int], logprobs: list[float], drawn: list[bool], dialogue: Dialogue | None) -> Rollout:
        """Make the record of a completion. Raises FloatingPointError if a drawn token has no log-prob."""
        drawn, outcome = (None, None) if dialogue is None else (drawn, dialogue.outcome)
        check_drawn(logprobs if drawn is None else compress(logprobs, drawn))
        return make_rollout(
            self._tokenizer,
            self.eos_token_ids,
            ids=ids,
            logprobs=logprobs,
            policy_version=self._policy_version,
            drawn=drawn,
            outcome=outcome,
        )


@dataclass(eq=False, kw_only=True)
class _Completion:
    """A completion, as far as it is drawn."""

    number: int
    prompt: Ids
    numbers: np.ndarray | None  # random numbers, float64 [longest]; None draws greedily
    dialogue: Dialogue | None  # answers its segments; None: it has one
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    begun: int = 0  # the place in `ids` at which the segment begins that is being drawn
    is_over: bool = False

    def add(self, ids: list[int], logprobs: list[float], drawn: bool) -> None:
        """Append a segment, or an answer."""
        self.ids += ids
        self.logprobs += logprobs
        self.drawn += [drawn] * len(ids)


def _left(completions: Sequence[_Completion]) -> list[int]:
    """Return the places of those that are not over."""
    return [place for place, completion in enumerate(completions) if not completion.is_over]

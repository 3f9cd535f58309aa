"""The plain sampler of the trainer's own process: transformers' `generate` with the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from grpo.data.records import Example, Outcome, Rollout
from grpo.data.responder import Dialogue, Responder, close_all, make_rollout
from grpo.model.logprobs import Head, text_at
from grpo.model.lora import frozen_norms
from grpo.model.pictures import Vision
from grpo.sampling.draw import draw, in_blocks, uniforms
from grpo.sampling.sampler import OnGroups, Sampler
from grpo.wire.picture_files import PicturedPrompt

# transformers' `generate`, made to draw from what the loss scores, and how long after each token it may.


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
        turns: Responder | None = None,
    ):
        """`rows`: the completions that are drawn at a time; the copies of an example are drawn together.

        With `turns`, `sample` and `greedy` draw completions of several segments. `stream` draws one segment.
        """
        self._model, self._tokenizer, self._eos, self._rows = model, tokenizer, eos_token_ids, rows
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
        names = [(seed, group, copy) for group in ids or range(len(examples)) for copy in range(copies)]
        return self._draw(examples, copies, temperature, names, on_groups) if examples else []

    def greedy(self, examples: Sequence[Example]) -> list[Rollout]:
        """Do what Sampler.greedy says."""
        return [rollout for (rollout,) in self._draw(examples, 1, 1.0, None, None)]

    def stream(self, example: Example, temperature: float, seed: int, on_token: Callable[[list[int]], bool]) -> Rollout:
        """Do what Sampler.stream says."""
        names = [(seed, 0, 0)] if temperature else None
        criteria = [TokenStream(len(example.prompt_ids), on_token)]
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
        on_groups: OnGroups | None,
    ) -> list[list[Rollout]]:
        """Draw `copies` completions of each example, with the random numbers of these names; greedily without names."""
        groups: list[list[Rollout]] = []
        at_once = max(1, self._rows // copies)
        draw = self._generate if self._turns is None else self._generate_segments
        for start in range(0, len(examples), at_once):
            part = slice(start, start + at_once)
            of_rows = None if names is None else names[start * copies : (start + at_once) * copies]
            report = None if on_groups is None else partial(_shifted, on_groups, start)
            groups += draw(examples[part], copies, temperature, of_rows, report)
        return groups

    def _generate(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        names: list[Name] | None,
        on_groups: OnGroups | None = None,
        criteria: Sequence[StoppingCriteria] = (),
    ) -> list[list[Rollout]]:
        """Draw all at once, as completions of one segment."""
        contexts = [(example.prompt_ids, []) for example in examples for _ in range(copies)]
        width = max(len(prompt) for prompt, _ in contexts)
        numbers = None if names is None else np.stack([uniforms(*name, self._max_new_tokens) for name in names])
        draws = self._draws(temperature, numbers)
        groups: dict[int, list[Rollout]] = {}

        def finish_groups(finished: Iterable[int], ids: torch.Tensor) -> None:
            """Make the rollouts of these examples, where that is not done yet, and hand them over."""
            if not (new := [index for index in finished if index not in groups]):
                return
            drawn, logprobs = ids[:, width:].tolist(), draws.logprobs().tolist()
            for index in new:
                rows = slice(index * copies, (index + 1) * copies)
                groups[index] = [
                    self._rollout(*self._to_first_end(*pair)) for pair in zip(drawn[rows], logprobs[rows], strict=True)
                ]
            if on_groups is not None:
                on_groups({index: groups[index] for index in new})

        if on_groups is not None:
            eos = torch.tensor(self._eos, device=self._model.device)
            criteria = [*criteria, FinishedGroups(len(contexts), copies, width, eos, finish_groups)]
        finish_groups(range(len(examples)), self._call(contexts, draws, self._max_new_tokens, criteria))
        return [groups[index] for index in range(len(examples))]

    def _generate_segments(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        names: list[Name] | None,
        on_groups: OnGroups | None,
    ) -> list[list[Rollout]]:
        """Draw all at once, a segment of each in a call; with its answer that is the context of the next call.

        A segment that a call leaves without an end goes on in the next one.
        """
        groups: dict[int, list[Rollout | None]] = {index: [None] * copies for index in range(len(examples))}
        completions: list[_Completion] = []
        try:
            for number in range(len(examples) * copies):
                example, name = examples[number // copies], None if names is None else names[number]
                numbers = None if name is None else uniforms(*name, self._max_new_tokens)
                completions.append(_Completion(number, example.prompt_ids, numbers, self._turns.begin(example, name)))
            left = completions
            while left:
                self._draw_on(left, temperature)
                ended = [completion for completion in left if self._has_ended_segment(completion)]
                whole: dict[int, list[Rollout]] = {}
                for completion, future in zip(ended, [self._ask(completion) for completion in ended], strict=True):
                    if future is not None and (answer := future.result()) is not None:
                        completion.add(answer, [math.nan] * len(answer), drawn=False)
                        completion.begun = len(completion.ids)
                        continue
                    index, copy = divmod(completion.number, copies)
                    groups[index][copy] = self._rollout(
                        completion.ids, completion.logprobs, completion.drawn, completion.dialogue.outcome
                    )
                    completion.is_over = True
                    completion.dialogue.close()
                    if None not in groups[index]:
                        whole[index] = groups[index]
                if whole and on_groups is not None:
                    on_groups(whole)
                left = [completion for completion in left if not completion.is_over]
        finally:
            close_all(completion.dialogue for completion in completions)
        return [*groups.values()]

    def _draw_on(self, completions: list[_Completion], temperature: float) -> None:
        """Draw the segment of each on, as far as the fullest of them has room: the call draws as many for every row,
        and some models cannot compute more than a sequence's largest length."""
        tokens, numbers = min(self._room(completion) for completion in completions), None
        if completions[0].numbers is not None:
            numbers = np.stack([each.numbers[len(each.ids) : len(each.ids) + tokens] for each in completions])
        contexts = [(completion.prompt, completion.ids) for completion in completions]
        draws, width = self._draws(temperature, numbers), max(len(prompt) + len(ids) for prompt, ids in contexts)
        drawn = self._call(contexts, draws, tokens)[:, width:].tolist()
        for completion, *pair in zip(completions, drawn, draws.logprobs().tolist(), strict=True):
            completion.add(*self._to_first_end(*pair), drawn=True)

    def _has_ended_segment(self, completion: _Completion) -> bool:
        return completion.ids[-1] in self._eos or self._room(completion) == 0

    def _ask(self, completion: _Completion) -> Future | None:
        """Have the segment that has ended answered."""
        return completion.dialogue.answer(completion.ids[completion.begun :], self._room(completion))

    def _room(self, completion: _Completion) -> int:
        return self._max_new_tokens - len(completion.ids)

    def _draws(self, temperature: float, numbers: np.ndarray | None) -> Draws:
        return Draws(temperature, None if numbers is None else torch.from_numpy(numbers).to(self._model.device))

    def _call(
        self,
        contexts: Sequence[tuple[Sequence[int], list[int]]],
        draws: Draws,
        tokens: int,
        criteria: Sequence[StoppingCriteria] = (),
    ) -> torch.Tensor:
        pad = self._tokenizer.pad_token_id
        return generate(self._model, contexts, draws, tokens, self._eos, pad, self._vision, criteria)

    def _to_first_end(self, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
        """Cut drawn ids, and their log-probs, after the first eos."""
        end = next((place for place, token in enumerate(ids, start=1) if token in self._eos), len(ids))
        return ids[:end], logprobs[:end]

    def _rollout(
        self,
        ids: list[int],
        logprobs: list[float],
        drawn: list[bool] | None = None,
        outcome: Outcome | None = None,
    ) -> Rollout:
        """Make the record of a completion. Raises FloatingPointError where what was drawn has no log-prob."""
        if math.isnan(sum(logprobs if drawn is None else compress(logprobs, drawn))):
            raise FloatingPointError("the model's logits are NaN: its weights or its dtype are unusable")
        return make_rollout(self._tokenizer, self._eos, ids, logprobs, self._policy_version, drawn, outcome)


@dataclass
class _Completion:
    """A completion of several segments, as far as it is drawn."""

    number: int
    prompt: list[int] | PicturedPrompt
    numbers: np.ndarray | None
    """random numbers, float64 [longest]; None draws greedily"""
    dialogue: Dialogue
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    begun: int = 0
    """where in `ids` the segment begins that is drawn"""
    is_over: bool = False

    def add(self, ids: list[int], logprobs: list[float], drawn: bool) -> None:
        """Let a segment follow, or an answer."""
        self.ids += ids
        self.logprobs += logprobs
        self.drawn += [drawn] * len(ids)


def _shifted(on_groups: OnGroups, start: int, groups: dict[int, list[Rollout]]) -> None:
    on_groups({start + index: rollouts for index, rollouts in groups.items()})

"""The sampler of the trainer's own process: a decode loop with the policy, always full.

Each prompt is computed once for its group, and its keys and values are shared (grpo/model/shared_cache.py). A row that
has ended leaves at once and the next completion takes its place; when none waits, the last row moves there and the
batch gets smaller. What a row draws does not depend on the rows beside it (grpo/rollouts/draw.py), so `rows` is a
matter of memory and speed alone. The idea is that of Orca (Yu et al. 2022, OSDI, section 3.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo.model.logprobs import Head, body_of, text_at
from grpo.model.packing import pack_prompts
from grpo.model.pictures import Vision
from grpo.model.shared_cache import Shape, SharedCache
from grpo.rollouts.draw import draw, uniforms
from grpo.rollouts.graphs import StepGraphs
from grpo.rollouts.local import LOOK_EVERY, LocalSampler, Name, policy_that_draws
from grpo.rollouts.records import Example, Rollout
from grpo.wire.pictures import PicturedPrompt

PREFILL_TOKENS = 8192  # of the prompts of one forward pass, or one longer prompt
# The state of a row: its prompt's slot in the cache, its number among the prompt's completions, the prompt's tokens,
# the position of its first own token, its last token, which of its own tokens that is, and how many a pass adds: 1, or
# 0 in a row that draws nothing.
SLOT, COPY, PROMPT, BASE, TOKEN, PLACE, ADDED = range(7)


class ContinuousSampler(LocalSampler):
    """The sampler that keeps its rows full. What does not fit `longest_packed` is left to transformers' `generate`."""

    def __init__(self, *arguments, longest_packed: int, look_every: int | None = None, graphs: Callable | None = None):
        """Take the arguments of LocalSampler, and `longest_packed`, the batcher's.

        Every `look_every` tokens the host waits for the device and asks which rows have ended; until then they draw on.
        With `graphs`, StepGraphs or what makes one for a device, steps have few shapes, which CUDA records.
        """
        super().__init__(*arguments)
        self._graphs = graphs
        on_cpu = self._model.device.type == "cpu"
        self._longest_packed, self._look_every = longest_packed, look_every or (1 if on_cpu else LOOK_EVERY)

    def _draw(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        names: list[Name] | None,
        on_group: Callable[[int, list[Rollout]], None] | None,
    ) -> list[list[Rollout]]:
        longest = max(len(example.prompt_ids) for example in examples) + self._max_new_tokens
        if longest > self._longest_packed:
            return super()._draw(examples, copies, temperature, names, on_group)
        groups: dict[int, list[Rollout | None]] = {index: [None] * copies for index in range(len(examples))}

        def finish(completion: int, ids: list[int], logprobs: list[float]) -> None:
            index, copy = divmod(completion, copies)
            groups[index][copy] = self._rollout(ids, logprobs)
            if on_group is not None and None not in groups[index]:
                on_group(index, groups[index])

        with policy_that_draws(self._model):
            prompts = [example.prompt_ids for example in examples]
            graphs = self._graphs(self._model.device) if self._graphs else None
            arguments = self._rows, self._max_new_tokens, temperature, names, self._eos, graphs, self._vision
            _Loop(self._model, prompts, copies, *arguments).run(self._look_every, finish)
        return [*groups.values()]


def slots(prompts: int, rows: int, copies: int) -> int:
    """Return how many prompts the cache holds at a time.

    A prompt keeps its slot until its longest completion ends: so twice as many as fill the rows at once.
    """
    return min(prompts, 2 * -(-rows // copies) if copies > 1 else rows)


class _Loop:
    """The rows of one call, and its completions, numbered example by example."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        copies: int,
        rows: int,
        longest: int,
        temperature: float,
        names: list[Name] | None,
        ends: list[int],
        graphs: StepGraphs | None,
        vision: Vision | None,
    ):
        self._model, self._vision = model, vision
        self._body, self._head, self._device = body_of(model), Head.of(model, temperature), model.device
        self._prompts, self._copies, self._longest = prompts, copies, longest
        self._names, self._graphs = names, graphs
        self._ends = np.zeros(len(self._head.weight), bool)
        self._ends[[token for token in ends if token < len(self._ends)]] = True
        self._rows = rows = min(rows, len(prompts) * copies)
        self._slots = slots(len(prompts), rows, copies)
        self._cache = SharedCache(rows, self._slots, copies, max(map(len, prompts)), longest)
        self._free_slots = [*range(self._slots)]
        self._waiting = deque(range(len(prompts) * copies))
        self._prompts_in: dict[int, _Prompt] = {}
        self._drawing: list[int] = []
        """the completion of each row"""
        self._ids, self._logprobs = np.zeros((rows, longest), np.int64), np.zeros((rows, longest), np.float32)
        """each row's tokens and log-probs, as far as the host has looked"""
        self._unseen: list[tuple[torch.Tensor, torch.Tensor]] = []
        """tokens and log-probs of the rows in each pass since then"""
        self._seen_state = np.zeros((7, rows), np.int64)
        """the state of each row, as far as the host has looked; 0 in a row that draws nothing"""
        # What a pass reads, and where it leaves what it has drawn.
        self._state = torch.zeros(7, rows, dtype=torch.int64, device=self._device)
        self._last_logprobs = torch.zeros(rows, device=self._device)
        # Of each slot and number in the group: the row, and the random numbers.
        self._rows_of = torch.zeros(self._slots, copies, dtype=torch.int64, device=self._device)
        self._numbers = None
        if names is not None:
            self._numbers = torch.zeros(self._slots, copies, longest, dtype=torch.float64, device=self._device)
        # transformers hands a mask in four dimensions on as it is; without one it would build one.
        self._any_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device)

    def run(self, look_every: int, finish: Callable[[int, list[int], list[float]], None]) -> None:
        """Draw all; call `finish(completion, ids, logprobs)` within `look_every` tokens of each completion's end."""
        ended: list[int] = []
        while True:
            self._replace(ended)
            if not self._drawing:
                return
            self._steps(look_every)
            ended = self._look(finish)

    def _replace(self, ended: list[int]) -> None:
        """Let waiting completions take the places of ended rows; move the last rows to the places that stay empty."""
        free = [*ended, *range(len(self._drawing), self._rows)]
        taken: list[int] = []
        fresh: list[int] = []
        while self._waiting and len(taken) < len(free):
            index = self._waiting[0] // self._copies
            if index not in self._prompts_in:
                if not self._free_slots:
                    break
                prompt = self._prompts[index]
                is_text = not isinstance(prompt, PicturedPrompt)
                base = len(prompt) if is_text else self._vision.first_position(prompt)
                self._prompts_in[index] = _Prompt(heappop(self._free_slots), self._copies, base)
                fresh.append(index)
            taken.append(self._waiting.popleft())
        self._prefill(fresh)
        if taken:
            self._begin(free[: len(taken)], taken)
        self._remove(free[len(taken) : len(ended)])
        if taken or ended:
            self._arrange()

    def _prefill(self, indices: list[int]) -> None:
        """Compute the prompts' keys, values and last hidden states."""
        while indices:
            count, tokens = 1, len(self._prompts[indices[0]])
            while count < len(indices) and (tokens := tokens + len(self._prompts[indices[count]])) <= PREFILL_TOKENS:
                count += 1
            part, indices = indices[:count], indices[count:]
            lengths = [len(self._prompts[index]) for index in part]
            self._cache.fill([self._prompts_in[index].slot for index in part], lengths)
            batch = pack_prompts([self._prompts[index] for index in part], self._vision, self._device)
            with text_at(self._model, batch.input_ids, batch.not_pieces) as ids:
                hidden = self._forward(ids, batch.position_ids, tree=batch.tree, **batch.pictures)[0]
            for index, end in zip(part, accumulate(lengths), strict=True):
                self._prompts_in[index].hidden = hidden[end - 1].clone()

    def _begin(self, rows: list[int], completions: list[int]) -> None:
        """Draw the first token of these completions, each in its row."""
        hidden = []
        for row, completion in zip(rows, completions, strict=True):
            index, copy = divmod(completion, self._copies)
            prompt = self._prompts_in[index]
            length = len(self._prompts[index])
            self._seen_state[:, row] = prompt.slot, copy, length, prompt.base, 0, 0, 1
            hidden.append(prompt.hidden)
            self._drawing[row : row + 1] = [completion]
        numbers = None
        if self._names is not None:
            drawn = np.stack([uniforms(*self._names[completion], self._longest) for completion in completions])
            numbers = torch.from_numpy(drawn).to(self._device)
            slots, copies = torch.from_numpy(self._seen_state[:PROMPT, rows]).to(self._device)
            self._numbers[slots, copies] = numbers
            numbers = numbers[:, 0]
        tokens, logprobs = self._draw(torch.stack(hidden), numbers)
        self._ids[rows, 0], self._logprobs[rows, 0] = tokens.cpu().numpy(), logprobs.cpu().numpy()
        self._seen_state[TOKEN, rows] = self._ids[rows, 0]

    def _remove(self, rows: list[int]) -> None:
        """Move the last rows to the places of these ones."""
        left = len(self._drawing) - len(rows)
        moved = [row for row in range(left, len(self._drawing)) if row not in rows]
        to = [row for row in rows if row < left]
        if moved:
            self._cache.move(moved, to, self._seen_state[PLACE, moved].max())
            for values in (self._ids.T, self._logprobs.T, self._seen_state):
                values[:, to] = values[:, moved]
            for row, new in zip(moved, to, strict=True):
                self._drawing[new] = self._drawing[row]
        del self._drawing[left:]
        self._seen_state[:, left:] = 0

    def _arrange(self) -> None:
        """Tell the device which completion each row draws."""
        rows_of, drawing = np.zeros((self._slots, self._copies), np.int64), self._seen_state[:, : len(self._drawing)]
        rows_of[drawing[SLOT], drawing[COPY]] = range(len(self._drawing))
        self._rows_of.copy_(torch.from_numpy(rows_of))
        self._state.copy_(torch.from_numpy(self._seen_state))

    def _steps(self, count: int) -> None:
        """Draw `count` tokens in each row, fewer where a completion reaches its longest length before."""
        rows = len(self._drawing)
        slots, _, prompt, _, _, place, _ = self._seen_state[:, :rows].max(axis=1).tolist()
        end = min(place + 1 + count, self._longest)
        if self._cache.make_room(end - 1) and self._graphs is not None:
            self._graphs.forget()
        for own in range(place + 1, end):
            if self._graphs is None:
                self._step(Shape(rows, slots + 1, prompt, own))
            else:
                self._graphs.run(self._step, self._bucket(rows))
            self._unseen.append((self._state[TOKEN, :rows].clone(), self._last_logprobs[:rows].clone()))

    def _bucket(self, rows: int) -> Shape:
        """Return sizes that the rows fit, of which a call has few.

        Rows: powers of two, fewer and fewer from when nothing waits any more. Tokens of a row: the cache's room, each
        GROW times the one before. With 64 rows and 1,000 tokens that is 7 and 8, and seldom all pairs of them.
        """
        rows = min(1 << (rows - 1).bit_length(), self._rows)
        return Shape(rows, self._slots, max(map(len, self._prompts)), self._cache.room)

    def _step(self, shape: Shape) -> None:
        """Feed each row's last token and draw its next one."""
        slots, copies, prompts, bases, tokens, places, added = state = self._state[:, : shape.rows]
        self._cache.step(shape, state[:PROMPT], prompts, places, self._rows_of)
        hidden = self._forward(tokens.unsqueeze(1), (bases + places).unsqueeze(1))[:, 0]
        places += added
        drawn, logprobs = self._draw(hidden, None if self._numbers is None else self._numbers[slots, copies, places])
        tokens.copy_(drawn)
        self._last_logprobs[: shape.rows].copy_(logprobs)

    def _draw(self, hidden: torch.Tensor, numbers: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token from each last hidden state, [n, hidden size] -> [n]; return its log-prob too."""
        return draw(self._head.logits_in_blocks(hidden.to(self._head.weight)), numbers)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, **options) -> torch.Tensor:
        """Return the last hidden states of the model's body."""
        return self._body(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._any_mask,
            use_cache=False,
            shared_cache=self._cache,
            **options,
        ).last_hidden_state

    def _look(self, finish: Callable[[int, list[int], list[float]], None]) -> list[int]:
        """Wait for the device, hand over the completions that have ended, and return their rows."""
        rows = len(self._drawing)
        state, ended = self._seen_state[:, :rows], self._ends[self._ids[:rows, 0]]
        if self._unseen:
            tokens, logprobs = (torch.stack(passes).cpu().numpy() for passes in zip(*self._unseen, strict=True))
            self._unseen.clear()
            each, places = np.arange(rows), state[PLACE] + 1 + np.arange(len(tokens)).reshape(-1, 1)
            self._ids[each, places], self._logprobs[each, places] = tokens, logprobs
            state[TOKEN], state[PLACE] = tokens[-1], places[-1]
            ended = ended | self._ends[tokens].any(axis=0)
        ended = (ended | (state[PLACE] == self._longest - 1)).nonzero()[0].tolist()
        for row in ended:
            completion, length = self._drawing[row], state[PLACE, row] + 1
            index = completion // self._copies
            self._prompts_in[index].left -= 1
            if self._prompts_in[index].left == 0:
                heappush(self._free_slots, self._prompts_in.pop(index).slot)
            finish(completion, self._ids[row, :length].tolist(), self._logprobs[row, :length].tolist())
        return ended


@dataclass
class _Prompt:
    """A prompt that is being drawn from."""

    slot: int
    """its place in the cache"""
    left: int
    """how many of its completions have not ended"""
    base: int
    """the position of a completion's first token"""
    hidden: torch.Tensor | None = None
    """the last hidden state, from which every completion's first token is drawn"""

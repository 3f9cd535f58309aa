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

from grpo.model.logprobs import Head, body_of
from grpo.model.packing import Tree
from grpo.model.shared_cache import SharedCache
from grpo.rollouts.draw import draw, uniforms
from grpo.rollouts.local import LOOK_EVERY, LocalSampler, Name, policy_that_draws
from grpo.rollouts.records import Example, Rollout

PREFILL_TOKENS = 8192  # of the prompts of one forward pass, or one longer prompt


class ContinuousSampler(LocalSampler):
    """The sampler that keeps its rows full. What does not fit `longest_packed` is left to transformers' `generate`."""

    def __init__(self, *arguments, longest_packed: int, look_every: int | None = None):
        """Take the arguments of LocalSampler, and `longest_packed`, the batcher's.

        Every `look_every` tokens the host waits for the device and asks which rows have ended; until then they draw on.
        """
        super().__init__(*arguments)
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
            loop = _Loop(self._model, prompts, copies, self._rows, self._max_new_tokens, temperature, names, self._eos)
            loop.run(self._look_every, finish)
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
    ):
        self._body, self._head, self._device = body_of(model), Head.of(model, temperature), model.device
        self._prompts, self._copies, self._longest = prompts, copies, longest
        self._names, self._ends = names, frozenset(ends)
        rows = min(rows, len(prompts) * copies)
        self._cache = SharedCache(rows, slots(len(prompts), rows, copies), copies, max(map(len, prompts)), longest)
        self._rows, self._free_slots = rows, [*range(slots(len(prompts), rows, copies))]
        self._waiting = deque(range(len(prompts) * copies))
        self._prompts_in: dict[int, _Prompt] = {}
        self._drawing: list[int] = []
        """the completion of each row"""
        self._drawn: list[int] = []
        """how many tokens the host has asked for in each row"""
        self._found: list[tuple[list[int], list[float]]] = [([], []) for _ in self._waiting]
        """each completion's tokens and log-probs, as far as the host has looked"""
        self._unseen: list[tuple[torch.Tensor, torch.Tensor]] = []
        """tokens and log-probs of the rows in each pass since then"""
        # Of each row: its prompt's slot, its number in the group, its prompt's tokens, its last token, and which of its
        # own tokens that is.
        self._state = torch.zeros(5, rows, dtype=torch.int64, device=self._device)
        self._cells, (self._prompt, self._token, self._place) = self._state[:2], self._state[2:]
        self._numbers = None if names is None else torch.zeros(rows, longest, dtype=torch.float64, device=self._device)
        # transformers hands a mask in four dimensions on as it is; without one it would build one.
        self._any_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device)

    def run(self, look_every: int, finish: Callable[[int, list[int], list[float]], None]) -> None:
        """Draw all; call `finish(completion, ids, logprobs)` within `look_every` tokens of each completion's end."""
        ended: list[int] = []
        while self._waiting or self._drawing:
            self._replace(ended)
            for _ in range(min(look_every, self._longest - max(self._drawn, default=self._longest))):
                self._step()
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
                self._prompts_in[index] = _Prompt(heappop(self._free_slots), self._copies)
                fresh.append(index)
            taken.append(self._waiting.popleft())
        self._prefill(fresh)
        if taken:
            self._begin(free[: len(taken)], taken)
        for row in sorted(free[len(taken) : len(ended)], reverse=True):
            self._remove(row)

    def _prefill(self, indices: list[int]) -> None:
        """Compute the prompts' keys, values and last hidden states."""
        while indices:
            count, tokens = 1, len(self._prompts[indices[0]])
            while count < len(indices) and (tokens := tokens + len(self._prompts[indices[count]])) <= PREFILL_TOKENS:
                count += 1
            part, indices = indices[:count], indices[count:]
            lengths = [len(self._prompts[index]) for index in part]
            self._cache.fill([self._prompts_in[index].slot for index in part], lengths)
            ids = [token for index in part for token in self._prompts[index]]
            positions = [place for length in lengths for place in range(length)]
            hidden = self._forward(
                torch.tensor([ids], device=self._device),
                torch.tensor([positions], device=self._device),
                tree=Tree([(length, []) for length in lengths]),
            )[0]
            for index, end in zip(part, accumulate(lengths), strict=True):
                self._prompts_in[index].hidden = hidden[end - 1].clone()

    def _begin(self, rows: list[int], completions: list[int]) -> None:
        """Draw the first token of these completions, each in its row."""
        states, hidden = [], []
        for row, completion in zip(rows, completions, strict=True):
            index, copy = divmod(completion, self._copies)
            prompt = self._prompts_in[index]
            states.append([prompt.slot, copy, len(self._prompts[index])])
            hidden.append(prompt.hidden)
            self._drawing[row : row + 1], self._drawn[row : row + 1] = [completion], [1]
        numbers = None
        if self._names is not None:
            drawn = np.stack([uniforms(*self._names[completion], self._longest) for completion in completions])
            numbers = torch.from_numpy(drawn).to(self._device)
        tokens, logprobs = self._draw(torch.stack(hidden), None if numbers is None else numbers[:, 0])
        places = torch.tensor(rows, device=self._device)
        self._state[:3, places] = torch.tensor(states, device=self._device).T
        self._token[places], self._place[places] = tokens, 0
        if numbers is not None:
            self._numbers[places] = numbers
        for completion, token, logprob in zip(completions, tokens.tolist(), logprobs.tolist(), strict=True):
            self._found[completion] = [token], [logprob]

    def _remove(self, row: int) -> None:
        """Move the last row to an ended row's place."""
        last = len(self._drawing) - 1
        completion, drawn = self._drawing.pop(), self._drawn.pop()
        if row == last:
            return
        self._drawing[row], self._drawn[row] = completion, drawn
        self._state[:, row] = self._state[:, last]
        if self._numbers is not None:
            self._numbers[row] = self._numbers[last]
        self._cache.move(last, row, drawn - 1)

    def _step(self) -> None:
        """Feed each row's last token and draw its next one."""
        rows = slice(0, len(self._drawing))
        indices = {completion // self._copies for completion in self._drawing}
        self._cache.step(
            self._cells[:, rows],
            self._place[rows],
            self._prompt[rows],
            1 + max(self._prompts_in[index].slot for index in indices),
            (max(len(self._prompts[index]) for index in indices), max(self._drawn)),
        )
        positions = self._prompt[rows] + self._place[rows]
        hidden = self._forward(self._token[rows, None], positions.unsqueeze(1))[:, 0]
        self._place[rows] += 1
        numbers = None
        if self._numbers is not None:
            numbers = self._numbers[rows].gather(1, self._place[rows, None])[:, 0]
        self._unseen.append(self._draw(hidden, numbers))
        self._token[rows] = self._unseen[-1][0]
        self._drawn = [drawn + 1 for drawn in self._drawn]

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
        passes, ended = len(self._unseen), []
        if passes:
            tokens, logprobs = (torch.stack(columns, dim=1).tolist() for columns in zip(*self._unseen, strict=True))
            self._unseen.clear()
        for row, completion in enumerate(self._drawing):
            ids, ids_logprobs = self._found[completion]
            if passes:
                ids += tokens[row]
                ids_logprobs += logprobs[row]
            # A completion's first token came before the passes.
            if len(ids) < self._longest and self._ends.isdisjoint(ids[-passes - 1 :]):
                continue
            ended.append(row)
            end = next((place for place, token in enumerate(ids, start=1) if token in self._ends), len(ids))
            index = completion // self._copies
            self._prompts_in[index].left -= 1
            if self._prompts_in[index].left == 0:
                heappush(self._free_slots, self._prompts_in.pop(index).slot)
            finish(completion, ids[:end], ids_logprobs[:end])
        return ended


@dataclass
class _Prompt:
    """A prompt that is being drawn from."""

    slot: int
    """its place in the cache"""
    left: int
    """how many of its completions have not ended"""
    hidden: torch.Tensor | None = None
    """the last hidden state, from which every completion's first token is drawn"""

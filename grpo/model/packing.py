"""Lay out sequences of different lengths for one forward pass, and cut many sequences by a token budget.

Packed, where the model allows it: one row without padding, in which every prompt stands once and is followed by its
completions; attention (grpo/model/tree_attention.py) lets each completion see its prompt and itself. Otherwise padded:
one row for each sequence, padded on the right, where no token of a causal model can see the padding.

    prompt [7, 8] with completions [1, 2, 3] and [4, 5], prompt [9] with completion [6]

    packed    input_ids    7 8 1 2 4 9     padded    7 8 1 2
              positions    0 1 2 3 2 0               7 8 4 0
              predicts     1 2 3 1 4 5               9 0 0 0     predicts  1 2 3 5 6 8
              targets      1 2 3 4 5 6                           targets   1 2 3 4 5 6

The last token of a completion is predicted and predicts nothing, so it is not fed. What belongs to a completion is
known from lengths alone, never from `id != pad`: pad may be the eos, and the first eos is trained like any other token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Tree:
    """The lengths in a packed row: each prompt, then its completions."""

    groups: list[tuple[int, list[int]]]
    """tokens of a prompt, and tokens of each completion that follows it (none of them 0)"""
    _ends: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def segments(self) -> list[int]:
        """Return the tokens of each prompt and each completion, in the order of the row."""
        return [length for prompt, completions in self.groups for length in (prompt, *completions)]

    @cached_property
    def key_lengths(self) -> list[int]:
        """Return how many keys each segment sees: a prompt its own, a completion its prompt's and its own."""
        return [
            keys
            for prompt, completions in self.groups
            for keys in (prompt, *(prompt + completion for completion in completions))
        ]

    def ends(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each segment's queries begin and end, and its keys when they are laid out one after the other.

        Both are int32 [segments + 1] and made once for each device: a copy in each layer would make it wait for the
        GPU.
        """
        if device not in self._ends:
            ends = (
                torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
                for lengths in (self.segments, self.key_lengths)
            )
            self._ends[device] = tuple(tensor.to(device) for tensor in ends)
        return self._ends[device]


@dataclass(frozen=True)
class Batch:
    """Sequences with T completion tokens in all, laid out for one forward pass."""

    input_ids: torch.Tensor
    """int64 [1, N] packed, [B, L] padded"""
    position_ids: torch.Tensor | None
    """int64 [1, N]; None for a padded batch, whose rows count from 0 as every model does by itself"""
    tree: Tree | None
    """the lengths of a packed row; None for a padded batch"""
    predicts: torch.Tensor
    """int64 [T], positions in the flattened input_ids whose hidden states predict the completion tokens"""
    targets: torch.Tensor
    """int64 [T], the completion tokens: sequence after sequence, in the order given"""


@dataclass(frozen=True)
class Batcher:
    """The way to make batches for one model. A sequence is (prompt ids, completion ids)."""

    pad_token_id: int
    longest_packed: int
    """tokens of the longest sequence that may be packed: beyond it the model's attention has a window; 0 packs none"""

    def cut(self, sequences: Sequence[tuple[Ids, Ids]], budget: int) -> list[list[int]]:
        """Cut sequences into batches of at most `budget` tokens, and return the indices of each batch.

        Padding counts; a shared prompt counts once. The completions of a prompt stay together where they fit. A
        sequence longer than the budget is a batch by itself.
        """
        lengths = [len(prompt) + len(completion) for prompt, completion in sequences]
        packed = [index for index, length in enumerate(lengths) if length <= self.longest_packed]
        padded = [index for index, length in enumerate(lengths) if length > self.longest_packed]
        return _cut_packed(sequences, packed, budget) + _cut_padded(lengths, padded, budget)

    def make(self, sequences: Sequence[tuple[Ids, Ids]], device: torch.device | str) -> Batch:
        """Make one batch of all the sequences. Every prompt has at least one token; a completion may be empty."""
        longest = max(len(prompt) + len(completion) for prompt, completion in sequences)
        if longest <= self.longest_packed:
            return _pack(sequences, device)
        return _pad(sequences, self.pad_token_id, device)


def by_prompt(sequences: Sequence[tuple[Ids, Ids]], indices: Sequence[int]) -> list[list[int]]:
    """Group the indices of equal prompts, in order of first appearance."""
    groups: dict[bytes, list[int]] = {}
    for index in indices:
        groups.setdefault(np.asarray(sequences[index][0], np.int32).tobytes(), []).append(index)
    return list(groups.values())


def _cut_packed(sequences: Sequence[tuple[Ids, Ids]], indices: list[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    used = budget  # so that the first sequence opens a batch
    for group in by_prompt(sequences, indices):
        prompt = len(sequences[group[0]][0])
        whole = prompt + sum(len(sequences[index][1]) for index in group)
        opens = used + whole > budget >= whole
        prompt_is_in = False
        for index in group:
            tokens = len(sequences[index][1]) + (0 if prompt_is_in else prompt)
            if opens or not batches or used + tokens > budget:
                batches.append([])
                used, tokens, opens = 0, len(sequences[index][1]) + prompt, False
            batches[-1].append(index)
            used, prompt_is_in = used + tokens, True
    return batches


def _cut_padded(lengths: list[int], indices: list[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in sorted(indices, key=lambda index: -lengths[index]):
        # Longest first, so a batch's first row is its width.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _pack(sequences: Sequence[tuple[Ids, Ids]], device: torch.device | str) -> Batch:
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    groups: list[tuple[int, list[int]]] = []
    predicts: list[np.ndarray] = [np.empty(0, np.int64)] * len(sequences)
    start = 0
    for group in by_prompt(sequences, range(len(sequences))):
        prompt = np.asarray(sequences[group[0]][0], np.int64)
        ids.append(prompt)
        positions.append(np.arange(len(prompt)))
        last_of_prompt = start + len(prompt) - 1  # it predicts every first token
        start += len(prompt)
        groups.append((len(prompt), fed := []))
        for index in group:
            completion = np.asarray(sequences[index][1], np.int64)
            if len(completion) == 0:
                continue
            count = len(completion) - 1
            predicts[index] = np.concatenate([[last_of_prompt], np.arange(start, start + count)])
            if count:
                ids.append(completion[:-1])
                positions.append(np.arange(len(prompt), len(prompt) + count))
                fed.append(count)
            start += count
    return Batch(
        torch.from_numpy(np.concatenate(ids)).unsqueeze(0).to(device),
        torch.from_numpy(np.concatenate(positions)).unsqueeze(0).to(device),
        Tree(groups),
        torch.from_numpy(np.concatenate(predicts)).to(device),
        _targets(sequences, device),
    )


def _pad(sequences: Sequence[tuple[Ids, Ids]], pad_token_id: int, device: torch.device | str) -> Batch:
    width = max(len(prompt) + max(0, len(completion) - 1) for prompt, completion in sequences)
    input_ids = np.full((len(sequences), width), pad_token_id, np.int64)
    predicts = []
    for row, (prompt, completion) in enumerate(sequences):
        fed = len(prompt) + max(0, len(completion) - 1)
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : fed] = completion[:-1]
        predicts.append(np.arange(len(prompt) - 1, len(prompt) - 1 + len(completion)) + row * width)
    return Batch(
        torch.from_numpy(input_ids).to(device),
        None,
        None,
        torch.from_numpy(np.concatenate(predicts)).to(device),
        _targets(sequences, device),
    )


def _targets(sequences: Sequence[tuple[Ids, Ids]], device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(completion, np.int64) for _, completion in sequences])).to(
        device
    )

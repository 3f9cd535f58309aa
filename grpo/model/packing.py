"""Lay out sequences of different lengths for one forward pass, and cut many sequences by a token budget.

Packed, if the model allows it: one row without padding, in which every prompt stands once and is followed by its
completions; attention (grpo/model/tree_attention.py) lets each completion see its prompt and itself. Otherwise padded:
one row for each sequence, padded on the right: no token of a causal model can see that.

    prompt [7, 8] with completions [1, 2, 3] and [4, 5], prompt [9] with completion [6]

    packed    input_ids    7 8 1 2 4 9     padded    7 8 1 2
              positions    0 1 2 3 2 0               7 8 4 0
              predicts     1 2 3 1 4 5               9 0 0 0     predicts  1 2 3 5 6 8
              targets      1 2 3 4 5 6                           targets   1 2 3 4 5 6

The last token of a completion is predicted and predicts nothing, so it is not fed. What belongs to a completion is
known from lengths alone, never from `id != pad`: pad may be the eos, and the first eos is trained like any other token.

Of a completion with answers, of a tool or an environment, only the tokens that the policy drew are predicted. Answers
are fed like everything else. With [True, False, True] of the first completion above:

    packed    predicts     1 3 1 4 5       padded    predicts  1 3 5 6 8
              targets      1 3 4 5 6                 targets   1 3 4 5 6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grpo.wire.picture_files import PicturedPrompt, key_of

if TYPE_CHECKING:
    from grpo.model.pictures import Seen, Vision

Ids = Sequence[int] | np.ndarray
"""token ids; of a prompt with pictures a PicturedPrompt"""


@dataclass(frozen=True)
class Tree:
    """The lengths in a packed row: each prompt, then its completions."""

    groups: list[tuple[int, list[int]]]
    """tokens of a prompt, and tokens of each completion that follows it (none of them 0)"""
    blocks: list[np.ndarray | None] = field(default_factory=list)
    """of each prompt the picture that a token is a piece of, int64 [tokens], -1 for text, or None without a
    picture: its pieces see each other in both directions. Empty if every token sees only earlier ones"""
    _ends: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

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

    def ends(self, device: torch.device) -> tuple[Tensor, Tensor]:
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
    """Sequences with T completion tokens to predict in all, laid out for one forward pass."""

    input_ids: Tensor
    """int64 [1, N] packed, [B, L] padded"""
    position_ids: Tensor | None
    """int64 [1, N]; None for a padded batch, whose rows count from 0 as every model does by itself. With pictures, for
    a model that gives them positions of their own: [3, 1, N] and [3, B, L]"""
    tree: Tree | None
    """the lengths of a packed row; None for a padded batch"""
    predicts: Tensor
    """int64 [T], positions in the flattened input_ids whose hidden states predict the completion tokens"""
    targets: Tensor
    """int64 [T], these completion tokens: sequence after sequence, in the order given"""
    pictures: dict[str, Tensor] = field(default_factory=dict)
    """the model's inputs beside the ids, by name; empty without pictures"""
    not_pieces: Tensor | None = None
    """int64, places in the flattened input_ids of ids that elsewhere stand for a piece of a picture, and are text here:
    a sampler may draw them; None without such ids"""


@dataclass(frozen=True)
class Batcher:
    """The way to make batches for one model. A sequence is (prompt ids, completion ids)."""

    pad_token_id: int
    longest_packed: int
    """tokens of the longest sequence that may be packed: beyond it the model's attention has a window; 0 packs none"""
    vision: Vision | None = None
    """how the model sees pictures; None if it takes text alone"""

    def cut(self, sequences: Sequence[tuple[Ids, Ids]], budget: int) -> list[list[int]]:
        """Cut sequences into batches of at most `budget` tokens, and return the indices of each batch.

        Padding counts; a shared prompt counts once. The completions of a prompt stay together if they fit. A
        sequence longer than the budget is a batch by itself.
        """
        lengths = [len(prompt) + len(completion) for prompt, completion in sequences]
        packed = [index for index, length in enumerate(lengths) if length <= self.longest_packed]
        padded = [index for index, length in enumerate(lengths) if length > self.longest_packed]
        return _cut_packed(sequences, packed, budget) + _cut_padded(lengths, padded, budget)

    def make(
        self,
        sequences: Sequence[tuple[Ids, Ids]],
        device: torch.device | str,
        predicted: Sequence[np.ndarray | None] | None = None,
    ) -> Batch:
        """Make one batch of all the sequences. Every prompt has at least one token; a completion may be empty.

        `predicted` has for each sequence, bool [len(completion)], which of the completion's tokens are predicted; None,
        for one or for all of them, is every token. Raises PictureError if a prompt's picture cannot be opened.
        """
        longest = max(len(prompt) + len(completion) for prompt, completion in sequences)
        predicted = predicted or [None] * len(sequences)
        if longest <= self.longest_packed:
            groups = by_prompt(sequences, range(len(sequences)))
            return _pack(sequences, predicted, groups, self.vision, device)
        return _pad(sequences, predicted, self.pad_token_id, self.vision, device)


def pack_prompts(prompts: Sequence[Ids], vision: Vision | None, device: torch.device | str) -> Batch:
    """Make a packed batch of prompts alone, in their order, equal ones too."""
    groups = [[index] for index in range(len(prompts))]
    return _pack([(prompt, []) for prompt in prompts], [None] * len(prompts), groups, vision, device)


def by_prompt(sequences: Sequence[tuple[Ids, Ids]], indices: Sequence[int]) -> list[list[int]]:
    """Group the indices of equal prompts, in order of first appearance."""
    groups: dict[bytes, list[int]] = {}
    for index in indices:
        groups.setdefault(key_of(sequences[index][0]), []).append(index)
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


def _pack(
    sequences: Sequence[tuple[Ids, Ids]],
    predicted: Sequence[np.ndarray | None],
    by_prompt: list[list[int]],
    vision: Vision | None,
    device: torch.device | str,
) -> Batch:
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    groups: list[tuple[int, list[int]]] = []
    blocks: list[np.ndarray | None] = []
    pictures = _Pictures(vision)
    predicts: list[np.ndarray] = [np.empty(0, np.int64)] * len(sequences)
    start = 0
    for group in by_prompt:
        first, _ = sequences[group[0]]
        prompt = np.asarray(first, np.int64)
        ids.append(prompt)
        of_prompt = pictures.see(first, start)
        positions.append(of_prompt)
        blocks.append(pictures.blocks(first))
        last_of_prompt = start + len(prompt) - 1  # it predicts every first token
        start += len(prompt)
        groups.append((len(prompt), fed := []))
        for index in group:
            completion = np.asarray(sequences[index][1], np.int64)
            if len(completion) == 0:
                continue
            count = len(completion) - 1
            places = np.concatenate([[last_of_prompt], np.arange(start, start + count)])
            predicts[index] = _select(places, predicted[index])
            if count:
                ids.append(completion[:-1])
                positions.append(following(of_prompt, count))
                fed.append(count)
            start += count
    row = np.concatenate(ids)
    return Batch(
        torch.from_numpy(row).unsqueeze(0).to(device),
        torch.from_numpy(_joined(positions)).unsqueeze(-2).to(device),
        Tree(groups, blocks),
        torch.from_numpy(np.concatenate(predicts)).to(device),
        _targets(sequences, predicted, device),
        *pictures.of_batch(row, None, device),
    )


def _pad(
    sequences: Sequence[tuple[Ids, Ids]],
    predicted: Sequence[np.ndarray | None],
    pad_token_id: int,
    vision: Vision | None,
    device: torch.device | str,
) -> Batch:
    width = max(len(prompt) + max(0, len(completion) - 1) for prompt, completion in sequences)
    input_ids = np.full((len(sequences), width), pad_token_id, np.int64)
    predicts, positions, pictures = [], [], _Pictures(vision)
    has_positions = vision is not None and vision.has_positions
    for row, (prompt, completion) in enumerate(sequences):
        fed = len(prompt) + max(0, len(completion) - 1)
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : fed] = completion[:-1]
        places = np.arange(len(prompt) - 1, len(prompt) - 1 + len(completion)) + row * width
        predicts.append(_select(places, predicted[row]))
        of_prompt = pictures.see(prompt, row * width)
        if has_positions:
            positions.append(_joined([of_prompt, following(of_prompt, width - len(prompt))]))
    of_pictures = pictures.of_batch(input_ids.ravel(), input_ids.shape, device)
    position_ids = None
    if has_positions and of_pictures[0]:
        position_ids = torch.from_numpy(np.stack([np.broadcast_to(row, (3, width)) for row in positions], 1)).to(device)
    return Batch(
        torch.from_numpy(input_ids).to(device),
        position_ids,
        None,
        torch.from_numpy(np.concatenate(predicts)).to(device),
        _targets(sequences, predicted, device),
        *of_pictures,
    )


class _Pictures:
    """The pictures of a batch, as its prompts are laid out."""

    def __init__(self, vision: Vision | None):
        self._vision = vision
        self._seen: dict[bytes, Seen] = {}
        self._inputs: list[dict[str, Tensor]] = []
        self._places: list[tuple[int, int]] = []
        """where in the flattened ids each prompt with pictures begins and ends"""

    def see(self, prompt: Ids, start: int) -> np.ndarray:
        """Take up a prompt that begins at this place; return its positions, int64 [tokens] or [3, tokens]."""
        if not isinstance(prompt, PicturedPrompt):
            return np.arange(len(prompt))
        if (seen := self._seen.get(prompt.digest)) is None:
            seen = self._seen[prompt.digest] = self._vision.of(prompt)
        self._inputs += seen.inputs
        self._places.append((start, start + len(prompt)))
        return np.arange(len(prompt)) if seen.positions is None else seen.positions

    def blocks(self, prompt: Ids) -> np.ndarray | None:
        """Return the picture of each of a prompt's tokens as Tree.blocks has them."""
        if not isinstance(prompt, PicturedPrompt) or self._vision.types_name is None:
            return None
        pieces = np.asarray(prompt) == self._vision.token_id
        begins = pieces & ~np.concatenate([[False], pieces[:-1]])
        return np.where(pieces, begins.cumsum() - 1, -1)

    def of_batch(
        self, ids: np.ndarray, shape: tuple[int, int] | None, device: torch.device | str
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return `pictures` and `not_pieces` of a batch with these flattened ids; `shape` is that of a padded batch."""
        if not self._inputs:
            return {}, None
        inputs = self._vision.join(self._inputs)
        pieces = ids == self._vision.token_id
        outside = pieces.copy()
        for start, end in self._places:
            outside[start:end] = False
        if shape is not None and (name := self._vision.types_name) is not None:
            inputs[name] = torch.from_numpy((pieces & ~outside).reshape(shape).astype(np.int64))
        places = torch.from_numpy(outside.nonzero()[0]).to(device) if outside.any() else None
        return {name: value.to(device) for name, value in inputs.items()}, places


def following(positions: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of so many tokens of text after a prompt with these, int64 [tokens] or [3, tokens]: [count].

    A picture's rows and columns count by themselves, so they may end before as many as there are tokens.
    """
    return np.arange(count) + (positions.max() + 1)


def _joined(positions: list[np.ndarray]) -> np.ndarray:
    """Join positions to [N], or to [3, N] where any of them are [3, tokens]."""
    if all(part.ndim == 1 for part in positions):
        return np.concatenate(positions)
    return np.concatenate([np.broadcast_to(part, (3, part.shape[-1])) for part in positions], axis=1)


def _targets(
    sequences: Sequence[tuple[Ids, Ids]], predicted: Sequence[np.ndarray | None], device: torch.device | str
) -> Tensor:
    targets = [
        _select(np.asarray(completion, np.int64), marks)
        for (_, completion), marks in zip(sequences, predicted, strict=True)
    ]
    return torch.from_numpy(np.concatenate(targets)).to(device)


def _select(values: np.ndarray, marks: np.ndarray | None) -> np.ndarray:
    return values if marks is None else values[marks]

"""The keys and values of completions that are being drawn: a prompt's once for all its completions, each row's own.

A row is a completion. Its token attends to its prompt, with all rows of that prompt in one product, and to the row's
own tokens; both products' scores share one softmax. The attention of grpo/model/tree_attention.py calls it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

GROW = 1.5


class Shape(NamedTuple):
    """The sizes of a pass: the shapes of all its tensors follow from them."""

    rows: int
    slots: int  # the first slots, which hold the prompts of all rows
    prompt: int  # tokens of the longest prompt, or more
    own: int  # tokens of the longest row with the one that is fed, or more


class Scoring(NamedTuple):
    """What a layer does to the products of its queries and keys before their softmax."""

    scaling: float
    softcap: float | None = None
    window: int | None = None  # how many tokens each sees: itself and the last ones before it; None: all before it


class Fed(NamedTuple):
    """Tokens that follow those of a row in one pass."""

    row: int
    slot: int  # that of the row's prompt
    prompt: int  # tokens of its prompt
    place: int  # which of the row's tokens the first one is
    count: int


class Step(NamedTuple):
    """What a pass needs to know of its rows, one token each."""

    shape: Shape
    cells: Tensor  # int64 [2, rows]: the slot of each row's prompt, and its number among that prompt's rows
    prompts: Tensor  # int64 [rows]: tokens of its prompt
    places: Tensor  # int64 [rows]: which of the row's tokens it is
    rows_of: Tensor  # int64 [slots, copies]: the row in each cell, any row in an empty one


class Kept(NamedTuple):
    """A layer's keys and values: of prompts [slots x kv heads, tokens, d], of rows [rows x kv heads, tokens, d]."""

    prompt_keys: Tensor
    prompt_values: Tensor
    own_keys: Tensor
    own_values: Tensor


class SharedCache:
    """Keys and values of up to `rows` rows, and of up to `slots` prompts with up to `copies` rows each."""

    def __init__(self, *, rows: int, slots: int, copies: int, longest_prompt: int, longest_completion: int):
        self._rows, self.slots, self._copies = rows, slots, copies
        self._longest_completion = longest_completion
        self.prompt_room = longest_prompt  # tokens of each prompt that there is room for
        self.room = 0  # and of each row
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer, shaped as in Kept
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self.fed: list[Fed] = []
        """to be set before a pass that feeds tokens of several rows, one after the other: these tokens"""

    def fill(self, slots: list[int], lengths: list[int]) -> None:
        """Put the prompts of the next forward pass, which follow each other in its row, into these slots."""
        self._slots_filled, self._lengths = slots, lengths

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep a layer's keys and values [1, kv heads, N, d] of the prompts."""
        heads = key.shape[1]
        if layer not in self._prompts:
            self._prompts[layer], self._own[layer] = (
                tuple(states.new_zeros(count * heads, room, states.shape[3]) for states in (key, value))
                for count, room in ((self.slots, self.prompt_room), (self._rows, self.room))
            )
        for kept, states in zip(self._prompts[layer], (key, value), strict=True):
            parts = states[0].split(self._lengths, dim=1)
            for slot, length, part in zip(self._slots_filled, self._lengths, parts, strict=True):
                kept[slot * heads : (slot + 1) * heads, :length] = part

    def make_prompt_room(self, tokens: int) -> bool:
        """Make room for so many tokens in each prompt. Return whether there was too little: as `make_room`."""
        if tokens <= self.prompt_room:
            return False
        before, self.prompt_room = self.prompt_room, max(tokens, int(self.prompt_room * GROW))
        for layer, pair in self._prompts.items():
            self._prompts[layer] = tuple(pad(states, (0, 0, 0, self.prompt_room - before)) for states in pair)
        return True

    def copy_prompt(self, slot: int, to: list[int], length: int) -> None:
        """Copy the first tokens of the prompt in a slot to other slots."""
        for pair in self._prompts.values():
            for states in pair:
                by_slot = states.unflatten(0, (self.slots, -1))[:, :, :length]
                by_slot[to] = by_slot[slot].clone()

    def make_room(self, tokens: int, rows: int) -> bool:
        """Make room for so many tokens in each row, and keep the first `rows` rows alone. Return whether there was too
        little: then keys and values have moved in memory."""
        if tokens <= self.room:
            return False
        before, self.room = self.room, min(max(tokens, 64, int(self.room * GROW)), self._longest_completion)
        for layer, pair in self._own.items():
            kept = (states.unflatten(0, (self._rows, -1))[:rows].flatten(0, 1) for states in pair)
            self._own[layer] = tuple(pad(states, (0, 0, 0, self.room - before)) for states in kept)
        self._rows = rows
        return True

    def step(self, step: Step) -> None:
        """Prepare the next forward pass, one token for each of the first rows."""
        self.fed = []
        self.now = step
        self._indices: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor] = {}  # by window

    def of_layer(self, layer: int) -> Kept:
        """Return a layer's keys and values, in place."""
        return Kept(*self._prompts[layer], *self._own[layer])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Keep and attend: query [rows, heads, 1, d], key and value [rows, kv heads, 1, d] -> [rows, 1, heads, d]."""
        (rows, heads), (scaling, softcap, window) = key.shape[:2], scoring
        repeat, slots = query.shape[1] // heads, self.now.shape.slots * heads
        cells, rows_of, places = self._index(heads)
        for states, new in zip(self._own[layer], (key, value), strict=True):
            states.view(-1, states.shape[2]).index_copy_(0, places, new.reshape(rows * heads, -1))
        prompt, own = self.now.shape[2:]
        prompt_keys, prompt_values = (states[:slots, :prompt] for states in self._prompts[layer])
        keys, values = (states[: rows * heads, :own] for states in self._own[layer])

        def with_prompt(left: Tensor, right: Tensor) -> Tensor:
            """Multiply all rows of a prompt at once: [rows x heads, repeat, a], [slots x heads, a, b]."""
            grid = left.index_select(0, rows_of).view(slots, self._copies * repeat, -1)
            return _product(grid, right).view(slots * self._copies, repeat, -1).index_select(0, cells)

        query = query.reshape(rows * heads, repeat, -1)
        scores = torch.cat(
            [with_prompt(query, prompt_keys.transpose(1, 2)), _product(query, keys.transpose(1, 2))], dim=2
        ).view(rows, heads * repeat, -1)
        if softcap is not None:
            scores, scaling = scores.mul_(scaling / softcap).tanh_(), softcap
        weights = torch.add(self._mask(window), scores, alpha=scaling, out=scores).softmax(dim=2)
        weights = weights.view(rows * heads, repeat, -1)
        out = _product(weights[..., prompt:], values).add_(with_prompt(weights[..., :prompt], prompt_values))
        return out.to(value.dtype).view(rows, 1, heads * repeat, -1)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keep keys and values [1, kv heads, N, d] of the tokens that are fed; yield for each row all that it sees."""
        heads, start = key.shape[1], 0
        for row, slot, prompt, place, count in self.fed:
            seen = []
            of_row, of_slot = (slice(number * heads, (number + 1) * heads) for number in (row, slot))
            for prompts, own, states in zip(self._prompts[layer], self._own[layer], (key, value), strict=True):
                own[of_row, place : place + count] = states[0, :, start : start + count]
                seen.append(torch.cat([prompts[of_slot, :prompt], own[of_row, : place + count]], dim=1).unsqueeze(0))
            yield tuple(seen)
            start += count

    def move(self, rows: list[int], to: list[int], tokens: int) -> None:
        """Copy the first tokens of some rows to other rows, at once: two rows may change places."""
        device = next(iter(self._own.values()))[0].device
        rows, to = torch.tensor(rows).to(device), torch.tensor(to).to(device)
        for pair in self._own.values():
            for states in pair:
                by_row = states.unflatten(0, (self._rows, -1))[:, :, :tokens]
                by_row.index_copy_(0, to, by_row.index_select(0, rows))

    def _mask(self, window: int | None) -> Tensor:
        """Return 0 for each token of the prompt, and then of the row, that the row's token sees, else -inf: float32
        [rows, 1, prompt + own], once for all layers with this window."""
        if window not in self._masks:
            places, prompts = self.now.places.unsqueeze(1), self.now.prompts.unsqueeze(1)
            prompt, own = (torch.arange(length, device=places.device) for length in self.now.shape[2:])
            of_prompt, of_row = prompt < prompts, own <= places
            if window is not None:
                of_prompt, of_row = of_prompt & (prompt > prompts + places - window), of_row & (own > places - window)
            seen = torch.cat([of_prompt, of_row], dim=1)
            mask = torch.zeros(seen.shape, device=places.device).masked_fill_(~seen, -torch.inf)
            self._masks[window] = mask.unsqueeze(1)
        return self._masks[window]

    def _index(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's and head's cell among the prompts' rows, the row and head in each cell, and where the token
        goes among those kept: int64 [rows x heads], [slots x heads x copies], [rows x heads], once for all layers.
        """
        if heads not in self._indices:
            now = self.now
            (slot, number), head = now.cells.unsqueeze(2), torch.arange(heads, device=now.places.device)
            row = torch.arange(len(now.places), device=now.places.device).unsqueeze(1)
            cells = (slot * heads + head) * self._copies + number
            rows_of = now.rows_of.unsqueeze(1) * heads + head.unsqueeze(1)
            places = (row * heads + head) * self.room + now.places.unsqueeze(1)
            self._indices[heads] = cells.flatten(), rows_of.flatten(), places.flatten()
        return self._indices[heads]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [n, a, b] by [n, b, c] into float32: scores in 16 bits would move log-probs by several per cent."""
    if right.dtype == torch.float32:
        return torch.bmm(left, right)
    if right.is_cuda:
        return torch.bmm(left.to(right.dtype), right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())

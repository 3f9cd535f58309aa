"""The keys and values of completions that are being drawn: a prompt's once for all its completions, each row's own.

A row is a completion. Its token attends to its prompt, with all rows of that prompt in one product, and to the row's
own tokens. Both products' scores share one softmax. Works for the models whose packed batches work: the attention of
grpo/model/tree_attention.py calls it.
"""

from __future__ import annotations

import torch

GROW = 1.5


class SharedCache:
    """Keys and values of up to `rows` rows, and of up to `slots` prompts with up to `copies` rows each."""

    def __init__(self, rows: int, slots: int, copies: int, longest_prompt: int, longest_completion: int):
        self._rows, self._slots, self._copies = rows, slots, copies
        self._longest_prompt, self._longest_completion = longest_prompt, longest_completion
        self._room = 0
        """tokens of each row that there is room for"""
        self._prompts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """keys and values of each layer, [slots x kv heads, tokens, d]"""
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """keys and values of each layer, [rows x kv heads, tokens, d]"""
        self._filling: list[tuple[int, int]] = []

    def fill(self, slots: list[int], lengths: list[int]) -> None:
        """Put the prompts of the next forward pass, which follow each other in its row, into these slots."""
        self._filling = [*zip(slots, lengths, strict=True)]

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a layer's keys and values [1, kv heads, N, d] of the prompts."""
        heads = key.shape[1]
        if layer not in self._prompts:
            self._prompts[layer], self._own[layer] = (
                tuple(states.new_zeros(count * heads, room, states.shape[3]) for states in (key, value))
                for count, room in ((self._slots, self._longest_prompt), (self._rows, 0))
            )
        for kept, states in zip(self._prompts[layer], (key, value), strict=True):
            start = 0
            for slot, length in self._filling:
                kept[slot * heads : (slot + 1) * heads, :length] = states[0, :, start : start + length]
                start += length

    def step(
        self, cells: torch.Tensor, places: torch.Tensor, prompts: torch.Tensor, slots: int, longest: tuple[int, int]
    ) -> None:
        """Prepare the next forward pass, one token for each of the first len(places) rows.

        `cells` [2, rows]: the slot of each row's prompt, and its number among the rows of the prompt. `places` [rows]:
        which of the row's tokens it is. `prompts` [rows]: tokens of its prompt. `slots`: the first slots that hold all
        of these prompts. `longest`: tokens of the longest prompt, and of the longest row with this token.
        """
        if longest[1] > self._room:
            self._room = min(max(longest[1], 64, int(self._room * GROW)), self._longest_completion)
            for layer, pair in self._own.items():
                self._own[layer] = tuple(self._wider(states) for states in pair)
        self._cells, self._places, self._used, self._longest = cells, places, slots, longest
        self._indices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        prompt, own = (torch.arange(length, device=places.device) for length in longest)
        seen = torch.cat([prompt < prompts.unsqueeze(1), own <= places.unsqueeze(1)], dim=1)
        self._mask = torch.zeros(seen.shape, device=places.device).masked_fill_(~seen, -torch.inf)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Keep and attend: query [rows, heads, 1, d], key and value [rows, kv heads, 1, d] -> [rows, 1, heads, d]."""
        rows, heads = key.shape[:2]
        repeat = query.shape[1] // heads
        cells, places = self._index(heads)
        for states, new in zip(self._own[layer], (key, value), strict=True):
            states.view(-1, states.shape[2]).index_copy_(0, places, new.reshape(rows * heads, -1))
        prompt, own = self._longest
        prompt_keys, prompt_values = (states[: self._used * heads, :prompt] for states in self._prompts[layer])
        keys, values = (states[: rows * heads, :own] for states in self._own[layer])

        def with_prompt(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            """Multiply all rows of a prompt at once: [rows x heads, repeat, a], [slots x heads, a, b]."""
            grid = left.new_zeros(self._used * heads * self._copies, repeat * left.shape[2])
            grid.index_copy_(0, cells, left.flatten(1))
            product = _product(grid.view(self._used * heads, self._copies * repeat, -1), right)
            return product.view(len(grid), -1).index_select(0, cells).view(rows * heads, repeat, -1)

        query = query.reshape(rows * heads, repeat, -1)
        of_prompt = with_prompt(query, prompt_keys.transpose(1, 2))
        scores = torch.cat([of_prompt, _product(query, keys.transpose(1, 2))], dim=2).mul_(scaling)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores.view(rows, heads * repeat, -1).add_(self._mask.unsqueeze(1))
        weights = scores.softmax(dim=2)
        out = with_prompt(weights[..., :prompt], prompt_values) + _product(weights[..., prompt:], values)
        return out.to(value.dtype).view(rows, 1, heads * repeat, -1)

    def move(self, row: int, to: int, tokens: int) -> None:
        """Copy the first tokens of a row to another row."""
        for pair in self._own.values():
            for states in pair:
                by_row = states.unflatten(0, (self._rows, -1))
                by_row[to, :, :tokens] = by_row[row, :, :tokens]

    def _wider(self, states: torch.Tensor) -> torch.Tensor:
        wider = states.new_zeros(states.shape[0], self._room, states.shape[2])
        wider[:, : states.shape[1]] = states
        return wider

    def _index(self, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's and head's place among the prompts' rows and among the tokens kept: int64 [rows x heads].

        Layers with as many heads share them.
        """
        if heads not in self._indices:
            (slot, number), head = self._cells.unsqueeze(2), torch.arange(heads, device=self._places.device)
            row = torch.arange(len(self._places), device=self._places.device).unsqueeze(1)
            cells = (slot * heads + head) * self._copies + number
            places = (row * heads + head) * self._room + self._places.unsqueeze(1)
            self._indices[heads] = cells.flatten(), places.flatten()
        return self._indices[heads]


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [n, a, b] by [n, b, c] into float32 [n, a, c].

    Rounded to 16 bits, scores would move log-probs by several per cent.
    """
    if right.is_cuda and right.dtype != torch.float32:
        return torch.bmm(left.to(right.dtype), right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())

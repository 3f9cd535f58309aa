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
        """keys [slots, kv heads, tokens, d] and values of each layer"""
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """keys [rows, kv heads, tokens, d] and values of each layer"""
        self._filling: list[tuple[int, int]] = []

    def fill(self, slots: list[int], lengths: list[int]) -> None:
        """Put the prompts of the next forward pass, which follow each other in its row, into these slots."""
        self._filling = [*zip(slots, lengths, strict=True)]

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a layer's keys and values [1, kv heads, N, d] of the prompts."""
        if layer not in self._prompts:
            self._prompts[layer] = tuple(
                states.new_zeros(self._slots, states.shape[1], self._longest_prompt, states.shape[3])
                for states in (key, value)
            )
            self._own[layer] = tuple(
                states.new_zeros(self._rows, states.shape[1], 0, states.shape[3]) for states in (key, value)
            )
        for kept, states in zip(self._prompts[layer], (key, value), strict=True):
            start = 0
            for slot, length in self._filling:
                kept[slot, :, :length] = states[0, :, start : start + length]
                start += length

    def step(
        self, cells: torch.Tensor, places: torch.Tensor, prompts: torch.Tensor, slots: int, longest: tuple[int, int]
    ) -> None:
        """Prepare the next forward pass, one token for each of the first len(places) rows.

        `cells` [rows]: slot of the row's prompt x copies + its number among the prompt's rows. `places` [rows]: which
        of the row's tokens it is. `prompts` [rows]: tokens of its prompt. `slots`: the first slots that hold all of
        these prompts. `longest`: tokens of the longest prompt, and of the longest row with this token.
        """
        tokens = longest[1]
        if tokens > self._room:
            self._room = min(max(tokens, 64, int(self._room * GROW)), self._longest_completion)
            for layer, pair in self._own.items():
                self._own[layer] = tuple(self._wider(states) for states in pair)
        self._cells, self._places, self._used = cells, places, slots
        self._longest = longest
        self._numbers = torch.arange(len(places), device=places.device)
        prompt, own = (torch.arange(length, device=places.device) for length in longest)
        seen = torch.cat([prompt < prompts.unsqueeze(1), own <= places.unsqueeze(1)], dim=1)
        self._mask = torch.zeros(seen.shape, device=places.device).masked_fill_(~seen, -torch.inf)[:, None, None]

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
        keys, values = self._own[layer]
        keys[self._numbers, :, self._places], values[self._numbers, :, self._places] = key[:, :, 0], value[:, :, 0]
        rows, heads, _, width = query.shape
        grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
        prompt, own = self._longest
        prompt_keys, prompt_values = (states[: self._used, :, :prompt] for states in self._prompts[layer])
        of_prompt = self._leave_grid(_product(self._enter_grid(grouped), prompt_keys.transpose(2, 3)))
        of_own = _product(grouped, keys[:rows, :, :own].transpose(2, 3))
        scores = torch.cat([of_prompt, of_own], dim=3).mul_(scaling)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        weights = scores.add_(self._mask).softmax(dim=3)
        out = self._leave_grid(_product(self._enter_grid(weights[..., :prompt]), prompt_values))
        out += _product(weights[..., prompt:], values[:rows, :, :own])
        return out.to(query.dtype).view(rows, 1, heads, -1)

    def move(self, row: int, to: int, tokens: int) -> None:
        """Copy the first tokens of a row to another row."""
        for pair in self._own.values():
            for states in pair:
                states[to, :, :tokens] = states[row, :, :tokens]

    def _wider(self, states: torch.Tensor) -> torch.Tensor:
        wider = states.new_zeros(*states.shape[:2], self._room, states.shape[3])
        wider[:, :, : states.shape[2]] = states
        return wider

    def _enter_grid(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, kv heads, repeat, n] -> [slots, kv heads, copies x repeat, n], zeros where there is no row."""
        _, heads, repeat, width = states.shape
        grid = states.new_zeros(self._used * self._copies, heads, repeat, width).index_copy_(0, self._cells, states)
        return grid.view(self._used, self._copies, heads, repeat, width).transpose(1, 2).flatten(2, 3)

    def _leave_grid(self, grid: torch.Tensor) -> torch.Tensor:
        """Undo `_enter_grid`."""
        slots, heads, _, width = grid.shape
        cells = grid.view(slots, heads, self._copies, -1, width).transpose(1, 2).flatten(0, 1)
        return cells.index_select(0, self._cells)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [n, m, a, b] by [n, m, b, c] into float32 [n, m, a, c].

    Rounded to 16 bits, scores would move log-probs by several per cent.
    """
    shape, left, right = left.shape[:2], left.flatten(0, 1), right.flatten(0, 1)
    if right.is_cuda and right.dtype != torch.float32:
        return torch.bmm(left.to(right.dtype), right, out_dtype=torch.float32).unflatten(0, shape)
    return torch.bmm(left.float(), right.float()).unflatten(0, shape)

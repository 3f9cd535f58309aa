"""Rows that neighbouring ranks share, for sequences that are too long for one card (sequence parallelism).

Each rank feeds its part of a packed row to the model. Around every attention two exchanges give it its share of the
heads for all tokens, and back (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509). Log-probs are joined: every
rank computes the same loss and goes back through its own part, so that the ranks' gradients add up to the loss's.
DeepSpeed's own class replaces attention in the whole process, and a pass of one rank alone would take the others'
tokens without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowRanks:
    """The ranks that share rows with this one, itself among them."""

    group: dist.ProcessGroup
    size: int
    rank: int  # this one's among them

    @classmethod
    def of(cls, size: int) -> RowRanks:
        """Group the ranks by `size`, neighbours together. All ranks of the run call it."""
        firsts = range(0, dist.get_world_size(), size)
        groups = [dist.new_group(range(first, first + size)) for first in firsts]
        number, rank = divmod(dist.get_rank(), size)
        return cls(group=groups[number], size=size, rank=rank)

    def gather(self, values: list) -> tuple[list, slice]:
        """Return the values of all these ranks, in order, and the place of this one's own objects. All call it."""
        parts: list[list] = [[]] * self.size
        dist.all_gather_object(parts, values, group=self.group)
        parts[self.rank] = values
        begin = sum(map(len, parts[: self.rank]))
        return [*chain(*parts)], slice(begin, begin + len(values))


@dataclass(frozen=True)
class RowParts:
    """What joins the results of a row's parts."""

    ranks: RowRanks
    counts: list[int]  # how many completion tokens each rank predicts, T in all
    places: Tensor  # int64 [T], the place of a token's result in those of the ranks, one after the other

    def attend(self, packed: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
        """Attend over the whole row with this rank's heads. Shapes as in grpo/model/tree_attention.py, of the part."""
        if (copies := self.ranks.size // key.shape[1]) > 1:  # fewer key heads than ranks
            key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        query, key, value = (_Exchange.apply(states, self.ranks.group, 1, 2) for states in (query, key, value))
        return _Exchange.apply(packed(query, key, value, *more), self.ranks.group, 1, 2)

    def own(self, values: Tensor) -> Tensor:
        """Return those of all tokens' values, [T, ...], that are of this rank's."""
        begin = sum(self.counts[: self.ranks.rank])
        return values[self.places.argsort()[begin : begin + self.counts[self.ranks.rank]]]

    def join(self, values: Tensor | None) -> Tensor | None:
        """Return all tokens' values, [T, ...], of each rank's own. The gradient goes back through this one's alone."""
        return None if values is None else _Join.apply(values, self.counts, self.ranks)[self.places]


class _Exchange(torch.autograd.Function):
    """Cut a tensor by one dimension, give each rank its piece, and join what came along the other dimension."""

    @staticmethod
    def forward(ctx, states, group, cut, joined):
        ctx.group, ctx.cut, ctx.joined = group, cut, joined
        sent = torch.stack(states.chunk(dist.get_world_size(group), dim=cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=joined)

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, ctx.group, ctx.joined, ctx.cut), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, counts, ranks):
        ctx.begin, ctx.count = sum(counts[: ranks.rank]), len(values)
        padded = torch.cat([values, values.new_zeros(max(counts) - len(values), *values.shape[1:])])
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=ranks.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, gradient):
        return gradient.narrow(0, ctx.begin, ctx.count), None, None

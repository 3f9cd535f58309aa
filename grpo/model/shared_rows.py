"""Rows that neighbouring ranks share, for sequences that are too long for one card (sequence parallelism).

Each rank feeds its part of a packed row to the model. Around every attention two exchanges give it its share of the
heads for all tokens, and back (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509). Log-probs are joined: every
rank computes the same loss and goes back through its own part, so that the ranks' gradients add up to the loss's.
DeepSpeed's own class replaces attention in the whole process, and a pass of one rank alone would take the others'
tokens without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from grpo.config.errors import require
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batch, Batcher, Tree
from grpo.model.trial import SAME, distance, trial_sequences


@dataclass(frozen=True)
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
        return cls(groups[number], size, rank)

    def gather(self, values: list) -> tuple[list, slice]:
        """Return the values of all these ranks, in their order, and which are this one's: those are the same objects.
        All of them call it together."""
        parts: list[list] = [[]] * self.size
        dist.all_gather_object(parts, values, group=self.group)
        parts[self.rank] = values
        begin = sum(map(len, parts[: self.rank]))
        return [*chain(*parts)], slice(begin, begin + len(values))

    def part_of(self, batch: Batch) -> Batch:
        """Return this rank's part of a packed row. The row gets a prompt at its end if the ranks cannot share it
        equally."""
        tokens = batch.input_ids.shape[1]
        share = -(-tokens // self.size)
        rest = share * self.size - tokens
        tree = Tree([*batch.tree.groups, (rest, [])], [*batch.tree.blocks, None]) if rest else batch.tree
        part = slice(self.rank * share, (self.rank + 1) * share)
        ids, positions = (F.pad(values, (0, rest))[:, part] for values in (batch.input_ids, batch.position_ids))
        rank_of = batch.predicts // share
        mine = (rank_of == self.rank).nonzero()[:, 0]
        counts = rank_of.bincount(minlength=self.size).tolist()
        return replace(
            batch,
            input_ids=ids,
            position_ids=positions,
            tree=tree,
            predicts=batch.predicts[mine] - part.start,
            targets=batch.targets[mine],
            parts=RowParts(self, counts, rank_of.argsort(stable=True).argsort()),
        )


@dataclass(frozen=True)
class RowParts:
    """What joins the results of a row's parts."""

    ranks: RowRanks
    counts: list[int]  # how many completion tokens each rank predicts, T in all
    places: Tensor  # int64 [T], where a token's result is in those of the ranks, one after the other

    def attend(self, packed: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
        """Attend over the whole row with this rank's heads. Shapes as in grpo/model/tree_attention.py, of the part."""
        if (copies := self.ranks.size // key.shape[1]) > 1:  # fewer key heads than ranks
            key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        of_row = (_Exchange.apply(states, self.ranks.group, 1, 2) for states in (query, key, value))
        return _Exchange.apply(packed(*of_row, *more), self.ranks.group, 1, 2)

    def join(self, values: Tensor | None) -> Tensor | None:
        """Return all tokens' values, [T], of this rank's, on every rank. The gradient goes back through these alone."""
        return None if values is None else _Join.apply(values, self.counts, self.ranks)[self.places]


class _Exchange(torch.autograd.Function):
    """Cut a tensor by one dimension, give each rank its piece, and join what came along the other dimension."""

    @staticmethod
    def forward(ctx, states, group, cut, joined):
        ctx.group, ctx.dimensions = group, (joined, cut)
        sent = torch.stack(states.chunk(dist.get_world_size(group), dim=cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=joined)

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, ctx.group, *ctx.dimensions), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, counts, ranks):
        ctx.place = sum(counts[: ranks.rank]), len(values)
        padded = F.pad(values, (0, max(counts) - len(values)))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=ranks.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, gradient):
        return gradient.narrow(0, *ctx.place), None, None


def check_heads(config: PreTrainedConfig, ranks: int) -> None:
    """Raise ConfigError if so many ranks cannot share the attention heads."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    fits = heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)
    reason = f"the model has {heads} attention heads and {keys} key heads, which so many ranks cannot share equally"
    require(fits, "sequence_parallel_size", ranks, f"{reason}: use another number")


@torch.no_grad()
def share_rows(batcher: Batcher, model: PreTrainedModel, size: int) -> Batcher:
    """Return a batcher whose rows `size` ranks share. Raises ConfigError if the model does not allow it. All ranks call
    it together."""
    if size == 1:
        return batcher

    def refuse_unless(works: bool, reason: str) -> None:
        require(works, "sequence_parallel_size", size, f"{type(model).__name__} {reason}: leave it out")

    refuse_unless(batcher.vision is None, "takes pictures, whose pieces are not shared out")
    refuse_unless(batcher.packs, "takes no packed batches")
    shared = replace(batcher, ranks=RowRanks.of(size))
    rows, others = trial_sequences(model), trial_sequences(model, prompts_at=5)
    in_parts, whole, moved = (
        token_logprobs(model, of.make(sequences, model.device), 1.0)[0]
        for of, sequences in ((shared, rows), (batcher, rows), (batcher, others))
    )
    difference = distance(in_parts, whole)
    same = 1e-4 if model.dtype == torch.float32 else SAME * distance(moved, whole)
    refuse_unless(difference <= same, f"gives other log-probs in shared rows (by {difference:.1e} on average)")
    return shared

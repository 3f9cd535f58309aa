"""Ragged sequences -> right-padded tensors, and the cutting of many sequences into batches by a token budget.

What belongs to a completion is known from lengths alone, never from `id != pad`: pad may be the eos, and the first eos
of a completion is trained like any other token.

    prompts [[7, 8], [9]], completions [[1, 2], [3]], pad 0

    input_ids     7 8 1 2      positions 0 1 2 3      predicts [1, 2, 4]   flat places whose output predicts ...
                  9 3 0 0                0 1 2 3      targets  [1, 2, 3]   ... these completion tokens, in order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """B sequences with T completion tokens in all, padded on the right to L."""

    input_ids: torch.Tensor
    """int64 [B, L]"""
    position_ids: torch.Tensor
    """int64 [B, L], 0 to L - 1 in each row"""
    predicts: torch.Tensor
    """int64 [T], places in the flattened [B * L] whose hidden states predict the completion tokens"""
    targets: torch.Tensor
    """int64 [T], the completion tokens: sequence after sequence, in order"""


def make_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    pad_token_id: int,
    device: torch.device | str,
) -> Batch:
    """B prompts (each at least one token) and their completions (each may be empty) -> one padded batch."""
    longest = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    input_ids = torch.full((len(prompts), longest), pad_token_id, dtype=torch.int64)
    predicts, targets = [], []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt), len(prompt) + len(completion)
        completion_ids = torch.as_tensor(completion, dtype=torch.int64)
        input_ids[row, :start] = torch.as_tensor(prompt, dtype=torch.int64)
        input_ids[row, start:end] = completion_ids
        predicts.append(torch.arange(start - 1, end - 1) + row * longest)
        targets.append(completion_ids)
    position_ids = torch.arange(longest).expand(len(prompts), longest)
    tensors = (input_ids, position_ids, torch.cat(predicts), torch.cat(targets))
    return Batch(*(tensor.to(device) for tensor in tensors))


def cut_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of sequences in batches of at most `budget` padded tokens (rows x longest), like lengths together.

    A sequence that is longer than the budget gets a batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        # Longest first, so a batch's first row is its width.
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches

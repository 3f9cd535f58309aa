"""Attention over packed rows (grpo/batch.py), registered with transformers as an attention implementation.

A prompt attends to itself; a completion attends to its prompt and to itself. That is done a segment at a time, so no
score between two segments that do not see each other is ever computed, and no mask of the whole row exists.
`switch_on` puts it under a model, whose other calls (generate, padded batches) go on through the implementation it had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo.batch import Tree

_ROWS = 256  # queries of one call: few scores above the diagonal are computed in vain, and its mask is small
_PREFIX = "grpo_packed_"


def segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Tree, scaling: float, softcap: float | None
) -> torch.Tensor:
    """A call a segment. [1, heads, N, d], [1, kv heads, N, d] twice -> [1, N, heads, d]."""
    # split, not slices: the backward pass of a slice fills a tensor of the whole row, that of split is one cat.
    queries, keys, values = (iter(states.split(tree.segments, dim=2)) for states in (query, key, value))
    out: list[torch.Tensor] = []
    for _, completions in tree.groups:
        prompt_keys, prompt_values = next(keys), next(values)
        out += _causal(next(queries), prompt_keys, prompt_values, scaling, softcap)
        for _ in completions:
            own_keys = torch.cat([prompt_keys, next(keys)], dim=2)
            own_values = torch.cat([prompt_values, next(values)], dim=2)
            out += _causal(next(queries), own_keys, own_values, scaling, softcap)
    return torch.cat([rows.transpose(1, 2) for rows in out], dim=1)


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Tree, scaling: float, softcap: float | None
) -> torch.Tensor:
    """One call for the row, by flash attention over segments of any length. CUDA, 16 bit. Shapes as `segments`."""
    from torch.nn.attention.varlen import varlen_attn

    if softcap is not None:
        raise NotImplementedError("varlen_attn has no softcap")

    def laid_out(states: torch.Tensor) -> torch.Tensor:
        parts = iter(states.split(tree.segments, dim=2))
        ordered = []
        for _, completions in tree.groups:
            ordered.append(prompt := next(parts))
            for _ in completions:
                ordered += [prompt, next(parts)]
        return torch.cat(ordered, dim=2)[0].transpose(0, 1)

    # Flash attention's causal mask is aligned to the end of the keys, so a completion sees its whole prompt.
    out = varlen_attn(
        query[0].transpose(0, 1),
        laid_out(key),
        laid_out(value),
        tree.queries.to(query.device),
        tree.keys.to(query.device),
        max(tree.segments),
        max(tree.key_lengths),
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.unsqueeze(0)


VARIANTS: dict[str, Callable[..., torch.Tensor]] = {"varlen": varlen, "segments": segments}
"""fastest first"""


def variants_for(model: PreTrainedModel) -> list[str]:
    """Those that may work on the model's device and in its dtype, fastest first."""
    half_on_cuda = model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16)
    return list(VARIANTS) if half_on_cuda else ["segments"]


def switch_on(model: PreTrainedModel, variant: str) -> None:
    """From now on a forward pass of the model's body with `tree=` attends by the tree."""
    switch_off(model)
    own = model.config._attn_implementation
    name = f"{_PREFIX}{variant}_{own}"
    AttentionInterface.register(name, partial(_dispatch, VARIANTS[variant], own))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    model.set_attn_implementation(name)


def switch_off(model: PreTrainedModel) -> None:
    """Back to the attention that the model was loaded with."""
    name = model.config._attn_implementation
    if name.startswith(_PREFIX):
        model.set_attn_implementation(name.removeprefix(_PREFIX).split("_", 1)[1])


def _dispatch(
    packed: Callable[..., torch.Tensor],
    own: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree: Tree | None = None,
    **options,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if tree is None:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)(module, query, key, value, attention_mask, **options)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    return packed(query, key, value, tree, scaling, options.get("softcap")), None


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, softcap: float | None
) -> list[torch.Tensor]:
    """Attention of the last tokens of a sequence, [1, heads, n, d], to all of it, some rows at a time."""
    own, all_keys = query.shape[2], key.shape[2]
    repeat = query.shape[1] // key.shape[1]
    # Grouped heads natively on a CPU; elsewhere they and a mask together fall back to a slow kernel.
    grouped = repeat > 1 and query.device.type == "cpu" and softcap is None
    if repeat > 1 and not grouped:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    attend = partial(F.scaled_dot_product_attention, scale=scaling, enable_gqa=grouped)
    if own == all_keys and softcap is None:
        return [attend(query, key, value, is_causal=True)]
    out = []
    for start in range(0, own, _ROWS):
        rows = query[:, :, start : start + _ROWS]
        seen = all_keys - own + start
        end = seen + rows.shape[2]
        mask = _mask(rows.shape[2], seen, query.dtype, query.device)
        if softcap is None:
            out.append(attend(rows, key[:, :, :end], value[:, :, :end], attn_mask=mask))
        else:
            scores = torch.tanh(rows @ key[:, :, :end].transpose(2, 3) * (scaling / softcap)) * softcap + mask
            out.append(scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value[:, :, :end])
    return out


def _mask(rows: int, seen: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, seen + rows]: 0 where a row may look, -inf where it may not. Of floats, as a bool mask is slower."""
    width = 1 << (seen - 1).bit_length() if seen else 0  # powers of two, so that few are ever made
    return _whole_mask(width, dtype, device)[:rows, width - seen : width + rows]


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a mask that was made in inference mode could not be used in a backward pass later
def _whole_mask(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    above = torch.full((_ROWS, _ROWS), -torch.inf, dtype=dtype, device=device).triu(1)
    return torch.cat([torch.zeros(_ROWS, width, dtype=dtype, device=device), above], dim=1)

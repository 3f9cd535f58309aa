"""Attention over packed rows (grpo/model/packing.py), registered with transformers as an attention implementation.

A prompt attends to itself; a completion attends to its prompt and to itself. Attention runs one segment at a time, so
no score between two segments that do not see each other is ever computed, and no mask of the whole row exists. In
layers with a window (`sliding_window`) a token sees so many of these tokens: itself and the last ones before it.
`switch_on` installs it in a model, whose other calls (generate, padded batches) still use the implementation it had.
With a `shared_cache` the keys and values of packed prompts are kept, and later passes draw from them token by token.
"""

import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial
from inspect import signature

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo.model.packing import RowParts, Tree
from grpo.model.shared_cache import Scoring, SharedCache

ROWS = 256  # queries of one call: few scores are computed for nothing, and its mask is small
_PREFIX = "grpo_packed_"


def segments(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scoring: Scoring) -> Tensor:
    """Attend with one call for each segment, and one for a whole small group. Queries [1, heads, N, d], keys and values
    [1, kv heads, N, d] -> [1, N, heads, d]."""
    # split, not slices: the backward pass of a slice fills a tensor of the whole row, that of split is one cat.
    sizes = [prompt + sum(completions) for prompt, completions in tree.groups]
    out: list[Tensor] = []
    parts = zip(*(states.split(sizes, dim=2) for states in (query, key, value)), strict=True)
    for place, ((prompt, completions), blocks, group) in enumerate(zip(tree.groups, tree.blocks, parts, strict=True)):
        if completions and blocks is None and sum(completions) + prompt <= ROWS:
            mask = _group_mask(prompt, tuple(completions), scoring.window, query.dtype, query.device)
            queries, keys, values = group
            out.append(_attend(queries, keys, values, mask, scoring))
            continue
        of_segments = (states.split([prompt, *completions], dim=2) for states in group)
        (queries, prompt_keys, prompt_values), *of_completions = zip(*of_segments, strict=True)
        if blocks is None:
            out += _causal(queries, prompt_keys, prompt_values, scoring)
        else:
            if (of_layers := (place, scoring.window, query.dtype, query.device)) not in tree.masks:
                tree.masks[of_layers] = _picture_mask(blocks, scoring.window, query.dtype, query.device)
            out.append(_attend(queries, prompt_keys, prompt_values, tree.masks[of_layers], scoring))
        for queries, own_keys, own_values in of_completions:
            keys, values = torch.cat([prompt_keys, own_keys], dim=2), torch.cat([prompt_values, own_values], dim=2)
            out += _causal(queries, keys, values, scoring)
    return torch.cat([rows.transpose(1, 2) for rows in out], dim=1)


def varlen(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scoring: Scoring) -> Tensor:
    """Attend with one call for the row, shapes as in `segments`: flash attention on CUDA in 16 bit."""
    from torch.nn.attention.varlen import varlen_attn

    if scoring.softcap is not None or any(blocks is not None for blocks in tree.blocks):
        raise NotImplementedError("varlen_attn has no softcap, and no mask for pictures whose pieces see each other")

    def laid_out(states: Tensor) -> Tensor:
        parts = iter(states.split(tree.segments, dim=2))
        ordered = []
        for _, completions in tree.groups:
            ordered.append(prompt := next(parts))
            for _ in completions:
                ordered += [prompt, next(parts)]
        return torch.cat(ordered, dim=2)[0].transpose(0, 1)

    # Flash attention's causal mask is aligned to the end of the keys, so a completion sees its whole prompt.
    query_ends, key_ends = tree.ends(query.device)
    out = varlen_attn(
        query[0].transpose(0, 1),
        laid_out(key),
        laid_out(value),
        cu_seq_q=query_ends,
        cu_seq_k=key_ends,
        max_q=max(tree.segments),
        max_k=max(tree.key_lengths),
        scale=scoring.scaling,
        window_size=(-1 if scoring.window is None else scoring.window - 1, 0),
        **_grouped(query.shape[1] > key.shape[1]),
    )
    return out.unsqueeze(0)


@cache
def _grouped(heads_are_grouped: bool) -> dict[str, bool]:
    """Return how varlen_attn is told that heads share keys: torch 2.13 wants to know it, 2.11 takes them anyway."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": heads_are_grouped} if "enable_gqa" in signature(varlen_attn).parameters else {}


VARIANTS: dict[str, Callable[..., Tensor]] = {"varlen": varlen, "segments": segments}  # fastest first


def variants_for(model: PreTrainedModel) -> list[str]:
    """Return the variants that may work on the model's device and in its dtype, fastest first."""
    half_on_cuda = model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16)
    return list(VARIANTS) if half_on_cuda else ["segments"]


def switch_on(model: PreTrainedModel, variant: str) -> None:
    """Let forward passes of the model's body with `tree=` attend by the tree."""
    switch_off(model)
    original = model.config._attn_implementation
    name = f"{_PREFIX}{variant}_{original}"
    AttentionInterface.register(name, partial(_dispatch, VARIANTS[variant], original))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    model.set_attn_implementation(name)


def switch_off(model: PreTrainedModel) -> None:
    """Give the model the attention back that it was loaded with."""
    name = model.config._attn_implementation
    if name.startswith(_PREFIX):
        model.set_attn_implementation(name.removeprefix(_PREFIX).split("_", 1)[1])


def _dispatch(
    packed: Callable[..., Tensor],
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree: Tree | None = None,
    parts: RowParts | None = None,
    shared_cache: SharedCache | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    # A vision tower gets the arguments of its language model.
    if (tree is None and shared_cache is None) or not getattr(module, "is_causal", True):
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        return attend(module, query, key, value, attention_mask, **options)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    scoring = Scoring(scaling, options.get("softcap"), options.get("sliding_window"))
    if tree is not None:
        if shared_cache is not None:
            shared_cache.keep(module.layer_idx, key, value)
        attend = packed if parts is None else partial(parts.attend, packed)
        return attend(query, key, value, tree, scoring), None
    attend = _after_rows if shared_cache.fed else SharedCache.attend
    out = attend(shared_cache, module.layer_idx, query=query, key=key, value=value, scoring=scoring)
    return out, None


def _after_rows(cache: SharedCache, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attend from the tokens that are fed to rows to all that each row has. Shapes as in `segments`."""
    out: list[Tensor] = []
    parts = query.split([fed.count for fed in cache.fed], dim=2)
    for queries, (keys, values) in zip(parts, cache.extend(layer, key, value), strict=True):
        out += _causal(queries, keys, values, scoring)
    return torch.cat([rows.transpose(1, 2) for rows in out], dim=1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> list[Tensor]:
    """Attend from the last tokens of a sequence, [1, heads, n, d], to all of it, ROWS queries at a time."""
    queries, keys, window = query.shape[2], key.shape[2], scoring.window
    if window is not None and window >= keys:
        window = None
    if queries == keys and scoring.softcap is None and window is None:
        return [_attend(query, key, value, None, scoring)]
    out = []
    for start, rows in zip(range(0, queries, ROWS), query.split(ROWS, dim=2), strict=True):
        seen = keys - queries + start
        begin, end = 0 if window is None else max(0, seen - window + 1), seen + rows.shape[2]
        mask = _mask(rows.shape[2], seen - begin, window, query.dtype, query.device)
        if query.is_cuda:
            mask = _aligned(mask)
        out.append(_attend(rows, key[:, :, begin:end], value[:, :, begin:end], mask, scoring))
    return out


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attend with one call, causal without a mask. Return [1, heads, n, d], as the query."""
    repeat = query.shape[1] // key.shape[1]
    scaling, softcap, _ = scoring
    # On a CPU the kernel takes grouped heads; elsewhere grouped heads with a mask fall back to a slow kernel.
    grouped = repeat > 1 and query.device.type == "cpu" and softcap is None
    if repeat > 1 and not grouped:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)) * softcap + mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


@lru_cache(maxsize=64)  # 256 kB each at most; one mask serves all layers
@torch.inference_mode(False)  # a mask that was made in inference mode could not be used in a backward pass later
def _group_mask(
    prompt: int, completions: tuple[int, ...], window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the mask of a whole group, [n, n]: each token sees its segment and the prompt, up to itself."""
    lengths = torch.tensor([prompt, *completions]).to(device)
    numbers = torch.arange(len(lengths), device=device)
    # Without output_size the call would wait for the GPU to add the lengths up.
    segment = numbers.repeat_interleave(lengths, output_size=prompt + sum(completions))
    seen = (segment == 0) | (segment == segment.unsqueeze(1))
    if window is not None:
        # A completion's tokens follow the prompt's, whatever is between them in the row.
        between = (lengths.cumsum(0) - lengths - prompt * (numbers > 0)).index_select(0, segment)
        seen &= _in_window(torch.arange(len(segment), device=device) - between, window)
    return _minus_infinity_unless(seen.tril(), dtype)


@torch.inference_mode(False)  # as for _group_mask
def _picture_mask(blocks: np.ndarray, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of a prompt with Tree's blocks, [n, n]: causal, but pieces of a picture see each other."""
    block = torch.from_numpy(blocks).to(device)
    same = (block == block.unsqueeze(1)) & (block >= 0)
    seen = torch.ones(same.shape, dtype=torch.bool, device=device).tril() | same
    if window is not None:
        seen &= _in_window(torch.arange(len(block), device=device), window)
    return _minus_infinity_unless(seen, dtype)


def _in_window(places: Tensor, window: int) -> Tensor:
    return places.unsqueeze(1) - places < window


def _minus_infinity_unless(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return _aligned(torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf))


def _aligned(mask: Tensor) -> Tensor:
    """Copy a mask so that each row begins at a multiple of 16 numbers: a GPU's kernel refuses others."""
    rows, columns = mask.shape
    return mask.new_empty(rows, columns + -columns % 16)[:, :columns].copy_(mask)


def _mask(rows: int, seen: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a causal mask, [rows, seen + rows]: 0 for a key that is seen, -inf for others. A bool mask is slower. With
    a window `seen` is less than it."""
    width = 1 << (seen - 1).bit_length() if seen else 0  # powers of two, so that few masks are ever made
    if window is not None:
        width = window - 1
    return _whole_mask(ROWS, width, window is not None, dtype, device)[:rows, width - seen : width + rows]


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # as for _group_mask
def _whole_mask(rows: int, width: int, is_window: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    hidden = torch.full((rows, width + rows), -torch.inf, dtype=dtype, device=device)
    return hidden.triu(width + 1) + hidden.tril(-1) if is_window else hidden.triu(width + 1)

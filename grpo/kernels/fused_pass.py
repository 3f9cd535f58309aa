"""The pass of grpo/model/token_pass.py by Triton kernels, 9 launches a layer instead of 38; its norms and products.

On a card a step of a small model takes as long as its launches; with few rows its time is that of the weights, which
are read where they lie: three or two matrices in one launch, not copied side by side. What is no plain linear layer (an
adapter, a quantised weight) does its own work, and the kernels the rest. Values are rounded to the model's dtype where
transformers' modules round them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from grpo.kernels.attention import HeadNorms, attend, dot, precision, rotate_and_keep, rounded
from grpo.model.shared_cache import SharedCache
from grpo.model.token_pass import TokenPass

SHARED_BYTES = 96 * 1024  # of shared memory for a program's tiles: what a consumer card has, and a server card more


class FusedPass(TokenPass):
    """The pass by kernels. It reads the weights in place, and makes no copy of them."""

    def __init__(self, body: nn.Module, cache: SharedCache, positions: int):
        """Every position of a token is less than `positions`."""
        super().__init__(body, cache, positions)
        self._last, self._fused = body.norm, [_FusedLayer(layer) for layer in body.layers]

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden, more, angles = self._embed(tokens), None, self._angles_at(positions)
        for layer, fused in zip(self._layers, self._fused, strict=True):
            states = _normed(hidden, more, fused.norm)
            query = rotate_and_keep(self._cache, layer.number, fused.project(states), angles, fused.head_norms)
            more = layer.output(attend(self._cache, layer.number, query, layer.scoring))
            more = layer.down(fused.gated(_normed(hidden, more, fused.mlp_norm)))
        return _normed(hidden, more, self._last)


class _FusedLayer:
    def __init__(self, layer: nn.Module):
        attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm, attention.k_norm
            self.head_norms = HeadNorms(query=query.weight, key=key.weight, epsilon=query.variance_epsilon)
        self._projections = attention.q_proj, attention.k_proj, attention.v_proj
        self._gates, self._activation = (mlp.gate_proj, mlp.up_proj), mlp.act_fn
        self._is_joined = _are_plain(self._projections)
        self._is_gated = _are_plain(self._gates) and isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation))

    def project(self, states: Tensor) -> tuple[Tensor, ...]:
        if self._is_joined:
            return project(states, *self._projections)
        return tuple(projection(states) for projection in self._projections)

    def gated(self, states: Tensor) -> Tensor:
        if self._is_gated:
            return gated(states, *self._gates)
        gate, up = self._gates
        return self._activation(gate(states)) * up(states)


def _are_plain(modules: tuple[nn.Module, ...]) -> bool:
    """Return whether these are linear layers and nothing more, all with a bias or all without, as they lie."""
    plain = all(type(module) is nn.Linear and module.weight.is_contiguous() for module in modules)
    return plain and len({module.bias is None for module in modules}) == 1


def _normed(hidden: Tensor, more: Tensor | None, norm: nn.Module) -> Tensor:
    return add_norm(hidden, more, norm.weight, norm.variance_epsilon)


def add_norm(hidden: Tensor, more: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add `more` to `hidden` in place, both [rows, size]; return its RMS norm (Zhang & Sennrich 2019,
    arXiv:1910.07467) times the weight [size]."""
    (rows, size), out = hidden.shape, torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        hidden=hidden,
        more=hidden if more is None else more,
        weight=weight,
        out=out,
        size=size,
        epsilon=epsilon,
        HAS_MORE=more is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return out


@triton.jit
def _add_norm(hidden, more, weight, out, size, epsilon, HAS_MORE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    places = tl.program_id(0) * size + columns
    states = tl.load(hidden + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_MORE:
        states += tl.load(more + places, mask=inside, other=0.0).to(tl.float32)
        states = rounded(states, hidden)
        tl.store(hidden + places, states, mask=inside)
    states = rounded(states * tl.rsqrt(tl.sum(states * states) / size + epsilon), hidden)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, states * scale, mask=inside)


class _Tiles:
    """The sizes of the tiles of a product [rows, size] @ [columns, size].T."""

    def __init__(self, states: Tensor, columns: int):
        item = states.element_size()
        self.rows = min(128, max(16, triton.next_power_of_2(len(states))))
        self.columns = 64 if columns >= 8192 else 32  # smaller ones keep more of a card's processors busy
        inner = (128 if self.rows <= 64 else 64) * 2 // item
        of_stage = (self.rows + self.columns) * inner * item
        self.options = {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "INNER": inner,
            "PRECISION": precision(states),
            "num_warps": 8 if self.rows == 128 else 4,
            "num_stages": max(2, min(4, SHARED_BYTES // of_stage)),
        }


def _bias(of: nn.Linear) -> Tensor:
    return of.weight if of.bias is None else of.bias  # which the kernel does not read


def project(states: Tensor, query: nn.Linear, key: nn.Linear, value: nn.Linear) -> tuple[Tensor, ...]:
    """Multiply states [rows, size] by three weights: [rows, columns] each."""
    (rows, size), columns, kept = states.shape, len(query.weight), len(key.weight)
    out = states.new_empty(rows, columns + 2 * kept)
    tiles = _Tiles(states, out.shape[1])
    blocks = triton.cdiv(columns, tiles.columns) + 2 * triton.cdiv(kept, tiles.columns)
    _project[(triton.cdiv(rows, tiles.rows), blocks)](
        states=states,
        query=query.weight,
        key=key.weight,
        value=value.weight,
        query_bias=_bias(query),
        key_bias=_bias(key),
        value_bias=_bias(value),
        out=out,
        rows=rows,
        size=size,
        query_columns=columns,
        kept_columns=kept,
        HAS_BIAS=query.bias is not None,
        **tiles.options,
    )
    return out.split([columns, kept, kept], dim=1)


@triton.jit
def _product(states, weight, row, column, rows, columns, size, INNER: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply the states of the rows [ROWS] by the weights of the columns [COLUMNS]: float32 [ROWS, COLUMNS]."""
    inner = tl.arange(0, INNER)
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for start in range(0, size, INNER):
        place = start + inner
        left = tl.load(
            states + row[:, None] * size + place[None, :],
            mask=(row < rows)[:, None] & (place < size)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + column[None, :] * size + place[:, None],
            mask=(column < columns)[None, :] & (place < size)[:, None],
            other=0.0,
        )
        total = dot(left, right, total, PRECISION)
    return total


@triton.jit(do_not_specialize=["rows"])
def _project(
    states,
    query,
    key,
    value,
    query_bias,
    key_bias,
    value_bias,
    out,
    rows,
    size,
    query_columns,
    kept_columns,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(1)
    query_blocks, kept_blocks = tl.cdiv(query_columns, COLUMNS), tl.cdiv(kept_columns, COLUMNS)
    weight, bias, columns, before = query, query_bias, query_columns, 0
    if block >= query_blocks + kept_blocks:
        block -= query_blocks + kept_blocks
        weight, bias, columns, before = value, value_bias, kept_columns, query_columns + kept_columns
    elif block >= query_blocks:
        block -= query_blocks
        weight, bias, columns, before = key, key_bias, kept_columns, query_columns
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    total = _product(
        states, weight, row, column, rows=rows, columns=columns, size=size, INNER=INNER, PRECISION=PRECISION
    )
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * (query_columns + 2 * kept_columns) + before + column[None, :]
    tl.store(out + place, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


def gated(states: Tensor, gate: nn.Linear, up: nn.Linear) -> Tensor:
    """Compute silu(gate) x up of states [rows, size]: [rows, columns] (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""
    (rows, size), columns = states.shape, len(gate.weight)
    out = states.new_empty(rows, columns)
    tiles = _Tiles(states, columns)
    _gated[(triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns))](
        states=states,
        gate=gate.weight,
        up=up.weight,
        gate_bias=_bias(gate),
        up_bias=_bias(up),
        out=out,
        rows=rows,
        size=size,
        columns=columns,
        HAS_BIAS=gate.bias is not None,
        **tiles.options,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _gated(
    states,
    gate,
    up,
    gate_bias,
    up_bias,
    out,
    rows,
    size,
    columns,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    of_gate = _product(
        states, gate, row, column, rows=rows, columns=columns, size=size, INNER=INNER, PRECISION=PRECISION
    )
    of_up = _product(states, up, row, column, rows=rows, columns=columns, size=size, INNER=INNER, PRECISION=PRECISION)
    if HAS_BIAS:
        of_gate += tl.load(gate_bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        of_up += tl.load(up_bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    of_gate, of_up = rounded(of_gate, out), rounded(of_up, out)
    of_gate = rounded(of_gate * tl.sigmoid(of_gate), out)
    place = row[:, None] * columns + column[None, :]
    tl.store(out + place, of_gate * of_up, mask=(row < rows)[:, None] & (column < columns)[None, :])

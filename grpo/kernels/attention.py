"""Triton kernels of a decode step's attention: rotation and cache write, parts of the attention, and their join.

A row's token attends to its prompt, in one product with all rows of that prompt, and to the row's own tokens. Prompts
and rows are cut into parts, each a program with a softmax of its own; the parts are joined by their logsumexp
(Hydragen, Juravsky et al. 2024, arXiv:2402.05099, section 3; Flash-Decoding). A cell of the cache that no row sees is
not read: its content does not matter.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo.model.shared_cache import Scoring, SharedCache

PART = 256  # tokens of a part: of any length of the cache, so that a row's numbers do not depend on the others'
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(values, like):
    """Round to the dtype of a pointer: as float32."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def dot(left, right, total, PRECISION: tl.constexpr):
    """Add a product of matrices to `total`, float32."""
    if IS_INTERPRETED:  # its own takes no bfloat16; products of 16 bits are exact in float32
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return tl.dot(left, right, total, input_precision=PRECISION)


def precision(states: Tensor) -> str:
    """Return the `input_precision` of tl.dot: products of float32 would be rounded to 10 bits."""
    return "ieee" if states.element_size() == 4 else "tf32"


class HeadNorms(NamedTuple):
    """The weights of the RMS norms over a head, of queries and keys [head size]."""

    query: Tensor
    key: Tensor
    epsilon: float


def rotate_and_keep(
    cache: SharedCache,
    layer: int,
    projected: tuple[Tensor, Tensor, Tensor],
    angles: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    """Norm and rotate queries [rows, heads x size] and keys [rows, kv heads x size], keep keys and values in the cache,
    and return the queries: [rows, heads, size]. `angles` [rows, 2, 1, size]: cosines, and sines whose first half is
    negated (RoFormer, Su et al. 2021, arXiv:2104.09864, section 3.4.2, in transformers' order of dimensions)."""
    (query, key, value), size = projected, angles.shape[3]
    kept, heads, kv_heads = cache.of_layer(layer), query.shape[1] // size, key.shape[1] // size
    out = query.new_empty(len(query), heads, size)
    _rotate_and_keep[(len(query), heads + 2 * kv_heads)](
        query=query,
        key=key,
        value=value,
        angles=angles,
        query_norm=query if norms is None else norms.query,
        key_norm=key if norms is None else norms.key,
        epsilon=0.0 if norms is None else norms.epsilon,
        out=out,
        own_keys=kept.own_keys,
        own_values=kept.own_values,
        places=cache.now.places,
        query_stride=query.stride(0),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        room=cache.room,
        heads=heads,
        kv_heads=kv_heads,
        HAS_NORMS=norms is not None,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1,
    )
    return out


@triton.jit
def _normed(head, weight, column, epsilon, HAS_NORMS: tl.constexpr, SIZE: tl.constexpr):
    """Load a head's columns, normed where the model does it: the norm is that of the whole head."""
    states = tl.load(head + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(states * states) / SIZE + epsilon)
        states = rounded(states * scale, head)
        states = rounded(states * tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32), head)
    return states


@triton.jit(do_not_specialize=["room"], do_not_specialize_on_alignment=["places"])
def _rotate_and_keep(
    query,
    key,
    value,
    angles,
    query_norm,
    key_norm,
    epsilon,
    out,
    own_keys,
    own_values,
    places,
    query_stride,
    key_stride,
    value_stride,
    room,
    heads,
    kv_heads,
    HAS_NORMS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    kept_head = (head - heads) % kv_heads
    kept = ((row * kv_heads + kept_head) * room + tl.load(places + row)) * SIZE + column
    if head >= heads + kv_heads:
        states = tl.load(value + row * value_stride + kept_head * SIZE + column, mask=inside)
        tl.store(own_values + kept, states, mask=inside)
    else:
        source, norm = query + row * query_stride + head * SIZE, query_norm
        target = out + (row * heads + head) * SIZE + column
        if head >= heads:
            source, norm, target = key + row * key_stride + kept_head * SIZE, key_norm, own_keys + kept
        other = tl.where(inside, (column + SIZE // 2) % SIZE, SIZE)
        here = _normed(source, norm, column, epsilon, HAS_NORMS=HAS_NORMS, SIZE=SIZE)
        there = _normed(source, norm, other, epsilon, HAS_NORMS=HAS_NORMS, SIZE=SIZE)
        cosine = tl.load(angles + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(angles + (row * 2 + 1) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, rounded(here * cosine, out) + rounded(there * sine, out), mask=inside)


def attend(cache: SharedCache, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
    """Attend to the cache's keys and values: queries [rows, heads, size] -> [rows, heads x size]."""
    rows, heads, size = query.shape
    kept, now = cache.of_layer(layer), cache.now
    slots, copies = now.rows_of.shape
    kv_heads = len(kept.prompt_keys) // cache.slots
    repeat, width = heads // kv_heads, max(16, triton.next_power_of_2(size))
    of_prompt = max(16, triton.next_power_of_2(min(64, copies * repeat)))
    blocks = triton.cdiv(copies * repeat, of_prompt)
    prompt_parts, own_parts = triton.cdiv(now.shape.prompt, PART), triton.cdiv(now.shape.own, PART)
    prompt_tiles = slots * blocks * prompt_parts
    outs = query.new_empty(rows, heads, prompt_parts + own_parts, size, dtype=torch.float32)
    sums = query.new_empty(rows, heads, prompt_parts + own_parts, dtype=torch.float32)
    slot_of, copy_of = now.cells
    # Both kernels take these.
    shared = {
        "slot_of": slot_of,
        "copy_of": copy_of,
        "prompts": now.prompts,
        "places": now.places,
        "rows_of": now.rows_of,
        "copies": copies,
        "prompt_parts": prompt_parts,
        "own_parts": own_parts,
        "SIZE": size,
        "WIDTH": width,
        "PART": PART,
    }
    _attend[(prompt_tiles + rows * own_parts, kv_heads)](
        query=query,
        **kept._asdict(),
        outs=outs,
        sums=sums,
        rows=rows,
        prompt_room=cache.prompt_room,
        own_room=cache.room,
        prompt_tiles=prompt_tiles,
        blocks=blocks,
        SCALING=scoring.scaling,
        SOFTCAP=scoring.softcap or 0.0,
        WINDOW=scoring.window or 0,
        REPEAT=repeat,
        TOKENS=max(16, 64 * 128 * 2 // (width * query.element_size())),
        OF_PROMPT=of_prompt,
        OF_ROW=max(16, triton.next_power_of_2(repeat)),
        PRECISION=precision(query),
        num_warps=4,
        num_stages=2,
        **shared,
    )
    out = torch.empty_like(query)
    _join[(rows, heads)](outs=outs, sums=sums, out=out, num_warps=1, **shared)
    return out.flatten(1)


@triton.jit
def _attend_to_part(
    query,
    keys,
    values,
    head,
    valid,
    start,
    end,
    first,
    length,
    SCALING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Let the valid queries of the heads [Q] attend to the tokens from `start` to before `end`; each sees those from
    `first` to before `length`, both [Q]. Returns the mean value, float32 [Q, WIDTH], and the scores' logsumexp, [Q]."""
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    states = tl.load(query + head[:, None] * SIZE + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
    top = tl.full((head.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((head.shape[0],), tl.float32)
    out = tl.zeros((head.shape[0], WIDTH), tl.float32)
    for at in range(start, end, TOKENS):
        token = at + tl.arange(0, TOKENS)
        kept = token < end
        key = tl.load(keys + token[None, :] * SIZE + column[:, None], mask=kept[None, :] & inside[:, None], other=0.0)
        scores = dot(states, key, tl.zeros((head.shape[0], TOKENS), tl.float32), PRECISION=PRECISION) * SCALING
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # tanh
        seen = (token[None, :] >= first[:, None]) & (token[None, :] < length[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        below = tl.where(new_top == float("-inf"), 0.0, new_top)  # a query may see none of these tokens
        weights, shrink = tl.exp(scores - below[:, None]), tl.exp(top - below)
        value = tl.load(
            values + token[:, None] * SIZE + column[None, :], mask=kept[:, None] & inside[None, :], other=0.0
        )
        total = total * shrink + tl.sum(weights, axis=1)
        out = dot(weights.to(value.dtype), value, out * shrink[:, None], PRECISION=PRECISION)
        top = new_top
    sees_none = top == float("-inf")
    total = tl.where(sees_none, 1.0, total)
    return out / total[:, None], tl.where(sees_none, float("-inf"), top + tl.log(total))


@triton.jit
def _keep_part(outs, sums, at, valid, out, total, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    inside = valid[:, None] & (column < SIZE)[None, :]
    tl.store(outs + at[:, None] * SIZE + column[None, :], out, mask=inside)
    tl.store(sums + at, total, mask=valid)


@triton.jit(
    do_not_specialize=[
        *("rows", "copies", "prompt_room", "own_room", "prompt_tiles", "blocks", "prompt_parts", "own_parts"),
    ],
    do_not_specialize_on_alignment=["slot_of", "copy_of", "prompts", "places"],
)
def _attend(
    query,
    prompt_keys,
    prompt_values,
    own_keys,
    own_values,
    slot_of,
    copy_of,
    prompts,
    places,
    rows_of,
    outs,
    sums,
    rows,
    copies,
    prompt_parts,
    own_parts,
    prompt_room,
    own_room,
    prompt_tiles,
    blocks,
    SCALING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    REPEAT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    OF_PROMPT: tl.constexpr,
    OF_ROW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to a part of a prompt with a block of its rows' queries, or to a part of a row's own tokens."""
    tile, kv_head, kv_heads = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    parts = prompt_parts + own_parts
    if tile < prompt_tiles:
        part, block = tile % prompt_parts, tile // prompt_parts
        slot = (block // blocks).to(tl.int64)
        number = (block % blocks) * OF_PROMPT + tl.arange(0, OF_PROMPT)
        copy = number // REPEAT
        of_cell = tl.load(rows_of + slot * copies + copy, mask=copy < copies, other=0)
        # An empty cell names any row: that row's own cell is another one.
        known = (copy < copies) & (of_cell < rows)
        here = tl.load(slot_of + of_cell, mask=known, other=-1) == slot
        valid = known & here & (tl.load(copy_of + of_cell, mask=known, other=-1) == copy)
        length = tl.load(prompts + of_cell, mask=valid, other=0)
        first = tl.zeros_like(length)
        if WINDOW > 0:
            first = length + tl.load(places + of_cell, mask=valid, other=0) - WINDOW + 1
        end = tl.minimum((part + 1) * PART, tl.max(length, axis=0)).to(tl.int32)
        if part * PART < end:
            cell = (slot * kv_heads + kv_head) * prompt_room * SIZE
            head = (of_cell * kv_heads + kv_head) * REPEAT + number % REPEAT
            out, total = _attend_to_part(
                query, prompt_keys + cell, prompt_values + cell, head, valid,
                start=part * PART, end=end, first=first, length=length, SCALING=SCALING, SOFTCAP=SOFTCAP,
                SIZE=SIZE, WIDTH=WIDTH, TOKENS=TOKENS, PRECISION=PRECISION,
            )  # fmt: skip
            _keep_part(outs, sums, head * parts + part, valid, out, total=total, SIZE=SIZE, WIDTH=WIDTH)
    else:
        own_part, row = (tile - prompt_tiles) % own_parts, ((tile - prompt_tiles) // own_parts).to(tl.int64)
        repeat, place = tl.arange(0, OF_ROW), tl.load(places + row)
        own_length = tl.zeros((OF_ROW,), tl.int64) + place + 1
        own_first = tl.zeros_like(own_length)
        if WINDOW > 0:
            own_first = own_length - WINDOW
        own_end = tl.minimum((own_part + 1) * PART, place + 1).to(tl.int32)
        if own_part * PART < own_end:
            own_cell = (row * kv_heads + kv_head) * own_room * SIZE
            own_head = (row * kv_heads + kv_head) * REPEAT + repeat
            own_out, own_total = _attend_to_part(
                query, own_keys + own_cell, own_values + own_cell, own_head, repeat < REPEAT,
                start=own_part * PART, end=own_end, first=own_first, length=own_length, SCALING=SCALING,
                SOFTCAP=SOFTCAP, SIZE=SIZE, WIDTH=WIDTH, TOKENS=TOKENS, PRECISION=PRECISION,
            )  # fmt: skip
            at = own_head * parts + prompt_parts + own_part
            _keep_part(outs, sums, at, repeat < REPEAT, own_out, total=own_total, SIZE=SIZE, WIDTH=WIDTH)


@triton.jit(
    do_not_specialize=["copies", "prompt_parts", "own_parts"],
    do_not_specialize_on_alignment=["slot_of", "copy_of", "prompts", "places"],
)
def _join(
    outs,
    sums,
    out,
    slot_of,
    copy_of,
    prompts,
    places,
    rows_of,
    copies,
    prompt_parts,
    own_parts,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, WIDTH)
    # The prompt's parts of a row that waits were not computed.
    in_cell = tl.load(rows_of + tl.load(slot_of + row) * copies + tl.load(copy_of + row)) == row
    of_prompt = tl.where(in_cell, tl.cdiv(tl.load(prompts + row), PART), 0).to(tl.int32)
    of_row = (tl.load(places + row) // PART + 1).to(tl.int32)
    top, total = float("-inf"), 0.0
    mean = tl.zeros((WIDTH,), tl.float32)
    for number in range(0, of_prompt + of_row):
        part = tl.where(number < of_prompt, number, prompt_parts + number - of_prompt)
        at = head * (prompt_parts + own_parts) + part
        of_part = tl.load(sums + at)
        new_top = tl.maximum(top, of_part)
        below = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weight = tl.exp(top - below), tl.exp(of_part - below)
        total = total * shrink + weight
        mean = mean * shrink + weight * tl.load(outs + at * SIZE + column, mask=column < SIZE, other=0.0)
        top = new_top
    tl.store(out + head * SIZE + column, mean / total, mask=column < SIZE)

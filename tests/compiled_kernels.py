"""Compiles the kernels of grpo/kernels for cards that are not here, and prints what each takes of a card, as JSON.

    python tests/compiled_kernels.py        # without TRITON_INTERPRET

A launch is taken apart as Triton does it: types, sizes that are known, options. Shapes: Qwen2.5-1.5B's.
"""

import json
import sys
from pathlib import Path

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from grpo.kernels.attention import HeadNorms, attend, rotate_and_keep
from grpo.kernels.drawing import draw
from grpo.kernels.fused_pass import add_norm, gated, project
from grpo.model.shared_cache import Scoring, Shape, SharedCache, Step

CARDS = {"A100": 80, "RTX 4090": 89, "H100": 90}
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.float64: "*fp64"}
HIDDEN, WIDE, HEADS, KV_HEADS, SIZE, VOCABULARY = 1536, 8960, 12, 2, 128, 151_936
SLOTS, COPIES, PROMPT, OWN = 16, 8, 300, 500

launches: list[tuple[JITFunction, dict, dict, dict, dict]] = []


def note(kernel: JITFunction, *arguments, grid, warmup, **named) -> None:
    """Keep what a launch would compile, instead of launching."""
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, arguments, strict=False)) | {name: named[name] for name in names if name in named}
    options = {name: value for name, value in named.items() if name not in names}
    types, known, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        types[parameter.name] = "constexpr" if parameter.is_constexpr else type_of(value)
        if parameter.is_constexpr:
            known[parameter.name] = value
        elif is_known_to_divide(parameter, value):
            attributes[(place,)] = [["tt.divisibility", 16]]
    launches.append((kernel, types, known, attributes, options))


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def is_known_to_divide(parameter, value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not parameter.do_not_specialize_on_alignment
    return isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize


def launch(rows: int, dtype: torch.dtype) -> None:
    """Launch every kernel with tensors that have no memory."""

    def ids(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int64)

    def linear(columns: int, bias: bool) -> nn.Linear:
        return nn.Linear(HIDDEN, columns, bias=bias, dtype=dtype)

    with torch.device("meta"):
        states, weight = torch.empty(rows, HIDDEN, dtype=dtype), torch.empty(HIDDEN, dtype=dtype)
        add_norm(states, states, weight, 1e-6)
        projected = project(states, linear(HEADS * SIZE, True), *(linear(KV_HEADS * SIZE, True) for _ in "kv"))
        gated(states, linear(WIDE, False), linear(WIDE, False))
        cache = SharedCache(rows=rows, slots=SLOTS, copies=COPIES, longest_prompt=PROMPT, longest_completion=OWN)
        cache.make_room(OWN, rows)
        cache.fill([0], [PROMPT])
        cache.keep(0, *torch.empty(2, 1, KV_HEADS, PROMPT, SIZE, dtype=dtype))
        shape = Shape(rows=rows, slots=SLOTS, prompt=PROMPT, own=OWN)
        of_rows = {"cells": ids(2, rows), "prompts": ids(rows), "places": ids(rows), "rows_of": ids(SLOTS, COPIES)}
        cache.step(Step(shape=shape, **of_rows))
        angles, norm = torch.empty(rows, 2, 1, SIZE, dtype=dtype), torch.empty(SIZE, dtype=dtype)
        query = rotate_and_keep(cache, 0, projected, angles, HeadNorms(norm, norm, 1e-6))
        attend(cache, 0, query, Scoring(0.1, softcap=30.0, window=4096))
        for numbers in (torch.empty(rows, dtype=torch.float64), None):
            draw(torch.empty(rows, VOCABULARY), numbers)


def main() -> None:
    JITFunction.run = note
    for rows in (8, 64, 256):
        launch(rows, torch.bfloat16)
    launch(8, torch.float32)
    for card, capability in CARDS.items():
        for kernel, types, known, attributes, options in launches:
            source = ASTSource(fn=kernel, signature=types, constexprs=known, attrs=attributes)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            found = {"card": card, "kernel": kernel.fn.__name__, "shared": compiled.metadata.shared}
            print(json.dumps(found | {"copies of 16 bytes": compiled.asm["ptx"].count(", 0x10")}))


if __name__ == "__main__":
    main()

"""Counts the kernels of a drawn token, by the pass that is written out and by the fused one; times both on a card.

    python -m benchmarks.kernels            # counts, without a card too (by Triton's interpreter, a minute)
    bash benchmarks/gpu.sh first            # on a card: counts and times, among other things

A Qwen2 in bf16 is counted with 4 layers and with 8: the difference gives a layer, the rest are head and draw. Views and
conversions that convert nothing are no kernels, nor are those to float32 before a product, which only a CPU makes. On a
CPU the vocabulary has as many blocks as Qwen2.5's on a card.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from benchmarks.card import CUDA, DEVICE, Clock, Tables, bandwidth, free
from benchmarks.common import LARGE_SHAPES, SHAPES, TINY, VOCABULARY, qwen, random_model, spread
from grpo.model.logprobs import CPU_BLOCK, CUDA_BLOCK
from grpo.model.tree_attention import switch_on
from grpo.sampling.rows import Rows, StepGraphs

LAYERS = 4, 8
BLOCKS = -(-VOCABULARY // CUDA_BLOCK[1])
PASSES = {"written out": False, "fused": True}
FIRST, PROMPT, NEW = 8, 100, 400  # tokens drawn before a time is taken; of a prompt; of a completion


class Kernels(TorchDispatchMode):
    """The kernels that run within, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        storages = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        first = result[0] if isinstance(result, (tuple, list)) else result
        is_view = isinstance(first, torch.Tensor) and first.untyped_storage().data_ptr() in storages
        # A card multiplies 16 bits into float32; a CPU converts both sides before, and has few rows' logits by columns.
        dtypes = [value.dtype for value in (*args[:2], result) if isinstance(value, torch.Tensor)]
        of_cpu = not CUDA and name in ("to", "copy_") and dtypes[-1] == torch.float32 and torch.bfloat16 in dtypes
        of_cpu |= not CUDA and name == "contiguous"
        if not of_cpu and (function._schema.is_mutable or not (is_view or "empty" in name)):
            self.names[name] += 1
        return result

    @contextmanager
    def with_triton(self) -> Iterator[None]:
        """Count launches of Triton too, and nothing of what its interpreter does."""
        launch = triton.runtime.KernelInterface.__getitem__

        def counting(kernel, grid):
            def run(*arguments, **options):
                self.names[kernel.fn.__name__.lstrip("_")] += 1
                with torch.utils._python_dispatch._disable_current_modes():
                    return launch(kernel, grid)(*arguments, **options)

            return run

        triton.runtime.KernelInterface.__getitem__ = counting
        try:
            with self:
                yield
        finally:
            triton.runtime.KernelInterface.__getitem__ = launch


def make_rows(model: PreTrainedModel, count: int, fused: bool, prompt: int, new: int) -> Rows:
    """Make rows of groups of 8 that have drawn their first token."""
    prompts = -(-count // 8)
    rows = Rows(
        model,
        rows=count,
        slots=prompts,
        copies=8,
        longest_prompt=prompt,
        longest=new,
        temperature=1.0,
        is_greedy=False,
        ends=[],
        graphs=StepGraphs(model.device) if CUDA else None,
        fused=fused,
        vision=None,
    )
    drawn = torch.rand(count, new, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()
    hidden = rows.prefill({slot: [*range(3, 3 + prompt)] for slot in range(prompts)})
    cells = [(row // 8, row % 8, prompt, prompt) for row in range(count)]
    rows.begin([*range(count)], cells, [hidden[row // 8] for row in range(count)], [*drawn])
    rows.arrange(count, free_for_good=True)
    return rows


def count(fused: bool, layers: int) -> Counter[str]:
    """Count the kernels of one step of 8 rows."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4} if not CUDA else {}
    vocabulary = VOCABULARY if CUDA else (BLOCKS - 1) * CPU_BLOCK[1] + 1
    model = random_model(qwen(layers, vocabulary, **sizes), torch.bfloat16, DEVICE)
    switch_on(model, "segments")
    with torch.inference_mode():
        rows = make_rows(model, 8, fused, 6, 8)
        kernels, step = Kernels(), rows._step
        rows._graphs = None  # a replayed graph shows no kernels
        rows.steps(1)  # the room for the rows is made here

        def counted(shape) -> None:
            with kernels.with_triton():
                step(shape)

        rows._step = counted
        rows.steps(1)
    return kernels.names


def counts(tables: Tables) -> None:
    tables.head("pass", "kernels a layer", "head and draw", "of a layer")
    for name, fused in PASSES.items():
        few, many = (count(fused, layers) for layers in LAYERS)
        layer = {kernel: (many[kernel] - few[kernel]) // (LAYERS[1] - LAYERS[0]) for kernel in many}
        layer = {kernel: number for kernel, number in layer.items() if number}
        rest = few.total() - LAYERS[0] * sum(layer.values())
        shown = ", ".join(f"{number} {kernel}" for kernel, number in sorted(layer.items(), key=lambda pair: -pair[1]))
        tables.row(name, sum(layer.values()), rest, shown)


def times(tiny: bool, clock: Clock, tables: Tables) -> None:
    """Time a token of the middle of completions of 400 tokens, both passes in turn."""
    speed, prompt, new = bandwidth(), *((6, 16) if tiny else (PROMPT, NEW))
    tables.head("shape", "rows", "pass", "ms a token", "to read weights once, ms", "share of bandwidth")
    shapes = {"Qwen2.5-0.5B": {"layers": 24}} | SHAPES | {"Qwen2.5-7B": LARGE_SHAPES["Qwen2.5-7B"]}
    for shape, sizes in shapes.items():
        if clock.over(shape):
            return
        model = random_model(qwen(**(TINY if tiny else sizes)), torch.float32 if tiny else torch.bfloat16, DEVICE)
        switch_on(model, "segments")
        read = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        for rows in (8, 64, 256):
            for name, fused in PASSES.items():
                if (tiny and fused and rows > 8) or clock.over(f"{shape}, {rows} rows, {name}"):
                    continue
                with torch.inference_mode():
                    drawing, at_once = make_rows(model, rows, fused, prompt, new), 2 if tiny else 32
                    drawing.steps(2 if tiny else FIRST)
                    seconds = clock.times(lambda of=drawing, at_once=at_once: of.steps(at_once), most=3)
                once = read / speed if speed else None
                tables.row(
                    shape,
                    rows,
                    name,
                    spread([1000 * second / at_once for second in seconds], 2),
                    f"{1000 * once:.2f}" if once else "-",
                    f"{100 * once * at_once / min(seconds):.0f} %" if once else "-",
                )
        free(model)


if __name__ == "__main__":
    counts(Tables("kernels"))

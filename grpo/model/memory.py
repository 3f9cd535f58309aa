"""How much memory the reference server needs, from a model's configuration alone: no weights are loaded.

The formula counts the tensors that live at the same time in one forward pass without gradients, as transformers'
layers, grpo/model/tree_attention.py and grpo/model/logprobs.py make and drop them. One of three phases is the highest
point: attention, MLP or head. Layers follow one another, so their number does not count. `python -m benchmarks.memory`
holds the formula against measured peaks on a CPU; on a GPU it has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo.model.logprobs import CPU_BLOCK, CUDA_BLOCK, MM_GIVES_FP32
from grpo.model.tree_attention import ROWS

MIB = 2**20
CPU_PROCESS = 400 * MIB  # Python, torch and the rest: a server with a model of 0.1 M parameters holds 365
# What glibc's heap holds beside the tensors in use, and the matrix products' own buffers: fitted to measured peaks.
CPU_HEAP, CPU_HOLES = 160 * MIB, 0.1
# Assumed, not measured; the report says so.
CUDA_PROCESS = 900 * MIB  # CUDA's context, and kernels, which are loaded when they are first used
CUDA_SCRATCH = 32 * MIB
CUDA_ROUNDING = 0.1  # of the tensors, by torch's allocator
ALLOCATOR, HEAP = "allocator", "heap"
"""names of the terms that are no tensors"""
GROUP = 8  # completions of a prompt: flash attention lays the prompt's keys out for each

FUSED = {"silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "tanh", "sigmoid"}
"""activations that are one kernel; others are written in Python and make temporaries"""


@dataclass(frozen=True)
class Term:
    name: str
    size: int
    """bytes"""
    why: str


@dataclass(frozen=True)
class Estimate:
    """Bytes, of one forward pass."""

    weights: int
    terms: list[Term]
    """of the working memory at its highest point"""
    process: int
    """what there is without any model: the process on a CPU, its context on a GPU"""

    @property
    def working(self) -> int:
        return sum(term.size for term in self.terms)

    @property
    def total(self) -> int:
        return self.weights + self.working + self.process


@dataclass(frozen=True)
class Shape:
    """What the working memory depends on. Widths are numbers of one token."""

    hidden: int
    wide: int
    """of the MLP"""
    wide_alive: int
    """how many tensors of that width the MLP holds at once"""
    queries: int
    keys: int
    """of the keys; the values are as wide"""
    heads: int
    head_width: int
    vocabulary: int
    softcap: bool
    """of the attention scores, which no fused kernel knows"""
    eager: bool
    """whether a padded batch makes all its scores at once"""
    window: int | None
    rotary: bool
    largest: int
    """parameters of the largest linear layer but the head"""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """Raises NotImplementedError where the model has no attention, which the formulas count."""
        config = model.config.get_text_config()
        if getattr(config, "num_attention_heads", None) is None:
            raise NotImplementedError(f"{type(model).__name__} has no attention heads, which the formula counts")
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or hidden // heads
        names = "intermediate_size", "n_inner", "ffn_dim"
        wide = next((width for name in names if (width := getattr(config, name, None))), 4 * hidden)
        names = "hidden_activation", "hidden_act", "activation_function"
        activation = next((act for name in names if (act := getattr(config, name, None))), None)
        gated = any(name.endswith(("gate_proj", "gate_up_proj")) for name, _ in model.named_modules())
        kinds = getattr(config, "layer_types", None)
        slides = not kinds or "sliding_attention" in kinds
        return cls(
            hidden=hidden,
            wide=wide,
            # Gated: what the activation gave, the other half, and their product. Else: what goes in and what comes out.
            # An activation in Python holds its input and three more.
            wide_alive=max(3 if gated else 2, 2 if activation in FUSED else 4),
            queries=heads * head_width,
            keys=(getattr(config, "num_key_value_heads", None) or heads) * head_width,
            heads=heads,
            head_width=head_width,
            vocabulary=len(model.get_output_embeddings().weight),
            softcap=getattr(config, "attn_logit_softcapping", None) is not None,
            eager=model.config._attn_implementation == "eager",
            window=getattr(config, "sliding_window", None) if slides else None,
            rotary=bool(getattr(config, "rope_parameters", None)),
            largest=max((layer.weight.numel() for layer in _linears(model)), default=0),
        )


def estimate(
    model: PreTrainedModel,
    dtype: torch.dtype,
    quantization: str,
    batch_tokens: int,
    longest: int,
    device_type: str,
) -> Estimate:
    """One forward pass of `batch_tokens`, its longest sequence of `longest` tokens. The model may be on device meta."""
    return Estimate(
        weights(model, dtype, quantization),
        working(Shape.of(model), dtype, quantization, batch_tokens, longest, device_type),
        CUDA_PROCESS if device_type == "cuda" else CPU_PROCESS,
    )


def weights(model: PreTrainedModel, dtype: torch.dtype, quantization: str) -> int:
    """Bytes. A tied head counts once.

    As bitsandbytes lays them out: all linear layers but the head, in 8 bits with a float32 for each output, in 4 bits
    with a byte for every 64 numbers and a float32 for every 256 such bytes. Embeddings, head, norms, biases and an
    adapter stay in `dtype`.
    """
    size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    if quantization == "none":
        return size
    for layer in _linears(model):
        count, outputs = layer.weight.numel(), layer.nf if isinstance(layer, Conv1D) else layer.out_features
        blocks = -(-count // 64)
        small = count + 4 * outputs if quantization == "8bit" else -(-count // 2) + blocks + 4 * -(-blocks // 256)
        size += small - count * dtype.itemsize
    return size


def working(
    shape: Shape, dtype: torch.dtype, quantization: str, tokens: int, longest: int, device_type: str
) -> list[Term]:
    """The terms of one forward pass at its highest point. Grows with `tokens` and with `longest`."""
    terms = forward(shape, dtype, quantization, tokens, longest, device_type)
    return terms + overhead(terms, device_type)


def forward(
    shape: Shape,
    dtype: torch.dtype,
    quantization: str,
    tokens: int,
    longest: int,
    device_type: str,
    scoring: bool = True,
) -> list[Term]:
    """As `working`, without what the device's allocator takes beside the tensors. `scoring`: of a packed batch, with
    log-probs; else of a padded one, whose last tokens alone go through the head, as generate has it."""
    item, cuda = dtype.itemsize, device_type == "cuda"
    row = tokens * item  # bytes of a number for every token
    hidden, wide, queries, keys = shape.hidden, shape.wide, shape.queries, shape.keys

    body = [Term("embeddings, layer's input", 2 * hidden * row, "the model holds the first, its loop the second")]
    if shape.rotary:
        body.append(Term("cosines and sines", 2 * shape.head_width * row, "of all positions, for all layers"))
    else:
        body.append(Term("learned positions", 2 * hidden * row, "their embeddings, and the attention's output"))

    # Keys and values of its prompt beside its own for one segment at a time; for flash attention for all of them.
    varlen = cuda and item == 2 and not shape.softcap
    prompts = 2 * keys * ((GROUP + 1) * row if varlen else longest * item)
    rotated = max(4 * queries + 2 * keys, 2 * queries + 5 * keys)
    attention = [
        Term("input of the attention", hidden * row, "normed, beside the layer's own"),
        Term("queries, keys, values", max(rotated, 3 * queries + 2 * keys) * row, "rotated one after the other"),
    ]
    if scoring:
        attention.append(Term("prompts' keys again", prompts, f"groups of {GROUP}" if varlen else "of one segment"))
    elif queries != keys:
        attention.append(Term("keys repeated", 2 * queries * row, "to as many heads as the queries have"))
    if scoring and not varlen and (cuda or shape.softcap):
        repeated = 2 * queries * longest * item
        attention.append(Term("keys repeated", repeated, "to as many heads as the queries have, of one segment"))
        scores = 8 * shape.heads * ROWS * longest
        attention.append(Term("scores", scores, f"of {ROWS} rows at a time, two in fp32"))
    elif not scoring and shape.eager:
        scores = (4 + item) * shape.heads * tokens * longest
        attention.append(Term("scores", scores, "in fp32 and as the model has them"))
    if scoring and shape.window is not None and longest > shape.window:
        pairs = tokens * longest
        size = pairs * (8 * shape.heads + 2 * item) if shape.eager else pairs * (1 + item)
        attention.append(Term("beyond the window", size, "padded batches: a mask, and scores where no kernel knows it"))

    mlp = [
        Term("residual, input of the MLP", 2 * hidden * row, "after the attention"),
        Term("inside of the MLP", shape.wide_alive * wide * row, f"{shape.wide_alive} tensors of width {wide}"),
    ]
    if quantization == "8bit":
        product = (4 + 2) * wide if cuda else 4 * 4 * wide
        size = tokens * (3 * hidden + product) + (0 if cuda else 4 * shape.largest)
        mlp.append(
            Term("8 bit product", size, "the input in 16 and 8 bits, the product in int32 and what is made of it")
        )
    elif quantization == "4bit":
        mlp.append(Term("4 bit weights unpacked", item * shape.largest, "of the largest layer, for its product"))

    if not cuda and item == 2:
        mlp.append(Term("16 bit product", item * shape.largest, "the library lays a layer's weights out anew"))

    rows, columns = CUDA_BLOCK if cuda else CPU_BLOCK
    rows, columns = min(rows, tokens), min(columns, shape.vocabulary)
    casts = 0 if item == 4 or (cuda and MM_GIVES_FP32) else 4 * (rows + columns) * hidden
    head = [
        Term("last hidden states", 2 * hidden * row, "all, and those that predict a completion token"),
        Term("block of logits", 4 * rows * columns + casts, f"{rows} x {columns} in fp32"),
        Term("targets and answers", 64 * tokens, "places, ids, log-probs"),
    ]
    phases = [body + attention, body + mlp, *([head] if scoring else [])]
    terms = [
        *max(phases, key=lambda phase: sum(term.size for term in phase)),
        Term("ids and positions", 48 * tokens, "64-bit integers"),
    ]
    if scoring and not varlen:
        width = 1 << max(0, longest - 1).bit_length()  # cached in powers of two, as grpo/model/tree_attention.py does
        masks = item * (64 * ROWS**2 + ROWS * (2 * width + 8 * ROWS))
        terms.append(Term("masks", masks, "of groups and of completions, kept for the next pass"))
    return terms


def overhead(terms: list[Term], device_type: str) -> list[Term]:
    """What the device's allocator takes beside these tensors."""
    tensors = sum(term.size for term in terms)
    if device_type == "cuda":
        rounding = Term(ALLOCATOR, round(CUDA_ROUNDING * tensors), f"assumed: {CUDA_ROUNDING:.0%} of the above")
        return [Term("products' workspace", CUDA_SCRATCH, "assumed"), rounding]
    kept = CPU_HEAP + round(CPU_HOLES * tensors)
    return [Term(HEAP, kept, f"{CPU_HEAP // MIB} MiB and {CPU_HOLES:.0%}: what glibc does not give back")]


def _linears(model: PreTrainedModel) -> list[nn.Linear | Conv1D]:
    head = model.get_output_embeddings()
    layers = [layer for name, layer in model.named_modules() if ".lora_" not in name]
    return [layer for layer in layers if isinstance(layer, nn.Linear | Conv1D) and layer is not head]

"""The memory of the reference server, computed from a model's configuration.

No weights are loaded: the model is on device meta. The formula counts the tensors that live at the same time, as
transformers' layers, grpo/model/tree_attention.py and grpo/model/logprobs.py make and drop them.
docs/reference_server.md explains every term. `python -m benchmarks.memory` compares it with measured peaks on a CPU,
`python -m benchmarks.gpu --part memory` on a GPU. grpo/model/memory_report.py prints it, grpo/trainer/memory.py adds
what a rank of the trainer needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo.model.logprobs import CPU_BLOCK, CUDA_BLOCK, MM_GIVES_FP32
from grpo.model.tree_attention import ROWS

MIB, GIB = 2**20, 2**30
# Measured: a process that has loaded Python, torch and the rest, but no model.
SERVER_PROCESS = 400 * MIB
# A margin that every measured peak stays below: what glibc's heap keeps beside the tensors, and ALLOCATOR_SHARE.
CPU_HEAP = 160 * MIB
# Assumed, not measured; the report says so.
CUDA_PROCESS = 900 * MIB  # CUDA's context, and the kernels, which are loaded when they are first used
CUDA_WORKSPACE = 32 * MIB  # of matrix products
ALLOCATOR_SHARE = 0.1
GROUP = 8  # completions of a prompt: flash attention lays the prompt's keys out for each

ALLOCATOR, FORWARD = "allocator", "forward pass"
# Activations that are one kernel; others are written in Python and make temporaries.
FUSED = {"silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "tanh", "sigmoid"}

Terms = dict[str, int]
"""bytes by the name of a tensor or a kind of tensors"""


def total(terms: Terms) -> int:
    return sum(terms.values())


@dataclass(frozen=True)
class Memory:
    """The bytes that one process needs, term by term."""

    outside: Terms
    """what torch's allocator does not know: the process on a CPU; on a GPU its context, kernels and NCCL's buffers"""
    standing: Terms
    """the tensors that always exist"""
    phases: dict[str, Terms]
    """what each phase adds to the standing tensors at its highest point"""
    host: Terms = field(default_factory=dict)
    """what is in the machine's memory, where the optimizer is offloaded from a GPU"""

    @property
    def highest(self) -> str:
        return max(self.phases, key=lambda name: total(self.phases[name]))

    @property
    def total(self) -> int:
        return total(self.outside) + self.peak(self.highest)

    def peak(self, phase: str) -> int:
        return total(self.standing) + total(self.phases[phase])

    def allocated(self, phase: str) -> int:
        """Return what torch.cuda.max_memory_allocated() should show after a phase: all tensors, and nothing else."""
        return self.peak(phase) - self.phases[phase][ALLOCATOR]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its working memory depends on. A width is the numbers of one token."""

    hidden: int
    mlp_width: int
    mlp_tensors: int
    """tensors of the MLP's width that exist at once"""
    query_width: int
    key_width: int
    """width of the keys; the values are as wide"""
    heads: int
    head_width: int
    vocabulary: int
    softcapped: bool
    """whether attention scores are softcapped, which no fused kernel can do"""
    eager: bool
    """whether a padded batch makes all its attention scores at once"""
    window: int | None
    rotary: bool
    largest_linear: int
    """parameters of the largest linear layer except the head"""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """Raises NotImplementedError where the model has no attention, which the formulas count."""
        config = model.config.get_text_config()
        if getattr(config, "num_attention_heads", None) is None:
            raise NotImplementedError(f"{type(model).__name__} has no attention heads, which the formula counts")
        heads = config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
        mlp_width = _first(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * config.hidden_size
        activation = _first(config, "hidden_activation", "hidden_act", "activation_function")
        gated = any(name.endswith(("gate_proj", "gate_up_proj")) for name, _ in model.named_modules())
        layer_types = getattr(config, "layer_types", None)
        slides = not layer_types or "sliding_attention" in layer_types
        return cls(
            hidden=config.hidden_size,
            mlp_width=mlp_width,
            # Gated: the activation's result, the other half, and their product. Else: input and output. An activation
            # in Python holds its input and three more.
            mlp_tensors=max(3 if gated else 2, 2 if activation in FUSED else 4),
            query_width=heads * head_width,
            key_width=(getattr(config, "num_key_value_heads", None) or heads) * head_width,
            heads=heads,
            head_width=head_width,
            vocabulary=len(model.get_output_embeddings().weight),
            softcapped=getattr(config, "attn_logit_softcapping", None) is not None,
            eager=model.config._attn_implementation == "eager",
            window=getattr(config, "sliding_window", None) if slides else None,
            rotary=bool(getattr(config, "rope_parameters", None)),
            largest_linear=max((layer.weight.numel() for layer in _linear_layers(model)), default=0),
        )


def _first(config, *names: str):
    """Return the first of these attributes that is set: models name the same thing differently."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _linear_layers(model: PreTrainedModel) -> list[nn.Linear | Conv1D]:
    head = model.get_output_embeddings()
    layers = [layer for name, layer in model.named_modules() if ".lora_" not in name]
    return [layer for layer in layers if isinstance(layer, nn.Linear | Conv1D) and layer is not head]


def weights(model: PreTrainedModel, dtype: torch.dtype, quantization: str) -> int:
    """Return the bytes of the weights. A tied head counts once.

    As bitsandbytes lays them out: all linear layers except the head, in 8 bits with a float32 for each output, in 4
    bits with a byte for every 64 numbers and a float32 for every 256 such bytes. Embeddings, head, norms, biases and
    an adapter stay in `dtype`.
    """
    size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    if quantization == "none":
        return size
    for layer in _linear_layers(model):
        count, outputs = layer.weight.numel(), layer.nf if isinstance(layer, Conv1D) else layer.out_features
        blocks = -(-count // 64)
        packed = count + 4 * outputs if quantization == "8bit" else -(-count // 2) + blocks + 4 * -(-blocks // 256)
        size += packed - count * dtype.itemsize
    return size


def server_memory(
    model: PreTrainedModel, dtype: torch.dtype, quantization: str, tokens: int, longest: int, device_type: str
) -> Memory:
    """Return what a reference server needs for one forward pass of `tokens` with a sequence of `longest` tokens."""
    cuda = device_type == "cuda"
    terms = forward_terms(Shape.of(model), dtype, quantization, tokens, longest, cuda)
    return Memory(
        outside={"process": CUDA_PROCESS if cuda else SERVER_PROCESS},
        standing={"weights": weights(model, dtype, quantization)},
        phases={FORWARD: with_allocator(terms, cuda)},
    )


def with_allocator(terms: Terms, cuda: bool) -> Terms:
    """Add what the device's allocator takes beside the tensors of a phase."""
    share = round(ALLOCATOR_SHARE * total(terms))
    if cuda:
        return terms | {"products' workspace": CUDA_WORKSPACE, ALLOCATOR: share}
    return terms | {ALLOCATOR: CPU_HEAP + share}


def forward_terms(
    shape: Shape,
    dtype: torch.dtype,
    quantization: str,
    tokens: int,
    longest: int,
    cuda: bool,
    scoring: bool = True,
) -> Terms:
    """Return the tensors of one forward pass without gradients at its highest point: attention, MLP or head.

    Layers follow one another, so their number does not count. The sizes grow with `tokens` and with `longest`, the
    tokens of the longest sequence. `scoring`: the batch is packed and gives log-probs; else it is padded, and only its
    last tokens go through the head, as in `generate`.
    """
    item = dtype.itemsize
    unit = tokens * item  # bytes of a tensor that has one number for every token
    hidden, queries, keys = shape.hidden, shape.query_width, shape.key_width

    body = {"embeddings, layer's input": 2 * hidden * unit}
    if shape.rotary:
        body["cosines and sines"] = 2 * shape.head_width * unit
    else:
        body["learned positions"] = 2 * hidden * unit

    varlen = cuda and item == 2 and not shape.softcapped
    attention = {
        "input of the attention": hidden * unit,
        "queries, keys, values": max(4 * queries + 2 * keys, 2 * queries + 5 * keys) * unit,
    }
    if scoring:
        # The keys and values of a prompt beside a completion's: of one segment, for flash attention of all.
        attention["prompts' keys again"] = 2 * keys * ((GROUP + 1) * unit if varlen else longest * item)
        if not varlen and (cuda or shape.softcapped):
            attention["keys repeated"] = 2 * queries * longest * item  # for all heads, of one segment
            attention["scores"] = 8 * shape.heads * ROWS * longest  # of ROWS rows at a time, two in fp32
        if shape.window is not None and longest > shape.window:
            # Such batches are padded: a mask, and scores where no kernel knows it.
            pair = 8 * shape.heads + 2 * item if shape.eager else 1 + item
            attention["beyond the window"] = pair * tokens * longest
    else:
        if queries != keys:
            attention["keys repeated"] = 2 * queries * unit
        if shape.eager:
            attention["scores"] = (4 + item) * shape.heads * tokens * longest  # in fp32 and in the model's dtype

    mlp = {
        "residual, input of the MLP": 2 * hidden * unit,
        "inside of the MLP": shape.mlp_tensors * shape.mlp_width * unit,
    }
    if quantization == "8bit":
        # The input in 16 and 8 bits, the product in int32 and in 16 bits.
        mlp["8 bit product"] = tokens * (3 * hidden + 6 * shape.mlp_width)
    elif quantization == "4bit":
        mlp["4 bit weights unpacked"] = item * shape.largest_linear

    block, rows, columns = logits_block(shape, tokens, cuda)
    casts = 0 if item == 4 or (cuda and MM_GIVES_FP32) else 4 * (rows + columns) * hidden
    head = {
        "last hidden states": 2 * hidden * unit,  # all, and those that predict a completion token
        "block of logits": block + casts,
        "targets and answers": 64 * tokens,
    }
    phases = [body | attention, body | mlp, *([head] if scoring else [])]
    terms = max(phases, key=total) | {"ids and positions": 48 * tokens}
    if scoring and not varlen:
        width = 1 << max(0, longest - 1).bit_length()  # cached in powers of two, as grpo/model/tree_attention.py does
        terms["masks"] = item * (64 * ROWS**2 + ROWS * (2 * width + 8 * ROWS))
    return terms


def logits_block(shape: Shape, tokens: int, cuda: bool) -> tuple[int, int, int]:
    """Return the bytes, rows and columns of a block of the head's logits (grpo/model/logprobs.py)."""
    rows, columns = CUDA_BLOCK if cuda else CPU_BLOCK
    rows, columns = min(rows, tokens), min(columns, shape.vocabulary)
    return 4 * rows * columns, rows, columns

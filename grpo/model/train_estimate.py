"""How much memory a rank of the trainer needs, from a model's configuration and the settings: no weights are loaded.

What stays (weights, fp32 masters, AdamW's moments) and, on top of it, the highest of four phases: sampling, the begin
of a backward pass (activations), its end (gradients), AdamW's step. Gradients and buffers are counted as DeepSpeed's
ZeRO-2 makes and drops them (deepspeed 0.19, runtime/zero/stage_1_and_2.py), what a layer keeps for its backward pass by
running the model on device meta. `python -m benchmarks.train_memory` holds the formula against measured peaks on a CPU,
`python -m benchmarks.gpu --part memory` on a card.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from inspect import signature
from itertools import chain

import torch
from transformers import PreTrainedModel
from transformers.integrations import sdpa_attention

from grpo.config.trainer import TrainerConfig
from grpo.model.activations import kept_for_backward
from grpo.model.logprobs import CPU_BLOCK, CUDA_BLOCK
from grpo.model.memory import ALLOCATOR, CUDA_PROCESS, HEAP, MIB, Shape, Term, forward, overhead, weights
from grpo.model.optimizer import in_8_bits, parameter_groups
from grpo.model.tree_attention import ROWS

PHASES = "sampling", "backward pass, its begin", "backward pass, its end", "AdamW's step"
CPU_HEAP = 64 * MIB  # small blocks and the libraries' own buffers: fitted to measured peaks
CPU_PROCESS = 550 * MIB  # Python, torch, DeepSpeed, datasets and the rest: a dry run holds 554
# Assumed, not measured: what NCCL allocates by itself for a group of ranks; the run has one, ZeRO makes another.
NCCL_GROUP, NCCL_GROUPS = 256 * MIB, 2
FLASH_ROWS = 128
"""by which flash attention's backward pass pads each sequence of its fp32 accumulator"""
REPEATS_KEYS = not hasattr(sdpa_attention, "pack_gqa")  # a layer's for each drawn token, in older transformers
FP32 = ("fp32", "float32", "float", "torch.float32")
"""as DeepSpeed's file may name it"""


@dataclass(frozen=True)
class Policy:
    """What the formula needs of a model."""

    shape: Shape
    dtype: torch.dtype
    layers: int
    count: int
    """parameters, a tied head once"""
    trained: tuple[int, ...]
    """sizes of the trained parameters, in the optimizer's order; counted as one group, as norms and biases are small"""
    head: int
    """parameters of the head, 0 where it is not trained"""
    kept: int
    """bytes that all layers keep for the backward pass, of one token"""
    quantization: str = "none"
    spared: int = 0
    """bytes of weights that quantization spares"""
    in_8_bits: int = 0
    """trained parameters whose moments are in 8 bits"""

    @classmethod
    def of(cls, model: PreTrainedModel, longest: int, quantization: str = "none", optim: str = "adamw_torch") -> Policy:
        """Of a model on device meta, with its adapter if it trains one. `longest` sequence, in tokens. There its
        weights are whole; `quantization` is how a run has them.

        Raises NotImplementedError where the model cannot run without numbers.
        """
        head = model.get_output_embeddings().weight
        return cls(
            shape=Shape.of(model),
            dtype=model.dtype,
            layers=model.config.get_text_config().num_hidden_layers,
            count=sum(parameter.numel() for parameter in model.parameters()),
            trained=tuple(parameter.numel() for parameter in chain(*parameter_groups(model))),
            head=head.numel() if head.requires_grad else 0,
            kept=kept_for_backward(model, longest),
            quantization=quantization,
            in_8_bits=sum(weight.numel() for weight in in_8_bits(model)) if optim == "adamw_8bit" else 0,
            spared=weights(model, model.dtype, "none") - weights(model, model.dtype, quantization),
        )


@dataclass(frozen=True)
class Load:
    """What the formula needs of the settings: a rank's work."""

    ranks: int
    share: int
    """prompts of a rank in a step"""
    prompt: int
    """tokens of the longest"""
    completion: int
    """tokens of the longest"""
    generations: int
    micro_batch_tokens: int
    groups: int
    """that a rank draws in a round"""
    rows: int
    """sequences in one call of generate, in training or evaluation"""
    checkpointing: bool
    buckets: int
    """of gradients on their way to another rank"""
    bucket: int
    """numbers in each"""
    fp32_gradients: bool
    """whether micro-batches are added up in fp32, whatever the weights are"""
    offloaded: bool
    """whether masters and moments are in the machine's memory, not on the card"""

    @classmethod
    def of(cls, config: TrainerConfig, ds_config: dict, ranks: int, prompt: int, held_out: int) -> Load:
        """`prompt`: tokens of the longest; `held_out`: examples to evaluate on."""
        share, zero = config.prompts_per_step // ranks, ds_config["zero_optimization"]
        groups = share * config.steps_per_generation
        offload = zero.get("offload_optimizer") or {}
        at_once = min(max(1, config.sequences_per_generate // config.num_generations), groups)
        return cls(
            ranks=ranks,
            share=share,
            prompt=prompt,
            completion=config.max_completion_length,
            generations=config.num_generations,
            micro_batch_tokens=config.micro_batch_tokens,
            groups=groups,
            rows=max(at_once * config.num_generations, min(config.sequences_per_generate, held_out)),
            checkpointing=config.gradient_checkpointing,
            # As DeepSpeed has it where the file is silent.
            buckets=1 + bool(zero.get("overlap_comm")),
            bucket=int(zero.get("reduce_bucket_size", 500_000_000)),
            fp32_gradients=ds_config.get("data_types", {}).get("grad_accum_dtype") in FP32,
            offloaded=offload.get("device", "none") != "none",
        )

    @property
    def group(self) -> int:
        """Tokens of a prompt with all its completions, at most."""
        return self.prompt + self.generations * self.completion

    @property
    def tokens(self) -> int:
        """Of the largest micro-batch that there may be. A sequence that is longer than the budget goes by itself."""
        return min(max(self.micro_batch_tokens, self.prompt + self.completion), self.share * self.group)


@dataclass(frozen=True)
class Memory:
    """Bytes, of one rank."""

    outside: list[Term]
    """what torch's allocator does not know: the process on a CPU; on a GPU its context, kernels, NCCL's buffers"""
    standing: list[Term]
    phases: dict[str, list[Term]]
    """on top of what stands, each at its highest point"""
    host: list[Term]
    """in the machine's memory, where the optimizer is offloaded from a card"""

    @property
    def process(self) -> int:
        return sum(term.size for term in self.outside)

    @property
    def held(self) -> int:
        return sum(term.size for term in self.standing)

    def of_phase(self, name: str) -> int:
        return sum(term.size for term in self.phases[name])

    def allocated(self, name: str) -> int:
        """What torch.cuda.max_memory_allocated() should show after a phase: all tensors, nothing outside of them."""
        return self.held + sum(term.size for term in self.phases[name] if term.name not in (ALLOCATOR, HEAP))

    @property
    def highest(self) -> str:
        return max(self.phases, key=self.of_phase)

    @property
    def total(self) -> int:
        return self.process + self.held + self.of_phase(self.highest)


def memory(policy: Policy, load: Load, device_type: str) -> Memory:
    """What a rank holds from the second step on."""
    cuda, share = device_type == "cuda", -(-sum(policy.trained) // load.ranks)
    item, largest = policy.dtype.itemsize, max(policy.trained)
    outside = [Term("process", CPU_PROCESS, "without a model")]
    if cuda:
        outside = [Term("CUDA", CUDA_PROCESS, "assumed: its context, and kernels as they are loaded")]
    if cuda and load.ranks > 1:
        outside.append(Term("NCCL's buffers", NCCL_GROUPS * NCCL_GROUP, f"assumed: of {NCCL_GROUPS} groups of ranks"))
    standing = [Term("weights", policy.count * item - policy.spared, "whole on every rank, a tied head once")]
    optimizer = [
        Term("masters", 4 * share, f"fp32, of 1/{load.ranks} of what is trained; where weights are fp32 too"),
        Term("AdamW's moments", 8 * share, f"two in fp32, of 1/{load.ranks}"),
    ]
    if policy.in_8_bits:
        part = -(-policy.in_8_bits // load.ranks)
        size = 8 * (share - part) + 2 * part + 8 * -(-part // 256)
        optimizer[-1] = Term("AdamW's moments", size, f"two, of 1/{load.ranks}: matrices' in 8 bits, others' in fp32")
    if load.offloaded:
        standing.append(Term("a gradient", item * largest, "offload_optimizer: a buffer for the largest"))
        accumulated = 0 if _compact(policy, load) else item * _own(policy.trained, load.ranks)
        optimizer += [
            Term("gradients in fp32", 4 * share, f"of 1/{load.ranks}"),
            Term("gradients as they come", accumulated + item * largest, "of all micro-batches, and the largest"),
            Term("weights on their way back", item * share, f"1/{load.ranks}, as the model has them"),
        ]
    apart = load.offloaded and cuda
    of_phases = [
        _sampling(policy, load, device_type),
        _begin(policy, load, cuda),
        _gradients(policy, load, cuda),
        _step(policy, load, cuda),
    ]
    return Memory(
        outside=outside,
        standing=standing if apart else standing + optimizer,
        phases={name: terms + _overhead(terms, cuda) for name, terms in zip(PHASES, of_phases, strict=True)},
        host=optimizer if apart else [],
    )


def _overhead(terms: list[Term], cuda: bool) -> list[Term]:
    return overhead(terms, "cuda") if cuda else [Term(HEAP, CPU_HEAP, "small blocks and libraries' own")]


def _sampling(policy: Policy, load: Load, device_type: str) -> list[Term]:
    """The higher of the prompts' forward pass and the last token's."""
    shape, item, rows = policy.shape, policy.dtype.itemsize, load.rows
    longest = load.prompt + load.completion
    cache = 2 * policy.layers * shape.keys * rows * item  # of a token of every row

    prompts = forward(
        shape, policy.dtype, policy.quantization, rows * load.prompt, load.prompt, device_type, scoring=False
    )
    first = [
        Term("KV cache", cache * load.prompt, f"of {rows} prompts"),
        Term("their forward pass", _size(prompts), "each completion's prompt by itself"),
        Term("their masks", rows * load.prompt**2 * (1 + item), "prompts of several lengths are padded"),
    ]
    last = [
        Term("KV cache", cache * longest, f"{rows} sequences of {longest:,}"),
        Term("a layer's keys again", cache * longest // policy.layers // 2, "made anew to take a token in"),
        Term("next token's logits", 24 * rows * shape.vocabulary, "six of the vocabulary in fp32"),
        *_unpacked(policy),
    ]
    if REPEATS_KEYS:
        repeated = 2 * shape.queries * rows * longest * item
        last.append(Term("keys repeated", repeated, "a layer's, to as many heads as queries have"))
    return max(first, last, key=_size)


def _unpacked(policy: Policy) -> list[Term]:
    """A weight is unpacked for a product, forwards and backwards, and dropped after it."""
    size = policy.dtype.itemsize * policy.shape.largest if policy.quantization == "4bit" else 0
    return [Term("4 bit weights unpacked", size, "of the largest layer, for its product")]


def _begin(policy: Policy, load: Load, cuda: bool) -> list[Term]:
    """The higher of two moments: at the head, and in the layer where the backward pass begins."""
    shape, item, tokens = policy.shape, policy.dtype.itemsize, load.tokens
    row = tokens * item
    copies = _keys_again(policy, load, cuda)
    layer = policy.kept // policy.layers * tokens + copies
    if load.checkpointing:
        inputs = Term(
            "layers' inputs", policy.layers * shape.hidden * row, "gradient_checkpointing: the rest is made again"
        )
        at_head = [inputs, Term("last norm", (4 + item) * shape.hidden * tokens, "its input in fp32, and normed")]
        in_layer = [inputs, Term("a layer's activations", layer, "of the one at work")]
    else:
        all_layers = policy.kept * tokens + policy.layers * copies
        at_head = in_layer = [Term("activations", all_layers, f"of {policy.layers} layers")]
    before, *gradients = _gradients(policy, load, cuda, at_end=False)
    # A CPU's memory is taken when it is written to: buckets and gradients are, as layer after layer is done.
    gradients = gradients if cuda else []
    both = [
        Term("head's gradient", policy.head * item, "kept until the embeddings' is there, where they are tied"),
        Term("ids and losses", 200 * tokens, "some numbers a token"),
        before,
    ]
    return max(
        at_head + _head(policy, load, cuda) + both,
        in_layer + _layer(policy, load, cuda) + _unpacked(policy) + both + gradients,
        key=_size,
    )


def _keys_again(policy: Policy, load: Load, cuda: bool) -> int:
    """Bytes of keys and values that a layer keeps beside each token's own.

    A completion's stand after a copy of its prompt's, unless the whole group is one call's
    (grpo/model/tree_attention.py).
    """
    shape, item = policy.shape, policy.dtype.itemsize
    if _varlen(policy, cuda):
        # All are laid out in one; the ones that they were copied from are dropped.
        return round(2 * item * (_laid_out(load) * _seen(shape) - load.tokens * shape.keys))
    again = load.generations * (load.prompt + load.completion) / load.group if cuda or load.group > ROWS else 0
    return round(2 * item * load.tokens * shape.keys * again)


def _laid_out(load: Load) -> float:
    """Keys of a micro-batch as flash attention wants them: a prompt's, and again before each of its completions."""
    return load.tokens * (load.prompt + load.generations * (load.prompt + load.completion)) / load.group


def _seen(shape: Shape) -> int:
    """Width of a token's keys as flash attention over segments wants them."""
    from torch.nn.attention.varlen import varlen_attn  # loads half of torch

    return shape.keys if "enable_gqa" in signature(varlen_attn).parameters else shape.queries


def _varlen(policy: Policy, cuda: bool) -> bool:
    """Whether attention is one call for the whole row (grpo/model/tree_attention.py)."""
    there = importlib.util.find_spec("torch.nn.attention.varlen") is not None  # since torch 2.10
    return cuda and policy.dtype.itemsize == 2 and not policy.shape.softcap and there


def _head(policy: Policy, load: Load, cuda: bool) -> list[Term]:
    """What the head's backward pass makes: see grpo/model/logprobs.py."""
    shape, item = policy.shape, policy.dtype.itemsize
    rows, columns = CUDA_BLOCK if cuda else CPU_BLOCK
    block = 4 * min(rows, load.tokens) * min(columns, shape.vocabulary)
    # Logits and their gradient, and what an entropy bonus makes of them; in 16 bit on a CPU the weights in fp32 too.
    blocks = 4 if item == 2 and not cuda else 3
    return [
        Term("head: hidden states", (4 + 2 * item) * load.tokens * shape.hidden, "and their gradient in fp32"),
        Term("head: blocks of logits", blocks * block, f"{blocks}: logits, their gradient, and what is made of them"),
    ]


def _layer(policy: Policy, load: Load, cuda: bool) -> list[Term]:
    """The gradients within a layer: the higher of its MLP's and its attention's."""
    shape, tokens, item = policy.shape, load.tokens, policy.dtype.itemsize
    wide = Term(
        "gradients in a layer", (3 * shape.wide + 2 * shape.hidden) * tokens * item, "as wide as its MLP, three"
    )
    if not _varlen(policy, cuda):
        return [wide]
    # However short the prompts are, and those that a cut leaves over.
    segments = tokens * (1 + load.generations) // (load.generations * load.completion) + 1 + load.generations
    width = -(-shape.head_width // 32) * 32
    laid_out = round(_laid_out(load) * item)
    attention = [
        Term(
            "attention: queries' sum", 4 * (tokens + FLASH_ROWS * segments) * shape.heads * width, "gradients in fp32"
        ),
        Term("attention: gradients", 3 * shape.queries * tokens * item, "of result, queries, input"),
        Term("attention: keys'", 2 * _seen(shape) * laid_out, "gradients of keys and values, with a prompt's copies"),
    ]
    if _seen(shape) != shape.queries:
        attention.append(
            Term("attention: for all heads", 2 * shape.queries * laid_out, "the same before they are added up")
        )
    return max([wide], attention, key=_size)


def _gradients(policy: Policy, load: Load, cuda: bool, at_end: bool = True) -> list[Term]:
    """ZeRO-2's: what earlier micro-batches left first. On a CPU, memory is taken when it is written to.

    `at_end`: when the embeddings' is there, the largest; else when the first layer's are.
    """
    item, own = policy.dtype.itemsize, _own(policy.trained, load.ranks)
    share, largest = -(-sum(policy.trained) // load.ranks), max(policy.trained)
    # A parameter beyond the bucket's size is reduced by itself: its gradient is there, and what is summed.
    small = sum(size for size in policy.trained if size <= load.bucket)
    buckets = load.buckets * load.bucket if cuda else min(small, load.buckets * load.bucket)
    several = load.share * load.group > load.micro_batch_tokens
    reduced = item * max(min(small, load.bucket), 2 * largest if largest > load.bucket and at_end else 0)
    if _compact(policy, load):
        # What is summed is added to the share's fp32 at once, a parameter at a time.
        before, this = 4 * share, reduced + (4 * largest if at_end else 0) + (0 if several else 4 * share)
    elif load.offloaded:
        before, this = 0, reduced
    else:
        arrived = own if cuda else max(0, own - min(own, load.bucket))
        before, this = item * own, item * arrived + max(reduced, item * (own - arrived))
    return [
        Term("gradients so far", before if several else 0, f"1/{load.ranks}, of the micro-batches before"),
        Term("buckets", buckets * item, f"{load.buckets} of reduce_bucket_size {load.bucket:,}, as far as used"),
        Term("gradients", this, f"1/{load.ranks} of this one, or a bucket's sum"),
    ]


def _step(policy: Policy, load: Load, cuda: bool) -> list[Term]:
    """AdamW's own copy of the gradient, and the norm before it; AdamW itself is one kernel that makes nothing."""
    item, largest = policy.dtype.itemsize, max(policy.trained)
    share, own = -(-sum(policy.trained) // load.ranks), _own(policy.trained, load.ranks)
    in_fp64 = Term("one in fp64", 8 * min(largest, share), "the largest, for the norm")
    if _compact(policy, load):
        return [Term("gradients", 4 * share, f"1/{load.ranks}, in fp32 since the first micro-batch"), in_fp64]
    if load.offloaded:
        return [Term("a gradient", item * largest, "the largest: they come back one by one"), in_fp64]
    gradients = Term("gradients", item * own, f"1/{load.ranks}")
    copied = Term("in one piece", share * item + (4 * share if item == 2 else 0), "and in fp32")
    stepped = [Term("gradients in fp32", 4 * share, f"1/{load.ranks} in one piece")]
    if policy.in_8_bits and not cuda:
        stepped.append(Term("of bitsandbytes' AdamW", 20 * share, "on a CPU, both moments in fp32"))
    return max([gradients, in_fp64], [gradients, copied], stepped, key=_size)


def _compact(policy: Policy, load: Load) -> bool:
    """Whether DeepSpeed adds gradients up in one piece in fp32, which is AdamW's too."""
    return load.fp32_gradients and policy.dtype.itemsize == 2


def _size(terms: list[Term]) -> int:
    return sum(term.size for term in terms)


def _own(sizes: tuple[int, ...], ranks: int) -> int:
    """Numbers of all parameters that the fullest rank's share touches: ZeRO-2 keeps their gradients whole."""
    share = -(-sum(sizes) // ranks)
    held, at = [0] * ranks, 0
    for size in sizes:
        for rank in range(at // share, (at + size - 1) // share + 1):
            held[rank] += size
        at += size
    return max(held)

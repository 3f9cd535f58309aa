"""How much memory a rank of the trainer needs, from a model's configuration and the settings: no weights are loaded.

What stays (weights, fp32 masters, AdamW's moments) and, on top of it, the highest of four phases: sampling, the begin
of a backward pass (activations), its end (gradients), AdamW's step. Gradients and buffers are counted as DeepSpeed's
ZeRO-2 makes and drops them (deepspeed 0.19, runtime/zero/stage_1_and_2.py, without offload), what a layer keeps for its
backward pass by running the model on device meta. `python -m benchmarks.train_memory` holds the formula against
measured peaks on a CPU; on a GPU it has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedModel

from grpo.activations import kept_for_backward
from grpo.attention import ROWS
from grpo.estimate import CUDA_CONTEXT, MIB, Shape, Term, forward, overhead
from grpo.logprobs import CPU_BLOCK, CUDA_BLOCK
from grpo.optimizer import parameter_groups
from grpo.trainer_config import TrainerConfig

PHASES = "sampling", "backward pass, its begin", "backward pass, its end", "AdamW's step"
CPU_HEAP = 64 * MIB  # small blocks and the libraries' own buffers: fitted to measured peaks
CPU_PROCESS = 550 * MIB  # Python, torch, DeepSpeed, datasets and the rest: a dry run holds 554


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

    @classmethod
    def of(cls, model: PreTrainedModel, longest: int) -> Policy:
        """Of a model on device meta, with its adapter if it trains one. `longest` sequence, in tokens.

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

    @classmethod
    def of(cls, config: TrainerConfig, ds_config: dict, ranks: int, prompt: int, held_out: int) -> Load:
        """`prompt`: tokens of the longest; `held_out`: examples to evaluate on."""
        share, zero = config.prompts_per_step // ranks, ds_config["zero_optimization"]
        groups = share * config.steps_per_generation
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

    process: int
    """what there is without any model: the process on a CPU, its context on a GPU"""
    standing: list[Term]
    phases: dict[str, list[Term]]
    """on top of what stands, each at its highest point"""

    @property
    def held(self) -> int:
        return sum(term.size for term in self.standing)

    def of_phase(self, name: str) -> int:
        return sum(term.size for term in self.phases[name])

    @property
    def highest(self) -> str:
        return max(self.phases, key=self.of_phase)

    @property
    def total(self) -> int:
        return self.process + self.held + self.of_phase(self.highest)


def memory(policy: Policy, load: Load, device_type: str) -> Memory:
    """What a rank holds from the second step on."""
    trained, item, cuda = sum(policy.trained), policy.dtype.itemsize, device_type == "cuda"
    share = -(-trained // load.ranks)
    standing = [
        Term("weights", policy.count * item, "whole on every rank, a tied head once"),
        Term("masters", 4 * share, f"fp32, of 1/{load.ranks} of what is trained; where weights are fp32 too"),
        Term("AdamW's moments", 8 * share, f"two in fp32, of 1/{load.ranks}"),
    ]
    activations, gradients = _activations(policy, load, cuda), _gradients(policy, load, cuda)
    at_once = gradients if cuda else gradients[:1]  # a CPU's memory is taken when it is written to
    of_phases = [
        _sampling(policy, load, device_type),
        activations + _above(policy, load, cuda) + at_once,
        gradients,
        _step(policy, load, cuda),
    ]
    return Memory(
        process=CUDA_CONTEXT if cuda else CPU_PROCESS,
        standing=standing,
        phases={name: terms + _overhead(terms, cuda) for name, terms in zip(PHASES, of_phases, strict=True)},
    )


def _overhead(terms: list[Term], cuda: bool) -> list[Term]:
    return overhead(terms, "cuda") if cuda else [Term("heap", CPU_HEAP, "small blocks and libraries' own")]


def _sampling(policy: Policy, load: Load, device_type: str) -> list[Term]:
    """The higher of the prompts' forward pass and the last token's."""
    shape, item, rows = policy.shape, policy.dtype.itemsize, load.rows
    longest = load.prompt + load.completion
    cache = 2 * policy.layers * shape.keys * rows * item  # of a token of every row

    prompts = forward(shape, policy.dtype, "none", rows * load.prompt, load.prompt, device_type)
    first = [
        Term("KV cache", cache * load.prompt, f"of {rows} prompts"),
        Term("their forward pass", sum(term.size for term in prompts), "each completion's prompt by itself"),
    ]
    last = [
        Term("KV cache", cache * longest, f"{rows} sequences of {longest:,}"),
        Term("a layer's cache again", cache * longest // policy.layers, "made anew to take a token in"),
        Term("keys repeated", 2 * shape.queries * rows * longest * item, "a layer's, to as many heads as queries have"),
        Term("next token's logits", 24 * rows * shape.vocabulary, "six of the vocabulary in fp32"),
    ]
    return max(first, last, key=lambda terms: sum(term.size for term in terms))


def _activations(policy: Policy, load: Load, cuda: bool) -> list[Term]:
    """Of the largest micro-batch."""
    shape, item, tokens = policy.shape, policy.dtype.itemsize, load.tokens
    row = tokens * item
    # A completion's keys stand after a copy of its prompt's, unless the whole group is one call's (grpo/attention.py).
    packed = cuda or load.group > ROWS
    again = load.generations * (load.prompt + load.completion) / load.group if packed else 0
    copies = round(2 * shape.keys * row * again)
    if load.checkpointing:
        return [
            Term(
                "layers' inputs", policy.layers * shape.hidden * row, "gradient_checkpointing: the rest is made again"
            ),
            Term("a layer's activations", policy.kept // policy.layers * tokens + copies, "of the one at work"),
        ]
    return [Term("activations", policy.kept * tokens + policy.layers * copies, f"of {policy.layers} layers")]


def _above(policy: Policy, load: Load, cuda: bool) -> list[Term]:
    """On top of the activations when the loss is there: the head's or the last layer's gradients."""
    shape, item, tokens = policy.shape, policy.dtype.itemsize, load.tokens
    block_rows, columns = CUDA_BLOCK if cuda else CPU_BLOCK
    block = 4 * min(block_rows, tokens) * min(columns, shape.vocabulary)
    head = [
        Term("head: hidden states", (4 + 2 * item) * tokens * shape.hidden, "and their gradient in fp32"),
        Term("head: blocks of logits", 3 * block, "logits, their gradient, and what is made of them"),
    ]
    layer = [
        Term("gradients in a layer", (3 * shape.wide + 2 * shape.hidden) * tokens * item, "as wide as its MLP, three")
    ]
    return [
        Term("head's gradient", policy.head * item, "kept until the embeddings' is there, where they are tied"),
        *max(head, layer, key=lambda terms: sum(term.size for term in terms)),
        Term("ids and losses", 200 * tokens, "some numbers a token"),
    ]


def _gradients(policy: Policy, load: Load, cuda: bool) -> list[Term]:
    """ZeRO-2's: what earlier micro-batches left first. On a CPU, memory is taken when it is written to."""
    item, own = policy.dtype.itemsize, _own(policy.trained, load.ranks)
    # A parameter beyond the bucket's size is reduced by itself: its gradient is there, and what is summed.
    small = sum(size for size in policy.trained if size <= load.bucket)
    buckets = load.buckets * load.bucket if cuda else min(small, load.buckets * load.bucket)
    largest = max(policy.trained)
    reduced = max(min(small, load.bucket), 2 * largest if largest > load.bucket else 0)
    arrived = own if cuda else max(0, own - min(own, load.bucket))
    this = arrived + max(reduced, own - arrived)
    several = load.share * load.group > load.micro_batch_tokens
    return [
        Term("gradients so far", own * item if several else 0, f"1/{load.ranks}, of the micro-batches before"),
        Term("buckets", buckets * item, f"{load.buckets} of reduce_bucket_size {load.bucket:,}, as far as used"),
        Term("gradients", this * item, f"1/{load.ranks} of this one, or a bucket's sum"),
    ]


def _step(policy: Policy, load: Load, cuda: bool) -> list[Term]:
    """AdamW's own copy of the gradient, and what torch makes on the way."""
    item, own = policy.dtype.itemsize, _own(policy.trained, load.ranks) * policy.dtype.itemsize
    share = -(-sum(policy.trained) // load.ranks)
    norm = [
        Term("gradients", own, f"1/{load.ranks}"),
        Term("one in fp64", 8 * min(max(policy.trained), share), "the largest, for the norm"),
    ]
    copied = [
        Term("gradients", own, f"1/{load.ranks}"),
        Term("in one piece", share * item + (4 * share if item == 2 else 0), "and in fp32"),
    ]
    stepped = [
        Term("gradients in fp32", 4 * share, f"1/{load.ranks} in one piece"),
        Term("of torch's AdamW", (4 if cuda else 8) * share, "the root of the second moment"),
    ]
    return max(norm, copied, stepped, key=lambda terms: sum(term.size for term in terms))


def _own(sizes: tuple[int, ...], ranks: int) -> int:
    """Numbers of all parameters that the fullest rank's share touches: ZeRO-2 keeps their gradients whole."""
    share = -(-sum(sizes) // ranks)
    held, at = [0] * ranks, 0
    for size in sizes:
        for rank in range(at // share, (at + size - 1) // share + 1):
            held[rank] += size
        at += size
    return max(held)

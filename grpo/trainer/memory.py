"""The memory of a rank of the trainer, computed from a model's configuration and the settings.

No weights are loaded: the model is on device meta. Counted are the tensors that live at the same time, as
transformers' layers, our attention and log-probs, and DeepSpeed's ZeRO-2 (deepspeed 0.19,
runtime/zero/stage_1_and_2.py) make and drop them. docs/dry_run.md explains every term.
`python -m benchmarks.train_memory` compares it with measured peaks on a CPU, `python -m benchmarks.gpu --part memory`
on a GPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from inspect import signature
from itertools import chain

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from grpo.config.trainer import TrainerConfig
from grpo.model.logprobs import body_of
from grpo.model.memory import (
    CUDA_PROCESS,
    MIB,
    Memory,
    Shape,
    Terms,
    forward_terms,
    logits_block,
    total,
    weights,
    with_allocator,
)
from grpo.model.packing import Tree
from grpo.model.tree_attention import ROWS, segments
from grpo.trainer.optimizer import in_8_bits, parameter_groups

TRAINER_PROCESS = 550 * MIB  # measured: a process that has loaded Python, torch and the rest, but no model
NCCL_BUFFERS = 2 * 256 * MIB  # assumed: for two groups of ranks, the run's and ZeRO's
FLASH_ROWS = 128  # flash attention's backward pass pads each segment of its fp32 accumulator to a multiple of this
REPEATS_KEYS = not hasattr(sdpa_attention, "pack_gqa")  # transformers before 5.23: a layer's keys, for each new token
PHASES = "sampling", "backward pass, its begin", "backward pass, its end", "AdamW's step"


@dataclass(frozen=True)
class TrainedModel:
    """What the trainer's formula needs of a model."""

    shape: Shape
    dtype: torch.dtype
    layers: int
    weights: int
    """bytes of the weights as a run has them"""
    trained: tuple[int, ...]
    """sizes of the trained parameters, in the optimizer's order; counted as one group, as norms and biases are small"""
    head: int
    """parameters of the head, 0 where it is not trained"""
    kept: int
    """bytes that all layers keep for the backward pass, for one token"""
    quantization: str
    in_8_bits: int
    """trained parameters whose moments are in 8 bits"""

    @classmethod
    def of(
        cls, model: PreTrainedModel, longest: int, quantization: str = "none", optim: str = "adamw_torch"
    ) -> TrainedModel:
        """Describe a model on device meta, with its adapter if it trains one. `longest`: tokens of a sequence.

        On device meta the weights are not quantized: `quantization` is how a run has them. Raises NotImplementedError
        where the model cannot run without numbers.
        """
        head = model.get_output_embeddings().weight
        return cls(
            shape=Shape.of(model),
            dtype=model.dtype,
            layers=model.config.get_text_config().num_hidden_layers,
            weights=weights(model, model.dtype, quantization),
            trained=tuple(parameter.numel() for parameter in chain(*parameter_groups(model))),
            head=head.numel() if head.requires_grad else 0,
            kept=kept_for_backward(model, longest),
            quantization=quantization,
            in_8_bits=sum(weight.numel() for weight in in_8_bits(model)) if optim == "adamw_8bit" else 0,
        )


@dataclass(frozen=True)
class RankWork:
    """The work of one rank, from the settings."""

    ranks: int
    prompts: int
    """prompts of a rank in a step"""
    longest_prompt: int
    longest_completion: int
    generations: int
    """completions of a prompt"""
    micro_batch_tokens: int
    rows: int
    """sequences in one call of generate, in training or evaluation"""
    checkpointing: bool
    buckets: int
    """buckets of gradients on their way to another rank"""
    bucket: int
    """numbers in a bucket"""
    fp32_gradients: bool
    """whether micro-batches are added up in fp32, whatever the dtype of the weights is"""
    offloaded: bool
    """whether masters and moments are in the machine's memory, not on the GPU"""

    @classmethod
    def of(cls, config: TrainerConfig, ds_config: dict, ranks: int, longest_prompt: int, held_out: int) -> RankWork:
        """Derive it from the settings. `held_out`: examples to evaluate on."""
        zero, prompts = ds_config["zero_optimization"], config.prompts_per_step // ranks
        drawn = max(config.sequences_per_generate // config.num_generations, 1) * config.num_generations
        drawn = min(drawn, prompts * config.steps_per_generation * config.num_generations)
        return cls(
            ranks=ranks,
            prompts=prompts,
            longest_prompt=longest_prompt,
            longest_completion=config.max_completion_length,
            generations=config.num_generations,
            micro_batch_tokens=config.micro_batch_tokens,
            rows=max(drawn, min(config.sequences_per_generate, held_out)),
            checkpointing=config.gradient_checkpointing,
            # The defaults are DeepSpeed's.
            buckets=1 + bool(zero.get("overlap_comm")),
            bucket=int(zero.get("reduce_bucket_size", 500_000_000)),
            fp32_gradients=ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32",
            offloaded=(zero.get("offload_optimizer") or {}).get("device", "none") != "none",
        )

    @property
    def sequence(self) -> int:
        """Return the most tokens of a prompt with a completion."""
        return self.longest_prompt + self.longest_completion

    @property
    def group(self) -> int:
        """Return the most tokens of a prompt with all its completions."""
        return self.longest_prompt + self.generations * self.longest_completion

    @property
    def tokens(self) -> int:
        """Return the most tokens of a micro-batch. A sequence that is longer than the budget goes alone."""
        return min(max(self.micro_batch_tokens, self.sequence), self.prompts * self.group)

    @property
    def laid_out(self) -> float:
        """Return the keys of a micro-batch as flash attention wants them: a prompt's again before each completion."""
        return self.tokens * (self.longest_prompt + self.generations * self.sequence) / self.group


def trainer_memory(model: TrainedModel, work: RankWork, device_type: str) -> Memory:
    """Return what a rank holds from the second step on."""
    cuda, item = device_type == "cuda", model.dtype.itemsize
    share, largest = _share(model, work), max(model.trained)
    outside = {"CUDA": CUDA_PROCESS} if cuda else {"process": TRAINER_PROCESS}
    if cuda and work.ranks > 1:
        outside["NCCL's buffers"] = NCCL_BUFFERS
    packed = -(-model.in_8_bits // work.ranks)  # a byte for each of both moments, and two constants for 256
    optimizer = {"masters": 4 * share, "AdamW's moments": 8 * (share - packed) + 2 * packed + 8 * -(-packed // 256)}
    standing = {"weights": model.weights}
    if work.offloaded:
        standing["a gradient"] = item * largest
        summed = 0 if _sums_in_place(model, work) else item * _touched(model, work)
        optimizer["gradients in fp32"] = 4 * share
        optimizer["gradients as they come"] = summed + item * largest
        optimizer["weights on their way back"] = item * share
    in_host = cuda and work.offloaded
    parts = _sampling, _backward_begin, _backward_end, _optimizer_step
    return Memory(
        outside=outside,
        standing=standing if in_host else standing | optimizer,
        phases={name: with_allocator(part(model, work, cuda), cuda) for name, part in zip(PHASES, parts, strict=True)},
        host=optimizer if in_host else {},
    )


def _share(model: TrainedModel, work: RankWork) -> int:
    """Return the trained numbers of one rank."""
    return -(-sum(model.trained) // work.ranks)


def _touched(model: TrainedModel, work: RankWork) -> int:
    """Return the numbers of all parameters in the fullest rank's share, also in part: their gradients stay whole."""
    share, held, start = _share(model, work), [0] * work.ranks, 0
    for size in model.trained:
        for rank in range(start // share, (start + size - 1) // share + 1):
            held[rank] += size
        start += size
    return max(held)


def _sums_in_place(model: TrainedModel, work: RankWork) -> bool:
    """Tell whether DeepSpeed adds gradients up in one piece in fp32, which AdamW reads too."""
    return work.fp32_gradients and model.dtype.itemsize == 2


def _sampling(model: TrainedModel, work: RankWork, cuda: bool) -> Terms:
    """Return the higher of the prompts' forward pass and that of the last token."""
    shape, item, prompt = model.shape, model.dtype.itemsize, work.longest_prompt
    cache = 2 * model.layers * shape.key_width * work.rows * item  # for one token of every sequence
    tokens = work.rows * prompt
    prompts = forward_terms(shape, model.dtype, model.quantization, tokens, prompt, cuda, scoring=False)
    first = {
        "KV cache": cache * prompt,
        "their forward pass": total(prompts),  # each completion's prompt by itself
        "their masks": tokens * prompt * (1 + item),  # prompts of several lengths are padded
    }
    last = {
        "KV cache": cache * work.sequence,
        "a layer's keys again": cache * work.sequence // model.layers // 2,  # made anew to take a token in
        "next token's logits": 24 * work.rows * shape.vocabulary,  # six in fp32
        **_unpacked_weights(model),
    }
    if REPEATS_KEYS:
        last["keys repeated"] = 2 * shape.query_width * work.rows * work.sequence * item
    return max(first, last, key=total)


def _unpacked_weights(model: TrainedModel) -> Terms:
    """Return the weight that is unpacked for a product, forwards and backwards, and dropped after it."""
    size = model.dtype.itemsize * model.shape.largest_linear
    return {"4 bit weights unpacked": size} if model.quantization == "4bit" else {}


def _backward_begin(model: TrainedModel, work: RankWork, cuda: bool) -> Terms:
    """Return the higher of two moments: at the head, and in the layer where the backward pass begins."""
    shape, item, tokens = model.shape, model.dtype.itemsize, work.tokens
    copies = _copied_keys(model, work, cuda)
    if work.checkpointing:
        inputs = {"layers' inputs": model.layers * shape.hidden * tokens * item}
        at_head = inputs | {"last norm": (4 + item) * shape.hidden * tokens}  # its input in fp32, and normed
        in_layer = inputs | {"a layer's activations": model.kept // model.layers * tokens + copies}
    else:
        at_head = in_layer = {"activations": model.kept * tokens + model.layers * copies}
    at_head = at_head | {
        "head: hidden states": (4 + 2 * item) * tokens * shape.hidden,  # and their gradient in fp32
        # The logits, their gradient, and what is made of them.
        "head: blocks of logits": 3 * logits_block(shape, tokens, cuda)[0],
    }
    in_layer = in_layer | _layer_gradients(model, work, cuda) | _unpacked_weights(model)
    gradients = _backward_end(model, work, cuda, at_end=False)
    both = {
        "head's gradient": model.head * item,  # kept until the embeddings' is there, where they are tied
        "ids and losses": 200 * tokens,
        "gradients so far": gradients["gradients so far"],
    }
    # A CPU's memory is taken when it is written to: buckets and gradients are, as layer after layer is done.
    return max(at_head | both, in_layer | both | (gradients if cuda else {}), key=total)


def _layer_gradients(model: TrainedModel, work: RankWork, cuda: bool) -> Terms:
    """Return the gradients within a layer: the higher of its MLP's and its attention's."""
    shape, tokens, item = model.shape, work.tokens, model.dtype.itemsize
    mlp = {"gradients in a layer": (3 * shape.mlp_width + 2 * shape.hidden) * tokens * item}
    key_width = _varlen_key_width(model, cuda)
    if key_width is None:
        return mlp
    # However short the prompts are, and those that a cut leaves over.
    generations = work.generations
    segment_count = tokens * (1 + generations) // (generations * work.longest_completion) + 1 + generations
    padded_width = -(-shape.head_width // 32) * 32
    laid_out = round(work.laid_out * item)
    attention = {
        "attention: queries' sum": 4 * (tokens + FLASH_ROWS * segment_count) * shape.heads * padded_width,  # in fp32
        "attention: gradients": 3 * shape.query_width * tokens * item,  # of result, queries, input
        "attention: keys'": 2 * key_width * laid_out,  # of keys and values, with a prompt's copies
    }
    if key_width != shape.query_width:
        attention["attention: for all heads"] = 2 * shape.query_width * laid_out  # before they are added up
    return max(mlp, attention, key=total)


def _varlen_key_width(model: TrainedModel, cuda: bool) -> int | None:
    """Return the width of a token's keys where attention is one call of flash attention for the whole row, else None.

    See grpo/model/tree_attention.py.
    """
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None  # since torch 2.10
    if not cuda or model.dtype.itemsize != 2 or model.shape.softcapped or not has_varlen:
        return None
    from torch.nn.attention.varlen import varlen_attn  # loads half of torch

    grouped = "enable_gqa" in signature(varlen_attn).parameters
    return model.shape.key_width if grouped else model.shape.query_width


def _copied_keys(model: TrainedModel, work: RankWork, cuda: bool) -> int:
    """Return the bytes of keys and values that a layer keeps beside each token's own.

    A completion's stand after a copy of its prompt's (grpo/model/tree_attention.py).
    """
    item, keys = model.dtype.itemsize, work.tokens * model.shape.key_width
    if (width := _varlen_key_width(model, cuda)) is not None:
        # All are laid out in one; the ones that they were copied from are dropped.
        return round(2 * item * (work.laid_out * width - keys))
    return round(2 * item * keys * work.generations * work.sequence / work.group)


def _backward_end(model: TrainedModel, work: RankWork, cuda: bool, at_end: bool = True) -> Terms:
    """Return ZeRO-2's gradients. A CPU's memory is taken when it is written to.

    `at_end`: when the embeddings' gradient is there, the largest; else when the first layer's are.
    """
    item, largest, share = model.dtype.itemsize, max(model.trained), _share(model, work)
    # A parameter beyond the bucket's size is reduced by itself: its gradient is there, and what is summed.
    small = sum(size for size in model.trained if size <= work.bucket)
    reduced = item * max(min(small, work.bucket), 2 * largest if largest > work.bucket and at_end else 0)
    several = work.prompts * work.group > work.micro_batch_tokens
    if _sums_in_place(model, work):
        # What is summed is added to the share's fp32 at once, a parameter at a time.
        earlier, current = 4 * share, reduced + (4 * largest if at_end else 0) + (0 if several else 4 * share)
    elif work.offloaded:
        earlier, current = 0, reduced
    else:
        touched = _touched(model, work)
        arrived = touched if cuda else max(0, touched - work.bucket)
        earlier, current = item * touched, item * arrived + max(reduced, item * (touched - arrived))
    buckets = work.buckets * work.bucket
    return {
        "gradients so far": earlier if several else 0,  # of the micro-batches before
        "buckets": item * (buckets if cuda else min(small, buckets)),
        "gradients": current,
    }


def _optimizer_step(model: TrainedModel, work: RankWork, cuda: bool) -> Terms:
    """Return AdamW's own copy of the gradient, or the norm before it; AdamW itself is one kernel that makes nothing."""
    item, largest, share = model.dtype.itemsize, max(model.trained), _share(model, work)
    in_fp64 = {"one in fp64": 8 * min(largest, share)}  # the largest, for the norm
    if _sums_in_place(model, work):
        return {"gradients": 4 * share} | in_fp64
    if work.offloaded:
        return {"a gradient": item * largest} | in_fp64  # they come back one by one
    gradients = {"gradients": item * _touched(model, work)}
    in_one_piece = {"in one piece": share * item + (4 * share if item == 2 else 0)}  # and in fp32
    in_fp32 = {"gradients in fp32": 4 * share}
    if model.in_8_bits and not cuda:
        in_fp32["of bitsandbytes' AdamW"] = 20 * share  # on a CPU it has both moments in fp32
    return max(gradients | in_fp64, gradients | in_one_piece, in_fp32, key=total)


def kept_for_backward(model: PreTrainedModel, longest: int) -> int:
    """Count the bytes a token that the model's body keeps for its backward pass, in a forward pass on device meta.

    A fused attention keeps queries, keys, values and result; where no kernel knows the scores' softcap, also the
    scores of `longest` tokens. Raises NotImplementedError where the model cannot run without numbers.
    """
    softcapped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    tokens = longest if softcapped else ROWS
    implementation = model.config._attn_implementation
    AttentionInterface.register("grpo_counted", _counted_attention)
    AttentionMaskInterface.register("grpo_counted", ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    parameters = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}  # by storage; alive, so that no other storage gets the same number

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    # A mask in four dimensions is handed on as it is, see grpo/model/logprobs.py.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")
    model.set_attn_implementation("grpo_counted")
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            body_of(model)(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    # A model's code may fail in any way where it meets tensors without numbers or a mask that it does not know.
    except Exception as error:
        raise NotImplementedError(f"{type(model).__name__} does not run without numbers: {error}") from error
    finally:
        model.set_attn_implementation(implementation)
    size = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in parameters)
    return -(-size // tokens)


def _counted_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **options
) -> tuple[torch.Tensor, None]:
    if (softcap := options.get("softcap")) is not None:
        tree = Tree([(query.shape[2], [])])
        return segments(query, key, value, tree, options.get("scaling") or 1.0, softcap), None
    # Copied, as the segments' results are.
    return _FusedAttention.apply(query, key, value).transpose(1, 2).clone(memory_format=torch.contiguous_format), None


class _FusedAttention(torch.autograd.Function):
    """An attention that keeps what flash attention keeps, and computes nothing."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("no backward pass follows")

"""The memory of a rank of the trainer, computed from the settings and from a model on device meta.

Activations are counted, as grpo/model/memory.py does; the rest is DeepSpeed's ZeRO-2 and ZeRO-3 (deepspeed 0.19,
runtime/zero/stage_1_and_2.py, stage3.py). docs/dry_run.md has the formula. `python -m benchmarks.train_memory` compares
it with measured peaks on a CPU, `python -m benchmarks.gpu --part memory` on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.config.trainer import TrainerConfig
from grpo.model import memory
from grpo.model.logprobs import CPU_BLOCK, CUDA_BLOCK
from grpo.model.pictures import KEPT_BYTES, PictureProcessor
from grpo.model.shared_cache import GROW
from grpo.model.trial import never_packed
from grpo.sampling.rows import PREFILL_TOKENS, slots
from grpo.trainer.deepspeed_engine import NORM_BLOCK, in_8_bits, in_parts, is_away, parameter_groups
from grpo.trainer.inputs import Inputs
from grpo.wire.picture_files import PicturedPrompt

TRAINER_PROCESS = 550 * memory.MIB  # measured on a CPU: Python, torch and the rest, but no model
NCCL_BUFFERS = 2 * 256 * memory.MIB  # assumed: for two groups of ranks, the run's and ZeRO's
SAMPLING, BACKWARD, STEP = "sampling", "backward pass", "AdamW's step"


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """The most that a rank does at a time."""

    config: TrainerConfig
    ranks: int
    longest_prompt: int
    held_out: int  # examples to evaluate on
    processor: PictureProcessor | None = None
    pictured: PicturedPrompt | None = None  # the prompt with the most tokens of pictures; None without pictures

    @classmethod
    def of(cls, config: TrainerConfig, ranks: int, inputs: Inputs) -> RankWork:
        longest = max(len(example.prompt_ids) for example in inputs.examples)
        work = cls(
            config=config,
            ranks=ranks,
            longest_prompt=longest,
            held_out=len(inputs.held_out),
            processor=inputs.processor,
        )
        pictured = [replace(work, pictured=prompt) for prompt in inputs.pictured]
        return max(pictured, key=lambda work: work.picture_tokens, default=work)

    @property
    def picture_tokens(self) -> int:
        return int((np.asarray(self.pictured) == self.processor.token_id).sum())

    @property
    def prompts(self) -> int:
        return self.config.prompts_per_step // self.ranks

    @property
    def rows(self) -> int:
        """the sequences in one call of generate, in training or evaluation"""
        config, groups = self.config, 0
        if config.sampler != "pool":
            at_once = max(config.sequences_per_generate // config.draws, 1)
            groups = min(at_once, self.prompts * config.steps_per_generation)
        return max(groups * config.draws, min(config.sequences_per_generate, self.held_out))

    @property
    def sequence(self) -> int:
        return self.longest_prompt + self.config.max_completion_length

    @property
    def group(self) -> int:
        """the tokens of a prompt with all its completions"""
        return self.longest_prompt + self.config.num_generations * self.config.max_completion_length

    @property
    def tokens(self) -> int:
        """the tokens of a micro-batch; a sequence that is longer than the budget goes alone"""
        of_sequence = -(-self.sequence // self.config.sequence_parallel_size)
        return min(max(self.config.micro_batch_tokens, of_sequence), self.prompts * self.group)

    def pictures(self, prompts: int) -> memory.Pictures | None:
        return memory.Pictures(self.processor, self.pictured, prompts) if self.pictured is not None else None

    @property
    def kept_pixels(self) -> int:
        """the bytes of pixels that are kept in the machine's memory, of a round's pictures at most"""
        if self.pictured is None:
            return 0
        inputs = self.processor.inputs(self.pictured.pictures)
        of_prompt = sum(value.nbytes for of_picture in inputs for value in of_picture.values())
        return min(KEPT_BYTES, of_prompt * self.prompts * self.config.steps_per_generation)


def rank_memory(model: PreTrainedModel, work: RankWork, ds_config: dict, device_type: str) -> memory.Memory:
    """Return a rank's memory from the second step on. The model is on device meta, as the run trains it but for the
    quantization, which the settings name. Raises NotImplementedError if it does not run there."""
    config, cuda, item = work.config, device_type == "cuda", model.dtype.itemsize
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    share, largest, zero = -(-sum(sizes) // work.ranks), max(sizes), ds_config["zero_optimization"]
    offloads = is_away(zero, "offload_optimizer")
    # DeepSpeed adds gradients in 16 bits up in one piece in fp32, which AdamW reads too.
    in_fp32 = item == 2 and ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    eight_bit = sum(weight.numel() for weight in in_8_bits(model)) if config.optim == "adamw_8bit" else 0
    packed = -(-eight_bit // work.ranks)  # a byte for each of both moments, and two constants for 256
    optimizer = {"masters": 4 * share, "AdamW's moments": 8 * (share - packed) + 2 * packed + 8 * -(-packed // 256)}
    standing = {"weights": memory.weights(model, config.quantization)}
    if config.beta > 0 and config.ref == "local":
        standing["reference weights"] = item * sum(sizes)
    shares, not_yet = zero.get("stage") == 3, 0
    if shares:
        standing |= _shared_out(model, work, zero)
        optimizer["gradients"] = (4 if in_fp32 else item) * share + (4 * share if offloads else 0)
    elif offloads:
        standing["a gradient"] = item * largest
        is_pinned = cuda and bool(zero["offload_optimizer"].get("pin_memory"))
        terms, not_yet = _offloaded(model, work.ranks, item=item, in_fp32=in_fp32, is_pinned=is_pinned)
        optimizer |= terms
    in_host = cuda and offloads
    host = optimizer | {"a checkpoint as it is read": max(0, 4 * share - not_yet)} if in_host else {}
    if shares and cuda and is_away(zero, "offload_param"):
        host["weights"] = standing.pop("weights")
    if cuda and config.activation_offloading:
        text = model.config.get_text_config()
        host["activations"] = text.num_hidden_layers * work.tokens * text.hidden_size * item

    sampling = _sampling(model, work, device_type)
    if shares:
        begin = end = {"weights in place": _in_place(model, zero), "a gradient": 2 * item * largest}
        norm = {"the largest in fp64": 8 * min(share, largest)}
        step = norm if offloads else {"gradients in fp32": 4 * min(share, _SUB_GROUP)}
        if sampling and (work.ranks > 1 or "weights" in host):
            sampling["all weights"] = memory.weights(model, config.quantization)
    else:
        begin, end, step = _gradients(work, zero, sizes=sizes, item=item, in_fp32=in_fp32, offloads=offloads, cuda=cuda)
    if eight_bit and not cuda:
        step["bitsandbytes' moments in fp32"] = 20 * share  # on a CPU alone
    outside = {"CUDA": memory.CUDA_PROCESS} if cuda else {"process": TRAINER_PROCESS, "pixels": work.kept_pixels}
    if cuda and work.ranks > 1:
        outside["NCCL's buffers"] = NCCL_BUFFERS
    return memory.Memory(
        outside=outside,
        standing=standing if in_host else standing | optimizer,
        phases={
            SAMPLING: sampling,
            BACKWARD: max(_of_tokens(model, work, device_type) | begin, end, key=memory.total),
            STEP: step,
        },
        device_type=device_type,
        host=host,
    )


def _offloaded(
    model: PreTrainedModel, ranks: int, *, item: int, in_fp32: bool, is_pinned: bool
) -> tuple[memory.Terms, int]:
    """Return what of ZeRO-2's offloaded optimizer may be page-locked, and what of it comes with the first step."""

    def held(numbers: int, bytes_each: int) -> int:
        count = numbers * bytes_each
        return 1 << (count - 1).bit_length() if is_pinned else count  # as CachingHostAllocator.h rounds it

    trained = parameter_groups(model)
    sizes = [weight.numel() for weights in trained for weight in weights]
    shares = [-(-sum(weight.numel() for weight in part) // ranks) for weights in trained for part in in_parts(weights)]
    masters, largest = sum(held(share, 4) for share in shares), held(max(sizes), item)
    each = 0 if in_fp32 else max(sum(held(size, item) for size in sizes) // ranks, largest)  # of each weight
    terms = {"masters": masters, "gradients": masters + each + largest}
    return terms | {"weights on their way back": sum(held(share, item) for share in shares)}, each


def _of_tokens(model: PreTrainedModel, work: RankWork, device_type: str) -> memory.Terms:
    """Return what a micro-batch's forward and backward pass hold."""
    config = work.config
    least = len(work.pictured or ()) + config.num_generations  # a prompt with pictures, a token of each completion
    pictures = work.pictures(min(work.prompts, max(1, work.tokens // least)))
    head = model.get_output_embeddings().weight
    gradient = model.dtype.itemsize * head.numel() if head.requires_grad else 0
    # A key of a prompt is laid out before each of its completions too.
    copies = (work.longest_prompt + config.num_generations * work.sequence) / work.group
    ranks, (queries, keys), exchanged = config.sequence_parallel_size, memory.attention_widths(model), 0
    if ranks > 1:  # queries, keys and values on both sides; the result, as it goes and as it comes
        heads = model.config.get_text_config().num_attention_heads
        copies *= max(1.0, ranks * queries / (keys * heads))  # a rank has at least one key head
        exchanged = model.dtype.itemsize * work.tokens * (4 * queries + 2 * keys)
    activations = memory.activations(
        model,
        work.tokens,
        longest=work.sequence,
        device_type=device_type,
        copies=copies,
        backward=True,
        pictures=pictures,
    )
    return {
        "exchanged heads": exchanged,
        # Of a token k likeliest with their ids, the policy's log-probs of them, and in fp64 ten for each and the rest.
        "teacher's tokens": work.tokens * (92 + 120 * config.teacher_top_k if config.teacher_top_k else 0),
        "activations": activations,
        "head's gradient": gradient,  # until the embeddings' is there, if tied
        **memory.beside_products(model, config.quantization, work.tokens),
    }


# ZeRO-3's settings; these are DeepSpeed's defaults.
_SUB_GROUP = 10**9  # numbers that AdamW steps at a time
_KEPT = "stage3_param_persistence_threshold", 10**5  # weights of so many numbers at most stay whole
_AHEAD = "stage3_prefetch_bucket_size", 5 * 10**7


def _shared_out(model: PreTrainedModel, work: RankWork, zero: dict) -> memory.Terms:
    """Return what ZeRO-3 keeps of the weights, and its bucket."""
    sizes, item = [parameter.numel() for parameter in model.parameters()], model.dtype.itemsize
    small = sum(size for size in sizes if size <= int(zero.get(*_KEPT))) if work.ranks > 1 else 0
    terms = {"weights": -(-sum(sizes) // work.ranks), "small weights": small}
    terms["bucket"] = int(zero.get("reduce_bucket_size", 500_000_000))
    return {name: item * count for name, count in terms.items()}


def _in_place(model: PreTrainedModel, zero: dict) -> int:
    """Return the bytes of the largest weights that are whole at a time: a layer's, or the head's, and those ahead."""
    parts = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    sizes = [sum(weight.numel() for weight in part.parameters()) for part in parts]
    rest = sum(weight.numel() for weight in model.parameters()) - max(sizes, default=0)
    largest = max([*sizes, model.get_output_embeddings().weight.numel()])
    return model.dtype.itemsize * (largest + min(int(zero.get(*_AHEAD)), rest))


def _gradients(
    work: RankWork, zero: dict, *, sizes: list[int], item: int, in_fp32: bool, offloads: bool, cuda: bool
) -> tuple[memory.Terms, memory.Terms, memory.Terms]:
    """Return ZeRO-2's gradients: at the begin of a backward pass, at its end, and in AdamW's step. The ranks sum a
    bucket of gradients at a time. A parameter larger than a bucket is summed alone, and held twice. A GPU's memory is
    taken whole with the first gradient, a CPU's as it is written."""
    share, largest = -(-sum(sizes) // work.ranks), max(sizes)
    # The defaults are DeepSpeed's.
    bucket, buckets = int(zero.get("reduce_bucket_size", 500_000_000)), 1 + bool(zero.get("overlap_comm"))
    small = sum(size for size in sizes if size <= bucket)
    buckets = item * (buckets * bucket if cuda else min(small, buckets * bucket))
    # A parameter on the border of two shares is kept whole by both ranks.
    kept = 4 * share if in_fp32 else 0 if offloads else item * max(share, largest)
    several = work.prompts * work.group > work.config.micro_batch_tokens
    before = kept if several and not in_fp32 else 0  # of the micro-batches before; in fp32 they are one

    def with_summed(summed: int) -> memory.Terms:
        arrived = kept if cuda or in_fp32 else max(0, kept - item * bucket)
        return {"gradients": before + max(kept, arrived + summed), "buckets": buckets}

    first = item * min(small, bucket)
    last = max(first, 2 * item * largest if largest > bucket else 0) + (4 * largest if in_fp32 else 0)
    begin = with_summed(first) if cuda else {"gradients": kept if several else 0}
    norm = 8 * min(share, largest)  # the largest in fp64
    if in_fp32:
        step = {"gradients": kept, "the largest in fp64": norm}
    elif offloads:  # the norm's block in fp64, then the gradient as it leaves
        copy = max(min(norm, 8 * NORM_BLOCK), 4 * min(share, largest) if item == 2 else 0)
        step = {"gradients": item * largest, "the largest in fp32": copy}
    else:
        step = {"gradients": kept, "copies in one piece": max(norm, share * (4 if item == 4 else 2 + 4))}  # and in fp32
    return begin, with_summed(last), step


def _sampling(model: PreTrainedModel, work: RankWork, device_type: str) -> memory.Terms:
    """Return the peak of a round's rows, or of an evaluation's, whose prompts have one row each."""
    config = work.config
    if config.sampler == "pool" and not work.held_out:
        return {}
    if config.sampler == "generate" or never_packed(model):
        return _generate(model, work, device_type)
    groups = work.prompts * config.steps_per_generation
    calls = []
    if config.sampler != "pool":
        calls.append(_continuous(model, work, device_type, groups=groups, copies=config.draws))
    if work.held_out:
        groups = min(config.sequences_per_generate, work.held_out)
        calls.append(_continuous(model, work, device_type, groups=groups, copies=1))
    return max(calls, key=memory.total)


def _continuous(model: PreTrainedModel, work: RankWork, device_type: str, *, groups: int, copies: int) -> memory.Terms:
    """Return the highest of the passes of prompts, of answers, and of the last token (grpo/sampling/rows.py)."""
    config, (_, keys), item = work.config, memory.attention_widths(model), model.dtype.itemsize
    text, vocabulary = model.config.get_text_config(), len(model.get_output_embeddings().weight)
    prompt, completion = work.longest_prompt, config.max_completion_length
    if config.agent is not None:  # each request has ids of its own before it (grpo/sampling/drawer.py)
        prompt, completion, groups, copies = work.sequence, work.sequence, groups * copies, 1
    rows = min(config.sequences_per_generate, groups * copies)
    at_once, block = -(-rows // copies), (CUDA_BLOCK if device_type == "cuda" else CPU_BLOCK)[1]
    cache = 2 * keys * item  # for one token in one layer
    prompts = text.num_hidden_layers * cache * slots(groups, rows, copies) * prompt
    together = max(1, min(at_once, PREFILL_TOKENS // prompt))
    tokens = together * prompt
    own = cache * rows * completion
    step = {
        # Of the prompts, of the rows, of both, and their softmax, in fp32.
        "scores": 3 * 4 * rows * text.num_attention_heads * (prompt + completion),
        # All in fp32; a block is looked through in fp32 and fp64.
        "next token's logits": rows * (4 * vocabulary + 16 * min(vocabulary, block)),
        **memory.beside_products(model, config.quantization, rows),
    }
    # Recorded steps have memory of their own (grpo/sampling/rows.py), beside that of a step before it is recorded.
    recorded = {"recorded steps": memory.total(step)} if device_type == "cuda" and config.cuda_graphs else {}
    pictures = work.pictures(together)
    first = {
        "KV cache": prompts,
        "prompts": memory.activations(model, tokens, longest=prompt, device_type=device_type, pictures=pictures),
        **memory.beside_products(model, config.quantization, tokens),
    }
    if rows < groups * copies:  # prompts that follow the first ones find the rows there
        first |= {"KV cache": prompts + text.num_hidden_layers * own} | recorded
    # A layer's tokens are copied when there is room for more.
    full = {"KV cache": prompts + text.num_hidden_layers * own + int(own / GROW)}
    passes = [first, full | step | recorded]
    if config.has_turns:  # one long answer alone, or shorter ones together
        fed = min(rows * completion, max(completion, PREFILL_TOKENS))
        longest = prompt + completion
        answers = {"answers": memory.activations(model, fed, longest=longest, device_type=device_type)}
        passes.append(full | answers | memory.beside_products(model, config.quantization, fed) | recorded)
    return max(passes, key=memory.total)


def _generate(model: PreTrainedModel, work: RankWork, device_type: str) -> memory.Terms:
    """Return the higher of the prompts' forward pass, which with tools or an environment may have all of a completion
    but a token, and that of the last token, by transformers' generate."""
    (queries, keys), item, prompt = memory.attention_widths(model), model.dtype.itemsize, work.longest_prompt
    layers, vocabulary = model.config.get_text_config().num_hidden_layers, len(model.get_output_embeddings().weight)
    cache = 2 * layers * keys * work.rows * item  # for one token of every sequence
    context = work.sequence if work.config.has_turns else prompt
    tokens = work.rows * context  # each completion's prompt by itself
    products = memory.beside_products(model, work.config.quantization, tokens)
    pictures = work.pictures(work.rows)
    first = {
        "KV cache": cache * context,
        "prompts": memory.activations(
            model, tokens, longest=context, device_type=device_type, padded=True, pictures=pictures
        ),
    }
    # A layer's keys are made anew to take a token in; transformers before 5.23 repeats them for all heads.
    again = (2 * queries if queries > keys else keys) * work.rows * work.sequence * item
    last = {"KV cache": cache * work.sequence + again, "next token's logits": 24 * work.rows * vocabulary}  # 6 in fp32
    return max(first | products, last | products, key=memory.total)

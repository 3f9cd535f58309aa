"""Computes the memory of one process without loading weights, and prints it for both programs.

A forward pass, and a backward pass for the trainer, run on device meta, where tensors have sizes and no numbers, and
the living tensors are counted. Formulas stand for attention, whose kernel depends on the device, for the head's blocks
of logits, and for quantized weights. `python -m benchmarks.memory` compares the sum with measured peaks.
"""

import math
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from grpo.config.errors import ConfigError, ranks_here
from grpo.config.sampling_settings import SharedConfig
from grpo.config.server import ServerConfig
from grpo.model.hub import refuse_unloadable
from grpo.model.load import auto_class, load_settings, longest_sequence, resolve_dtype
from grpo.model.logprobs import CPU_BLOCK, CUDA_BLOCK, body_of, recompute
from grpo.model.lora import linear_layers
from grpo.model.packing import pack_prompts
from grpo.model.pictures import PictureProcessor, Vision
from grpo.model.tree_attention import ROWS
from grpo.model.trial import never_packed
from grpo.wire.picture_files import PicturedPrompt

MIB, GIB = 2**20, 2**30
SERVER_PROCESS = 400 * MIB  # measured on a CPU: Python, torch and the rest, but no model
CUDA_PROCESS = 900 * MIB  # assumed: CUDA's context, and the kernels, which are loaded when they are first used
# The margin: of a phase's tensors, and beside them. On a CPU every measured peak stays below it.
MARGIN, CPU_MARGIN, CUDA_MARGIN = 0.1, 192 * MIB, 32 * MIB
GROUP = 8  # completions of a prompt, in the server: flash attention wants the prompt's keys before each of them
FORWARD = "forward pass"
# Qwen's towers call an attention that is not named so once for each window: a second's work on device meta would take
# minutes. What is alive is the same.
_OF_TOWER = "grpo_counted_as_flash"

Terms = dict[str, int]  # bytes by purpose


def total(terms: Terms) -> int:
    return sum(terms.values())


@dataclass(frozen=True)
class Pictures:
    """The pictures of a pass: those of a prompt, which is in it so many times."""

    processor: PictureProcessor
    prompt: PicturedPrompt
    count: int

    def inputs(self, model: PreTrainedModel, tokens: int) -> dict[str, Tensor]:
        """Return the model's inputs: pixels on device meta, but integers with values, as lengths are read from them."""
        text = [int(self.processor.token_id == 0)] * (tokens - self.count * len(self.prompt))
        batch = pack_prompts([*[self.prompt] * self.count, text], Vision(self.processor, model), "cpu")
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        for name, value in batch.pictures.items():
            inputs[name] = value.to("meta") if value.is_floating_point() else value
        return inputs


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes that one process needs."""

    outside: Terms  # outside torch's allocator: the process on a CPU; on a GPU its context, kernels and NCCL's buffers
    standing: Terms  # the tensors that always exist
    phases: dict[str, Terms]  # the tensors that each phase adds at its highest point
    device_type: str
    host: Terms = field(default_factory=dict)  # offloaded from a GPU to the machine's memory

    @property
    def highest(self) -> str:
        return max(self.phases, key=self.peak)

    @property
    def total(self) -> int:
        return total(self.outside) + self.peak(self.highest)

    def tensors(self, phase: str) -> int:
        """Return what torch.cuda.max_memory_allocated() should show after a phase."""
        return total(self.standing) + total(self.phases[phase])

    def margin(self, phase: str) -> int:
        constant = CUDA_MARGIN if self.device_type == "cuda" else CPU_MARGIN
        return constant + round(MARGIN * total(self.phases[phase]))

    def peak(self, phase: str) -> int:
        return self.tensors(phase) + self.margin(phase)


def server_memory(model: PreTrainedModel, quantization: str, tokens: int, *, longest: int, device_type: str) -> Memory:
    """Return a server's memory for a pass of `tokens` in sequences of at most `longest`. Raises as `activations`."""
    pass_terms = {"activations": activations(model, tokens, longest=longest, device_type=device_type, copies=GROUP + 1)}
    return Memory(
        outside={"process": CUDA_PROCESS if device_type == "cuda" else SERVER_PROCESS},
        standing={"weights": weights(model, quantization)},
        phases={FORWARD: pass_terms | beside_products(model, quantization, tokens)},
        device_type=device_type,
    )


def weights(model: PreTrainedModel, quantization: str) -> int:
    """Return the bytes of the weights, a tied head once, linear layers as bitsandbytes lays them out. In 8 bits with a
    float32 for each output, in 4 bits with a byte for every 64 numbers and a float32 for every 256 such bytes.
    Embeddings, head, norms, biases and an adapter stay in the model's dtype."""
    item = model.dtype.itemsize
    size = sum(parameter.numel() for parameter in model.parameters()) * item
    if quantization == "none":
        return size
    for layer in linear_layers(model).values():
        count, outputs = layer.weight.numel(), _sizes(layer)[1]
        blocks = -(-count // 64)
        packed = count + 4 * outputs if quantization == "8bit" else -(-count // 2) + blocks + 4 * -(-blocks // 256)
        size += packed - count * item
    return size


def beside_products(model: PreTrainedModel, quantization: str, tokens: int) -> Terms:
    """Return the tensors that a product with a quantized weight makes and drops."""
    if quantization == "8bit":
        # The input in 16 and 8 bits, the product in int32 and in 16 bits.
        largest = max(3 * inputs + 6 * outputs for inputs, outputs in map(_sizes, linear_layers(model).values()))
        return {"8 bit product": tokens * largest}
    if quantization == "4bit":
        largest = max(layer.weight.numel() for layer in linear_layers(model).values())
        return {"4 bit weights unpacked": model.dtype.itemsize * largest}
    return {}


def _sizes(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def attention_widths(model: PreTrainedModel) -> tuple[int, int]:
    """Return the numbers of a token's queries, and of its keys, in a layer; NotImplementedError without attention."""
    config = model.config.get_text_config()
    if (heads := getattr(config, "num_attention_heads", None)) is None:
        raise NotImplementedError(f"{type(model).__name__} has no attention heads, which the formula counts")
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * width, (getattr(config, "num_key_value_heads", None) or heads) * width


@lru_cache(64)  # a dry run counts the same passes for most changes of a setting
def activations(
    model: PreTrainedModel,
    tokens: int,
    *,
    longest: int,
    device_type: str,
    copies: float = 1.0,
    padded: bool = False,
    backward: bool = False,
    pictures: Pictures | None = None,
) -> int:
    """Return the most bytes of a pass of `tokens` in sequences of at most `longest`, without parameters' gradients.
    `copies`: how often a key of a packed batch is laid out (grpo/model/tree_attention.py), on average. `padded`: the
    batch is `generate`'s. `backward`: a backward pass follows, with recomputation if the model is set to it. The model
    is on device meta, and must not change between two calls. Raises NotImplementedError if it does not run there."""
    beside = _beside_attention(model, tokens, longest, device_type, copies=copies, padded=padded, backward=backward)
    head = 0 if padded else _at_head(model, tokens, device_type, backward)
    embeddings = model.get_input_embeddings()
    fed = pictures.inputs(model, tokens) if pictures is not None else {}
    live = LiveTensors(model)
    with ExitStack() as hooks, _counted_attention(model, beside):
        for weight in model.parameters():
            if backward and weight.requires_grad:
                drop = weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
                hooks.enter_context(drop)
        try:
            recompute(model, wanted=backward)
            with live, torch.set_grad_enabled(backward):
                states = embeddings.weight.new_empty(1, tokens, embeddings.weight.shape[1])
                states.requires_grad_(backward and embeddings.weight.requires_grad)
                # transformers passes a mask in four dimensions unchanged (grpo/model/logprobs.py).
                mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device="meta")
                if pictures is None:
                    positions = torch.empty(1, tokens, dtype=torch.int64, device="meta")
                    inputs = {"inputs_embeds": states, "position_ids": positions}
                else:
                    inputs = {name: value.clone() for name, value in fed.items()}
                    hooks.enter_context(embeddings.register_forward_hook(lambda *_: states))
                out = body_of(model)(**inputs, attention_mask=mask, use_cache=False).last_hidden_state
                torch.empty(head, dtype=torch.uint8, device="meta")
                if backward:
                    out.backward(torch.empty_like(out))
        # A model's code may fail in any way on tensors without numbers or on a mask that it does not know.
        except Exception as error:
            raise NotImplementedError(f"{type(model).__name__} does not run without numbers: {error}") from error
    return live.most


@contextmanager
def _counted_attention(model: PreTrainedModel, beside: tuple[int, int]) -> Iterator[None]:
    """Let each attention of the model make the tensors of a kernel (`_beside_attention`), and compute nothing."""

    def attention(module, query, key, value, attention_mask, **options):
        # The vision tower's, which is not causal, has a fused kernel.
        kept, dropped = beside if getattr(module, "is_causal", True) else (0, 0)
        out = _Attention.apply(query, key, value, kept, dropped)
        return out.transpose(1, 2).clone(memory_format=torch.contiguous_format), None

    implementation = model.config._attn_implementation
    for name in ("grpo_counted", _OF_TOWER):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    model.set_attn_implementation("grpo_counted")
    if model.config._attn_implementation != "grpo_counted":
        raise NotImplementedError(f"{type(model).__name__} does not let its attention be counted")
    for part in (getattr(model.config, name) for name in model.config.sub_configs):
        if part is not None and part is not model.config.get_text_config():
            part._attn_implementation = _OF_TOWER
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


def _beside_attention(
    model: PreTrainedModel, tokens: int, longest: int, device_type: str, *, copies: float, padded: bool, backward: bool
) -> tuple[int, int]:
    """Return the bytes beside queries, keys, values and result in a layer: kept for a backward pass, and dropped."""
    config, item, (queries, keys) = model.config.get_text_config(), model.dtype.itemsize, attention_widths(model)
    heads = config.num_attention_heads
    if padded or never_packed(model):
        pairs, repeated = tokens * longest, 2 * queries * item * tokens if queries != keys else 0
        if model.config._attn_implementation == "eager":
            # Scores as they come, in fp32, and rounded again; and two masks.
            return 8 * heads * pairs + repeated, ((4 - item) * heads + 2 * item) * pairs
        return 0, (1 + item) * pairs + repeated  # a mask, as bool and as numbers
    softcapped = getattr(config, "attn_logit_softcapping", None) is not None
    if device_type == "cuda" and item == 2 and not softcapped:
        return round(2 * keys * item * tokens * copies), 0  # flash attention, one call
    # A segment after another, each with a copy of its prompt's keys.
    width = queries if softcapped or device_type == "cuda" else keys  # grouped heads are repeated
    laid_out = round(tokens * copies) if backward else longest
    scores = 8 * heads * ROWS * longest if softcapped or device_type == "cuda" else 0
    # Kept with tanh's result, and in fp32; a token sees half of its sequence on average, rounded up to ROWS.
    kept_scores = 8 * heads * tokens * ((longest + ROWS) // 2) if softcapped and backward else 0
    return 2 * width * item * laid_out + kept_scores, scores


def _at_head(model: PreTrainedModel, tokens: int, device_type: str, backward: bool) -> int:
    """Return the bytes that the head makes beside the last hidden states, in blocks (grpo/model/logprobs.py)."""
    vocabulary, hidden = model.get_output_embeddings().weight.shape
    item, cuda = model.dtype.itemsize, device_type == "cuda"
    rows, columns = CUDA_BLOCK if cuda else CPU_BLOCK
    rows, columns = min(rows, tokens), min(columns, vocabulary)
    casts = 0 if item == 4 or cuda else 4 * (rows + columns) * hidden
    blocks = 3 if backward else 1  # the logits, their gradient, and its cast
    states = (4 + 2 * item if backward else item) * hidden  # of the tokens that predict, and their gradient in fp32
    return blocks * 4 * rows * columns + casts + (states + 200) * tokens  # ids, places, answers, losses


class LiveTensors(TorchDispatchMode):
    """Counts the bytes that operations return, until they are freed, without the model's parameters and buffers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        arguments, options = _on_one_device((arguments, options or {}))
        returned = function(*arguments, **options)
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self.count(leaf.untyped_storage())
        return returned

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, place: int, size: int) -> None:
        self._known.remove(place)
        self.now -= size


def _on_one_device(arguments):
    """Return an operation's arguments, all on device meta if some are: lengths are read from tensors on the CPU."""
    if len({leaf.is_meta for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}) < 2:
        return arguments
    return tree_map_only(Tensor, lambda leaf: leaf.to("meta") if leaf.ndim else leaf, arguments)


class _Attention(torch.autograd.Function):
    """An attention that makes and keeps the tensors of a fused kernel, but computes nothing."""

    @staticmethod
    def forward(ctx, query, key, value, kept, dropped):
        out = torch.empty_like(query)
        beside, _ = query.new_empty(kept, dtype=torch.uint8), query.new_empty(dropped, dtype=torch.uint8)
        ctx.save_for_backward(query, key, value, out, beside)
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, _, beside = ctx.saved_tensors
        torch.empty_like(beside)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


# The text of `ref_server.py --estimate` and `grpo_ref_split.py --dry_run`.

CARDS = 8, 12, 16, 24, 40, 48, 80  # GB, as cards are sold
CARD_USABLE = 0.9  # the share that error correction, driver and display leave
_ASSUMPTIONS = (
    f"Assumed: {CARD_USABLE:.0%} of a card usable, {CUDA_PROCESS // MIB} MiB of that CUDA's context and kernels, a "
    f"margin of {MARGIN:.0%}"
)
BATCHES = [2**power for power in range(10, 18)]  # the values of --max_batch_tokens that are tried for a card


def server_report(config: ServerConfig) -> str:
    """Return the text of `--estimate`. Raises ConfigError without such a model, or without a formula for it."""
    device, card = torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.device("cuda")
    dtype, card_dtype = resolve_dtype(config, device), resolve_dtype(config, card)
    model = on_meta(config, dtype)
    limit = longest_sequence(model.config) or BATCHES[-1]
    longest, budget = min(config.max_length or limit, limit), config.batch_tokens(device.type)
    try:
        needed = partial(server_memory, model, config.quantization, device_type=device.type)
        batch = needed(budget, longest=min(budget, longest))
        alone = needed(longest, longest=longest)
        fits = fit(on_meta(config, card_dtype), config.quantization, longest)
    except NotImplementedError as error:
        reason = f"no estimate of its memory ({error}): start the server without --estimate"
        raise ConfigError(f"model_name_or_path={config.model_name_or_path!r}: {reason}") from error
    count = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        f"{config.model_name_or_path}: {count:,} parameters. Computed from its configuration, no weights were loaded.",
        "",
        f"On this machine ({device.type}, {dtype}, quantization {config.quantization}),",
        f"with a forward pass of {budget:,} tokens (--max_batch_tokens), MiB:",
        *term_lines(batch),
        _line(f"one sequence of {longest:,} tokens", alone.total, "together; --max_length lowers it"),
        "",
        f"On a card (cuda, {card_dtype}, quantization {config.quantization}): the same formula, not measured there.",
        f"{_ASSUMPTIONS}; groups of {GROUP}.",
        f"No sequence may be longer than --max_batch_tokens, or than {longest:,} tokens.",
        f"{'card':>6}  --max_batch_tokens",
    ]
    for gigabytes, tokens in fits.items():
        more = " or more" if tokens == BATCHES[-1] else ""
        lines.append(f"{gigabytes:>3} GB  {f'up to {tokens:,}{more}' if tokens else 'does not fit'}")
    return "\n".join(lines)


def on_meta(config: SharedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model without its weights. Raises ConfigError if it does not exist."""
    settings = load_settings(config)
    remedy = "name a causal language model"
    with refuse_unloadable("model_name_or_path", config.model_name_or_path, remedy), torch.device("meta"):
        model = auto_class(settings).from_config(settings, dtype=dtype, trust_remote_code=config.trust_remote_code)
    return model.eval()


def fit(model: PreTrainedModel, quantization: str, longest: int) -> dict[int, int]:
    """Return for each card the largest of BATCHES, with sequences as long as it or `longest`; 0 if none fits."""
    cards = {
        batch: smallest_card(server_memory(model, quantization, batch, longest=min(batch, longest), device_type="cuda"))
        for batch in BATCHES
    }
    return {card: max((batch for batch in BATCHES if cards[batch] <= card), default=0) for card in CARDS}


def smallest_card(memory: Memory) -> float:
    """Return the smallest of CARDS that is large enough; infinity if none is."""
    return next((card for card in CARDS if memory.total <= CARD_USABLE * card * GIB), math.inf)


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def trainer_lines(memory: Memory, dtype: torch.dtype, ranks: int) -> list[str]:
    """Return the lines on the memory of a rank on this machine."""
    here = f"Memory of a rank on this machine ({memory.device_type}, {dtype}), MiB"
    lines = [f"{here}; times {ranks} for all ranks:", *term_lines(memory)]
    if memory.host:
        size, local_ranks = total(memory.host), ranks_here(ranks)
        needed, available = local_ranks * size, machine_memory()
        too_much = "it does NOT fit: use fewer ranks on a machine, use_peft, or no offload"
        fits = "it fits" if needed < available else too_much
        sizes = f"times {local_ranks} ranks here: {needed / GIB:.1f} of {available / GIB:.1f} GiB: {fits}"
        lines += ["", "In the machine's memory for each rank, what is offloaded, MiB:", *_lines(memory.host)]
        lines.append(_line("together", size, sizes))
    return lines


def change_lines(memories: dict[str, Memory], dtype: torch.dtype) -> list[str]:
    """Return lines on the smallest card for a rank, of the run as it is set and with each change."""
    changed = f"On a card for each rank (cuda, {dtype}), as set and with one setting changed"
    lines = [f"{changed}: the same formula, compared with three runs on an H200.", f"{_ASSUMPTIONS}."]
    for change, memory in memories.items():
        card = smallest_card(memory)
        fits = f"fits no card of {CARDS[-1]} GB" if card == math.inf else f"fits a card of {card} GB"
        lines.append(f"  {change:<44}{memory.total / GIB:>7.1f} GiB, {fits}")
    return lines


def term_lines(memory: Memory) -> list[str]:
    """Return a line for each term, those of a phase under it, and one for all."""
    lines = _lines(memory.outside | memory.standing)
    for phase, terms in memory.phases.items():
        terms = terms | {"margin": memory.margin(phase)}
        lines.append(_line(phase, total(terms), "on top of that" + ", the highest" * (phase == memory.highest)))
        lines += _lines({f"  {name}": size for name, size in terms.items()})
    return [*lines, _line("together", memory.total, f"with {memory.highest}")]


def _lines(terms: Terms) -> list[str]:
    return [_line(name, size) for name, size in terms.items() if size]


def _line(name: str, size: int, note: str = "") -> str:
    return f"  {name:<34}{size / MIB:>10,.0f}  {note}".rstrip()

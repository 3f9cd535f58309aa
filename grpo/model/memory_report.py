"""What `ref_server.py --estimate` and `grpo_ref_split.py --dry_run` print of the memory that memory.py computes."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo.config.errors import ConfigError
from grpo.config.model import SharedConfig
from grpo.config.server import ServerConfig
from grpo.model.load import load_settings, longest_sequence, resolve_dtype
from grpo.model.memory import (
    ALLOCATOR_SHARE,
    CUDA_PROCESS,
    GIB,
    GROUP,
    MIB,
    Memory,
    Shape,
    forward_terms,
    server_memory,
    total,
    weights,
    with_allocator,
)

CARDS = 8, 12, 16, 24, 40, 48, 80
"""GB, as cards are sold"""
CARD_USABLE = 0.9  # of what a card is sold with: error correction, driver, display
TRIED_TOKENS = 131_072
"""the largest --max_batch_tokens that is tried"""


def server_report(config: ServerConfig) -> str:
    """Return the text of `--estimate`. Raises ConfigError where there is no such model, or no formula for it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, quantization = resolve_dtype(config, device), config.quantization
    model = on_meta(config, dtype)
    limit = longest_sequence(model.config) or TRIED_TOKENS
    longest, budget = min(config.max_length or limit, limit), config.batch_tokens(device.type)
    count = sum(parameter.numel() for parameter in model.parameters())
    measured = "not measured on a card" if device.type == "cuda" else "compared with measured peaks"
    try:
        batch = server_memory(model, dtype, quantization, budget, min(budget, longest), device.type)
        alone = server_memory(model, dtype, quantization, longest, longest, device.type)
        cards = _card_table(model, resolve_dtype(config, torch.device("cuda")), quantization, longest)
    except NotImplementedError as error:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path!r}: no estimate of its memory ({error}): start the "
            "server without --estimate"
        ) from error
    lines = [
        f"{config.model_name_or_path}: {count:,} parameters. Computed from its configuration, no weights were loaded.",
        "",
        f"On this machine ({device.type}, {name_of(dtype)}, quantization {quantization}; {measured}),",
        f"with a forward pass of {budget:,} tokens (--max_batch_tokens), MiB:",
        *term_lines(batch),
        _line(f"one sequence of {longest:,} tokens", alone.total, "together; --max_length lowers it"),
        "",
        *cards,
        *experts_lines(model),
    ]
    return "\n".join(lines)


def on_meta(config: SharedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model without its weights. Raises ConfigError where there is no such model."""
    settings = load_settings(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=config.trust_remote_code)
    except ValueError as error:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path!r}: not a causal language model "
            f"({' '.join(str(error).split())[:300]}): name one"
        ) from error
    return model.eval()


def experts_lines(model: PreTrainedModel) -> list[str]:
    config = model.config.get_text_config()
    if not any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return []
    return ["", "This model has experts, which the formula does not know: it may need more."]


def term_lines(memory: Memory) -> list[str]:
    """Return a line for each term, those of a phase under it, and one for all."""
    lines = [_line(name, size) for name, size in (memory.outside | memory.standing).items()]
    for phase, terms in memory.phases.items():
        lines.append(_line(phase, total(terms), "on top of that" + ", the highest" * (phase == memory.highest)))
        lines += [_line(f"  {name}", size) for name, size in terms.items() if size]
    return [*lines, _line("together", memory.total, f"with {memory.highest}")]


def trainer_lines(memory: Memory, dtype: torch.dtype, ranks: int, device_type: str) -> list[str]:
    """Return what a rank of this run needs on this machine."""
    measured = "compared with one run on an H100" if device_type == "cuda" else "compared with measured peaks"
    lines = [
        f"Memory of a rank on this machine ({device_type}, {name_of(dtype)}; {measured}), MiB; times {ranks} for all "
        "ranks:",
        *term_lines(memory),
    ]
    if memory.host:
        size, local_ranks = total(memory.host), int(os.environ.get("LOCAL_SIZE", ranks))
        needed, available = local_ranks * size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        verdict = "it does NOT fit: use fewer ranks on a machine, use_peft, or no offload"
        if needed < available:
            verdict = "it fits"
        sizes = f"times {local_ranks} ranks here: {needed / GIB:.1f} of {available / GIB:.1f} GiB: {verdict}"
        lines += ["", "In the machine's memory for each rank (offload_optimizer), MiB:"]
        lines += [_line(name, size) for name, size in memory.host.items()]
        lines.append(_line("together", size, sizes))
    return lines


def change_lines(memories: dict[str, Memory], dtype: torch.dtype) -> list[str]:
    """Return the smallest card for a rank: of the run as it is set, and with each change of one setting."""
    lines = [
        f"On a card for each rank (cuda, {name_of(dtype)}), as set and with one setting changed: the same formula, "
        "compared with one run on an H100.",
        f"{_assumptions()}.",
    ]
    for change, memory in memories.items():
        card = next((card for card in CARDS if memory.total <= CARD_USABLE * card * GIB), None)
        fits = f"fits no card of {CARDS[-1]} GB" if card is None else f"fits a card of {card} GB"
        lines.append(f"  {change:<44}{memory.total / GIB:>7.1f} GiB, {fits}")
    return lines


def fit(model: PreTrainedModel, dtype: torch.dtype, quantization: str, longest: int, card: int) -> tuple[int, int]:
    """Return the largest batch and the longest sequence, in tokens, for a card of `card` GB; 0 where 256 do not fit."""
    shape = Shape.of(model)
    room = CARD_USABLE * card * GIB - CUDA_PROCESS - weights(model, dtype, quantization)

    def fits(tokens: int, length: int) -> bool:
        return total(with_allocator(forward_terms(shape, dtype, quantization, tokens, length, True), True)) <= room

    if not fits(256, min(256, longest)):
        return 0, 0
    budget = _largest(lambda tokens: fits(tokens, min(tokens, longest)), TRIED_TOKENS)
    return budget // 256 * 256, _largest(lambda tokens: fits(tokens, tokens), longest)


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` for which it holds, as for all smaller ones; 0 where there is none."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _card_table(model: PreTrainedModel, dtype: torch.dtype, quantization: str, longest: int) -> list[str]:
    lines = [
        f"On a card (cuda, {name_of(dtype)}, quantization {quantization}): the same formula, not measured there.",
        f"{_assumptions()}; groups of {GROUP}.",
        f"{'card':>6}  {'weights':>9}  {'--max_batch_tokens up to':>24}  {'longest sequence':>17}",
    ]
    size = weights(model, dtype, quantization) / GIB
    for card in CARDS:
        budget, length = fit(model, dtype, quantization, longest, card)
        budgets = f"{budget:,}" + (" or more" if budget == TRIED_TOKENS else "") if budget else "does not fit"
        sequence = f"all {length:,}" if length == longest else f"{length:,}" if length else ""
        lines.append(f"{card:>3} GB  {size:>5.1f} GiB  {budgets:>24}  {sequence:>17}".rstrip())
    return lines


def _assumptions() -> str:
    return (
        f"Assumed: {CARD_USABLE:.0%} of a card usable, {CUDA_PROCESS // MIB} MiB of that CUDA's context and kernels; "
        f"the allocator takes {ALLOCATOR_SHARE:.0%} beside a phase's tensors"
    )


def _line(name: str, size: int, note: str = "") -> str:
    return f"  {name:<34}{size / MIB:>10,.0f}  {note}".rstrip()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

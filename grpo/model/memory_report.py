"""What `ref_server.py --estimate` and `grpo_ref_split.py --dry_run` print of the memory that is computed."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedModel

from grpo.config.errors import ConfigError
from grpo.config.model import SharedConfig
from grpo.config.server import ServerConfig
from grpo.model.load import auto_class, load_settings, longest_sequence, resolve_dtype
from grpo.model.memory import CUDA_PROCESS, GIB, GROUP, MARGIN, MIB, Memory, Terms, server_memory, total

CARDS = 8, 12, 16, 24, 40, 48, 80
"""GB, as cards are sold"""
CARD_USABLE = 0.9  # of what a card is sold with: error correction, driver, display
BATCHES = [2**power for power in range(10, 18)]
"""the values of --max_batch_tokens that are tried for a card"""


def server_report(config: ServerConfig) -> str:
    """Return the text of `--estimate`. Raises ConfigError where there is no such model, or no formula for it."""
    device, card = torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.device("cuda")
    dtype, card_dtype = resolve_dtype(config, device), resolve_dtype(config, card)
    model = on_meta(config, dtype)
    limit = longest_sequence(model.config) or BATCHES[-1]
    longest, budget = min(config.max_length or limit, limit), config.batch_tokens(device.type)
    try:
        batch = server_memory(model, config.quantization, budget, min(budget, longest), device.type)
        alone = server_memory(model, config.quantization, longest, longest, device.type)
        fits = fit(on_meta(config, card_dtype), config.quantization, longest)
    except NotImplementedError as error:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path!r}: no estimate of its memory ({error}): start the "
            "server without --estimate"
        ) from error
    count = sum(parameter.numel() for parameter in model.parameters())
    measured = "not measured on a card" if device.type == "cuda" else "compared with measured peaks"
    lines = [
        f"{config.model_name_or_path}: {count:,} parameters. Computed from its configuration, no weights were loaded.",
        "",
        f"On this machine ({device.type}, {name_of(dtype)}, quantization {config.quantization}; {measured}),",
        f"with a forward pass of {budget:,} tokens (--max_batch_tokens), MiB:",
        *term_lines(batch),
        _line(f"one sequence of {longest:,} tokens", alone.total, "together; --max_length lowers it"),
        "",
        f"On a card (cuda, {name_of(card_dtype)}, quantization {config.quantization}): the same formula, not measured "
        "there.",
        f"{_ASSUMPTIONS}; groups of {GROUP}.",
        f"No sequence may be longer than --max_batch_tokens, or than {longest:,} tokens.",
        f"{'card':>6}  --max_batch_tokens",
    ]
    for gigabytes, tokens in fits.items():
        more = " or more" if tokens == BATCHES[-1] else ""
        lines.append(f"{gigabytes:>3} GB  {f'up to {tokens:,}{more}' if tokens else 'does not fit'}")
    return "\n".join(lines)


def on_meta(config: SharedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model without its weights. Raises ConfigError where there is no such model."""
    settings = load_settings(config)
    try:
        with torch.device("meta"):
            model = auto_class(settings).from_config(settings, dtype=dtype, trust_remote_code=config.trust_remote_code)
    except ValueError as error:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path!r}: not a causal language model "
            f"({' '.join(str(error).split())[:300]}): name one"
        ) from error
    return model.eval()


def fit(model: PreTrainedModel, quantization: str, longest: int) -> dict[int, int]:
    """Return for each card the largest of BATCHES, with sequences as long as it or `longest`; 0 where none fits."""
    sizes = {
        tokens: server_memory(model, quantization, tokens, min(tokens, longest), "cuda").total for tokens in BATCHES
    }
    return {card: max((tokens for tokens in BATCHES if _fits(sizes[tokens], card)), default=0) for card in CARDS}


def _fits(size: int, card: int) -> bool:
    return size <= CARD_USABLE * card * GIB


def trainer_lines(memory: Memory, dtype: torch.dtype, ranks: int) -> list[str]:
    """Return what a rank of this run needs on this machine."""
    device_type = memory.device_type
    measured = "compared with one run on an H100" if device_type == "cuda" else "compared with measured peaks"
    lines = [
        f"Memory of a rank on this machine ({device_type}, {name_of(dtype)}; {measured}), MiB; times {ranks} for all "
        "ranks:",
        *term_lines(memory),
    ]
    if memory.host:
        size, local_ranks = total(memory.host), int(os.environ.get("LOCAL_SIZE", ranks))
        needed, available = local_ranks * size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        fits = (
            "it fits"
            if needed < available
            else "it does NOT fit: use fewer ranks on a machine, use_peft, or no offload"
        )
        sizes = f"times {local_ranks} ranks here: {needed / GIB:.1f} of {available / GIB:.1f} GiB: {fits}"
        lines += ["", "In the machine's memory for each rank (offload_optimizer), MiB:", *_lines(memory.host)]
        lines.append(_line("together", size, sizes))
    return lines


def change_lines(memories: dict[str, Memory], dtype: torch.dtype) -> list[str]:
    """Return the smallest card for a rank: of the run as it is set, and with each change of one setting."""
    lines = [
        f"On a card for each rank (cuda, {name_of(dtype)}), as set and with one setting changed: the same formula, "
        "compared with one run on an H100.",
        f"{_ASSUMPTIONS}.",
    ]
    for change, memory in memories.items():
        card = next((card for card in CARDS if _fits(memory.total, card)), None)
        fits = f"fits no card of {CARDS[-1]} GB" if card is None else f"fits a card of {card} GB"
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


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ASSUMPTIONS = (
    f"Assumed: {CARD_USABLE:.0%} of a card usable, {CUDA_PROCESS // MIB} MiB of that CUDA's context and kernels, a "
    f"margin of {MARGIN:.0%}"
)

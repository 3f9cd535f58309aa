"""What `python ref_server.py --estimate` prints: the formula of memory.py for this machine and for cards as sold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo.config.errors import ConfigError
from grpo.config.model import SharedConfig
from grpo.config.server import ServerConfig
from grpo.model.load import load_settings, longest_sequence, resolve_dtype
from grpo.model.memory import CUDA_PROCESS, CUDA_ROUNDING, GROUP, MIB, Shape, estimate, weights, working

GIB = 2**30
CARDS = 8, 12, 16, 24, 40, 48, 80
"""GB, as cards are sold"""
CEILING = 131_072
"""tokens that are tried"""
CARD_USABLE = 0.9  # of what a card is sold with: error correction, driver, display


def estimate_report(config: ServerConfig) -> str:
    """The table of `--estimate`. Raises ConfigError where there is no such model, or no formula for it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = resolve_dtype(config, device)
    model = on_meta(config, dtype)
    own = longest_sequence(model.config) or CEILING
    longest = min(config.max_length or own, own)
    count = sum(parameter.numel() for parameter in model.parameters())
    budget = config.batch_tokens(device.type)
    try:
        lines = [
            f"{config.model_name_or_path}: {count:,} parameters. Computed from its configuration, no weights were "
            "loaded.",
            "",
            *_breakdown(model, dtype, config.quantization, budget, longest, device.type),
            "",
            *_cards(model, resolve_dtype(config, torch.device("cuda")), config.quantization, longest),
        ]
    except NotImplementedError as error:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path!r}: no estimate of its memory ({error}): start the "
            "server without --estimate"
        ) from error
    if has_experts(model):
        lines += ["", "This model has experts, which the formula does not know: its working memory may be larger."]
    return "\n".join(lines)


def on_meta(config: SharedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its weights. Raises ConfigError where there is no such model."""
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


def has_experts(model: PreTrainedModel) -> bool:
    text = model.config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _breakdown(
    model: PreTrainedModel, dtype: torch.dtype, quantization: str, budget: int, longest: int, device_type: str
) -> list[str]:
    full = estimate(model, dtype, quantization, budget, min(budget, longest), device_type)
    alone = estimate(model, dtype, quantization, longest, longest, device_type)
    measured = "not measured on a card" if device_type == "cuda" else "held against measured peaks"
    lines = [
        f"On this machine ({device_type}, {name_of(dtype)}, quantization {quantization}; {measured}), MiB:",
        row("weights", full.weights, "a tied head once"),
        row(
            "process",
            full.process,
            "assumed: CUDA's context and kernels" if device_type == "cuda" else "without a model",
        ),
        row(f"forward pass of {budget:,} tokens", full.working, "at its highest point; of that:"),
        *(row(f"  {term.name}", term.size, term.why) for term in full.terms),
        row("together", full.total, f"--max_batch_tokens {budget}"),
    ]
    if longest > budget:
        lines.append(row(f"one sequence of {longest:,}", alone.total, "together; --max_length lowers it"))
    else:
        lines.append(row(f"at least, {longest:,} tokens", alone.total, "together: one sequence must fit by itself"))
    return lines


def fit(model: PreTrainedModel, dtype: torch.dtype, quantization: str, longest: int, card: int) -> tuple[int, int]:
    """The largest budget and the longest sequence, in tokens, for a card of `card` GB; 0 where not even 256 fit."""
    shape = Shape.of(model)
    room = CARD_USABLE * card * GIB - CUDA_PROCESS - weights(model, dtype, quantization)

    def fits(tokens: int, length: int) -> bool:
        return sum(term.size for term in working(shape, dtype, quantization, tokens, length, "cuda")) <= room

    if not fits(256, min(256, longest)):
        return 0, 0
    budget = most(lambda tokens: fits(tokens, min(tokens, longest)), CEILING)
    return budget // 256 * 256, most(lambda tokens: fits(tokens, tokens), longest)


def _cards(model: PreTrainedModel, dtype: torch.dtype, quantization: str, longest: int) -> list[str]:
    lines = [
        f"On a card (cuda, {name_of(dtype)}, quantization {quantization}): the same formula, not measured there.",
        f"Assumed: {CARD_USABLE:.0%} of a card usable, {CUDA_PROCESS // MIB} MiB of that CUDA's context and kernels; "
        f"the allocator rounds up by {CUDA_ROUNDING:.0%}; groups of {GROUP}.",
        f"{'card':>6}  {'weights':>9}  {'--max_batch_tokens up to':>24}  {'longest sequence':>17}",
    ]
    held = weights(model, dtype, quantization) / GIB
    for card in CARDS:
        budget, length = fit(model, dtype, quantization, longest, card)
        budgets = f"{budget:,}" + (" or more" if budget == CEILING else "") if budget else "does not fit"
        alone = f"all {length:,}" if length == longest else f"{length:,}" if length else ""
        lines.append(f"{card:>3} GB  {held:>5.1f} GiB  {budgets:>24}  {alone:>17}".rstrip())
    return lines


def most(holds: Callable[[int], bool], ceiling: int) -> int:
    """The largest number up to `ceiling` for which it holds, as for all smaller ones; 0 where there is none."""
    low, high = 0, ceiling + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def row(name: str, size: int, why: str) -> str:
    return f"  {name:<34}{size / MIB:>10,.0f}  {why}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

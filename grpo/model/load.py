"""Tokenizer, policy and frozen reference, from the hub or a local folder: of a model, or of an adapter for one."""

from __future__ import annotations

import logging

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from grpo.config.errors import ConfigError
from grpo.config.generation import AnsweringConfig
from grpo.config.model import SharedConfig
from grpo.config.server import ServerConfig
from grpo.model.logprobs import Head
from grpo.model.lora import QUANTIZERS, base_of, load_adapter, need
from grpo.model.quantization import keep_layout, layout

log = logging.getLogger(__name__)

NO_LIMIT = 2**31 - 1


def resolve_dtype(config: SharedConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    # Without units for it bfloat16 is slower than float32: on a CPU 5 to 14 times, on a GPU before Ampere, too, which
    # emulates it. A GPU that is not here (--dry_run) is taken to have them.
    has_units = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if device.type == "cuda" and has_units else torch.float32


def load_tokenizer(config: SharedConfig) -> PreTrainedTokenizerBase:
    """Raises ConfigError where there is none, or one without an end-of-sequence token."""
    tokenizer = load_auto(AutoTokenizer, config)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path!r}: its tokenizer has no eos token, so no completion could "
            "ever end: set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # safe: masks come from lengths
    return tokenizer


def load_model(config: SharedConfig, device: torch.device, device_map: str | None = None) -> PreTrainedModel:
    """The causal language model in its dtype on `device`, in evaluation mode, its head checked against ours.

    It is quantized where the configuration says so, and over all devices with a `device_map`. Nothing puts it into
    training mode: its log-probs would be those of another distribution than it sampled from.

    Raises ConfigError where a package that this needs is not installed.
    """
    # cuDNN's, torch's first choice on an H100, plans anew for every shape, and fails at some of ours ("Expected
    # mha_graph.execute(...) to be true"). Without it torch takes flash attention.
    torch.backends.cuda.enable_cudnn_sdp(False)
    dtype, settings, options = resolve_dtype(config, device), load_settings(config), {}
    if device_map is not None:
        need("device_map", device_map, "accelerate")
        options["device_map"] = device_map
    if config.quantization != "none":
        need("quantization", config.quantization, *QUANTIZERS)
        if getattr(settings, "quantization_config", None) is not None:
            raise ConfigError(
                f"quantization={config.quantization!r}: the weights of {config.model_name_or_path} are quantized "
                "already: use none, or name the model that they were made from"
            )
        options |= {"quantization_config": layout(config.quantization, dtype), "device_map": device_map or {"": device}}
    model = load_auto(AutoModelForCausalLM, config, config=settings, dtype=dtype, **options)
    keep_layout(model)
    if base_of(config.model_name_or_path) is not None:
        load_adapter(model, config.model_name_or_path)
    model = model.eval() if options else model.eval().to(device)
    Head.check(model)
    return model


def load_reference(config: ServerConfig, device: torch.device) -> PreTrainedModel:
    """As `load_model`, frozen."""
    return load_model(config, device, config.device_map).requires_grad_(False)


def load_settings(config: SharedConfig) -> PretrainedConfig:
    """The model's configuration, without dropout of units or layers."""
    settings = load_auto(AutoConfig, config)
    for part in (settings, settings.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
    return settings


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; not reentrant, for the reason given in grpo/model/logprobs.py.

    Raises ConfigError where the model does not know how.
    """
    # Renamed in transformers 5.23; before, only the old name is there.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"gradient_checkpointing=True: {type(model).__name__} does not know how to: set it to false"
        ) from error


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the tokenizer's eos and those of the model's generation config."""
    also = model.generation_config.eos_token_id if model.generation_config else None
    ids = also if isinstance(also, list) else [also]
    return sorted({tokenizer.eos_token_id, *ids} - {None})


def length_limits(config: PretrainedConfig) -> dict[str, int]:
    """Give the settings of a model that limit the tokens of a sequence.

    `max_position_embeddings` holds for every sequence. Beyond the others a sequence's log-probs depend on the rest of
    its batch, so they hold wherever sequences share one. Beyond the first length of longrope positions
    (`original_max_position_embeddings`), transformers rotates a whole batch by the long factors, a sampled sequence by
    the short ones up to there. Beyond `index_topk` tokens, which keys an indexed attention sees depends on the length
    of the row.
    """
    text = config.get_text_config()
    limits = {name: getattr(text, name, None) for name in ("max_position_embeddings", "index_topk")}
    rope = getattr(text, "rope_parameters", None) or {}
    originals = [
        kind.get("original_max_position_embeddings")
        for kind in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if kind.get("rope_type") == "longrope"
    ]
    limits["original_max_position_embeddings"] = min(filter(None, originals), default=None)
    return {name: limit for name, limit in limits.items() if limit}


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence whose log-probs are its own, whatever else is in its batch; None is no limit."""
    return min(length_limits(config).values(), default=None)


def check_lengths(config: AnsweringConfig, settings: PretrainedConfig) -> None:
    """Raises ConfigError where the longest sequence that there may be is too long for the model, or for its batches."""
    limits = length_limits(settings)
    name = min(limits, key=limits.get, default=None)
    if name is None or config.longest_sequence <= limits[name]:
        return
    model, limit = config.model_name_or_path, limits[name]
    if name == "max_position_embeddings":
        reason = f"{model} takes at most {limit}"
    else:
        reason = f"beyond {limit} ({name}) the log-probs of {model} depend on the rest of the batch"
    raise ConfigError(
        f"max_completion_length={config.max_completion_length}: with max_prompt_length={config.max_prompt_length} "
        f"that makes {config.longest_sequence} tokens, and {reason}: lower one of them"
    )


def cards_of(model: PreTrainedModel) -> list[torch.device]:
    """The GPUs that hold some of the model."""
    return sorted({values.device for values in model.parameters() if values.device.type == "cuda"}, key=str)


def device_memory(cards: list[torch.device]) -> tuple[int, int, int]:
    """Bytes that torch holds on these GPUs, that they have, and that tensors took at most since the peak was reset."""
    total = sum(torch.cuda.get_device_properties(card).total_memory for card in cards)
    peak = sum(torch.cuda.max_memory_allocated(card) for card in cards)
    return sum(torch.cuda.memory_reserved(card) for card in cards), total, peak


def load_auto(auto_class, shared: SharedConfig, **options):
    """What the name stands for; where it is an adapter, what its base has: the tokenizer only if it has none itself."""
    name = shared.model_name_or_path
    try:
        source = base_of(name) or name
        if source != name and auto_class is AutoTokenizer and _has_tokenizer(name):
            source = name
        return auto_class.from_pretrained(source, trust_remote_code=shared.trust_remote_code, **options)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model_name_or_path={name!r}: cannot be loaded ({reason}): give a local folder, or a hub "
            "id that this machine can reach"
        ) from error


def _has_tokenizer(name: str) -> bool:
    missing_is_none = dict(_raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    return cached_file(name, "tokenizer_config.json", **missing_is_none) is not None

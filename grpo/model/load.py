"""Load the tokenizer, the policy and the frozen reference: of a model or an adapter, from the hub or a folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from grpo.config.errors import ConfigError, require
from grpo.config.sampling_settings import AnsweringConfig, SharedConfig
from grpo.config.server import ServerConfig
from grpo.model.devices import refuse_shortage
from grpo.model.hub import check_model_name, find_file, refuse_damaged
from grpo.model.logprobs import Head
from grpo.model.lora import QUANTIZERS, base_of, load_adapter, require_packages
from grpo.model.pictures import takes_pictures
from grpo.model.quantization import keep_layout, layout

log = logging.getLogger(__name__)

# transformers' bars, such as "Loading weights", vanish when they are full, and show on a terminal alone.
if hasattr(transformers_logging, "set_tqdm_hook"):  # not in transformers 5.0
    transformers_logging.set_tqdm_hook(
        lambda bar, args, kwargs: bar(*args, **{"leave": False, "disable": None, **kwargs})
    )

NO_LIMIT = 2**31 - 1


def resolve_dtype(config: SharedConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    # Without hardware for it bfloat16 is slower than float32: on a CPU 5 to 14 times, and on a GPU before Ampere, which
    # emulates it. --dry_run assumes that a GPU which this machine does not have is newer.
    has_bfloat16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if device.type == "cuda" and has_bfloat16 else torch.float32


def load_tokenizer(config: SharedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises ConfigError without one, or if it has no end-of-sequence token."""
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
    """Load the language model in its dtype on `device`, in evaluation mode, and check its head.

    It is quantized if the configuration says so, and spread over all devices with a `device_map`. It must never be
    put into training mode: its log-probs would be those of another distribution than it sampled from.

    Raises ConfigError if a package that this needs is not installed, or memory is too small.
    """
    dtype, settings, options = resolve_dtype(config, device), load_settings(config), {}
    if device_map is not None:
        require_packages("device_map", device_map, "accelerate")
        options["device_map"] = device_map
    if config.quantization != "none":
        require_packages("quantization", config.quantization, *QUANTIZERS)
        if getattr(settings, "quantization_config", None) is not None:
            raise ConfigError(
                f"quantization={config.quantization!r}: the weights of {config.model_name_or_path} are quantized "
                "already: use none, or name the model that they were made from"
            )
        options |= {"quantization_config": layout(config.quantization, dtype), "device_map": device_map or {"": device}}
    with enough_memory(config):
        model = load_auto(auto_class(settings), config, config=settings, dtype=dtype, **options)
        keep_layout(model)
        if base_of(config.model_name_or_path) is not None:
            load_adapter(model, config.model_name_or_path)
        model = model.eval() if options else model.eval().to(device)
    Head.check(model)
    return model


def enough_memory(config: SharedConfig) -> AbstractContextManager[None]:
    """Raise ConfigError if memory is too small for the block, which loads the model or tries it out."""
    remedy = "free the device's memory, or use dtype bfloat16, quantization or a smaller model"
    return refuse_shortage("model_name_or_path", config.model_name_or_path, remedy)


def load_reference(config: ServerConfig, device: torch.device) -> PreTrainedModel:
    return load_model(config, device, config.device_map).requires_grad_(False)


def load_settings(config: SharedConfig) -> PretrainedConfig:
    """Load the model's configuration, and switch dropout of units and layers off in it."""
    settings = load_auto(AutoConfig, config)
    refuse_hub_kernels("model_name_or_path", config.model_name_or_path, settings, config.trust_remote_code)
    for section in _sections(settings):
        for name, value in vars(section).items():
            if isinstance(value, float) and "drop" in name:
                setattr(section, name, 0.0)
    return settings


def refuse_hub_kernels(field: str, name: str, settings: PretrainedConfig, trust_remote_code: bool) -> None:
    """Raise ConfigError if a model's configuration names an attention kernel of the hub, without trust in its code.

    transformers downloads and runs it when the model is made, also on device meta.
    """
    for section in _sections(settings):
        kernel = str(section._attn_implementation)
        require(
            trust_remote_code or "/" not in kernel,
            field,
            name,
            f"its config.json names an attention kernel of the hub ({kernel}), which is code that would run here: take "
            "attn_implementation out of it, or set trust_remote_code to true",
        )


def _sections(settings: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a configuration and all within it: of the text, of the vision tower."""
    yield settings
    for value in vars(settings).values():
        if isinstance(value, PretrainedConfig):
            yield from _sections(value)


def auto_class(settings: PretrainedConfig) -> type:
    """Return transformers' auto class for a model of this configuration: with its vision tower if it has one."""
    return AutoModelForImageTextToText if takes_pictures(settings) else AutoModelForCausalLM


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass, not reentrant.

    grpo/model/logprobs.py switches it on and off for each forward pass. Raises ConfigError if the model cannot
    recompute.
    """
    # Renamed in transformers 5.23; earlier versions have only the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"gradient_checkpointing=True: {type(model).__name__} does not know how to: set it to false"
        ) from error


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a completion: the tokenizer's eos and those of the model's generation config."""
    return _end_ids(model.generation_config, tokenizer)


def load_end_ids(config: SharedConfig, settings: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the `eos_token_ids` of a model before it is loaded: `settings` is its configuration."""
    name = config.model_name_or_path
    try:
        path = find_file(base_of(name) or name, "generation_config.json")
        made = None if path is None else GenerationConfig.from_pretrained(Path(path).parent)
    except OSError:  # a damaged file, which transformers takes for none when it loads the model
        made = None
    return _end_ids(made or GenerationConfig.from_model_config(settings), tokenizer)


def _end_ids(settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    configured = settings.eos_token_id if settings else None
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({tokenizer.eos_token_id, *ids} - {None})


def length_limits(config: PretrainedConfig) -> dict[str, int]:
    """Return the fields of a model's configuration that limit the tokens of a sequence.

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
    """Return the tokens of the longest sequence whose log-probs do not depend on its batch; None is no limit."""
    return min(length_limits(config).values(), default=None)


def check_lengths(config: AnsweringConfig, settings: PretrainedConfig) -> None:
    """Raise ConfigError if the longest possible sequence is too long for the model, or for its batches."""
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
    """Return the GPUs that hold parts of the model."""
    return sorted({weight.device for weight in model.parameters() if weight.device.type == "cuda"}, key=str)


def device_memory(cards: list[torch.device]) -> tuple[int, int, int]:
    """Return the bytes that torch holds on these GPUs, their total, and the peak of tensors since it was reset."""
    total = sum(torch.cuda.get_device_properties(card).total_memory for card in cards)
    peak = sum(torch.cuda.max_memory_allocated(card) for card in cards)
    return sum(torch.cuda.memory_reserved(card) for card in cards), total, peak


def device_use(cards: list[torch.device]) -> float | None:
    """Return the mean share of time in which these GPUs ran kernels, over the last second or less.

    None where NVIDIA's library cannot be asked: the package nvidia-ml-py is not installed, or it does not know such a
    card or a part of it (MIG).
    """
    try:
        from pynvml import NVMLError
    except ImportError:
        return None
    try:
        return sum(torch.cuda.utilization(card) for card in cards) / len(cards) / 100
    except (NVMLError, RuntimeError):
        return None


def load_auto(auto_class, shared: SharedConfig, **options):
    """Load by the model's name; for an adapter from its base, but its own tokenizer if it has one."""
    name = shared.model_name_or_path
    check_model_name("model_name_or_path", name)
    try:
        source = base_of(name) or name
        if source != name and auto_class is AutoTokenizer and find_file(name, "tokenizer_config.json"):
            source = name
        with refuse_damaged("model_name_or_path", name, source):
            return auto_class.from_pretrained(source, trust_remote_code=shared.trust_remote_code, **options)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model_name_or_path={name!r}: cannot be loaded ({reason}): give a local folder, or a hub "
            "id that this machine can reach"
        ) from error

"""Load the tokenizer, the policy and the frozen reference: of a model or an adapter, from the hub or a folder."""

import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from operator import itemgetter
from timeit import Timer
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.functional import linear
from tqdm import tqdm
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
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import get_checkpoint_shard_files

from grpo.config.errors import require
from grpo.config.sampling_settings import AnsweringConfig, SharedConfig
from grpo.config.server import ServerConfig
from grpo.model.devices import refuse_shortage
from grpo.model.hub import base_of, check_model_name, find_file, refuse_unloadable
from grpo.model.logprobs import Head
from grpo.model.lora import QUANTIZERS, keep_layout, layout, load_adapter, require_packages
from grpo.model.pictures import takes_pictures

log = logging.getLogger(__name__)

# transformers' bars, such as "Loading weights", vanish when they are full, and show on a terminal alone.
transformers_logging.set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{"leave": False, "disable": None, **kwargs}))
# tqdm's own lock is for several processes too. From Python 3.14 on only the interpreter's own end removes
# it: after `end_now`, or when a rank is stopped, the output would close with a warning of what leaked.
tqdm.set_lock(threading.RLock())

_DAY = datetime(2024, 7, 26)  # Llama 3's own where the date is unknown
_TODAY = re.compile(r"""strftime_now\((['"])(.*?)\1\)""")
NO_LIMIT = 2**31 - 1
SMALLEST_TO_ADVISE = 512  # hidden size: of smaller models the products are not what takes time


def resolve_dtype(config: SharedConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    # On a CPU without instructions for bfloat16 it takes 5 to 14 times as long as float32; a GPU before Ampere emulates
    # it. On a CPU that has them it is the user's choice (`advise_bfloat16`): it rounds more.
    has_bfloat16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if device.type == "cuda" and has_bfloat16 else torch.float32


def load_tokenizer(config: SharedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises ConfigError without one, or if it has no end-of-sequence token."""
    tokenizer = load_auto(AutoTokenizer, config)
    remedy = "its tokenizer has no eos token, which ends completions: set eos_token in its tokenizer_config.json"
    require(tokenizer.eos_token_id is not None, "model_name_or_path", config.model_name_or_path, remedy)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # safe: masks come from lengths
    return tokenizer


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    """Render messages by the tokenizer's chat template. One that writes today's date (Llama 3's) writes a fixed one, or
    a run's prompts and rewards would be others on the next day, and it could not be resumed."""
    if isinstance(template := tokenizer.chat_template, str) and "strftime_now" in template:
        options["chat_template"] = _TODAY.sub(lambda call: json.dumps(_DAY.strftime(call[2])), template)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def load_model(
    config: SharedConfig, device: torch.device, device_map: str | None = None, on_host: bool = False
) -> PreTrainedModel:
    """Load the language model in its dtype for `device`, or spread over all with a `device_map`, and check its head. If
    it is `on_host` it stays in the host's memory, where all processes map the same file. It must stay in evaluation
    mode: else its log-probs would be those of another distribution than it sampled from. Raises ConfigError, also if a
    package that this needs is not installed, or memory is too small."""
    dtype, settings, options = resolve_dtype(config, device), load_settings(config), {}
    if device_map is not None:
        require_packages("device_map", device_map, "accelerate")
        options["device_map"] = device_map
    if config.quantization != "none":
        require_packages("quantization", config.quantization, *QUANTIZERS)
        is_plain = getattr(settings, "quantization_config", None) is None
        reason = f"the weights of {config.model_name_or_path} are quantized already"
        remedy = f"{reason}: use none, or name the model that they were made from"
        require(is_plain, "quantization", config.quantization, remedy)
        options |= {"quantization_config": layout(config.quantization, dtype), "device_map": device_map or {"": device}}
    with enough_memory(config):
        model = load_auto(auto_class(settings), config, config=settings, dtype=dtype, **options)
        keep_layout(model)
        if base_of(config.model_name_or_path) is not None:
            load_adapter(model, config.model_name_or_path)
        model = model.eval() if options or on_host else model.eval().to(device)
    remedy = "the cards hold a part of the model only: name more cards, or use quantization"
    require(not any(weight.is_meta for weight in model.parameters()), "device_map", device_map, remedy)
    Head.check(model)
    if config.dtype == "auto" and dtype == torch.float32 and device.type == "cpu":
        advise_bfloat16(settings)
    return model


def advise_bfloat16(settings: PretrainedConfig) -> None:
    """Log how much faster this CPU multiplies matrices of the model's size in bfloat16, if it clearly does."""
    size = getattr(settings.get_text_config(), "hidden_size", 0)
    if size < SMALLEST_TO_ADVISE or not log.isEnabledFor(logging.INFO):  # of ranks the first alone says it
        return
    seconds = {dtype: product_seconds(size, dtype) for dtype in (torch.float32, torch.bfloat16)}
    if (ratio := seconds[torch.float32] / seconds[torch.bfloat16]) > 1.5:
        advice = "--dtype bfloat16, for the server too, takes half of the memory and rounds more"
        log.info("this CPU multiplies the model's matrices %.1f times as fast in bfloat16: %s", ratio, advice)


def product_seconds(size: int, dtype: torch.dtype) -> float:
    """Return the shortest time of three products [256, size] x [size, 4 size]."""
    states, weight = torch.ones(256, size, dtype=dtype), torch.ones(4 * size, size, dtype=dtype)
    timer = Timer("linear(states, weight)", globals={"linear": linear, "states": states, "weight": weight})
    return min(timer.repeat(3, number=1))


def float32_weights(name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that a model's safetensors files hold in float32, one at a time, by their names there."""
    if path := find_file(name, SAFE_WEIGHTS_NAME):  # which transformers takes where both are
        files = [path]
    elif index := find_file(name, SAFE_WEIGHTS_INDEX_NAME):
        files, _ = get_checkpoint_shard_files(name, index)
    else:
        files = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 it is no dict
                if file.get_slice(key).get_dtype() == "F32":
                    yield key, file.get_tensor(key)


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
    """Raise ConfigError for an untrusted attention kernel of the hub: transformers runs it when a model is made."""
    for section in _sections(settings):
        kernel = str(section._attn_implementation)
        reason = f"its config.json names an attention kernel of the hub ({kernel}), which is code that would run here"
        remedy = "take attn_implementation out of it, or set trust_remote_code to true"
        require(trust_remote_code or "/" not in kernel, field, name, f"{reason}: {remedy}")


def _sections(settings: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a configuration and all within it: of the text, of the vision tower."""
    yield settings
    for value in vars(settings).values():
        if isinstance(value, PretrainedConfig):
            yield from _sections(value)


def auto_class(settings: PretrainedConfig) -> type:
    """Return transformers' auto class for a model of this configuration: with its vision tower if it has one."""
    return AutoModelForImageTextToText if takes_pictures(settings) else AutoModelForCausalLM


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a completion: the tokenizer's eos and those of the model's generation config."""
    return _end_ids(model.generation_config, tokenizer)


def load_end_ids(config: SharedConfig, settings: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the `eos_token_ids` of a model before it is loaded: `settings` is its configuration."""
    name = config.model_name_or_path
    try:
        made = GenerationConfig.from_pretrained(base_of(name) or name)
    except OSError:  # none, or a damaged file, which transformers takes for none when it loads the model
        made = GenerationConfig.from_model_config(settings)
    return _end_ids(made, tokenizer)


def _end_ids(settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    configured = settings.eos_token_id if settings else None
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({tokenizer.eos_token_id, *ids} - {None})


def length_limits(config: PretrainedConfig) -> dict[str, int]:
    """Return the fields of a model's configuration that limit the tokens of a sequence. Beyond the last two its
    log-probs depend on the rest of its batch: beyond the first length of longrope positions
    (`original_max_position_embeddings`) transformers rotates a whole batch by the long factors, and which keys an
    indexed attention sees beyond `index_topk` depends on the length of the row."""
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
    name, limit = min(limits.items(), key=itemgetter(1), default=("", NO_LIMIT))
    remedy = (
        f"with max_prompt_length={config.max_prompt_length} that makes {config.longest_sequence} tokens, and "
        f"{config.model_name_or_path} can be trusted up to {limit} ({name}): lower one of them"
    )
    require(config.longest_sequence <= limit, "max_completion_length", config.max_completion_length, remedy)


def cards_of(model: PreTrainedModel) -> list[torch.device]:
    """Return the GPUs that hold parts of the model."""
    return sorted({weight.device for weight in model.parameters() if weight.device.type == "cuda"}, key=str)


def device_memory(cards: list[torch.device]) -> tuple[int, int, int]:
    """Return the bytes that torch holds on these GPUs, their total, and the peak of tensors since it was reset."""
    total = sum(torch.cuda.get_device_properties(card).total_memory for card in cards)
    peak = sum(torch.cuda.max_memory_allocated(card) for card in cards)
    return sum(torch.cuda.memory_reserved(card) for card in cards), total, peak


def device_use(cards: list[torch.device]) -> float | None:
    """Return the mean share of the last second or less in which these GPUs ran kernels; None if NVIDIA's library, of
    the package nvidia-ml-py, is missing or does not know such a card or a part of it (MIG)."""
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
    with refuse_unloadable("model_name_or_path", name):
        source = base_of(name) or name
        if source != name and auto_class is AutoTokenizer and find_file(name, "tokenizer_config.json"):
            source = name
        return auto_class.from_pretrained(source, trust_remote_code=shared.trust_remote_code, **options)

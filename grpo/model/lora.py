"""Puts the layers of LoRA, rsLoRA and DoRA, which are peft's, into the model itself; weights in 4 or 8 bits.

There is one adapter, named "default" as peft names it. `generate`, the head and attention work as without it, and
`save_pretrained` saves the adapter alone. It is never merged while it is used: in 16 bits merging rounds the weights.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo.config.errors import ConfigError, one_line, require
from grpo.config.sampling_settings import PolicyConfig
from grpo.model.hub import base_of, refuse_unloadable
from grpo.model.pictures import vision_modules
from grpo.model.sharded import detached
from grpo.model.weights_file import named_weights

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

log = logging.getLogger(__name__)
# It warns at its import, which peft makes too, that it lacks a kernel for CPUs. `keep_layout` needs none.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

NAME = "default"
QUANTIZERS = "accelerate", "bitsandbytes"
# Fields that LoRA, rsLoRA and DoRA need, or that name the adapter's origin. Any other field that is not peft's default
# makes another kind of adapter, or one that changes the base too.
_KNOWN_FIELDS = {
    *("peft_type", "task_type", "peft_version", "auto_mapping", "revision", "base_model_name_or_path"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
}


def require_packages(field: str, value: object, *packages: str) -> None:
    """Raise ConfigError if a package that a setting needs is not installed."""
    missing = " ".join(package for package in packages if importlib.util.find_spec(package) is None)
    require(not missing, field, value, f"{missing} is not installed: pip install {missing}")


def check_adapter(config: PolicyConfig) -> None:
    """Raise ConfigError for an adapter's mistakes that can be found before a model is loaded."""
    if config.quantization != "none":
        require_packages("quantization", config.quantization, *QUANTIZERS)
    if config.use_peft:
        require_packages("use_peft", True, "peft")
        return
    remedy = "it is an adapter: add use_peft to train it, or merge it into its base to train the whole model"
    require(base_of(config.model_name_or_path) is None, "model_name_or_path", config.model_name_or_path, remedy)


def load_adapter(model: PreTrainedModel, name: str) -> None:
    """Put the adapter from a folder or hub id into its base model. Raises ConfigError if the two do not fit."""
    put_adapter(model, name)
    from peft import load_peft_weights, set_peft_model_state_dict

    with refuse_unloadable("model_name_or_path", name):
        saved = load_peft_weights(name, "cpu")
    weights = {key.removeprefix("base_model.model."): value for key, value in saved.items()}
    try:
        loaded = set_peft_model_state_dict(model, weights, NAME)
    except RuntimeError as error:
        raise _refused(name, f"its weights do not fit its base ({one_line(error)})") from error
    if wrong := loaded.unexpected_keys + [key for key in loaded.missing_keys if ".lora_" in key]:
        raise _refused(name, f"its weights and its configuration name different layers ({wrong[0]})")


def put_adapter(model: PreTrainedModel, name: str) -> None:
    """Put in the adapter's layers as `load_adapter` does, without weights: the model may be on device meta."""
    require_packages("model_name_or_path", name, "peft")
    from peft import LoraConfig, PeftConfig

    config = PeftConfig.from_pretrained(name)
    if not isinstance(config, LoraConfig):
        raise _refused(name, f"its adapter is {config.peft_type}, not LoRA")
    # These leave the base as it is, and their result is in the file.
    if config.init_lora_weights in (False, "gaussian", "orthogonal"):
        config.init_lora_weights = True
    plain = LoraConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _KNOWN_FIELDS and value != getattr(plain, field.name):
            raise _refused(name, f"its adapter has {field.name}={value!r}, which is more than LoRA, rsLoRA or DoRA")
    config.lora_dropout, config.inference_mode = 0.0, False
    _put_in(model, config, "model_name_or_path", name)


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"model_name_or_path={name!r}: {reason}: merge it into its base and start from that")


def train_adapter(model: PreTrainedModel, config: PolicyConfig) -> bool:
    """Give the model an adapter, drawn from the run's seed, or continue with the one it came with; freeze the rest.
    Return whether it came with one. A new adapter changes no output yet: its second matrix is 0. With
    `freeze_vision_tower` it has no layers in the vision tower. Raises ConfigError if it fits no layer."""
    if hasattr(model, "peft_config"):
        adapter = model.peft_config[NAME]
        log.info("continuing with %s: r %d, alpha %g", config.model_name_or_path, adapter.r, adapter.lora_alpha)
        return True
    from peft import LoraConfig
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOSEN

    targets = config.lora_target_modules
    if targets == ["all-linear"] or (targets is None and model.config.model_type not in CHOSEN):
        targets = "all-linear"  # of no vision-language model peft knows which layers to take
    else:
        remedy = f"name some of its linear layers ({', '.join(_kinds_of_layers(model))}), or all-linear"
        for target in targets or []:  # peft refuses only if all names are wrong
            is_there = any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules())
            require(is_there, "lora_target_modules", target, f"the model has no such layer: {remedy}")
    tower = [rf"{re.escape(name)}\..*" for name in vision_modules(model)] if config.freeze_vision_tower else []
    settings = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        exclude_modules="|".join(tower) or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(config.seed)
    _put_in(model, settings, "lora_target_modules", targets)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers = sorted({name.rsplit(".", 1)[-1] for name in settings.target_modules})
    log.info("a new adapter: %s parameters in %s", f"{trained:,}", " ".join(layers))
    return False


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Return the model's linear layers by name, without its head and an adapter's."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)  # Conv1D is GPT-2's
        and layer is not model.get_output_embeddings()
        and ".lora_" not in name
    }


def _kinds_of_layers(model: PreTrainedModel) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in linear_layers(model)})


def _put_in(model: PreTrainedModel, config: LoraConfig, field: str, value: object) -> None:
    """Add an adapter's layers to the model. Raises ConfigError, naming `field` and `value`, if they do not fit."""
    layers = _kinds_of_layers(model)
    try:
        model.add_adapter(config, NAME)
    except ValueError as error:
        raise ConfigError(f"{field}={value!r}: {one_line(error)}: its linear layers are {', '.join(layers)}") from error
    remedy = "puts an adapter on the embeddings or the head, which are computed without it: leave those layers out"
    with_adapter = _lora_layers(model).values()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        require(layer not in with_adapter, field, value, remedy)
    # peft gives new layers fp32 weights; the policy and its reference must compute in the same dtype.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    base = Path(config.base_model_name_or_path)
    if base.is_dir():  # the saved adapter may be loaded from another directory
        config.base_model_name_or_path = str(base.resolve())


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's weights, not copies, by the names that peft saves them by."""
    weights = {}
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            name = name.replace(f"_vector.{NAME}.weight", "_vector").replace(f".{NAME}.", ".")
            weights[f"base_model.model.{name}"] = detached(weight)
    return weights


def base_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights that the adapter is on, by the names of the plain model. Those in 4 bits are unpacked into the
    model's dtype, as copies on the CPU; all others are no copies."""
    weights = named_weights(model)
    weights |= {name: unpacked(weight).cpu() for name, weight in model.named_parameters() if is_packed(weight)}
    return {name.replace(".base_layer.", "."): weight for name, weight in weights.items() if ".lora_" not in name}


def scalings(model: PreTrainedModel) -> list[float]:
    """Return the factor of each layer's adapter, which is in no parameter; empty without an adapter."""
    return [float(layer.scaling[NAME]) for layer in _lora_layers(model).values()]


def _lora_layers(model: PreTrainedModel) -> dict[str, LoraLayer]:
    """Return the layers with an adapter, by name; none without an adapter."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


@contextmanager
def frozen_norms(model: PreTrainedModel) -> Iterator[None]:
    """Compute DoRA's norms once, while no weight changes. peft does so in every call, for every sampled token."""
    magnitudes = []
    with torch.no_grad():
        for layer in _lora_layers(model).values():
            if not layer.lora_magnitude_vector:
                continue
            magnitudes.append(magnitude := layer.lora_magnitude_vector[NAME])
            product = magnitude.get_lora_weight(layer.lora_A[NAME], layer.lora_B[NAME])
            norm = magnitude.get_weight_norm(unpacked(layer.get_base_layer().weight), product, layer.scaling[NAME])
            # peft uses the product for its norm alone, so any value may replace it.
            magnitude.get_lora_weight = magnitude.get_weight_norm = lambda *_, norm=norm, **__: norm
    try:
        yield
    finally:
        for magnitude in magnitudes:
            del magnitude.get_lora_weight, magnitude.get_weight_norm


@contextmanager
def trained_alone(model: PreTrainedModel) -> Iterator[None]:
    """Limit the model's state dict to the trained parameters. DeepSpeed's own way keeps a tied head and constants."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def leave_out(model: PreTrainedModel, weights: dict[str, Tensor], prefix: str, metadata: dict) -> None:
        for name in weights.keys() - trained:
            del weights[name]

    with model.register_state_dict_post_hook(leave_out):
        yield


class LocalReference:
    """The reference without a server: the policy with its adapter off, or with the weights that the run began with."""

    def __init__(self, model: PreTrainedModel, copies: bool):
        """With `copies` of all trained weights, else with the adapter off. Must be called before the first update."""
        self._model, self.copies = model, copies
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._start = [weight.detach().clone() for weight in self._trained] if copies else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Turn the policy's model into the reference, and back at the end."""
        trained = [parameter.data for parameter in self._trained]
        try:
            if self._start is None:
                self._model.disable_adapters()
            else:
                for parameter, start in zip(self._trained, self._start, strict=True):
                    parameter.data = start
            yield
        finally:
            # These must be the same tensors as before, not copies: the optimizer's are views of them.
            for parameter, weight in zip(self._trained, trained, strict=True):
                parameter.data = weight
            if self._start is None:
                self._model.enable_adapters()


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain model to save, with the adapter merged into its weights; `model` stays as it is. It cannot
    compute: it lacks buffers that are not saved. Merged weights, and those in 4 bits, which are unpacked into the
    model's dtype (the base that the adapter was trained on), are new tensors on the CPU. All others are shared with
    `model`. On the model's device one layer is merged at a time."""
    settings = copy.deepcopy(model.config)
    if quantization_of(model) == "4bit":
        del settings.quantization_config
    with torch.device("meta"):
        plain = type(model)(settings)
    weights = model.state_dict() | base_weights(model)
    for name, layer in _lora_layers(model).items():
        # Not layer.merge: it would pack the sum into 4 bits again, and has to be undone.
        base, variant = unpacked(layer.get_base_layer().weight), layer.lora_variant.get(NAME)
        weight = base + layer.get_delta_weight(NAME) if variant is None else variant.merge_safe(layer, NAME, base)
        weights[f"{name}.weight"] = weight.cpu()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()}, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


# Weights in 4 or 8 bits, by bitsandbytes.


def layout(quantization: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return bitsandbytes' settings; 4 bits are QLoRA's (Dettmers et al. 2023, arXiv:2305.14314, section 3)."""
    return BitsAndBytesConfig(
        load_in_8bit=quantization == "8bit",
        load_in_4bit=quantization == "4bit",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    )


def keep_layout(model: PreTrainedModel) -> None:
    """Keep 4 bit weights in the layout that gradients can pass through. On a CPU with AVX512-BF16, bitsandbytes packs
    them anew in the first pass without gradients."""
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def quantization_of(model: PreTrainedModel) -> str:
    """Return the value of the setting `quantization` that the model was loaded with."""
    return next((name for name in ("4bit", "8bit") if getattr(model, f"is_loaded_in_{name}", False)), "none")


def is_packed(weight: Tensor) -> bool:
    return getattr(weight, "quant_state", None) is not None


def unpacked(weight: Tensor) -> Tensor:
    """Return the numbers that a layer multiplies with, in the model's dtype; for a weight in 4 bits, a copy."""
    if not is_packed(weight):
        return weight.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)

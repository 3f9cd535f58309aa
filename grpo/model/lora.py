"""Puts the layers of LoRA, rsLoRA and DoRA, which are peft's, into the model itself.

There is one adapter, named "default" as peft names it. Its layers are modules of the model; `generate`, the head and
attention work as without it, and `save_pretrained` saves the adapter alone. It is never merged while it is used: in 16
bits merging rounds the weights.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import find_adapter_config_file

from grpo.config.errors import ConfigError, did_you_mean
from grpo.config.sampling_settings import PolicyConfig
from grpo.model.hub import refuse_damaged
from grpo.model.quantization import is_packed, is_quantized, unpacked
from grpo.model.vision_tower import vision_modules
from grpo.model.weights_file import named_weights

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

log = logging.getLogger(__name__)

NAME = "default"
QUANTIZERS = "accelerate", "bitsandbytes"
# Fields that LoRA, rsLoRA and DoRA need, or that name the adapter's origin. Any other field that is not peft's default
# makes another kind of adapter, or one that changes the base too.
_KNOWN_FIELDS = {
    *("peft_type", "task_type", "peft_version", "auto_mapping", "revision", "base_model_name_or_path"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
}
# Initialisations that leave the base as it is; their result is in the file.
_KNOWN_STARTS = (True, False, "gaussian", "orthogonal")


def require_packages(field: str, value: object, *packages: str) -> None:
    """Raise ConfigError if a package that a setting needs is not installed."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise ConfigError(f"{field}={value!r}: {missing[0]} is not installed: pip install {' '.join(missing)}")


def base_of(name: str) -> str | None:
    """Return the model that an adapter was trained on, from its folder or hub id; None if `name` is no adapter.

    Raises OSError if the hub knows no such name, ConfigError if the adapter does not name its base.
    """
    path = find_adapter_config_file(name)
    if path is None:
        return None
    base = json.loads(Path(path).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            f"model_name_or_path={name!r}: its adapter_config.json does not say which model it belongs to: write "
            "base_model_name_or_path there"
        )
    return base


def check_adapter(config: PolicyConfig) -> None:
    """Raise ConfigError for an adapter's mistakes that can be found before a model is loaded."""
    if config.quantization != "none":
        require_packages("quantization", config.quantization, *QUANTIZERS)
    if config.use_peft:
        require_packages("use_peft", True, "peft")
    elif base_of(config.model_name_or_path) is not None:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path!r}: it is an adapter: add use_peft to train it further, "
            "or merge it into its base to train the whole model"
        )


def load_adapter(model: PreTrainedModel, name: str) -> None:
    """Put the adapter from a folder or hub id into its base model. Raises ConfigError if the two do not fit."""
    put_adapter(model, name)
    from peft import load_peft_weights, set_peft_model_state_dict

    with refuse_damaged("model_name_or_path", name, name):
        saved = load_peft_weights(name, "cpu")
    weights = {key.removeprefix("base_model.model."): value for key, value in saved.items()}
    try:
        loaded = set_peft_model_state_dict(model, weights, NAME)
    except RuntimeError as error:
        raise _refused(name, f"its weights do not fit its base ({' '.join(str(error).split())[:300]})") from error
    if wrong := loaded.unexpected_keys + [key for key in loaded.missing_keys if ".lora_" in key]:
        raise _refused(name, f"its weights and its configuration name different layers ({wrong[0]})")


def put_adapter(model: PreTrainedModel, name: str) -> None:
    """Put in the adapter's layers as `load_adapter` does, without weights: the model may be on device meta."""
    require_packages("model_name_or_path", name, "peft")
    from peft import LoraConfig, PeftConfig

    config = PeftConfig.from_pretrained(name)
    if not isinstance(config, LoraConfig):
        raise _refused(name, f"its adapter is {config.peft_type}, not LoRA")
    plain = LoraConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        known = field.name in _KNOWN_FIELDS or value == getattr(plain, field.name)
        if not known and not (field.name == "init_lora_weights" and value in _KNOWN_STARTS):
            raise _refused(
                name, f"its adapter_config.json has {field.name}={value!r}, which is more than LoRA, rsLoRA or DoRA"
            )
    config.lora_dropout, config.init_lora_weights, config.inference_mode = 0.0, True, False
    _put_in(model, config, "model_name_or_path", name)


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"model_name_or_path={name!r}: {reason}: merge it into its base and start from that")


def train_adapter(model: PreTrainedModel, config: PolicyConfig) -> bool:
    """Give the model an adapter, drawn from the run's seed, or continue with the one it came with; freeze the rest.

    Return whether it came with one. With `freeze_vision_tower` a new adapter has no layers in the vision tower. It
    changes no output yet: its second matrix is 0. Raises ConfigError if it fits no layer.
    """
    if hasattr(model, "peft_config"):
        adapter = model.peft_config[NAME]
        kind = "DoRA" if adapter.use_dora else "rsLoRA" if adapter.use_rslora else "LoRA"
        name = config.model_name_or_path
        log.info("continuing with %s: %s, r %d, alpha %g", name, kind, adapter.r, adapter.lora_alpha)
        return True
    from peft import LoraConfig
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOSEN

    targets = config.lora_target_modules
    if targets is None and model.config.model_type not in CHOSEN:
        targets = ["all-linear"]  # of no vision-language model peft knows which layers to take
    if targets != ["all-linear"]:
        _check_targets(model, targets or [])
    tower = [rf"{re.escape(name)}\..*" for name in vision_modules(model)] if config.freeze_vision_tower else []
    settings = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
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


def _check_targets(model: PreTrainedModel, targets: list[str]) -> None:
    """Raise ConfigError for a name that is no layer's. peft refuses only if all names are wrong."""
    names = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in names):
            layers = _kinds_of_layers(model)
            raise ConfigError(
                f"lora_target_modules={target!r}: the model has no such layer{did_you_mean(target, layers)}: name some "
                f"of its linear layers ({', '.join(layers)}), or all-linear"
            )


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Return the model's linear layers by name, without its head and an adapter's."""
    head, linear = model.get_output_embeddings(), (nn.Linear, Conv1D)  # Conv1D is GPT-2's linear layer
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, linear) and layer is not head}
    return {name: layer for name, layer in layers.items() if ".lora_" not in name}


def _kinds_of_layers(model: PreTrainedModel) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in linear_layers(model)})


def _put_in(model: PreTrainedModel, config: LoraConfig, field: str, value: object) -> None:
    """Add an adapter's layers to the model. Raises ConfigError, naming `field` and `value`, if they do not fit."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = _kinds_of_layers(model)
    try:
        model.add_adapter(config, NAME)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{field}={value!r}: {reason} The model's linear layers: {', '.join(layers)}") from error
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(layer, BaseTunerLayer):
            raise ConfigError(
                f"{field}={value!r}: puts an adapter on the embeddings or the head, whose weights the log-probs are "
                "computed from directly: leave those layers out"
            )
    # peft gives new layers fp32 weights; the policy and its reference must compute in the same dtype.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    # The saved adapter may be loaded from another directory.
    base = config.base_model_name_or_path
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's weights, not copies, by the names that peft saves them by."""
    weights = {}
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            name = name.replace(f".lora_magnitude_vector.{NAME}.weight", ".lora_magnitude_vector")
            weights[f"base_model.model.{name.replace(f'.{NAME}.', '.')}"] = weight.detach()
    return weights


def base_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights that the adapter is on, by the names of the plain model.

    Those in 4 bits are unpacked into the model's dtype, as copies on the CPU; all others are no copies.
    """
    weights = named_weights(model)
    weights |= {name: unpacked(weight).cpu() for name, weight in model.named_parameters() if is_packed(weight)}
    return {name.replace(".base_layer.", "."): weight for name, weight in weights.items() if ".lora_" not in name}


def scalings(model: PreTrainedModel) -> list[float]:
    """Return the factor of each layer's adapter, which is in no parameter; empty without an adapter."""
    return [float(layer.scaling[NAME]) for layer in _lora_layers(model)] if hasattr(model, "peft_config") else []


def _lora_layers(model: PreTrainedModel) -> list[LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return [layer for layer in model.modules() if isinstance(layer, LoraLayer)]


@contextmanager
def frozen_norms(model: PreTrainedModel) -> Iterator[None]:
    """Compute DoRA's norms once, while no weight changes. peft does so in every call, for every sampled token."""
    layers = _lora_layers(model) if hasattr(model, "peft_config") and model.peft_config[NAME].use_dora else []
    magnitudes = [layer.lora_magnitude_vector[NAME] for layer in layers]
    with torch.no_grad():
        for layer, magnitude in zip(layers, magnitudes, strict=True):
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
    """Limit the model's state dict to the trained parameters.

    DeepSpeed's `exclude_frozen_parameters` keeps a tied head, and the constants of weights in 4 bits.
    """

    def leave_out(model: PreTrainedModel, weights: dict[str, Tensor], prefix: str, metadata: dict) -> None:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name in weights.keys() - trained:
            del weights[name]

    hook = model.register_state_dict_post_hook(leave_out)
    try:
        yield
    finally:
        hook.remove()


class AdapterOffReference:
    """The reference without a server: the policy with its adapter off, or with the adapter that the run began with."""

    def __init__(self, model: PreTrainedModel, began_with_adapter: bool):
        """Must be called before the first update. Keeps a copy of the adapter that the run began with, if it did."""
        self._model = model
        self._adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._start = [weight.detach().clone() for weight in self._adapter] if began_with_adapter else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Turn the policy's model into the reference, and back at the end."""
        trained = [parameter.data for parameter in self._adapter]
        try:
            if self._start is None:
                self._model.disable_adapters()
            else:
                for parameter, start in zip(self._adapter, self._start, strict=True):
                    parameter.data = start
            yield
        finally:
            # These must be the same tensors as before, not copies: the optimizer's are views of them.
            for parameter, weight in zip(self._adapter, trained, strict=True):
                parameter.data = weight
            if self._start is None:
                self._model.enable_adapters()


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain model to save, with the adapter merged into its weights; `model` stays as it is.

    It cannot compute: it lacks buffers that are not saved. The merged weights are new tensors on the CPU and take as
    much memory there as the layers with an adapter have. Weights in 4 bits are unpacked into the model's dtype, on the
    CPU too: the saved model is the base that the adapter was trained on. All other weights are shared with `model`. On
    the model's device one layer is merged at a time.
    """
    from peft.tuners.lora import LoraLayer

    weights = {
        name.replace(".base_layer.", "."): weight for name, weight in model.state_dict().items() if ".lora_" not in name
    }
    settings = copy.deepcopy(model.config)
    if is_quantized(model, "4bit"):
        del settings.quantization_config
        weights = {name: weight for name, weight in weights.items() if ".weight." not in name}  # blocks' constants
        for name, weight in model.named_parameters():
            if is_packed(weight) and ".base_layer." not in name:
                weights[name] = unpacked(weight).cpu()
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            weights[f"{name}.weight"] = _merged_weight(layer).cpu()
    with torch.device("meta"):
        plain = type(model)(settings)
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _merged_weight(layer: LoraLayer) -> Tensor:
    """Return the weight of a plain layer that computes the same. The layer itself stays as it is."""
    base = layer.get_base_layer()
    if is_packed(base.weight):  # peft would pack the sum into 4 bits again
        plain, kind = unpacked(base.weight), layer.lora_variant.get(NAME)
        return plain + layer.get_delta_weight(NAME) if kind is None else kind.merge_safe(layer, NAME, plain)
    original = base.weight.data
    try:
        layer.merge(safe_merge=True, adapter_names=[NAME])  # into a copy, which takes the weight's place
        return base.weight.data
    finally:
        # Unmerging would subtract the adapter again, and leave the rounding of both.
        base.weight.data = original
        layer.merged_adapters.clear()

"""AdamW over the trained parameters, and its learning-rate schedule, both as in the Trainer of transformers."""

from __future__ import annotations

import math
import re

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")

_EPSILON = 1e-8  # torch's and the Trainer's; no recipe has another

_LARGEST_GROUP = 2**30  # numbers in a group of bitsandbytes' AdamW


def make_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Make torch's AdamW, or with optim=adamw_8bit that of bitsandbytes.

    DeepSpeed's would be compiled at the first start. Fused, AdamW makes no copy of what it steps. Raises ConfigError
    where the weights are in less than 16 bits, which cannot be trained.
    """
    if not config.use_peft and any(weight.dtype.itemsize < 2 for weight in model.parameters()):
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path!r}: its weights are quantized, so that they cannot be "
            "trained: add use_peft, or name the model that they were made from"
        )
    if config.optim == "adamw_8bit":
        return _with_8_bits(model, config)
    decays = config.weight_decay, 0.0
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in zip(parameter_groups(model), decays, strict=True)
        if parameters  # a LoRA adapter has no biases and norms, and DeepSpeed takes no empty group
    ]
    betas = config.adam_beta1, config.adam_beta2
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=_EPSILON, fused=True)


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters: those with weight decay, and those without, biases and the weights of norms.

    A norm is recognised by its name or by its class, as in `Trainer.get_decay_parameter_names`.
    """
    layer_norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    norms = {id(parameter) for module in layer_norms for parameter in module.parameters()}
    decayed, not_decayed = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_bare = id(parameter) in norms or _NOT_DECAYED.search(name.lower())
            (not_decayed if is_bare else decayed).append(parameter)
    return decayed, not_decayed


def in_8_bits(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose moments are in 8 bits: matrices, but no embeddings and nothing small.

    `Trainer` and bitsandbytes leave those out too; but ZeRO-2 makes one tensor of a group, which is never small, so
    bitsandbytes could not see it.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [weight for weight in parameter_groups(model)[0] if id(weight) not in embeddings and weight.numel() >= 4096]


def _with_8_bits(model: nn.Module, config: TrainerConfig) -> torch.optim.Optimizer:
    """Make bitsandbytes' AdamW, each group with its `optim_bits`."""
    from bitsandbytes.optim import AdamW8bit

    class AdamW(AdamW8bit):
        def get_config(self, group_index: int, index: int, group: dict) -> dict:
            return super().get_config(group_index, index, group) | {"optim_bits": group["optim_bits"]}

    decayed, not_decayed = parameter_groups(model)
    large = in_8_bits(model)
    large_ids = {id(weight) for weight in large}
    small = [weight for weight in decayed if id(weight) not in large_ids]
    groups = [
        {"params": part, "weight_decay": decay, "optim_bits": bits}
        for weights, decay, bits in (
            (large, config.weight_decay, 8),
            (small, config.weight_decay, 32),
            (not_decayed, 0.0, 32),
        )
        for part in _parts(weights)
    ]
    return AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=_EPSILON)


def _parts(weights: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split weights, in their order, into groups that bitsandbytes' kernels, which count in 32 bits, can count."""
    parts, size = [], _LARGEST_GROUP
    for weight in weights:
        if size + weight.numel() > _LARGEST_GROUP:
            parts.append([])
            size = 0
        parts[-1].append(weight)
        size += weight.numel()
    return parts


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainerConfig) -> LambdaLR:
    """Make the learning-rate schedule. `transformers.get_scheduler` gives the same rates, but loads bitsandbytes."""
    return LambdaLR(optimizer, lambda updates: rate_factor(updates, config))


def rate_factor(updates: int, config: TrainerConfig) -> float:
    """Return the factor of `learning_rate` after so many updates: a linear warm-up, then lr_scheduler_type."""
    warmup, last = config.warmup_steps, config.max_steps
    if updates < warmup:
        return updates / warmup
    if config.lr_scheduler_type == "constant_with_warmup":
        return 1.0
    whole = max(1, last - warmup)
    if config.lr_scheduler_type == "linear":
        return max(0.0, (last - updates) / whole)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((updates - warmup) / whole))))

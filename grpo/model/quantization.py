"""Weights in 4 or 8 bits, by bitsandbytes: make, keep and unpack them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel

# It warns at its import, which peft makes too, that it lacks a kernel for CPUs. `keep_layout` needs none.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def layout(quantization: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the settings of bitsandbytes for 4 or 8 bits.

    4 bits are QLoRA's (Dettmers et al. 2023, arXiv:2305.14314, section 3): NF4, its constants in 8 bits.
    """
    return BitsAndBytesConfig(
        load_in_8bit=quantization == "8bit",
        load_in_4bit=quantization == "4bit",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    )


def keep_layout(model: PreTrainedModel) -> None:
    """Keep 4 bit weights in the layout that gradients can pass through.

    On a CPU with AVX512-BF16, bitsandbytes packs a layer's weights anew in the first pass without gradients, for a
    product in bfloat16, whatever the dtype is. No gradient passes through that product.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def is_quantized(model: PreTrainedModel, quantization: str) -> bool:
    return getattr(model, f"is_loaded_in_{quantization}", False)


def quantization_of(model: PreTrainedModel) -> str:
    """Return the value of the setting `quantization` that the model was loaded with."""
    return next((name for name in ("4bit", "8bit") if is_quantized(model, name)), "none")


def is_packed(weight: Tensor) -> bool:
    return getattr(weight, "quant_state", None) is not None


def unpacked(weight: Tensor) -> Tensor:
    """Return the numbers that a layer multiplies with, in the model's dtype; for a weight in 4 bits, a copy."""
    if not is_packed(weight):
        return weight.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)

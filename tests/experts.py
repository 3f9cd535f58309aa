"""Tiny mixtures of experts, and what balances them, by hand."""

import copy

import models
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

SMALL = models.SMALL | dict(vocab_size=256, intermediate_size=24, initializer_range=0.3)
LOCAL = dict(num_local_experts=5, num_experts_per_tok=2)
CONFIGS = {
    "mixtral": MixtralConfig(**SMALL, **LOCAL),
    "qwen3, its first layer dense": Qwen3MoeConfig(
        **SMALL, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=16, mlp_only_layers=[0]
    ),
    "olmoe": OlmoeConfig(**SMALL, num_experts=5, num_experts_per_tok=2),
    "granite": GraniteMoeConfig(**SMALL, **LOCAL),
    "gpt-oss": GptOssConfig(**SMALL, **LOCAL, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
}


def mixture(kind: str):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def balanced(model, sequences):
    """Transformers' loss of all tokens that predict a completion's, with its gradients; the model in float64.

    A sequence is (prompt, completion, which of the completion's tokens count).
    """
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # the others take no float64
    rows = []
    for prompt, completion, counted in sequences:
        if completion:
            body = model.base_model(input_ids=torch.tensor([prompt + completion]), output_router_logits=True)
            rows.append([layer.flatten(0, -2)[len(prompt) - 1 : -1][counted] for layer in body.router_logits])
    layers = tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
    config = model.config
    value = load_balancing_loss_func(layers, layers[0].shape[-1], config.num_experts_per_tok)
    parameters = dict(model.named_parameters())
    slopes = torch.autograd.grad(value, parameters.values(), materialize_grads=True)
    return value.item(), dict(zip(parameters, slopes, strict=True))

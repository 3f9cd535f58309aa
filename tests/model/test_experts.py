"""The loss that balances experts, against transformers' own in float64, one unpadded sequence at a time."""

import copy
import random

import pytest
import torch
from step_worker import sequences
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from grpo.algorithm.experts import balance_loss, experts_chosen
from grpo.algorithm.tokens import StepSize
from grpo.config.errors import ConfigError
from grpo.model.load import checkpoint_activations
from grpo.model.logprobs import check_router, router_logits, token_logprobs, with_router_logits
from grpo.model.packing import Batcher
from grpo.model.trial import make_batcher

SMALL = dict(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.3,
)
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


def balanced(model, pairs):
    """Transformers' loss of all tokens that predict a completion's, with its gradients; the model in float64."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # the others take no float64
    rows = []
    for prompt, completion in pairs:
        if completion:
            body = model.base_model(input_ids=torch.tensor([prompt + completion]), output_router_logits=True)
            rows.append([layer.flatten(0, -2)[len(prompt) - 1 : -1] for layer in body.router_logits])
    layers = tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
    config = model.config
    value = load_balancing_loss_func(layers, layers[0].shape[-1], config.num_experts_per_tok)
    parameters = dict(model.named_parameters())
    slopes = torch.autograd.grad(value, parameters.values(), materialize_grads=True)
    return value.item(), dict(zip(parameters, slopes, strict=True))


@pytest.mark.parametrize("way", ["packed", "padded", "activations recomputed"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_any_cut_adds_up_to_the_loss_of_all_tokens_at_once(kind, way):
    model = mixture(kind)
    pairs = [(sequence.prompt_ids, sequence.completion_ids) for sequence in sequences()]
    value, slopes = balanced(model, pairs)
    batcher = Batcher(0, 0) if way == "padded" else make_batcher(model, 0)
    assert batcher.longest_packed or way == "padded" or kind == "gpt-oss"
    if way == "activations recomputed":
        checkpoint_activations(model)
        model.train()
    order = random.Random(0).sample(pairs, len(pairs))
    filled = [cut for cut in batcher.cut(order, 120) if any(order[index][1] for index in cut)]
    batches = [batcher.make([order[index] for index in cut], "cpu") for cut in filled]
    assert len(batches) > 3
    per_token = model.config.num_experts_per_tok
    with torch.no_grad():
        chosen = sum(experts_chosen(router_logits(model, batch), per_token) for batch in batches)
    step = StepSize(sequences=len(pairs), tokens=sum(len(completion) for _, completion in pairs))
    assert chosen.sum().item() == pytest.approx(per_token * step.tokens)
    total = 0.0
    for batch in batches:
        logprobs, _, routers = with_router_logits(model, batch, 1.0)
        share = balance_loss(routers, chosen, step)
        share.backward()
        total += share.item()
        torch.testing.assert_close(logprobs, token_logprobs(model, batch, 1.0)[0], rtol=0, atol=0)
    assert total == pytest.approx(value, rel=1e-5)
    names = dict(model.named_parameters())
    difference = sum(
        ((0 if names[name].grad is None else names[name].grad.double()) - slope).square().sum()
        for name, slope in slopes.items()
    )
    size = sum(slope.square().sum() for slope in slopes.values())
    assert (difference / size).sqrt() < 1e-5


def test_a_model_without_experts_is_refused(model):
    dense = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    for refused in (dense, model):
        with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.01: \w+ForCausalLM has no experts, or does not"):
            check_router(refused, 0.01)
    for kind in CONFIGS:
        check_router(mixture(kind), 0.01)

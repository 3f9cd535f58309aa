"""The loss that balances experts, against transformers' own in float64, one unpadded sequence at a time."""

import random

import pytest
import torch
from experts import CONFIGS, SMALL, balanced, mixture
from rounding import GRADIENT, assert_rounded
from step_worker import sequences
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo.algorithm.loss import balance_loss, experts_chosen
from grpo.algorithm.loss_types import StepSize
from grpo.config.errors import ConfigError
from grpo.model.activations import checkpoint_activations
from grpo.model.logprobs import check_router, router_logits, token_logprobs, with_router_logits
from grpo.model.packing import Batcher
from grpo.model.trial import make_batcher


@pytest.mark.parametrize("way", ["packed", "padded", "activations recomputed"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_any_cut_adds_up_to_the_loss_of_all_tokens_at_once(kind, way):
    model = mixture(kind)
    pairs = [(sequence.prompt_ids, sequence.completion_ids) for sequence in sequences()]
    value, slopes = balanced(model, [(*pair, slice(None)) for pair in pairs])
    batcher = Batcher(0, 0) if way == "padded" else make_batcher(model, 0)
    assert batcher.packs or way == "padded" or kind == "gpt-oss"
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
        assert torch.equal(logprobs, token_logprobs(model, batch, 1.0)[0])
    assert_rounded(total, value)
    names = dict(model.named_parameters())
    difference = sum(
        ((0 if names[name].grad is None else names[name].grad.double()) - slope).square().sum()
        for name, slope in slopes.items()
    )
    size = sum(slope.square().sum() for slope in slopes.values())
    assert_rounded((difference / size).sqrt(), 0.0, GRADIENT)


def test_a_model_without_experts_is_refused(model):
    dense = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    for refused in (dense, model):
        with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.01: \w+ForCausalLM has no experts, or does not"):
            check_router(refused, 0.01)
    for kind in CONFIGS:
        check_router(mixture(kind), 0.01)

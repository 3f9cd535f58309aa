"""The pass that is written out has the bits of transformers' own."""

import pytest
import torch
from models import CONFIGS, SMALL, build, example, vectors_at_random
from transformers import LlamaConfig, Qwen2Model

from grpo.model.token_pass import TokenPass, is_known
from grpo.model.tree_attention import switch_on
from grpo.sampling import rows
from grpo.sampling.continuous import ContinuousSampler

EXAMPLES = [example([5, 6, 7]), example([9, 10, 11, 12, 13, 14]), example([8])]
LLAMA_3 = LlamaConfig(
    **SMALL,
    attention_bias=True,
    mlp_bias=True,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)
# Its angles change with the largest position of a pass, from the 12th on.
DYNAMIC = LlamaConfig(
    **SMALL | {"max_position_embeddings": 12},
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
)
MODELS = {name: CONFIGS[name] for name in ("llama", "mistral, sliding window", "qwen2", "qwen3")} | {
    "llama 3": LLAMA_3,
    "dynamic": DYNAMIC,
}


def drawn(model, tokenizer) -> list[tuple[list[int], list[float]]]:
    switch_on(model, "segments")
    sampler = ContinuousSampler(model, tokenizer, [*range(20, 26)], 16, rows=5)
    groups = sampler.sample(EXAMPLES, 4, 1.0, seed=2)
    return [(rollout.completion_ids, rollout.sampling_logprobs) for rollouts in groups for rollout in rollouts]


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The rows of each pass that is written out."""
    call, counted = TokenPass.__call__, []

    def counting(token_pass, tokens, positions):
        counted.append(len(tokens))
        return call(token_pass, tokens, positions)

    monkeypatch.setattr(TokenPass, "__call__", counting)
    return counted


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_it_draws_what_the_models_own_modules_draw(name, dtype, with_lora, tokenizer, passes, monkeypatch):
    model = vectors_at_random(build(MODELS[name]).to(dtype))
    if with_lora:
        peft = pytest.importorskip("peft")
        model.add_adapter(peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"))
    written_out = drawn(model, tokenizer)
    assert len(passes) > 15
    passes.clear()
    monkeypatch.setattr(rows, "is_known", lambda body: False)
    assert drawn(model, tokenizer) == written_out
    assert passes == []


def test_a_model_that_is_not_known_goes_through_its_own_modules(tokenizer, passes):
    body, norm = build(CONFIGS["qwen2"]), build(CONFIGS["qwen3"])
    body.model.__class__ = type("Changed", (Qwen2Model,), {})
    norm.model.layers[1].self_attn.k_norm.__class__ = type("Norm", (type(norm.model.norm),), {})
    for model in (build(CONFIGS["cohere, scaled"]), build(CONFIGS["granite, divided"]), body, norm):
        assert not is_known(model.model)
        assert drawn(model, tokenizer)
    assert passes == []

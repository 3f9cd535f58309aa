"""Tiny models of many architectures, and their log-probs by hand."""

import copy

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from grpo.data.records import Example
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.model.trial import make_batcher

ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **ATTENTION, **SPECIAL)
# Sharp heads (a wide initial spread), so that a skipped softcap, scale or bias shows.
SHARP = dict(**SMALL, initializer_range=0.3)
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)


CONFIGS = {
    "qwen2": Qwen2Config(**SHARP),
    "qwen3": Qwen3Config(**SHARP),
    "llama": LlamaConfig(**SHARP),
    "mistral, sliding window": MistralConfig(**SHARP, sliding_window=8),
    "gemma2, softcapped": Gemma2Config(**SHARP, final_logit_softcapping=3.0, sliding_window=8),
    "cohere, scaled": CohereConfig(**SHARP, logit_scale=0.25),
    "granite, divided": GraniteConfig(**SHARP, logits_scaling=4.0),
    "hyperclova x, multiplied": HyperCLOVAXConfig(**SHARP, logits_scaling=0.25),
    "minicpm3, divided before its head": MiniCPM3Config(
        **SHARP | LATENT | {"num_key_value_heads": 4}, dim_model_base=8
    ),
    "falcon h1, multiplied": FalconH1Config(**SHARP, **MAMBA, lm_head_multiplier=0.25),
    "phi, bias": PhiConfig(**SHARP),
    "gpt2, learned positions": GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt-neox, partial rotation": GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    ),
    "llama4, chunked": Llama4TextConfig(**SHARP, intermediate_size_mlp=48, num_local_experts=4, attention_chunk_size=8),
    "bloom, alibi": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
}

# Two groups that share their prompts, out of order; an empty completion, one of a single token.
SEQUENCES = [
    ([5, 6, 7], [20, 21, 2]),
    ([9, 10, 11, 12, 13], [30, 31, 32, 33, 34, 35, 36, 37]),
    ([5, 6, 7], []),
    ([8], [40]),
    ([5, 6, 7], [22, 23, 24, 25]),
    ([9, 10, 11, 12, 13], [38]),
]


PADDED = Batcher(pad_token_id=0, packs=False)


def example(ids) -> Example:
    return Example(index=0, prompt="", prompt_ids=list(ids), columns={"answer": ""})


# Prompts for samplers, and so many ends that lengths differ.
EXAMPLES = [example(ids) for ids in ([5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16, 17], [8], [20, 21, 22, 23], [5, 6, 8])]
ENDS = [*range(20, 30)]


def packed(model: torch.nn.Module) -> torch.nn.Module:
    assert make_batcher(model, 0).packs
    return model


def scored(model, groups, temperature, examples=EXAMPLES, batcher=PADDED) -> torch.Tensor:
    """The loss's own log-probs of all completions' tokens."""
    pairs = zip(examples, groups, strict=True)
    sequences = [(item.prompt_ids, rollout.completion_ids) for item, rollouts in pairs for rollout in rollouts]
    with torch.no_grad():
        return token_logprobs(model, batcher.make(sequences, "cpu"), temperature)[0]


def build(config, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    return model


def random_model(name: str, **settings) -> torch.nn.Module:
    """A small model of an architecture, its weights with a wide spread."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**SMALL | settings)).float().eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


def vectors_at_random(model: torch.nn.Module) -> torch.nn.Module:
    for weight in model.parameters():
        if weight.ndim == 1:  # norms that scale, and biases
            torch.nn.init.normal_(weight, mean=1.0, std=0.3)
    return model


def by_hand(model: torch.nn.Module, sequences, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence at a time, unpadded, the model's own logits, float64 log_softmax: shares no code with the module."""
    logprobs, entropies = [], []
    for prompt, completion in sequences:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].double() / temperature
        rows = torch.log_softmax(logits, dim=-1)
        for place, token in enumerate(completion, start=len(prompt)):
            logprobs.append(rows[place - 1, token])
            entropies.append(-(rows[place - 1].exp() * rows[place - 1]).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def distance(gradient, exact) -> float:
    """Relative distance over all parameters together."""
    difference = sum(((gradient[name].double() - exact[name].double()) ** 2).sum() for name in exact)
    return (difference / sum((exact[name].double() ** 2).sum() for name in exact)).sqrt().item()

"""What a model is tried for before a run, and that the update computes what was tried."""

import logging

import pytest
import torch
from models import CONFIGS, LATENT, SEQUENCES, SMALL, build, by_hand
from rounding import GRADIENT, assert_rounded
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    DeepseekV32Config,
    DogeConfig,
    LlamaConfig,
    MiniMaxM3VLTextConfig,
    MixtralConfig,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen3NextConfig,
    RwkvConfig,
)

from grpo.config.errors import ConfigError
from grpo.config.programs import EvaluateConfig
from grpo.config.sampling_settings import SharedConfig
from grpo.model import tree_attention
from grpo.model.activations import checkpoint_activations
from grpo.model.load import check_lengths, load_model, longest_sequence
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.model.tree_attention import switch_on
from grpo.model.trial import check_padded, check_shares, make_batcher, share_rows
from grpo.sampling.self_check import make_sampler

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
INDEX = dict(index_n_heads=2, index_head_dim=8)
# Longer rows than the trial's show what their layers do.
BLOCKS = {
    "MiniMaxM3VLForCausalLM has layers of type minimax_m3_sparse": MiniMaxM3VLTextConfig(
        **SMALL,
        **INDEX,
        layer_types=["minimax_m3_sparse"] * 2,
        **dict(num_local_experts=4, rotary_dim=8, dense_intermediate_size=48, shared_intermediate_size=48),
    ),
    "DeepseekV4ForCausalLM has layers of type heavily_compressed_attention": DeepseekV4Config(
        **SMALL | {"num_key_value_heads": 1},
        **INDEX,
        layer_types=["heavily_compressed_attention"] * 2,
        **dict(moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, num_hash_layers=0),
        **dict(q_lora_rank=16, o_groups=2, o_lora_rank=8, partial_rotary_factor=0.5),
    ),
}
# Each has something random in training mode that is no dropout of units.
NOISY = {
    "layers left out": OPTConfig(
        **dict(vocab_size=64, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=4),
        **dict(num_attention_heads=4, layerdrop=0.3, init_std=0.3),
    ),
    "routers that jitter": MixtralConfig(**SMALL, num_local_experts=4, router_jitter_noise=0.1, initializer_range=0.3),
    "experts by chance": PhimoeConfig(
        **{name: value for name, value in SMALL.items() if name != "head_dim"},
        num_local_experts=4,
        initializer_range=0.3,
    ),
}


def test_of_a_model_without_vectors_the_trial_takes_few_gradients():
    shape = {name: value for name, value in SMALL.items() if name != "head_dim"}
    model = build(OlmoConfig(**shape))
    slopes = check_padded(model, 0).slopes
    assert slopes and 2 * sum(slope.numel() for slope in slopes if slope is not None) < model.num_parameters()
    assert make_batcher(model, 0).packs


def loaded(config, folder, **options) -> PreTrainedModel:
    build(config).save_pretrained(folder)
    return load_model(SharedConfig(model_name_or_path=str(folder), **options), torch.device("cpu"))


def answering(length: int) -> EvaluateConfig:
    """The settings of an evaluation whose longest sequence has `length` tokens."""
    return EvaluateConfig(model_name_or_path="some/model", max_prompt_length=20, max_completion_length=length - 20)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("noise", NOISY)
def test_an_update_has_no_noise(noise, checkpointing, tmp_path):
    """Log-probs and gradients are those of the model in evaluation mode, as the sampler and the server have it."""
    model = loaded(NOISY[noise], tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected, _ = by_hand(plain, SEQUENCES, 1.0)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    if checkpointing:
        checkpoint_activations(model)
    for draw in range(3):
        torch.manual_seed(draw)
        model.zero_grad()
        logprobs, _ = token_logprobs(model, make_batcher(model, 0).make(SEQUENCES, "cpu"), 1.0)
        assert_rounded(logprobs, expected)
        (logprobs * weights).sum().backward()
        for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
            if its.grad is not None:
                assert_rounded(ours.grad, its.grad, GRADIENT)


def test_layers_recompute_where_a_backward_pass_follows_and_nowhere_else():
    model = build(CONFIGS["qwen2"])
    checkpoint_activations(model)
    batch = make_batcher(model, 0).make(SEQUENCES, "cpu")
    passes = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(1))
    logprobs, _ = token_logprobs(model, batch, 1.0)
    assert len(passes) == 1
    # Until the backward pass is over: layers within layers (Zamba2) give a wrong gradient if it changes in between.
    assert all(layer.training for layer in model.model.layers)
    logprobs.sum().backward()
    assert len(passes) == 2
    with torch.no_grad():
        token_logprobs(model, batch, 1.0)
    assert len(passes) == 3
    assert not any(part.training for part in model.modules())


def test_layers_that_are_others_while_they_recompute_are_refused():
    model = build(CONFIGS["llama"])
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda layer, _, output: output + layer.training)
    assert make_batcher(model, 0).packs
    checkpoint_activations(model)
    with pytest.raises(ConfigError, match="gradient_checkpointing=True: LlamaForCausalLM gives other log-probs "):
        make_batcher(model, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_looks_ahead_is_refused(dtype):
    model = build(LlamaConfig(**SMALL, initializer_range=0.6)).to(dtype)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ConfigError, match="when other tokens follow it .* it is no causal model: use another one"):
        make_batcher(model, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_not_leave_out_padding_is_not_sampled_from(dtype, tokenizer):
    torch.manual_seed(0)
    model = build(RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64)).to(dtype)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    assert not make_batcher(model, 0).packs  # a server may still score with it
    with pytest.raises(ConfigError, match="RwkvForCausalLM draws tokens with other log-probs .*: use another model"):
        make_sampler(model, tokenizer, 8)


@pytest.mark.parametrize("refused", BLOCKS)
def test_layers_that_draw_long_rows_from_other_keys_are_refused(refused, tokenizer):
    model = build(BLOCKS[refused])
    make_batcher(model, 0)  # a server may score with it
    with pytest.raises(ConfigError, match=f"^{refused}: in long rows a token is drawn .*: use another model$"):
        make_sampler(model, tokenizer, 8)


def test_a_model_that_cannot_draw_is_refused_with_what_it_said(tokenizer):
    layers = dict(layer_types=["linear_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=2)
    widths = dict(linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0)
    model = build(Qwen3NextConfig(**SMALL, **layers, **widths))
    refused = r"Qwen3NextForCausalLM cannot draw tokens \(ValueError: .*Attention layers.*\): use another model"
    with pytest.raises(ConfigError, match=refused):
        make_sampler(model, tokenizer, 8)


def test_a_model_whose_step_is_not_quite_its_pass_is_sampled_from_and_named(tokenizer, caplog):
    """As NemotronH, whose recurrent step of one token is not quite what it is in a pass over all."""
    model = build(CONFIGS["qwen2"])
    make_sampler(model, tokenizer, 8)
    assert not caplog.records
    model.model.layers[0].register_forward_hook(lambda layer, inputs, out: out * (1.003 if out.shape[1] == 1 else 1))
    make_sampler(model, tokenizer, 8)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Qwen2ForCausalLM draws tokens with other log-probs (by ")
    assert "importance_sampling_mode contain this difference" in line


@pytest.mark.parametrize("trial", ["packed", "sampled"])
def test_too_little_memory_says_nothing_about_the_model(trial, tokenizer, monkeypatch):
    """cuBLAS's lack of it, which is no torch.OutOfMemoryError: another program may just be loading on the card."""

    def no_room(*_):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    model = build(CONFIGS["qwen2"])
    packs = make_batcher(model, 0).packs
    monkeypatch.setitem(tree_attention.VARIANTS, "segments", no_room)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        if trial == "packed":
            make_batcher(model, 0)
        else:
            switch_on(model, "segments")
            make_sampler(model, tokenizer, 8, packs=packs)


def test_equal_log_probs_with_other_gradients_are_not_packed(caplog):
    """Doge's masks begin as ones: only the gradient of what makes them tells that a packed batch leaves them out."""
    caplog.set_level(logging.INFO, logger="grpo")
    model = build(DogeConfig(**SMALL, initializer_range=0.3))
    assert not make_batcher(model, 0).packs
    assert "DogeForCausalLM gives other gradients in packed batches" in caplog.text
    assert make_batcher(model.requires_grad_(False), 0).packs  # a server takes none


def test_positions_that_depend_on_a_batchs_longest_row_are_used_up_to_where_they_begin_to(tmp_path):
    small = SMALL | {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "initializer_range": 0.3}
    model = loaded(Phi3Config(**small, rope_parameters=LONGROPE), tmp_path)
    assert longest_sequence(model.config) == 32
    check_lengths(answering(32), model.config)
    refused = (
        r"^max_completion_length=13: .* 33 tokens, and some/model .* up to 32 \(original_max_position_embeddings\): "
    )
    with pytest.raises(ConfigError, match=f"{refused}lower one of them$"):
        check_lengths(answering(33), model.config)
    short, longest, beyond = ([5, 6, 7], [8, 9]), ([5, 6, 7], [8] * 29), ([5, 6, 7], [8] * 31)
    batcher = make_batcher(model, 0)
    with torch.no_grad():
        alone, _ = token_logprobs(model, batcher.make([short], "cpu"), 1.0)
        beside, _ = token_logprobs(model, batcher.make([short, longest], "cpu"), 1.0)
        moved, _ = token_logprobs(model, batcher.make([short, beyond], "cpu"), 1.0)
    assert_rounded(beside[:2], alone)
    assert (moved[:2] - alone).abs().max() > 1e-3


def test_an_indexed_attention_is_used_as_far_as_it_sees_everything():
    small = {name: value for name, value in SMALL.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    experts = dict(moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
    index = dict(index_topk=12, index_n_heads=2, index_head_dim=16, first_k_dense_replace=1, initializer_range=0.3)
    model = build(DeepseekV32Config(**small, **experts, **LATENT, **index))
    batcher = make_batcher(model, 0)
    assert longest_sequence(model.config) == 12
    with pytest.raises(ConfigError, match=r"up to 12 \(index_topk\): lower one of them"):
        check_lengths(answering(33), model.config)
    for short, long, same in ((8, 12, True), (20, 48, False)):
        ids = [*range(8, 8 + long)]
        with torch.no_grad():
            alone, _ = token_logprobs(model, batcher.make([(ids[:1], ids[1:short])], "cpu"), 1.0)
            longer, _ = token_logprobs(model, batcher.make([(ids[:1], ids[1:])], "cpu"), 1.0)
        if same:
            assert_rounded(longer[: len(alone)], alone)
        else:
            assert (longer[: len(alone)] - alone).abs().max() > 1e-3


def test_ranks_share_the_rows_of_no_model_whose_heads_or_batches_cannot_be_shared():
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=4)
    for ranks in (1, 2, 4, 8):
        check_shares(config, ranks)
    with pytest.raises(ConfigError, match="^sequence_parallel_size=3: the model has 8 attention heads and 4 key heads"):
        check_shares(config, 3)
    with pytest.raises(ConfigError, match="^sequence_parallel_size=2: the model takes pictures"):
        check_shares(Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"]), 2)
    with pytest.raises(ConfigError, match="^sequence_parallel_size=2: .* takes no packed batches: leave it out"):
        share_rows(Batcher(0, packs=False), build(LlamaConfig(**SMALL)), 2)

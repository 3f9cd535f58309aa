"""The start-up trials under rounding noise: attention's last bits change by chance, as between two kernels of a card.

Every sound model must pass, and every broken mask must be seen: 100 models each.
"""

import logging

import pytest
import torch
from cards import Cards
from models import CONFIGS, SMALL, build
from transformers import AttentionInterface, AttentionMaskInterface, Qwen2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.config.errors import ConfigError
from grpo.model import trial
from grpo.model.logprobs import Head
from grpo.model.tree_attention import VARIANTS, segments, switch_off, switch_on
from grpo.model.trial import check_padded, make_batcher, packed_differs
from grpo.sampling.self_check import make_sampler

DEEP = Qwen2Config(
    **SMALL | dict(hidden_size=64, intermediate_size=128, num_hidden_layers=16, head_dim=16, vocab_size=128),
    initializer_range=0.2,
)


class LastBits(torch.autograd.Function):
    """A bfloat16 tensor, each number by chance one last bit larger or smaller; its gradient too."""

    @staticmethod
    def forward(ctx, numbers):
        return changed(numbers)

    @staticmethod
    def backward(ctx, gradient):
        return changed(gradient)


def changed(numbers: torch.Tensor) -> torch.Tensor:
    bits = torch.randint(-1, 2, numbers.shape, dtype=torch.int16) * (numbers != 0)
    return (numbers.contiguous().view(torch.int16) + bits).view(torch.bfloat16)


def noisy_attention(*arguments, **options):
    out, weights = sdpa_attention_forward(*arguments, **options)
    return LastBits.apply(out), weights


def noisy_model(seed: int) -> torch.nn.Module:
    AttentionInterface.register("noisy", noisy_attention)
    AttentionMaskInterface.register("noisy", sdpa_mask)
    model = build(DEEP, seed).to(torch.bfloat16)
    model.set_attn_implementation("noisy")
    return model


def noisy_segments(*arguments) -> torch.Tensor:
    return LastBits.apply(segments(*arguments))


def masked(seen_by):
    """Attention over a packed row, of one mask: `seen_by` gets what each token sees when all is well and its parts."""

    def attend(query, key, value, tree, scoring):
        lengths = torch.tensor(tree.segments)
        segment = torch.arange(len(lengths)).repeat_interleave(lengths)
        counts = torch.tensor([1 + len(completions) for _, completions in tree.groups])
        group = torch.arange(len(counts)).repeat_interleave(counts)[segment]
        prompt = torch.cat([torch.arange(count) == 0 for count in counts])[segment]
        place = torch.arange(len(segment))
        parts = dict(
            itself=segment[:, None] == segment,
            group=group[:, None] == group,
            prompt=prompt.expand(len(segment), -1),
            back=place[:, None] - place,
        )
        mask = seen_by(**parts)[None, None]
        options = dict(attn_mask=mask, scale=scoring.scaling, enable_gqa=True)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        return LastBits.apply(out.transpose(1, 2))

    return attend


SOUND = masked(lambda itself, group, prompt, back: (itself | group & prompt) & (back >= 0))
BROKEN = {
    "completions see those before them": masked(lambda itself, group, prompt, back: group & (back >= 0)),
    "groups see the prompts before them": masked(lambda itself, group, prompt, back: (itself | prompt) & (back >= 0)),
    "completions do not see their prompt": masked(lambda itself, group, prompt, back: itself & (back >= 0)),
    "a token sees the next": masked(lambda itself, group, prompt, back: (itself | group & prompt) & (back >= -1)),
}


def without_slopes(query, key, value, *rest) -> torch.Tensor:
    """The right log-probs, and no gradient through what is attended to."""
    return noisy_segments(query, key.detach(), value.detach(), *rest)


def counting_on(model: torch.nn.Module) -> None:
    """Let positions count through a packed row, as if it were one sequence."""
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, torch.arange(x.shape[1], device=x.device).unsqueeze(0))


def reason(model, padded, variant, monkeypatch) -> str | None:
    monkeypatch.setitem(VARIANTS, "segments", variant)
    switch_on(model, "segments")
    try:
        return packed_differs(model, padded)
    finally:
        switch_off(model)


@pytest.mark.slow
def test_sound_models_pass_every_trial_whatever_rounding_does(few, monkeypatch, tokenizer):
    monkeypatch.setitem(VARIANTS, "segments", noisy_segments)
    for seed in few(range(100), 6):
        model = noisy_model(seed)
        Head.check(model)
        assert make_batcher(model, 0).packs, seed
        make_sampler(model, tokenizer, 8)


@pytest.mark.slow
def test_broken_masks_and_positions_are_seen_whatever_rounding_does(few, monkeypatch):
    for seed in few(range(100), 6):
        model = noisy_model(seed)
        padded = check_padded(model, 0)
        assert reason(model, padded, SOUND, monkeypatch) is None, seed
        for name, variant in BROKEN.items():
            found = reason(model, padded, variant, monkeypatch) or "nothing is wrong"
            assert found.startswith("gives other log-probs in packed batches"), (seed, name, found)
        found = reason(model, padded, without_slopes, monkeypatch) or "nothing is wrong"
        assert found.startswith("gives other gradients in packed batches"), (seed, found)
        counting_on(model)
        found = reason(model, padded, noisy_segments, monkeypatch) or "nothing is wrong"
        assert found.startswith("gives other log-probs in packed batches"), (seed, found)


@pytest.mark.slow
def test_models_that_look_ahead_are_refused_whatever_rounding_does(few):
    for seed in few(range(100), 6):
        model = noisy_model(seed)
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        with pytest.raises(ConfigError, match="so it is no causal model: use another one"):
            check_padded(model, 0)


@pytest.mark.parametrize("noise", [False, True])
def test_a_model_that_changes_what_its_head_is_fed_with_is_refused(noise):
    model = noisy_model(0) if noise else build(DEEP)
    Head.check(model)
    model.lm_head.register_forward_pre_hook(lambda head, inputs: (inputs[0] * 1.5,))
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM does something to its logits"):
        Head.check(model)


def test_what_a_card_loses_is_a_warning(caplog):
    caplog.set_level(logging.INFO, logger="grpo")
    for device, level in (("cpu", "INFO"), ("meta:0", "WARNING")):
        caplog.clear()
        with Cards():
            counting_on(model := build(CONFIGS["qwen2"]).to(device))
            assert not make_batcher(model, 0).packs
        (record,) = [record for record in caplog.records if record.name == "grpo.model.trial"]
        assert "again: Qwen2ForCausalLM gives other log-probs in packed batches" in record.getMessage()
        assert record.levelname == level


def test_an_attention_that_does_not_run_is_named(caplog, monkeypatch):
    """As on a card whose torch has no varlen_attn, or another one."""
    caplog.set_level(logging.INFO, logger="grpo")
    monkeypatch.setattr(trial, "variants_for", lambda model: ["varlen", "segments"])
    assert make_batcher(build(CONFIGS["qwen2"]), 0).packs
    first, second = [record for record in caplog.records if record.name == "grpo.model.trial"]
    found = "attention over packed batches goes a slower way than varlen: Qwen2ForCausalLM takes no packed batch ("
    assert first.levelname == "WARNING" and first.getMessage().startswith(found)
    assert second.getMessage() == "log-probs in packed batches, each prompt once (segments)"

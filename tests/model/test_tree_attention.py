"""Which models are packed, that long segments and windows are right, and that nothing else of a model changes."""

import copy
import inspect
import logging

import pytest
import torch
from models import CONFIGS, PADDED, SHARP, SMALL, build, by_hand
from rounding import assert_rounded
from transformers import MistralConfig, Qwen2Config, Qwen2MoeConfig

from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.model.tree_attention import switch_on
from grpo.model.trial import make_batcher

WINDOWED = "mistral, sliding window", "gemma2, softcapped"
GROUPS = [([5, 6, 7] * 5, [8, 9] * 9), ([5, 6, 7] * 5, [10] * 7), ([1], [2, 3])]
PADDED_BECAUSE = {
    "falcon h1, multiplied": "FalconH1ForCausalLM has layers of type hybrid",
    "bloom, alibi": "BloomForCausalLM takes no packed batch (",
    "llama4, chunked": "Llama4ForCausalLM has layers of type chunked_attention",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_log_says_once_which_path_runs_and_why(name, caplog):
    caplog.set_level(logging.INFO, logger="grpo")
    batcher = make_batcher(build(CONFIGS[name]), 0)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "grpo.model.trial"]
    if name in PADDED_BECAUSE:
        assert line.startswith("log-probs in padded batches, which ") and f"again: {PADDED_BECAUSE[name]}" in line
        assert not batcher.packs
    else:
        assert line == "log-probs in packed batches, each prompt once (segments)" and batcher.packs


@pytest.mark.parametrize(
    ("name", "window"),
    [("qwen2", None), *((name, window) for name in WINDOWED for window in (1, 8, 256, 300, 1024))],
)
def test_long_segments_are_cut_into_rows_without_a_seam(name, window):
    """Prompts and completions below, at and above the rows of one call and its window, values and gradients."""
    config = copy.deepcopy(CONFIGS[name])
    config.max_position_embeddings, config.sliding_window = 1024, window
    model = build(config)
    draw = torch.Generator().manual_seed(1)

    def ids(length):
        return torch.randint(0, 64, (length,), generator=draw).tolist()

    short, long = ids(3), ids(300)
    sequences = [(short, ids(257)), (short, ids(258)), (long, ids(600)), (long, ids(2)), (long, ids(300))]
    weights = torch.linspace(-1, 1, 257 + 258 + 600 + 2 + 300)
    results = []
    for batcher in (PADDED, make_batcher(model, 0)):
        batch = batcher.make(sequences, "cpu")
        assert (batch.tree is None) == (batcher is PADDED)
        model.zero_grad()
        logprobs, _ = token_logprobs(model, batch, 1.0)
        (logprobs * weights).sum().backward()
        results.append((logprobs.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])))
    (padded, its_gradient), (packed, own_gradient) = results
    assert_rounded(packed, padded)
    assert_rounded((own_gradient - its_gradient).norm() / its_gradient.norm(), 0.0)


def test_a_group_sees_what_the_window_shows():
    """By transformers' own masks, one sequence at a time; and the trial leaves the window as it was."""
    model = build(MistralConfig(**SMALL, sliding_window=12, initializer_range=0.3))
    batcher = make_batcher(model, 0)
    assert model.config.sliding_window == 12
    sequences = [([5, 6, 7, 8], [9] * length) for length in (8, 9, 30)]
    with torch.no_grad():
        batch = batcher.make(sequences, "cpu")
        assert batch.tree is not None
        expected = torch.cat([by_hand(model, [one], 1.0)[0] for one in sequences])
        assert_rounded(token_logprobs(model, batch, 1.0)[0], expected)
        model.config.sliding_window = 13
        assert (token_logprobs(model, batch, 1.0)[0] - expected).abs().max() > 1e-3


def test_a_model_that_keeps_its_window_from_the_attention_is_padded(caplog):
    caplog.set_level(logging.INFO, logger="grpo")
    windows = dict(use_sliding_window=True, sliding_window=4096, layer_types=["sliding_attention", "full_attention"])
    experts = dict(moe_intermediate_size=48, shared_expert_intermediate_size=48, num_experts=4)
    assert make_batcher(build(Qwen2Config(**SHARP, **windows)), 0).packs
    assert not make_batcher(build(Qwen2MoeConfig(**SHARP, **windows, **experts)), 0).packs
    assert "Qwen2MoeForCausalLM gives other log-probs in packed batches" in caplog.text


@pytest.mark.parametrize("name", ["qwen2", "gemma2, softcapped"])
def test_a_model_generates_and_saves_as_before(name, tmp_path):
    model = build(CONFIGS[name])
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    settings = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        before, logits = model.generate(ids, **settings), model(ids, attention_mask=mask).logits
        described = model.config.to_dict()
        switch_on(model, "segments")
        assert torch.equal(model.generate(ids, **settings), before)
        assert torch.equal(model(ids, attention_mask=mask).logits, logits)
    assert model.config.to_dict() == described
    model.save_pretrained(tmp_path)
    assert "grpo_packed" not in (tmp_path / "config.json").read_text()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", ["varlen", "segments"])
@pytest.mark.parametrize("name", ["qwen2", "mistral, sliding window"])
def test_the_variants_agree_on_a_gpu(name, variant):
    """In bfloat16 as close to padded batches as those are to float32, log-probs and gradients, up to three times."""
    model = build(CONFIGS[name]).to("cuda")
    # The long group's masks are cut at odd places.
    long = [5, 6, 7] * 41
    sequences = [*GROUPS, (long, [8] * 99), (long, [9] * 70)]

    def results(batcher) -> list[torch.Tensor]:
        model.zero_grad()
        logprobs, _ = token_logprobs(model, batcher.make(sequences, "cuda"), 1.0)
        (logprobs * torch.linspace(-1, 2, len(logprobs), device="cuda")).sum().backward()
        return [logprobs.detach(), torch.cat([weight.grad.float().flatten() for weight in model.parameters()])]

    exact = results(PADDED)
    model.to(torch.bfloat16)
    padded = results(PADDED)
    switch_on(model, variant)
    packed = results(Batcher(0, packs=True))
    for right, rounded, ours in zip(exact, padded, packed, strict=True):
        assert (ours - right).norm() <= 3 * (rounded - right).norm()


def plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=None):
    """What flash attention computes, a segment at a time in float64. [tokens, heads, d] each."""
    repeat = query.shape[1] // key.shape[1]
    assert window_size in ((-1, 0), (7, 0)) and enable_gqa in (None, repeat > 1)  # torch 2.11 is not told
    key, value = (states.repeat_interleave(repeat, dim=1) for states in (key, value))
    outputs = []
    for place in range(len(cu_seq_q) - 1):
        queries = query[cu_seq_q[place] : cu_seq_q[place + 1]].double()
        keys, values = (states[cu_seq_k[place] : cu_seq_k[place + 1]].double() for states in (key, value))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
        if window_size[0] >= 0:
            seen = seen.triu(len(keys) - len(queries) - window_size[0])
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs).to(query.dtype)


@pytest.mark.parametrize("name", ["qwen2", "gpt2, learned positions", "mistral, sliding window"])
def test_what_varlen_is_given_is_what_segments_compute(name, monkeypatch):
    """The kernel itself needs a card; the order of keys, the lengths and the grouped heads do not."""
    windows = set()

    def noted(*arguments, **options):
        windows.add(options["window_size"])
        return plain_varlen(*arguments, **options)

    noted.__signature__ = inspect.signature(plain_varlen)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", noted)
    model = build(CONFIGS[name])
    batch = Batcher(0, packs=True).make(GROUPS, "cpu")
    logprobs = {}
    for variant in ("segments", "varlen"):
        switch_on(model, variant)
        logprobs[variant], _ = token_logprobs(model, batch, 1.0)
    assert_rounded(logprobs["varlen"], logprobs["segments"])
    assert windows == {(7, 0) if "window" in name else (-1, 0)}

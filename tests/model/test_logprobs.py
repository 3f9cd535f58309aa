"""The log-probs against an independent float64 computation, over models whose heads differ."""

import pytest
import torch
from models import CONFIGS, PADDED, SEQUENCES, SMALL, build, by_hand
from rounding import GRADIENT, assert_rounded
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from grpo.config.errors import ConfigError
from grpo.model import activations
from grpo.model import logprobs as module
from grpo.model import tree_attention as attention
from grpo.model.activations import checkpoint_activations, tile_mlps
from grpo.model.logprobs import Head, likeliest_tokens, token_logprobs
from grpo.model.memory import LiveTensors
from grpo.model.trial import make_batcher

BLOCKWISE = "qwen2", "gemma2, softcapped", "gpt2, learned positions", "gpt-neox, partial rotation"
EXPERTS = Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=16)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_both_paths_equal_float64_log_softmax(config, temperature):
    model = build(config)
    expected, entropies = by_hand(model, SEQUENCES, temperature)
    for batcher in (PADDED, make_batcher(model, 0)):
        with torch.no_grad():
            batch = batcher.make(SEQUENCES, "cpu")
            logprobs, entropy = token_logprobs(model, batch, temperature, with_entropy=True)
        assert logprobs.dtype == torch.float32
        assert_rounded(logprobs, expected)
        assert_rounded(entropy, entropies)


@pytest.mark.parametrize("rows", [3, 300])  # a CPU multiplies few rows in another way
def test_all_logits_are_fp32_however_large_the_vocabulary(rows):
    torch.manual_seed(0)
    hidden, bias = torch.randn(rows, 32).bfloat16(), torch.randn(10_000).bfloat16()
    weight = torch.randn(10_000, 32).bfloat16()
    head = Head(weight=weight, bias=bias, scale=0.5, softcap=20.0, temperature=0.7)
    exact = torch.tanh((hidden.double() @ weight.double().t() + bias.double()) * 0.5 / 20.0) * 20.0 / 0.7
    logits = head.all_logits(hidden)
    assert logits.dtype == torch.float32
    assert_rounded(logits, exact)
    blocks = head.logits_in_blocks(hidden)
    assert torch.equal(torch.cat(list(blocks), dim=1)[:, :10_000], logits)
    assert (blocks[-1, :, 10_000 % blocks.shape[2] :] == -torch.inf).all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("of_logprobs", [True, False], ids=["both", "entropy alone"])
def test_log_probs_and_entropies_have_the_gradients_of_float64(config, of_logprobs):
    """A weighted sum of both, through blocks smaller than the vocabulary, against autograd over all logits."""
    model = build(config)
    draw = torch.Generator().manual_seed(3)
    count = sum(len(completion) for _, completion in SEQUENCES)
    weights = torch.randn(2, count, generator=draw) * torch.tensor([[float(of_logprobs)], [1.0]])

    def gradients(logprobs, entropies) -> list[torch.Tensor]:
        model.zero_grad()
        (weights[0] * logprobs * of_logprobs + weights[1] * entropies).sum().backward()
        return [torch.zeros(1) if one.grad is None else one.grad.clone() for one in model.parameters()]

    expected = gradients(*by_hand(model, SEQUENCES, 0.7))
    batch = make_batcher(model, 0).make(SEQUENCES, "cpu")
    logprobs, entropy = token_logprobs(model, batch, 0.7, with_entropy=True)
    ours = gradients(logprobs if of_logprobs else logprobs.detach(), entropy)
    scale = max(one.abs().max() for one in expected)
    for one, other in zip(ours, expected, strict=True):
        assert_rounded(one, other, GRADIENT, least=scale.item())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_head_check_passes_for_heads_it_knows(config):
    Head.check(build(config))


def test_the_head_check_refuses_a_head_it_does_not_know():
    model = build(CONFIGS["llama"])
    plain = model.forward

    def sharpened(*arguments, **options):
        output = plain(*arguments, **options)
        output.logits = output.logits * 1.5
        return output

    model.forward = sharpened
    with pytest.raises(ValueError, match="LlamaForCausalLM does something to its logits"):
        Head.check(model)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_both_paths_and_every_block_size_have_the_same_gradients(config, checkpointing, monkeypatch):
    model = build(config)
    weights = torch.linspace(-1, 1, sum(len(completion) for _, completion in SEQUENCES))

    def values_and_gradients(logprobs):
        model.zero_grad()
        (logprobs.float() * weights).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        return logprobs.detach(), gradients

    expected, expected_gradients = values_and_gradients(by_hand(model, SEQUENCES, 0.8)[0])
    batchers = {"padded": PADDED, "packed": make_batcher(model, 0)}
    if checkpointing:
        checkpoint_activations(model)
    for block, rows in (((1, 7), 256), ((4, 64), 2), ((1024, 4096), 12)):
        monkeypatch.setattr(module, "CPU_BLOCK", block)
        monkeypatch.setattr(attention, "ROWS", rows)  # groups in one call, in calls of two rows, some of them in one
        for path, batcher in batchers.items():
            batch = batcher.make(SEQUENCES, "cpu")
            values, gradients = values_and_gradients(token_logprobs(model, batch, 0.8)[0])
            assert_rounded(values, expected)
            for name, gradient in gradients.items():
                assert_rounded(gradient, expected_gradients[name], GRADIENT, about=(path, block, name))


@pytest.mark.parametrize("config", [CONFIGS[name] for name in BLOCKWISE], ids=BLOCKWISE)
def test_blocks_of_mlps_and_activations_in_the_machines_memory_change_no_gradient(config, monkeypatch):
    monkeypatch.setattr(activations, "MLP_BLOCK", 5)
    model, gradients = build(config), []
    for changes in (False, True):
        if changes:
            checkpoint_activations(model, offload=True)
            tile_mlps(model)
        for batcher in (PADDED, make_batcher(model, 0)):
            model.zero_grad()
            token_logprobs(model, batcher.make(SEQUENCES, "cpu"), 0.8)[0].sum().backward()
            gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for before, after in zip(gradients[:2], gradients[2:], strict=True):
        for name, gradient in after.items():
            assert_rounded(gradient, before[name], GRADIENT, about=name)


def test_blocks_may_change_the_width(monkeypatch):
    monkeypatch.setattr(activations, "MLP_BLOCK", 5)
    mlp, states = torch.nn.Linear(8, 3), torch.randn(3, 4, 8)
    expected = mlp(states)
    tile_mlps(torch.nn.ModuleDict({"merger": torch.nn.ModuleDict({"mlp": mlp})}))
    torch.testing.assert_close(mlp(states), expected)


def test_experts_are_computed_whole():
    with pytest.raises(ConfigError, match="tiled_mlp=True: Qwen3MoeForCausalLM has experts, or"):
        tile_mlps(AutoModelForCausalLM.from_config(EXPERTS))


def test_an_mlp_that_takes_more_than_tokens_is_not_tiled():
    with pytest.raises(ConfigError, match="tiled_mlp=True: BloomForCausalLM has .* that takes tokens alone: leave it"):
        tile_mlps(build(CONFIGS["bloom, alibi"]))


def test_bfloat16_weights_still_give_float32_logits():
    model = build(CONFIGS["llama"]).to(torch.bfloat16)
    batch = PADDED.make(SEQUENCES, "cpu")
    hidden = model.base_model(input_ids=batch.input_ids).last_hidden_state.flatten(0, 1)[batch.predicts].detach()
    rows = torch.log_softmax(hidden.double() @ model.lm_head.weight.double().t(), -1)
    exact = rows.gather(-1, batch.targets[:, None]).squeeze(-1)
    logprobs, _ = token_logprobs(model, batch, 1.0)
    assert_rounded(logprobs, exact)
    rounded = torch.log_softmax((hidden @ model.lm_head.weight.t()).double(), -1).gather(-1, batch.targets[:, None])
    assert (rounded.squeeze(-1) - exact).abs().max() > 1e-3  # what rounding the logits would cost

    logprobs.sum().backward()
    gradient = model.lm_head.weight.grad.double()
    probabilities = rows.exp()
    slope = torch.nn.functional.one_hot(batch.targets, 64).double() - probabilities
    expected = slope.t() @ hidden.double()
    assert (gradient - expected).norm() / expected.norm() < 0.01  # bfloat16 gradients


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_gradients_leave_out_only_blocks_with_next_to_no_probability(dtype, bound, monkeypatch):
    monkeypatch.setattr(module, "CPU_BLOCK", (4, 8))  # blocks of tokens and of the vocabulary
    draw = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(7, 16, generator=draw), torch.randn(40, 16, generator=draw) / 10
    hidden[:, 0], weight[:, 0] = 1, torch.tensor([0.0, -3.0, -6.0, -20.0, -40.0]).repeat_interleave(8)
    hidden, weight = (values.to(dtype).requires_grad_() for values in (hidden, weight))
    targets, upstream = torch.tensor([1, 9, 20, 0, 39, 7, 15]), torch.randn(7, generator=draw)
    head = Head(weight=weight, bias=None, scale=1.0, softcap=None, temperature=1.0)
    logprobs, _ = module._Logprobs.apply(hidden, weight, None, targets, head, False)
    (logprobs * upstream).sum().backward()

    exact = [values.detach().double().requires_grad_() for values in (hidden, weight)]
    of_targets = torch.log_softmax(exact[0] @ exact[1].t(), -1).gather(1, targets.unsqueeze(1))[:, 0]
    (of_targets * upstream.double()).sum().backward()
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert (ours.grad - theirs.grad).abs().max() < bound * theirs.grad.abs().max()
    assert exact[1].grad[24:32].abs().min() > 0 and not weight.grad[24:32].any()  # e^-20 of the probability
    assert weight.grad[39].any()  # a target, however improbable


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("top_k, known_ids", [(1, 64), (7, 50), (20, 64), (16, 16)])
def test_the_likeliest_tokens_are_those_of_float64(name, top_k, known_ids, monkeypatch):
    monkeypatch.setattr(module, "CPU_BLOCK", (4, 11))  # the last block of the vocabulary is smaller than top_k
    model, temperature = build(CONFIGS[name]), 0.7
    batch = PADDED.make(SEQUENCES, "cpu")
    table = likeliest_tokens(model, batch, temperature, top_k, known_ids)
    with torch.no_grad():
        logits = model.double()(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.predicts]
    exact = torch.log_softmax(logits / temperature, -1)
    expected = exact[:, :known_ids].topk(top_k)
    assert table.dtype == torch.float32 and table.shape == (len(exact), 1 + 2 * top_k)
    assert_rounded(table[:, 0], exact.gather(1, batch.targets[:, None])[:, 0])
    assert_rounded(table[:, 1 : 1 + top_k], expected.values)
    assert table[:, 1 + top_k :].tolist() == expected.indices.tolist()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_other_tokens_of_a_position_have_the_log_probs_and_gradients_of_float64(with_entropy, monkeypatch):
    monkeypatch.setattr(module, "CPU_BLOCK", (4, 8))
    draw = torch.Generator().manual_seed(6)
    hidden, weight = torch.randn(7, 16, generator=draw), torch.randn(40, 16, generator=draw)
    targets = torch.randint(40, (7, 5), generator=draw)
    targets[0] = 3  # a token may be named several times
    upstream, of_entropy = torch.randn(7, 5, generator=draw), torch.randn(7, generator=draw) * with_entropy
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    head = Head(weight=weight, bias=None, scale=1.0, softcap=9.0, temperature=0.8)
    logprobs, entropies = module._Logprobs.apply(hidden, weight, None, targets, head, with_entropy)
    ((logprobs * upstream).sum() + (of_entropy @ entropies if with_entropy else 0)).backward()

    exact = [values.detach().double().requires_grad_() for values in (hidden, weight)]
    rows = torch.log_softmax(9.0 * torch.tanh(exact[0] @ exact[1].t() / 9.0) / 0.8, -1)
    assert_rounded(logprobs, rows.gather(1, targets))
    entropy = -(rows.exp() * rows).sum(1)
    ((rows.gather(1, targets) * upstream).sum() + of_entropy.double() @ entropy).backward()
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert_rounded(ours.grad, theirs.grad, GRADIENT)


@pytest.mark.parametrize("with_entropy, blocks, at_most", [(False, 1, 2.4), (True, 2, 2.9)])
def test_a_card_holds_few_blocks_of_logits_at_once(with_entropy, blocks, at_most):
    """Qwen2.5's head in bfloat16 on device meta, which takes the way of a card and knows its sizes."""
    weight = torch.empty(151_936, 2048, dtype=torch.bfloat16, device="meta", requires_grad=True)
    hidden = torch.empty(10_000, 2048, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(10_000, dtype=torch.int64, device="meta")
    rows, vocabulary = module.CUDA_BLOCK
    block = 4 * rows * vocabulary
    head = Head(weight=weight, bias=None, scale=1.0, softcap=None, temperature=0.9)
    known = torch.nn.ParameterList([weight, hidden])
    with LiveTensors(known) as forward:
        logprobs, entropy = module._Logprobs.apply(hidden, weight, None, targets, head, with_entropy)
    assert forward.most <= (blocks + 0.1) * block
    # Backward: logits, their gradient, that in bfloat16, and what is given back: weight's, hidden's in fp32 and bf16.
    given = 2 * weight.numel() + (4 + 2) * hidden.numel()
    with LiveTensors(known) as backward:
        (logprobs.sum() + (entropy.sum() if with_entropy else 0)).backward()
    assert backward.most <= given + at_most * block

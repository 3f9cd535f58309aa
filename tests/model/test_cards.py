"""A model over two cards: what is on one of them is never computed with what is on the other."""

import pytest
import torch
from cards import Cards, OnCard
from models import CONFIGS, SEQUENCES, SMALL, build
from rounding import GRADIENT, assert_rounded
from transformers import MixtralConfig

from grpo.model.logprobs import Head, token_logprobs, with_router_logits
from grpo.model.packing import Batcher, Tree
from grpo.model.tree_attention import switch_on
from grpo.model.trial import make_batcher

MODELS = {
    "qwen2": CONFIGS["qwen2"],
    "gemma2, tied head": CONFIGS["gemma2, softcapped"],
    "experts": MixtralConfig(**SMALL, num_local_experts=4, initializer_range=0.3, experts_implementation="eager"),
}


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """As `device_map` does: the first layer on one card, the second and the head on the other."""
    accelerate = pytest.importorskip("accelerate")
    places = {"embed_tokens": 0, "rotary_emb": 0, "layers.0": 0, "layers.1": 1, "norm": 1}
    places = {f"model.{name}": f"meta:{card}" for name, card in places.items()}
    places["lm_head"] = "meta:0" if model.config.tie_word_embeddings else "meta:1"
    return accelerate.dispatch_model(model, places, main_device="meta:0")


def test_the_two_cards_of_these_tests_refuse_what_cuda_refuses():
    with Cards() as cards:
        rows, place = torch.arange(6.0).view(3, 2).to("meta:0"), torch.tensor([2, 0]).to("meta:1")
        assert cards.copied == 3 * 2 * 4 + 2 * 8
        with pytest.raises(RuntimeError, match="index.Tensor of tensors on meta:0, meta:1"):
            rows[place]
        with pytest.raises(RuntimeError, match="add.Tensor of tensors on cpu, meta:0"):
            rows + torch.ones(2)
        assert rows[place.to("meta:0")].cpu().tolist() == [[4.0, 5.0], [0.0, 1.0]]
        assert (rows * torch.tensor(2.0)).device == torch.device("meta:0")


@pytest.mark.parametrize("way", ["packed", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_over_two_cards_scores_and_learns_as_on_one(name, way):
    sequences = [(prompt, completion[:3]) for prompt, completion in SEQUENCES]  # within the window
    of_one = build(MODELS[name])
    count = sum(len(completion) for _, completion in sequences)
    weights = torch.linspace(-1, 1, count)
    batcher = make_batcher(of_one, 0) if way == "packed" else Batcher(0, 0)
    expected, _ = token_logprobs(of_one, batcher.make(sequences, "cpu"), 0.7)
    (expected * weights).sum().backward()
    with Cards():
        model = spread(build(MODELS[name]))
        Head.check(model)
        batcher = make_batcher(model, 0) if way == "packed" else Batcher(0, 0)
        assert batcher.packs == (way == "packed")
        batch = batcher.make(sequences, model.device)
        logprobs, _ = token_logprobs(model, batch, 0.7)
        (logprobs * weights.to(logprobs.device)).sum().backward()
        assert {str(weight.device) for weight in model.parameters()} == {"meta:0", "meta:1"}
        assert_rounded(logprobs, expected)
        for ours, its in zip(model.parameters(), of_one.parameters(), strict=True):
            assert isinstance(ours.grad, OnCard) and ours.grad.device == ours.device
            assert_rounded(ours.grad, its.grad, GRADIENT)


def test_routers_on_two_cards_are_read_together():
    of_one = build(MODELS["experts"])
    *_, expected = with_router_logits(of_one, Batcher(0, 0).make(SEQUENCES, "cpu"), 1.0)
    with Cards(), torch.no_grad():
        model = spread(build(MODELS["experts"]))
        *_, routers = with_router_logits(model, Batcher(0, 0).make(SEQUENCES, model.device), 1.0)
        torch.testing.assert_close(routers.cpu(), expected.detach())


def test_a_batch_on_a_card_brings_nothing_along_from_the_cpu():
    """A mask is made on the card, from the lengths of its segments; what a tree holds is there once for all layers."""
    sequences = [([5] * 21, [6] * 22), ([5] * 21, [7] * 23)]
    with Cards() as cards, torch.no_grad():
        model = build(MODELS["qwen2"]).to("meta:0")
        switch_on(model, "segments")
        batch = Batcher(0, packs=True).make(sequences, "meta:0")
        before = cards.copied
        token_logprobs(model, batch, 1.0)
        assert cards.copied - before <= 3 * 8  # three segments, int64; the mask has 64 x 64 numbers
        tree = Tree([(2, [2, 1]), (1, [])], [None, None])
        ends = [tree.ends(torch.device(f"meta:{card}")) for card in (0, 1, 0, 1)]
        assert ends[2] is ends[0] and ends[3] is ends[1]
        assert {str(tensor.device) for tensor in ends[1]} == {"meta:1"}
        assert [tensor.cpu().tolist() for tensor in ends[0]] == [[0, 2, 4, 5, 6], [0, 2, 6, 9, 10]]

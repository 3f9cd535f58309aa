"""A model over two cards: what is on one of them is never computed with what is on the other."""

import pytest
import torch
from cards import Cards, OnCard
from test_logprobs import CONFIGS, SEQUENCES, SMALL, build
from transformers import MixtralConfig

from grpo.batch import Batcher
from grpo.logprobs import Head, token_logprobs, with_router_logits
from grpo.model import make_batcher

MODELS = {
    "qwen2": CONFIGS["qwen2"],
    "gemma2, tied head": CONFIGS["gemma2, softcapped"],
    "experts": MixtralConfig(**SMALL, num_local_experts=4, initializer_range=0.3, experts_implementation="eager"),
}


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """The model as `device_map` spreads it: the first layer on one card, the second and the head on the other."""
    accelerate = pytest.importorskip("accelerate")
    tied = model.config.tie_word_embeddings
    places = {"embed_tokens": 0, "rotary_emb": 0, "layers.0": 0, "layers.1": 1, "norm": 1}
    places = {f"model.{name}": f"meta:{card}" for name, card in places.items()} | {"lm_head": f"meta:{int(not tied)}"}
    return accelerate.dispatch_model(model, places, main_device="meta:0")


def test_the_two_cards_of_these_tests_refuse_what_cuda_refuses():
    with Cards() as cards:
        rows, place = torch.arange(6.0).view(3, 2).to("meta:0"), torch.tensor([2, 0]).to("meta:1")
        assert cards.copies == 2
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
        assert (batcher.longest_packed > 0) == (way == "packed")
        batch = batcher.make(sequences, model.device)
        logprobs, _ = token_logprobs(model, batch, 0.7)
        (logprobs * weights.to(logprobs.device)).sum().backward()
        assert {str(weight.device) for weight in model.parameters()} == {"meta:0", "meta:1"}
        torch.testing.assert_close(logprobs.cpu(), expected, atol=1e-4, rtol=0)
        for ours, its in zip(model.parameters(), of_one.parameters(), strict=True):
            assert isinstance(ours.grad, OnCard) and ours.grad.device == ours.device
            assert (ours.grad.cpu() - its.grad).norm() <= 1e-4 * its.grad.norm() + 1e-6


def test_routers_on_two_cards_are_read_together():
    of_one = build(MODELS["experts"])
    *_, expected = with_router_logits(of_one, Batcher(0, 0).make(SEQUENCES, "cpu"), 1.0)
    with Cards(), torch.no_grad():
        model = spread(build(MODELS["experts"]))
        *_, routers = with_router_logits(model, Batcher(0, 0).make(SEQUENCES, model.device), 1.0)
        torch.testing.assert_close(routers.cpu(), expected.detach())

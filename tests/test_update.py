"""The gradient of a step is that of the whole step's loss, whatever the number of ranks and the cut into micro-batches.

Held against a plain PyTorch computation that shares no code with ours: one unpadded sequence at a time, all logits,
log_softmax, the paper's formula.
"""

import json

import pytest
import torch
from step_worker import sequences
from transformers import AutoModelForCausalLM

TEMPERATURE = 0.8


def plain(folder, beta) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients of mean over sequences of the mean over tokens of -A + beta k3 (ratio 1), in float64; and metrics."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    every = sequences()
    loss, kls, entropies = torch.zeros((), dtype=torch.float64), [], []
    for one in every:
        if not one.completion_ids:
            continue
        ids = torch.tensor([one.prompt_ids + one.completion_ids])
        rows = torch.log_softmax(model(input_ids=ids).logits[0, len(one.prompt_ids) - 1 : -1] / TEMPERATURE, -1)
        logp = rows[range(len(one.completion_ids)), one.completion_ids]
        difference = torch.from_numpy(one.ref_logprobs()).double() - logp
        kl = difference.exp() - difference - 1
        ratio = (logp - logp.detach()).exp()
        loss = loss + (-ratio * one.advantage + beta * kl).mean() / len(every)
        kls += kl.tolist()
        entropies += (-(rows.exp() * rows).sum(-1)).tolist()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    metrics = {"loss": loss.item(), "entropy": sum(entropies) / len(entropies)}
    return gradients, metrics | ({"kl": sum(kls) / len(kls)} if beta else {})


def distance(one, other) -> float:
    """Relative distance over all parameters together."""
    difference = sum(((one[name].double() - other[name].double()) ** 2).sum() for name in other)
    return (difference / sum((other[name].double() ** 2).sum() for name in other)).sqrt().item()


CUTS = {
    "one rank, one batch": ("24", 10**6, "0.3", "no"),
    "one rank, every sequence alone": ("24", 1, "0.3", "no"),
    "one rank, 100 tokens, checkpointed": ("24", 100, "0.3", "yes"),
    "two ranks, equal": ("12,12", 200, "0.3", "no"),
    # Rank 0 has one micro-batch (of an empty completion only), rank 1 has 23.
    "two ranks, very unequal": ("1,23", 1, "0.3", "no"),
    "two ranks, no KL": ("12,12", 150, "0", "no"),
}


FAST = "two ranks, very unequal"
CASES = [pytest.param(*cut, id=name, marks=[] if name == FAST else pytest.mark.slow) for name, cut in CUTS.items()]


@pytest.mark.parametrize("shares, budget, beta, checkpointing", CASES)
def test_the_gradient_does_not_depend_on_the_cut(launch, model_folder, tmp_path, shares, budget, beta, checkpointing):
    expected, metrics = plain(model_folder, float(beta))
    out = tmp_path / "step.pt"
    ranks = len(shares.split(","))
    ended = launch(
        ranks, "tests/step_worker.py", str(model_folder), str(out), str(budget), beta, checkpointing, shares, "0"
    )
    assert ended.returncode == 0, ended.stdout
    gradients = torch.load(out)
    assert distance(gradients, expected) < 1e-5
    said = json.loads(out.with_suffix(".json").read_text())
    assert said["norm"] == pytest.approx(sum((g**2).sum().item() for g in expected.values()) ** 0.5, rel=1e-4)
    assert said["loss"][1] == pytest.approx(metrics["loss"], rel=1e-5)
    tokens = sum(len(one.completion_ids) for one in sequences())
    for name in metrics.keys() - {"loss"}:
        assert said[name][0] == tokens
        assert said[name][1] / tokens == pytest.approx(metrics[name], rel=1e-5)


@pytest.mark.slow
def test_a_gradient_beyond_max_grad_norm_is_scaled_down_to_it(launch, model_folder, tmp_path):
    expected, _ = plain(model_folder, beta=0.3)
    norm = sum((gradient**2).sum().item() for gradient in expected.values()) ** 0.5
    out = tmp_path / "step.pt"
    limit = str(norm / 4)
    ended = launch(2, "tests/step_worker.py", str(model_folder), str(out), "200", "0.3", "no", "12,12", limit)
    assert ended.returncode == 0, ended.stdout
    assert distance(torch.load(out), {name: gradient / 4 for name, gradient in expected.items()}) < 1e-4
    assert json.loads(out.with_suffix(".json").read_text())["norm"] == pytest.approx(norm, rel=1e-4)  # before clipping

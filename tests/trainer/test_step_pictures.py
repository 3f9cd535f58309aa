"""The gradient of a step of a vision-language model, its vision tower trained, frozen or under an adapter.

Held against plain transformers in float64 (picture_oracle.py), one unpadded sequence at a time. Some prompts have
pictures, one or two, of different sizes, and others have none. ZeRO-2's buckets are so small that each backward pass
fills many of them: the sums are wrong as soon as two ranks fill them with other parameters or in another order.
"""

import json
import random

import picture_oracle
import pictured
import pytest
import torch
from models import distance
from rounding import assert_rounded
from sharded import ON_CARDS, in_layers
from step_worker import GENERATIONS, PICTURES, pictured_text, sequences
from test_step import BETA, COUNT, Plain, norm, run

from grpo.config.loss_settings import LossSection
from grpo.data.records import Sample

PICTURED = [number for number in range(COUNT) if number // GENERATIONS in PICTURES]
TEXT = [number for number in range(COUNT) if number not in PICTURED]
RANDOM = random.Random(3).sample(range(COUNT), COUNT)
# Orders of samples; of two ranks the second begins with the first sample after so many.
CASES = {
    "any cut": (RANDOM, 20, 60),
    "pictures on one rank alone": (PICTURED + TEXT, len(PICTURED), 150),
    "every sequence alone": (TEXT[5:] + PICTURED + TEXT[:5], 7, 1),
    "all at once": (RANDOM[::-1], 4, 10**6),
    "text alone": (TEXT, 9, 60),
    "pictures again": (PICTURED, 4, 60),
}


class PlainPictures(Plain):
    def __init__(self, folder):
        self.oracle = picture_oracle.Plain(folder)
        self.model = self.oracle.model
        self.rows = [self.row(self.logits(*pair), pair[1].completion_ids) for pair in enumerate(sequences())]

    def logits(self, number: int, sample: Sample) -> torch.Tensor:
        oracle, prompt, pictures = self.oracle, [id + 40 for id in sample.prompt_ids], []
        if (place := number // GENERATIONS) in PICTURES:
            text, pictures = pictured_text(place, oracle.tokenizer.convert_ids_to_tokens(oracle.picture_token))
            prompt = oracle.prompt(text, pictures) + prompt
        return oracle.logits(prompt, pictures, sample.completion_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pictured.save("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def plain(folder):
    return PlainPictures(folder)


def check(results: list[dict], plain: PlainPictures, kind: str = "trained") -> None:
    for (name, (order, *_)), result in zip(CASES.items(), results, strict=True):
        gradients, metrics = plain.step(LossSection(beta=BETA), None, False, of=order)
        if kind == "frozen":
            gradients = {weight: gradient for weight, gradient in gradients.items() if "visual" not in weight}
        elif kind == "LoRA":
            gradients = {weight: of_adapter(weight, result["before"], gradients) for weight in result["before"]}
        assert_rounded(distance(result["gradient"], gradients), 0.0, about=name)
        assert_rounded(result["norm"], norm(gradients), about=name)
        assert_rounded(result["stats"]["loss"][1], metrics["loss"], about=name)
        of_tower = norm({weight: slope for weight, slope in gradients.items() if "visual" in weight})
        assert (of_tower > 0) == (kind != "frozen" and name != "text alone"), name


def of_adapter(weight: str, adapter: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the gradient of a new adapter's matrix, whose B is 0: the layer's weight is W + alpha / r B A."""
    layer, matrix = weight.split(".lora_")
    if matrix.startswith("A"):
        return torch.zeros_like(adapter[weight])
    return 32 / 16 * gradients[f"{layer}.weight"] @ adapter[f"{layer}.lora_A.default.weight"].double().T


def cases(ranks: int, tmp_path, offloaded: bool = False, **changes) -> list[dict]:
    buckets = tmp_path / "buckets.json"
    zero = {"stage": 2, "reduce_bucket_size": 3000} | ({"offload_optimizer": {"device": "cpu"}} if offloaded else {})
    buckets.write_text(json.dumps({"zero_optimization": zero}))
    made = []
    for order, of_first, budget in CASES.values():
        values = {"beta": BETA, "max_grad_norm": 0.0, "micro_batch_tokens": budget, "deepspeed": buckets, **changes}
        shares = [len(order)] if ranks == 1 else [of_first, len(order) - of_first]
        words = [f"--{name}={value}" for name, value in values.items()]
        made.append(dict(options=words, order=order, shares=shares, old=False, sampled=False, small_steps=[]))
    return made


KINDS = {
    "trained": {},
    "frozen": {"freeze_vision_tower": True},
    "LoRA": {"use_peft": True, "lora_target_modules": "all-linear"},
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shared_out", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_whole_step(folder, plain, tmp_path, kind, shared_out):
    engine = {"deepspeed": in_layers(ON_CARDS, tmp_path)} if shared_out else {}
    check(run(2, folder, tmp_path, cases(2, tmp_path, **engine, **KINDS[kind])), plain, kind)


@pytest.mark.slow
def test_so_it_is_with_recomputation_and_an_offloaded_optimizer(folder, plain, tmp_path):
    """DeepSpeed keeps the gradient of an offloaded parameter until it gets another."""
    results = run(1, folder, tmp_path, cases(1, tmp_path, offloaded=True, gradient_checkpointing=True))
    check(results, plain)

"""The vision tower is found in any family, and frozen: no gradient, no graph, no adapter in it."""

import pytest
import torch
from pictured import FAMILIES, build_model, build_tokenizer

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.model.lora import train_adapter
from grpo.model.vision_tower import freeze_vision_tower, vision_modules, vision_parameters
from grpo.trainer.setup import read_inputs


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, build_tokenizer(request.param)


def test_the_tower_and_its_projector_are_all_but_the_language_model(family):
    name, tokenizer = family
    model = build_model(name, tokenizer)
    expected = {
        "gemma3": ["model.vision_tower", "model.multi_modal_projector"],
        "llava": ["model.vision_tower", "model.multi_modal_projector"],
        "llava_onevision": ["model.vision_tower", "model.multi_modal_projector"],
        "idefics3": ["model.vision_model", "model.connector"],
    }.get(name, ["model.visual"])
    assert vision_modules(model) == expected
    freeze_vision_tower(model)
    frozen = {weight for weight, parameter in model.named_parameters() if not parameter.requires_grad}
    in_modules = {weight for weight, _ in model.named_parameters() if weight.startswith(tuple(expected))}
    assert frozen == in_modules | ({"model.image_newline"} if name == "llava_onevision" else set())
    assert sum(parameter.numel() for parameter in vision_parameters(model)) > 10_000


def test_a_text_model_has_none(model):
    assert vision_parameters(model) == vision_modules(model) == []


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"]])
def test_an_adapter_stays_out_of_a_frozen_tower(family, targets):
    name, tokenizer = family
    for frozen in (False, True):
        model = build_model(name, tokenizer)
        train_adapter(model, TrainerConfig(use_peft=True, lora_target_modules=targets, freeze_vision_tower=frozen))
        adapters = [weight for weight, parameter in model.named_parameters() if parameter.requires_grad]
        in_tower = [weight for weight in adapters if weight.startswith(tuple(vision_modules(model)))]
        has_such = targets is None or not name.startswith("qwen")
        assert bool(in_tower) == (has_such and not frozen)
        assert len(adapters) > len(in_tower)


def test_a_model_without_one_is_refused(model_folder, data_folder):
    config = TrainerConfig(
        model_name_or_path=str(model_folder),
        dataset_name=str(data_folder),
        freeze_vision_tower=True,
        beta=0.0,
        max_prompt_length=50,
        max_completion_length=50,
    )
    with pytest.raises(
        ConfigError, match=f"^freeze_vision_tower=True: {model_folder} has no vision tower: leave it out$"
    ):
        read_inputs(config, 0, 1, torch.device("cpu"))

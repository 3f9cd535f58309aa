"""Tiny adapters, and what models with them compute."""

import json
import shutil

import models
import pytest
import torch
from safetensors.torch import load_file
from step_worker import sequences
from transformers import AutoModelForCausalLM

from grpo.config.command_line import parse_arguments
from grpo.config.trainer import TrainerConfig
from grpo.model.load import load_model
from grpo.model.logprobs import token_logprobs
from grpo.model.lora import train_adapter
from grpo.model.trial import make_batcher
from grpo.trainer.step import policy_logprobs

peft = pytest.importorskip("peft")

CPU = torch.device("cpu")
TARGETS = ["q_proj", "v_proj", "down_proj"]
PAIRS = [(sequence.prompt_ids, sequence.completion_ids) for sequence in sequences()]


def write_adapter(folder, base, auto_class=AutoModelForCausalLM, **settings):
    """An adapter that has been trained: every one of its weights is away from where it began."""
    torch.manual_seed(1)
    config = peft.LoraConfig(**({"target_modules": TARGETS, "task_type": "CAUSAL_LM", "lora_dropout": 0.1} | settings))
    model = peft.get_peft_model(auto_class.from_pretrained(base), config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += torch.randn_like(weight) * 0.1
    model.save_pretrained(folder)
    return folder


def copied(adapter, folder, **changes) -> str:
    """An adapter with other settings than its own."""
    shutil.copytree(adapter, folder)
    settings = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def by_hand(base, folder, dtype=torch.float64, auto_class=AutoModelForCausalLM):
    """The plain model with the weights that the papers give: W + s B A, s = alpha / r for LoRA (Hu et al. 2021, section
    4.1) and alpha / sqrt(r) for rsLoRA (Kalajdzievski 2023); DoRA (Liu et al. 2024, eq. 5) scales each output's weights
    to the length m."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    adapter = load_file(folder / "adapter_model.safetensors")
    model = auto_class.from_pretrained(base, dtype=dtype)
    scale = settings["lora_alpha"] / (settings["r"] ** 0.5 if settings["use_rslora"] else settings["r"])
    changed = 0
    with torch.no_grad():
        for name, module in model.named_modules():
            place = f"base_model.model.{name}.lora_"
            if f"{place}A.weight" not in adapter:
                continue
            module.weight += scale * adapter[f"{place}B.weight"].to(dtype) @ adapter[f"{place}A.weight"].to(dtype)
            if settings["use_dora"]:
                magnitude = adapter[f"{place}magnitude_vector"].to(dtype)
                module.weight *= (magnitude / module.weight.norm(dim=1)).unsqueeze(1)
            changed += 1
    assert changed == sum(name.endswith("lora_A.weight") for name in adapter) > 0
    return model


def exact(model, temperature=1.0) -> torch.Tensor:
    """Log-probs of the fixed sequences' completions, one at a time through transformers' own forward."""
    return models.by_hand(model, PAIRS, temperature)[0]


def scores(model, batcher=None, temperature=1.0) -> torch.Tensor:
    batcher = batcher or make_batcher(model, 0)
    return token_logprobs(model, batcher.make(PAIRS, CPU), temperature)[0]


def reference_scores(own, model, batcher, temperature=1.0, budget=10**6) -> list[torch.Tensor]:
    config = trainer("--temperature", str(temperature), "--micro_batch_tokens", str(budget), model="unused")
    with own.in_place():
        logprobs, _ = policy_logprobs(model, sequences(), config, batcher)
    return [torch.from_numpy(values) for values in logprobs]


def trainer(*options, model) -> TrainerConfig:
    return parse_arguments(TrainerConfig, "", ["--model_name_or_path", str(model), "--use_peft", *options])


def policy(*options, model):
    """As the trainer makes it; and whether it came with an adapter."""
    config = trainer(*options, model=model)
    made = load_model(config, CPU)
    return made, train_adapter(made, config)


def trained(model) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def move(model) -> None:
    """As an update would, by a lot."""
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in trained(model).values():
            weight += torch.randn_like(weight) * 0.1


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}

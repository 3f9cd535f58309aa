"""AdamW's groups and the learning rate, against those of the Trainer of transformers."""

import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY
from torch import nn
from transformers import GPT2Config, Qwen3Config, Trainer, get_scheduler
from transformers.models.gpt2 import GPT2LMHeadModel
from transformers.models.qwen3 import Qwen3ForCausalLM

from grpo.adapters import train_adapter
from grpo.arguments import parse_arguments
from grpo.optimizer import make_optimizer, make_schedule, parameter_groups
from grpo.trainer_config import TrainerConfig

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def config_of(**changes) -> TrainerConfig:
    return parse_arguments(
        TrainerConfig, "", [word for item in changes.items() for word in (f"--{item[0]}", str(item[1]))]
    )


@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine"])
@pytest.mark.parametrize("warmup, steps", [(0, 1), (0, 7), (1, 7), (5, 20), (10, 10), (30, 7)])
def test_every_learning_rate_is_that_of_transformers(kind, warmup, steps):
    ours, theirs = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-6) for _ in range(2))
    config = config_of(lr_scheduler_type=kind, warmup_steps=warmup, max_steps=steps, learning_rate=3e-6)
    schedule = make_schedule(ours, config)
    expected = get_scheduler(kind, theirs, num_warmup_steps=warmup, num_training_steps=steps)
    for _ in range(steps + 3):
        assert schedule.get_last_lr() == expected.get_last_lr()
        ours.step(), theirs.step(), schedule.step(), expected.step()


def bare(kind: str) -> nn.Module:
    if kind == "layer norms, biases":
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL, intermediate_size=24, num_key_value_heads=1, attention_bias=True))
    if kind == "DoRA":
        train_adapter(model, config_of(use_peft=True, use_dora=True))
    return model


@pytest.mark.parametrize("kind", ["layer norms, biases", "norms of queries and keys", "DoRA"])
def test_what_decays_is_what_decays_in_transformers(kind):
    model = bare(kind)
    names = set(Trainer.get_decay_parameter_names(None, model))
    expected = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and name in names]
    decayed, others = parameter_groups(model)
    assert [*map(id, decayed)] == [*map(id, expected)]
    assert len(decayed) + len(others) == sum(parameter.requires_grad for parameter in model.parameters())
    assert bool(others) == (kind != "DoRA")  # magnitudes decay, as in transformers


def test_only_what_decays_moves_without_a_gradient():
    model = bare("layer norms, biases")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, config_of(weight_decay=0.1, learning_rate=0.01))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        still = "ln_" in name or "bias" in name
        torch.testing.assert_close(
            parameter.detach(), before[name] * (1.0 if still else 1 - 0.01 * 0.1), rtol=1e-6, atol=0
        )


def test_a_rank_loads_no_library_that_it_does_not_use():
    script = "import sys, grpo_ref_split; print(sorted({'peft', 'bitsandbytes', 'trl'} & sys.modules.keys()))"
    command = [sys.executable, "-c", script]
    shown = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"

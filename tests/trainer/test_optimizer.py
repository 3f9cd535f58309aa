"""AdamW's groups and the learning rate, against those of the Trainer of transformers."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from rounding import FORMULA, assert_rounded
from torch import nn
from trainer_runs import equal, finish, timeless, training, weights
from transformers import GPT2Config, Qwen3Config, Trainer, get_scheduler
from transformers.models.gpt2 import GPT2LMHeadModel
from transformers.models.qwen3 import Qwen3ForCausalLM

from benchmarks.common import LARGE_SHAPES, qwen
from benchmarks.memory import on_meta
from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.model.lora import train_adapter
from grpo.run.checkpoints import check_space
from grpo.trainer import deepspeed_engine as trainer_optimizer
from grpo.trainer.deepspeed_engine import check_host, make_optimizer, make_schedule, parameter_groups
from grpo.trainer.rank_memory import RankWork, rank_memory

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def config_of(**changes) -> TrainerConfig:
    return parse_arguments(TrainerConfig, "", [f"--{name}={value}" for name, value in changes.items()])


def test_no_group_is_larger_than_a_card_can_copy():
    """DeepSpeed copies a whole group on the card where the optimizer is offloaded."""
    model = on_meta(qwen(**LARGE_SHAPES["Qwen2.5-7B"]), torch.bfloat16)
    groups = make_optimizer(model, config_of()).param_groups
    sizes = [sum(map(torch.numel, group["params"])) for group in groups]
    assert max(sizes) <= 2**30 and sum(sizes) == sum(map(torch.numel, model.parameters()))
    assert {group["weight_decay"] for group in groups} == {0.0, config_of().weight_decay}


ARGUED = {
    "cosine": {"num_cycles": 1.5},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_with_restarts": {"num_cycles": 2},
    "inverse_sqrt": None,
    "polynomial": {"power": 2.0},
    "warmup_stable_decay": {"num_decay_steps": 4},
}


OWN = ("constant_with_warmup", "linear", "cosine")
COURSES = [(kind, *each, None) for kind in OWN for each in ((0, 1), (0, 7), (1, 7), (5, 20), (10, 10), (30, 7))]
COURSES += [(kind, 0.25, 12, arguments) for kind, arguments in ARGUED.items()] + [("constant", 0, 12, None)]


@pytest.mark.parametrize("kind, warmup, steps, arguments", COURSES)
def test_every_learning_rate_is_that_of_transformers(kind, warmup, steps, arguments):
    """With arguments too, and after a warm-up that is a share of all steps."""
    ours, theirs = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-6) for _ in range(2))
    more = {} if arguments is None else {"lr_scheduler_kwargs": json.dumps(arguments)}
    schedule = make_schedule(ours, config_of(lr_scheduler_type=kind, warmup_steps=warmup, max_steps=steps, **more))
    expected = get_scheduler(kind, theirs, 3 if warmup == 0.25 else warmup, steps, arguments)
    for _ in range(steps + 3):
        assert schedule.get_last_lr() == expected.get_last_lr()
        ours.step(), theirs.step(), schedule.step(), expected.step()


@pytest.mark.parametrize("more", [{}, {"lr_scheduler_kwargs": '{"num_decay_steps": 4, "colour": 1}'}])
def test_arguments_that_a_schedule_does_not_take_or_lacks_are_refused(more):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="lr_scheduler_kwargs=.*: warmup_stable_decay: .*(num_decay_steps|colour)"):
        make_schedule(optimizer, config_of(lr_scheduler_type="warmup_stable_decay", **more))


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
        assert_rounded(parameter, before[name] * (1.0 if still else 1 - 0.01 * 0.1), FORMULA, least=0)


def updated(optim: str, steps: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after some updates with gradients that lie evenly between -1 and 1."""
    torch.manual_seed(0)
    shape = SMALL | {"hidden_size": 64, "vocab_size": 100}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, intermediate_size=128, num_key_value_heads=1, head_dim=16))
    optimizer = make_optimizer(model, config_of(optim=optim, learning_rate=1e-3, weight_decay=0.1))
    torch.manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter) * 2 - 1
        optimizer.step()
    return model, optimizer


def test_moments_are_in_8_bits_but_of_embeddings_norms_and_what_is_small():
    pytest.importorskip("bitsandbytes")
    model, optimizer = updated("adamw_8bit")
    exact, _ = updated("adamw_torch")
    dtypes = {}
    for (name, parameter), known in zip(model.named_parameters(), exact.parameters(), strict=True):
        state, part = optimizer.state[parameter], name.split(".")[-2]
        dtypes[part] = {state["state1"].dtype, state["state2"].dtype}
        if dtypes[part] == {torch.uint8}:
            apart = (parameter - known).abs()
            assert 0 < apart.mean() < 0.1 * 1e-3, name  # of steps of 1e-3
        else:
            assert_rounded(parameter, known, FORMULA)
    large = {part for part, kinds in dtypes.items() if kinds == {torch.uint8}}
    assert large == {"gate_proj", "up_proj", "down_proj", "lm_head"}  # 64 x 128 and 64 x 100
    assert all(kinds == {torch.float32} for part, kinds in dtypes.items() if part not in large)


def test_the_dry_run_counts_the_moments_that_there_are():
    pytest.importorskip("bitsandbytes")
    model, optimizer = updated("adamw_8bit", steps=1)
    held = 0
    for state in optimizer.state.values():
        parts = [state.get(name) for name in ("state1", "state2", "absmax1", "absmax2")]
        held += sum(part.numel() * part.element_size() for part in parts if part is not None)
    work = RankWork(config=config_of(optim="adamw_8bit"), ranks=1, longest_prompt=50, held_out=0)
    for device in ("cpu", "cuda"):
        memory = rank_memory(on_meta(model.config, torch.float32), work, {"zero_optimization": {}}, device)
        assert memory.standing["AdamW's moments"] == held
    assert held < 8 * sum(parameter.numel() for parameter in model.parameters()) / 2


def test_no_group_has_more_numbers_than_bitsandbytes_can_count(monkeypatch):
    pytest.importorskip("bitsandbytes")
    whole, _ = updated("adamw_8bit")
    monkeypatch.setattr(trainer_optimizer, "_LARGEST_GROUP", 20_000)
    model, optimizer = updated("adamw_8bit")
    sizes = [sum(parameter.numel() for parameter in group["params"]) for group in optimizer.param_groups]
    assert max(sizes) <= 20_000 and sum(sizes) == sum(parameter.numel() for parameter in model.parameters())
    for parameter, known in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter, known)


@pytest.mark.slow
def test_with_moments_in_8_bits_a_run_goes_on_as_if_nothing_was(setting, tmp_path):
    """On as many ranks; on another number it is refused, and nothing is lost."""
    pytest.importorskip("bitsandbytes")
    changes = {"optim": "adamw_8bit", "beta": 0, "max_steps": 3, "eval_steps": 0, "steps_per_generation": 1}
    changes |= {"num_iterations": 1, "learning_rate": 1e-3}
    run, again = tmp_path / "run", tmp_path / "again"

    def words(folder):
        return [word for word in setting(folder, "full", **changes) if not word.startswith("--kl_")]

    finish(2, words(run))
    saved = torch.load(run / "checkpoint-2/engine/zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    states = saved["optimizer_state_dict"]["base_optimizer_state"]["state"].values()
    kinds = [state["__bnb_optimizer_quant_state__"]["state1"].dtype for state in states]
    assert {torch.uint8, torch.float32} == {*kinds}, kinds

    shutil.copytree(run, again, ignore=shutil.ignore_patterns("checkpoint-3", "model"))
    with training(1, [*words(again), "--resume_from_checkpoint", "last"]) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 2 and "in 8 bits cannot be rearranged for 1: start it with 2" in output, output
    finish(2, [*words(again), "--resume_from_checkpoint", "last"])
    assert timeless(again) == timeless(run)
    assert equal(weights(again / "model"), weights(run / "model"))


def test_what_the_machine_or_its_disk_cannot_hold_is_refused_before_the_first_step(monkeypatch, tmp_path):
    model = on_meta(qwen(**LARGE_SHAPES["Qwen2.5-7B"]), torch.bfloat16)
    offload = {"offload_optimizer": {"device": "cpu"}}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**24}[name])
    refused = "deepspeed=.*takes 113 GiB of this machine's memory, which has 64: use_peft"
    with pytest.raises(ConfigError, match=refused):
        check_host(config_of(), offload, model)
    check_host(config_of(), {}, model)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100 * 2**30))
    with pytest.raises(ConfigError, match=r"output_dir=.*takes 113.5 GiB of disk, and 100.0 are free: make room"):
        check_space(config_of(), tmp_path / "run", model)
    assert check_space(config_of(save_steps=0), tmp_path / "run", model)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=14 * 2**30))
    with pytest.raises(ConfigError, match=r"and 14.0 are free, and not the model's 14.2: make room, or name another$"):
        check_space(config_of(save_steps=0), tmp_path / "run", model)
    train_adapter(model, config_of(use_peft="true"))
    assert "takes 0." in check_space(config_of(use_peft="true"), tmp_path / "run", model)

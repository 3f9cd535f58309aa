"""The trainer's memory that --dry_run computes, against numbers counted by hand, real passes and real peaks."""

import dataclasses
import json
import os
import subprocess
import sys
from inspect import signature

import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, GPT2Config, LlamaConfig

from benchmarks.common import qwen, random_model
from benchmarks.memory import on_meta
from benchmarks.train_memory import Case, most_of, predict, run
from grpo.config.trainer import TrainerConfig
from grpo.model.activations import kept_for_backward
from grpo.model.logprobs import token_logprobs
from grpo.model.lora import train_adapter
from grpo.model.memory import MIB
from grpo.model.train_estimate import Load, Policy, memory
from grpo.model.trial import make_batcher

SMALL = dict(hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2)
CONFIGS = {
    "qwen2": qwen(2, 100, **SMALL),
    "llama": LlamaConfig(**SMALL, num_hidden_layers=2, vocab_size=100),
    "gpt2": GPT2Config(vocab_size=100, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0),
    "gemma2, softcapped scores": Gemma2Config(**SMALL, head_dim=32, num_hidden_layers=2, vocab_size=100),
}
LOAD = Load(
    ranks=1,
    share=4,
    prompt=100,
    completion=50,
    generations=8,
    micro_batch_tokens=1000,
    groups=4,
    rows=16,
    checkpointing=False,
    buckets=2,
    bucket=10**8,
    fp32_gradients=False,
    offloaded=False,
)


def policy(name: str = "qwen2", dtype: torch.dtype = torch.float32, **adapter) -> Policy:
    model = on_meta(CONFIGS[name], dtype).eval()
    if adapter:
        train_adapter(model, TrainerConfig(use_peft=True, **adapter))
    return Policy.of(model, 150)


def really_kept(model, tokens: int) -> float:
    """Bytes a token that a forward pass of one sequence saves for its backward pass, parameters and the head aside."""
    batch = make_batcher(model, 0).make([([5] * tokens, [6])], "cpu")
    parameters = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(model, batch, 1.0)
    return sum(one.untyped_storage().nbytes() for place, one in kept.items() if place not in parameters) / tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_activations_are_those_that_a_real_pass_keeps(name, dtype):
    counted = kept_for_backward(on_meta(CONFIGS[name], dtype).eval(), 512)
    # Flash attention keeps a number a head beside what is counted, the head of one token next to nothing.
    assert counted <= really_kept(random_model(CONFIGS[name], dtype), 512) <= 1.01 * counted


def test_the_activations_of_qwen2_by_hand():
    hidden, wide, keys = 128, 320, 64
    # Two norms keep their input, it normed, and the result; attention queries, keys, values, its result twice; the MLP
    # four of its width. The last norm's result is the head's to keep.
    layer = 6 * hidden + 3 * hidden + 2 * keys + 4 * wide
    last_norm, positions = 2 * hidden, 2 * 32
    assert policy().kept == pytest.approx(4 * (2 * layer + last_norm + positions), abs=64)


def test_an_adapter_keeps_less_and_trains_what_peft_trains():
    whole, adapted = policy(), policy(lora_target_modules=["q_proj"], lora_r=4)
    assert sum(adapted.trained) == 2 * 4 * (128 + 128) and adapted.head == 0
    assert adapted.count == whole.count + sum(adapted.trained) and whole.head == 100 * 128
    assert adapted.kept < whole.kept


def sizes(policy: Policy, load: Load, device: str = "cpu") -> dict[str, int]:
    here = memory(policy, load, device)
    return {term.name: term.size for terms in (here.standing, *here.phases.values()) for term in terms}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_stands_by_hand(ranks):
    one = policy(dtype=torch.bfloat16)
    count = sum(parameter.numel() for parameter in random_model(CONFIGS["qwen2"]).parameters())
    here = memory(one, dataclasses.replace(LOAD, ranks=ranks), "cuda")
    assert [term.size for term in here.standing] == [2 * count, 4 * -(-count // ranks), 8 * -(-count // ranks)]


def test_gradients_and_buckets_by_hand():
    one = dataclasses.replace(policy(), trained=(50, 30, 20), head=0)
    # Ranks own 0..49 and 50..99; a bucket of 40 holds the second or the third, the first goes by itself.
    small = dataclasses.replace(LOAD, ranks=2, bucket=40, micro_batch_tokens=10**6)
    found = sizes(one, small)
    assert found["gradients so far"] == 0 and found["buckets"] == 4 * 50
    assert sizes(one, small, "cuda")["buckets"] == 4 * 2 * 40
    # When the first is summed: 10 are there that no bucket holds, its gradient, and the sum.
    by_name = {term.name: term.size for term in memory(one, small, "cpu").phases["backward pass, its end"]}
    assert by_name["gradients"] == 4 * (10 + 2 * 50)
    assert sizes(one, dataclasses.replace(small, micro_batch_tokens=100))["gradients so far"] == 4 * 50
    # A parameter that lies on both sides of the border is kept whole by both ranks.
    across = dataclasses.replace(one, trained=(30, 50, 20))
    assert sizes(across, dataclasses.replace(small, micro_batch_tokens=100))["gradients so far"] == 4 * 80


def test_the_cache_by_hand():
    found = sizes(policy(), dataclasses.replace(LOAD, completion=900))
    assert found["KV cache"] == 2 * 2 * 64 * 4 * 16 * 1000  # keys and values, layers, width, bytes, rows, tokens
    assert found["next token's logits"] == 24 * 16 * 100


def test_checkpointing_keeps_each_layers_input_and_one_layer():
    found = sizes(policy(), dataclasses.replace(LOAD, checkpointing=True))
    assert found["layers' inputs"] == 2 * 128 * 4 * LOAD.tokens
    assert policy().kept // 2 * LOAD.tokens <= found["a layer's activations"] < policy().kept * LOAD.tokens


def test_a_group_of_ranks_costs_what_nccl_takes():
    one, two = (memory(policy(), dataclasses.replace(LOAD, ranks=ranks), "cuda") for ranks in (1, 2))
    assert two.process - one.process == 2 * 256 * MIB
    assert memory(policy(), dataclasses.replace(LOAD, ranks=2), "cpu").process == memory(policy(), LOAD, "cpu").process


def test_an_offloaded_optimizer_leaves_the_card_for_the_machines_memory():
    one = dataclasses.replace(policy(dtype=torch.bfloat16), trained=(5000, 3000, 2000), head=0)
    load = dataclasses.replace(LOAD, micro_batch_tokens=100)
    here, away = (memory(one, dataclasses.replace(load, offloaded=offloaded), "cuda") for offloaded in (False, True))
    # Masters and moments go; a buffer for the largest gradient, in 16 bit, comes.
    assert here.held - away.held == 12 * 10000 - 2 * 5000 and here.host == []
    assert {term.name: term.size for term in away.host} == {
        "masters": 4 * 10000,
        "AdamW's moments": 8 * 10000,
        "gradients in fp32": 4 * 10000,
        "gradients as they come": 2 * (10000 + 5000),
        "weights on their way back": 2 * 10000,
    }
    end = {term.name: term.size for term in away.phases["backward pass, its end"]}
    assert end["gradients so far"] == 0 and end["gradients"] == 2 * 10000  # what a bucket holds
    # On a CPU it is one memory.
    assert memory(one, dataclasses.replace(load, offloaded=True), "cpu").host == []


@pytest.mark.parametrize("several", [False, True])
def test_gradients_in_fp32_are_there_once(several):
    one = dataclasses.replace(policy(dtype=torch.bfloat16), trained=(5000, 3000, 2000), head=0)
    load = dataclasses.replace(LOAD, fp32_gradients=True, micro_batch_tokens=100 if several else 10**6)
    here = memory(one, load, "cuda")
    end = {term.name: term.size for term in here.phases["backward pass, its end"]}
    # 4 bytes a parameter, from the first micro-batch on or from this one; a bucket's sum, and its largest in fp32.
    assert end["gradients so far"] == (4 * 10000 if several else 0)
    assert end["gradients so far"] + end["gradients"] == 4 * 10000 + 2 * 10000 + 4 * 5000
    step = {term.name: term.size for term in here.phases["AdamW's step"]}
    assert step["gradients"] == 4 * 10000 and step["one in fp64"] == 8 * 5000 and "in one piece" not in step
    # Weights in fp32 have such gradients anyway.
    assert sizes(policy(), load) == sizes(policy(), dataclasses.replace(load, fp32_gradients=False))


def test_flash_attentions_own_gradients_by_hand():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    # So wide in its attention, and so narrow in its MLP, that the attention is the layer's highest point.
    shape = SMALL | dict(intermediate_size=32, head_dim=96, num_key_value_heads=2)
    one = Policy.of(on_meta(qwen(2, 100, **shape), torch.bfloat16).eval(), 150)
    found = sizes(one, dataclasses.replace(LOAD, micro_batch_tokens=1000, checkpointing=True), "cuda")
    # At most 22 segments in 1,000 tokens, as 8 completions of 50 have 9, and 9 that a cut may leave over.
    queries, keys, laid_out = 4 * 96, 2 * 96, 2 * (100 + 8 * 150)
    assert found["attention: queries' sum"] == 4 * (1000 + 128 * 31) * 4 * 96
    assert found["attention: gradients"] == 3 * queries * 2 * 1000
    if "enable_gqa" in signature(varlen.varlen_attn).parameters:
        assert found["attention: keys'"] == 2 * keys * 2 * laid_out
        assert found["attention: for all heads"] == 2 * queries * 2 * laid_out
    else:
        assert found["attention: keys'"] == 2 * queries * 2 * laid_out


def test_what_a_card_allocates_is_all_but_what_is_outside_of_tensors():
    one = Policy.of(on_meta(qwen(2, 100, **SMALL), torch.bfloat16).eval(), 150)
    of = memory(one, dataclasses.replace(LOAD, ranks=2), "cuda")
    kept_free = {
        name: next(term.size for term in terms if term.name == "allocator") for name, terms in of.phases.items()
    }
    outside = sum(term.size for term in of.outside)
    assert of.total == outside + of.allocated(of.highest) + kept_free[of.highest] and outside > 0


PLAIN = {"dtype": "bfloat16", "micro_batch_tokens": 896, "deepspeed": {}}
IN_BF16 = {"deepspeed": {"data_types": {"grad_accum_dtype": "bf16"}}}
OFFLOADED = {"deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}
LIVE = {
    "several micro-batches": PLAIN | IN_BF16,
    "no checkpointing": PLAIN | IN_BF16 | {"gradient_checkpointing": False},
    "gradients in fp32": PLAIN,
    "offloaded": PLAIN | OFFLOADED,
    "fp32": PLAIN | {"dtype": "float32"},
}


@pytest.mark.slow
def test_what_tensors_really_hold_is_near_the_prediction(few):
    """In a rank that samples and updates twice with DeepSpeed's engine, each storage counted while it is there."""
    names = few(list(LIVE), 2)
    command = [sys.executable, "tests/live_tensors.py", json.dumps([LIVE[name] for name in names])]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, measured in zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True):
        predicted = measured["predicted"]
        print(name, {phase: round(predicted[phase] / measured[phase], 3) for phase in predicted})
        # Rotary frequencies and cached masks are not counted.
        assert measured["standing"] == pytest.approx(predicted["standing"], rel=0.01), name
        assert measured["step"] == pytest.approx(predicted["step"], rel=0.01), name
        # The formula takes each layer's highest point, and memory when it is written to.
        assert 0.85 * measured["backward"] < predicted["backward"] < 1.15 * measured["backward"], name
        assert measured["sampling"] < predicted["sampling"] < 1.25 * measured["sampling"], name


META = {name: policy(name, dtype) for name, dtype in (("qwen2", torch.float32), ("gpt2", torch.bfloat16))}


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(META)),
    st.sampled_from(["cpu", "cuda"]),
    st.booleans(),
    st.sampled_from(["prompt", "micro_batch_tokens", "rows", "share"]),
    st.integers(1, 900),  # a micro-batch of all that there is would need no sum over several
)
def test_more_of_anything_never_needs_less(name, device, checkpointing, field, more):
    less = dataclasses.replace(LOAD, checkpointing=checkpointing)
    larger = dataclasses.replace(less, **{field: getattr(less, field) + more})
    one, other = memory(META[name], less, device), memory(META[name], larger, device)
    assert 0 < one.held == other.held
    assert all(one.of_phase(phase) <= other.of_phase(phase) for phase in one.phases)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_ranks_and_checkpointing_never_need_more(device):
    one = META["qwen2"]
    totals = [memory(one, dataclasses.replace(LOAD, ranks=ranks), device).held for ranks in (1, 2, 4)]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]
    saved = memory(one, dataclasses.replace(LOAD, checkpointing=True), device)
    name = "backward pass, its begin"
    assert saved.of_phase(name) < memory(one, LOAD, device).of_phase(name)


@pytest.mark.rare
def test_a_measured_peak_is_near_the_prediction():
    """A rank that is set up as the trainer sets itself up, samples and updates twice."""
    shape = "lambda: qwen(2, 8192, hidden_size=512, intermediate_size=2048, num_attention_heads=8)"
    case = f"Case({shape}, NO_CHECKPOINTS)"
    script = f"from benchmarks.train_memory import *; print(json.dumps(measure({case}, sys.argv[1]))); os._exit(0)"
    one = Case(
        lambda: qwen(2, 8192, hidden_size=512, intermediate_size=2048, num_attention_heads=8),
        {"gradient_checkpointing": False},
    )
    measured, expected = run("-c", script, case=one), predict(one)
    for phase in ("sampling", "backward", "AdamW's step"):
        here = expected.held + most_of(expected, phase)
        assert abs(here - measured[phase]) < 0.15 * measured[phase] + 128 * MIB, (phase, here, measured)

"""The trainer's memory that --dry_run computes, against numbers counted by hand, real passes and real peaks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from inspect import signature

import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY
from estimates import CONFIGS, SMALL, WORK, described
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common import qwen, random_model
from benchmarks.memory import on_meta
from benchmarks.train_memory import Case, highest_of, predict, run
from grpo.model.logprobs import token_logprobs
from grpo.model.memory import ALLOCATOR, MIB, total
from grpo.model.trial import make_batcher
from grpo.trainer.memory import PHASES, TrainedModel, kept_for_backward, trainer_memory

_, BEGIN, END, STEP = PHASES


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
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in parameters) / tokens


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
    assert described().kept == pytest.approx(4 * (2 * layer + last_norm + positions), abs=64)


def test_an_adapter_keeps_less_and_trains_what_peft_trains():
    whole, adapted = described(), described(lora_target_modules=["q_proj"], lora_r=4)
    assert sum(adapted.trained) == 2 * 4 * (128 + 128) and adapted.head == 0
    assert adapted.weights == whole.weights + 4 * sum(adapted.trained) and whole.head == 100 * 128
    assert adapted.kept < whole.kept


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_stands_by_hand(ranks):
    count = sum(parameter.numel() for parameter in random_model(CONFIGS["qwen2"]).parameters())
    share = -(-count // ranks)
    memory = trainer_memory(described(dtype=torch.bfloat16), replace(WORK, ranks=ranks), "cuda")
    assert memory.standing == {"weights": 2 * count, "masters": 4 * share, "AdamW's moments": 8 * share}


def test_gradients_and_buckets_by_hand():
    model = replace(described(), trained=(50, 30, 20), head=0)
    # Ranks own 0..49 and 50..99; a bucket of 40 holds the second or the third, the first goes by itself.
    small = replace(WORK, ranks=2, bucket=40, micro_batch_tokens=10**6)
    end = trainer_memory(model, small, "cpu").phases[END]
    # When the first is summed: 10 are there that no bucket holds, its gradient, and the sum.
    assert end["gradients so far"] == 0 and end["buckets"] == 4 * 50 and end["gradients"] == 4 * (10 + 2 * 50)
    end = trainer_memory(model, small, "cuda").phases[END]
    assert end["buckets"] == 4 * 2 * 40 and end["gradients"] == 4 * (50 + 2 * 50)
    several = replace(small, micro_batch_tokens=100)
    assert trainer_memory(model, several, "cpu").phases[END]["gradients so far"] == 4 * 50
    # A parameter that lies on both sides of the border is kept whole by both ranks.
    across = replace(model, trained=(30, 50, 20))
    assert trainer_memory(across, several, "cpu").phases[END]["gradients so far"] == 4 * 80


def test_the_cache_by_hand():
    sampling = trainer_memory(described(), replace(WORK, longest_completion=900), "cpu").phases["sampling"]
    assert sampling["KV cache"] == 2 * 2 * 64 * 4 * 16 * 1000  # keys and values, layers, width, bytes, rows, tokens
    assert sampling["next token's logits"] == 24 * 16 * 100


def test_checkpointing_keeps_each_layers_input_and_one_layer():
    begin = trainer_memory(described(), replace(WORK, checkpointing=True), "cpu").phases[BEGIN]
    assert begin["layers' inputs"] == 2 * 128 * 4 * WORK.tokens
    assert described().kept // 2 * WORK.tokens <= begin["a layer's activations"] < described().kept * WORK.tokens


def test_a_group_of_ranks_costs_what_nccl_takes():
    two = replace(WORK, ranks=2)
    alone, together = (total(trainer_memory(described(), work, "cuda").outside) for work in (WORK, two))
    assert together - alone == 2 * 256 * MIB
    assert trainer_memory(described(), two, "cpu").outside == trainer_memory(described(), WORK, "cpu").outside


def test_an_offloaded_optimizer_leaves_the_card_for_the_machines_memory():
    model = replace(described(dtype=torch.bfloat16), trained=(5000, 3000, 2000), head=0)
    work = replace(WORK, micro_batch_tokens=100)
    on_card, away = (trainer_memory(model, replace(work, offloaded=value), "cuda") for value in (False, True))
    # Masters and moments go; a buffer for the largest gradient, in 16 bit, comes.
    assert total(on_card.standing) - total(away.standing) == 12 * 10000 - 2 * 5000 and on_card.host == {}
    assert away.host == {
        "masters": 4 * 10000,
        "AdamW's moments": 8 * 10000,
        "gradients in fp32": 4 * 10000,
        "gradients as they come": 2 * (10000 + 5000),
        "weights on their way back": 2 * 10000,
    }
    end = away.phases[END]
    assert end["gradients so far"] == 0 and end["gradients"] == 2 * 10000  # what a bucket holds
    # On a CPU it is one memory.
    assert trainer_memory(model, replace(work, offloaded=True), "cpu").host == {}


@pytest.mark.parametrize("several", [False, True])
def test_gradients_in_fp32_are_there_once(several):
    model = replace(described(dtype=torch.bfloat16), trained=(5000, 3000, 2000), head=0)
    work = replace(WORK, fp32_gradients=True, micro_batch_tokens=100 if several else 10**6)
    phases = trainer_memory(model, work, "cuda").phases
    # 4 bytes a parameter, from the first micro-batch on or from this one; a bucket's sum, and its largest in fp32.
    assert phases[END]["gradients so far"] == (4 * 10000 if several else 0)
    assert phases[END]["gradients so far"] + phases[END]["gradients"] == 4 * 10000 + 2 * 10000 + 4 * 5000
    assert phases[STEP]["gradients"] == 4 * 10000 and phases[STEP]["one in fp64"] == 8 * 5000
    assert "in one piece" not in phases[STEP]
    # Weights in fp32 have such gradients anyway.
    assert trainer_memory(described(), work, "cpu") == trainer_memory(
        described(), replace(work, fp32_gradients=False), "cpu"
    )


def test_flash_attentions_own_gradients_by_hand():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    # So wide in its attention, and so narrow in its MLP, that the attention is the layer's highest point.
    shape = SMALL | dict(intermediate_size=32, head_dim=96, num_key_value_heads=2)
    model = TrainedModel.of(on_meta(qwen(2, 100, **shape), torch.bfloat16).eval(), 150)
    begin = trainer_memory(model, replace(WORK, checkpointing=True), "cuda").phases[BEGIN]
    # At most 22 segments in 1,000 tokens, as 8 completions of 50 have 9, and 9 that a cut may leave over.
    queries, keys, laid_out = 4 * 96, 2 * 96, 2 * (100 + 8 * 150)
    assert begin["attention: queries' sum"] == 4 * (1000 + 128 * 31) * 4 * 96
    assert begin["attention: gradients"] == 3 * queries * 2 * 1000
    if "enable_gqa" in signature(varlen.varlen_attn).parameters:
        assert begin["attention: keys'"] == 2 * keys * 2 * laid_out
        assert begin["attention: for all heads"] == 2 * queries * 2 * laid_out
    else:
        assert begin["attention: keys'"] == 2 * queries * 2 * laid_out


def test_what_a_card_allocates_is_all_but_what_is_outside_of_tensors():
    model = TrainedModel.of(on_meta(qwen(2, 100, **SMALL), torch.bfloat16).eval(), 150)
    memory = trainer_memory(model, replace(WORK, ranks=2), "cuda")
    outside, margin = total(memory.outside), memory.phases[memory.highest][ALLOCATOR]
    assert memory.total == outside + memory.allocated(memory.highest) + margin and outside > 0


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


META = {name: described(name, dtype) for name, dtype in (("qwen2", torch.float32), ("gpt2", torch.bfloat16))}


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(META)),
    st.sampled_from(["cpu", "cuda"]),
    st.booleans(),
    st.sampled_from(["longest_prompt", "micro_batch_tokens", "rows", "prompts"]),
    st.integers(1, 900),  # a micro-batch of all that there is would need no sum over several
)
def test_more_of_anything_never_needs_less(name, device, checkpointing, field, more):
    less = replace(WORK, checkpointing=checkpointing)
    larger = replace(less, **{field: getattr(less, field) + more})
    small, large = trainer_memory(META[name], less, device), trainer_memory(META[name], larger, device)
    assert small.standing == large.standing and total(small.standing) > 0
    assert all(small.peak(phase) <= large.peak(phase) for phase in PHASES)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_ranks_and_checkpointing_never_need_more(device):
    model = META["qwen2"]
    totals = [total(trainer_memory(model, replace(WORK, ranks=ranks), device).standing) for ranks in (1, 2, 4)]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]
    checkpointing = trainer_memory(model, replace(WORK, checkpointing=True), device)
    assert checkpointing.peak(BEGIN) < trainer_memory(model, WORK, device).peak(BEGIN)


@pytest.mark.rare
def test_a_measured_peak_is_near_the_prediction():
    """A rank that is set up as the trainer sets itself up, samples and updates twice."""
    shape = "lambda: qwen(2, 8192, hidden_size=512, intermediate_size=2048, num_attention_heads=8)"
    case = f"Case({shape}, NO_CHECKPOINTS)"
    script = f"from benchmarks.train_memory import *; print(json.dumps(measure({case}, sys.argv[1]))); os._exit(0)"
    same_case = Case(
        lambda: qwen(2, 8192, hidden_size=512, intermediate_size=2048, num_attention_heads=8),
        {"gradient_checkpointing": False},
    )
    measured, memory = run("-c", script, case=same_case), predict(same_case)
    for phase in ("sampling", "backward", "AdamW's step"):
        predicted = highest_of(memory, phase)
        # The margin for the heap is a constant, and large beside so small a model: not a factor alone.
        assert 0.95 * measured[phase] < predicted < 1.15 * measured[phase] + 160 * MIB, (phase, predicted, measured)

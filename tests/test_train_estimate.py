"""The trainer's memory that --dry_run computes, against numbers counted by hand, real passes and real peaks."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, GPT2Config, LlamaConfig

from benchmarks.common import qwen, random_model
from benchmarks.memory import on_meta
from benchmarks.train_memory import Case, most_of, predict, run
from grpo.activations import kept_for_backward
from grpo.adapters import train_adapter
from grpo.estimate import MIB
from grpo.logprobs import token_logprobs
from grpo.model import make_batcher
from grpo.train_estimate import Load, Policy, memory
from grpo.trainer_config import TrainerConfig

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

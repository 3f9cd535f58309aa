"""The sampler that keeps its rows full draws what transformers' generate draws, whatever is beside a row."""

import gc
import weakref

import pytest
import torch
from cards import Cards, OnCard
from models import CONFIGS, ENDS, EXAMPLES, build, packed, random_model, scored
from rounding import FEW_BITS, assert_rounded
from tape import Taped
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo.model.activations import checkpoint_activations
from grpo.model.logprobs import token_logprobs
from grpo.model.shared_cache import SharedCache
from grpo.model.tree_attention import switch_on
from grpo.model.trial import make_batcher
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.generate import LocalSampler
from grpo.sampling.rows import StepGraphs
from grpo.sampling.self_check import make_sampler

LENGTH, COPIES = 20, 3
NEVER = [10**6]


def continuous(model, tokenizer, eos=ENDS, rows=64) -> ContinuousSampler:
    return ContinuousSampler(model, tokenizer, eos, LENGTH, rows=rows)


def ids_of(groups) -> list[list[int]]:
    return [rollout.completion_ids for rollouts in groups for rollout in rollouts]


def logprobs_of(groups) -> list[float]:
    return [value for rollouts in groups for rollout in rollouts for value in rollout.sampling_logprobs]


ARCHITECTURES = [
    *("apertus", "arcee", "aria_text", "biogpt", "bitnet", "cohere", "cohere2", "ernie4_5", "exaone4", "flex_olmo"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe"),
    *("helium", "hunyuan_v1_dense", "jais2", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3"),
    *("olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen3", "seed_oss", "smollm3"),
    *("starcoder2", "vaultgemma"),
]


WINDOWED = [
    *("cohere2", "exaone4", "gemma2", "gemma3_text", "ministral", "mistral", "mixtral", "olmo3", "phi3", "qwen2"),
    *("qwen3", "smollm3", "starcoder2"),
]


@pytest.mark.slow
@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    ("name", "windowed"), [*((name, False) for name in ARCHITECTURES), *((name, True) for name in WINDOWED)]
)
def test_every_architecture_draws_the_tokens_of_generate(name, windowed, tokenizer):
    """Where it has a window, also beyond it."""
    windows = dict(sliding_window=6, use_sliding_window=True) if windowed else {}
    if windowed and name in ("qwen2", "qwen3", "smollm3"):
        windows["layer_types"] = ["sliding_attention", "full_attention"]
    model = random_model(name, **windows)
    batcher = make_batcher(model, 0)
    full = make_sampler(model, tokenizer, LENGTH, rows=4, packs=batcher.packs)
    assert type(full) is ContinuousSampler
    full.eos_token_ids = ENDS
    plain = LocalSampler(model, tokenizer, ENDS, LENGTH)
    assert ids_of([full.greedy(EXAMPLES)]) == ids_of([plain.greedy(EXAMPLES)])
    groups, expected = (sampler.sample(EXAMPLES, COPIES, 0.8, seed=1) for sampler in (full, plain))
    assert ids_of(groups) == ids_of(expected)
    assert_rounded(logprobs_of(groups), logprobs_of(expected))
    alone = scored(model, groups, 0.8)
    assert_rounded(logprobs_of(groups), alone)
    if windowed:
        packed_ones = scored(model, groups, 0.8, batcher=batcher)
        assert_rounded(packed_ones, alone)
        model.config.sliding_window = 7
        assert (scored(model, groups, 0.8) - packed_ones).abs().max() > 1e-3


@pytest.mark.parametrize("look_every", [1, 6])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 64])
def test_what_is_beside_a_row_changes_nothing(tokenizer, rows, look_every):
    """Rows that end, move, and are taken by the next completion, against one row at a time."""
    model = packed(build(CONFIGS["qwen2"]))
    alone = continuous(model, tokenizer, rows=1).sample(EXAMPLES, COPIES, 1.0, 3, ids=[4, 9, 2, 7, 5])
    sampler = ContinuousSampler(model, tokenizer, ENDS, LENGTH, rows=rows, look_every=look_every)
    handed = []
    groups = sampler.sample(EXAMPLES, COPIES, 1.0, 3, on_groups=handed.append, ids=[4, 9, 2, 7, 5])
    assert sorted(group for ended in handed for group in ended.items()) == [*enumerate(groups)]
    assert (rows, look_every) != (64, 6) or len(handed) < len(groups)  # those that one look finds come together
    assert ids_of(groups) == ids_of(alone)
    assert_rounded(logprobs_of(groups), logprobs_of(alone))
    assert len({len(ids) for ids in ids_of(groups)}) > 3


LONG, RARE_ENDS = 100, [20, 21]


@pytest.mark.parametrize(("name", "look_every"), [("qwen2", 16), ("gpt_neox", 1), ("gemma2", 1), ("mixtral", 16)])
def test_steps_of_few_shapes_draw_the_same_tokens(name, look_every, tokenizer, monkeypatch):
    """What CUDA records, called plainly: rows that draw nothing, moves, refills, a cache that grows."""
    model, shapes, step = packed(random_model(name)), [], SharedCache.step
    monkeypatch.setattr(SharedCache, "step", lambda cache, of: (shapes.append(of.shape), step(cache, of)))
    plain, few = (
        ContinuousSampler(model, tokenizer, RARE_ENDS, LONG, rows=7, look_every=look_every, graphs=graphs)
        for graphs in (None, StepGraphs)
    )
    groups = few.sample(EXAMPLES, COPIES, 0.8, seed=1)
    rows, slots, prompts, completions = (set(sizes) for sizes in zip(*shapes, strict=True))
    assert rows <= {7, 4, 2, 1} and completions <= {64, 96, 100} and len(slots) == len(prompts) == 1
    assert name != "qwen2" or (len(rows) >= 3 and len(completions) == 3 and len(set(shapes)) < len(shapes) / 10)
    expected = plain.sample(EXAMPLES, COPIES, 0.8, seed=1)
    assert ids_of(groups) == ids_of(expected)
    assert_rounded(logprobs_of(groups), logprobs_of(expected))
    assert ids_of([few.greedy(EXAMPLES)]) == ids_of([plain.greedy(EXAMPLES)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt_neox"])
def test_replayed_steps_draw_the_same_tokens(name, dtype, tokenizer):
    """State that a step keeps in Python, a length or a branch, would stay as it was recorded."""
    model = packed(random_model(name).to(dtype))
    replayed, recorded = Taped.replayed, []
    for graphs in (StepGraphs, Taped):
        sampler = ContinuousSampler(model, tokenizer, RARE_ENDS, LONG, rows=7, look_every=4, graphs=graphs)
        groups = [sampler.sample(EXAMPLES, COPIES, 0.8, seed=seed) for seed in range(2)]
        recorded.append([(ids_of(drawn), logprobs_of(drawn)) for drawn in groups])
    assert recorded[0] == recorded[1] and Taped.replayed > replayed + 100


def test_a_step_brings_nothing_from_the_cpu_and_asks_nothing_of_the_card(tokenizer, monkeypatch):
    """What CUDA would not record."""

    class OnCardOnly(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            assert all(isinstance(tensor, OnCard) for tensor in tensors), operation
            assert operation not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            return operation(*args, **kwargs or {})

    run, steps = StepGraphs.run, []

    def run_on_card(graphs, step, shape):
        with OnCardOnly():
            run(graphs, step, shape)
        steps.append(shape)

    monkeypatch.setattr(StepGraphs, "run", run_on_card)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # the cards are not made for it
    expected = continuous(packed(build(CONFIGS["qwen2"])), tokenizer).sample(EXAMPLES, COPIES, 0.8, seed=1)
    with Cards():
        model = build(CONFIGS["qwen2"]).to("meta:0")
        switch_on(model, "segments")
        few = ContinuousSampler(model, tokenizer, ENDS, LENGTH, rows=7, look_every=4, graphs=StepGraphs)
        groups = few.sample(EXAMPLES, COPIES, 0.8, seed=1)
    assert ids_of(groups) == ids_of(expected) and len(steps) > 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_recorded_steps_draw_the_same_tokens_on_a_gpu(name, tokenizer, monkeypatch):
    model, replays, replay = random_model(name).to("cuda"), [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    packs = make_batcher(model, 0).packs
    full = make_sampler(model, tokenizer, LONG, rows=7, packs=packs)
    assert type(full) is ContinuousSampler and len(replays) == 4
    full.eos_token_ids = RARE_ENDS
    plain = ContinuousSampler(model, tokenizer, RARE_ENDS, LONG, rows=7)
    for temperature in (0.8, 1.3):
        groups, expected = (sampler.sample(EXAMPLES, COPIES, temperature, seed=1) for sampler in (full, plain))
        assert ids_of(groups) == ids_of(expected)
        assert_rounded(logprobs_of(groups), logprobs_of(expected), FEW_BITS)
    assert len(replays) > 10 * len(set(map(id, replays)))
    replays.clear()
    without = make_sampler(model, tokenizer, LONG, rows=7, packs=packs, cuda_graphs=False)
    assert type(without) is ContinuousSampler and without.greedy(EXAMPLES) and replays == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_that_waits_for_its_gpu_is_sampled_without_graphs(tokenizer, caplog):
    model = random_model("gemma2").to("cuda")  # its layers are called: Qwen2's token pass reads their weights
    model.model.layers[0].register_forward_hook(lambda layer, inputs, output: output[0].sum().item() and None)
    sampler = make_sampler(model, tokenizer, LENGTH, packs=make_batcher(model, 0).packs)
    assert type(sampler) is ContinuousSampler
    (line,) = [record.getMessage() for record in caplog.records if record.name == "grpo.sampling.self_check"]
    assert line.startswith("sampling goes a slower way, without CUDA graphs: Gemma2ForCausalLM cannot draw tokens")
    assert len(ids_of(sampler.sample(EXAMPLES, COPIES, 1.0, seed=1))) == len(EXAMPLES) * COPIES


def test_no_row_idles_while_a_completion_waits_and_each_prompt_is_computed_once(tokenizer):
    model, shapes = packed(build(CONFIGS["qwen2"])), []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    try:
        groups = continuous(model, tokenizer, rows=4).sample(EXAMPLES, COPIES, 1.0, 3)
    finally:
        hook.remove()
    waiting, drawing, expected = [len(ids) for ids in ids_of(groups)], [], []
    while waiting or drawing:
        while waiting and len(drawing) < 4:
            drawing.append(waiting.pop(0) - 1)  # the first token is drawn from the prompt
        expected.append(len(drawing))
        drawing = [left - 1 for left in drawing if left > 1]
    assert sum(shape[1] for shape in shapes if len(shape) == 2) == sum(len(example.prompt_ids) for example in EXAMPLES)
    assert [shape[0] for shape in shapes if len(shape) == 1] == expected


@pytest.mark.parametrize("graphs", [None, Taped])
def test_the_cache_grows_for_the_rows_alone_that_still_draw(graphs, tokenizer, monkeypatch):
    model, sizes, make_room = packed(build(CONFIGS["qwen2"])), [], SharedCache.make_room

    def noted(cache, tokens, rows):
        if grown := make_room(cache, tokens, rows):
            keys, _ = cache._own[0]
            sizes.append((rows, len(keys) // 2, cache.room))
        return grown

    monkeypatch.setattr(SharedCache, "make_room", noted)
    few_ends = ContinuousSampler(model, tokenizer, [20], 200, rows=15, graphs=graphs)
    groups = few_ends.sample(EXAMPLES, COPIES, 1.0, seed=3)
    rooms, lengths = [room for _, _, room in sizes], [len(ids) for ids in ids_of(groups)]
    # A token's keys are kept with the next.
    left = [sum(length > room + 1 for length in lengths) for room in rooms[:-1]]
    assert rooms == [64, 96, 144, 200] and 15 > left[0] > left[-1] > 1
    kept = [15, *(min(15, 1 << (rows - 1).bit_length()) for rows in left)]
    assert [(rows, there) for rows, there, _ in sizes] == [*zip(kept, kept, strict=True)]
    alone = ContinuousSampler(model, tokenizer, [20], 200, rows=1).sample(EXAMPLES, COPIES, 1.0, seed=3)
    assert ids_of(groups) == ids_of(alone)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_a_call_leaves_no_cache_behind(name, tokenizer, monkeypatch):
    caches, begin = [], SharedCache.__init__
    monkeypatch.setattr(
        SharedCache, "__init__", lambda self, **sizes: (caches.append(weakref.ref(self)), begin(self, **sizes))[1]
    )
    sampler = continuous(packed(random_model(name)), tokenizer)
    gc.collect()
    gc.disable()  # on a card the cache of the next call would have no room beside it
    try:
        sampler.sample(EXAMPLES, COPIES, 1.0, seed=1)
        assert len(caches) == 1 and caches[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("look_every", [1, 16])
def test_completions_are_cut_at_their_length_and_at_their_first_end(tokenizer, length, look_every):
    model = packed(build(CONFIGS["qwen2"]))
    for eos in (NEVER, ENDS, [*range(64)]):
        full = ContinuousSampler(model, tokenizer, eos, length, rows=4, look_every=look_every)
        expected = LocalSampler(model, tokenizer, eos, length, rows=4).sample(EXAMPLES, 2, 1.0, 5)
        drawn = full.sample(EXAMPLES, 2, 1.0, 5)
        assert ids_of(drawn) == ids_of(expected)
        for item in (item for group in (*drawn, *expected) for item in group):
            assert item.finished == (item.completion_ids[-1] in eos)
            assert item.finished or len(item.completion_ids) == length


@pytest.mark.parametrize("name", ["qwen2", "cohere, scaled", "granite, divided", "phi, bias"])
def test_in_16_bits_logprobs_are_as_near_to_the_exact_ones_as_those_of_generate(name, tokenizer):
    """One more rounding to 16 bits in each layer would double the error."""
    model = packed(build(CONFIGS[name]).to(torch.bfloat16))
    exact = build(CONFIGS[name]).to(torch.bfloat16).double()

    def error(sampler) -> float:
        groups = sampler.sample(EXAMPLES, 8, 0.8, seed=2)
        difference = torch.tensor(logprobs_of(groups)) - scored(exact, groups, 0.8)
        return difference.square().mean().sqrt().item()

    of_generate = error(LocalSampler(model, tokenizer, NEVER, LENGTH))
    assert error(continuous(model, tokenizer, NEVER, rows=5)) < 1.5 * of_generate


def test_with_lora_and_layers_that_recompute(tokenizer):
    peft = pytest.importorskip("peft")
    model = build(CONFIGS["qwen2"])
    checkpoint_activations(model)
    model.add_adapter(peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"))
    packed(model)
    groups, expected = (
        sampler.sample(EXAMPLES, COPIES, 1.0, seed=1)
        for sampler in (continuous(model, tokenizer, rows=4), LocalSampler(model, tokenizer, ENDS, LENGTH))
    )
    assert ids_of(groups) == ids_of(expected)
    # And it learns as if nothing had been drawn.
    token_logprobs(model, make_batcher(model, 0).make([([5, 6], [7, 8, 9])], "cpu"), 1.0)[0].sum().backward()
    assert any(weight.grad is not None for weight in model.parameters())


def test_a_model_that_draws_something_else_falls_back_and_says_so(tokenizer, caplog):
    model = random_model("diffllama")
    sampler = make_sampler(model, tokenizer, LENGTH, packs=make_batcher(model, 0).packs)
    assert type(sampler) is LocalSampler
    (line,) = [record.getMessage() for record in caplog.records if record.name == "grpo.sampling.self_check"]
    assert line.startswith("sampling goes a slower way, by transformers' generate: DiffLlamaForCausalLM draws tokens")


def test_logits_that_are_not_numbers_end_the_call(tokenizer):
    model = packed(build(CONFIGS["qwen2"]))
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(FloatingPointError, match="the model's logits are NaN"):
        continuous(model, tokenizer).sample(EXAMPLES, 2, 1.0, 1)

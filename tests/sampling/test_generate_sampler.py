"""Sampling draws from the very distribution that the loss scores, and cuts completions at their first eos."""

import numpy as np
import pytest
import torch
from models import CONFIGS, SMALL, build, example, scored
from rounding import assert_rounded
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from grpo.data.records import Example, make_rollout
from grpo.model.activations import checkpoint_activations
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.sampling.generate import LOOK_EVERY, LocalSampler


@pytest.fixture
def examples(tokenizer) -> list[Example]:
    return [example(tokenizer(text)["input_ids"]) for text in ("Tom has 3", "A bus carries 8 people and", "7")]


def sampler(model, tokenizer, eos=None, length=12) -> LocalSampler:
    return LocalSampler(model, tokenizer, [tokenizer.eos_token_id] if eos is None else eos, length)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_seed_draws_what_its_random_numbers_say(model, tokenizer, examples, temperature):
    """One sequence at a time, without a cache, by NumPy in float64. A rollout brings the log-probs, too."""
    eos, copies, length = list(range(20)), 3, 20
    drawn_by = sampler(model, tokenizer, eos, length=length)
    drawn_by.update_weights(7)
    names = [40, 7, 123456789]
    groups = drawn_by.sample(examples, copies, temperature, seed=6, on_groups=lambda groups: None, ids=names)
    for item, group, rollouts in zip(examples, names, groups, strict=True):
        for place, rollout in enumerate(rollouts):
            numbers = np.random.Generator(np.random.Philox(np.random.SeedSequence((6, group, place)))).random(length)
            ids = list(item.prompt_ids)
            for number in numbers:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double().numpy() / temperature
                ends = np.cumsum(np.exp(logits - logits.max()))
                ids.append(int((ends <= number * ends[-1]).sum()))
                if ids[-1] in eos:
                    break
            assert rollout.completion_ids == ids[len(item.prompt_ids) :]
    rollouts = [rollout for group in groups for rollout in group]
    assert len({len(rollout.completion_ids) for rollout in rollouts}) > 2
    assert {rollout.policy_version for rollout in rollouts} == {7}
    drawn_with = [logprob for rollout in rollouts for logprob in rollout.sampling_logprobs]
    assert_rounded(drawn_with, scored(model, groups, temperature, examples))


HEADS = ["qwen2", "gemma2, softcapped", "cohere, scaled", "granite, divided", "phi, bias", "with LoRA"]


@pytest.mark.parametrize("name", HEADS)
def test_in_16_bits_too_a_rollout_brings_the_logprobs_that_the_loss_gives_it(name, tokenizer):
    """Without attention kernels that round otherwise with each shape, nothing but the head could round otherwise."""
    model = build(CONFIGS.get(name, CONFIGS["qwen2"]))
    model.set_attn_implementation("eager")
    if name == "with LoRA":
        peft = pytest.importorskip("peft")
        checkpoint_activations(model)
        model.add_adapter(peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"))
    model.to(torch.bfloat16)
    examples, copies = [example([5, 6, 7]), example([9, 10, 11, 12, 13, 14])], 8
    groups = sampler(model, tokenizer, eos=[10**6], length=20).sample(examples, copies, 0.8, seed=2)
    rollouts = [rollout for group in groups for rollout in group]
    drawn_with = torch.tensor([value for item in rollouts for value in item.sampling_logprobs])
    difference = (drawn_with - scored(model, groups, 0.8, examples)).abs()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([examples[0].prompt_ids])).logits
    assert len(difference) == 320 and (difference > 0.01).float().mean() < 0.01
    # And the head is the model's own again.
    assert "forward" not in vars(model.get_output_embeddings())
    assert logits.shape[1] == 3 and torch.equal(logits, logits.bfloat16().to(logits.dtype))


def test_a_head_is_the_models_own_again_after_a_failure(tokenizer):
    model = build(CONFIGS["qwen2"]).to(torch.bfloat16)

    def fails(*_):
        raise LookupError

    with pytest.raises(LookupError):
        sampler(model, tokenizer).stream(example([5, 6]), 1.0, 0, fails)
    assert "forward" not in vars(model.get_output_embeddings())


def test_the_models_own_generation_config_changes_nothing(model, tokenizer, examples, monkeypatch):
    plain = sampler(model, tokenizer).sample(examples, 4, 1.0, seed=5)
    settings = {"top_k": 1, "top_p": 0.1, "temperature": 0.1, "repetition_penalty": 5.0, "no_repeat_ngram_size": 1}
    settings = GenerationConfig(**settings, suppress_tokens=[*range(200)], min_new_tokens=9, do_sample=True)
    monkeypatch.setattr(model, "generation_config", settings)
    assert sampler(model, tokenizer).sample(examples, 4, 1.0, seed=5) == plain
    assert model.generation_config is settings  # and it is there again, to be saved with the model


def test_an_eos_that_is_also_the_pad_is_kept_once(model, model_folder, examples):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    endless = sampler(model, tokenizer, eos=[10**6]).sample(examples, 1, 2.0, seed=3)
    ends = [rollout.completion_ids[place] for place, (rollout,) in enumerate(endless, start=2)]
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ends[0])
    assert tokenizer.pad_token_id == ends[0]
    for (rollout,) in sampler(model, tokenizer, ends).sample(examples, 1, 2.0, seed=3):
        assert rollout.finished and rollout.completion_ids[-1] in ends
        assert not set(rollout.completion_ids[:-1]) & set(ends)


def test_the_text_has_no_special_tokens_and_keeps_the_tags(tokenizer):
    tags = "<think>1</think><answer>2</answer>"
    ids = tokenizer(tags + tokenizer.eos_token)["input_ids"]
    logprobs = [-1.0] * len(ids)
    made = make_rollout(tokenizer, [tokenizer.eos_token_id], ids=ids, logprobs=logprobs, policy_version=0)
    assert made.text == tags


def test_layers_that_recompute_do_not_cost_the_sampler_its_cache(model_folder, tokenizer, examples):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    plain = sampler(model, tokenizer).greedy(examples)
    checkpoint_activations(model)
    token_logprobs(model, Batcher(0, 0).make([([1], [2])], "cpu"), 1.0)[0].sum().backward()
    widths = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    assert sampler(model, tokenizer).greedy(examples) == plain
    assert widths == [max(len(prompt.prompt_ids) for prompt in examples)] + [1] * (len(widths) - 1)


def gradients(model) -> list[torch.Tensor]:
    model.zero_grad()
    token_logprobs(model, Batcher(0, 0).make([([5, 6], [7, 8, 9])], "cpu"), 1.0)[0].sum().backward()
    return [weight.grad.clone() for weight in model.parameters()]


def keep_tensors(model) -> None:
    """Make a layer keep what it computes in its first forward pass, as a buffer and as an attribute."""

    def scale(layer, inputs) -> tuple:
        if not hasattr(layer, "attribute"):
            layer.attribute = torch.linspace(0.5, 2.0, inputs[0].shape[-1])
            layer.register_buffer("buffer", layer.attribute.square())
        return (inputs[0] * layer.attribute * layer.buffer,)

    model.model.layers[0].mlp.register_forward_pre_hook(scale)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["plain", "keeps tensors", "dynamic positions"])
def test_a_model_learns_after_sampling_as_if_there_had_been_none(kind, checkpointing, tokenizer):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    settings = SMALL | {"max_position_embeddings": 16, "initializer_range": 0.3}

    def make():
        model = build(LlamaConfig(**settings, rope_parameters=rope if kind == "dynamic positions" else None))
        if kind == "keeps tensors":
            keep_tensors(model)
        if checkpointing:
            checkpoint_activations(model)
        return model

    model, modes = make(), set()
    model.lm_head.register_forward_pre_hook(lambda *_: modes.add(torch.is_inference_mode_enabled()))
    sampler(model, tokenizer, eos=[10**6], length=40).sample([example([5, 6])], 2, 1.0, seed=0)
    assert modes == {True}
    assert all(map(torch.equal, gradients(model), gradients(make())))
    kept = [value for part in model.modules() for value in (*vars(part).values(), *part.buffers(recurse=False))]
    assert not any(isinstance(value, torch.Tensor) and value.is_inference() for value in kept)


def test_each_group_is_handed_over_once_soon_after_its_last_completion_ends(model, tokenizer, examples):
    draw = sampler(model, tokenizer, eos=list(range(30)), length=100).sample  # so many ends that lengths differ
    plain = draw(examples * 2, 4, 1.0, seed=5)
    passes, handed = [], []
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    try:
        watched = draw(examples * 2, 4, 1.0, 5, lambda groups: handed.extend((*g, len(passes)) for g in groups.items()))
    finally:
        hook.remove()
    assert watched == plain
    assert {place: rollouts for place, rollouts, _ in handed} == dict(enumerate(plain)) and len(handed) == 6
    # A forward pass draws one token of every row, so a group's last token is there after as many as its longest
    # completion has; whether it is there is asked at each LOOK_EVERY-th token, and at the end.
    longest = [max(len(rollout.completion_ids) for rollout in rollouts) for _, rollouts, _ in handed]
    looks = [min(-(-count // LOOK_EVERY) * LOOK_EVERY, max(longest)) for count in longest]
    assert [after for *_, after in handed] == looks == sorted(looks) and len({*looks}) > 2


def streamed(model, tokenizer, prompt, temperature, seed, stop_after=100, eos=10**6):
    shown = []

    def on_token(ids) -> bool:
        shown.append(ids)
        return len(ids) == stop_after

    return sampler(model, tokenizer, eos=[eos]).stream(prompt, temperature, seed, on_token), shown


def test_a_stream_shows_each_token_and_ends_as_its_rollout(model, tokenizer, examples):
    for prompt in examples:
        (greedy,) = sampler(model, tokenizer, eos=[10**6]).greedy([prompt])
        rollout, shown = streamed(model, tokenizer, prompt, temperature=0, seed=1)
        assert rollout == greedy
        assert shown == [greedy.completion_ids[:count] for count in range(1, 13)]
        ((drawn,),) = sampler(model, tokenizer, eos=[10**6]).sample([prompt], 1, 2.0, seed=1)
        assert streamed(model, tokenizer, prompt, temperature=2.0, seed=1)[0] == drawn


def test_a_stream_shows_each_token_once_up_to_where_it_is_told_to_stop_or_its_eos(model, tokenizer, examples):
    for temperature in (0, 2.0):
        whole, _ = streamed(model, tokenizer, examples[0], temperature, seed=1)
        stopped, shown = streamed(model, tokenizer, examples[0], temperature, seed=1, stop_after=3)
        assert stopped.completion_ids == whole.completion_ids[:3] and not stopped.finished and len(shown) == 3
        end = next(place for place in range(4, 12) if whole.completion_ids[place] not in whole.completion_ids[:place])
        eos = whole.completion_ids[end]
        rollout, shown = streamed(model, tokenizer, examples[0], temperature, seed=1, eos=eos)
        assert rollout.finished and rollout.completion_ids == whole.completion_ids[: end + 1]
        assert shown == [rollout.completion_ids[:count] for count in range(1, end + 2)]

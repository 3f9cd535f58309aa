"""Completions of several segments: what both samplers draw, against a loop that computes each token's whole context."""

import threading
from concurrent.futures import Future
from itertools import pairwise
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch
from cards import Cards
from models import CONFIGS, ENDS, EXAMPLES, SMALL, build, packed, random_model
from rounding import assert_rounded
from scripted_turns import Scripted, naive
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import LlamaConfig, PreTrainedTokenizerFast

from grpo.data.records import Outcome
from grpo.model import shared_cache
from grpo.model.shared_cache import SharedCache
from grpo.model.tree_attention import switch_on
from grpo.model.trial import make_batcher
from grpo.sampling import continuous as continuous_module
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.generate import LocalSampler
from grpo.sampling.rows import PROMPT, Rows, StepGraphs
from grpo.sampling.self_check import make_sampler
from grpo.wire.tool_outcomes import cut_segments

LENGTH = 40
PLACES = [4, 9, 2, 7, 5]


@pytest.fixture(scope="module")
def qwen():
    return packed(build(CONFIGS["qwen2"]))


def continuous(model, tokenizer, turns, rows=64, length=LENGTH, **options) -> ContinuousSampler:
    return ContinuousSampler(model, tokenizer, ENDS, length, rows=rows, turns=turns, **options)


def plain(model, tokenizer, turns, rows=64, length=LENGTH) -> LocalSampler:
    return LocalSampler(model, tokenizer, ENDS, length, rows=rows, turns=turns)


def flat(groups) -> list:
    return [rollout for rollouts in groups for rollout in rollouts]


def ids_of(groups) -> list[tuple[list[int], list[bool]]]:
    return [(rollout.completion_ids, rollout.drawn) for rollout in flat(groups)]


def logprobs_of(groups) -> list[float]:
    """Those of what was drawn; the others must be NaN."""
    known = []
    for rollout in flat(groups):
        assert np.isnan(rollout.sampling_logprobs).tolist() == [not drawn for drawn in rollout.drawn]
        known += [value for value, drawn in zip(rollout.sampling_logprobs, rollout.drawn, strict=True) if drawn]
    return known


def scored(model, groups, temperature) -> torch.Tensor:
    """The loss's log-probs of the drawn tokens."""
    is_drawn = [drawn for rollout in flat(groups) for drawn in rollout.drawn]
    return models.scored(model, groups, temperature)[is_drawn]


def drawn_naively(model, copies: int, temperature=1.0, seed=3, length=LENGTH, answer=None):
    """Ids and masks of all, and log-probs; greedy where `seed` is None."""
    turns, ids, logprobs = Scripted(ENDS, **({"answer": answer} if answer else {})), [], []
    for group, item in zip(PLACES, EXAMPLES, strict=True):

        def logits_of(begun, item=item):
            return model(input_ids=torch.tensor([[*item.prompt_ids, *begun]])).logits[0, -1]

        for copy in range(copies):
            name = None if seed is None else (seed, group, copy)
            completion, drawn, known = naive(logits_of, item, turns, length, temperature, name)
            ids.append((completion, drawn))
            logprobs += known
    return ids, logprobs


@pytest.fixture(scope="module")
def expected(qwen):
    """What is to be drawn for 3 copies of each example."""
    ids, logprobs = drawn_naively(qwen, copies=3)
    answers = [not all(drawn) for _, drawn in ids]
    assert 3 < sum(answers) < len(answers) - 2 and len({len(completion) for completion, _ in ids}) > 5
    return ids, logprobs


@pytest.mark.parametrize(
    ("rows", "steps", "look_every"), [(1, 5, 1), (2, 5, 6), (3, 1, 1), (3, 64, 1), (7, 5, 1), (7, 64, 16)]
)
def test_a_completion_is_what_it_is_alone(qwen, tokenizer, expected, monkeypatch, rows, steps, look_every):
    """Rows that wait, move, go on and are taken by the next completion, against each completion by itself."""
    monkeypatch.setattr(continuous_module, "ANSWER_STEPS", steps)
    for at_once, graphs in ((True, None), (False, StepGraphs)):
        turns, handed = Scripted(ENDS, at_once=at_once), {}
        sampler = continuous(qwen, tokenizer, turns, rows, look_every=look_every, graphs=graphs)
        groups = sampler.sample(EXAMPLES, 3, 1.0, 3, on_groups=handed.update, ids=PLACES)
        assert ids_of(groups) == expected[0]
        assert_rounded(logprobs_of(groups), expected[1])
        assert_rounded(logprobs_of(groups), scored(qwen, groups, 1.0))
        assert len(handed) == 5 and all(rollouts is groups[index] for index, rollouts in handed.items())
        assert turns.most_alive <= rows and turns.alive() == 0 and len(turns.dialogues) == 15


def long_or_short(drawn, turn):
    """Some completions are soon far ahead of the others, which go on beside them."""
    return None if turn == 4 else [40 + place % 20 for place in range(70 if turn == 0 and sum(drawn) % 3 == 0 else 2)]


def test_rows_that_wait_are_unharmed_where_recorded_steps_compute_them_too(qwen, tokenizer, monkeypatch):
    """In a cache without a token's room to spare: a row that waits has one token that was never fed."""
    monkeypatch.setattr(continuous_module, "ANSWER_STEPS", 5)
    monkeypatch.setattr(shared_cache, "GROW", 1.0)
    turns, options = Scripted(ENDS, long_or_short, at_once=False), dict(length=150, look_every=1)
    few = continuous(qwen, tokenizer, turns, rows=7, graphs=StepGraphs, **options)
    alone = continuous(qwen, tokenizer, Scripted(ENDS, long_or_short), rows=1, **options)
    waiting, step, arrange = [], SharedCache.step, Rows.arrange

    def noted(rows, drawing, **options):
        arrange(rows, drawing, **options)
        waiting[:] = (rows.state[PROMPT, drawing:] > 0).nonzero()[0] + drawing

    def counted(cache, of):
        computed.append(sum(row < of.shape.rows for row in waiting))
        step(cache, of)

    computed = []
    monkeypatch.setattr(Rows, "arrange", noted)
    monkeypatch.setattr(SharedCache, "step", counted)
    groups = few.sample(EXAMPLES, 3, 1.0, 3, ids=PLACES)
    assert sum(map(bool, computed)) > 20
    assert ids_of(groups) == ids_of(alone.sample(EXAMPLES, 3, 1.0, 3, ids=PLACES))
    assert_rounded(logprobs_of(groups), scored(qwen, groups, 1.0))


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_generate_draws_the_same(qwen, tokenizer, expected, rows):
    turns, handed = Scripted(ENDS), []
    sampler = plain(qwen, tokenizer, turns, rows)
    groups = sampler.sample(EXAMPLES, 3, 1.0, 3, on_groups=lambda groups: handed.extend(groups.items()), ids=PLACES)
    assert ids_of(groups) == expected[0]
    assert_rounded(logprobs_of(groups), expected[1])
    assert sorted(index for index, _ in handed) == [*range(5)]
    assert all(rollouts is groups[index] for index, rollouts in handed)
    assert turns.most_alive <= max(rows, 3) and turns.alive() == 0


def test_greedy_takes_the_likeliest_tokens(qwen, tokenizer):
    expected, _ = drawn_naively(qwen, copies=1, seed=None)
    assert sum(not all(drawn) for _, drawn in expected) > 1
    for sampler in (continuous(qwen, tokenizer, Scripted(ENDS), rows=3), plain(qwen, tokenizer, Scripted(ENDS))):
        assert ids_of([sampler.greedy(EXAMPLES)]) == expected


# Softcap, grouped heads, a part of each head rotated, positions that are learned, a mixture of experts, other norms.
ARCHITECTURES = ["gemma2", "llama", "gpt_neox", "phi", "glm", "opt", "gpt2", "mixtral", "cohere", "olmo2", "qwen3"]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_goes_on_after_answers(name, tokenizer, monkeypatch):
    monkeypatch.setattr(continuous_module, "ANSWER_STEPS", 5)
    model = packed(random_model(name))
    ids, logprobs = drawn_naively(model, copies=3, temperature=0.8)
    assert sum(not all(drawn) for _, drawn in ids) > 3
    samplers = [
        continuous(model, tokenizer, Scripted(ENDS), rows=4),
        continuous(model, tokenizer, Scripted(ENDS), rows=7, look_every=4, graphs=StepGraphs),
        plain(model, tokenizer, Scripted(ENDS)),
    ]
    for sampler in samplers:
        groups = sampler.sample(EXAMPLES, 3, 0.8, 3, ids=PLACES)
        assert ids_of(groups) == ids
        assert_rounded(logprobs_of(groups), logprobs)
        assert_rounded(logprobs_of(groups), scored(model, groups, 0.8))


def test_answers_longer_than_a_pass_and_than_a_block_of_queries(qwen, tokenizer, monkeypatch):
    """Three passes for what comes at one time, and a mask of more than 256 queries."""
    monkeypatch.setattr("grpo.sampling.rows.PREFILL_TOKENS", 330)
    answer = [7 + place % 13 for place in range(300)]
    turns = Scripted(ENDS, lambda drawn, turn: None if turn else answer[: 30 * len(drawn)])
    sampler = continuous(qwen, tokenizer, turns, length=400)
    extend, counts = SharedCache.extend, []

    def counted(cache, layer, key, value):
        counts.extend([[row.count for row in cache.fed]] if layer == 0 else [])
        return extend(cache, layer, key, value)

    monkeypatch.setattr(SharedCache, "extend", counted)
    groups = sampler.sample(EXAMPLES, 3, 1.0, 3, ids=PLACES)
    assert_rounded(logprobs_of(groups), scored(qwen, groups, 1.0))
    assert len(counts) > 2 and max(map(max, counts)) == 301 and max(map(len, counts)) > 1
    assert all(sum(part) <= 330 for part in counts)


def test_on_a_card_all_that_is_fed_is_there(tokenizer, expected, monkeypatch):
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # the cards are not made for it
    with Cards():
        model = build(CONFIGS["qwen2"]).to("meta:0")
        switch_on(model, "segments")
        sampler = continuous(model, tokenizer, Scripted(ENDS), rows=7, graphs=StepGraphs)
        ids = ids_of(sampler.sample(EXAMPLES[:1], 3, 1.0, 3, ids=PLACES))
    assert ids == expected[0][:3] and any(False in drawn for _, drawn in ids)


@pytest.mark.parametrize("at_once", [True, False])
def test_how_long_an_answer_takes_changes_no_bit(qwen, tokenizer, at_once):
    results = []
    for slow in (0.0, 0.02, 0.15):
        turns = Scripted(ENDS, at_once=at_once, delay=lambda drawn, slow=slow: slow * (sum(drawn) % 3 == 0))
        groups = continuous(qwen, tokenizer, turns, rows=4).sample(EXAMPLES, 2, 1.0, 3, ids=PLACES)
        results.append([(item.completion_ids, np.array(item.sampling_logprobs).tobytes()) for item in flat(groups)])
    late = [drawn for dialogue in turns.dialogues for drawn, _ in dialogue.asked if sum(drawn) % 3 == 0]
    assert results[0] == results[1] == results[2] and len(late) > 5


def test_rows_draw_on_while_another_waits_for_its_answer(qwen, tokenizer):
    """The first segment that ends is answered when all other completions have been handed over."""
    future, order = Future(), []
    answers = iter([future])
    dialogue = SimpleNamespace(
        outcome=Outcome(finished=True, messages=[]), answer=lambda drawn, room: next(answers, None), close=lambda: None
    )
    turns = SimpleNamespace(begin=lambda example, name: dialogue)

    def on_groups(groups):
        order.extend(groups)
        if len(order) == 3:
            future.set_result([7, 8, 9])

    timer = threading.Timer(60, lambda: future.done() or future.set_exception(TimeoutError))
    timer.start()
    groups = continuous(qwen, tokenizer, turns, rows=2).sample(EXAMPLES[:4], 1, 1.0, 3, on_groups)
    timer.cancel()
    assert len({*order}) == 4 and [False in groups[index][0].drawn for index in order] == [False] * 3 + [True]


def test_no_more_is_computed_than_rows_that_draw_and_each_answer_once(qwen, tokenizer):
    tokens, turns = 0, Scripted(ENDS)

    def count(_, inputs):
        nonlocal tokens
        tokens += inputs[0].numel()

    hook = qwen.model.embed_tokens.register_forward_pre_hook(count)
    try:
        groups = continuous(qwen, tokenizer, turns).sample(EXAMPLES, 3, 1.0, 3, ids=PLACES)
    finally:
        hook.remove()
    prompts = sum(len(item.prompt_ids) for item in EXAMPLES)
    # A segment's last token is fed with the answer, its first drawn without a step; one of one token ends after a step.
    answers = sum(len(dialogue.asked) - 1 for dialogue in turns.dialogues)
    answers += sum(not drawn for rollout in flat(groups) for drawn in rollout.drawn)
    segments = [segment for dialogue in turns.dialogues for segment in dialogue.asked]
    assert tokens == prompts + answers + sum(len(drawn) - 1 or room > 0 for drawn, room in segments)
    assert answers > 50


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 8.0]}


@pytest.mark.parametrize("make", [continuous, plain])
@pytest.mark.parametrize(
    "config",
    [
        CONFIGS["gpt2, learned positions"],
        LlamaConfig(**SMALL | {"max_position_embeddings": 256}, initializer_range=0.3, rope_parameters=LONGROPE),
    ],
    ids=["learned", "longrope"],
)
def test_no_row_is_computed_beyond_the_largest_length(tokenizer, make, config):
    """With rows far ahead of others: there is no 65th position to learn, and longrope scales all where there is one."""
    model = packed(build(config))

    def answer(drawn, turn):
        return None if turn == 4 else [40 + place % 20 for place in range(35 if turn == 0 and sum(drawn) % 2 else 1)]

    assert max(len(item.prompt_ids) for item in EXAMPLES) + 55 == 64
    ids, logprobs = drawn_naively(model, copies=3, length=55, answer=answer)
    turns = Scripted(ENDS, answer)
    groups = make(model, tokenizer, turns, length=55).sample(EXAMPLES, 3, 1.0, 3, ids=PLACES)
    assert ids_of(groups) == ids
    assert_rounded(logprobs_of(groups), logprobs)
    asked = [[segment for segment, _ in dialogue.asked] for dialogue in turns.dialogues]
    assert asked == [[part for is_drawn, part in cut_segments(*pair) if is_drawn] for pair in ids]
    # Some long answers fit, and segments after them fill the room; others are still short then.
    assert max(len(completion) for completion, _ in ids) == 55
    assert any(35 < len(completion) < 55 for completion, _ in ids)


def always(ids):
    return lambda drawn, turn: ids


@pytest.mark.parametrize("make", [continuous, plain])
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_what_does_not_fit_ends_the_completion_unfinished(qwen, tokenizer, make, length):
    """Every answer is as long as two tokens; in the last steps, at the end, and where the first token is an end."""
    everything = [*range(64)]
    for ends in (ENDS, everything, [10**6]):
        for at_once in (True, False):
            turns = Scripted(ends, always([40, 41]), at_once=at_once)
            sampler = make(qwen, tokenizer, turns, rows=4, length=length)
            sampler.eos_token_ids = ends
            rollouts = flat(sampler.sample(EXAMPLES, 2, 1.0, 3))
            for rollout, dialogue in zip(rollouts, turns.dialogues, strict=True):
                assert not rollout.finished and rollout.drawn[-1] and len(rollout.completion_ids) <= length
                (*before, (last, room)) = dialogue.asked
                assert room == length - len(rollout.completion_ids) and (room <= 2 if last[-1] in ends else room == 0)
                assert [token for drawn, _ in before for token in [*drawn, 40, 41]] + last == rollout.completion_ids
            if ends == everything:
                assert {len(rollout.completion_ids) for rollout in rollouts} == {length - (length - 1) % 3}


@pytest.mark.parametrize("make", [continuous, plain])
def test_text_and_finished_are_those_of_what_was_drawn(qwen, make):
    """Ids that a tokenizer would never make of their text stay what was drawn."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    pairs = {a + b: 200 + index for index, (a, b) in enumerate(pairwise(letters))}
    vocabulary = {letter: place for place, letter in enumerate(letters)} | {"#": 62, "~": 63} | pairs
    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocabulary, [(*pair,) for pair in pairs])), pad_token="~", eos_token="#"
    )
    turns = Scripted([62], lambda drawn, turn: None if turn == 1 else [*range(1, 6)])
    sampler = make(qwen, merging, turns)
    sampler.eos_token_ids = [62]
    rollouts = flat(sampler.sample(EXAMPLES, 8, 1.0, 3))
    answered = [rollout for rollout in rollouts if not all(rollout.drawn)]
    assert len(answered) > 2
    for rollout, dialogue in zip(rollouts, turns.dialogues, strict=True):
        segments = [[letters[token] for token in drawn if token < 62] for drawn, _ in dialogue.asked]
        assert rollout.text.replace(" ", "") == "\n".join("".join(segment) for segment in segments)
        assert rollout.outcome == dialogue.outcome and rollout.finished == dialogue.outcome.finished
    for rollout in answered:
        whole = merging.decode(rollout.completion_ids).replace(" ", "")
        assert merging(whole)["input_ids"] != rollout.completion_ids


class Broken(Exception):
    pass


@pytest.mark.parametrize("make", [continuous, plain])
@pytest.mark.parametrize("where", ["answer", "future", "begin", "close", "on_groups"])
def test_whatever_fails_every_dialogue_is_closed(qwen, tokenizer, make, where, monkeypatch):
    turns = Scripted(ENDS)
    begin, count = turns.begin, 0

    def failing_begin(example, name):
        nonlocal count
        count += 1
        if where == "begin" and count == 4:
            raise Broken
        dialogue = begin(example, name)
        if count == 3:
            answer, close = dialogue.answer, dialogue.close

            def failing_answer(*arguments):
                answer(*arguments)
                if where == "answer":
                    raise Broken
                future = Future()
                future.set_exception(Broken())
                return future

            def failing_close():
                close()
                raise Broken

            if where in ("answer", "future"):
                dialogue.answer = failing_answer
            elif where == "close":
                dialogue.close = failing_close
        return dialogue

    def on_groups(groups):
        if where == "on_groups":
            raise Broken

    turns.begin = failing_begin
    with pytest.raises(Broken):
        make(qwen, tokenizer, turns, rows=6).sample(EXAMPLES, 3, 1.0, 3, on_groups)
    assert len(turns.dialogues) > 2 and turns.alive() == 0


def test_a_stream_is_one_segment(qwen, tokenizer):
    turns = Scripted(ENDS)
    for sampler in (continuous(qwen, tokenizer, turns), plain(qwen, tokenizer, turns)):
        rollout = sampler.stream(EXAMPLES[0], 1.0, 3, lambda ids: False)
        assert rollout.drawn is None and rollout.outcome is None and not turns.dialogues


def test_the_choice_at_the_start_hands_turns_on(tokenizer):
    model = build(CONFIGS["qwen2"])
    for packs, kind in ((make_batcher(model, 0).packs, ContinuousSampler), (False, LocalSampler)):
        turns = Scripted([2])
        sampler = make_sampler(model, tokenizer, 6, rows=4, packs=packs, turns=turns)
        assert type(sampler) is kind and not turns.dialogues
        sampler.sample(EXAMPLES, 1, 1.0, 3)
        assert len(turns.dialogues) == 5 and turns.alive() == 0


@pytest.mark.parametrize("name", ["mistral, sliding window", "gemma2, softcapped"])
def test_what_is_longer_than_a_window_has_turns_too(name, tokenizer):
    model = packed(build(CONFIGS[name]))
    groups, expected = (
        kind(model, tokenizer, Scripted(ENDS), 6).sample(EXAMPLES, 3, 1.0, 1) for kind in (continuous, plain)
    )
    assert_rounded(logprobs_of(groups), logprobs_of(expected))
    assert ids_of(groups) == ids_of(expected) and any(not all(drawn) for _, drawn in ids_of(groups))

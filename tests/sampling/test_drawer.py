"""Segments that are asked for from many threads are those of a plain forward pass, in whatever rows they were drawn."""

import random
import threading
import time
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest
import torch
from models import ENDS, GPT2, build, packed, random_model
from rounding import assert_rounded
from transformers import GPT2Config

from grpo.sampling.draw import draw, in_blocks
from grpo.sampling.drawer import Drawer, Drawn, Segment
from grpo.sampling.generate import policy_that_draws
from grpo.sampling.rows import Rows

TEMPERATURE, LONGEST = 0.7, 200


@pytest.fixture(scope="module")
def model():
    return packed(random_model("qwen2"))


def make_drawer(
    model, rows: int, look_every: int = 1, ends: list[int] = (), has_scales: bool = False, longest: int = LONGEST
) -> Drawer:
    settings = {"slots": rows, "copies": 1, "longest_prompt": 8, "longest": longest, "temperature": TEMPERATURE}
    settings |= {"is_greedy": False, "has_scales": has_scales}
    made = Rows(model, rows=rows, **settings, ends=ends, graphs=None, vision=None)
    return Drawer(made, longest, look_every)


def segment(ids, room: int, seed=0, **others) -> Segment:
    return Segment(prompt_ids=[*ids], room=room, numbers=np.random.default_rng(seed).random(room), **others)


def drawn_while(model, drawer: Drawer, *clients) -> None:
    """Draw until these functions, each in a thread, have returned."""
    threads = [threading.Thread(target=client) for client in clients]
    with policy_that_draws(model):
        for thread in threads:
            thread.start()
        drawer.run(lambda: not any(thread.is_alive() for thread in threads))


def by_hand(model, asked: Segment, count: int) -> tuple[list[int], list[float]]:
    """The first tokens of a segment and their log-probs, each from a forward pass over all ids before it."""
    ids, logprobs = [*asked.prompt_ids], []
    for place in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[:, -1].float() / TEMPERATURE * asked.scale
        token, logprob = draw(in_blocks(logits), torch.from_numpy(asked.numbers[place : place + 1]))
        ids.append(token.item())
        logprobs.append(logprob.item())
    return ids[len(asked.prompt_ids) :], logprobs


@pytest.mark.parametrize(("rows", "look_every"), [(1, 1), (3, 4), (16, 1)])
def test_segments_are_those_of_a_plain_pass(model, rows, look_every):
    asked: list[Segment] = []

    def episode(number: int) -> None:
        rng = random.Random(number)
        ids = [rng.randrange(3, 60) for _ in range(rng.randrange(2, 12))]
        before = None
        for turn in range(4):
            before = segment(ids, rng.randrange(1, 20), seed=(number, turn), after=before)
            asked.append(before)
            drawer.submit(before)
            ids = [*ids, *before.done.result().ids, *(rng.randrange(3, 60) for _ in range(rng.randrange(1, 6)))]
            time.sleep(rng.random() * 0.02)

    drawer = make_drawer(model, rows, look_every, ENDS)
    drawn_while(model, drawer, *(lambda number=number: episode(number) for number in range(10)))
    assert len(asked) == 40
    for each in asked:
        drawn = each.done.result()
        ids, logprobs = by_hand(model, each, len(drawn.ids))
        assert drawn.ids == ids
        assert_rounded(torch.tensor(drawn.logprobs), torch.tensor(logprobs))
        assert len(ids) == each.room or ids[-1] in ENDS
        assert not {*ids[:-1]} & {*ENDS}
    assert drawer.fed > 0 or rows < 16  # with few rows each is needed before its program comes back


def test_no_row_draws_beyond_the_models_last_position():
    model = packed(build(GPT2Config(**GPT2 | {"n_positions": 32})))
    drawer, asked = make_drawer(model, 3, look_every=16, longest=32), []

    def episode() -> None:
        first = segment(range(20, 30), 5, seed=1)
        drawer.submit(first)
        ids = [*first.prompt_ids, *first.done.result().ids, 7]
        last, alone = segment(ids, 32 - len(ids), seed=2, after=first), segment(range(3, 34), 1, seed=3)
        asked.extend((first, last, alone))
        for each in asked[1:]:
            drawer.submit(each)
        for each in asked[1:]:
            each.done.result()

    drawn_while(model, drawer, episode)
    for each in asked:
        ids, _ = by_hand(model, each, each.room)
        assert each.done.result().ids == ids


def test_a_segment_may_have_a_temperature_of_its_own(model):
    """Beside others, and where it goes on in another's row, and another in its."""
    scales = (1.0, TEMPERATURE / 0.2, 2.0**40, TEMPERATURE / 1.7)
    asked: list[Segment] = []

    def episode(number: int) -> None:
        ids, before = [number + 5, number + 6], None
        for turn in range(4):
            scale = scales[(number + turn) % 4]
            before = segment(ids, 6, seed=(number, turn), after=before, scale=scale)
            asked.append(before)
            drawer.submit(before)
            ids = [*ids, *before.done.result().ids, 7]

    drawer = make_drawer(model, 16, has_scales=True)
    drawn_while(model, drawer, *(lambda number=number: episode(number) for number in range(4)))
    assert drawer.fed == 12 and sorted(each.scale for each in asked) == sorted(scales * 4)
    for each in asked:
        ids, logprobs = by_hand(model, each, 6)
        assert each.done.result().ids == ids
        assert_rounded(torch.tensor(each.done.result().logprobs), torch.tensor(logprobs))
        if each.scale == 2.0**40:
            with torch.no_grad():
                logits = model(torch.tensor([[*each.prompt_ids, *ids]])).logits[0, len(each.prompt_ids) - 1 : -1]
            assert ids == logits.argmax(dim=1).tolist() and logprobs == [0.0] * 6


def test_equal_ids_are_computed_once_and_a_segment_goes_on_where_its_row_stands(model):
    drawer = make_drawer(model, 4)
    first = [segment(range(5, 19), 6, seed=number) for number in range(3)]
    for each in first:
        drawer.submit(each)

    def ask() -> None:
        ids = [*first[0].prompt_ids, *first[0].done.result().ids, 9, 8]
        after = segment(ids, 5, after=first[0])
        drawer.submit(after)
        after.done.result()

    drawn_while(model, drawer, ask)
    assert (drawer.computed, drawer.fed) == (14, 2)


def test_a_segment_ends_where_its_watcher_says(model):
    wanted = segment([7, 8, 9], 30, find_end=lambda ids: 4 if len(ids) >= 6 else None)
    after = segment([1], 3)
    drawer = make_drawer(model, 2, look_every=4)

    def ask() -> None:
        drawer.submit(wanted)
        kept = wanted.done.result().ids
        nonlocal after
        after = segment([*wanted.prompt_ids, *kept, 5], 7, seed=3, after=wanted)
        drawer.submit(after)
        after.done.result()

    drawn_while(model, drawer, ask)
    assert wanted.done.result().ids == by_hand(model, wanted, 4)[0]
    assert after.done.result().ids == by_hand(model, after, len(after.done.result().ids))[0]
    assert drawer.fed == 1


def test_who_cancels_frees_the_row_at_once_and_what_comes_too_late_fails(model):
    begun, cancelled, looks = threading.Event(), threading.Event(), []

    def hold(ids: list[int]) -> None:
        looks.append(ids)
        begun.set()
        assert cancelled.wait(20)

    long, waits, other = segment([7, 8], 150, find_end=hold), segment([7, 9], 150), segment([5, 6], 5)
    drawer = make_drawer(model, 1)

    def ask() -> None:
        for each in (long, waits, other):
            drawer.submit(each)
        assert begun.wait(20)
        for each in (waits, long):
            each.done.cancel()
        cancelled.set()
        other.done.result()

    drawn_while(model, drawer, ask)
    assert len(looks) == 2  # before it was cancelled and when that was seen
    ids = other.done.result().ids
    assert ids == by_hand(model, other, len(ids))[0]
    with pytest.raises(CancelledError):
        waits.done.result(0)
    late = segment([5, 6], 5)
    drawer.submit(late)
    with pytest.raises(RuntimeError, match="nothing is drawn any more"):
        late.done.result(1)


def test_logits_that_are_nan_fail_the_run_and_all_that_wait():
    model = packed(random_model("qwen2"))
    model.get_output_embeddings().weight.data.fill_(torch.nan)
    drawer = make_drawer(model, 2)
    asked = [segment([7, number], 5) for number in range(5, 9)]
    for each in asked:
        drawer.submit(each)
    with pytest.raises(FloatingPointError, match="logits are NaN"):
        drawn_while(model, drawer, lambda: [each.done.exception() for each in asked])
    assert {type(each.done.exception(1)) for each in asked} == {FloatingPointError}


def test_what_was_drawn_is_kept_before_anyone_has_it_and_what_cannot_be_kept_ends_all(model):
    kept, drawer = [], make_drawer(model, 2)

    def keep(drawn: Drawn, done: Future[Drawn]) -> None:
        kept.append((drawn.ids, first.done.done()))
        done.set_result(drawn)

    def fail(drawn: Drawn, done: Future[Drawn]) -> None:
        raise OSError(28, "no room")

    first, second = segment([7, 8], 3, keep=keep), segment([7, 9], 6, keep=fail)
    drawer.submit(first)
    drawer.submit(second)
    with policy_that_draws(model), pytest.raises(OSError, match="no room"):
        drawer.run(lambda: False)
    assert kept == [(first.done.result().ids, False)]
    with pytest.raises(OSError, match="no room"):
        second.done.result(0)

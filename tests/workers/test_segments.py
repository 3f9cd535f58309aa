"""Completions of several segments: each goes on by itself, and all are closed."""

import itertools
import math
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
from said_turns import RUN_TURNS, SaidTurns, answer_to

from grpo.rewards.functions import RewardError
from grpo.rollouts.records import Outcome
from grpo.wire.completions import check_drawn, cut_segments
from grpo.wire.rollouts import RunInfo, Task
from grpo.workers.segments import draw_in_turns
from grpo.workers.turns import WorkerTurns

RUN = RunInfo("0" * 16, "run", 100, [2], 8, 40, 1.0, 0, "0" * 64, in_flight_weight_updates=True, turns=RUN_TURNS)
TASK = Task(3, 0, 0, [5, 6, 7], '{"secret": 1}')


def drawer(tokenizer):
    """What draws a segment of one to twelve ids, each by the next version; an eos ends it where there is room."""
    numbers, lock = itertools.count(), threading.Lock()

    def draw(prompt: list[int], room: int):
        assert prompt[:3] == TASK.prompt_ids and room > 0
        with lock:
            version = next(numbers)
        length = 1 + (7 * version) % 12
        ids = [*(3 + (version + place) % 50 for place in range(length - 1)), 2][:room]
        return ids, [-0.5] * len(ids), [version] * len(ids)

    return draw


def test_a_completion_is_what_was_drawn_and_answered_in_turn(tokenizer):
    turns = SaidTurns([2])
    group = draw_in_turns(WorkerTurns(turns, tokenizer), RUN, TASK, drawer(tokenizer))
    check_drawn(group, RUN, TASK, range(1000))
    assert turns.begun[0].example.columns == {"secret": 1}
    assert turns.begun[0].example.prompt == tokenizer.decode(TASK.prompt_ids)
    assert all(dialogue.is_closed for dialogue in turns.begun) and len(turns.begun) == 8
    answers = 0
    for ids, mask, logprobs in zip(group.completions, group.drawn, group.logprobs, strict=True):
        parts = cut_segments(ids, mask)
        for (_, segment), (_, answer) in zip(parts[:-1:2], parts[1::2], strict=True):
            assert answer == answer_to(segment, {"secret": 1})
            answers += 1
        assert [math.isnan(value) for value in logprobs] == [not is_drawn for is_drawn in mask]
    assert answers > 5 and {outcome.finished for outcome in group.outcomes} == {True, False}


def test_a_completion_waits_for_its_own_answers_alone(tokenizer):
    """The first one's answer comes when all others have ended."""
    ended = []

    class Slow:
        def begin(self, example):
            return Dialogue()

    class Dialogue:
        outcome = Outcome(True, [])

        def answer(self, drawn, room):
            first.setdefault("dialogue", self)
            if first["dialogue"] is self:
                return waiting
            return None

        def close(self):
            ended.append(self)
            if len(ended) == RUN.num_generations - 1:
                waiting.set_result(None)

    first, waiting = {}, Future()
    group = draw_in_turns(WorkerTurns(Slow(), tokenizer), RUN, TASK, drawer(tokenizer))
    assert ended[-1] is first["dialogue"] and len(ended) == 8 and len(group.outcomes) == 8


def test_what_fails_ends_the_group_and_closes_all_of_it(tokenizer):
    def fail(example):
        raise RewardError("environment='a.py:A': reset raised ValueError: no")

    turns, draws = SaidTurns([2], fail=fail), []
    draw = drawer(tokenizer)

    def noted(prompt, room):
        draws.append(len(prompt))
        return draw(prompt, room)

    with pytest.raises(RewardError, match="reset raised"):
        draw_in_turns(WorkerTurns(turns, tokenizer), replace(RUN), TASK, noted)
    assert all(dialogue.is_closed for dialogue in turns.begun) and {*draws} == {3}

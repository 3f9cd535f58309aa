"""Completions of several segments: each goes on by itself, and all are closed."""

import itertools
import math
import threading
from concurrent.futures import Future

import pytest
from scripted_turns import Scripted, by_parity, count_answers
from stored import TURNS, run_info, task_of

from grpo.config.errors import RewardError
from grpo.data.records import Outcome
from grpo.pool.protocol import check_drawn
from grpo.workers.engine import WorkerTools, draw_in_turns

RUN = run_info(num_generations=8, max_completion_length=40, in_flight_weight_updates=True, turns=TURNS)
TASK = task_of(3, [5, 6, 7], columns='{"secret": 1}')


def drawer():
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
    turns = Scripted([2], by_parity, delay=lambda drawn: sum(drawn) % 7 / 300)
    group = draw_in_turns(WorkerTools(turns, tokenizer), RUN, TASK, drawer())
    check_drawn(group, RUN, TASK)
    assert turns.dialogues[0].example.columns == {"secret": 1}
    assert turns.dialogues[0].example.prompt == tokenizer.decode(TASK.prompt_ids)
    assert [dialogue.closed for dialogue in turns.dialogues] == [1] * 8
    assert count_answers(group) > 2 and any(outcome.finished for outcome in group.outcomes)
    for mask, logprobs in zip(group.drawn, group.logprobs, strict=True):
        assert [math.isnan(value) for value in logprobs] == [not is_drawn for is_drawn in mask]


def test_a_completion_waits_for_its_own_answers_alone(tokenizer):
    """The first one's answer comes when all others have ended."""
    ended, waiting = [], Future()

    class Dialogue:
        outcome = Outcome(finished=True, messages=[])

        def answer(self, drawn, room):
            return waiting if self is dialogues[0] else None

        def close(self):
            ended.append(self)
            if len(ended) == RUN.num_generations - 1:
                waiting.set_result(None)

    class Slow:
        def begin(self, example, name=None):
            dialogues.append(Dialogue())
            return dialogues[-1]

    dialogues = []
    group = draw_in_turns(WorkerTools(Slow(), tokenizer), RUN, TASK, drawer())
    assert ended[-1] is dialogues[0] and len(ended) == 8 and len(group.outcomes) == 8


def test_what_fails_ends_the_group_and_closes_all_of_it(tokenizer):
    def fail(drawn, turn):
        raise RewardError("environment='a.py:A': reset raised ValueError: no")

    turns, draws, draw = Scripted([2], fail), [], drawer()

    def noted(prompt, room):
        draws.append(len(prompt))
        return draw(prompt, room)

    with pytest.raises(RewardError, match="reset raised"):
        draw_in_turns(WorkerTools(turns, tokenizer), RUN, TASK, noted)
    assert turns.dialogues and not turns.alive() and {*draws} == {3}

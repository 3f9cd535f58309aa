"""Turns of the tests' own, which answer by rules, and completions of several segments drawn the naive way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch

from grpo.data.records import Example, Outcome
from grpo.pool.protocol import GroupResult
from grpo.wire.tool_outcomes import cut_segments

Answer = Callable[[list[int], int], list[int] | None]
"""takes what was drawn, and how many segments there were before; None ends the completion"""


def by_sum(drawn: list[int], turn: int) -> list[int] | None:
    """None to six ids, ends among them; the completion is over after one segment of five, and after four."""
    if sum(drawn) % 5 == 0 or turn == 3:
        return None
    return [(sum(drawn) + 7 * place + turn) % 60 + 3 for place in range(sum(drawn) % 7)]


def by_parity(drawn: list[int], turn: int) -> list[int] | None:
    """One to three ids, an eos among them; None after every other segment."""
    return None if sum(drawn) % 2 else [5 + (sum(drawn) + turn) % 40, 2, 7][: 1 + sum(drawn) % 3]


def count_answers(group: GroupResult, rule: Answer = by_parity) -> int:
    """Assert that each answer in a group is the rule's to the segment before it; return how many there are."""
    answers = 0
    for ids, mask in zip(group.completions, group.drawn, strict=True):
        parts = cut_segments(ids, mask)
        for turn, ((_, segment), (_, answer)) in enumerate(zip(parts[:-1:2], parts[1::2], strict=True)):
            assert answer == rule(segment, turn)
            answers += 1
    return answers


class Scripted:
    """Turns whose dialogues are noted."""

    def __init__(
        self,
        ends,
        answer: Answer = by_sum,
        delay: Callable[[list[int]], float] = lambda drawn: 0.0,
        at_once: bool = True,
    ):
        """With `at_once` a dialogue says at once that its completion is over."""
        self.ends, self.rule, self.delay, self.at_once = {*ends}, answer, delay, at_once
        self.dialogues: list[Scripts] = []
        self.most_alive = 0

    def begin(self, example: Example, name: tuple[int, int, int] | None = None) -> Scripts:
        self.dialogues.append(Scripts(self, example))
        self.most_alive = max(self.most_alive, self.alive())
        return self.dialogues[-1]

    def alive(self) -> int:
        return sum(dialogue.closed == 0 for dialogue in self.dialogues)


class Scripts:
    """A dialogue of Scripted."""

    def __init__(self, turns: Scripted, example: Example):
        self._turns, self.example, self.outcome = turns, example, None
        self.asked: list[tuple[list[int], int]] = []
        self.answered = 0
        self.closed = 0

    def answer(self, drawn: list[int], room: int) -> Future | None:
        assert self.closed == 0 and self.outcome is None and drawn and room >= 0
        was_cut = drawn[-1] not in self._turns.ends
        assert not was_cut or room == 0
        ids = None if was_cut else self._turns.rule(drawn, len(self.asked))
        fits = ids is None or len(ids) < room
        is_over = ids is None or not fits
        self.asked.append((drawn, room))
        future = Future()

        def set_result() -> None:
            self.answered += 1
            if is_over:
                self.outcome = Outcome(
                    finished=not was_cut and fits, messages=[{"role": "assistant", "content": len(self.asked)}]
                )
            future.set_result(None if is_over else ids)

        says_so_at_once = is_over and self._turns.at_once
        if says_so_at_once or not (seconds := self._turns.delay(drawn)):
            set_result()
        else:
            threading.Timer(seconds, set_result).start()
        return None if says_so_at_once else future

    def close(self) -> None:
        self.closed += 1


@torch.no_grad()
def naive(
    logits_of: Callable[[list[int]], torch.Tensor],
    example: Example,
    turns: Scripted,
    longest: int,
    temperature: float = 1.0,
    name: tuple[int, int, int] | None = None,
) -> tuple[list[int], list[bool], list[float]]:
    """Draw a completion token by token from `logits_of(completion so far)`, in float64: ids, which of them were drawn,
    and the log-probs of those.

    `name`: seed, group and number in the group; None is greedy.
    """
    numbers = None
    if name is not None:
        numbers = np.random.Generator(np.random.Philox(np.random.SeedSequence(name))).random(longest)
    dialogue, ids, drawn, logprobs, start = turns.begin(example), [], [], [], 0
    while True:
        logits = logits_of(ids).double().numpy() / temperature
        ends = np.cumsum(np.exp(logits - logits.max()))
        token = int(logits.argmax() if numbers is None else (ends <= numbers[len(ids)] * ends[-1]).sum())
        logprobs.append(logits[token] - logits.max() - np.log(ends[-1]))
        ids.append(token)
        drawn.append(True)
        if token in turns.ends or len(ids) == longest:
            future = dialogue.answer(ids[start:], longest - len(ids))
            answer = None if future is None else future.result()
            if answer is None:
                return ids, drawn, logprobs
            ids += answer
            drawn += [False] * len(answer)
            start = len(ids)

"""What answers a policy in tests: ids that follow from the ids that were drawn, after a while."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from grpo.rollouts.records import Example, Outcome
from grpo.wire.turns import RunTurns

RUN_TURNS = RunTurns(["add"], "f" * 64, None, ["Guess"], None, None, 2048, "auto", None)


def answer_to(drawn: Sequence[int], columns: dict) -> list[int] | None:
    """Return one to three ids, an eos of most models (2) among them; None after every other segment."""
    number = sum(drawn) + columns.get("secret", 0)
    return None if number % 2 else [5 + number % 40, 2, 7][: 1 + number % 3]


class SaidTurns:
    """Turns of grpo/rollouts/turns.py, with the answers of `answer_to`."""

    def __init__(self, eos_token_ids: Sequence[int], seconds: float = 0.02, fail: Callable[[Example], None] = id):
        """`seconds` are the most that an answer takes. `fail` may raise, in the place of a first answer."""
        self.eos, self._seconds, self._fail = {*eos_token_ids}, seconds, fail
        self.begun: list[SaidDialogue] = []
        self.is_closed = False

    def begin(self, example: Example) -> SaidDialogue:
        self.begun.append(SaidDialogue(self, example))
        return self.begun[-1]

    def close(self) -> None:
        self.is_closed = True

    def later(self, resolve: Callable[[], None]) -> None:
        threading.Timer(random.random() * self._seconds, resolve).start()


class SaidDialogue:
    def __init__(self, turns: SaidTurns, example: Example):
        self.turns, self.example = turns, example
        self.outcome: Outcome | None = None
        self.segments: list[list[int]] = []
        self.is_closed = False

    def answer(self, drawn: list[int], room: int) -> Future:
        assert self.outcome is None and not self.is_closed
        self.segments.append(drawn)
        is_whole = drawn[-1] in self.turns.eos
        ids = answer_to(drawn, self.example.columns) if is_whole else None
        finished = is_whole and ids is None
        if ids is not None and len(ids) >= room:
            ids = None
        if ids is None:
            messages = [{"role": "assistant", "content": str(segment)} for segment in self.segments]
            self.outcome = Outcome(finished, messages, len(self.segments) - 1, 0, {"Guess": float(sum(drawn))})
        future: Future = Future()

        def resolve() -> None:
            try:
                self.turns._fail(self.example)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(ids)

        self.turns.later(resolve)
        return future

    def close(self) -> None:
        self.is_closed = True

"""The sampler of the trainer's own process: a decode loop with the policy, always full.

Each prompt is computed once for its group, and its keys and values are shared (grpo/model/shared_cache.py). A row that
has ended leaves at once and the next completion takes its place; when none is left to begin, the last row moves there
and the batch gets smaller. What a row draws does not depend on the rows beside it (grpo/sampling/draw.py), so `rows` is
a matter of memory and speed alone. The idea is that of Orca (Yu et al. 2022, OSDI, section 3.1).

With turns a row whose segment has ended waits for its answer, and the others draw on. When the answer is taken in
follows from what is drawn, never from a clock: which rows are computed together moves the last bits of log-probs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from grpo.data.records import Example, Outcome, Rollout
from grpo.data.responder import Dialogue, close_all
from grpo.sampling.draw import uniforms
from grpo.sampling.generate import LOOK_EVERY, LocalSampler, Name, policy_that_draws
from grpo.sampling.rows import PLACE, Rows
from grpo.sampling.sampler import OnGroups
from grpo.wire.picture_files import PicturedPrompt

ANSWER_STEPS = 32  # that the rows which draw have until a segment's answer is taken in: 0.6 s at 20 ms a step

Finish = Callable[[int, list[int], list[float], list[bool] | None, Outcome | None], None]
"""takes a completion that is over: its number, ids, log-probs, which of them were drawn, and its outcome"""


class ContinuousSampler(LocalSampler):
    """The sampler that keeps its rows full. What does not fit `longest_packed` is left to transformers' `generate`."""

    def __init__(self, *arguments, longest_packed: int, look_every: int | None = None, graphs: Callable | None = None):
        """Take the arguments of LocalSampler, and `longest_packed`, the batcher's.

        Every `look_every` tokens the host waits for the device and asks which rows have ended; until then they draw on.
        With `graphs`, StepGraphs or what makes one for a device, steps have few shapes, which CUDA records.
        """
        super().__init__(*arguments)
        self._graphs = graphs
        on_cpu = self._model.device.type == "cpu"
        self._longest_packed, self._look_every = longest_packed, look_every or (1 if on_cpu else LOOK_EVERY)

    def _draw(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        names: list[Name] | None,
        on_groups: OnGroups | None,
    ) -> list[list[Rollout]]:
        longest = max(len(example.prompt_ids) for example in examples) + self._max_new_tokens
        if longest > self._longest_packed:
            return super()._draw(examples, copies, temperature, names, on_groups)
        groups: dict[int, list[Rollout | None]] = {index: [None] * copies for index in range(len(examples))}
        whole: dict[int, list[Rollout]] = {}

        def begin(number: int) -> _Completion:
            if self._turns is None:
                return _Completion(number, None)
            name = None if names is None else names[number]
            return _Completion(number, self._turns.begin(examples[number // copies], name))

        def finish(number: int, *completion) -> None:
            index, copy = divmod(number, copies)
            groups[index][copy] = self._rollout(*completion)
            if None not in groups[index]:
                whole[index] = groups[index]

        def hand_over() -> None:
            if whole and on_groups is not None:
                on_groups(dict(whole))
            whole.clear()

        with policy_that_draws(self._model):
            prompts = [example.prompt_ids for example in examples]
            graphs = self._graphs(self._model.device) if self._graphs else None
            arguments = self._max_new_tokens, temperature, names is None, self._eos, graphs, self._vision
            rows = Rows(self._model, prompts, copies, self._rows, *arguments)
            loop = _Loop(rows, prompts, copies, self._max_new_tokens, names, begin, finish, hand_over)
            loop.run(self._look_every)
        return [*groups.values()]


class _Loop:
    """The completions of one call, numbered example by example: which of them is in which row."""

    def __init__(
        self,
        rows: Rows,
        prompts: list[list[int] | PicturedPrompt],
        copies: int,
        longest: int,
        names: list[Name] | None,
        begin: Callable[[int], _Completion],
        finish: Finish,
        hand_over: Callable[[], None],
    ):
        self._rows, self._prompts, self._copies, self._longest = rows, prompts, copies, longest
        self._names, self._begin, self._finish, self._hand_over = names, begin, finish, hand_over
        self._left = deque(range(len(prompts) * copies))
        """the completions that have not begun"""
        self._in_rows: list[_Completion | None] = [None] * rows.count
        self._waiting: deque[_Completion] = deque()
        """those in rows whose answer is not taken in yet, by when it will be"""
        self._prompts_in: dict[int, _Prompt] = {}
        self._free_slots = [*range(rows.slots)]
        self._steps = 0

    def run(self, look_every: int) -> None:
        """Draw all. Call `finish` within `look_every` tokens of each completion's end, and `hand_over` after each look
        with such ends."""
        try:
            self._refill()
            while self._rows.drawing or self._waiting:
                ended: list[int] = []
                if self._rows.drawing:
                    self._steps += self._rows.steps(look_every)
                    ended = self._rows.look()
                else:
                    self._steps += ANSWER_STEPS  # nobody else would draw meanwhile
                self._end_segments(ended)
                if self._take_answers_in() or ended:
                    self._hand_over()
                    self._refill()
        finally:
            close_all(completion.dialogue for completion in self._in_rows if completion and completion.dialogue)

    def _end_segments(self, rows: list[int]) -> None:
        """Let the completions in these rows leave, or wait for the answer to their segment."""
        for row in rows:
            completion, end = self._in_rows[row], int(self._rows.state[PLACE, row]) + 1
            if completion.dialogue is not None:
                segment = self._rows.ids[row, len(completion.drawn) : end].tolist()
                completion.drawn += [True] * len(segment)
                completion.answer = completion.dialogue.answer(segment, self._longest - end)
            if completion.answer is None:
                self._leave(row)
            else:
                completion.due = self._steps + ANSWER_STEPS
                self._waiting.append(completion)

    def _take_answers_in(self) -> bool:
        """Take in the answers for which it is time, and wait for them. Return whether there were any.

        When it is time for one, all that have had half as long are taken in with it, as a pass for each costs more.
        """
        if not self._waiting or self._waiting[0].due > self._steps:
            return False
        rows: list[int] = []
        answers: list[list[int]] = []
        while self._waiting and self._waiting[0].due <= self._steps + ANSWER_STEPS // 2:
            completion = self._waiting.popleft()
            row, answer, completion.answer = self._in_rows.index(completion), completion.answer.result(), None
            if answer is None:
                self._leave(row)
            else:
                completion.drawn += [False] * len(answer)
                rows.append(row)
                answers.append(answer)
        if rows:
            self._rows.feed(rows, answers)
        return True

    def _leave(self, row: int) -> None:
        """Hand over the completion in a row, which is over; the row is free then."""
        completion, end = self._in_rows[row], self._rows.state[PLACE, row] + 1
        index = completion.number // self._copies
        self._prompts_in[index].left -= 1
        if self._prompts_in[index].left == 0:
            heappush(self._free_slots, self._prompts_in.pop(index).slot)
        drawn, outcome = None, None
        if completion.dialogue is not None:
            drawn, outcome = completion.drawn, completion.dialogue.outcome
            completion.dialogue.close()
        ids, logprobs = (values[row, :end].tolist() for values in (self._rows.ids, self._rows.logprobs))
        self._in_rows[row] = None
        self._rows.free(row)
        self._finish(completion.number, ids, logprobs, drawn, outcome)

    def _refill(self) -> None:
        """Let completions begin in free rows, then bring the rows that draw to the front."""
        free = [row for row, completion in enumerate(self._in_rows) if completion is None]
        taken: list[int] = []
        fresh: list[int] = []
        while self._left and len(taken) < len(free):
            index = self._left[0] // self._copies
            if index not in self._prompts_in:
                if not self._free_slots:
                    break
                base = self._rows.base(self._prompts[index])
                self._prompts_in[index] = _Prompt(heappop(self._free_slots), self._copies, base)
                fresh.append(index)
            taken.append(self._left.popleft())
        hidden = self._rows.prefill(
            [self._prompts[index] for index in fresh], [self._prompts_in[index].slot for index in fresh]
        )
        for index, states in zip(fresh, hidden, strict=True):
            self._prompts_in[index].hidden = states
        if taken:
            self._begin_in(free[: len(taken)], taken)
        self._bring_forward()

    def _begin_in(self, rows: list[int], numbers: list[int]) -> None:
        """Begin these completions, each in its row."""
        cells: list[tuple[int, int, int, int]] = []
        hidden: list[torch.Tensor] = []
        for row, number in zip(rows, numbers, strict=True):
            self._in_rows[row] = self._begin(number)
            index, copy = divmod(number, self._copies)
            prompt = self._prompts_in[index]
            cells.append((prompt.slot, copy, len(self._prompts[index]), prompt.base))
            hidden.append(prompt.hidden)
        uniform = None
        if self._names is not None:
            uniform = [uniforms(*self._names[number], self._longest) for number in numbers]
        self._rows.begin(rows, cells, hidden, uniform)

    def _bring_forward(self) -> None:
        """Move the last rows that draw to where none does, and a row that waits there to where they were."""
        draws = [completion is not None and completion.answer is None for completion in self._in_rows]
        drawing = sum(draws)
        moved = [row for row in range(drawing, len(draws)) if draws[row]]
        to = [row for row in range(drawing) if not draws[row]]
        back = [(there, here) for here, there in zip(moved, to, strict=True) if self._in_rows[there] is not None]
        moves = [*zip(moved, to, strict=True), *back]
        self._rows.move([row for row, _ in moves], [row for _, row in moves])
        for here, there in zip(moved, to, strict=True):
            self._in_rows[here], self._in_rows[there] = self._in_rows[there], self._in_rows[here]
        self._rows.arrange(drawing)


@dataclass(eq=False)
class _Completion:
    """A completion in a row."""

    number: int
    dialogue: Dialogue | None
    """what answers its segments; None in a run without turns"""
    drawn: list[bool] = field(default_factory=list)
    """of the tokens of its segments that have ended, and of their answers, which were drawn"""
    answer: Future[list[int] | None] | None = None
    """that to its last segment, where that has ended"""
    due: int = 0
    """the step after which the answer is taken in"""


@dataclass
class _Prompt:
    """A prompt that is being drawn from."""

    slot: int
    """its place in the cache"""
    left: int
    """how many of its completions are not over"""
    base: int
    """the position of a completion's first token"""
    hidden: torch.Tensor | None = None
    """the last hidden state, from which every completion's first token is drawn"""

"""The sampler of the trainer's own process: a decode loop with the policy, always full.

Each prompt is computed once for its group, and its keys and values are shared (grpo/model/shared_cache.py). A row that
has ended leaves at once and the next completion takes its place, or the last row, and the batch gets smaller. A row's
tokens do not depend on the rows beside it (grpo/sampling/draw.py). The idea is that of Orca (Yu et al. 2022, OSDI,
section 3.1).

With turns a row whose segment has ended waits for its answer, and the others draw on. The step at which an answer is
taken in follows from the drawn tokens, never from a clock: which rows are computed together moves the last bits of
log-probs.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from grpo.data.records import Dialogue, Responder, Rollout, close_all
from grpo.sampling.draw import uniforms
from grpo.sampling.generate import LOOK_EVERY, LocalSampler, policy_that_draws
from grpo.sampling.rows import PLACE, Rows, slots
from grpo.sampling.sampler import Groups, Order

ANSWER_STEPS = 32  # steps of the other rows until a segment's answer is taken in: 0.6 s at 20 ms a step


class ContinuousSampler(LocalSampler):
    """The sampler that keeps its rows full, for a model whose batches are packed."""

    def __init__(
        self, *arguments, look_every: int | None = None, graphs: Callable | None = None, fused=False, **options
    ):
        """Take the arguments of LocalSampler. Every `look_every` tokens the host asks the device which rows have ended.
        With `graphs`, StepGraphs or a function that makes one for a device, steps have few shapes, which CUDA records.
        `fused`: by the kernels of grpo/kernels, which `cannot_fuse` (grpo/model/token_pass.py) allows."""
        super().__init__(*arguments, **options)
        self._graphs, self.fused = graphs, fused
        on_cpu = self._model.device.type == "cpu"
        self._look_every = look_every or (1 if on_cpu else LOOK_EVERY)

    def _draw(self, order: Order) -> list[list[Rollout]]:
        prompts, count = len(order.examples), min(self._rows, len(order.examples) * order.copies)
        with policy_that_draws(self._model):
            rows = self._make_rows(
                order,
                rows=count,
                slots=slots(prompts, count, order.copies),
                copies=order.copies,
                longest_prompt=max(len(example.prompt_ids) for example in order.examples),
                longest=self._max_new_tokens,
            )
            return _Loop(rows, order, self._max_new_tokens, self._turns, self._rollout).run(self._look_every)

    def _make_rows(self, order: Order, **sizes: int) -> Rows:
        """Make the rows of an order, of these sizes: see Rows."""
        return Rows(
            self._model,
            temperature=order.temperature,
            is_greedy=order.names is None,
            ends=self.eos_token_ids,
            graphs=self._graphs(self._model.device) if self._graphs else None,
            fused=self.fused,
            vision=self._vision,
            **sizes,
        )


class _Loop:
    """The completions of one order: which of them is in which row."""

    def __init__(self, rows: Rows, order: Order, longest: int, turns: Responder | None, make_rollout: Callable):
        self._rows, self._order, self._longest, self._turns = rows, order, longest, turns
        self._groups, self._make_rollout = Groups(order), make_rollout
        self._prompts = [example.prompt_ids for example in order.examples]
        self._left = deque(range(len(self._prompts) * order.copies))  # the completions that have not begun
        self._in_rows: list[_Completion | None] = [None] * rows.count
        self._waiting: deque[_Completion] = deque()
        """those in rows whose answer is not taken in yet, in the order in which it will be"""
        self._prompts_in: dict[int, _Prompt] = {}
        self._free_slots = [*range(rows.slots)]
        self._steps = 0

    def run(self, look_every: int) -> list[list[Rollout]]:
        """Draw all. Hand over each group within `look_every` tokens of its end."""
        try:
            self._refill()
            while self._rows.drawing or self._waiting:
                ended: list[int] = []
                if self._rows.drawing:
                    self._steps += self._rows.steps(look_every)
                    ended = self._rows.look()
                else:
                    self._steps += ANSWER_STEPS  # no other row would draw meanwhile
                self._end_segments(ended)
                if self._take_answers_in() or ended:
                    self._groups.hand_over()
                    self._refill()
        finally:
            close_all(completion.dialogue for completion in self._in_rows if completion and completion.dialogue)
        return self._groups.all

    def _end_segments(self, rows: list[int]) -> None:
        """Let the completions in these rows leave, or wait for an answer."""
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
        """Take in the answers that are due, and wait for them; with them those that have had half as long, as a pass
        for each costs more. Return whether there were any."""
        if not self._waiting or self._waiting[0].due > self._steps:
            return False
        answers: dict[int, list[int]] = {}  # by row
        while self._waiting and self._waiting[0].due <= self._steps + ANSWER_STEPS // 2:
            completion = self._waiting.popleft()
            row, answer, completion.answer = self._in_rows.index(completion), completion.answer.result(), None
            if answer is None:
                self._leave(row)
            else:
                completion.drawn += [False] * len(answer)
                answers[row] = answer
        if answers:
            self._rows.feed(answers)
        return True

    def _leave(self, row: int) -> None:
        """Free a row whose completion is over."""
        completion, end = self._in_rows[row], self._rows.state[PLACE, row] + 1
        index = completion.number // self._order.copies
        self._prompts_in[index].left -= 1
        if self._prompts_in[index].left == 0:
            heappush(self._free_slots, self._prompts_in.pop(index).slot)
        if completion.dialogue is not None:
            completion.dialogue.close()
        ids, logprobs = (values[row, :end].tolist() for values in (self._rows.ids, self._rows.logprobs))
        self._in_rows[row] = None
        self._rows.free(row)
        self._groups.add(completion.number, self._make_rollout(ids, logprobs, completion.drawn, completion.dialogue))

    def _refill(self) -> None:
        """Let completions begin in free rows, then bring the rows that draw to the front."""
        free = [row for row, completion in enumerate(self._in_rows) if completion is None]
        taken, fresh = [], []
        while self._left and len(taken) < len(free):
            index = self._left[0] // self._order.copies
            if index not in self._prompts_in:
                if not self._free_slots:
                    break
                base = self._rows.base(self._prompts[index])
                self._prompts_in[index] = _Prompt(slot=heappop(self._free_slots), left=self._order.copies, base=base)
                fresh.append(index)
            taken.append(self._left.popleft())
        hidden = self._rows.prefill({self._prompts_in[index].slot: self._prompts[index] for index in fresh})
        for index, states in zip(fresh, hidden, strict=True):
            self._prompts_in[index].hidden = states
        if taken:
            self._begin_in(free[: len(taken)], taken)
        draws = [completion is not None and completion.answer is None for completion in self._in_rows]
        self._rows.bring_forward(self._in_rows, draws, free_for_good=not self._left)

    def _begin_in(self, rows: list[int], numbers: list[int]) -> None:
        cells, hidden = [], []
        for row, number in zip(rows, numbers, strict=True):
            index, copy = divmod(number, self._order.copies)
            example, name, prompt = self._order.examples[index], self._order.name(number), self._prompts_in[index]
            dialogue = None if self._turns is None else self._turns.begin(example, name)
            self._in_rows[row] = _Completion(number=number, dialogue=dialogue)
            cells.append((prompt.slot, copy, len(self._prompts[index]), prompt.base))
            hidden.append(prompt.hidden)
        names = self._order.names
        random_numbers = names and [uniforms(names[number], self._longest) for number in numbers]
        self._rows.begin(rows, cells, hidden, random_numbers)


@dataclass(eq=False, kw_only=True)
class _Completion:
    """A completion in a row."""

    number: int
    dialogue: Dialogue | None  # answers its segments; None in a run without turns
    drawn: list[bool] = field(default_factory=list)
    """True for the tokens of its ended segments, False for those of their answers"""
    answer: Future[list[int] | None] | None = None  # the answer to its last segment, once that has ended
    due: int = 0  # the step after which the answer is taken in


@dataclass(kw_only=True)
class _Prompt:
    """A prompt that is being drawn from."""

    slot: int  # its place in the cache
    left: int  # its completions that are not over
    base: int  # the position of a completion's first token
    hidden: torch.Tensor | None = None  # the last hidden state, from which every completion's first token is drawn

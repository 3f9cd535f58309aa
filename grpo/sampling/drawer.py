"""Draws segments for requests as they come, from any thread, with rows that are full while anyone waits.

A segment follows ids that are known when it is asked for. A segment that continues another one, which ended with ids
of somebody else after it, is fed to the row that still holds that one: only the ids between are computed. A row is
held until another request needs it, so that whoever is silent takes nobody's place. The tokens of a segment follow from
the ids before it and its random numbers; which rows are computed beside it moves the last bits of log-probs.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from grpo.sampling.draw import check_drawn
from grpo.sampling.rows import BASE, PLACE, Rows

_WAIT = 0.05  # seconds of a wait for requests, between two looks at whether all is over


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The tokens of a segment."""

    ids: list[int]
    logprobs: list[float]  # of each in the distribution that it was drawn from


@dataclass(eq=False, kw_only=True)
class Segment:
    """A segment to draw."""

    prompt_ids: list[int]  # all ids before it
    room: int  # most tokens
    numbers: np.ndarray | None  # its random numbers, float64 [room]; None draws greedily
    scale: float = 1.0  # of its logits: the run's temperature over its own; other than 1 only where rows have scales
    after: "Segment | None" = None  # a segment that has ended, with whose prompt and ids `prompt_ids` begins
    find_end: Callable[[list[int]], int | None] | None = None
    """is told the ids so far, now and then; returns how many of them the segment keeps if it ends with these"""
    keep: Callable[[Drawn, Future[Drawn]], None] | None = None
    """is told the tokens before anyone else has them, and gives them to `done` once they are kept"""
    done: Future[Drawn] = field(default_factory=Future)  # who cancels it wants the segment no more

    def finish(self, drawn: Drawn) -> None:
        """Hand over the drawn tokens."""
        if self.keep is None:
            self.done.set_result(drawn)
        else:
            self.keep(drawn, self.done)


@dataclass(eq=False, kw_only=True)
class _Held:
    """What a row holds."""

    segment: Segment
    slot: int  # of the ids before its first segment
    start: int = 0  # the place in the row of the segment's first token
    is_drawing: bool = True  # False: it has ended, and the row is kept for a segment after it


class Drawer:
    """A decode loop in the thread that calls `run`."""

    def __init__(self, rows: Rows, longest: int, look_every: int):
        """`rows` has a slot for each row, and `longest` is the largest length of ids with a segment."""
        self._rows, self._longest, self._look_every = rows, longest, look_every
        self._new: queue.SimpleQueue[Segment | None] = queue.SimpleQueue()
        self._waiting: deque[Segment] = deque()
        self._held: list[_Held | None] = [None] * rows.count
        self._free_slots = [*range(rows.slots)]
        self._ended: dict[Segment, None] = {}  # segments whose rows are kept, the oldest first
        self._is_over = False
        self._failing = threading.Lock()
        self.fed = self.computed = 0  # ids before segments that were fed to a held row, and that were computed anew

    def submit(self, segment: Segment) -> None:
        """Ask for a segment; its future is done once it is drawn. From any thread."""
        self._new.put(segment)
        if self._is_over:
            self._fail(_over())

    def wake(self) -> None:
        """Let `run` ask now whether all is over, if it draws nothing. From any thread."""
        self._new.put(None)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Draw until `is_over`, which is asked again and again. What is asked for after that fails, as all does if a
        forward pass fails. Raises FloatingPointError for logits that are NaN."""
        error: BaseException = _over()
        try:
            while True:
                self._take_new(block=not (self._waiting or any(self._drawing())))
                if is_over():
                    return
                self._begin()
                self._draw()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._is_over = True
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._failing:  # threads that come too late call it, too
            self._take_new(block=False)
            held = [held.segment for held in self._held if held is not None]
            for segment in [*self._waiting, *held]:
                if not segment.done.done():
                    segment.done.set_exception(error)
            self._waiting.clear()

    def _drawing(self) -> list[bool]:
        """Tell of each row whether it draws."""
        return [held is not None and held.is_drawing for held in self._held]

    def _take_new(self, block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            segment = self._new.get(timeout=_WAIT) if block else self._new.get_nowait()
            while True:
                if segment is not None:
                    self._waiting.append(segment)
                segment = self._new.get_nowait()

    def _begin(self) -> None:
        """Let segments that wait begin, in the order of their requests, while there are rows."""
        fresh: dict[int, Segment] = {}  # by row
        going_on: dict[int, Segment] = {}
        while self._waiting:
            segment = self._waiting[0]
            if segment.done.cancelled():
                self._waiting.popleft()
                continue
            if (row := self._row_of(segment)) is not None:
                going_on[row] = segment
                del self._ended[segment.after]
            elif (row := self._free_row()) is not None:
                fresh[row] = segment
            else:
                break
            held = self._held[row]
            slot = heappop(self._free_slots) if held is None else held.slot
            self._held[row] = _Held(segment=self._waiting.popleft(), slot=slot)
        if going_on:
            self._feed(going_on)
        if fresh:
            self._compute(fresh)
        if going_on or fresh:
            self._bring_forward()

    def _row_of(self, segment: Segment) -> int | None:
        """Return the row that holds the segment's beginning, if there is one, with room for the rest."""
        if segment.after not in self._ended:
            return None
        row = self._row_holding(segment.after)
        between = len(segment.prompt_ids) - len(segment.after.prompt_ids)
        return row if self._held[row].start + between + segment.room <= self._longest else None

    def _free_row(self) -> int | None:
        """Return a row that holds nothing, or whose segment ended first; None if all draw."""
        if None in self._held:
            return self._held.index(None)
        if not self._ended:
            return None
        oldest = next(iter(self._ended))
        del self._ended[oldest]
        row = self._row_holding(oldest)
        self._let_go(row)
        return row

    def _row_holding(self, segment: Segment) -> int:
        return next(row for row, held in enumerate(self._held) if held is not None and held.segment is segment)

    def _let_go(self, row: int) -> None:
        heappush(self._free_slots, self._held[row].slot)
        self._held[row] = None
        self._rows.free(row)

    def _feed(self, by_row: dict[int, Segment]) -> None:
        """Feed the ids between a segment and the next one, and draw that one's first token."""
        between = {}
        for row, segment in by_row.items():
            begun = len(segment.after.prompt_ids) + len(segment.after.done.result().ids)
            between[row] = segment.prompt_ids[begun:]
            self.fed += len(between[row])
        numbers = {row: segment.numbers for row, segment in by_row.items() if segment.numbers is not None}
        self._rows.feed(between, numbers, [segment.scale for segment in by_row.values()])
        for row, segment in by_row.items():
            self._held[row].start = int(self._rows.state[PLACE, row])
            segment.after = None  # else the last segment of an episode would keep all before it

    def _compute(self, by_row: dict[int, Segment]) -> None:
        """Compute the ids before segments, equal ones once, and draw each one's first token."""
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, segment in by_row.items():
            rows_of.setdefault(tuple(segment.prompt_ids), []).append(row)
        slots = {row: self._held[row].slot for row in by_row}
        first = {slots[rows[0]]: [*prompt] for prompt, rows in rows_of.items()}
        states = dict(zip(rows_of, self._rows.prefill(first), strict=True))
        for prompt, (row, *others) in rows_of.items():
            self.computed += len(prompt)
            if others:  # an agent's equal requests have keys and values of their own: they soon differ
                self._rows.copy_prompt(slots[row], [slots[other] for other in others], len(prompt))
        cells, hidden, numbers = [], [], []
        longest = max(segment.room for segment in by_row.values())
        for row, segment in by_row.items():
            length = len(segment.prompt_ids)
            cells.append((slots[row], 0, length, length))
            hidden.append(states[tuple(segment.prompt_ids)])
            if segment.numbers is not None:
                numbers.append(np.pad(segment.numbers, (0, longest - len(segment.numbers))))
        scales = [segment.scale for segment in by_row.values()]
        self._rows.begin([*by_row], cells, hidden, numbers or None, scales)

    def _bring_forward(self) -> None:
        self._rows.bring_forward(self._held, self._drawing(), free_for_good=False)

    def _draw(self) -> None:
        """Draw more in each row that draws; end the segments that are over, and keep their rows."""
        if not self._rows.drawing:
            return
        # A row draws beyond its room until somebody looks: not where a model may have no position any more.
        furthest = int(self._rows.state[[BASE, PLACE], : self._rows.drawing].sum(axis=0).max())
        self._rows.steps(min(self._look_every, self._longest - furthest))
        ended, is_changed = {*self._rows.look()}, False
        for row, held in enumerate(self._held[: self._rows.drawing]):
            end = int(self._rows.state[PLACE, row]) + 1
            count, segment = min(end - held.start, held.segment.room), held.segment
            is_over = row in ended or count == segment.room or segment.done.cancelled()
            if segment.find_end is not None:
                ids = self._rows.ids[row, held.start : held.start + count].tolist()
                if (kept := segment.find_end(ids)) is not None:
                    count, is_over = kept, True
            if is_over:
                self._rows.cut(row, held.start + count)
                self._end(row, count)
                is_changed = True
        if is_changed:  # else the device has the rows' state
            self._bring_forward()

    def _end(self, row: int, count: int) -> None:
        held, segment = self._held[row], self._held[row].segment
        cut = slice(held.start, held.start + count)
        ids, logprobs = (values[row, cut].tolist() for values in (self._rows.ids, self._rows.logprobs))
        if not segment.done.set_running_or_notify_cancel():
            return self._let_go(row)
        held.is_drawing = False
        self._ended[segment] = None
        check_drawn(logprobs)
        segment.finish(Drawn(ids=ids, logprobs=logprobs))


def _over() -> RuntimeError:
    return RuntimeError("nothing is drawn any more")

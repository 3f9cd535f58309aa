"""An agent's episodes on a worker: their journal (grpo/agents/journal.py), which the pool keeps, so that whoever draws
a task after a worker was lost gets what that one drew; and their segments where another process draws them.

It needs torch and transformers, which vLLM brings, and what docs/samplers.md names for agents.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from grpo.agents.episodes import draw_episodes
from grpo.agents.journal import DAMAGED, Journal
from grpo.pool.client import PoolClient, Retrier
from grpo.pool.protocol import GroupResult, RunInfo, Task
from grpo.sampling.drawer import Drawn, Segment
from grpo.sampling.sampler import Name, Order
from grpo.workers import engine
from grpo.workers.engine import WorkerTools, make_result

log = logging.getLogger(__name__)

_THREADS = 256  # segments at a time, of a group
_WAIT = 0.05  # seconds of a wait for requests, between two looks at whether all is over

DrawSegment = Callable[[list[int], int, float], engine.Segment]
Opened = tuple[tuple[int, int], str]  # a task's key, and the SHA-256 of the weights that draw it


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A line on its way to the pool."""

    opened: Opened
    line: bytes
    hand_over: Callable[[], None]


class PoolJournal(Journal):
    """The journal of a worker's tasks. A thread sends all lines that wait at a time: the engine draws meanwhile."""

    def __init__(
        self, run: RunInfo, worker: str, client: PoolClient, patience: Retrier, fail: Callable[[BaseException], None]
    ):
        """`fail` is told why the pool did not take something."""
        super().__init__()
        self._run, self._worker, self._client, self._patience, self._fail = run, worker, client, patience, fail
        self._open: dict[tuple[int, int], Opened] = {}  # by seed and group, as its episodes are named
        self._parts: queue.SimpleQueue[_Part] = queue.SimpleQueue()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="journal")

    def begin(self, version: int, sum_weights: Callable[[], str]) -> None:
        """Do nothing: a worker opens the journal of each task."""

    def open(self, task: Task, weights: str) -> None:
        """Get what these weights, named by their SHA-256, have drawn for a task. Raises what a Retrier raises."""
        self._open[self._run.seed_of(task.attempt), task.group] = task.key, weights
        lines = self._patience(lambda: self._client.journal(task.key, weights)).splitlines()
        for line in lines:
            try:
                self._read(line)
            except DAMAGED:
                log.warning("the pool has a damaged line of the journal of group %d: it is drawn again", task.group)
        if lines:
            log.info("group %d begins with %d lines of the pool's journal", task.group, len(lines))

    def close(self, task: Task) -> None:
        """Forget a task that is drawn."""
        seed = self._run.seed_of(task.attempt)
        del self._open[seed, task.group]
        for number in range(self._run.num_generations):
            self._requests.pop((seed, task.group, number), None)
            self._rollouts.pop((seed, task.group, number), None)

    def add(self, episode: Name, request: str, drawn: Drawn, done: Future[Drawn]) -> None:
        """Do what Journal.add says. Keep nothing for a closed task, whose program gave up while its answer was drawn:
        whoever waits for that finds the episode over."""
        if episode[:2] in self._open:
            super().add(episode, request, drawn, done)
        else:
            done.set_result(drawn)

    def _keep(self, episode: Name, line: bytes, hand_over: Callable[[], None]) -> None:
        seed, group, _ = episode
        if (opened := self._open.get((seed, group))) is not None:
            self._parts.put(_Part(opened=opened, line=line, hand_over=hand_over))
            self._sender.submit(self._send)

    def _send(self) -> None:
        """Send all lines that wait."""
        parts: dict[Opened, list[_Part]] = {}
        with suppress(queue.Empty):
            while True:
                part = self._parts.get_nowait()
                parts.setdefault(part.opened, []).append(part)
        try:
            for (key, weights), of_task in parts.items():
                lines = b"".join(part.line for part in of_task)
                self._patience(partial(self._client.add_to_journal, self._worker, key, weights, lines))
                for part in of_task:
                    with suppress(InvalidStateError):  # the engine has failed meanwhile
                        part.hand_over()
        except Exception as error:
            self._fail(error)


class RequestDrawer:
    """A Drawer (grpo/sampling/drawer.py) whose segments another process draws: a thread waits for each.

    What is drawn is not cut short: a segment that nobody wants any more, or that ends at a stop text, is drawn to its
    own end."""

    def __init__(self, draw_segment: DrawSegment):
        """`draw_segment(ids, room, scale)` draws a segment whose logits are multiplied by `scale`; see draw_in_turns
        (grpo/workers/engine.py)."""
        self._draw_segment = draw_segment
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="segments")
        self._news: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def submit(self, segment: Segment) -> None:
        """Ask for a segment; its future is done once it is drawn. From any thread."""
        self._threads.submit(self._draw, segment)

    def wake(self) -> None:
        """Let `run` ask now whether all is over. From any thread."""
        self._news.put(None)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Wait until `is_over`. Raises what a segment raised."""
        try:
            while not is_over():
                with suppress(queue.Empty):
                    if (error := self._news.get(timeout=_WAIT)) is not None:
                        raise error
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _draw(self, segment: Segment) -> None:
        if not segment.done.set_running_or_notify_cancel():
            return
        try:
            ids, logprobs, _ = self._draw_segment(segment.prompt_ids, segment.room, segment.scale)
            kept = None if segment.find_end is None else segment.find_end(ids)
            segment.finish(Drawn(ids=ids[:kept], logprobs=logprobs[:kept]))
        except BaseException as error:
            segment.done.set_exception(error)
            self._news.put(error)


def draw_group(turns: WorkerTools, run: RunInfo, task: Task, draw_segment: DrawSegment) -> GroupResult:
    """Draw the episodes of a task. Raises what `draw_segment` raises."""
    agent, copies = turns.responder, run.num_generations
    names = [(run.seed_of(task.attempt), task.group, copy) for copy in range(copies)]
    order = Order(examples=[turns.make_example(task)], copies=copies, temperature=run.temperature, names=names)
    drawer = RequestDrawer(draw_segment)
    [rollouts] = draw_episodes(
        agent, order, drawer, longest=run.max_completion_length, version=task.version, journal=agent.journal
    )
    return make_result(run, task, rollouts)

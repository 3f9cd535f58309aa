"""The journal of a worker (grpo/agents/journal.py), which the pool keeps: whoever draws a task after a worker was lost
gets what that one drew."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from grpo.agents.journal import DAMAGED, Journal
from grpo.pool.client import PoolClient, Retrier
from grpo.pool.protocol import RunInfo, Task
from grpo.sampling.drawer import Drawn
from grpo.sampling.sampler import Name

log = logging.getLogger(__name__)

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

"""Draws the episodes of an agent with vLLM: each segment of a program's request is a request to vLLM's server.

It needs torch and transformers, which vLLM brings, and what docs/samplers.md names for agents.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from grpo.agents.episodes import Agent, draw_episodes
from grpo.data.records import Example, Rollout
from grpo.pool.protocol import RunInfo, Task
from grpo.sampling.drawer import Drawn, Segment
from grpo.sampling.sampler import Order
from grpo.workers import engine

_THREADS = 256  # segments at a time, of a group
_WAIT = 0.05  # seconds of a wait for requests, between two looks at whether all is over

DrawSegment = Callable[[list[int], int, float], engine.Segment]


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


def draw_group(agent: Agent, example: Example, run: RunInfo, task: Task, draw_segment: DrawSegment) -> list[Rollout]:
    """Draw the episodes of a task. Raises what `draw_segment` raises."""
    names = [(run.seed_of(task.attempt), task.group, copy) for copy in range(run.num_generations)]
    order = Order(examples=[example], copies=run.num_generations, temperature=run.temperature, names=names)
    drawer = RequestDrawer(draw_segment)
    [rollouts] = draw_episodes(
        agent, order, drawer, longest=run.max_completion_length, version=task.version, journal=agent.journal
    )
    return rollouts

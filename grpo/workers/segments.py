"""Completions of several segments, each segment drawn in its own request."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from grpo.pool.protocol import GroupResult, RunInfo, Task
from grpo.wire.tool_outcomes import Outcome
from grpo.workers.worker_tools import WorkerTools


@dataclass
class Completion:
    """A completion, as far as it is drawn. All lists have a value for each token."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # NaN at the tokens of answers
    versions: list[int] = field(default_factory=list)
    """the version of the policy that drew the token, of an answer's that drew the last one before it"""
    drawn: list[bool] = field(default_factory=list)
    outcome: Outcome | None = None

    def add_drawn(self, ids: list[int], logprobs: list[float], versions: list[int]) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.versions += versions
        self.drawn += [True] * len(ids)

    def add_answer(self, ids: list[int]) -> None:
        self.ids += ids
        self.logprobs += [math.nan] * len(ids)
        self.versions += self.versions[-1:] * len(ids)
        self.drawn += [False] * len(ids)


def draw_in_turns(
    turns: WorkerTools,
    run: RunInfo,
    task: Task,
    draw_segment: Callable[[list[int], int], tuple[list[int], list[float], list[int]]],
) -> GroupResult:
    """Draw a group whose completions have several segments, each completion in a thread: none waits for another's.

    `draw_segment(ids, room)` draws at most `room` tokens after these ids, up to an eos, and returns their ids,
    log-probs and versions. Raises what it raises, or an answer: RewardError where an environment fails.
    """
    example, failed = turns.make_example(task), threading.Event()

    def draw_completion(place: int) -> Completion:
        name = run.seed + (task.attempt << 32), task.group, place
        dialogue, completion = turns.begin(example, name), Completion()
        try:
            while not failed.is_set():  # else the group is lost
                segment = draw_segment([*task.prompt_ids, *completion.ids], _room(completion))
                completion.add_drawn(*segment)
                answer = dialogue.answer(segment[0], _room(completion))
                ids = None if answer is None else answer.result()
                if ids is None:
                    completion.outcome = dialogue.outcome
                    break
                completion.add_answer(ids)
        except BaseException:
            failed.set()
            raise
        finally:
            dialogue.close()
        return completion

    def _room(completion: Completion) -> int:
        return run.max_completion_length - len(completion.ids)

    with ThreadPoolExecutor(run.num_generations, thread_name_prefix="turns") as threads:
        completions = [*threads.map(draw_completion, range(run.num_generations))]
    names = "ids", "logprobs", "versions", "drawn", "outcome"
    return GroupResult(*task.key, *([getattr(completion, name) for completion in completions] for name in names))

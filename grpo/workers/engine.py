"""The interface of every engine, which draws completions for grpo/workers/loop.py, and what engines share: completions
of several segments, each drawn in its own request."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from grpo.pool.protocol import GroupResult, Probe, RunInfo, Task
from grpo.wire.tool_outcomes import Outcome
from grpo.workers.worker_tools import WorkerTools


class EngineError(Exception):
    """A failed engine. The message is one sentence; the worker starts the engine again."""


class WorkerFailed(Exception):
    """The end of a worker. The message says why in one sentence."""


class Engine(Protocol):
    """Draws completions of groups. Every method may raise EngineError."""

    card: str  # the name of its GPU, or CPU, for the pool's page; "" until it is known
    capacity: int  # groups that it draws at a time; known after `start`
    loads_in_flight: bool
    """whether `load` and `logprobs` may be called while it draws: the new weights draw the rest of each completion;
    known after `start`"""

    def start(self, run: RunInfo, folder: Path, version: int, turns: WorkerTools | None = None) -> None:
        """Load the model of a folder, the policy's `version`: its configuration, tokenizer and model.safetensors, and
        for a run with `base_weights` the adapter in folder/adapter. `turns` answer the policy in each completion.

        `close` comes before a second `start`, which may have another folder's weights but never another run.
        """
        ...

    def load(self, folder: Path, version: int) -> None:
        """Draw from now on with the weights of the folder's versions_file. No `draw` runs, but with loads_in_flight."""
        ...

    def logprobs(self, probe: Probe) -> list[float]:
        """Return the log-prob of each of the probe's completion ids, at temperature 1. `draw` as for `load`."""
        ...

    def draw(self, task: Task) -> GroupResult:
        """Draw a group's completions, and say which version drew each token.

        Up to `capacity` threads call it at a time. It raises RewardError too, if the run's environment fails.
        """
        ...

    def close(self) -> None:
        """End. Any number of times, from any thread, and before `start` too.

        A `draw` that runs ends soon, perhaps with an EngineError.
        """
        ...


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

"""The interface of every engine, which draws completions for grpo/workers/loop.py, and what engines share: completions
of several segments, each drawn in its own request."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from grpo.pool.protocol import GroupResult, Probe, RunInfo, Task
from grpo.workers.worker_tools import WorkerTools

Segment = tuple[list[int], list[float], list[int]]  # the ids drawn in one request, their log-probs and versions


class EngineError(Exception):
    """A failed engine. The message is one sentence; the worker starts the engine again."""


class WorkerFailed(Exception):
    """The end of a worker. The message says why in one sentence."""


class Engine(Protocol):
    """Draws completions of groups. Every method may raise EngineError."""

    card: str  # the name of its GPU, or CPU, for the pool's page; "" until it is known
    capacity: int  # groups that it draws at a time; known after `start`
    loads_in_flight: bool
    """whether `load` and `logprobs` may be called while it draws, and the rest is by the new weights; as `capacity`"""

    def start(self, run: RunInfo, folder: Path, version: int, turns: WorkerTools | None = None) -> None:
        """Load the model of a folder, the policy's `version`: its configuration, tokenizer and model.safetensors, and
        for a run with `base_weights` the adapter in folder/adapter. `turns` answer the policy in each completion.
        `close` comes before a second `start`, which may have another folder's weights but never another run."""

    def load(self, folder: Path, version: int) -> None:
        """Draw from now on with the weights of the folder's versions_file. No `draw` runs, but with loads_in_flight."""

    def logprobs(self, probe: Probe) -> list[float]:
        """Return the log-prob of each of the probe's completion ids, at temperature 1. `draw` as for `load`."""

    def draw(self, task: Task) -> GroupResult:
        """Draw a group's completions, and say which version drew each token. Up to `capacity` threads call it at a
        time. It raises RewardError too, if the run's environment fails."""

    def close(self) -> None:
        """End: any number of times, from any thread, before `start` too. A `draw` ends soon, perhaps by EngineError."""


def check_processor(run: RunInfo, fingerprint: str) -> None:
    """Raise WorkerFailed if what prepares pictures here would make other pixels, or ids, than the trainer's."""
    if run.processor != fingerprint:
        reason = f"pictures are prepared otherwise here ({fingerprint or 'not at all'}) than in run {run.name}"
        raise WorkerFailed(f"{reason} ({run.processor}): take the trainer's versions of transformers and Pillow")


def draw_in_turns(
    turns: WorkerTools, run: RunInfo, task: Task, draw_segment: Callable[[list[int], int], Segment]
) -> GroupResult:
    """Draw a group whose completions have several segments, each completion in a thread: none waits for another's.
    `draw_segment(ids, room)` draws at most `room` tokens after these ids, up to an eos, and returns their ids,
    log-probs and versions. Raises what it raises, and RewardError where an environment fails."""
    from grpo.wire.picture_files import with_more  # needs Pillow, which not every engine brings

    example, failed = turns.make_example(task), threading.Event()

    def draw_completion(place: int) -> list:
        """Return the completion's place in each of the group's lists."""
        tokens: list[tuple[int, float, int, bool]] = []  # id, log-prob, version, whether it was drawn
        dialogue = turns.begin(example, (run.seed + (task.attempt << 32), task.group, place))
        try:
            while not failed.is_set():  # else the group is lost
                prompt = with_more(task.prompt_ids, [token[0] for token in tokens])
                ids, logprobs, versions = draw_segment(prompt, run.max_completion_length - len(tokens))
                tokens += [(*token, True) for token in zip(ids, logprobs, versions, strict=True)]
                future = dialogue.answer(ids, run.max_completion_length - len(tokens))
                answer = None if future is None else future.result()
                if answer is None:
                    break
                tokens += [(token, math.nan, versions[-1], False) for token in answer]
        except BaseException:
            failed.set()
            raise
        finally:
            dialogue.close()
        return [*map(list, zip(*tokens, strict=True)), dialogue.outcome]

    with ThreadPoolExecutor(run.num_generations, thread_name_prefix="turns") as threads:
        rows = [*threads.map(draw_completion, range(run.num_generations))]
    return GroupResult(*task.key, *map(list, zip(*rows, strict=True)))

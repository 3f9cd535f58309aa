"""The sampler that lets workers draw: tasks go to a pool, completions come back from it.

The policy at the start of round max(0, r - max_policy_lag) draws round r, on whichever worker and whenever. So the
completions follow from the run's settings alone: a rank, a worker or the pool may be killed and started again. With
in_flight_weight_updates that policy is the oldest that may draw the round; workers take the newest version.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from grpo.client.base import BETWEEN_LINES, FIRST_LINE
from grpo.client.server_errors import RequestFailure, ServerError, ServersLost
from grpo.client.sessions import check_certificates
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import PromptStream
from grpo.data.records import Example, Rollout
from grpo.data.responder import make_rollout
from grpo.pool.client import PoolClient, Retrier, Stopped
from grpo.pool.protocol import MOST_TASKS, GroupResult, Task
from grpo.pool.store import Recording
from grpo.run.collective import raise_together
from grpo.run.folder import SaveError
from grpo.sampling.sampler import OnGroups, Sampler
from grpo.trainer.deepspeed_engine import Ranks
from grpo.trainer.publish_policy import PoolRun
from grpo.wire.tool_outcomes import LONGEST_COLUMNS

log = logging.getLogger(__name__)

SHOWN = 8
"""workers that a line names at most, those that the pool heard last"""


class GroupDeadline:
    """The time that a rank still waits for groups: it moves on with each that the pool gets."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._drawn: int | None = None
        self.move_on()

    def move_on(self) -> None:
        self._end = time.monotonic() + self.seconds

    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def wants_status(self) -> bool:
        """Tell whether is_over needs the pool's status."""
        return self._drawn is None or self.seconds_left() <= 0

    def is_over(self, status: dict[str, Any]) -> bool:
        """Tell whether the time has passed without a group of any rank: workers draw one rank's after another's."""
        drawn = sum(row["drawn"] for row in status.get("rounds", []))
        if drawn != self._drawn:
            self.move_on()
        self._drawn = drawn
        return self.seconds_left() <= 0


@contextmanager
def logged_wait(what: str, url: str, status: Callable[[], dict[str, Any]], round_number: int) -> Iterator[None]:
    """Log the state of the wait after 5 s and then each 15 s, while the block lasts."""
    ended = threading.Event()

    def write_lines() -> None:
        began, pause = time.monotonic(), FIRST_LINE
        while not ended.wait(pause):
            pause = BETWEEN_LINES
            try:
                text = describe_wait(status(), url, round_number)
            except RequestFailure as failure:
                text = f"{url} {failure}"
            except ServerError as error:
                text = str(error)
            if not ended.is_set():
                log.info("%s: waiting since %.0f s: %s", what, time.monotonic() - began, text)

    threading.Thread(target=write_lines, name="pool-wait", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def describe_wait(status: dict[str, Any], url: str, round_number: int) -> str:
    """Return how many groups of a round are drawn, and the state of the pool's workers."""
    rows = [row for row in status.get("rounds", []) if row["round"] == round_number]
    groups = "".join(f"{row['drawn']} of {row['tasks']} groups are drawn; " for row in rows)
    return groups + describe_workers(status, url)


def describe_workers(status: dict[str, Any], url: str) -> str:
    """Return the state and last message of each worker; without workers, the command that starts one."""
    workers = status.get("workers", [])
    if not workers:
        return f"no worker asks this pool: start one with 'python generate.py --pool {url}', on any machine"
    shown = [
        f"{worker['name']}{' on ' * bool(worker['card'])}{worker['card']} is {worker['state']}"
        + (f" ({worker['message']})" if worker["message"] else "")
        + f", version {worker['version']}, {worker['last_seen']:.0f} s ago"
        + (f", last refused: {worker['reason']}" if worker["reason"] else "")
        for worker in workers[:SHOWN]
    ]
    return "; ".join(shown) + (f"; and {len(workers) - SHOWN} more" if len(workers) > SHOWN else "")


_LONG_POLL = 5.0  # seconds; a signal is heeded after so many
_MOST_COLUMNS = 32 << 20  # bytes of a request, half of a pool's limit


class Source(Protocol):
    """What a rank takes groups from: the pool, or the file of an earlier run's (grpo/trainer/pool_sampler.py)."""

    url: str
    """what messages call it"""

    def put_tasks(self, tasks: Sequence[Task]) -> None: ...

    def take(self, keys: Iterable[tuple[int, int]], wait: float) -> list[GroupResult]: ...

    def status(self) -> dict[str, Any]: ...


def connect(config: TrainerConfig, name: str) -> PoolClient:
    """Return a client of the pool, which need not run yet. `name` is the run's.

    Raises ServerError where another program answers, or one that wants another token.
    """
    verify = check_certificates(config.ref_ca_file)
    pool = PoolClient(config.pool, config.token, verify, config.ref_request_timeout, name)
    with suppress(RequestFailure):
        pool.run()
    return pool


def check_rows(config: TrainerConfig, examples: Iterable[Example]) -> None:
    """Raise ConfigError if a row cannot be sent to the environments of a pool's workers."""
    if config.sampler != "pool" or config.environment is None:
        return
    for example in examples:
        try:
            size = len(_columns_as_json(example))
            fault = f"{size:,} bytes as JSON, and {LONGEST_COLUMNS:,} are the most" if size > LONGEST_COLUMNS else ""
        except (TypeError, ValueError) as error:
            fault = f"what is no JSON ({error})"
        if fault:
            raise ConfigError(
                f"environment={config.environment!r}: workers get the columns of a row as JSON, and row "
                f"{example.index} (from 0) has {fault}: mend the dataset, or use sampler continuous"
            )


class PoolSampler(Sampler):
    """The sampler of a run whose completions workers draw. All ranks call it together, each with its own groups."""

    def __init__(
        self,
        config: TrainerConfig,
        source: Source,
        ask: Retrier,
        run: PoolRun | None,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        stream: PromptStream,
        ranks: Ranks,
    ):
        """`run` is rank 0's, where something is published; else None."""
        self._config, self._source, self._ask, self._run, self._stream = config, source, ask, run, stream
        self._tokenizer, self._eos, self._ranks = tokenizer, [*eos_token_ids], ranks
        self._round = self._put = -1

    def update_weights(self, version: int) -> None:
        """Begin the round that follows so many updates: publish this version.

        Returns on every rank when the pool has the run, and the version that draws the round. Raises ServersLost on
        every rank.
        """
        self._round, lost = version // self._config.updates_per_round, None
        with self._logged_wait():
            try:
                if self._run is not None:
                    self._run.publish(version, self._round)
            except (ServerError, SaveError) as error:
                lost = error
            except Stopped:
                lost = self._stopped()
            raise_together(lost, ServersLost)

    def sample(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        seed: int,
        on_groups: OnGroups | None = None,
        ids: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Do what Sampler.sample says, for groups `ids` of the round that update_weights has begun.

        `on_groups` is called when groups arrive. `copies` and `temperature` are the run's, and so is the seed but for
        its upper half, which says the how-manieth replacement of the groups this is. Raises ServersLost on every rank.
        """
        attempt, groups, lost = seed >> 32, {}, None
        waiting = {(group, attempt): index for index, group in enumerate(ids)}
        with self._logged_wait():
            try:
                # Tasks that were put ahead are put again: the pool may have dropped them, when a version replaced that
                # of an earlier start of the run.
                self._put_tasks(self._round, attempt, examples, ids)
                self._put_tasks_ahead()
                deadline = GroupDeadline(self._config.pool_deadline)
                while waiting:
                    taken = self._take([*waiting][:MOST_TASKS], deadline)
                    arrived = {waiting.pop(drawn.key): self._rollouts(drawn) for drawn in taken}
                    groups |= arrived
                    if arrived and on_groups is not None:
                        on_groups(arrived)
            except ServerError as error:
                lost = error
            except Stopped:
                lost = self._stopped()
            raise_together(lost, ServersLost)
        return [groups[index] for index in range(len(examples))]

    def _put_tasks_ahead(self) -> None:
        """Put the tasks of later rounds that workers may draw while this one is trained on."""
        last = (self._config.max_steps - 1) // self._config.updates_per_round
        for number in range(max(self._put, self._round) + 1, min(last, self._round + self._config.max_policy_lag) + 1):
            steps = self._config.steps_of_round(number)
            self._put_tasks(number, 0, *self._stream.groups_of(steps, self._ranks.rank, self._ranks.size))
            self._put = number

    def _put_tasks(self, number: int, attempt: int, examples: Sequence[Example], ids: Sequence[int]) -> None:

        version = self._config.version_of_round(number)
        columns_of = _columns_as_json if self._config.environment is not None else lambda example: ""
        tasks = [
            Task(group, attempt, version, row.prompt_ids, columns_of(row))
            for group, row in zip(ids, examples, strict=True)
        ]
        longest = max((len(task.columns) for task in tasks), default=0)
        most = min(MOST_TASKS, _MOST_COLUMNS // max(1, longest))
        for start in range(0, len(tasks), most):
            part = tasks[start : start + most]
            self._ask(lambda part=part: self._source.put_tasks(part))

    def _take(self, keys: list[tuple[int, int]], deadline: GroupDeadline) -> list[GroupResult]:
        """Return the groups that have arrived, perhaps none. Raises ServersLost if none came before the deadline."""
        wait = max(0.1, min(_LONG_POLL, deadline.seconds_left()))
        drawn = self._ask(lambda: self._source.take(keys, wait))
        if drawn:
            deadline.move_on()
        elif deadline.wants_status() and deadline.is_over(status := self._ask(self._source.status)):
            raise ServersLost(
                f"{self._source.url} has brought no group of round {self._round} for {deadline.seconds:.0f} s: "
                f"{describe_workers(status, self._source.url)}"
            )
        return drawn

    def _stopped(self) -> ServersLost:
        return ServersLost(f"stopped by signal while round {self._round} waited for workers")

    def _rollouts(self, drawn: GroupResult) -> list[Rollout]:
        count = len(drawn.completions)
        masks, outcomes = drawn.drawn or [None] * count, drawn.outcomes or [None] * count
        rows = zip(drawn.completions, drawn.logprobs, drawn.versions, masks, outcomes, strict=True)
        return [
            make_rollout(self._tokenizer, self._eos, ids, logprobs, versions[0], mask, outcome)
            for ids, logprobs, versions, mask, outcome in rows
        ]

    def _logged_wait(self) -> AbstractContextManager:
        """Return a context that logs the wait on the first rank."""
        if self._ranks.rank != 0:
            return nullcontext()
        return logged_wait(f"round {self._round}", self._source.url, self._source.status, self._round)


def _columns_as_json(example: Example) -> str:
    """Return the columns that reset an environment. Raises TypeError or ValueError if a value is no JSON."""
    return json.dumps(example.columns)


class Replay:
    """The completions of an earlier run, read from its pool's file, in the place of a pool."""

    def __init__(self, path: str, run: str):
        """`run` is the identity of the run that is replayed. Raises ConfigError if the file is of another run."""
        self.url = path
        self._recording = Recording(path)
        if run != self._recording.run.run:
            raise ConfigError(
                f"replay={path!r}: it is of run {self._recording.run.name}, which had another model, other data or "
                "other settings: give what that run had, all but the number of ranks"
            )

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Do nothing: the file has the results already."""

    def take(self, keys: Iterable[tuple[int, int]], wait: float) -> list[GroupResult]:
        """Return these groups. Raises ServersLost if a group is missing from the file, or damaged."""
        drawn = []
        for group, attempt in keys:
            try:
                _, result = self._recording.find((group, attempt))
            except ConfigError as error:
                raise ServersLost(str(error)) from error
            if result is None:
                raise ServersLost(
                    f"{self.url} has no completions of group {group}, attempt {attempt}: the earlier run ended before: "
                    "go on with a pool on a copy of this file"
                )
            drawn.append(result)
        return drawn

    def status(self) -> dict[str, Any]:
        """Return an empty status: no worker draws."""
        return {}

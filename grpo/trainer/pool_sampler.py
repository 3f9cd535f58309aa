"""The sampler that lets workers draw: tasks go to a pool, completions come back from it.

The policy at the start of round max(0, r - max_policy_lag) draws round r, on whichever worker and whenever. So the
completions follow from the run's settings alone: a rank, a worker or the pool may be killed and started again. With
in_flight_weight_updates that policy is the oldest that may draw the round; workers take the newest version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.client.reference import BETWEEN_LINES, FIRST_LINE
from grpo.client.server_errors import RequestFailure, ServerError, ServersLost
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import PromptStream
from grpo.data.records import Example, Rollout, make_rollout
from grpo.pool.client import PoolClient, Retrier, Stopped
from grpo.pool.protocol import MOST_TASKS, GroupResult, Task
from grpo.pool.store import Recording
from grpo.run.collective import raise_together
from grpo.run.folder import SaveError
from grpo.sampling.sampler import OnGroups, Sampler
from grpo.trainer.deepspeed_engine import Ranks
from grpo.trainer.publish_policy import PolicyCopy, PoolRun
from grpo.wire.picture_files import pictures_of
from grpo.wire.tool_outcomes import LONGEST_COLUMNS

log = logging.getLogger(__name__)

SHOWN = 8  # workers that a line names at most, those that the pool heard last


def describe_wait(status: dict[str, Any], url: str, round_number: int) -> str:
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


def connect(config: TrainerConfig) -> PoolClient:
    """Return a client of the pool, which need not run yet. Raises ServerError if it refuses, or is another program."""
    pool = PoolClient(
        config.pool, token=config.token, ref_ca_file=config.ref_ca_file, request_timeout=config.ref_request_timeout
    )
    with suppress(RequestFailure):
        pool.run()
    return pool


def check_rows(config: TrainerConfig, examples: Iterable[Example]) -> None:
    """Raise ConfigError if a row cannot be sent to the environments or agents of a pool's workers."""
    field = "agent" if config.agent is not None else "environment"
    if config.sampler != "pool" or getattr(config, field) is None:
        return
    for example in examples:
        try:
            size, fault = len(json.dumps(example.columns)), ""
        except (TypeError, ValueError) as error:
            size, fault = 0, f"what is no JSON ({error})"
        if not fault and size <= LONGEST_COLUMNS:
            continue
        config.refuse(
            field,
            f"workers get the columns of a row as JSON, of {LONGEST_COLUMNS:,} bytes at most, and row "
            f"{example.index} (from 0) has {fault or f'{size:,} bytes'}: mend the dataset, or use sampler continuous",
        )


@dataclass(kw_only=True)
class PoolSampler(Sampler):
    """The sampler of a run whose completions workers draw. All ranks call it together, each with its own groups."""

    config: TrainerConfig
    source: PoolClient | Replay
    ask: Retrier
    policy: PolicyCopy | None  # None where nothing is copied
    run: PoolRun | None  # rank 0's, where something is published
    tokenizer: PreTrainedTokenizerBase
    end_ids: list[int]
    prompts: PromptStream
    ranks: Ranks
    _round: int = -1
    _put: int = -1  # the last round whose tasks were put
    _drawn: int = -1  # groups that the pool got so far, of any rank: workers draw one rank's after another's
    _moved: float = 0.0  # when the pool got the last of them
    _sent: set[str] = field(default_factory=set)  # SHA-256 of the pictures that the pool has from this rank

    def update_weights(self, version: int) -> None:
        """Begin the round that follows so many updates: publish this version. Returns on every rank when the pool has
        the version that draws the round. Raises ServersLost on every rank."""
        self._round = version // self.config.updates_per_round
        if self.run is not None:
            self.run.publisher.wait_written()
        if self.policy is not None:
            self.policy.take()
        with self._wait_together():
            if self.run is not None:
                self.run.publish(version, self._round)

    def sample(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        seed: int,
        on_groups: OnGroups | None = None,
        ids: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Do what Sampler.sample says, for groups `ids` of the round that update_weights has begun. `copies`,
        `temperature` and the seed are the run's; the seed's upper half counts the replacements of the groups. Raises
        ServersLost on every rank."""
        attempt, groups = seed >> 32, {}
        waiting = {(group, attempt): index for index, group in enumerate(ids)}
        with self._wait_together():
            if self.config.replay is None:
                # Tasks that were put ahead are put again: the pool may have dropped them, when a version replaced that
                # of an earlier start of the run.
                self._put_tasks(self._round, examples, ids, attempt=attempt)
                self._put_tasks_ahead()
            self._drawn, began = -1, time.monotonic()
            while waiting:
                taken = self._take([*waiting][:MOST_TASKS])
                arrived = {waiting.pop(drawn.key): self._rollouts(drawn) for drawn in taken}
                groups |= arrived
                if arrived and on_groups is not None:
                    on_groups(arrived)
            # Not in a collective, whose time is limited: workers draw one rank's groups after another's.
            while self._others_are_drawn():  # the end is noticed a fiftieth of the time too late, at most
                time.sleep(min(_LONG_POLL, max(0.05, (time.monotonic() - began) / 50)))
        return [groups[index] for index in range(len(examples))]

    def _put_tasks_ahead(self) -> None:
        """Put the tasks of later rounds that workers may draw while this one is trained on."""
        last = (self.config.max_steps - 1) // self.config.updates_per_round
        for number in range(max(self._put, self._round) + 1, min(last, self._round + self.config.max_policy_lag) + 1):
            steps = self.config.steps_of_round(number)
            examples, ids = self.prompts.groups_of(steps, self.ranks.rank, self.ranks.size)
            self._put_tasks(number, examples, ids, attempt=0)
            self._put = number

    def _put_tasks(self, number: int, examples: Sequence[Example], ids: Sequence[int], *, attempt: int) -> None:
        version = self.config.version_of_round(number)
        has_rows = self.config.environment is not None or self.config.agent is not None
        tasks, pictures = [], {}
        for group, row in zip(ids, examples, strict=True):
            named = [(hashlib.sha256(file).hexdigest(), file) for file in pictures_of(row.prompt_ids)]
            pictures |= named
            columns = json.dumps(row.columns) if has_rows else ""
            task = Task(
                group=group,
                attempt=attempt,
                version=version,
                prompt_ids=row.prompt_ids,
                columns=columns,
                pictures=tuple(name for name, _ in named),
            )
            tasks.append(task)
        longest = max((len(task.columns) for task in tasks), default=0)
        most = min(MOST_TASKS, _MOST_COLUMNS // max(1, longest))
        for start in range(0, len(tasks), most):
            self.ask(partial(self._put_with_pictures, tasks[start : start + most], pictures))

    def _put_with_pictures(self, tasks: Sequence[Task], pictures: Mapping[str, bytes]) -> None:
        """Put tasks, and before them those of their pictures that the pool has not got from this rank."""
        for sha256 in {name for task in tasks for name in task.pictures} - self._sent:
            self.source.send_file(pictures[sha256], sha256)
            self._sent.add(sha256)
        try:
            self.source.put_tasks(tasks)
        except RequestFailure:
            self._sent.clear()  # a pool that was started again with an older copy of its file lacks some
            raise

    def _take(self, keys: list[tuple[int, int]]) -> list[GroupResult]:
        """Return the groups that have arrived, perhaps none. Raises ServersLost if the pool got none for too long."""
        seconds = min(_LONG_POLL, self.config.pool_deadline)
        if taken := self.ask(lambda: self.source.take(keys, seconds)):
            return taken
        status, is_stuck = self._look()
        if is_stuck:
            raise ServersLost(
                f"{self.source.url} has brought no group of round {self._round} for {self.config.pool_deadline:.0f} s: "
                f"{describe_workers(status, self.source.url)}"
            )
        return []

    def _others_are_drawn(self) -> bool:
        """Tell whether the pool still gets groups of this round, which are other ranks'."""
        if self.ranks.size == 1 or self.config.replay is not None:
            return False
        status, is_stuck = self._look()
        is_open = any(row["round"] == self._round and row["drawn"] < row["tasks"] for row in status["rounds"])
        return is_open and not is_stuck

    def _look(self) -> tuple[dict[str, Any], bool]:
        """Return the pool's status, and whether it got no group for too long."""
        status = self.ask(self.source.status)
        drawn = sum(row["drawn"] for row in status.get("rounds", []))
        if drawn != self._drawn:
            self._drawn, self._moved = drawn, time.monotonic()
        return status, time.monotonic() - self._moved >= self.config.pool_deadline

    def _rollouts(self, drawn: GroupResult) -> list[Rollout]:
        if drawn.episodes is not None:
            return self._rollouts_of_episodes(drawn)
        count = len(drawn.completions)
        masks, outcomes = drawn.drawn or [None] * count, drawn.outcomes or [None] * count
        rows = zip(drawn.completions, drawn.logprobs, drawn.versions, masks, outcomes, strict=True)
        return [
            make_rollout(
                self.tokenizer,
                self.end_ids,
                ids=ids,
                logprobs=logprobs,
                policy_version=versions[0],
                drawn=mask,
                outcome=outcome,
            )
            for ids, logprobs, versions, mask, outcome in rows
        ]

    def _rollouts_of_episodes(self, drawn: GroupResult) -> list[Rollout]:
        rows = zip(drawn.completions, drawn.logprobs, drawn.outcomes, drawn.episodes, strict=True)
        return [
            Rollout(
                completion_ids=ids,
                finished=outcome.finished,
                text=episode.text,
                sampling_logprobs=logprobs,
                policy_version=self.config.version_of_round(self._round),
                outcome=outcome,
                branches=episode.branches,
                tree=episode.tree,
            )
            for ids, logprobs, outcome, episode in rows
        ]

    @contextmanager
    def _wait_together(self) -> Iterator[None]:
        """Log the wait in the block on the first rank. Raise ServersLost on every rank if one lost the pool."""
        ended, lost = threading.Event(), None
        if self.ranks.rank == 0 and self.config.replay is None:
            threading.Thread(target=self._log_wait, args=[ended], name="pool-wait", daemon=True).start()
        try:
            try:
                yield
            except (ServerError, SaveError) as error:
                lost = error
            except Stopped:
                lost = ServersLost(f"stopped while round {self._round} waited for workers")
            raise_together(lost, ServersLost)
        finally:
            ended.set()

    def _log_wait(self, ended: threading.Event) -> None:
        began, pause, source = time.monotonic(), FIRST_LINE, self.source
        while not ended.wait(pause):
            pause = BETWEEN_LINES
            try:
                text = describe_wait(source.status(), source.url, self._round)
            except RequestFailure as failure:
                text = f"{source.url} {failure}"
            except ServerError as error:
                text = str(error)
            if not ended.is_set():
                log.info("round %d: waiting since %.0f s: %s", self._round, time.monotonic() - began, text)


class Replay:
    """The completions of an earlier run, read from its pool's file, in the place of a pool."""

    def __init__(self, path: str, run: str):
        """`run` is the run's identity. Raises ConfigError if the file is of another run."""
        self.url = path
        self._recording = Recording(path)
        if run != self._recording.run.run:
            raise ConfigError(
                f"replay={path!r}: it is of run {self._recording.run.name}, which had another model, other data or "
                "other settings: give what that run had, all but the number of ranks"
            )

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

"""A worker: it takes tasks from a pool, lets an engine draw them with the right weights, and sends the completions.

One thread, that of `run`, leases, changes weights and starts the engine. As many threads draw as the engine takes
groups, others send them, so that a slow pool holds no engine up, and one renews the leases while the first is busy. A
failure in one of them ends `run`, or starts the engine again.
"""

from __future__ import annotations

import logging
import math
import secrets
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from grpo.client.server_errors import RequestFailure, ResultRefused, ServerError
from grpo.config.programs import WorkerConfig
from grpo.pool.client import LeaseReply, PoolClient, Retrier, Stopped
from grpo.pool.protocol import GroupResult, Lease, Task, Version
from grpo.workers.engine import Engine, EngineError, WorkerFailed, WorkerTools, check_given, open_turns
from grpo.workers.weights_folder import ModelFolder, dtype_of

if TYPE_CHECKING:
    from grpo.workers.worker_episodes import PoolJournal

log = logging.getLogger(__name__)
_Value = TypeVar("_Value")

SUMMARY_SECONDS = 60.0
MOST_RESTARTS = 3  # starts of the engine after failures, without a group in between
RESTART_PAUSE = 1.0  # seconds: a process that has just ended may still hold its card
RENEWALS = 3  # in the time of a lease
POLL = 2.0  # seconds that the pool keeps a request for tasks: so long may the end of a worker take
_UPLOADS = 4  # threads; each sends one group


def prove(engine: Engine, version: Version, dtype: str) -> float:
    """Prove that the engine gives a version's probe the trainer's log-probs; return the mean distance in nats a token.
    Raises EngineError if it is too large, or NaN."""
    pairs = zip(engine.logprobs(version.probe), version.probe.logprobs, strict=True)
    difference = statistics.fmean(abs(mine - theirs) for mine, theirs in pairs)
    # Two programs that compute in bfloat16 differ by 0.04 on average; weights of another version by 0.6.
    most = 1e-3 if dtype == "float32" else 0.15
    if not difference <= most:
        distance = f"{difference:.2g} nats a token from the trainer's, and {most:g} are the most"
        fault = f"the engine's log-probs are {distance}: it does not have these weights"
        raise EngineError(f"version {version.version}: {fault}")
    return difference


class GenerationWorker:
    """A worker of a pool. `run` in one thread, `stop` and `close` from any."""

    def __init__(self, config: WorkerConfig, engine: Engine, folder: Path, stop: threading.Event | None = None):
        # Another name for each process: the pool may have suspended an earlier one of this machine.
        self.name = f"{config.name} #{secrets.token_hex(4)}"
        self.stop = stop or threading.Event()
        self._config, self._engine, self._is_started = config, engine, False
        self._turns: WorkerTools | None = None
        self._journal: PoolJournal | None = None  # of an agent
        self._new_client = partial(PoolClient, config.pool, token=config.token, ref_ca_file=config.ref_ca_file)
        self._client = self._new_client()
        self._patience = Retrier(self._client, config.pool_deadline, self.stop)
        self._senders = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="send")
        self._folder = folder
        self._version: Version | None = None  # which the engine has
        self._loaded: list[tuple[int, str]] = []  # number and SHA-256 of all that the engine had, or was to have
        self._newest: tuple[int, str] | None = None  # as the pool says with in_flight_weight_updates
        self._lease_lock = threading.Lock()  # two requests at a time would each free the other one's tasks
        self._leased_at, self._lease_seconds, self._began = 0.0, 30.0, time.monotonic()
        self._message = "starting"
        # Under this lock:
        self._changed = threading.Condition()
        self._holds: set[tuple[int, int]] = set()
        self._drawing = 0
        self._is_proved = False  # whether the engine has shown that it has the weights that it draws with
        self._engine_error: EngineError | None = None
        self._failure: BaseException | None = None
        self._restarts = 0
        self._drawn: deque[tuple[float, int]] = deque()  # time and tokens of the last minute's groups

    def run(self) -> None:
        """Draw until `stop` is set. Raises ServerError, WorkerFailed, RewardError from the run's environment,
        ConfigError for another environment."""
        try:
            self._run = self._poll(self._client.run, "has no run yet: waiting for a trainer")
            log.info("%s: run %s", self._client.url, self._run.name)
            check_given(self._config, self._run)
            # The trainer sends the run first, then what all versions share, which may take minutes, then a version.
            self._poll(self._client.versions, "has no weights yet: waiting for the trainer")
            self._model = ModelFolder(self._folder, self._client, self._patience)
            self._model.bring_model(self._run)
            self._turns = open_turns(self._config, self._run, self._model.path)
            if self._run.agent is not None:
                self._journal = self._turns.responder.journal = self._open_journal()
            threading.Thread(target=self._keep_leases, name="leases", daemon=True).start()
            while not self._take(*self._first_version()):
                pass  # the run has just gone back to an earlier checkpoint
            drawers = ThreadPoolExecutor(self._engine.capacity, thread_name_prefix="draw")
            while True:
                leased = self._lease(self._wait_for_room(), POLL)
                is_other = (leased.tasks or leased.sha256) and not self._has(leased.version, leased.sha256)
                if is_other and leased.tasks and self._drawing and not self._loads_in_flight():
                    self._forget(*leased.tasks)  # others draw them meanwhile
                    self._wait_until_idle()
                    continue
                if is_other and not self._take(leased.version, leased.sha256):
                    self._forget(*leased.tasks)
                    continue
                for task in leased.tasks:
                    with self._changed:
                        self._drawing += 1
                    drawers.submit(self._draw, task, len(self._loaded) - 1)
        except Stopped:
            return

    def close(self) -> None:
        """Give the leases back, and end the engine. Waits for no group that is being drawn."""
        self.stop.set()
        if self._leased_at:
            # Not while a request for tasks is waiting: the pool would give them to this worker again.
            is_quiet = self._lease_lock.acquire(timeout=2 * POLL)
            try:
                ended = Lease(worker=self.name, room=0, holds=[], wait=0.0, message="ended")
                self._new_client(request_timeout=POLL).lease(ended)
            except (RequestFailure, ServerError) as error:
                log.info("the leases were not given back (%s): they end by themselves", error)
            if is_quiet:
                self._lease_lock.release()
        self._engine.close()
        if self._turns is not None:
            self._turns.close()

    def _open_journal(self) -> PoolJournal:
        from grpo.workers.worker_episodes import PoolJournal  # needs torch, which not every engine brings

        return PoolJournal(self._run, self.name, self._client, self._patience, self._fail)

    def _first_version(self) -> tuple[int, str]:
        """Return number and SHA-256 of the version that is drawn with now, or of the newest one."""
        versions = self._poll(self._client.versions, "has no weights now: waiting for the trainer")
        # An older version than the newest may be drawn with. Who begins with the newest fetches two whole files.
        leased = self._lease(room=1, wait=0.0)
        if leased.tasks:
            self._forget(*leased.tasks)  # others draw it sooner than an engine that has not started
            self._lease(room=0, wait=0.0)
            return leased.version, leased.sha256
        return versions[-1].version, versions[-1].sha256

    def _poll(self, find: Callable[[], _Value | None], reason: str) -> _Value:
        """Ask the pool until it has something; log why that takes time."""
        if not (value := self._patience(find)):
            log.info("%s %s", self._client.url, reason)
        while not value:
            self._pause(POLL)
            value = self._patience(find)
        return value

    def _pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise Stopped

    def _wait_for_room(self) -> int:
        """Return how many tasks may be leased, perhaps none if there are newer weights; restart a failed engine."""
        capacity = self._engine.capacity
        self._wait(lambda: self._engine_error or self._drawing < capacity or not self._has_newest())
        if self._engine_error:
            self._use(self._version)
        return capacity - self._drawing

    def _wait_until_idle(self) -> None:
        self._wait(lambda: self._engine_error or not self._drawing)
        if self._engine_error:
            self._engine.close()
            self._wait(lambda: not self._drawing)

    def _wait(self, is_over: Callable[[], object]) -> None:
        """Wait for other threads. Raises the exception that ended one of them, and Stopped."""
        with self._changed:
            while not self.stop.is_set() and self._failure is None and not is_over():
                self._changed.wait(0.2)
        if self.stop.is_set():
            raise Stopped
        if self._failure:
            raise self._failure

    def _has_newest(self) -> bool:
        return self._newest is None or self._has(*self._newest)

    def _has(self, number: int, sha256: str) -> bool:
        """Tell whether the engine has this version. An update may leave all weights as they were."""
        return (number, sha256) == (self._version.version, self._version.sha256)

    def _loads_in_flight(self) -> bool:
        return self._run.in_flight_weight_updates and self._engine.loads_in_flight

    def _take(self, number: int, sha256: str) -> bool:
        """Give the engine a version's weights. Return False if the pool has dropped them."""
        if not self._loads_in_flight():
            self._wait_until_idle()
        self._message = f"fetching version {number}"
        version = self._model.bring(number, sha256)
        if version is not None:
            self._use(version)
        return version is not None

    def _use(self, version: Version) -> None:
        """Load the folder's weights into the engine, and prove them; restart the engine if it fails. Raises
        WorkerFailed after MOST_RESTARTS, and as `with_pictures`."""
        proof = replace(version, probe=self._model.with_pictures(version.probe))
        while True:
            if self._engine_error is not None:
                self._restart(self._engine_error)
            self._is_proved = False
            self._loaded.append((version.version, version.sha256))
            try:
                if self._is_started:
                    self._message = f"loading version {version.version}"
                    self._engine.load(self._model.path, version.version)
                else:
                    self._message = "starting the engine"
                    self._engine.start(self._run, self._model.path, version.version, self._turns)
                    self._is_started = True
                    log.info("the engine draws on %s, groups at a time: %d", self._engine.card, self._engine.capacity)
                difference = prove(self._engine, proof, dtype_of(self._model.path))
                log.debug("version %d: log-probs differ by %.2g from the trainer's", version.version, difference)
            except EngineError as error:
                self._engine_error = error
            else:
                with self._changed:
                    self._version, self._message, self._is_proved = version, "", True
                    self._changed.notify_all()
                return

    def _restart(self, error: EngineError) -> None:
        """End an engine that has failed, and wait until it draws no more."""
        if self._restarts == MOST_RESTARTS:
            raise WorkerFailed(f"the engine failed {MOST_RESTARTS + 1} times in a row: {error}")
        self._restarts += 1
        log.warning("the engine failed: %s; starting it again", error)
        self._wait_until_idle()
        self._is_started, self._engine_error = False, None
        self._pause(RESTART_PAUSE)

    def _lease(self, room: int, wait: float) -> LeaseReply:
        """Ask for tasks, renew the leases, and hold the new tasks. Raises WorkerFailed if the pool has another run."""

        def ask() -> LeaseReply:
            with self._changed:
                holds = [[*key] for key in sorted(self._holds)]
            lease = Lease(
                worker=self.name,
                room=room,
                holds=holds,
                wait=wait,
                card=self._engine.card,
                version=-1 if self._version is None else self._version.version,
                message=self._message,
                tokens_per_second=self._last_minute()[2],
            )
            leased = self._client.lease(lease)
            with self._changed:
                self._holds |= {task.key for task in leased.tasks}
            return leased

        with self._lease_lock:
            leased = self._patience(ask)
            self._leased_at, self._lease_seconds = time.monotonic(), leased.seconds
        if self._run.in_flight_weight_updates and leased.sha256:
            with self._changed:
                self._newest = leased.version, leased.sha256
                self._changed.notify_all()
        if leased.run != self._run.run:
            raise WorkerFailed(f"{self._client.url} has another run now: start the worker again")
        return leased

    def _keep_leases(self) -> None:
        """Renew the leases while nothing else does, and log a line a minute."""
        next_summary = time.monotonic() + SUMMARY_SECONDS
        # The answer says whether there are newer weights, too.
        soon = POLL if self._run.in_flight_weight_updates else math.inf
        while not self.stop.wait((longest := min(self._lease_seconds / RENEWALS / 2, soon)) / 2):
            if time.monotonic() - self._leased_at > longest:
                self._guarded(lambda: self._lease(room=0, wait=0.0))
            if time.monotonic() > next_summary:
                next_summary += SUMMARY_SECONDS
                if (drawn := self._last_minute())[0]:
                    log.info(f"last {SUMMARY_SECONDS:.0f} s: %d groups, %d tokens, %.0f tokens/s", *drawn)

    def _last_minute(self) -> tuple[int, int, float]:
        """Return groups, tokens, and tokens a second, that the pool accepted in the last minute or since the start."""
        now = time.monotonic()
        with self._changed:
            while self._drawn and self._drawn[0][0] < now - SUMMARY_SECONDS:
                self._drawn.popleft()
            tokens = sum(tokens for _, tokens in self._drawn)
            return len(self._drawn), tokens, tokens / max(1e-3, min(SUMMARY_SECONDS, now - self._began))

    def _forget(self, *tasks: Task | GroupResult) -> None:
        """Hold these tasks no more; with the next request the pool may give them to others."""
        with self._changed:
            self._holds -= {task.key for task in tasks}

    def _draw(self, task: Task, first: int) -> None:
        """Draw a group, by the version that is `first` in `_loaded` and perhaps later ones, and send it."""
        drawn = None
        try:
            if not self.stop.is_set() and self._engine_error is None:
                drawn = self._proved(self._draw_task(task))
        except BaseException as error:
            self._fail(error)
        if drawn is None:
            self._forget(task)
        else:
            versions = {*chain(*drawn.versions)}
            # Two weights of a number, where the run went back meanwhile: either may have drawn, so both are named.
            weights = {loaded for loaded in self._loaded[first:] if loaded[0] in versions}
            self._senders.submit(self._guarded, lambda: self._send(drawn, sorted(weights)))
        with self._changed:
            self._drawing -= 1
            self._changed.notify_all()

    def _draw_task(self, task: Task) -> GroupResult:
        if self._journal is None:
            return self._engine.draw(self._model.with_pictures(task))
        self._journal.open(task, self._version.sha256)
        try:
            return self._engine.draw(task)
        finally:
            self._journal.close(task)

    def _proved(self, drawn: GroupResult) -> GroupResult | None:
        """Return the group once the engine has proved its weights; None if it fails to."""
        with self._changed:
            while not (self._is_proved or self._engine_error or self.stop.is_set()):
                self._changed.wait(0.2)
            return drawn if self._is_proved else None

    def _send(self, drawn: GroupResult, weights: list[tuple[int, str]]) -> None:
        try:
            (result,) = self._patience(lambda: self._client.results(self.name, [drawn], weights))
        except ResultRefused as refusal:  # after three in a row the pool refuses the worker, which ends it
            log.warning("%s", refusal)
        else:
            log.debug("group %d: %s", drawn.group, result)
            self._restarts = 0
            if result == "accepted":
                with self._changed:
                    self._drawn.append((time.monotonic(), drawn.tokens))
        finally:
            self._forget(drawn)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Note the exception of a thread: an engine's starts it again, any other ends `run`. The first one counts."""
        with self._changed:
            if isinstance(error, EngineError):
                self._engine_error = self._engine_error or error
            elif not isinstance(error, Stopped):
                self._failure = self._failure or error
            self._changed.notify_all()

"""The queue in front of the model: it limits each client, serves clients in turn, and lets the model be replaced.

The web server's threads put requests in and wait for a future; one thread, the scorer, takes forward passes out. A
request is split into parts, the completions of one prompt each. A pass takes one part of each client in turn, up to the
token budget. So small requests share a pass, large ones are spread over several, and a client that has sent a thousand
requests delays nobody else.

In deterministic mode a part is one forward pass of one prompt's completions, or of a request's texts. Its cut does not
depend on other requests, and passes are not shared: floating-point sums depend on the other sequences of a batch.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from grpo.model.packing import Batcher, by_prompt
from grpo.server.monitor import add_up
from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.refusals import ProtocolError

_BUSY_SECONDS = 2  # after which a client that found no room may come back


@dataclass(frozen=True)
class Scores:
    """The result of a request."""

    values: np.ndarray  # float32: the answers of its sequences, end to end; rows of a table with top_k
    fingerprint: str  # fingerprint of the model that computed them


class Job:
    """A request in the queue: its sequences, those that wait, and the answers so far."""

    def __init__(self, request: LogprobsRequest, client: str = ""):
        self.client = client
        self.settings = request.temperature, request.top_k  # a pass has one of each
        self.sequences = request.sequences()
        self.tokens_left = len(request.input_ids)  # tokens of this request that wait or are being scored
        self.parts: deque[deque[int]] = deque()  # the places of sequences that wait, by part
        self.answers: dict[int, np.ndarray] = {}  # answers by the sequence's place in the request
        self.is_later = False  # whether it came after an exchange that is still to come
        self.refusal: ProtocolError | None = None
        self.future: Future[Scores] = Future()

    def count_tokens(self, rows: Iterable[int]) -> int:
        """Return the tokens of these sequences, a shared prompt counted each time."""
        return sum(sum(map(len, self.sequences[row])) for row in rows)


Batch = list[tuple[Job, int]]  # sequences for about one forward pass: the job of each, and its place in the job


@dataclass(kw_only=True)
class Exchange:
    """A replacement of the model's weights between two requests."""

    action: Callable[[], None]
    undo: Callable[[], None]  # called if the model can score nothing after `action`
    becomes: str  # fingerprint of the model after `action`
    done: Future[None] = field(default_factory=Future)


class FairQueue:
    """A bounded queue of requests: any thread may submit, one thread, the scorer, takes. A client may have as many
    tokens and requests in the queue as stay free for others: half of the queue when it is alone, a third when there are
    two clients, and a newcomer always finds room (Choudhury and Hahne, Dynamic Queue Length Thresholds, 1998, with
    alpha 1)."""

    def __init__(
        self,
        batcher: Batcher,
        *,
        budget: int,
        max_tokens: int,
        max_requests: int,
        deterministic: bool = False,
        fingerprint: str = "",
    ):
        self._batcher, self._deterministic = batcher, deterministic
        self.budget = budget  # tokens of a forward pass; the scorer lowers it when they do not fit the memory
        self.fingerprint = fingerprint  # fingerprint of the model that answers now
        self._max_tokens, self._max_requests = max_tokens, max_requests
        self._jobs: dict[Future[Scores], Job] = {}  # unanswered jobs, in the order they came
        self._turns: list[str] = []  # clients, the next one first
        self._exchange: Exchange | None = None
        self._changed = threading.Condition()
        self._closed = False

    def held(self) -> dict[str, tuple[int, int]]:
        """Return (tokens, requests) waiting or being scored, by client."""
        held: dict[str, tuple[int, int]] = {}
        with self._changed:
            for job in self._jobs.values():
                tokens, requests = held.get(job.client, (0, 0))
                held[job.client] = tokens + job.tokens_left, requests + 1
        return held

    def submit(self, request: LogprobsRequest, client: str = "") -> Future[Scores]:
        """Queue a request for a future answer. Raises ProtocolError, 503, if closed, or full for this client."""
        job = Job(request, client)
        parts = by_prompt(job.sequences)
        job.parts.extend(map(deque, self._cut_passes(job, parts) if self._deterministic else parts))
        with self._changed:
            self._check_open()
            self._check_room(client, job.tokens_left)
            if not any(other.parts for other in self._jobs.values() if other.client == client):
                others = {other.client for other in self._jobs.values()} - {client}
                self._turns = [*filter(others.__contains__, self._turns), client]  # forgets clients without a job
            self._jobs[job.future], job.is_later = job, self._exchange is not None
            self._changed.notify()
        return job.future

    def _cut_passes(self, job: Job, rows_of_prompts: list[list[int]]) -> list[list[int]]:
        """Cut a job into the forward passes of deterministic mode; texts, without completions, are cut together."""
        if not any(len(completion) for _, completion in job.sequences):
            rows_of_prompts = [[*range(len(job.sequences))]]
        return [
            [rows[place] for place in places]
            for rows in rows_of_prompts
            for places in self._batcher.cut([job.sequences[row] for row in rows], self.budget)
        ]

    def cancel(self, future: Future[Scores], refusal: ProtocolError) -> None:
        """Take back a request whose client is gone: do not score the part of it that has not begun."""
        with self._changed:
            job = self._jobs.get(future)
            if job is None:
                return
            job.refusal = refusal
            job.tokens_left -= job.count_tokens(chain(*job.parts))
            job.parts.clear()
            if job.tokens_left == 0:  # else a pass is under way with the rest of it, and `settle` follows
                del self._jobs[future]

    def exchange(self, action: Callable[[], None], undo: Callable[[], None], becomes: str) -> Future[None]:
        """Let the scorer call `action` after the requests submitted so far, before those submitted from now on. One
        exchange at a time. The future raises ProtocolError if it was undone; this, 503, if the queue is closed."""
        with self._changed:
            self._check_open()
            self._exchange = Exchange(action=action, undo=undo, becomes=becomes)
            self._changed.notify()
            return self._exchange.done

    def close(self) -> None:
        """Accept nothing new. Queued requests are still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> Batch | Exchange | None:
        """Wait for sequences of about one forward pass, or an exchange; None when the queue is closed and empty. Finish
        a batch with `settle`, an exchange with `finish_exchange`; `abandon` cancels either."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting() or self._exchange or self._closed)
            if not (waiting := self._waiting()):
                return self._exchange
            if not self._deterministic:
                return self._take_shared(waiting)
            client, (job, *_) = next(iter(waiting.items()))
            self._end_turn(client)
            return [(job, row) for row in job.parts.popleft()]

    def _take_shared(self, waiting: dict[str, deque[Job]]) -> Batch:
        """Take sequences of equal settings from each client in turn, up to the budget, and at least one."""
        batch: Batch = []
        turns, left, settings = deque(waiting), self.budget, None
        while turns and left > 0:
            client = turns.popleft()
            job = waiting[client][0]
            settings = settings or job.settings
            if job.settings != settings:
                continue  # for the next pass, whose first turn it will be
            rows = job.parts[0]
            prompt = len(job.sequences[rows[0]][0])
            tokens = [len(job.sequences[row][1]) for row in rows]
            is_whole = prompt + sum(tokens) <= self.budget
            if batch and left < prompt + (sum(tokens) if is_whole else tokens[0]):
                break  # in the next pass, whose first turn it will be
            left -= prompt
            for count in tokens:
                if batch and count > left:
                    break
                batch.append((job, rows.popleft()))
                left -= count
            self._end_turn(client)
            if rows:
                break
            job.parts.popleft()
            if not job.parts:
                waiting[client].popleft()
            if waiting[client]:
                turns.append(client)
        return batch

    def _waiting(self) -> dict[str, deque[Job]]:
        """Return each client's jobs that wait and come before an exchange, in the order of the clients' turns."""
        jobs: dict[str, deque[Job]] = {}
        for job in self._jobs.values():
            if job.parts and not job.is_later:
                jobs.setdefault(job.client, deque()).append(job)
        return {client: jobs[client] for client in self._turns if client in jobs}

    def _end_turn(self, client: str) -> None:
        """Let a client be the last one."""
        self._turns.remove(client)
        self._turns.append(client)

    def finish_exchange(self, refusal: ProtocolError | None) -> None:
        """End the exchange, undone if there is a refusal, and continue with the requests that came after it."""
        with self._changed:
            exchange, self._exchange = self._exchange, None
            for job in self._jobs.values():
                job.is_later = False
            if refusal is None:
                self.fingerprint = exchange.becomes
        if refusal is None:
            exchange.done.set_result(None)
        else:
            exchange.done.set_exception(refusal)

    def settle(self, batch: Batch) -> None:
        """Record these sequences as done, and resolve every job that is now complete or refused. All sequences of a job
        are scored between two exchanges, so its answer is of one model, the present one."""
        with self._changed:
            for job, row in batch:
                job.tokens_left -= job.count_tokens([row])
            # Removed before the answer, whose reader may send the next request at once; some were cancelled meanwhile.
            jobs = dict.fromkeys(job for job, _ in batch)
            over = [job for job in jobs if job.refusal is not None or len(job.answers) == len(job.sequences)]
            over = [job for job in over if self._jobs.pop(job.future, None)]
        for job in over:
            if job.refusal is not None:
                job.future.set_exception(job.refusal)
            else:
                values = np.concatenate([job.answers[row] for row in range(len(job.sequences))])
                job.future.set_result(Scores(values, self.fingerprint))

    def abandon(self) -> None:
        """Refuse every request and exchange that waits or comes later: nothing can be scored any more."""
        with self._changed:
            self._closed = True
            futures = [*self._jobs] + ([self._exchange.done] if self._exchange else [])
            self._jobs.clear()
        message = "the server's worker died: the server is ending"
        for future in futures:
            future.set_exception(ProtocolError(503, "worker_died", message, retry_after=5))

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError(503, "stopping", "the server is stopping", retry_after=5)

    def _check_room(self, client: str, tokens: int) -> None:
        """Raise ProtocolError, 503, for a client that would have more than would stay free for others."""
        held = self.held()
        of_client, requests = held.get(client, (0, 0))
        in_all, requests_in_all = add_up(held)
        free_tokens, free_requests = self._max_tokens - in_all - tokens, self._max_requests - requests_in_all - 1
        if of_client + tokens > free_tokens or requests + 1 > free_requests:
            waiting = f"{in_all} tokens in {requests_in_all} requests wait already, {of_client} of them yours"
            message = f"{waiting}: come back in {_BUSY_SECONDS} s"
            raise ProtocolError(503, "busy", message, retry_after=_BUSY_SECONDS)

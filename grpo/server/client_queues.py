"""Requests that wait for the model, and the order in which their clients are served.

A request is split into parts, the completions of one prompt each. A forward pass takes one part of each client in turn,
up to the token budget. So small requests share a pass, large ones are spread over several, and a client that has sent a
thousand requests delays nobody else.

In deterministic mode a part is one forward pass of one prompt's completions, or of a request's texts. Its cut does not
depend on other requests, and passes are not shared: floating-point sums depend on the other sequences of a batch.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.refusals import ProtocolError


@dataclass(frozen=True)
class Scores:
    """The result of a request."""

    values: np.ndarray
    """float32: the answers of its sequences, end to end"""
    fingerprint: str
    """fingerprint of the model that computed them"""


class Job:
    """A request in the queue: its sequences, those that wait, and the answers so far."""

    def __init__(self, request: LogprobsRequest, client: str = ""):
        self.client, self.temperature = client, request.temperature
        self.sequences = request.sequences()
        self.tokens_left = len(request.input_ids)
        """tokens of this request that wait or are being scored"""
        self.parts: deque[deque[int]] = deque()
        """the places of sequences that wait, by part"""
        self.answers: dict[int, np.ndarray] = {}
        """answers by the sequence's place in the request"""
        self.refusal: ProtocolError | None = None
        self.future: Future[Scores] = Future()

    @property
    def is_over(self) -> bool:
        return self.refusal is not None or len(self.answers) == len(self.sequences)

    def count_tokens(self, rows: Iterable[int]) -> int:
        """Return the tokens of these sequences, a shared prompt counted each time."""
        return sum(sum(map(len, self.sequences[row])) for row in rows)

    def resolve(self, fingerprint: str) -> None:
        """Give the future its answer or its refusal."""
        if self.refusal is not None:
            self.future.set_exception(self.refusal)
        else:
            values = np.concatenate([self.answers[row] for row in range(len(self.sequences))])
            self.future.set_result(Scores(values, fingerprint))


Batch = list[tuple[Job, int]]
"""sequences for about one forward pass: the job of each, and its place in the job"""


class ClientQueues:
    """The waiting jobs of every client, in the order of the clients' turns. The caller holds the queue's lock."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs.setdefault(job.client, deque()).append(job)

    def drop_empty(self) -> None:
        """Forget jobs without a waiting sequence, and clients without a job."""
        for client in list(self._jobs):
            self._first_job(client)

    def take_part(self) -> Batch:
        """Take one whole part of the client whose turn it is."""
        client, (job, *_) = next(iter(self._jobs.items()))
        self._jobs.move_to_end(client)
        return [(job, row) for row in job.parts.popleft()]

    def take_shared(self, budget: int) -> Batch:
        """Take sequences of one temperature from each client in turn, up to `budget` tokens, and at least one."""
        batch: Batch = []
        left, temperature = budget, None
        turns = deque(self._jobs)
        while turns and left > 0:
            client = turns.popleft()
            job = self._first_job(client)
            if job is None:
                continue
            temperature = temperature or job.temperature
            if job.temperature != temperature:
                continue  # for the next pass, whose first turn it will be
            rows = job.parts[0]
            prompt = len(job.sequences[rows[0]][0])
            tokens = [len(job.sequences[row][1]) for row in rows]
            if batch and left < prompt + sum(tokens) <= budget:
                break  # whole in the next pass
            left -= prompt
            for count in tokens:
                if batch and count > left:
                    break
                batch.append((job, rows.popleft()))
                left -= count
            self._jobs.move_to_end(client)
            turns.append(client)
            if rows:
                break
            job.parts.popleft()
        return batch

    def _first_job(self, client: str) -> Job | None:
        """Return the client's first job that still waits; forget a client that has none."""
        jobs = self._jobs[client]
        while jobs and not jobs[0].parts:
            jobs.popleft()
        if jobs:
            return jobs[0]
        del self._jobs[client]
        return None

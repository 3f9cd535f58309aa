"""Requests that wait for the model, and the order in which their clients are served.

A request is split into parts, the completions of one prompt each. A forward pass takes one part of each client in turn,
and with it every other waiting part of the same prompt, up to the token budget. So small requests share a pass, large
ones are spread over several, and a client that has sent a thousand requests delays nobody else.

In deterministic mode a part is one forward pass of one prompt's completions, or of a request's texts. Its cut does not
depend on other requests, and passes are not shared: floating-point sums depend on the other sequences of a batch.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.picture_files import key_of
from grpo.wire.refusals import ProtocolError


@dataclass(frozen=True)
class Scores:
    """The result of a request."""

    values: np.ndarray
    """float32: the answers of its sequences, end to end"""
    fingerprint: str
    """fingerprint of the model that computed them"""


class Job:
    """A request in the queue: its sequences, its parts, and the answers so far."""

    def __init__(self, request: LogprobsRequest, client: str = ""):
        self.client, self.temperature = client, request.temperature
        self.sequences = request.sequences()
        self.tokens_left = len(request.input_ids)
        """tokens of this request that wait or are being scored"""
        self.parts: list[RequestPart] = []
        self.answers: dict[int, np.ndarray] = {}
        """answers by the sequence's place in the request"""
        self.refusal: ProtocolError | None = None
        self.future: Future[Scores] = Future()

    @property
    def is_over(self) -> bool:
        return self.refusal is not None or len(self.answers) == len(self.sequences)

    def resolve(self, fingerprint: str) -> None:
        """Give the future its answer or its refusal."""
        if self.refusal is not None:
            self.future.set_exception(self.refusal)
        else:
            values = np.concatenate([self.answers[row] for row in range(len(self.sequences))])
            self.future.set_result(Scores(values, fingerprint))


class RequestPart:
    """Waiting sequences of one request: those of one prompt; in deterministic mode those of one forward pass."""

    def __init__(self, job: Job, rows: list[int]):
        self.job, self.waiting = job, deque(rows)
        self.prompt = job.sequences[rows[0]][0]
        self.sharing = job.temperature, key_of(self.prompt)
        """equal for parts that may share a forward pass of their prompt"""

    def count_tokens(self) -> int:
        return len(self.prompt) + sum(len(self.job.sequences[row][1]) for row in self.waiting)


Batch = list[tuple[Job, int]]
"""sequences for about one forward pass: the job of each, and its place in the job"""


class ClientQueues:
    """The waiting parts of every client, in the order of the clients' turns. The caller holds the queue's lock."""

    def __init__(self) -> None:
        self._parts: OrderedDict[str, deque[RequestPart]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, client: str, parts: list[RequestPart]) -> None:
        self._parts.setdefault(client, deque()).extend(parts)

    def drop_empty(self) -> None:
        """Forget parts without a waiting sequence, and clients without a part."""
        for client in list(self._parts):
            self._first_part(client)

    def take_part(self) -> Batch:
        """Take one whole part of the client whose turn it is."""
        client, parts = next(iter(self._parts.items()))
        part = parts.popleft()
        self._parts.move_to_end(client)
        batch = [(part.job, row) for row in part.waiting]
        part.waiting.clear()
        return batch

    def take_shared(self, budget: int) -> Batch:
        """Take sequences of one temperature from each client in turn, up to `budget` tokens, and at least one."""
        same_prompt: dict[tuple[float, bytes], list[RequestPart]] = defaultdict(list)
        for parts in self._parts.values():
            for part in parts:
                same_prompt[part.sharing].append(part)
        batch: Batch = []
        left, temperature = budget, None
        turns = deque(self._parts)
        while turns and left > 0:
            client = turns.popleft()
            first = self._first_part(client)
            if first is None:
                continue
            temperature = temperature or first.job.temperature
            if first.job.temperature != temperature:
                continue  # for the next pass, whose first turn it will be
            if batch and left < first.count_tokens() <= budget:
                break  # whole in the next pass
            left -= len(first.prompt)
            for part in (first, *(part for part in same_prompt[first.sharing] if part is not first)):
                while part.waiting:
                    tokens = len(part.job.sequences[part.waiting[0]][1])
                    if batch and tokens > left:
                        break
                    batch.append((part.job, part.waiting.popleft()))
                    left -= tokens
            self._parts.move_to_end(client)
            turns.append(client)
            if first.waiting:
                break
        return batch

    def _first_part(self, client: str) -> RequestPart | None:
        """Return the client's first part that still waits; forget a client that has none."""
        parts = self._parts[client]
        while parts and not parts[0].waiting:
            parts.popleft()
        if parts:
            return parts[0]
        del self._parts[client]
        return None

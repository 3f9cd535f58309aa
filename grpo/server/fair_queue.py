"""What waits for the model: a bounded queue that takes its clients in turn and hands out forward passes.

A request is taken apart into pieces, the completions of one prompt each. For the next forward pass the worker takes a
piece of each client in turn, and with it whatever else waits for the same prompt, up to the token budget. So small
requests share a pass, large ones are spread over several, and a client that has sent a thousand holds up nobody.

Deterministic, a piece is a forward pass's worth of one request, cut without a look at what else waits, and passes are
not shared: floating-point sums depend on what they are batched with.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from grpo.model.packing import Batcher, by_prompt
from grpo.wire.errors import ProtocolError
from grpo.wire.logprobs import LogprobsRequest


class Job:
    """A request on its way: its sequences, in pieces of the same prompt, and the answers that are there."""

    def __init__(self, request: LogprobsRequest, client: str = ""):
        self.client, self.temperature = client, request.temperature
        self.sequences = request.sequences()
        self.left = len(request.input_ids)
        """tokens waiting or being scored"""
        self.pieces: list[_Piece] = []
        self.answers: dict[int, np.ndarray] = {}
        """by the sequence's place in the request"""
        self.refusal: ProtocolError | None = None
        self.future: Future[np.ndarray] = Future()


class _Piece:
    """Sequences of one request that wait: of one prompt, or (deterministic) what makes up one forward pass."""

    def __init__(self, job: Job, rows: list[int]):
        self.job, self.waiting = job, deque(rows)
        self.prompt = job.sequences[rows[0]][0]
        self.sharing = job.temperature, self.prompt.tobytes()
        """equal for pieces that may share a forward pass of their prompt"""

    def tokens(self) -> int:
        return len(self.prompt) + sum(len(self.job.sequences[row][1]) for row in self.waiting)


Taken = list[tuple[Job, int]]
"""jobs, each with the place of one of its sequences"""


@dataclass
class Exchange:
    """What is to be done to the model between two requests."""

    action: Callable[[], None]
    undo: Callable[[], None]
    """called where the model can score nothing after `action`"""
    done: Future[None] = field(default_factory=Future)


@dataclass
class Load:
    """What a client has waiting or being scored."""

    tokens: int = 0
    requests: int = 0


class FairQueue:
    """Any thread may put requests in; one, the worker, takes them out.

    A client may have as many tokens and requests in hand as stay free for others: half of the queue when it is alone,
    a third when there are two of them, and a newcomer always finds room (Choudhury and Hahne, Dynamic Queue Length
    Thresholds, 1998, with alpha 1).
    """

    def __init__(
        self,
        batcher: Batcher,
        max_batch_tokens: int,
        max_queue_tokens: int,
        max_requests: int,
        deterministic: bool = False,
    ):
        self._batcher, self._deterministic = batcher, deterministic
        self.budget = max_batch_tokens
        """tokens of a forward pass; the worker lowers it where they do not fit the memory"""
        self.tokens_per_second = 1000.0
        """as the worker measures them; a guess before the first pass"""
        self._limits = Load(max_queue_tokens, max_requests)
        self._held: defaultdict[str, Load] = defaultdict(Load)
        self._jobs: dict[Future[np.ndarray], Job] = {}  # that have no answer yet, in the order they came
        self._waiting: OrderedDict[str, deque[_Piece]] = OrderedDict()  # by client, in the order of their turns
        self._exchange: Exchange | None = None
        self._later: OrderedDict[str, deque[_Piece]] = OrderedDict()  # what came after it
        self._changed = threading.Condition()
        self._closed = False

    @property
    def depth(self) -> int:
        """Tokens waiting or being scored."""
        return sum(tokens for tokens, _ in self.held().values())

    def held(self) -> dict[str, tuple[int, int]]:
        """(tokens, requests) waiting or being scored, by client."""
        with self._changed:
            return {client: (held.tokens, held.requests) for client, held in self._held.items()}

    def submit(self, request: LogprobsRequest, client: str = "") -> Future[np.ndarray]:
        """Queue a request; the future gives the sequences' answers end to end, or raises ProtocolError.

        Clients are served in turn, whatever each has queued. Raises ProtocolError, 503: the queue is closed, or full
        for this client, with the seconds until there should be room.
        """
        job = Job(request, client)
        if self._deterministic:
            rows_of_pieces = self._batcher.cut(job.sequences, self.budget)
        else:
            rows_of_pieces = by_prompt(job.sequences, range(len(job.sequences)))
        pieces = [_Piece(job, rows) for rows in rows_of_pieces]
        with self._changed:
            self._check_open()
            self._check_room(client, job.left)
            job.pieces = pieces  # not before: job and pieces of a refused request would keep each other in memory
            held = self._held[client]
            held.tokens, held.requests = held.tokens + job.left, held.requests + 1
            self._jobs[job.future] = job
            waiting = self._later if self._exchange else self._waiting
            waiting.setdefault(client, deque()).extend(job.pieces)
            self._changed.notify()
        return job.future

    def cancel(self, future: Future[np.ndarray], refusal: ProtocolError) -> None:
        """Take back a request that nobody waits for any more: what has not begun of it will not be done."""
        with self._changed:
            job = self._jobs.get(future)
            if job is None:
                return
            job.refusal = refusal
            self._let_go(job, sum(sum(map(len, job.sequences[row])) for piece in job.pieces for row in piece.waiting))
            for piece in job.pieces:
                piece.waiting.clear()
            self._forget_taken()
            if job.left == 0:  # else a pass is under way with the rest of it, and `settle` follows
                self._finish(job)

    def exchange(self, action: Callable[[], None], undo: Callable[[], None]) -> Future[None]:
        """Let the worker call `action` between the last request submitted so far and the first submitted from now on.

        One at a time. The future tells when it is done, or raises ProtocolError where it was undone. Raises
        ProtocolError, 503: the queue is closed.
        """
        with self._changed:
            self._check_open()
            self._exchange = Exchange(action, undo)
            self._changed.notify()
            return self._exchange.done

    def close(self) -> None:
        """Take nothing new. What is queued is still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> Taken | Exchange | None:
        """Wait for work: about a forward pass of it, or an exchange; None when the queue is closed and empty.

        What was taken is over with `settle`, an exchange with `exchanged`, and either with `abandon`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._exchange or self._closed)
            if not self._waiting:
                return self._exchange
            taken = self._take_piece() if self._deterministic else self._take_pieces()
            self._forget_taken()
            return taken

    def exchanged(self, refusal: ProtocolError | None) -> None:
        """The exchange is done, or undone for this reason: what came after it has its turn."""
        with self._changed:
            exchange, self._exchange = self._exchange, None
            self._waiting, self._later = self._later, OrderedDict()
        if refusal is not None:
            exchange.done.set_exception(refusal)
        else:
            exchange.done.set_result(None)

    def settle(self, taken: Taken) -> None:
        """These sequences have their answers, or their job a refusal: who has all of them, or a refusal, is told."""
        with self._changed:
            for job, row in taken:
                self._let_go(job, sum(map(len, job.sequences[row])))
        for job in dict.fromkeys(job for job, _ in taken):
            if job.refusal is None and len(job.answers) < len(job.sequences):
                continue
            with self._changed:  # before the answer, whose reader may send the next request at once
                if job.future not in self._jobs:  # cancelled meanwhile
                    continue
                for piece in job.pieces:
                    piece.waiting.clear()
                self._forget_taken()
                self._let_go(job, job.left)
                self._finish(job)
            if job.refusal is not None:
                job.future.set_exception(job.refusal)
            else:
                job.future.set_result(np.concatenate([job.answers[row] for row in range(len(job.sequences))]))

    def abandon(self) -> None:
        """Nothing will be answered any more: refuse all that is here and all that comes."""
        with self._changed:
            self._closed = True
            futures = [*self._jobs] + ([self._exchange.done] if self._exchange else [])
            self._jobs.clear()
        for future in futures:
            future.set_exception(_unavailable("worker_died", "the server's worker died: the server is ending", 5))

    def _check_open(self) -> None:
        if self._closed:
            raise _unavailable("stopping", "the server is stopping", 5)

    def _check_room(self, client: str, tokens: int) -> None:
        everyone = Load(*(sum(getattr(one, name) for one in self._held.values()) for name in ("tokens", "requests")))
        own = self._held.get(client, Load())
        # What it would have beyond what would stay free.
        over_tokens = own.tokens + tokens - (self._limits.tokens - everyone.tokens - tokens)
        over_requests = own.requests + 1 - (self._limits.requests - everyone.requests - 1)
        if over_tokens <= 0 and over_requests <= 0:
            return
        if everyone.requests:
            over_tokens = max(over_tokens, over_requests * everyone.tokens / everyone.requests)
        # A token of its own that is done takes one from what it has and adds one to what is free.
        done_counts = 1 + own.tokens / max(everyone.tokens, 1)
        wait = max(1, math.ceil(over_tokens / done_counts / self.tokens_per_second))
        raise _unavailable(
            "busy",
            f"{everyone.tokens} tokens in {everyone.requests} requests wait already, {own.tokens} of them yours: come "
            f"back in {wait} s",
            wait,
        )

    def _take_piece(self) -> Taken:
        if not self._waiting:
            return []
        client, pieces = next(iter(self._waiting.items()))
        piece = pieces.popleft()
        self._waiting.move_to_end(client)
        taken = [(piece.job, row) for row in piece.waiting]
        piece.waiting.clear()
        return taken

    def _take_pieces(self) -> Taken:
        same_prompt: dict[tuple[float, bytes], list[_Piece]] = defaultdict(list)
        for pieces in self._waiting.values():
            for piece in pieces:
                same_prompt[piece.sharing].append(piece)
        taken: Taken = []
        left, temperature = self.budget, None
        turns = deque(self._waiting)
        while turns and left > 0:
            client = turns.popleft()
            first = self._first(self._waiting, client)
            if first is None:
                continue
            temperature = temperature or first.job.temperature
            if first.job.temperature != temperature:
                continue  # for the next pass, whose first turn it will be
            if taken and left < first.tokens() <= self.budget:
                break  # whole in the next pass
            left -= len(first.prompt)
            for piece in (first, *(one for one in same_prompt[first.sharing] if one is not first)):
                while piece.waiting:
                    row = piece.waiting[0]
                    tokens = len(piece.job.sequences[row][1])
                    if taken and tokens > left:
                        break
                    piece.waiting.popleft()
                    taken.append((piece.job, row))
                    left -= tokens
            self._waiting.move_to_end(client)
            turns.append(client)
            if first.waiting:
                break
        return taken

    @staticmethod
    def _first(waiting: OrderedDict[str, deque[_Piece]], client: str) -> _Piece | None:
        """The client's first piece that still waits; where there is none, the client is forgotten."""
        pieces = waiting[client]
        while pieces and not pieces[0].waiting:
            pieces.popleft()
        if pieces:
            return pieces[0]
        del waiting[client]
        return None

    def _forget_taken(self) -> None:
        for waiting in (self._waiting, self._later):
            for client in list(waiting):
                self._first(waiting, client)

    def _finish(self, job: Job) -> None:
        # Job and pieces know each other: without this they, and the request's body, would stay in memory until the
        # garbage collector comes, which is rarely.
        job.pieces.clear()
        del self._jobs[job.future]
        held = self._held[job.client]
        held.requests -= 1
        if held.requests == 0:
            del self._held[job.client]

    def _let_go(self, job: Job, tokens: int) -> None:
        job.left -= tokens
        self._held[job.client].tokens -= tokens


def _unavailable(code: str, message: str, retry_after: int) -> ProtocolError:
    return ProtocolError(503, code, message, retry_after)

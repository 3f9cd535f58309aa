"""The server's side of the work: one worker thread that owns the model, and batches what waits from all clients.

A request is taken apart into pieces, the completions of one prompt each. For the next forward pass the worker takes a
piece of each client in turn, and with it whatever else waits for the same prompt, up to the token budget. So small
requests share a pass, large ones are spread over several, and a client that has sent a thousand holds up nobody.

Deterministic, a piece is a forward pass's worth of one request, cut without a look at what else waits, and passes are
not shared: floating-point sums depend on what they are batched with.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo.batch import Batcher, by_prompt
from grpo.logprobs import token_logprobs
from grpo.monitor import Pass
from grpo.protocol import LogprobsRequest, ProtocolError

log = logging.getLogger(__name__)


class _Job:
    """A request on its way: its sequences, in pieces of the same prompt, and the answers that are there."""

    def __init__(self, request: LogprobsRequest, client: str = ""):
        self.client, self.temperature = client, request.temperature
        self.sequences = request.sequences()
        self.left = len(request.input_ids)
        """tokens waiting or being scored"""
        self.pieces: list[_Piece] = []
        self.answers: dict[int, np.ndarray] = {}
        self.refusal: ProtocolError | None = None
        self.future: Future[np.ndarray] = Future()


class _Piece:
    """Sequences of one request that wait: of one prompt, or (deterministic) what makes up one forward pass."""

    def __init__(self, job: _Job, rows: list[int]):
        self.job, self.waiting = job, deque(rows)
        self.prompt = job.sequences[rows[0]][0]
        self.sharing = job.temperature, self.prompt.tobytes()
        """equal for pieces that may share a forward pass of their prompt"""

    def tokens(self) -> int:
        return len(self.prompt) + sum(len(self.job.sequences[row][1]) for row in self.waiting)


_Taken = list[tuple[_Job, int]]
_Sequences = list[tuple[np.ndarray, np.ndarray]]


def completion_logprobs(
    model: PreTrainedModel, batcher: Batcher, sequences: _Sequences, temperature: float
) -> tuple[list[np.ndarray], int]:
    """float32 log-probs of each sequence's completion, from one forward pass, and the tokens that it was fed."""
    batch = batcher.make(sequences, model.device)
    if len(batch.targets) == 0:
        return [np.empty(0, np.float32)] * len(sequences), 0
    logprobs = token_logprobs(model, batch, temperature)[0].cpu().numpy()
    ends = np.cumsum([len(completion) for _, completion in sequences])
    return np.split(logprobs, ends[:-1]), batch.input_ids.numel()


@dataclass
class Load:
    """What a client has waiting or being scored."""

    tokens: int = 0
    requests: int = 0


class Scorer:
    """A bounded queue in front of a frozen model.

    A client may have as many tokens and requests in hand as stay free for others: half of the queue when it is alone,
    a third when there are two of them, and a newcomer always finds room (Choudhury and Hahne, Dynamic Queue Length
    Thresholds, 1998, with alpha 1).

    A request that fails is that request's error. After one the worker scores a sequence of its own: if that fails too,
    the model or its device is broken, the worker dies and calls `on_death` once, with the exception. A batch that does
    not fit the memory is halved, then and from then on; a sequence that does not fit alone is its request's 507.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batcher: Batcher,
        max_batch_tokens: int,
        max_queue_tokens: int,
        max_requests: int,
        on_death: Callable[[Exception], None],
        on_pass: Callable[[Pass], None],
        deterministic: bool = False,
        compute: Callable[
            [PreTrainedModel, Batcher, _Sequences, float], tuple[list[np.ndarray], int]
        ] = completion_logprobs,
    ):
        """`compute` makes float32 answers of a batch, one array a sequence, and says how many tokens were fed."""
        self._compute = compute
        self._model, self._batcher, self._budget = model, batcher, max_batch_tokens
        self._limits = Load(max_queue_tokens, max_requests)
        self._on_death, self._on_pass, self._deterministic = on_death, on_pass, deterministic
        self._held: defaultdict[str, Load] = defaultdict(Load)
        self._waiting: OrderedDict[str, deque[_Piece]] = OrderedDict()  # by client, in the order of their turns
        self._exchange: tuple[Callable[[], None], Future[None]] | None = None
        self._later: OrderedDict[str, deque[_Piece]] = OrderedDict()  # what came after it
        self._changed = threading.Condition()
        self._closed = False
        self._scored, self._seconds = 0.0, 0.0  # tokens and time of passes, the older the less
        self._worker = threading.Thread(target=self._work, name="scorer")
        self._worker.daemon = True  # a second Ctrl-C must end the process
        self._worker.start()

    @property
    def queue_depth(self) -> int:
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
        job = _Job(request, client)
        if self._deterministic:
            rows_of_pieces = self._batcher.cut(job.sequences, self._budget)
        else:
            rows_of_pieces = by_prompt(job.sequences, range(len(job.sequences)))
        job.pieces = [_Piece(job, rows) for rows in rows_of_pieces]
        with self._changed:
            if self._closed:
                raise _unavailable("stopping", "the server is stopping", 5)
            self._check_room(client, job.left)
            held = self._held[client]
            held.tokens, held.requests = held.tokens + job.left, held.requests + 1
            waiting = self._later if self._exchange else self._waiting
            waiting.setdefault(client, deque()).extend(job.pieces)
            self._changed.notify()
        return job.future

    def exchange(self, action: Callable[[], None]) -> Future[None]:
        """Let the worker call `action` between the last request submitted so far and the first submitted from now on.

        One at a time. The future tells when it is done. An action that fails may leave the model half changed: the
        worker dies of it. Raises ProtocolError, 503: the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise _unavailable("stopping", "the server is stopping", 5)
            self._exchange = action, Future()
            self._changed.notify()
            return self._exchange[1]

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
        tokens_per_second = self._scored / self._seconds if self._seconds else 1000.0  # a guess before the first pass
        wait = max(1, math.ceil(over_tokens / done_counts / tokens_per_second))
        raise _unavailable(
            "busy",
            f"{everyone.tokens} tokens in {everyone.requests} requests wait already, {own.tokens} of them yours: come "
            f"back in {wait} s",
            wait,
        )

    def close(self, seconds: float | None = None) -> None:
        """Take nothing new, finish what is queued; returns when that is done or the time is over."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._worker.join(seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._exchange or self._closed)
                due = None if self._waiting else self._exchange
            if due is not None:
                if (death := self._do(*due)) is not None:
                    self._die(death, [])
                    return
                continue
            if not (taken := self._take()):
                return
            try:
                self._score(taken)
            # Whatever one request meets must not end the others' service.
            except Exception as error:
                if (death := self._score_each(taken, error)) is not None:
                    self._die(death, taken)
                    return
            self._answer(taken)

    def _do(self, action: Callable[[], None], done: Future[None]) -> Exception | None:
        """The exchange that is due. Returns what went wrong with it."""
        try:
            action()
        # Whatever it was: what is half changed must answer nobody.
        except Exception as death:
            return death
        with self._changed:
            self._exchange = None
            self._waiting, self._later = self._later, OrderedDict()
        done.set_result(None)
        return None

    def _take(self) -> _Taken:
        """About a forward pass of what waits. Empty where nothing does."""
        with self._changed:
            taken = self._take_piece() if self._deterministic else self._take_pieces()
            self._forget_taken()
            return taken

    def _take_piece(self) -> _Taken:
        if not self._waiting:
            return []
        client, pieces = next(iter(self._waiting.items()))
        piece = pieces.popleft()
        self._waiting.move_to_end(client)
        return [(piece.job, row) for row in piece.waiting]

    def _take_pieces(self) -> _Taken:
        same_prompt: dict[tuple[float, bytes], list[_Piece]] = defaultdict(list)
        for pieces in self._waiting.values():
            for piece in pieces:
                same_prompt[piece.sharing].append(piece)
        taken: _Taken = []
        left, temperature = self._budget, None
        turns = deque(self._waiting)
        while turns and left > 0:
            client = turns.popleft()
            first = self._first(client)
            if first is None:
                continue
            temperature = temperature or first.job.temperature
            if first.job.temperature != temperature:
                continue  # for the next pass, whose first turn it will be
            if taken and left < first.tokens() <= self._budget:
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

    def _first(self, client: str) -> _Piece | None:
        """The client's first piece that still waits; where there is none, the client is forgotten."""
        pieces = self._waiting[client]
        while pieces and not pieces[0].waiting:
            pieces.popleft()
        if pieces:
            return pieces[0]
        del self._waiting[client]
        return None

    def _forget_taken(self) -> None:
        for client in list(self._waiting):
            self._first(client)

    @torch.inference_mode()
    def _score(self, taken: _Taken) -> None:
        """Fill in the jobs' answers. A sequence that is too large for the memory is its job's refusal."""
        sequences = [job.sequences[row] for job, row in taken]
        batches = self._batcher.cut(sequences, self._budget)
        while batches:
            rows = batches.pop()
            answers = self._forward([sequences[row] for row in rows], taken[0][0].temperature)
            if answers is not None:
                for row, answer in zip(rows, answers, strict=True):
                    job, place = taken[row]
                    job.answers[place] = answer
            elif len(rows) > 1:
                batches += self._smaller(sequences, rows)
            else:
                tokens = sum(map(len, sequences[rows[0]]))
                log.error("out of memory on a sequence of %d tokens by itself", tokens)
                message = f"a sequence of {tokens} tokens does not fit the memory of the server's device"
                taken[rows[0]][0].refusal = ProtocolError(507, "out_of_memory", message)

    def _forward(self, sequences: _Sequences, temperature: float) -> list[np.ndarray] | None:
        """float32 answers, one array a sequence, or None where the memory does not suffice."""
        try:
            began = time.monotonic()
            answers, fed = self._compute(self._model, self._batcher, sequences, temperature)
        except (MemoryError, RuntimeError) as error:
            # torch.OutOfMemoryError is a RuntimeError, as a broken device is; on a CPU only the words tell.
            full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
            if not full:
                raise
        else:
            if not all(np.isfinite(answer).all() for answer in answers):
                raise ArithmeticError("the model gives numbers that are not finite")
            if fed:
                self._note(sequences, fed, began)
            return answers
        # Out here nothing of the failed pass is held any more by its traceback.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _note(self, sequences: list[tuple[np.ndarray, np.ndarray]], fed: int, began: float) -> None:
        seconds = max(time.monotonic() - began, 1e-6)
        asked = sum(len(prompt) + len(completion) for prompt, completion in sequences)
        self._scored, self._seconds = 0.9 * self._scored + asked, 0.9 * self._seconds + seconds
        # The last token of a completion predicts nothing: it is scored, and never fed.
        lengths = [len(prompt) + max(0, len(completion) - 1) for prompt, completion in sequences]
        self._on_pass(
            Pass(
                tokens=sum(lengths),
                padded=max(lengths) * len(lengths),
                fed=fed,
                budget=self._budget,
                began=began,
                seconds=seconds,
            )
        )

    def _smaller(self, sequences: list[tuple[np.ndarray, np.ndarray]], rows: list[int]) -> list[list[int]]:
        """A batch that did not fit, in smaller ones; the budget is halved for good until there are some."""
        some = [sequences[row] for row in rows]
        while len(cut := self._batcher.cut(some, self._budget)) == 1:
            self._budget //= 2
            log.warning("out of memory: batches of %d tokens from now on (--max_batch_tokens)", self._budget)
        return [[rows[place] for place in places] for places in cut]

    def _score_each(self, taken: _Taken, error: Exception) -> Exception | None:
        """After `error`: each job by itself, so that one's failure is its own. Returns what ends the worker, if so."""
        jobs = list(dict.fromkeys(job for job, _ in taken))
        for job in jobs:
            try:
                if len(jobs) == 1:
                    raise error
                self._score([(one, row) for one, row in taken if one is job])
            # It is said to the one who asked; the probe tells whether the others can still be served.
            except Exception as own:
                log.error("one request failed", exc_info=own)
                job.refusal = ProtocolError(500, "internal", f"scoring failed: {type(own).__name__}: {own}")
                if (death := self._probe()) is not None:
                    return death
        return None

    def _probe(self) -> Exception | None:
        job = _Job(LogprobsRequest.of([0], [[0]], 1.0))
        try:
            self._score([(job, 0)])
        # Any failure here means that nothing can be scored any more.
        except Exception as death:
            return death
        return job.refusal

    def _answer(self, taken: _Taken) -> None:
        with self._changed:
            for job, row in taken:
                self._let_go(job, sum(map(len, job.sequences[row])))
        for job in dict.fromkeys(job for job, _ in taken):
            if job.refusal is None and len(job.answers) < len(job.sequences):
                continue
            with self._changed:  # before the answer, whose reader may send the next request at once
                for piece in job.pieces:
                    piece.waiting.clear()
                # Job and pieces know each other: without this they, and the request's body, would stay in memory until
                # the garbage collector comes, which is rarely.
                job.pieces.clear()
                self._forget_taken()
                self._let_go(job, job.left)
                held = self._held[job.client]
                held.requests -= 1
                if held.requests == 0:
                    del self._held[job.client]
            if job.refusal is not None:
                job.future.set_exception(job.refusal)
            else:
                job.future.set_result(np.concatenate([job.answers[row] for row in range(len(job.sequences))]))

    def _let_go(self, job: _Job, tokens: int) -> None:
        job.left -= tokens
        self._held[job.client].tokens -= tokens

    def _die(self, death: Exception, taken: _Taken) -> None:
        with self._changed:
            self._closed = True
        waiting = (*self._waiting.values(), *self._later.values())
        lost = [job for job, _ in taken] + [piece.job for pieces in waiting for piece in pieces]
        futures = [job.future for job in dict.fromkeys(lost)] + ([self._exchange[1]] if self._exchange else [])
        for future in futures:
            if future.done():
                continue  # refused already
            future.set_exception(_unavailable("worker_died", "the server's worker died: the server is ending", 5))
        self._on_death(death)


def _unavailable(code: str, message: str, retry_after: int) -> ProtocolError:
    return ProtocolError(503, code, message, retry_after)

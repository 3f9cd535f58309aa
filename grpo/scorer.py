"""The server's side of the work: one worker thread that owns the model, and batches what waits from all clients.

A request is taken apart into pieces, the completions of one prompt each. For the next forward pass the worker takes a
piece of each client in turn, and with it whatever else waits for the same prompt, up to the token budget. So small
requests share a pass, large ones are spread over several, and a client that has sent a thousand holds up nobody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo.batch import Batcher, by_prompt
from grpo.logprobs import token_logprobs
from grpo.protocol import LogprobsRequest, ProtocolError

log = logging.getLogger(__name__)


class _Job:
    """A request on its way: its sequences, in pieces of the same prompt, and the answers that are there."""

    def __init__(self, request: LogprobsRequest):
        self.temperature, self.tokens = request.temperature, len(request.input_ids)
        self.sequences = request.sequences()
        self.pieces = [_Piece(self, rows) for rows in by_prompt(self.sequences, range(len(self.sequences)))]
        self.answers: dict[int, np.ndarray] = {}
        self.refusal: ProtocolError | None = None
        self.future: Future[np.ndarray] = Future()


class _Piece:
    """Sequences of one prompt that wait."""

    def __init__(self, job: _Job, rows: list[int]):
        self.job, self.waiting = job, deque(rows)
        self.prompt = job.sequences[rows[0]][0]
        self.sharing = job.temperature, self.prompt.tobytes()
        """equal for pieces that may share a forward pass of their prompt"""

    def tokens(self) -> int:
        return len(self.prompt) + sum(len(self.job.sequences[row][1]) for row in self.waiting)


_Taken = list[tuple[_Job, int]]


class Scorer:
    """A bounded queue in front of a frozen model.

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
        on_death: Callable[[Exception], None],
    ):
        self._model, self._batcher, self._budget = model, batcher, max_batch_tokens
        self._max_queue_tokens, self._on_death = max_queue_tokens, on_death
        self._waiting: OrderedDict[str, deque[_Piece]] = OrderedDict()  # by client, in the order of their turns
        self._changed = threading.Condition()
        self._closed = False
        self._tokens_per_second = 1000.0  # a guess until the first batch has been timed
        self.queue_depth = 0
        """tokens waiting or being scored"""
        self._worker = threading.Thread(target=self._work, name="scorer")
        self._worker.daemon = True  # a second Ctrl-C must end the process
        self._worker.start()

    def submit(self, request: LogprobsRequest, client: str = "") -> Future[np.ndarray]:
        """Queue a request; the future gives float32 log-probs [completion_lengths.sum()] or raises ProtocolError.

        Clients are served in turn, whatever each has queued. Raises ProtocolError: 413 for more tokens than the queue
        may ever hold, 503 while it is full or closed.
        """
        tokens = len(request.input_ids)
        if tokens > self._max_queue_tokens:
            raise ProtocolError(
                413, "too_many_tokens", f"{tokens} tokens in one request: the limit is {self._max_queue_tokens}"
            )
        job = _Job(request)
        with self._changed:
            if self._closed:
                raise _unavailable("stopping", "the server is stopping", 5)
            if self.queue_depth + tokens > self._max_queue_tokens:
                wait = max(1, round(self.queue_depth / self._tokens_per_second))
                raise _unavailable(
                    "busy", f"{self.queue_depth} tokens are waiting already: come back in {wait} s", wait
                )
            self.queue_depth += tokens
            self._waiting.setdefault(client, deque()).extend(job.pieces)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Take nothing new, finish what is queued, return when that is done."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._worker.join()

    def _work(self) -> None:
        while taken := self._take():
            start = time.perf_counter()
            try:
                self._score(taken)
            # Whatever one request meets must not end the others' service.
            except Exception as error:
                if (death := self._score_each(taken, error)) is not None:
                    self._die(death, taken)
                    return
            else:
                tokens = sum(sum(map(len, job.sequences[row])) for job, row in taken)
                self._tokens_per_second = tokens / max(time.perf_counter() - start, 1e-6)
            self._answer(taken)

    def _take(self) -> _Taken:
        """Wait for work, then take about a forward pass of it. Empty when closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
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
            self._forget_taken()
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
            logprobs = self._forward([sequences[row] for row in rows], taken[0][0].temperature)
            if logprobs is not None:
                ends = np.cumsum([len(sequences[row][1]) for row in rows])
                for row, answer in zip(rows, np.split(logprobs, ends[:-1]), strict=True):
                    job, place = taken[row]
                    job.answers[place] = answer
            elif len(rows) > 1:
                batches += self._smaller(sequences, rows)
            else:
                tokens = sum(map(len, sequences[rows[0]]))
                log.error("out of memory on a sequence of %d tokens by itself", tokens)
                message = f"a sequence of {tokens} tokens does not fit the memory of the server's device"
                taken[rows[0]][0].refusal = ProtocolError(507, "out_of_memory", message)

    def _forward(self, sequences: list[tuple[np.ndarray, np.ndarray]], temperature: float) -> np.ndarray | None:
        """float32 log-probs of all the completions, or None where the memory does not suffice."""
        try:
            batch = self._batcher.make(sequences, self._model.device)
            if len(batch.targets) == 0:
                return np.empty(0, np.float32)
            logprobs = token_logprobs(self._model, batch, temperature)[0].cpu().numpy()
        except (MemoryError, RuntimeError) as error:
            # torch.OutOfMemoryError is a RuntimeError, as a broken device is; on a CPU only the words tell.
            full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
            if not full:
                raise
        else:
            if not np.isfinite(logprobs).all():
                raise ArithmeticError("the model gives log-probs that are not finite")
            return logprobs
        # Out here nothing of the failed pass is held any more by its traceback.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

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
        for job in dict.fromkeys(job for job, _ in taken):
            if job.refusal is None and len(job.answers) < len(job.sequences):
                continue
            with self._changed:  # before the answer, whose reader may send the next request at once
                self.queue_depth -= job.tokens
                for piece in job.pieces:
                    piece.waiting.clear()
                self._forget_taken()
            if job.refusal is not None:
                job.future.set_exception(job.refusal)
            else:
                job.future.set_result(np.concatenate([job.answers[row] for row in range(len(job.sequences))]))

    def _die(self, death: Exception, taken: _Taken) -> None:
        with self._changed:
            self._closed = True
        lost = [job for job, _ in taken] + [piece.job for pieces in self._waiting.values() for piece in pieces]
        for job in dict.fromkeys(lost):
            if job.future.done():
                continue  # refused already
            job.future.set_exception(_unavailable("worker_died", "the server's worker died: the server is ending", 5))
        self._on_death(death)


def _unavailable(code: str, message: str, retry_after: int) -> ProtocolError:
    return ProtocolError(503, code, message, retry_after)

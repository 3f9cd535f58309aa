"""The server's side of the work: one worker thread that owns the model and answers requests in the order they came."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo.batch import Batcher
from grpo.logprobs import token_logprobs
from grpo.protocol import LogprobsRequest, ProtocolError

log = logging.getLogger(__name__)


class Scorer:
    """A bounded queue in front of a frozen model.

    A request that fails is that request's error. After one the worker scores a sequence of its own: if that fails too,
    the model or its device is broken, the worker dies and calls `on_death` once, with the exception.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batcher: Batcher,
        max_batch_tokens: int,
        max_queue_tokens: int,
        on_death: Callable[[Exception], None],
    ):
        self._model, self._batcher, self._max_batch_tokens = model, batcher, max_batch_tokens
        self._max_queue_tokens, self._on_death = max_queue_tokens, on_death
        self._jobs: queue.SimpleQueue[tuple[LogprobsRequest, Future] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._tokens_per_second = 1000.0  # a guess until the first request has been timed
        self.queue_depth = 0
        """tokens waiting or being scored"""
        self._worker = threading.Thread(target=self._work, name="scorer")
        self._worker.daemon = True  # a second Ctrl-C must end the process
        self._worker.start()

    def submit(self, request: LogprobsRequest) -> Future[np.ndarray]:
        """Queue a request; the future gives float32 log-probs [completion_lengths.sum()] or raises ProtocolError.

        Raises ProtocolError: 413 for more tokens than the queue may ever hold, 503 while it is full or closed.
        """
        tokens = len(request.input_ids)
        if tokens > self._max_queue_tokens:
            raise ProtocolError(
                413, "too_many_tokens", f"{tokens} tokens in one request: the limit is {self._max_queue_tokens}"
            )
        future: Future[np.ndarray] = Future()
        with self._lock:
            if self._closed:
                raise _unavailable("stopping", "the server is stopping", 5)
            if self.queue_depth + tokens > self._max_queue_tokens:
                wait = max(1, round(self.queue_depth / self._tokens_per_second))
                raise _unavailable(
                    "busy", f"{self.queue_depth} tokens are waiting already: come back in {wait} s", wait
                )
            self.queue_depth += tokens
            self._jobs.put((request, future))
        return future

    def close(self) -> None:
        """Take nothing new, finish what is queued, return when that is done."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        self._worker.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            request, future = job
            start = time.perf_counter()
            answer, refusal = None, None
            try:
                answer = self._score(request)
            # Whatever one request meets must not end the others' service; the probe tells whether it was only that one.
            except Exception as error:
                if (death := self._probe()) is not None:
                    self._die(death, future)
                    return
                refusal = self._refusal(error)
            else:
                self._tokens_per_second = len(request.input_ids) / max(time.perf_counter() - start, 1e-6)
            with self._lock:  # before the answer, whose reader may send the next request at once
                self.queue_depth -= len(request.input_ids)
            if refusal is not None:
                future.set_exception(refusal)
            else:
                future.set_result(answer)

    @torch.inference_mode()
    def _score(self, request: LogprobsRequest) -> np.ndarray:
        sequences = request.sequences()
        answers: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)
        for rows in self._batcher.cut(sequences, self._max_batch_tokens):
            batch = self._batcher.make([sequences[row] for row in rows], self._model.device)
            if len(batch.targets) == 0:
                continue
            logprobs = token_logprobs(self._model, batch, request.temperature)[0].cpu().numpy()
            ends = np.cumsum([len(sequences[row][1]) for row in rows])
            for row, answer in zip(rows, np.split(logprobs, ends[:-1]), strict=True):
                answers[row] = answer
        together = np.concatenate(answers)
        if not np.isfinite(together).all():
            raise ArithmeticError("the model gives log-probs that are not finite")
        return together

    def _probe(self) -> Exception | None:
        try:
            self._score(LogprobsRequest.of([0], [[0]], 1.0))
        # Any failure here means that nothing can be scored any more.
        except Exception as death:
            return death
        return None

    def _refusal(self, error: Exception) -> ProtocolError:
        if isinstance(error, torch.OutOfMemoryError):
            log.error("out of memory on one request; lower --max_batch_tokens (now %d)", self._max_batch_tokens)
            message = "the server's device has too little memory for this request: lower its --max_batch_tokens"
            return ProtocolError(507, "out_of_memory", message)
        log.error("one request failed; the model still works", exc_info=error)
        return ProtocolError(500, "internal", f"scoring failed: {type(error).__name__}: {error}")

    def _die(self, death: Exception, future: Future) -> None:
        with self._lock:
            self._closed = True
        lost = [future]
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                lost.append(job[1])
        for one in lost:
            one.set_exception(_unavailable("worker_died", "the server's worker died: the server is ending", 5))
        self._on_death(death)


def _unavailable(code: str, message: str, retry_after: int) -> ProtocolError:
    return ProtocolError(503, code, message, retry_after)

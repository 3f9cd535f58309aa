"""The worker that owns the model: takes forward passes from the queue, and lives through what fails in one of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo.model.devices import is_out_of_memory
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.server.fair_queue import Exchange, FairQueue, Job, Taken
from grpo.server.monitor import Pass
from grpo.wire.errors import ProtocolError
from grpo.wire.logprobs import LogprobsRequest

log = logging.getLogger(__name__)

Sequences = list[tuple[np.ndarray, np.ndarray]]
"""(prompt ids, completion ids) of each"""
Compute = Callable[[PreTrainedModel, Batcher, Sequences, float], tuple[list[np.ndarray], int]]
"""(model, batcher, sequences, temperature) -> float32 answers, one array a sequence, and how many tokens were fed"""


def completion_logprobs(
    model: PreTrainedModel, batcher: Batcher, sequences: Sequences, temperature: float
) -> tuple[list[np.ndarray], int]:
    """float32 log-probs of each sequence's completion, from one forward pass, and the tokens that it was fed."""
    batch = batcher.make(sequences, model.device)
    if len(batch.targets) == 0:
        return [np.empty(0, np.float32)] * len(sequences), 0
    logprobs = token_logprobs(model, batch, temperature)[0].cpu().numpy()
    ends = np.cumsum([len(completion) for _, completion in sequences])
    return np.split(logprobs, ends[:-1]), batch.input_ids.numel()


class Worker:
    """A thread that answers what is in the queue, with a frozen model.

    A request that fails is that request's error. After one the worker scores a sequence of its own: if that fails too,
    the model or its device is broken, the worker dies and calls `on_death` once, with the exception. So it does where
    an exchange fails, which may leave the model half changed; one after which that sequence fails is undone. A batch
    that does not fit the memory is halved, then and from then on; a sequence that does not fit alone is its request's
    507.
    """

    def __init__(
        self,
        queue: FairQueue,
        model: PreTrainedModel,
        batcher: Batcher,
        on_death: Callable[[Exception], None],
        on_pass: Callable[[Pass], None],
        compute: Compute = completion_logprobs,
    ):
        self._queue, self._model, self._batcher, self._compute = queue, model, batcher, compute
        self._on_death, self._on_pass = on_death, on_pass
        self._scored, self._seconds = 0.0, 0.0  # tokens and time of passes, the older the less
        self._worker = threading.Thread(target=self._work, name="scorer")
        self._worker.daemon = True  # a second Ctrl-C must end the process
        self._worker.start()

    def close(self, seconds: float | None = None) -> None:
        """Take nothing new, finish what is queued; returns when that is done or the time is over."""
        self._queue.close()
        self._worker.join(seconds)

    def _work(self) -> None:
        while (work := self._queue.take()) is not None:
            death = self._exchange(work) if isinstance(work, Exchange) else self._answer(work)
            if death is not None:
                self._queue.abandon()
                self._on_death(death)
                return

    def _exchange(self, exchange: Exchange) -> Exception | None:
        """Returns what went wrong with it."""
        refusal = None
        try:
            exchange.action()
            if (flaw := self._probe()) is not None:
                log.error("the new model scores nothing (%s): the old one is put back", flaw)
                exchange.undo()
                refusal = ProtocolError(422, "wrong_weights", f"with these weights nothing can be scored: {flaw}")
        # Whatever it was: what is half changed must answer nobody.
        except Exception as death:
            return death
        self._queue.exchanged(refusal)
        return None

    def _answer(self, taken: Taken) -> Exception | None:
        """Returns what ends the worker, if so."""
        try:
            self._score(taken)
        # Whatever one request meets must not end the others' service.
        except Exception as error:
            if (death := self._score_each(taken, error)) is not None:
                return death
        self._queue.settle(taken)
        return None

    @torch.inference_mode()
    def _score(self, taken: Taken) -> None:
        """Fill in the jobs' answers. A sequence that is too large for the memory is its job's refusal."""
        sequences = [job.sequences[row] for job, row in taken]
        batches = self._batcher.cut(sequences, self._queue.budget)
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

    def _forward(self, sequences: Sequences, temperature: float) -> list[np.ndarray] | None:
        """float32 answers, one array a sequence, or None where the memory does not suffice."""
        try:
            began = time.monotonic()
            answers, fed = self._compute(self._model, self._batcher, sequences, temperature)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
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

    def _note(self, sequences: Sequences, fed: int, began: float) -> None:
        seconds = max(time.monotonic() - began, 1e-6)
        asked = sum(len(prompt) + len(completion) for prompt, completion in sequences)
        self._scored, self._seconds = 0.9 * self._scored + asked, 0.9 * self._seconds + seconds
        self._queue.tokens_per_second = self._scored / self._seconds
        # The last token of a completion predicts nothing: it is scored, and never fed.
        lengths = [len(prompt) + max(0, len(completion) - 1) for prompt, completion in sequences]
        self._on_pass(
            Pass(
                tokens=sum(lengths),
                padded=max(lengths) * len(lengths),
                fed=fed,
                budget=self._queue.budget,
                began=began,
                seconds=seconds,
            )
        )

    def _smaller(self, sequences: Sequences, rows: list[int]) -> list[list[int]]:
        """A batch that did not fit, in smaller ones; the budget is halved for good until there are some."""
        some = [sequences[row] for row in rows]
        while len(cut := self._batcher.cut(some, self._queue.budget)) == 1:
            self._queue.budget //= 2
            log.warning("out of memory: batches of %d tokens from now on (--max_batch_tokens)", self._queue.budget)
        return [[rows[place] for place in places] for places in cut]

    def _score_each(self, taken: Taken, error: Exception) -> Exception | None:
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
        job = Job(LogprobsRequest.of([0], [[0]], 1.0))
        try:
            self._score([(job, 0)])
        # Any failure here means that nothing can be scored any more.
        except Exception as death:
            return death
        return job.refusal

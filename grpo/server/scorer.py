"""The thread that owns the model: it takes forward passes from the queue, and survives those that fail."""

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo.model.devices import is_out_of_memory
from grpo.model.logprobs import likeliest_tokens, token_logprobs
from grpo.model.packing import Batcher
from grpo.server.fair_queue import Batch, Exchange, FairQueue, Job
from grpo.server.monitor import Pass
from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.refusals import ProtocolError

log = logging.getLogger(__name__)

Sequences = list[tuple[np.ndarray, np.ndarray]]  # (prompt ids, completion ids) of each
Compute = Callable[[PreTrainedModel, Batcher, Sequences, float, int], tuple[list[np.ndarray], int]]
"""(model, batcher, sequences, temperature, top_k) -> float32 answers, one array a sequence, and the number of tokens
that were fed"""


def completion_logprobs(
    model: PreTrainedModel,
    batcher: Batcher,
    sequences: Sequences,
    temperature: float,
    top_k: int = 0,
    *,
    known_ids: int | None = None,
) -> tuple[list[np.ndarray], int]:
    """Return float32 log-probs of each sequence's completion, from one forward pass, and the tokens that it was fed.
    With `top_k` the rows of LogprobsAnswer.table; the likeliest tokens are of the first `known_ids` of the vocabulary:
    the head may be wider than the tokenizer's."""
    batch = batcher.make(sequences, model.device)
    if len(batch.targets) == 0:
        return [np.empty((0, 1 + 2 * top_k) if top_k else 0, np.float32)] * len(sequences), 0
    if top_k:
        table = likeliest_tokens(model, batch, temperature, top_k, known_ids)
    else:
        table, _ = token_logprobs(model, batch, temperature)
    ends = np.cumsum([len(completion) for _, completion in sequences])
    return np.split(table.cpu().numpy(), ends[:-1]), batch.input_ids.numel()


class Scorer:
    """A thread that answers the queue's requests with a frozen model.

    After a request that fails the scorer scores a probe, a sequence of its own. If that fails too, the model or its
    device is broken: the scorer calls `on_death` once, with the exception, and ends. So it does after a failed
    exchange, which may leave the model half changed; one after which the probe fails is undone. After a batch that
    does not fit the memory, the budget is halved for good; a request with a sequence that does not fit gets a 507.
    """

    def __init__(
        self,
        queue: FairQueue,
        model: PreTrainedModel,
        batcher: Batcher,
        *,
        on_death: Callable[[Exception], None],
        on_pass: Callable[[Pass], None],
        compute: Compute = completion_logprobs,
    ):
        self._queue, self._model, self._batcher, self._compute = queue, model, batcher, compute
        self._on_death, self._on_pass = on_death, on_pass
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)  # a second Ctrl-C ends it
        self._thread.start()

    def close(self, seconds: float | None = None) -> None:
        """Accept nothing new and finish the queued requests; return when that is done or the time is over."""
        self._queue.close()
        self._thread.join(seconds)

    def _run(self) -> None:
        while (work := self._queue.take()) is not None:
            try:
                if isinstance(work, Exchange):
                    self._exchange(work)
                else:
                    self._answer(work)
            except Exception as death:  # every later answer would be wrong or impossible
                self._queue.abandon()
                self._on_death(death)
                return

    def _exchange(self, exchange: Exchange) -> None:
        """Change the model, and change it back if it scores nothing. Raise an error that leaves it half changed."""
        refusal = None
        exchange.action()
        try:
            self._probe()
        except Exception as flaw:  # of the new weights: nothing else has changed
            log.error("the new model scores nothing (%s): the old one is put back", flaw)
            exchange.undo()
            refusal = ProtocolError(422, "wrong_weights", f"with these weights nothing can be scored: {flaw}")
        self._queue.finish_exchange(refusal)

    def _answer(self, batch: Batch) -> None:
        """Score a batch; if that fails, score each job alone. Raise the error of the probe after a failed job."""
        try:
            self._score(batch)
        except Exception as error:  # of one request: it must not end the service of the others
            jobs = list(dict.fromkeys(job for job, _ in batch))
            if len(jobs) > 1:
                for job in jobs:
                    self._answer([(owner, row) for owner, row in batch if owner is job])
                return
            log.error("one request failed", exc_info=error)
            jobs[0].refusal = ProtocolError(500, "internal", f"scoring failed: {type(error).__name__}: {error}")
            self._probe()
        self._queue.settle(batch)

    @torch.inference_mode()
    def _score(self, batch: Batch) -> None:
        """Fill in the jobs' answers. Refuse the job of a sequence that is too large for the memory."""
        parts = [batch]
        while parts:
            part = parts.pop()
            sequences = [job.sequences[row] for job, row in part]
            passes = self._batcher.cut(sequences, self._queue.budget)
            if len(passes) > 1:
                parts += [[part[place] for place in places] for places in passes]
            elif (answers := self._forward(sequences, *part[0][0].settings)) is not None:
                for (job, row), answer in zip(part, answers, strict=True):
                    job.answers[row] = answer
            elif len(part) > 1:
                while len(self._batcher.cut(sequences, self._queue.budget)) == 1:
                    self._queue.budget //= 2
                    message = "out of memory: batches of %d tokens from now on (--max_batch_tokens)"
                    log.warning(message, self._queue.budget)
                parts.append(part)
            else:
                tokens = sum(map(len, sequences[0]))
                log.error("out of memory on a sequence of %d tokens by itself", tokens)
                message = f"a sequence of {tokens} tokens does not fit the memory of the server's device"
                part[0][0].refusal = ProtocolError(507, "out_of_memory", message)

    def _forward(self, sequences: Sequences, temperature: float, top_k: int) -> list[np.ndarray] | None:
        """Return float32 answers, one array a sequence, or None if the memory does not suffice."""
        try:
            began = time.monotonic()
            answers, fed = self._compute(self._model, self._batcher, sequences, temperature, top_k)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            if not all(np.isfinite(answer).all() for answer in answers):
                raise ArithmeticError("the model gives numbers that are not finite")
            if fed:
                seconds = max(time.monotonic() - began, 1e-6)
                # The last token of a completion predicts nothing: it is scored, and never fed.
                lengths = [len(prompt) + max(0, len(completion) - 1) for prompt, completion in sequences]
                padded = max(lengths) * len(lengths)
                done = Pass(tokens=sum(lengths), padded=padded, fed=fed, budget=self._queue.budget, seconds=seconds)
                self._on_pass(done)
            return answers
        # Out here the traceback of the failed pass, which kept its tensors, is gone.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _probe(self) -> None:
        """Score a sequence of the scorer's own. Raise its error: nothing can be scored any more."""
        job = Job(LogprobsRequest.of([0], [[0]], 1.0))
        self._score([(job, 0)])
        if job.refusal is not None:
            raise job.refusal

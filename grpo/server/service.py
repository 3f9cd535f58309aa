"""What a server's HTTP threads share: who may ask, what is read and scored, what the server says of itself."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from grpo.config.server import ServerConfig
from grpo.server.http import THREADS
from grpo.server.monitor import Monitor
from grpo.wire.errors import ProtocolError
from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.logprobs import LogprobsAnswer, LogprobsRequest, decode_request, encode_answer
from grpo.wire.paths import COMMIT_PATH, HEALTH_PATH, PAGE_PATH, WEIGHTS_PATH
from grpo.wire.rewards import RewardAnswer

# Threads that may work and wait at once; those that are left keep /health and refusals quick.
IN_HAND = THREADS - 8  # on requests for the model
UPDATES_IN_HAND = 4  # on weights
_LOOK_SECONDS = 0.5  # how often a thread that waits for the model looks whether its client is still there
UPDATE_PATHS = (WEIGHTS_PATH, COMMIT_PATH)
OPEN_PATHS = (PAGE_PATH, HEALTH_PATH)  # without a token the one is empty, the other says "ok"
_THIS_MACHINE = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d*)?", re.IGNORECASE)
"""a Host that no other site's page can have: a name of its own could lead here (DNS rebinding)"""


class Service:
    """What the HTTP threads share: the state, and once the model is loaded, the scorer."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.health = ServerInfo("loading", ModelInfo(config.model_name_or_path), task=config.task)
        self.monitor = Monitor()
        self.queue = self.scorer = self.updates = None
        self.death: Exception | None = None
        self.stop = threading.Event()
        self.requests, self.pieces = threading.Semaphore(IN_HAND), threading.Semaphore(UPDATES_IN_HAND)
        # JSON and tokens take many times the body's size while they are read: one request's at a time.
        self.reading = threading.Lock()
        self.read_texts = None
        self._changing = threading.Lock()

    def load(self) -> None:
        """Load the model and begin to score. Raises ConfigError where there is no such model, or a card of no use."""
        import torch

        from grpo.model.devices import take_device
        from grpo.model.fingerprint import describe
        from grpo.model.load import cards_of, device_memory, load_reference, load_tokenizer
        from grpo.model.trial import make_batcher
        from grpo.server.fair_queue import FairQueue
        from grpo.server.weight_swap import WeightSwap
        from grpo.server.worker import Worker, completion_logprobs

        config, device = self.config, take_device(local_rank=0)
        if config.task == "reward":
            from grpo.model.reward_model import (
                PADDED,
                describe_reward,
                load_reward_model,
                read_request,
                scores_for_queue,
            )

            name = config.model_name_or_path
            model, tokenizer = load_reward_model(config, "model_name_or_path", name, device)
            info, batcher, compute = describe_reward(model, tokenizer, name), PADDED, scores_for_queue
            self.read_texts = partial(read_request, tokenizer)
        else:
            tokenizer, model = load_tokenizer(config), load_reference(config, device)
            info = describe(model, tokenizer, config.model_name_or_path)
            batcher, compute = make_batcher(model, tokenizer.pad_token_id), completion_logprobs
        if cards := cards_of(model):
            for card in cards:
                torch.cuda.reset_peak_memory_stats(card)  # what loading took is over
            self.monitor.device_memory = partial(device_memory, cards)
        self.queue = FairQueue(
            batcher,
            config.batch_tokens(device.type),
            config.max_queue_tokens,
            IN_HAND,
            deterministic=config.deterministic,
        )
        self.scorer = Worker(
            self.queue, model, batcher, on_death=self._worker_died, on_pass=self.monitor.scored, compute=compute
        )
        # A piece may be on its way for body_timeout.
        patience = 2 * config.body_timeout
        self.updates = WeightSwap(self.queue, model, info, config.update_folder, patience, on_swap=self._swapped)
        longest = min(config.max_length or info.max_length, info.max_length)
        self.change_health(
            status="ready",
            model=replace(info, max_length=longest),
            takes_updates=config.update_folder is not None,
        )

    def change_health(self, **changes) -> None:
        with self._changing:
            self.health = replace(self.health, **changes)

    def _swapped(self, fingerprint: str, sha256: str) -> None:
        name = f"{self.config.model_name_or_path}, updated to {sha256[:12]}"
        self.change_health(model=replace(self.health.model, name=name, fingerprint=fingerprint))

    def _worker_died(self, death: Exception) -> None:
        self.death = death
        self.stop.set()

    def allows(self, authorization: str) -> bool:
        """Whether a request with this header may know and ask everything."""
        if self.config.token is None:
            return True
        # Digests, because compare_digest tells by its time whether the lengths are the same.
        sent, right = (hashlib.sha256(text.encode()) for text in (authorization, f"Bearer {self.config.token}"))
        return hmac.compare_digest(sent.digest(), right.digest())

    def admit(self, path: str, headers: dict[str, str]) -> tuple[bool, ProtocolError | None]:
        """Whether the sender may ask everything, and why a request is not worth its body, if so.

        `headers` has them in CGI's spelling.
        """
        if self.allows(headers.get("AUTHORIZATION", "")):
            if self.config.token is None and (refusal := _foreign(headers)) is not None:
                return False, refusal
            if path in UPDATE_PATHS and self.config.update_folder is None:
                message = "this server takes no new weights: it runs without --update_folder"
                return True, ProtocolError(403, "no_updates", message)
            return True, None
        if path not in OPEN_PATHS:
            message = "send 'Authorization: Bearer TOKEN' with the server's token"
            return False, ProtocolError(401, "unauthorized", message)
        if headers.get("CONTENT_LENGTH", "0") != "0":
            return False, ProtocolError(413, "request_entity_too_large", f"{path} takes no body")
        return False, None

    @contextmanager
    def thread_for(self, kind: threading.Semaphore) -> Iterator[None]:
        """Work and wait on a web server's thread. Raises ProtocolError, 503, where its kind has all that it may."""
        if not kind.acquire(blocking=False):
            message = "as many requests of this kind are in work as there may be: come back in 1 s"
            raise ProtocolError(503, "busy", message, retry_after=1)
        try:
            yield
        finally:
            kind.release()

    def read(self, body: Callable[[], bytes]) -> LogprobsRequest:
        """Raises ProtocolError: for a request that cannot be answered, or a server that cannot answer now."""
        self.check_ready()
        config, model = self.config, self.health.model
        limits = model.max_length, config.max_request_sequences, config.max_request_tokens
        if config.task == "reward":
            with self.reading:
                return self.read_texts(body(), *limits)
        return decode_request(body(), model.vocab_size, *limits)

    def check_ready(self) -> None:
        """Raises ProtocolError while the model cannot be asked anything."""
        if (status := self.health.status) != "ready":
            raise ProtocolError(503, status, f"the server is {status}", retry_after=2)

    def check_waiting(self, gone: Callable[[], bool]) -> None:
        """Raises ProtocolError where nobody waits for the answer any more."""
        if gone():
            raise ProtocolError(499, "client_gone", "the connection was closed before the answer was there")

    def score(self, request: LogprobsRequest, sender: str, gone: Callable[[], bool]) -> bytes:
        """The bytes of its answer. `gone` tells whether nobody waits for it any more: then its work is taken back.

        Raises ProtocolError for everything that goes wrong.
        """
        future, model = self.updates.submit(request, request.client or sender)
        while not wait([future], timeout=_LOOK_SECONDS).done:
            try:
                self.check_waiting(gone)
            except ProtocolError as error:
                self.queue.cancel(future, error)
                raise
        answer = future.result()  # only then is it certain which model it is of
        own = model.fingerprint, request.request_id
        if self.config.task == "reward":
            return RewardAnswer(answer, *own).to_json()
        return encode_answer(LogprobsAnswer(answer, *own))

    def held(self) -> dict[str, tuple[int, int]]:
        """(tokens, requests) in hand, by client."""
        return self.queue.held() if self.queue else {}

    def current_health(self) -> ServerInfo:
        return replace(self.health, queue_depth=self.queue.depth if self.queue else 0)

    def status(self) -> dict:
        """What the live page shows."""
        config, held = self.config, self.held()
        tokens, requests = (sum(one[place] for one in held.values()) for place in (0, 1))
        return {
            "health": self.current_health().to_dict(),
            "deterministic": config.deterministic,
            "max_batch_tokens": self.queue.budget if self.queue else 0,
            "queue": {
                "tokens": tokens,
                "requests": requests,
                "max_tokens": config.max_queue_tokens,
                "max_requests": IN_HAND,
            },
            **self.monitor.status(held),
        }


def _foreign(headers: dict[str, str]) -> ProtocolError | None:
    """Why this may be a page of another site in a browser of this machine, which must not use a server without a token.

    A browser sends `Host` always, and `Origin` with all that could change something.
    """
    host, origin = headers.get("HOST", ""), headers.get("ORIGIN")
    if host and not _THIS_MACHINE.fullmatch(host):
        message = f"Host {host[:80]!r}: without a token ask this server as localhost, 127.0.0.1 or [::1]"
        return ProtocolError(403, "foreign_host", message)
    if origin is not None and origin != f"http://{host}":
        message = f"Origin {origin[:80]!r}: without a token this server answers no other site's pages"
        return ProtocolError(403, "foreign_origin", message)
    return None

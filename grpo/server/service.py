"""The state that HTTP threads share: who may ask, how a request is read and scored, what /health and /status say."""

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

# Threads that may work and wait at once; the other threads keep /health and refusals quick.
MOST_REQUESTS = THREADS - 8  # requests for the model
MOST_SEQUENCES = 4096  # of one request: a trainer sends a group, a hundred at most
_MOST_UPDATES = 4  # requests with weights
_CHECK_SECONDS = 0.5  # how often a thread that waits for the model checks whether its client is still connected
_UPDATE_PATHS = (WEIGHTS_PATH, COMMIT_PATH)
_OPEN_PATHS = (PAGE_PATH, HEALTH_PATH)  # without the token they tell nothing: an empty page, and "ok"
_THIS_MACHINE = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d*)?", re.IGNORECASE)
"""a Host header that no other site's page can send: its own name could lead here (DNS rebinding)"""


class Service:
    """The state of a server and, once the model is loaded, its queue and worker."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self.info = ServerInfo("loading", ModelInfo(config.model_name_or_path), task=config.task)
        self.monitor = Monitor()
        self.queue = self.worker = self.updates = None
        self.death: Exception | None = None
        self.stop = threading.Event()
        self.request_threads = threading.Semaphore(MOST_REQUESTS)
        self.update_threads = threading.Semaphore(_MOST_UPDATES)
        # While they are read, JSON and tokens take many times the size of the body: read one request at a time.
        self._reading = threading.Lock()
        self._read_texts = None
        self._changing = threading.Lock()

    def load(self) -> None:
        """Load the model and begin to score. Raises ConfigError for a missing model, or a card that is no use."""
        import torch

        from grpo.model.devices import take_device
        from grpo.model.fingerprint import describe
        from grpo.model.load import cards_of, device_memory, device_use, load_reference, load_tokenizer
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
            self._read_texts = partial(read_request, tokenizer)
        else:
            tokenizer, model = load_tokenizer(config), load_reference(config, device)
            info = describe(model, tokenizer, config.model_name_or_path)
            batcher, compute = make_batcher(model, tokenizer.pad_token_id), completion_logprobs
        if cards := cards_of(model):
            for card in cards:
                torch.cuda.reset_peak_memory_stats(card)  # count from here on, without loading
            self.monitor.device_memory = partial(device_memory, cards)
            if device_use(cards) is not None:
                self.monitor.device_use = partial(device_use, cards)
        self.queue = FairQueue(
            batcher,
            config.batch_tokens(device.type),
            config.max_queue_tokens,
            MOST_REQUESTS,
            deterministic=config.deterministic,
            fingerprint=info.fingerprint,
        )
        self.worker = Worker(
            self.queue, model, batcher, on_death=self._worker_died, on_pass=self.monitor.scored, compute=compute
        )
        if config.update_folder is not None:
            patience = 2 * config.body_timeout  # a single piece may take body_timeout
            tokens = info.tokenizer_fingerprint
            self.updates = WeightSwap(
                self.queue, model, tokens, config.update_folder, patience, on_swap=self._describe_update
            )
        longest = min(config.max_length or info.max_length, info.max_length)
        self.change_info(
            status="ready",
            model=replace(info, max_length=longest),
            takes_updates=config.update_folder is not None,
        )

    def change_info(self, **changes) -> None:
        with self._changing:
            self.info = replace(self.info, **changes)

    def _describe_update(self, fingerprint: str, sha256: str) -> None:
        name = f"{self.config.model_name_or_path}, updated to {sha256[:12]}"
        self.change_info(model=replace(self.info.model, name=name, fingerprint=fingerprint))

    def _worker_died(self, death: Exception) -> None:
        self.death = death
        self.stop.set()

    def allows(self, authorization: str) -> bool:
        """Return whether a request with this header may know and ask everything."""
        if self.config.token is None:
            return True
        # Digests, because the time of compare_digest depends on whether the lengths are equal.
        sent, expected = (hashlib.sha256(text.encode()) for text in (authorization, f"Bearer {self.config.token}"))
        return hmac.compare_digest(sent.digest(), expected.digest())

    def admit(self, path: str, headers: dict[str, str]) -> tuple[bool, ProtocolError | None]:
        """Return whether the sender may ask everything, and the refusal of a request whose body need not be read.

        `headers` are named as in CGI.
        """
        if self.allows(headers.get("AUTHORIZATION", "")):
            if self.config.token is None and (refusal := _foreign(headers)) is not None:
                return False, refusal
            if path in _UPDATE_PATHS and self.config.update_folder is None:
                message = "this server takes no new weights: it runs without --update_folder"
                return True, ProtocolError(403, "no_updates", message)
            return True, None
        if path not in _OPEN_PATHS:
            message = "send 'Authorization: Bearer TOKEN' with the server's token"
            return False, ProtocolError(401, "unauthorized", message)
        if headers.get("CONTENT_LENGTH", "0") != "0":
            return False, ProtocolError(413, "request_entity_too_large", f"{path} takes no body")
        return False, None

    @contextmanager
    def thread_of(self, threads: threading.Semaphore) -> Iterator[None]:
        """Use a thread of the web server. Raises ProtocolError, 503, where requests of this kind have all they may."""
        if not threads.acquire(blocking=False):
            message = "as many requests of this kind are in work as there may be: come back in 1 s"
            raise ProtocolError(503, "busy", message, retry_after=1)
        try:
            yield
        finally:
            threads.release()

    def read(self, body: Callable[[], bytes]) -> LogprobsRequest:
        """Read a request, and its body only where it can be answered now. Raises ProtocolError."""
        self.check_ready()
        config, model = self.config, self.info.model
        limits = model.max_length, MOST_SEQUENCES, config.max_request_tokens
        if config.task == "reward":
            with self._reading:
                return self._read_texts(body(), *limits)
        return decode_request(body(), model.vocab_size, *limits)

    def check_ready(self) -> None:
        """Raise ProtocolError while the model cannot be asked anything."""
        if (status := self.info.status) != "ready":
            raise ProtocolError(503, status, f"the server is {status}", retry_after=2)

    def check_connected(self, is_gone: Callable[[], bool]) -> None:
        """Raise ProtocolError where the client has closed the connection."""
        if is_gone():
            raise ProtocolError(499, "client_gone", "the connection was closed before the answer was there")

    def score(self, request: LogprobsRequest, sender: str, is_gone: Callable[[], bool]) -> bytes:
        """Return the bytes of the answer. Take the request back when `is_gone` says that the client has closed.

        Raises ProtocolError for everything that goes wrong.
        """
        future = self.queue.submit(request, request.client or sender)
        while not wait([future], timeout=_CHECK_SECONDS).done:
            try:
                self.check_connected(is_gone)
            except ProtocolError as error:
                self.queue.cancel(future, error)
                raise
        answer = future.result()
        if self.config.task == "reward":
            return RewardAnswer(answer.values, answer.fingerprint, request.request_id).to_json()
        return encode_answer(LogprobsAnswer(answer.values, answer.fingerprint, request.request_id))

    def held(self) -> dict[str, tuple[int, int]]:
        """Return (tokens, requests) waiting or being scored, by client."""
        return self.queue.held() if self.queue else {}

    def current_info(self) -> ServerInfo:
        return replace(self.info, queue_depth=self.queue.depth if self.queue else 0)

    def status(self) -> dict:
        """Return what the live page shows."""
        config, held = self.config, self.held()
        return {
            "health": self.current_info().to_dict(),
            "deterministic": config.deterministic,
            "max_batch_tokens": self.queue.budget if self.queue else 0,
            "queue": {
                "tokens": sum(tokens for tokens, _ in held.values()),
                "requests": sum(requests for _, requests in held.values()),
                "max_tokens": config.max_queue_tokens,
                "max_requests": MOST_REQUESTS,
            },
            **self.monitor.status(held),
        }


def _foreign(headers: dict[str, str]) -> ProtocolError | None:
    """Return a refusal where another site's page may be asking, from a browser of this machine.

    Such a page must not use a server without a token. A browser always sends `Host`, and `Origin` with every request
    that could change something.
    """
    host, origin = headers.get("HOST", ""), headers.get("ORIGIN")
    if host and not _THIS_MACHINE.fullmatch(host):
        message = f"Host {host[:80]!r}: without a token ask this server as localhost, 127.0.0.1 or [::1]"
        return ProtocolError(403, "foreign_host", message)
    if origin is not None and origin != f"http://{host}":
        message = f"Origin {origin[:80]!r}: without a token this server answers no other site's pages"
        return ProtocolError(403, "foreign_origin", message)
    return None

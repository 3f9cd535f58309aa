"""The trainer's side of the wire: groups go out the moment they are generated, log-probs come back when they are ready.

    RefError                  the reference cannot serve this run: wrong model, wrong token, refused request
    +-- RefUnavailable        no server answered before the deadline

A request is stateless, so it is simply sent again, to the next server if there are several, until one answers or the
deadline is over: a server that is killed and restarted costs time and nothing else.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import requests

from grpo.config import TrainerConfig
from grpo.protocol import (
    CONTENT_TYPE,
    HEALTH_PATH,
    LOGPROBS_PATH,
    Health,
    LogprobsRequest,
    ProtocolError,
    decode_answer,
    encode_request,
)

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_LONGEST_PAUSE = 5.0
_RETRIED = (502, 503, 504)  # not ready, busy, or a proxy without its server: another time it may work
_IN_FLIGHT = 8  # requests of one rank at a time


def check_reference(config: TrainerConfig, policy: Health, reference: Health) -> None:
    """Refuse a reference whose token ids mean something else than the policy's, or that takes shorter sequences.

    Raises RefError. Other weights are allowed (training may go on from a fine-tuned model), and said.
    """
    urls = " ".join(config.ref_servers)
    restart = f"restart it with --model_name_or_path {config.model_name_or_path}"
    if reference.tokenizer_fingerprint != policy.tokenizer_fingerprint:
        raise RefError(f"{urls} serves {reference.model}, whose tokenizer is not that of {policy.model}: {restart}")
    if reference.vocab_size != policy.vocab_size:
        raise RefError(
            f"{urls} serves {reference.model} with a vocabulary of {reference.vocab_size}, and {policy.model} has "
            f"{policy.vocab_size}: {restart}"
        )
    if config.longest_sequence > reference.max_length:
        raise RefError(
            f"{urls} takes at most {reference.max_length} tokens a sequence, and max_prompt_length + "
            f"max_completion_length is {config.longest_sequence}: restart it with a larger --max_length, or lower one "
            "of them"
        )
    if reference.model_fingerprint != policy.model_fingerprint:
        log.warning(
            "the reference (%s) is another model than the policy starts from (%s): the KL will not begin at 0",
            reference.model,
            policy.model,
        )


class RefError(RuntimeError):
    """The reference cannot serve this run. The message says which server, what it said, and what to do."""


class RefUnavailable(RefError):
    """No server answered before the deadline."""


class RefClient:
    """Sends groups to the reference servers from threads of its own. Close it when the run ends."""

    def __init__(self, config: TrainerConfig):
        self._config = config
        self._turns = itertools.count()
        self._name = uuid.uuid4().hex  # the server serves clients in turn
        self._fingerprint: str | None = None
        self._threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="reference")
        self._per_thread = threading.local()
        self._closing = threading.Event()

    def wait_ready(self) -> Health:
        """Wait until every server is ready and check that all serve the same model; return what they say of it.

        Says every 15 seconds what it waits for.

        Raises RefUnavailable after `ref_startup_timeout` seconds, RefError for a refused token or differing models.
        """
        first, *others = [self._wait_for(url) for url in self._config.ref_servers]
        for url, other in zip(self._config.ref_servers[1:], others, strict=True):
            if other.model_fingerprint != first.model_fingerprint:
                raise RefError(
                    f"{self._config.ref_servers[0]} serves {first.model} ({first.model_fingerprint}) but {url} serves "
                    f"{other.model} ({other.model_fingerprint}): start every server with the same model"
                )
        self._fingerprint = first.model_fingerprint
        return first

    def submit(self, prompt_ids: list[int], completions: list[list[int]], name: str) -> Future[list[np.ndarray]]:
        """Ask for the log-probs of one prompt's completions; returns at once.

        The future gives float32 [len(completion)] for each, or raises RefError.
        """
        request = LogprobsRequest.of(prompt_ids, completions, self._config.temperature, name, self._name)
        return self._threads.submit(self._score, request)

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, request: LogprobsRequest) -> list[np.ndarray]:
        body, tokens = encode_request(request), int(request.completion_lengths.sum())
        servers, deadline = self._config.ref_servers, _Deadline(self._config.ref_deadline)
        turn = next(self._turns)
        attempts = 0
        while True:
            url = servers[(turn + attempts) % len(servers)]
            said, pause = self._ask(url, body, tokens, deadline)
            attempts += 1
            if isinstance(said, np.ndarray):
                return np.split(said, np.cumsum(request.completion_lengths)[:-1])
            if attempts % len(servers):
                continue  # another one may answer at once
            # Spread out, so that many ranks do not knock at the same moment.
            pause = pause or min(_LONGEST_PAUSE, 0.1 * 2 ** min(attempts, 10)) * random.uniform(0.5, 1.0)
            if deadline.left() <= pause or self._closing.wait(pause):
                raise RefUnavailable(
                    f"no log-probs for {request.request_id} after {deadline.seconds:.0f} s and {attempts} attempts; "
                    f"last, {url} {said}: see that server's log; ref_deadline sets how long to wait"
                )
            if attempts == 4 * len(servers):
                log.warning("%s %s; trying again until %.0f s are over", url, said, deadline.seconds)

    def _ask(self, url: str, body: bytes, tokens: int, deadline: _Deadline) -> tuple[np.ndarray | str, float]:
        """The log-probs, or what went wrong this time and how long the server asks to wait (0: it did not say)."""
        try:
            answer = self._session().post(
                url + LOGPROBS_PATH,
                data=body,
                timeout=(_CONNECT_SECONDS, max(0.1, min(self._config.ref_request_timeout, deadline.left()))),
            )
        except requests.Timeout:
            return "did not answer in time", 0.0
        except requests.RequestException as error:
            return f"cannot be reached ({_root(error)})", 0.0
        if answer.status_code in _RETRIED:
            return f"said {answer.status_code}: {_sentence(answer)}", _retry_after(answer)
        if answer.status_code != 200:
            raise RefError(f"{url} refused a request with {answer.status_code}: {_sentence(answer)}")
        try:
            decoded = decode_answer(answer.content, tokens)
        except ProtocolError as error:
            return f"sent a damaged answer ({error})", 0.0
        if self._fingerprint is not None and decoded.model_fingerprint != self._fingerprint:
            raise RefError(
                f"{url} now serves another model ({decoded.model_fingerprint}, at the start {self._fingerprint}): "
                "restart it with the model this run began with"
            )
        return decoded.logprobs, 0.0

    def _wait_for(self, url: str) -> Health:
        deadline = _Deadline(self._config.ref_startup_timeout)
        next_word = time.monotonic() + 5.0
        while True:
            try:
                answer = self._session().get(url + HEALTH_PATH, timeout=_CONNECT_SECONDS)
                if answer.status_code == 200:
                    return self._identify(url, answer)
                said = f"said {answer.status_code}: {answer.text[:200]}"
            except requests.RequestException as error:
                said = f"cannot be reached ({_root(error)})"
            if deadline.left() <= 0:
                raise RefUnavailable(
                    f"no reference server at {url} after {deadline.seconds:.0f} s (it {said}): start one with "
                    f"'python ref_server.py --model_name_or_path {self._config.model_name_or_path} --port "
                    f"{url.rsplit(':', 1)[-1]}', or set ref_servers to where it is, or beta to 0 to train without"
                )
            if time.monotonic() >= next_word:
                log.info(
                    "waiting for the reference server (%.0f of %.0f s): %s %s",
                    deadline.seconds - deadline.left(),
                    deadline.seconds,
                    url,
                    said,
                )
                next_word = time.monotonic() + 15.0
            time.sleep(min(0.5, max(0.0, deadline.left())))

    def _identify(self, url: str, answer: requests.Response) -> Health:
        if answer.content == b'{"status": "ok"}':
            raise RefError(f"{url} wants another token: give server and trainer the same one")
        try:
            return Health.from_json(answer.content)
        except ValueError as error:
            raise RefError(f"{url} is something else ({error}): set ref_servers to the reference server") from error

    def _session(self) -> requests.Session:
        if not hasattr(self._per_thread, "session"):
            session = requests.Session()
            # A proxy in the environment is for the way out, and would swallow requests to machines of one's own.
            session.trust_env = False
            session.headers["Content-Type"] = CONTENT_TYPE
            if self._config.token:
                session.headers["Authorization"] = f"Bearer {self._config.token}"
            self._per_thread.session = session
        return self._per_thread.session


class _Deadline:
    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def _sentence(answer: requests.Response) -> str:
    try:
        return answer.json()["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return answer.text[:200]


def _retry_after(answer: requests.Response) -> float:
    value = answer.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0


def _root(error: BaseException) -> str:
    while (inner := error.__context__) is not None:
        error = inner
    return getattr(error, "strerror", None) or str(error)

"""The talk with one reference server: a request and its answer, /health, new weights, TLS, what can be wrong with them.

ServerError                  the reference cannot serve this run: wrong model, wrong token, refused request
+-- ServersUnavailable        no server answered before the deadline
Failure                   an attempt that failed; another may not
+-- Loading               the server is loading its model
+-- Outdated              the server has a reference that this run has replaced
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import requests

from grpo.client.errors import Failure, Loading, Outdated, ServerError
from grpo.config.trainer import TrainerConfig
from grpo.wire.errors import ProtocolError
from grpo.wire.health import ServerInfo
from grpo.wire.logprobs import LogprobsAnswer
from grpo.wire.paths import COMMIT_PATH, CONTENT_TYPES, HEALTH_PATH, TASK_PATHS, WEIGHTS_PATH
from grpo.wire.rewards import RewardAnswer
from grpo.wire.weights import Commit, Piece

_CONNECT_SECONDS = 5.0  # to connect, and for all of /health
# A cut or slow body, an upload that is not as far as was thought, busy, not ready, a proxy without its server.
_RETRIED = (408, 409, 429, 502, 503, 504)
_PIECE = 16 << 20  # bytes of weights in one request
_FIELDS = {"logprobs": "ref_servers", "reward": "reward_funcs"}  # where a task's servers are named
_Answer = TypeVar("_Answer", LogprobsAnswer, RewardAnswer)


@dataclass(frozen=True)
class WeightsToSend:
    """Weights for the reference servers."""

    file: Path
    """safetensors"""
    size: int
    """of the file, in bytes"""
    sha256: str
    """of the file, in hex"""
    fingerprint: str
    """of the model that they make"""


class Connection:
    """Asks any of a run's servers of one task (ServerInfo.task); each thread over connections of its own."""

    def __init__(self, config: TrainerConfig, task: str):
        """Raises ServerError if `ref_ca_file` holds no certificate."""
        self._config, self._task = config, task
        self._per_thread = threading.local()
        self.fingerprint: str | None = None
        """of the model that every answer must come from; None is any"""
        self.outdated: set[str] = set()
        """fingerprints of this run's earlier references"""
        # Read for each connection: a reward function may have changed the directory by then.
        self._verify = str(Path(config.ref_ca_file).absolute()) if config.ref_ca_file else True
        if config.ref_ca_file:
            try:
                ssl.create_default_context(cafile=config.ref_ca_file)
            except OSError as error:
                raise ServerError(
                    f"ref_ca_file={config.ref_ca_file!r}: no certificate can be read from it ({error}): name a PEM file"
                ) from error

    def ask(self, url: str, body: bytes, decode: Callable[[bytes], _Answer], seconds: float) -> _Answer:
        """What the server answers to a request, within `ref_request_timeout` or `seconds` if that is less.

        Raises Failure, or ServerError where sending again is no use.
        """
        answer = self._post(url, TASK_PATHS[self._task], body, seconds)
        try:
            decoded = decode(answer.content)
        except ProtocolError as error:
            raise Failure(f"sent a damaged answer ({error})") from error
        self._check_model(decoded.model_fingerprint)
        return decoded

    def send_weights(self, url: str, reference: WeightsToSend, replaces: str) -> Iterator[None]:
        """Bring the server from the model `replaces` to this reference; gives control back after each piece it took.

        What is there already is not sent again. Raises Failure, ServerError.
        """
        seconds, data, received = self._config.ref_request_timeout, b"", 0
        with open(reference.file, "rb") as file:
            while True:
                piece = Piece(reference.sha256, reference.size, received)
                answer = self._post(url, WEIGHTS_PATH, data, seconds, asdict(piece))
                try:
                    said = int(answer.json()["received"])
                except (ValueError, KeyError, TypeError) as error:
                    raise Failure(f"sent a damaged answer ({answer.text[:200]!r})") from error
                if data and said <= received:
                    raise Failure(f"does not take in the weights: it had {received} bytes and now {said}")
                received = said
                if data:
                    yield
                if received >= reference.size:
                    break
                file.seek(received)
                data = file.read(_PIECE)
        commit = Commit(reference.sha256, replaces, reference.fingerprint)
        self._post(url, COMMIT_PATH, b"", seconds, asdict(commit))

    def _post(self, url: str, path: str, body: bytes, seconds: float, query: dict | None = None) -> requests.Response:
        """A 200 answer, within `ref_request_timeout` or `seconds` if that is less. Raises Failure, ServerError."""
        patience = max(0.1, min(self._config.ref_request_timeout, seconds))
        try:
            answer = self._session().post(url + path, params=query, data=body, timeout=(_CONNECT_SECONDS, patience))
        except requests.RequestException as error:
            raise _unreached(error) from error
        if answer.status_code in _RETRIED:
            raise Failure(f"said {answer.status_code}: {_sentence(answer)}", _retry_after(answer))
        if answer.status_code != 200:
            raise ServerError(f"{url} refused a request with {answer.status_code}: {_sentence(answer)}")
        return answer

    def health(self, url: str) -> ServerInfo:
        """What a server that can score says of itself. Raises Failure, or ServerError where waiting is no use."""
        try:
            answer = self._session().get(url + HEALTH_PATH, timeout=_CONNECT_SECONDS)
        except requests.RequestException as error:
            if isinstance(root := _root(error), ssl.SSLCertVerificationError):
                raise ServerError(
                    f"{url} has a certificate that does not verify ({root.verify_message}): set ref_ca_file to the PEM "
                    "file of the authority that signed it, and write the host as the certificate does"
                ) from error
            raise _unreached(error) from error
        if answer.content == b'{"status": "ok"}':
            raise ServerError(f"{url} wants another token: give server and trainer the same one")
        if answer.status_code != 200:
            with suppress(ValueError):  # then it is something else that answers, such as a proxy
                if (health := ServerInfo.from_json(answer.content)).status == "loading":
                    raise Loading(f"is loading {health.model.name}", _retry_after(answer))
            raise Failure(f"said {answer.status_code}: {answer.text[:200]}", _retry_after(answer))
        try:
            health = ServerInfo.from_json(answer.content)
        except ValueError as error:
            raise ServerError(f"{url} is something else ({error}): set {_FIELDS[self._task]} to the server") from error
        if health.task != self._task:
            raise ServerError(
                f"{url} serves {health.model.name} for the task {health.task}, and {_FIELDS[self._task]} needs a "
                f"server of the task {self._task}: start one with --task {self._task}, or name this one in "
                f"{_FIELDS.get(health.task, 'another field')}"
            )
        self._check_model(health.model.fingerprint)
        return health

    def _check_model(self, fingerprint: str) -> None:
        if self.fingerprint is None or fingerprint == self.fingerprint:
            return
        if fingerprint in self.outdated:
            raise Outdated(fingerprint)
        raise Failure(
            f"now serves another model ({fingerprint}, and this run's is {self.fingerprint})", other_model=fingerprint
        )

    def _session(self) -> requests.Session:
        if not hasattr(self._per_thread, "session"):
            session = requests.Session()
            # A proxy in the environment is for the way out, and would swallow requests to machines of one's own.
            session.trust_env = False
            session.verify = self._verify
            session.headers["Content-Type"] = CONTENT_TYPES[self._task]
            if self._config.token:
                session.headers["Authorization"] = f"Bearer {self._config.token}"
            self._per_thread.session = session
        return self._per_thread.session


def _unreached(error: requests.RequestException) -> Failure:
    root = _root(error)
    if isinstance(root, TimeoutError):
        return Failure("did not answer in time")
    return Failure(f"cannot be reached ({getattr(root, 'strerror', None) or root})")


def _root(error: BaseException) -> BaseException:
    while (inner := error.__context__) is not None:
        error = inner
    return error


def _sentence(answer: requests.Response) -> str:
    try:
        return answer.json()["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return answer.text[:200]


def _retry_after(answer: requests.Response) -> float:
    value = answer.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0

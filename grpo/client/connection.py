"""HTTP to one server of a run: requests and answers, /health, new weights, TLS, and the error of each fault."""

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

from grpo.client.errors import ModelLoading, ModelOutdated, RequestFailure, ServerError
from grpo.config.connection import ClientConfig
from grpo.wire.errors import ProtocolError
from grpo.wire.health import ServerInfo
from grpo.wire.logprobs import LogprobsAnswer
from grpo.wire.paths import COMMIT_PATH, CONTENT_TYPES, HEALTH_PATH, TASK_PATHS, WEIGHTS_PATH
from grpo.wire.rewards import RewardAnswer
from grpo.wire.weights import Commit, Piece

_CONNECT_SECONDS = 5.0  # to connect, and for all of /health
# A slow or cut body, an upload at another offset, too many requests, a proxy without its server, a server not ready.
_RETRIED = (408, 409, 429, 502, 503, 504)
PIECE_BYTES = 16 << 20  # of weights in one request
_FIELDS = {"logprobs": "ref_servers", "reward": "reward_funcs"}  # the setting that names a task's servers
Answer = TypeVar("Answer", LogprobsAnswer, RewardAnswer)


@dataclass(frozen=True)
class WeightsToSend:
    """A file of weights for the servers."""

    file: Path
    """the safetensors file"""
    size: int
    """the file's size in bytes"""
    sha256: str
    """the file's SHA-256 in hex"""
    fingerprint: str
    """the fingerprint of a model with these weights"""


class Connection:
    """HTTP to any server of one task (ServerInfo.task). Each thread has TCP connections of its own."""

    def __init__(self, config: ClientConfig, task: str):
        """Raises ServerError where `ref_ca_file` holds no certificate."""
        self._config, self._task = config, task
        self._per_thread = threading.local()
        self.fingerprint: str | None = None
        """fingerprint of the model that every answer must come from; None is any model"""
        self.outdated: set[str] = set()
        """fingerprints of the models that this run has replaced"""
        # An absolute path: each new TCP connection reads it, and a reward function may change the working directory.
        self._verify = str(Path(config.ref_ca_file).absolute()) if config.ref_ca_file else True
        if config.ref_ca_file:
            try:
                ssl.create_default_context(cafile=config.ref_ca_file)
            except OSError as error:
                raise ServerError(
                    f"ref_ca_file={config.ref_ca_file!r}: no certificate can be read from it ({error}): name a PEM file"
                ) from error

    def request(self, url: str, body: bytes, decode: Callable[[bytes], Answer], seconds: float) -> Answer:
        """Send a request and decode the answer, within `ref_request_timeout` or `seconds`, whichever is less.

        Raises RequestFailure, or ServerError where sending it again cannot help.
        """
        response = self._post(url, TASK_PATHS[self._task], body, seconds)
        try:
            answer = decode(response.content)
        except ProtocolError as error:
            raise RequestFailure(f"sent a damaged answer ({error})") from error
        self._check_model(answer.model_fingerprint)
        return answer

    def upload_weights(self, url: str, weights: WeightsToSend, replaces: str) -> Iterator[None]:
        """Replace the server's model, whose fingerprint is `replaces`. Yields after each piece that the server took.

        Begins where an earlier upload of the same file ended. Raises RequestFailure, ServerError.
        """
        seconds, data, received = self._config.ref_request_timeout, b"", 0
        with open(weights.file, "rb") as file:
            while True:
                piece = Piece(weights.sha256, weights.size, received)
                response = self._post(url, WEIGHTS_PATH, data, seconds, asdict(piece))
                try:
                    now_received = int(response.json()["received"])
                except (ValueError, KeyError, TypeError) as error:
                    raise RequestFailure(f"sent a damaged answer ({response.text[:200]!r})") from error
                if data and now_received <= received:
                    raise RequestFailure(
                        f"does not take in the weights: it had {received} bytes and now {now_received}"
                    )
                received = now_received
                if data:
                    yield
                if received >= weights.size:
                    break
                file.seek(received)
                data = file.read(PIECE_BYTES)
        commit = Commit(weights.sha256, replaces, weights.fingerprint)
        self._post(url, COMMIT_PATH, b"", seconds, asdict(commit))

    def _post(self, url: str, path: str, body: bytes, seconds: float, query: dict | None = None) -> requests.Response:
        """Return a response with status 200. Raises RequestFailure, ServerError."""
        read_seconds = max(0.1, min(self._config.ref_request_timeout, seconds))
        try:
            response = self._session().post(
                url + path, params=query, data=body, timeout=(_CONNECT_SECONDS, read_seconds)
            )
        except requests.RequestException as error:
            raise _connection_failed(error) from error
        if response.status_code in _RETRIED:
            reason = f"said {response.status_code}: {_read_error_message(response)}"
            raise RequestFailure(reason, _read_retry_after(response))
        if response.status_code != 200:
            raise ServerError(f"{url} refused a request with {response.status_code}: {_read_error_message(response)}")
        return response

    def health(self, url: str) -> ServerInfo:
        """Return what a ready server says of itself. Raises RequestFailure, or ServerError where waiting is no help."""
        try:
            response = self._session().get(url + HEALTH_PATH, timeout=_CONNECT_SECONDS)
        except requests.RequestException as error:
            if isinstance(root := _root_cause(error), ssl.SSLCertVerificationError):
                raise ServerError(
                    f"{url} has a certificate that does not verify ({root.verify_message}): set ref_ca_file to the PEM "
                    "file of the authority that signed it, and write the host as the certificate does"
                ) from error
            raise _connection_failed(error) from error
        if response.content == b'{"status": "ok"}':
            raise ServerError(f"{url} wants another token: give server and trainer the same one")
        if response.status_code != 200:
            with suppress(ValueError):  # the answer is no ServerInfo: a proxy sent it
                if (health := ServerInfo.from_json(response.content)).status == "loading":
                    raise ModelLoading(f"is loading {health.model.name}", _read_retry_after(response))
            raise RequestFailure(f"said {response.status_code}: {_first_line(response)}", _read_retry_after(response))
        try:
            health = ServerInfo.from_json(response.content)
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
            raise ModelOutdated(fingerprint)
        raise RequestFailure(
            f"now serves another model ({fingerprint}, and this run's is {self.fingerprint})", other_model=fingerprint
        )

    def _session(self) -> requests.Session:
        if not hasattr(self._per_thread, "session"):
            session = requests.Session()
            # Ignore http_proxy and the like: such a proxy leads out of the network, and the servers are inside.
            session.trust_env = False
            session.verify = self._verify
            session.headers["Content-Type"] = CONTENT_TYPES[self._task]
            if self._config.token:
                session.headers["Authorization"] = f"Bearer {self._config.token}"
            self._per_thread.session = session
        return self._per_thread.session


def _connection_failed(error: requests.RequestException) -> RequestFailure:
    root = _root_cause(error)
    if isinstance(root, TimeoutError):
        return RequestFailure("did not answer in time")
    return RequestFailure(f"cannot be reached ({getattr(root, 'strerror', None) or root})")


def _root_cause(error: BaseException) -> BaseException:
    while (inner := error.__context__) is not None:
        error = inner
    return error


def _read_error_message(response: requests.Response) -> str:
    try:
        return response.json()["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return _first_line(response)


def _first_line(response: requests.Response) -> str:
    """Return the first line of a body that is not ours; of a web page, that it is one."""
    line = response.text.strip().partition("\n")[0][:200]
    return "a web page: another program or a proxy answers there" if line.startswith("<") else line


def _read_retry_after(response: requests.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0

"""HTTP to one server of a run: requests and answers, /health, new weights, TLS, and the error of each fault."""

import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import requests

from grpo.client import sessions
from grpo.client.server_errors import ModelLoading, ModelOutdated, RequestFailure, RequestRefused, ServerError
from grpo.client.sessions import CONNECT_SECONDS, read_retry_after
from grpo.config.connection_settings import ClientConfig
from grpo.wire.health import ServerInfo
from grpo.wire.logprobs import LogprobsAnswer
from grpo.wire.refusals import COMMIT_PATH, CONTENT_TYPES, HEALTH_PATH, TASK_PATHS, WEIGHTS_PATH
from grpo.wire.rewards import RewardAnswer
from grpo.wire.tensors import Commit

_FIELDS = {"logprobs": "ref_servers", "reward": "reward_funcs"}  # the setting that names a task's servers
Answer = TypeVar("Answer", LogprobsAnswer, RewardAnswer)


@dataclass(frozen=True, kw_only=True)
class WeightsToSend:
    """A file of weights for the servers."""

    file: Path  # the safetensors file
    size: int  # the file's size in bytes
    sha256: str  # the file's SHA-256 in hex
    fingerprint: str  # the fingerprint of a model with these weights


class Connection:
    """HTTP to any server of one task (ServerInfo.task), from any thread."""

    def __init__(self, config: ClientConfig, task: str):
        self._config, self._task = config, task
        self.patience = config.ref_request_timeout  # seconds for one answer
        self._sessions = sessions.open_sessions(config.token, config.ref_ca_file, CONTENT_TYPES[task])
        self.fingerprint: str | None = None  # of the model that every answer must come from; None is any model
        self.outdated: set[str] = set()  # fingerprints of the models that this run has replaced

    def request(self, url: str, body: bytes, decode: Callable[[bytes], Answer], seconds: float) -> Answer:
        """Send a request and decode the answer, within `ref_request_timeout` or `seconds`, whichever is less. Raises
        RequestFailure, or RequestRefused where sending it again cannot help."""
        response = self._post(url, TASK_PATHS[self._task], seconds, None, body)
        answer = sessions.decoded(response.content, decode)
        self._check_model(answer.model_fingerprint)
        return answer

    def upload_weights(self, url: str, weights: WeightsToSend, replaces: str) -> Iterator[None]:
        """Replace the server's model, whose fingerprint is `replaces`. Yields after each piece that the server took.
        Begins where an earlier upload of the same file ended. Raises RequestFailure, ServerError."""
        seconds = self._config.ref_request_timeout
        with open(weights.file, "rb") as file:
            post = partial(self._post, url, WEIGHTS_PATH, seconds)
            yield from sessions.send_pieces(file, weights.size, weights.sha256, post)
        commit = Commit(sha256=weights.sha256, replaces=replaces, becomes=weights.fingerprint)
        self._post(url, COMMIT_PATH, seconds, asdict(commit), b"")

    def _post(self, url: str, path: str, seconds: float, query: dict | None, body: bytes) -> requests.Response:
        """Return a response with status 200. Raises RequestFailure, RequestRefused."""
        timeout = CONNECT_SECONDS, max(0.1, min(self._config.ref_request_timeout, seconds))
        try:
            # A large body in pieces: all of it would have to be sent within CONNECT_SECONDS.
            data = body if len(body) < 1 << 16 else io.BytesIO(body)
            response = self._sessions.session.post(url + path, params=query, data=data, timeout=timeout)
        except requests.RequestException as error:
            raise sessions.connection_failed(error) from error
        if (status := response.status_code) == 200:
            return response
        _, message = sessions.read_error(response)
        if status in sessions.RETRIED:
            raise RequestFailure(f"said {status}: {message}", read_retry_after(response))
        raise RequestRefused(f"{url} refused a request with {status}: {message}")

    def health(self, url: str) -> ServerInfo:
        """Return a ready server's description. Raises RequestFailure, or ServerError if waiting cannot help."""
        try:
            response = self._sessions.session.get(url + HEALTH_PATH, timeout=CONNECT_SECONDS)
        except requests.RequestException as error:
            raise sessions.connection_error(url, error) from error
        if response.content == b'{"status": "ok"}':
            raise sessions.token_refused(url, self._config.token, "server and trainer")
        if response.status_code != 200:
            with suppress(ValueError):  # the answer is no ServerInfo: a proxy sent it
                if (health := ServerInfo.from_json(response.content)).status == "loading":
                    raise ModelLoading(f"is loading {health.model.name}", read_retry_after(response))
            said = f"said {response.status_code}: {sessions.first_line(response)}"
            raise RequestFailure(said, read_retry_after(response))
        try:
            health = ServerInfo.from_json(response.content)
        except ValueError as error:
            raise ServerError(f"{url} is something else ({error}): set {_FIELDS[self._task]} to the server") from error
        if health.task != self._task:
            remedy = f"set {_FIELDS[self._task]} to a server that was started with --task {self._task}"
            raise ServerError(f"{url} serves {health.model.name} for the task {health.task}: {remedy}")
        self._check_model(health.model.fingerprint)
        return health

    def _check_model(self, fingerprint: str) -> None:
        if self.fingerprint is None or fingerprint == self.fingerprint:
            return
        if fingerprint in self.outdated:
            raise ModelOutdated(fingerprint)
        reason = f"now serves another model ({fingerprint}, and this run's is {self.fingerprint})"
        raise RequestFailure(reason, other_model=fingerprint)

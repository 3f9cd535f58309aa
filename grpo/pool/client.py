"""HTTP to a pool of rollouts, for the trainer and the workers alike. docs/protocol.md describes the requests.

Every request may be sent again: RequestFailure says that another try may help, and the caller decides how long it goes
on trying; ServerError says that none will.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import requests

from grpo.client.server_errors import FileFailure, RequestFailure, ResultRefused, ServerError, ServersUnavailable
from grpo.client.sessions import (
    CONNECT_SECONDS,
    certificate_refused,
    connection_failed,
    open_session,
    read_error_code,
    read_error_message,
    read_retry_after,
    seconds_to_next_try,
    send_pieces,
    token_refused,
)
from grpo.pool.protocol import GroupResult, Lease, RunInfo, Task, Version
from grpo.pool.task_tensors import decode_drawn, decode_tasks, encode_drawn, encode_tasks
from grpo.wire.json_fields import LARGEST_ID
from grpo.wire.refusals import (
    CONTENT_TYPE,
    DRIFT_PATH,
    FILES_PATH,
    GROUPS_PATH,
    LEASE_PATH,
    NEEDED_PATH,
    RESULTS_PATH,
    RUN_PATH,
    STATUS_PATH,
    TASKS_PATH,
    VERSIONS_PATH,
    ProtocolError,
)
from grpo.wire.tensors import read_tensors

# A slow or cut body, too many requests, a proxy without its server, a server not ready or with a full disk.
_RETRIED = (408, 429, 502, 503, 504)
_BLOCK = 1 << 16  # bytes of a file: of a block that is cut nothing is kept
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LeaseReply:
    """The answer to a worker that asks for tasks."""

    tasks: list[Task]
    """tasks of one version"""
    seconds: float
    """a worker that is silent for so long loses what it holds"""
    run: str
    """identity of the pool's run"""
    version: int
    """the version to draw them with; with in_flight_weight_updates the newest, also without tasks; -1 for none"""
    sha256: str
    """SHA-256 of its weights, which a run that went back makes anew; "" for none"""


class PoolClient:
    """HTTP to one pool. Any thread may call it; each has TCP connections of its own."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        verify: str | bool = True,
        request_timeout: float = 120.0,
        name: str = "",
    ):
        """`verify` is what check_certificates returns; `name` goes into User-Agent, for the log of a proxy.

        `request_timeout`: seconds without an answer, beside those that the pool is asked to wait.
        """
        self.url = url.rstrip("/")
        self._token, self._verify, self._seconds, self._name = token, verify, request_timeout, name
        self._per_thread = threading.local()
        self._vocab_size = LARGEST_ID  # until the run says

    @property
    def moved_at(self) -> float:
        """Return the time at which the present thread last moved a part of a file; -inf before the first."""
        return getattr(self._per_thread, "moved_at", -math.inf)

    def run(self) -> RunInfo | None:
        """Return the pool's run; None while it has none.

        Raises ServerError where another program answers, and RequestFailure, ServerError as every request here does.
        """
        with self._send("GET", RUN_PATH, missing="no_run") as response:
            if response.status_code == 404:
                return None
            try:
                run = RunInfo.of_json(response.content)
            except ProtocolError as error:
                raise ServerError(
                    f"{self.url} is no pool of rollouts ({error}): set pool to a server of the task rollouts"
                ) from error
        self._vocab_size = run.vocab_size
        return run

    def put_run(self, run: RunInfo) -> None:
        """Tell the pool its run. Raises ServerError where it has another one."""
        self._post(RUN_PATH, run.to_json())
        self._vocab_size = run.vocab_size

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Put up to MOST_TASKS tasks. Raises ServerError where one has another prompt than the pool's."""
        self._post(TASKS_PATH, encode_tasks(tasks))

    def take(self, keys: Iterable[tuple[int, int]], wait: float) -> list[GroupResult]:
        """Return those of up to MOST_TASKS groups that are drawn: at least one, or none after `wait` seconds."""
        body = json.dumps({"groups": [[*key] for key in keys], "wait": wait}).encode()
        return self._decoded(self._post(GROUPS_PATH, body, wait=wait), decode_drawn)

    def lease(self, lease: Lease) -> LeaseReply:
        """Return new tasks, at most `lease.room`: at least one, or none after `lease.wait` seconds."""

        def decode(body: bytes) -> LeaseReply:
            _, metadata = read_tensors(body)
            tasks, seconds = decode_tasks(body, self._vocab_size), float(metadata["lease_seconds"])
            version, sha256 = int(metadata.get("version", -1)), metadata.get("sha256", "")
            return LeaseReply(tasks, seconds, metadata["run"], version, sha256)

        return self._decoded(self._post(LEASE_PATH, lease.to_json(), wait=lease.wait), decode)

    def results(self, worker: str, drawn: Sequence[GroupResult], weights: Iterable[tuple[int, str]]) -> list[str]:
        """Send groups; return what became of each: "accepted", "already there" or "not wanted".

        `weights`: number and SHA-256 of the versions that drew them. Raises ResultRefused where they are no completions
        of their tasks.
        """
        body = self._post(RESULTS_PATH, encode_drawn(drawn, weights), {"worker": worker})
        return self._decoded(body, lambda body: [str(result) for result in json.loads(body)["results"]])

    def versions(self) -> list[Version]:
        """Return the versions of the policy that the pool has, in ascending order."""
        with self._send("GET", VERSIONS_PATH) as response:
            body = response.content
        return self._decoded(body, lambda body: [Version.of_fields(fields) for fields in json.loads(body)])

    def put_version(self, version: Version) -> None:
        """Tell the pool a version whose files it has. Raises RequestFailure where it lacks one."""
        self._post(VERSIONS_PATH, version.to_json())

    def needed(self, version: int) -> None:
        """Allow the pool to drop the weights of the versions below this one."""
        self._post(NEEDED_PATH, b"", {"version": str(version)})

    def report_drift(self, drifts: Iterable[tuple[int, float, int]]) -> None:
        """Tell the pool of up to MOST_TASKS groups how far the workers' log-probs are from the trainer's.

        Each is (group, mean distance in nats a token, tokens).
        """
        self._post(DRIFT_PATH, json.dumps({"groups": [[*row] for row in drifts]}).encode())

    def send_file(self, source: Path | bytes, sha256: str) -> None:
        """Send a file, from where an earlier call ended. A pool that has it is sent nothing."""

        def post(query: dict, data: bytes) -> requests.Response:
            with self._send("POST", FILES_PATH, query, data) as response:
                response.content  # noqa: B018 reads the body, so that the connection can be used again
            return response

        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            for _ in send_pieces(file, size, sha256, post):
                self._per_thread.moved_at = time.monotonic()

    def fetch_file(self, sha256: str, path: Path) -> None:
        """Write a file of the pool to `path`, from where an earlier call ended.

        What is not complete lies beside it as SHA256.part. Raises FileFailure where the pool has no such file or the
        bytes are damaged, OSError where the disk does not take them.
        """
        part, digest = path.with_name(f"{sha256}.part"), hashlib.sha256()
        with open(part, "a+b") as file:
            file.seek(0)
            while block := file.read(_BLOCK):
                digest.update(block)
            received, size = file.tell(), None
            while size is None or received < size:
                headers = {"Range": f"bytes={received}-"}
                with self._send("GET", FILES_PATH, {"sha256": sha256}, headers=headers, stream=True) as response:
                    size, digest = self._take_part(response, file, received, digest)
                received = file.tell()
        if digest.hexdigest() != sha256:
            part.unlink()
            raise FileFailure(f"sent a damaged file ({sha256[:12]}, {received} bytes)")
        os.replace(part, path)

    def status(self) -> dict[str, Any]:
        """Return what the pool says of its workers and rounds."""
        with self._send("GET", STATUS_PATH) as response:
            return self._decoded(response.content, json.loads)

    def _take_part(self, response: requests.Response, file: BinaryIO, received: int, digest: Any) -> tuple[int, Any]:
        """Append an answer's body; return the size of the whole file, and the digest of what is there."""
        if response.status_code == 416:  # all was there
            return received, digest
        if response.status_code == 206:
            start, size = self._decoded_range(response.headers.get("Content-Range", ""))
            if start != received:
                raise RequestFailure(f"sent a damaged answer (the bytes from {start} on, not from {received})")
        else:
            size = int(response.headers.get("Content-Length", 0))
            file.truncate(0)
            digest = hashlib.sha256()
        before = file.tell()
        try:
            for block in response.iter_content(_BLOCK):
                file.write(block)
                digest.update(block)
                self._per_thread.moved_at = time.monotonic()
        except requests.RequestException as error:
            raise connection_failed(error) from error
        if file.tell() == before:
            raise RequestFailure("sent a damaged answer (nothing of a file)")
        return size, digest

    def _decoded_range(self, header: str) -> tuple[int, int]:
        with suppress(ValueError):
            places, size = header.removeprefix("bytes ").split("/")
            return int(places.split("-")[0]), int(size)
        raise RequestFailure(f"sent a damaged answer (Content-Range {header[:80]!r})")

    def _decoded(self, body: bytes, decode: Callable[[bytes], _Value]) -> _Value:
        try:
            return decode(body)
        except (ProtocolError, ValueError, KeyError, TypeError) as error:
            raise RequestFailure(f"sent a damaged answer ({error})") from error

    def _post(self, path: str, body: bytes, query: dict | None = None, wait: float = 0.0) -> bytes:
        with self._send("POST", path, query, body, wait=wait) as response:
            return response.content

    def _send(
        self,
        method: str,
        path: str,
        query: dict | None = None,
        body: bytes | None = None,
        wait: float = 0.0,
        missing: str = "",
        headers: dict | None = None,
        stream: bool = False,
    ) -> requests.Response:
        """Return a response with status 200, 206 or 416, or 404 with the code `missing`.

        Raises RequestFailure where sending it again may help, ResultRefused, ServerError.
        """
        timeout = CONNECT_SECONDS, self._seconds + wait
        try:
            response = self._session().request(
                method, self.url + path, params=query, data=body, headers=headers, timeout=timeout, stream=stream
            )
        except requests.RequestException as error:
            if refusal := certificate_refused(self.url, error):
                raise refusal from error
            raise connection_failed(error) from error
        status = response.status_code
        if status in (200, 206, 416):
            return response
        try:
            with response:
                code, message = read_error_code(response), read_error_message(response)
        except requests.RequestException as error:
            raise connection_failed(error) from error
        if status == 404 and code and code == missing:
            return response
        if status in _RETRIED or code == "no_run" or (status == 409 and code != "other_run"):
            raise RequestFailure(f"said {status}: {message}", read_retry_after(response))
        if code == "no_file":
            raise FileFailure(f"said {status}: {message}")
        if status == 401:
            raise token_refused(self.url, self._token, "pool, trainer and workers")
        if status == 404:
            raise ServerError(
                f"{self.url} is no pool of rollouts ({message}): set pool to a server of the task rollouts"
            )
        raise (ResultRefused if status == 422 else ServerError)(
            f"{self.url} refused a request with {status}: {message}"
        )

    def _session(self) -> requests.Session:
        if not hasattr(self._per_thread, "session"):
            session = open_session(self._token, self._verify, CONTENT_TYPE)
            session.headers["User-Agent"] = f"grpo {self._name}".encode("ascii", "replace").decode().strip()
            self._per_thread.session = session
        return self._per_thread.session


# Sends a pool's requests again until they are answered, within a deadline.


log = logging.getLogger(__name__)


class Stopped(Exception):
    """The end of waiting, because the program is to end."""


class Retrier:
    """The patience with a pool, of all threads together: the log says once that it is away, and that it is back."""

    def __init__(self, client: PoolClient, deadline: float, stop: threading.Event):
        """`deadline`: seconds without a useful answer, or a part of a file, after which a request is given up.

        Of a file only its parts count: a pool with a full disk still says how much of it is there.
        """
        self._client, self._deadline, self._stop = client, deadline, stop
        self._refused: set[int] = set()  # the threads whose requests wait for the pool
        self._lock = threading.Lock()

    def __call__(self, send: Callable[[], _Value]) -> _Value:
        """Return what `send` returns once it raises no RequestFailure.

        Raises ServersUnavailable after the deadline, FileFailure and ServerError at once, Stopped.
        """
        is_answered = False
        try:
            answer = self._send(send)
            is_answered = True
        finally:
            self._note_end(is_answered)
        return answer

    def _send(self, send: Callable[[], _Value]) -> _Value:
        failures, stuck_since = 0, 0.0
        while not self._stop.is_set():
            try:
                return send()
            except FileFailure:
                raise
            except RequestFailure as failure:
                now, moved_at = time.monotonic(), self._client.moved_at
                if failures and moved_at > stuck_since:
                    failures, stuck_since = 0, moved_at
                stuck_since = stuck_since or now
                if now - stuck_since > self._deadline:
                    raise ServersUnavailable(
                        f"no answer from {self._client.url} for {self._deadline:.0f} s (it {failure}): see its log; "
                        "pool_deadline sets how long to wait"
                    ) from failure
                if failures:  # not the first: the pool may just have closed a connection that was idle
                    self._note_failure(failure)
                self._stop.wait(seconds_to_next_try(failures, failure.retry_after))
                failures += 1
        raise Stopped

    def _note_failure(self, failure: RequestFailure) -> None:
        with self._lock:
            if not self._refused:
                log.warning("%s %s; asking again for %.0f s", self._client.url, failure, self._deadline)
            self._refused.add(threading.get_ident())

    def _note_end(self, is_answered: bool) -> None:
        # Others may still wait: a pool with a full disk renews leases, and takes no completions.
        with self._lock:
            if is_answered and self._refused == {threading.get_ident()}:
                log.info("%s answers again", self._client.url)
            self._refused.discard(threading.get_ident())

"""HTTP to a pool of rollouts, for the trainer and the workers. docs/protocol.md describes the requests.

Every request may be sent again. After a RequestFailure another try may help: the caller decides how long it tries.
After a ServerError no other try helps.
"""

import io
import json
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import requests

from grpo.client import sessions
from grpo.client.server_errors import FileFailure, RequestFailure, ResultRefused, ServerError, ServersUnavailable
from grpo.client.sessions import seconds_to_next_try
from grpo.pool.delta import sha256_of
from grpo.pool.protocol import GroupResult, Lease, RunInfo, Task, Version
from grpo.pool.task_tensors import decode_drawn, decode_tasks, encode_drawn, encode_tasks
from grpo.wire import refusals as wire
from grpo.wire.json_fields import LARGEST_ID
from grpo.wire.tensors import read_tensors

log = logging.getLogger(__name__)

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class LeaseReply:
    """The answer to a worker that asks for tasks."""

    tasks: list[Task]  # all of one version
    seconds: float  # a worker that is silent for so long loses its leases
    run: str  # identity of the pool's run
    version: int  # draws the tasks; with in_flight_weight_updates the newest, also without tasks; -1 for none
    sha256: str  # SHA-256 of its weights, which a run that went back makes anew; "" for none


class PoolClient:
    """HTTP to a pool, from any thread. Every request raises RequestFailure and ServerError."""

    def __init__(
        self, urls: str, *, token: str | None = None, ref_ca_file: str | None = None, request_timeout: float = 120.0
    ):
        """`urls`: one, or those of several pools on one database, with commas: clients are spread over them, and go to
        the next when theirs does not answer. `request_timeout`: seconds without an answer, beyond those of waiting.
        Raises as open_sessions."""
        self._urls = urls.split(",")
        self.url = random.SystemRandom().choice(self._urls)  # the pool that is asked now
        self._token, self._seconds = token, request_timeout
        self._sessions = sessions.open_sessions(token, ref_ca_file, wire.CONTENT_TYPE)
        self._vocab_size = LARGEST_ID  # until the run is known
        self.moved_at = -math.inf  # time.monotonic() of the last part of a file that came or went

    def run(self) -> RunInfo | None:
        """Return the pool's run; None while it has none. Raises ServerError if another program answers."""
        with self._send("GET", wire.RUN_PATH) as response:
            if response.status_code == 404:
                return None
            try:
                run = RunInfo.of_json(response.content)
            except wire.ProtocolError as error:
                reason = f"{error}, or it is a pool of another release than this program's"
                raise _no_pool(response.url.removesuffix(wire.RUN_PATH), reason) from error
        self._vocab_size = run.vocab_size
        return run

    def put_run(self, run: RunInfo) -> None:
        """Tell the pool its run. Raises ServerError if it has another run."""
        self._ask(wire.RUN_PATH, run.to_json())
        self._vocab_size = run.vocab_size

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Put up to MOST_TASKS tasks. Raises ServerError if the pool has one of them with other content."""
        self._ask(wire.TASKS_PATH, encode_tasks(tasks))

    def take(self, keys: Iterable[tuple[int, int]], wait: float) -> list[GroupResult]:
        """Return the drawn ones of up to MOST_TASKS groups: at least one, or none after `wait` seconds."""
        body = json.dumps({"groups": [[*key] for key in keys], "wait": wait}).encode()
        return sessions.decoded(self._ask(wire.GROUPS_PATH, body, wait=wait), decode_drawn)

    def lease(self, lease: Lease) -> LeaseReply:
        """Return new tasks, at most `lease.room`: at least one, or none after `lease.wait` seconds."""

        def decode(body: bytes) -> LeaseReply:
            _, metadata = read_tensors(body)
            return LeaseReply(
                tasks=decode_tasks(body, self._vocab_size),
                seconds=float(metadata["lease_seconds"]),
                run=metadata["run"],
                version=int(metadata.get("version", -1)),
                sha256=metadata.get("sha256", ""),
            )

        return sessions.decoded(self._ask(wire.LEASE_PATH, lease.to_json(), wait=lease.wait), decode)

    def results(self, worker: str, drawn: Sequence[GroupResult], weights: Iterable[tuple[int, str]]) -> list[str]:
        """Send groups; return the pool's answer to each: "accepted", "already there" or "not wanted". `weights`: number
        and SHA-256 of the versions that drew them. Raises ResultRefused if a group is no task's, and ServerError for
        more bytes than a pool takes."""
        body = encode_drawn(drawn, weights)
        if len(body) > wire.BODY_BYTES:
            groups = ", ".join(str(each.group) for each in drawn)
            sizes = f"{len(body) / 2**20:.0f} MiB, and a pool takes {wire.BODY_BYTES >> 20} at a time"
            remedy = "give the run fewer num_generations, or shorter completions or episodes"
            raise ServerError(f"the completions of group {groups} have {sizes}: {remedy}")
        answer = self._ask(wire.RESULTS_PATH, body, {"worker": worker})
        return sessions.decoded(answer, lambda body: [str(result) for result in json.loads(body)["results"]])

    def add_to_journal(self, worker: str, key: tuple[int, int], weights: str, lines: bytes) -> None:
        """Let the pool keep lines of a task's journal, drawn by these weights."""
        self._ask(wire.JOURNAL_PATH, lines, _journal_query(key, weights) | {"worker": worker})

    def journal(self, key: tuple[int, int], weights: str) -> bytes:
        """Return the lines of all that these weights have drawn for a task."""
        with self._send("GET", wire.JOURNAL_PATH, params=_journal_query(key, weights)) as response:
            return response.content

    def versions(self) -> list[Version]:
        """Return the pool's versions of the policy, in ascending order."""
        return sessions.decoded(self._ask(wire.VERSIONS_PATH), lambda body: [*map(Version.of_fields, json.loads(body))])

    def put_version(self, version: Version) -> None:
        """Tell the pool a version whose files it has. Raises RequestFailure if it lacks a file."""
        self._ask(wire.VERSIONS_PATH, version.to_json())

    def needed(self, version: int) -> None:
        """Allow the pool to drop the weights of the versions below this one."""
        self._ask(wire.NEEDED_PATH, b"", {"version": str(version)})

    def report_drift(self, drifts: Iterable[tuple[int, float, int]]) -> None:
        """Report up to MOST_TASKS (group, mean distance of both sides' log-probs in nats a token, tokens)."""
        self._ask(wire.DRIFT_PATH, json.dumps({"groups": [[*row] for row in drifts]}).encode())

    def send_file(self, source: Path | bytes, sha256: str) -> None:
        """Send a file, from the end of an earlier call's part. The pool gets no byte that it has."""

        def post(query: dict, data: bytes) -> requests.Response:
            with self._send("POST", wire.FILES_PATH, params=query, data=data) as response:
                response.content  # noqa: B018 reads the body, so that the connection can be used again
            return response

        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            for _ in sessions.send_pieces(file, size, sha256, post):
                self.moved_at = time.monotonic()

    def fetch_file(self, sha256: str, path: Path) -> None:
        """Write a file of the pool to `path`, from the end of an earlier call's part, which lies in SHA256.part. Raises
        FileFailure if the pool lacks the file or the bytes are damaged, OSError if the disk fails."""
        part, size = path.with_name(f"{sha256}.part"), None
        with open(part, "ab") as file:
            while size is None or file.tell() < size:
                request = {"params": {"sha256": sha256}, "headers": {"Range": f"bytes={file.tell()}-"}, "stream": True}
                with self._send("GET", wire.FILES_PATH, **request) as response:
                    size = self._append(response, file)
        if sha256_of(part) != sha256:
            part.unlink()
            raise FileFailure(f"sent a damaged file ({sha256[:12]}, {size} bytes)")
        os.replace(part, path)

    def _append(self, response: requests.Response, file: BinaryIO) -> int:
        """Append a response's body to the file; return the size of the whole file."""
        if response.status_code == 416:  # nothing is missing
            return file.tell()
        place = response.headers.get("Content-Range", "")
        if not (match := re.fullmatch(rf"bytes {file.tell()}-\d+/(\d+)", place)):
            reason = f"not from byte {file.tell()} on: Content-Range {place[:80]!r}"
            raise RequestFailure(f"sent a damaged answer ({reason})")
        try:
            for block in response.iter_content(1 << 16):  # of a block that is cut nothing is kept
                file.write(block)
                self.moved_at = time.monotonic()
        except requests.RequestException as error:
            raise sessions.connection_failed(error) from error
        return int(match[1])

    def status(self) -> dict[str, Any]:
        """Return the pool's description of its workers and rounds."""
        return sessions.decoded(self._ask(wire.STATUS_PATH), json.loads)

    def _ask(self, path: str, body: bytes | None = None, query: dict | None = None, wait: float = 0.0) -> bytes:
        """GET, or POST a body, and return that of the answer."""
        with self._send("GET" if body is None else "POST", path, wait, params=query, data=body) as response:
            return response.content

    def _send(self, method: str, path: str, wait: float = 0.0, **request: Any) -> requests.Response:
        """Return a response with status 200, 206 or 416; to GET run also 404 with the code no_run. `request` is what
        requests takes. Raises RequestFailure if another try may help, ResultRefused, ServerError."""
        timeout, url = (sessions.CONNECT_SECONDS, self._seconds + wait), self.url
        try:
            response = self._sessions.session.request(method, url + path, timeout=timeout, **request)
            if (status := response.status_code) in (200, 206, 416):
                return response
            with response:
                code, message = sessions.read_error(response)
            if status == 503:  # its database or disk may be gone, and another pool's not
                self._leave(url)
        except requests.RequestException as error:
            self._leave(url)
            raise sessions.connection_error(url, error) from error
        if code == "no_run" and method == "GET":
            return response
        if code == "no_run" or (status in sessions.RETRIED and code != "other_run"):
            raise RequestFailure(f"said {status}: {message}", sessions.read_retry_after(response))
        if code == "no_file":
            raise FileFailure(f"said {status}: {message}")
        if status == 401:
            raise sessions.token_refused(url, self._token, "pool, trainer and workers")
        if status == 404:
            raise _no_pool(url, message)
        error_type = ResultRefused if status == 422 else ServerError
        raise error_type(f"{url} refused a request with {status}: {message}")

    def _leave(self, url: str) -> None:
        """Ask the next pool from now on, unless another thread has left this one."""
        if self.url == url:
            self.url = self._urls[(self._urls.index(url) + 1) % len(self._urls)]


def _no_pool(url: str, reason: str) -> ServerError:
    return ServerError(f"{url} is no pool of rollouts ({reason}): set pool to a server of the task rollouts")


def _journal_query(key: tuple[int, int], weights: str) -> dict[str, str]:
    group, attempt = map(str, key)
    return {"group": group, "attempt": attempt, "weights": weights}


class Stopped(Exception):
    """The end of waiting, because the program is to end."""


class Retrier:
    """Sends requests to a pool until they are answered. All threads share it: the log has one line when the pool stops
    answering, and one when it answers again."""

    def __init__(self, client: PoolClient, deadline: float, stop: threading.Event):
        """`deadline`: seconds without a useful answer, or a part of a file, after which a request is given up. Of a
        file only its parts count: a pool with a full disk still says how much of it is there."""
        self._client, self._deadline, self._stop = client, deadline, stop
        self._waiting: set[int] = set()  # the threads whose requests wait for the pool
        self._lock = threading.Lock()

    def __call__(self, send: Callable[[], _Value]) -> _Value:
        """Return the result of `send` once it raises no RequestFailure. Raises ServersUnavailable after the deadline,
        FileFailure and ServerError at once, Stopped."""
        thread, failures, stuck_since = threading.get_ident(), 0, 0.0
        try:
            while not self._stop.is_set():
                url = self._client.url  # of several pools the one that is asked; after a failure it is the next
                try:
                    answer = send()
                    with self._lock:
                        # Others may still wait: a pool with a full disk renews leases, and takes no completions.
                        if self._waiting == {thread}:
                            log.info("%s answers again", url)
                    return answer
                except FileFailure:
                    raise
                except RequestFailure as failure:
                    now, moved_at = time.monotonic(), self._client.moved_at
                    if not failures:
                        stuck_since = now
                    elif moved_at > stuck_since:
                        failures, stuck_since = 0, moved_at
                    if now - stuck_since > self._deadline:
                        reason = f"no answer from {url} for {self._deadline:.0f} s (it {failure})"
                        remedy = "see its log; pool_deadline sets how long to wait"
                        raise ServersUnavailable(f"{reason}: {remedy}") from failure
                    if failures:  # not the first: the pool may just have closed a connection that was idle
                        with self._lock:
                            if not self._waiting:
                                log.warning("%s %s; asking again for %.0f s", url, failure, self._deadline)
                            self._waiting.add(thread)
                    self._stop.wait(seconds_to_next_try(failures, failure.retry_after))
                    failures += 1
            raise Stopped
        finally:
            with self._lock:
                self._waiting.discard(thread)

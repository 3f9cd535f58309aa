"""Sends a pool's requests again until they are answered, within a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from grpo.client.errors import FileFailure, RequestFailure, ServersUnavailable
from grpo.client.http import seconds_to_next_try
from grpo.client.pool import PoolClient

log = logging.getLogger(__name__)
_Value = TypeVar("_Value")


class Stopped(Exception):
    """The end of waiting, because the program is to end."""


class Patience:
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

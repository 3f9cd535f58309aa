"""The state that HTTP threads share, whatever the server's task is: who may ask, and whether the server is ready."""

import hashlib
import hmac
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from grpo.config.server import ServerConfig
from grpo.server.monitor import Monitor
from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.refusals import COMMIT_PATH, HEALTH_PATH, PAGE_PATH, WEIGHTS_PATH, ProtocolError

_OPEN_PATHS = (PAGE_PATH, HEALTH_PATH)  # without the token they tell nothing: an empty page, and "ok"
_THIS_MACHINE = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d*)?", re.IGNORECASE)
"""a Host header that no other site's page can send: the name of its site could lead here (DNS rebinding)"""


class Service:
    """The state of a server, for ModelService and PoolService, which add `load` and `description`."""

    def __init__(self, config: ServerConfig, model: ModelInfo):
        self.config = config
        self.info = ServerInfo(status="loading", model=model, task=config.task)
        self.monitor = Monitor()
        self.death: Exception | None = None
        self.stop = threading.Event()
        self._changing = threading.Lock()

    def tidy(self) -> None:
        """Clean up, every few seconds."""

    def drain(self, seconds: float) -> None:
        """Finish the present requests, within so many seconds. The server accepts nothing new any more."""

    def close(self) -> None:
        """Close files: every request is answered."""

    def change_info(self, **changes) -> None:
        with self._changing:
            self.info = replace(self.info, **changes)

    def fail(self, death: Exception) -> None:
        """End the server, which can answer nothing any more."""
        self.death = death
        self.stop.set()

    def allows(self, authorization: str) -> bool:
        """Return whether the sender of this header may ask everything."""
        if self.config.token is None:
            return True
        # Digests, because the time of compare_digest depends on whether the lengths are equal.
        sent, expected = (hashlib.sha256(text.encode()) for text in (authorization, f"Bearer {self.config.token}"))
        return hmac.compare_digest(sent.digest(), expected.digest())

    def admit(self, path: str, headers: dict[str, str]) -> tuple[bool, ProtocolError | None]:
        """Return whether the sender may ask everything, and the refusal of a request whose body need not be read."""
        if self.allows(headers.get("AUTHORIZATION", "")):
            if self.config.token is None and (refusal := _foreign(headers)) is not None:
                return False, refusal
            if path in (WEIGHTS_PATH, COMMIT_PATH) and self.config.update_folder is None:
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
        """Use a thread of the web server. Raises ProtocolError, 503, when requests of this kind use all they may."""
        if not threads.acquire(blocking=False):
            message = "as many requests of this kind are in work as there may be: come back in 1 s"
            raise ProtocolError(503, "busy", message, retry_after=1)
        try:
            yield
        finally:
            threads.release()

    def check_ready(self) -> None:
        """Raise ProtocolError while the server cannot be asked anything."""
        if (status := self.info.status) != "ready":
            raise ProtocolError(503, status, f"the server is {status}", retry_after=2)

    def check_connected(self, is_gone: Callable[[], bool]) -> None:
        """Raise ProtocolError if the client has closed the connection."""
        if is_gone():
            raise ProtocolError(499, "client_gone", "the connection was closed before the answer was there")

    def held(self) -> dict[str, tuple[int, int]]:
        """Return (tokens, requests) waiting or being computed, by client."""
        return {}

    def current_info(self) -> ServerInfo:
        return self.info

    def metrics(self) -> bytes:
        return self.monitor.to_prometheus(self.held())

    def summary(self) -> str | None:
        """Return a line for the log on the time since the last call; None if nothing happened."""
        return self.monitor.summary(self.held())

    def status(self) -> dict:
        return {"health": self.current_info().to_dict(), **self.monitor.status(self.held())}


def _foreign(headers: dict[str, str]) -> ProtocolError | None:
    """Return the refusal of a request that another site's page may send, from a browser of this machine. A browser
    always sends `Host`, and `Origin` with every request that could change something."""
    host, origin = headers.get("HOST", ""), headers.get("ORIGIN")
    if host and not _THIS_MACHINE.fullmatch(host):
        message = f"Host {host[:80]!r}: without a token ask this server as localhost, 127.0.0.1 or [::1]"
        return ProtocolError(403, "foreign_host", message)
    if origin is not None and origin != f"http://{host}":
        message = f"Origin {origin[:80]!r}: without a token this server answers no other site's pages"
        return ProtocolError(403, "foreign_origin", message)
    return None

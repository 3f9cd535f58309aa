"""The OpenAI API of a run: a program's requests, each of which belongs to an episode by its key, drawn by the policy.

    program -> POST /v1/chat/completions -> Episode.ask: ids -> Drawer: more ids -> Episode.drew: a message -> program

It listens on 127.0.0.1 alone. A request waits in a thread of the web server until its segments are drawn.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import bottle

from grpo.agents.exchange import MODEL, ChatExchange, RunningEpisode
from grpo.agents.requests import Refused, read_request
from grpo.config.server import ServerConfig
from grpo.server.http import THREADS, HttpServer
from grpo.wire.refusals import ProtocolError

log = logging.getLogger(__name__)

_BODY_BYTES = 4 << 20  # of a request: a hundred times what a long context has
_CONNECTIONS = 4  # of each episode


class Gateway:
    """The server, in threads of this process."""

    def __init__(self, episodes: int, segments: int) -> None:
        """Listen on a free port, for so many episodes that run at a time, and segments that are drawn at a time."""
        self._sessions: dict[str, RunningEpisode] = {}
        config = ServerConfig(port=0, max_connections=_CONNECTIONS * (episodes + segments))
        self._server = HttpServer(
            _App(self),
            config,
            admit=self._admit,
            on_refused=lambda **refused: None,
            # A program's clock stands still once a thread has its request, which it keeps until the answer is drawn.
            threads=max(THREADS, episodes + 2 * segments),
        )
        self.url = f"{self._server.url}/v1"
        threading.Thread(target=self._server.run, name="gateway", daemon=True).start()

    def open(self, session: RunningEpisode) -> str:
        """Let an episode begin; return its key."""
        key = f"sk-{secrets.token_hex(24)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """End an episode: the segments that it still waits for are not drawn."""
        session = self._sessions.pop(key)
        with session.lock:
            session.is_over = True
            segments = [*session.segments.values()]
        for segment in segments:
            segment.done.cancel()

    def shut_down(self) -> None:
        """Stop listening, and close all connections."""
        self._server.stop()

    def find(self, authorization: str) -> RunningEpisode:
        """Return the episode of a header. Raises Refused."""
        session = self._sessions.get(authorization.removeprefix("Bearer "))
        if session is None:
            raise Refused("the key belongs to no running episode", status=401, code="invalid_api_key")
        return session

    def _admit(self, path: str, headers: dict[str, str]) -> tuple[bool, ProtocolError | None]:
        """Refuse before the body is read; see HttpServer."""
        try:
            self.find(headers.get("AUTHORIZATION", ""))
        except Refused as refused:
            return False, ProtocolError(refused.status, refused.code, refused.message)
        if (length := headers.get("CONTENT_LENGTH", "")).isdecimal() and int(length) > _BODY_BYTES:
            message = f"the request has {length} bytes, and may have {_BODY_BYTES}: send less"
            return False, ProtocolError(413, "request_too_large", message)
        return True, None


class _App(bottle.Bottle):
    """The WSGI application: the paths of the API, and errors in its form."""

    def __init__(self, gateway: Gateway):
        super().__init__()
        self._gateway = gateway
        self.post("/v1/chat/completions", callback=self._chat)
        self.get("/v1/models", callback=self._models)
        self.install(_refusable)

    def default_error_handler(self, error: bottle.HTTPError) -> bytes:
        """Return OpenAI's form of 404, 405, or of a fault of ours."""
        if error.status_code >= 500:
            log.error("a request of a program failed", exc_info=error.exception)
        messages = {
            404: f"{bottle.request.path} is not served: use /v1/chat/completions or /v1/models",
            405: f"use {error.get_header('Allow')} for {bottle.request.path}",
        }
        message = messages.get(error.status_code, "the gateway failed: the run's log says how")
        error.content_type = "application/json"
        return Refused(message, status=error.status_code).to_json()

    def _models(self) -> dict[str, Any]:
        self._gateway.find(bottle.request.get_header("Authorization", ""))
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "grpo"}
        return {"object": "list", "data": [model]}

    def _chat(self) -> bottle.HTTPResponse | Iterator[bytes]:
        request = bottle.request
        session = self._gateway.find(request.get_header("Authorization", ""))
        with request.environ["wsgi.input"] as file:
            body = file.read()
        is_gone = request.environ["waitress.client_disconnected"]
        is_retry = request.get_header("X-Stainless-Retry-Count", "0").strip() not in ("", "0")
        wanted, name = read_request(body), hashlib.sha256(body).hexdigest()
        # A client that gave up, or lost the answer, asks again: nothing is drawn twice.
        exchange = session.exchanges.get(name) if is_retry else None
        if exchange is None:
            session.exchanges[name] = exchange = ChatExchange(session, wanted)
        if wanted.stream:
            bottle.response.content_type = "text/event-stream"
            return _events(session, exchange, is_gone)
        with session.waiting():
            answer = exchange.answer()
        exchange.hand_over(is_gone())
        return bottle.HTTPResponse(json.dumps(answer), 200, {"Content-Type": "application/json"})


def _events(session: RunningEpisode, exchange: ChatExchange, is_gone: Callable[[], bool]) -> Iterator[bytes]:
    """Yield server-sent events. An error in their midst is one of them, as the status is sent."""
    with session.waiting():
        try:
            for chunk in exchange.stream():
                yield b"data: %s\n\n" % json.dumps(chunk).encode()
        except Refused as refused:
            yield b"data: %s\n\n" % refused.to_json()
            return
    exchange.hand_over(is_gone())
    yield b"data: [DONE]\n\n"


def _refusable(handler: Callable) -> Callable:
    def answer_or_refuse(*arguments: Any, **options: Any) -> Any:
        try:
            return handler(*arguments, **options)
        except Refused as refused:
            return bottle.HTTPResponse(refused.to_json(), refused.status, {"Content-Type": "application/json"})

    return answer_or_refuse

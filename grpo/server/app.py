"""The WSGI application under ref_server.py's routes: bottle, with errors in JSON and every answer reported."""

import json
import logging
import time
from collections.abc import Callable, Iterable

import bottle

from grpo.server.monitor import Monitor
from grpo.wire.refusals import CONTENT_TYPE, ProtocolError, answer_headers

log = logging.getLogger("ref_server")


class App(bottle.Bottle):
    """bottle's application. A handler may raise ProtocolError as its answer."""

    def __init__(self, monitor: Monitor, task: str):
        super().__init__()
        self._monitor, self._task = monitor, task
        self.install(_refusable)

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        began = time.perf_counter()
        facts = environ["note"] = {}
        answer = super().__call__(environ, start_response)
        path, status, seconds = environ["PATH_INFO"], bottle.response.status_code, time.perf_counter() - began
        path = path if path in {route.rule for route in self.routes} else "other"
        sender = environ.get("REMOTE_ADDR", "")
        method = environ["REQUEST_METHOD"]
        self._monitor.answered(method, path, status, seconds=seconds, address=sender, **facts)
        # bottle keeps a thread's last request and answer until its next ones.
        environ.clear()
        bottle.response.bind()
        return answer

    def default_error_handler(self, error: bottle.HTTPError) -> bytes:
        """Return the JSON for an error that is no ProtocolError: 404, 405, or a handler that failed."""
        if error.status_code >= 500:
            log.error("a handler failed", exc_info=error.exception)
        paths = " ".join(dict.fromkeys(route.rule for route in self.routes))
        code, message = {
            404: ("not_found", f"this server answers {paths}; its --task is {self._task}"),
            405: ("method_not_allowed", f"use {error.get_header('Allow')} for {bottle.request.path}"),
        }.get(error.status_code, ("internal", "the server failed; its log says how"))
        error.content_type = "application/json"
        refusal = ProtocolError(error.status_code, code, message)
        note(error=refusal)
        return refusal.to_json()


def note(**facts: object) -> None:
    """Tell the monitor of the present request: its client and tokens, or its error."""
    bottle.request.environ["note"] |= facts


def make_answer(body: bytes, status: int, content_type: str, retry_after: int | None = None) -> bottle.HTTPResponse:
    return bottle.HTTPResponse(body, status, answer_headers(content_type, retry_after))


def make_json(fields: dict | list) -> bottle.HTTPResponse:
    return make_answer(json.dumps(fields).encode(), 200, "application/json")


def check_content_type() -> None:
    """Refuse other content types: any web page can make a browser post to this machine, but not with this type."""
    if bottle.request.content_type != CONTENT_TYPE:
        raise ProtocolError(415, "unsupported_media_type", f"send 'Content-Type: {CONTENT_TYPE}'")


def read_body() -> bytes:
    """Read the body of the present request, and free its memory and its temporary file."""
    with bottle.request.environ["wsgi.input"] as file:
        return file.read()


def _refusable(handler: Callable) -> Callable:
    def answer_or_refuse(*args, **kwargs):
        try:
            if bottle.request.method == "POST" and bottle.request.content_length < 0:
                raise ProtocolError(411, "length_required", "send a Content-Length")
            return handler(*args, **kwargs)
        except ProtocolError as error:
            # A traceback keeps its frames, and these the body. One of them knows the future that knows the error: only
            # a full garbage collection, which is rare, would find that circle.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            note(error=error)
            return make_answer(error.to_json(), error.status, "application/json", error.retry_after)

    return answer_or_refuse

"""The web server under ref_server.py's app: waitress, with limits on what a stranger may make it hold.

waitress reads all sockets in one thread and hands a request to a worker thread only when its body is there, so a slow
client holds no worker. What it lacks is here: deadlines for headers and body, a refusal before the body is read, an
answer to one connection too many, no request whose end two programs could see in different places, errors in JSON.
"""

from __future__ import annotations

import errno
import logging
import re
import resource
import socket
import tempfile
import time
from collections.abc import Callable
from http import HTTPStatus

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask
from waitress.utilities import Error

from grpo.config import ConfigError
from grpo.protocol import ProtocolError
from grpo.server_config import ServerConfig

log = logging.getLogger(__name__)

THREADS = 128  # each waits for the model on behalf of one request
_IDLE_SECONDS = 120  # after it a connection without a request is closed
_OTHER_FILES = 128  # open files that are no connections: the model's, the log, threads' pipes

Refuse = Callable[[str, dict[str, str]], "ProtocolError | None"]
"""(path, headers in CGI's spelling) -> why not, before the body is read"""
Refused = Callable[[str, str, str, ProtocolError], None]
"""(method, path, sender, error): told of each request that never reaches the app"""


class HttpServer(TcpWSGIServer):
    """Listens as soon as it is made; serves when `run` is called, in a thread of its own.

    Raises ConfigError where the address is taken or not this machine's, or the system allows too few open files.
    """

    def __init__(self, app, config: ServerConfig, refuse: Refuse, on_refused: Refused):
        self.config, self.refuse, self.on_refused = config, refuse, on_refused
        _allow_files(config.max_connections + _OTHER_FILES)
        adjustments = Adjustments(
            threads=THREADS,
            max_request_header_size=(config.max_header_kb << 10) + 1,  # waitress refuses the very limit
            max_request_body_size=(config.max_request_mb << 20) + 1,
            connection_limit=2**31,  # beyond it waitress would accept nobody, and say nothing
            cleanup_interval=1,
            channel_timeout=_IDLE_SECONDS,
            asyncore_use_poll=True,  # select() ends at 1,024 open files
            ident=None,
        )
        adjustments.http_server = self  # the only thing that waitress shows its parser
        listener = _bind(config)
        address = (listener.family, listener.type, listener.proto, listener.getsockname())
        super().__init__(app, _sock=listener, bind_socket=False, sockinfo=address, adj=adjustments)
        self.channel_class = _Channel

    @property
    def unanswered(self) -> int:
        """Connections with a request in work, or an answer that is not yet with the system."""
        return sum(bool(one.requests or one.total_outbufs_len) for one in list(self.active_channels.values()))

    def handle_accept(self) -> None:
        if len(self.active_channels) < self.config.max_connections:
            super().handle_accept()
            return
        try:
            connection, address = self.accept()
        except (OSError, TypeError):
            return  # gone again
        error = ProtocolError(
            503,
            "too_many_connections",
            f"{self.config.max_connections} connections are open (--max_connections): come back in 5 s",
            retry_after=5,
        )
        with connection:
            connection.setblocking(False)
            try:
                connection.send(_raw(error))
            except OSError:
                log.debug("a connection too many is gone before its refusal")
        self.on_refused("-", "-", str(address[0]), error)

    def maintenance(self, now: float) -> None:
        super().maintenance(now)
        for channel in list(self.active_channels.values()):
            channel.check_deadlines(self.config)


class _Refused(Error):
    def __init__(self, error: ProtocolError):
        super().__init__(error.message)
        self.code, self.reason, self.error = error.status, HTTPStatus(error.status).phrase, error


_TRANSFER_ENCODING = re.compile(rb"^transfer-encoding\s*:", re.IGNORECASE | re.MULTILINE)


class _Parser(HTTPRequestParser):
    """A request as it comes in, refused as soon as its headers say enough."""

    command = path = "-"  # waitress sets them when it could read them

    def __init__(self, adj: Adjustments):
        super().__init__(adj)
        self.began = time.monotonic()
        self.body_began: float | None = None

    def received(self, data: bytes) -> int:
        consumed = super().received(data)
        if self.completed:
            self.expect_continue = False  # waitress would say 100 Continue to what is refused, and read its body
        return consumed

    def parse_header(self, header_plus: bytes) -> None:
        try:
            super().parse_header(header_plus)
        except ValueError as error:  # waitress passes on what int() and urlsplit() raise, and says nothing
            raise ParsingError("the request line or a header is malformed") from error
        self.body_began = time.monotonic()
        if self.version not in ("1.0", "1.1"):
            raise ParsingError("this server speaks HTTP/1.1 and HTTP/1.0")
        # A proxy before us may see the end of such a request elsewhere (RFC 9112, section 6.1), and waitress takes
        # "chunked, chunked", an empty value and loose chunks. It has dropped the header by now.
        if _TRANSFER_ENCODING.search(header_plus):
            error = ProtocolError(411, "length_required", "send a Content-Length and no Transfer-Encoding")
            self.error, self.completed = _Refused(error), True
            return
        refusal = self.adj.http_server.refuse(self.path, self.headers)
        if refusal is not None:
            self.error, self.completed = _Refused(refusal), True


class _ErrorTask(ErrorTask):
    """What is refused before the app sees it is JSON like every other error; the connection ends with it."""

    def execute(self) -> None:
        error = self._as_protocol_error()
        body = error.to_json()
        self.status = f"{error.status} {self.request.error.reason}"
        self.response_headers += [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
        if error.retry_after is not None:
            self.response_headers.append(("Retry-After", str(error.retry_after)))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)
        sender = self.channel.addr[0] if self.channel.addr else ""
        self.channel.server.on_refused(self.request.command, self.request.path, sender, error)

    def _as_protocol_error(self) -> ProtocolError:
        refused, config = self.request.error, self.channel.server.config
        if isinstance(refused, _Refused):
            return refused.error
        code = refused.reason.lower().replace(" ", "_")
        sentence = {
            413: f"the body is larger than {config.max_request_mb} MiB (--max_request_mb)",
            431: f"the headers are larger than {config.max_header_kb} KiB (--max_header_kb)",
        }.get(refused.code, " ".join(refused.body.split())[:300])
        return ProtocolError(refused.code, code, sentence)


class _Channel(HTTPChannel):
    """A connection, with a time by which headers and body must be there."""

    parser_class = _Parser
    error_task_class = _ErrorTask
    asked_before = False

    def received(self, data: bytes) -> bool:
        try:
            taken = super().received(data)
        except OSError as error:  # waitress keeps a large body in a temporary file
            message = f"no room for the body in {tempfile.gettempdir()} ({error.strerror}): the server's disk is full"
            log.error(message)
            with self.requests_lock:
                self._refuse_partial(ProtocolError(503, "no_space", message, retry_after=5))
            return False
        self.asked_before |= bool(self.requests)
        return taken

    def _refuse_partial(self, error: ProtocolError) -> None:
        """Answer the request that is on its way in; the caller holds the lock."""
        partial, self.request = self.request, None
        partial.error, partial.completed = _Refused(error), True
        self.requests.append(partial)
        if len(self.requests) == 1:
            self.server.add_task(self)

    def check_deadlines(self, config: ServerConfig) -> None:
        """Called every second by the thread that reads."""
        with self.requests_lock:
            if self.will_close or self.close_when_flushed:
                return
            now, partial = time.monotonic(), self.request
            if self.requests:  # nothing is read meanwhile: that time is not the client's
                if partial is not None:
                    partial.began, partial.body_began = now, partial.body_began and now
                return
            if partial is None:
                silent = not self.asked_before and time.time() - self.creation_time > config.header_timeout
                self.will_close = silent  # it has asked nothing: nothing to say to it
                return
            if partial.body_began is None:
                part, option, late = "headers", "header_timeout", now - partial.began > config.header_timeout
            else:
                part, option, late = "body", "body_timeout", now - partial.body_began > config.body_timeout
            if not late:
                return
            message = f"the {part} did not come within {getattr(config, option):g} s (--{option})"
            self._refuse_partial(ProtocolError(408, "request_timeout", message))


def _raw(error: ProtocolError) -> bytes:
    body = error.to_json()
    head = f"HTTP/1.1 {error.status} Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Retry-After: {error.retry_after}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _bind(config: ServerConfig) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "another process listens there: stop it, or choose another port" if taken else "choose another host"
        raise ConfigError(f"host={config.host!r} port={config.port}: {error.strerror or error}: {remedy}") from error


def _allow_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"max_connections={needed - _OTHER_FILES}: the system allows this process {hard} open files: use "
            f"{hard - _OTHER_FILES} or less, or raise the limit (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

"""The web server under ref_server.py: waitress, with limits on connections, bodies and time.

waitress reads all sockets in one thread and hands a complete request to a thread of its pool: a slow client holds none.
Added here: a limit on connections that strangers cannot use up for everybody, one on the bytes of all bodies, and
deadlines by the monotonic clock. tests/server/test_http.py fails with a new waitress, whose methods may be others.
"""

from __future__ import annotations

import errno
import logging
import math
import re
import select
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from waitress.adjustments import Adjustments
from waitress.buffers import OverflowableBuffer
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.server import TcpWSGIServer

from grpo.config.console import listen
from grpo.config.errors import allow_open_files
from grpo.config.server import ServerConfig
from grpo.wire.refusals import BODY_BYTES, ProtocolError, answer_headers

log = logging.getLogger(__name__)

THREADS = 128  # each waits for the model on behalf of one request
HEADER_BYTES = 16 << 10  # a request line with all headers; those of a trainer are below 1 KiB
HEADER_SECONDS = 10.0  # headers fit into a few packets, so that only a stalled client takes longer
_IDLE_SECONDS = 120  # then a connection without a request, or whose client does not read its answer, is closed
_LARGEST_BODIES = 16  # all bodies together may have this many times BODY_BYTES
_ACCEPT_PAUSE = 5.0  # seconds without a new connection after the system allowed no more open files
_OTHER_FILES = 128  # open files beside connections: the model's, the log, pipes of threads
_TRANSFER_ENCODING = re.compile(rb"^transfer-encoding\s*:", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class _Refused:
    """A ProtocolError as waitress wants its errors. After the answer it closes the connection."""

    error: ProtocolError
    has_body: bool

    def to_response(self, ident: str | None = None) -> tuple[str, list[tuple[str, str]], bytes]:
        status = f"{self.error.status} {HTTPStatus(self.error.status).phrase}"
        headers = answer_headers("application/json", self.error.retry_after)
        return status, [*headers.items()], self.error.to_json() if self.has_body else b""


class _Request(HTTPRequestParser):
    """An incoming request, refused as early as its headers allow."""

    command = path = "-"  # waitress sets these when it can read them

    def __init__(self, adj: Adjustments, channel: Channel):
        super().__init__(adj)
        self.channel = channel

    def refuse(self, error: ProtocolError) -> None:
        self.error, self.completed = _Refused(error, has_body=self.command != "HEAD"), True

    def received(self, data: bytes) -> int:
        """Take bytes. Those that come in one go with a request's end are dropped, and its answer ends the connection:
        waitress would read all requests that have come, and keep all their answers in memory."""
        self.channel.moved_at = time.monotonic()
        try:
            consumed = super().received(data)
        except OSError as error:  # waitress writes a large body to a temporary file
            message = f"no room for the body in {tempfile.gettempdir()} ({error.strerror}): the server's disk is full"
            log.error(message)
            self.refuse(ProtocolError(503, "no_space", message, retry_after=5))
            return len(data)
        if not self.completed or self.empty:
            return consumed
        self.expect_continue = False  # for a refused request waitress would send 100 Continue, and read its body
        if self.error is not None and not isinstance(self.error, _Refused):
            code = self.error.reason.lower().replace(" ", "_")
            self.refuse(ProtocolError(self.error.code, code, self.error.body[:300]))
        if consumed < len(data):
            self.headers["CONNECTION"] = "close"
        return len(data)

    def parse_header(self, header_plus: bytes) -> None:
        try:
            super().parse_header(header_plus)
            # Write it as the router will read it: all slashes at the start are one. Refuse a path that is not UTF-8.
            self.path = "/" + self.path.lstrip("/")
            self.path.encode("latin-1").decode()
        except ValueError as error:  # waitress lets the errors of int() and urlsplit() through
            raise ParsingError("the request line or a header is malformed") from error
        server = self.channel.server
        self.channel.due = time.monotonic() + server.config.body_timeout
        if self.version not in ("1.0", "1.1"):
            raise ParsingError("this server speaks HTTP/1.1 and HTTP/1.0")
        # A proxy before us may see the end of such a request elsewhere (RFC 9112, section 6.1): waitress accepts
        # "chunked, chunked", an empty value and loose chunks. It has already removed the header, hence the raw text.
        if _TRANSFER_ENCODING.search(header_plus):
            self.refuse(ProtocolError(411, "length_required", "send a Content-Length and no Transfer-Encoding"))
            return
        allowed, refusal = server.admit(self.path, self.headers)
        if allowed and refusal is None:
            self.channel.known = True
        else:
            self.headers["CONNECTION"] = "close"  # else a few bytes of many requests could keep it busy for minutes
        if refusal is None and self.content_length < self.adj.max_request_body_size:  # waitress refuses a larger one
            refusal = server.make_room_for_body(self.channel)
        if refusal is not None:
            self.refuse(refusal)


class Channel(HTTPChannel):
    """A connection: one request at a time, with deadlines for its headers and its body."""

    known = False  # whether any request of this connection came from a sender who may ask everything

    def __init__(self, *arguments, **options):
        self.moved_at = time.monotonic()  # time.monotonic() of the last byte received or sent
        # The deadline of the incoming headers or body, and of a connection's first request; else infinite.
        self.due = self.moved_at + HEADER_SECONDS
        super().__init__(*arguments, **options)

    def parser_class(self, adj: Adjustments) -> _Request:
        """Make a request. waitress calls this too, to answer a failure of its own."""
        self.due = min(self.due, time.monotonic() + HEADER_SECONDS)
        return _Request(adj, self)

    @property
    def body_bytes(self) -> int:
        """Content-Length of the request that is incoming or in work."""
        requests = [*self.requests, self.request]
        return sum(request.content_length for request in requests if request is not None and request.error is None)

    def refuse(self, error: ProtocolError) -> None:
        """Refuse the incoming request, if there is one. The caller holds `requests_lock`."""
        if self.request is not None:
            partial, self.request = self.request, None
            partial.refuse(error)
            self.requests.append(partial)
            self.server.add_task(self)

    def check_client_disconnected(self) -> bool:
        """Return whether the client has closed its end, which waitress does not notice while a request is in work. The
        app, whose thread calls this, finds it as "waitress.client_disconnected"."""
        try:
            closed = getattr(select, "POLLRDHUP", select.POLLHUP)  # the first is Linux's alone
            (poller := select.poll()).register(self.socket.fileno(), closed)
        except ValueError:  # this side has closed
            return True
        return bool(poller.poll(0))

    def _flush_some(self, do_close: bool = True) -> bool:
        if flushed := super()._flush_some(do_close):
            self.moved_at = time.monotonic()
            if not self.total_outbufs_len:  # waitress would keep the answer until the next one
                self.outbufs.pop().close()
                self.outbufs.append(OverflowableBuffer(self.adj.outbuf_overflow))
                self.current_outbuf_count = 0
        return flushed

    def handle_close(self) -> None:
        super().handle_close()
        if self.request is not None:
            self.request.close()  # free its body now: an idle thread may hold the channel for long

    def check_deadlines(self, now: float) -> None:
        """Close or refuse a connection that is late at `now`. The thread that reads the sockets calls this."""
        with self.requests_lock:
            partial = self.request
            if self.requests:
                return
            if partial is None or self.will_close or self.close_when_flushed:
                if now > self.due or now - self.moved_at > _IDLE_SECONDS:
                    self.handle_close()  # without an answer: it has asked nothing, or does not read
            elif now > self.due:
                part = "body (--body_timeout)" if partial.headers_finished else "headers"
                self.refuse(ProtocolError(408, "request_timeout", f"the {part} did not come in time"))


class HttpServer(TcpWSGIServer):
    """A web server that listens once it is constructed, and answers while `run` runs."""

    def __init__(self, app, config: ServerConfig, *, admit: Callable, on_refused: Callable, threads: int = THREADS):
        """Listen. Raises ConfigError for an address that is taken or not this machine's, and for too few open files.
        `admit(path, headers named as in CGI)` is Service.admit; `on_refused(method, sender, error)` hears of each
        request that does not reach the app. `threads` answer, each one request at a time."""
        self.config, self.admit, self.on_refused = config, admit, on_refused
        self._next_accept = time.monotonic()
        # waitress warns of every request for which no thread is free, and repeats the paths that strangers send.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        logging.getLogger("waitress").setLevel(logging.WARNING)
        remedy = f", or lower max_connections={config.max_connections}, beside which it needs {_OTHER_FILES}"
        allow_open_files(config.max_connections + _OTHER_FILES, remedy)
        # waitress refuses a limit itself, hence + 1; select() fails beyond 1,024 open files.
        limits = dict(max_request_header_size=HEADER_BYTES + 1, max_request_body_size=BODY_BYTES + 1)
        adjustments = Adjustments(threads=threads, ident=None, **limits)
        listener = listen(config.host, config.port)
        address = (listener.family, listener.type, listener.proto, listener.getsockname())
        super().__init__(app, _sock=listener, bind_socket=False, sockinfo=address, adj=adjustments)
        self.channel_class = Channel

    @property
    def url(self) -> str:
        host = self.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.effective_port}"

    @property
    def unanswered(self) -> int:
        """Connections of admitted clients with a request in work, or an answer that the system has not taken yet."""
        channels = list(self.active_channels.values())
        return sum(channel.known and bool(channel.requests or channel.total_outbufs_len) for channel in channels)

    def add_task(self, channel: Channel) -> None:
        """Give a request that is complete or refused to a thread."""
        channel.due, request = math.inf, channel.requests[0]
        if request.error is not None:
            self.on_refused(method=request.command, sender=channel.addr[0], error=request.error.error)
        super().add_task(channel)

    def make_room_for_body(self, newcomer: Channel) -> ProtocolError | None:
        """Return the newcomer's refusal if all bodies, incoming and in work, are above their limit. Before that, refuse
        incoming requests in favour of the newcomer's, the longest silent one first."""
        if not newcomer.body_bytes:
            return None
        channels = list(self.active_channels.values())
        over = sum(channel.body_bytes for channel in channels) - _LARGEST_BODIES * BODY_BYTES
        if over <= 0:
            return None
        refusal = ProtocolError(503, "too_many_bodies", "other requests' bodies fill all the room: come back in 5 s", 5)
        for channel in sorted(channels, key=lambda channel: channel.moved_at):
            if over > 0 and channel is not newcomer and channel.body_bytes and not channel.requests:
                over -= channel.body_bytes
                with channel.requests_lock:
                    channel.refuse(refusal)
        return refusal if over > 0 else None

    def accept(self) -> tuple[socket.socket, tuple] | None:
        """Take a connection, or return None. While the system has no file for it, it waits with those behind it."""
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # The listener stays ready: without a pause this thread would do nothing but try again.
            self._next_accept = time.monotonic() + _ACCEPT_PAUSE
            log.warning("a connection waits: %s: raise ulimit -Hn, or lower max_connections", error.strerror)
            return None

    def handle_accept(self) -> None:
        if len(self.active_channels) < self.config.max_connections:
            super().handle_accept()
            return
        if (leaving := self._least_needed()) is not None:
            super().handle_accept()  # before the other is closed: it could get that one's number, and its events
            leaving.handle_close()
            return
        try:
            connection, address = self.accept()
        except (OSError, TypeError):
            return  # the client has closed already
        limit = f"{self.config.max_connections} connections have a request in work (--max_connections)"
        error = ProtocolError(503, "too_many_connections", f"{limit}: come back in 5 s", retry_after=5)
        status, headers, body = _Refused(error, has_body=True).to_response()
        headers += [("Connection", "close"), ("Content-Length", str(len(body)))]
        head = "\r\n".join([f"HTTP/1.1 {status}", *map(": ".join, headers), "", ""])
        with connection, suppress(OSError):  # it may have closed
            connection.setblocking(False)
            connection.send(head.encode() + body)
        self.on_refused(method="-", sender=str(address[0]), error=error)

    def _least_needed(self) -> Channel | None:
        """Return the connection to close for a new one; None while every connection has a request in work. Strangers go
        first, of the address that has most of them; then whoever is silent the longest."""
        waiting = [channel for channel in self.active_channels.values() if not channel.requests]
        strangers = Counter(channel.addr[0] for channel in waiting if not channel.known)
        return min(waiting, key=lambda each: (each.known, -strangers[each.addr[0]], each.moved_at), default=None)

    def readable(self) -> bool:
        return time.monotonic() >= self._next_accept

    def run(self) -> None:
        """Serve until all sockets are closed, and check all deadlines once a second: between two passes over the
        sockets, since one that is closed within a pass leaves its number, and the events of that pass, to a new one."""
        # Not waitress's wall clock: set back an hour, it would stop all deadlines for an hour. And late is who had sent
        # nothing before the last pass: what came while this thread got no processor is not read yet.
        pass_began = next_check = time.monotonic()
        while self._map:
            if pass_began >= next_check:
                next_check = pass_began + 1
                for channel in list(self.active_channels.values()):
                    channel.check_deadlines(pass_began)
            pass_began = time.monotonic()
            self.asyncore.loop(self.adj.asyncore_loop_timeout, use_poll=True, map=self._map, count=1)

    def stop(self) -> None:
        """End `run` and close all connections, soon. From any thread."""
        self.trigger.pull_trigger(lambda: self.asyncore.close_all(self._map))
        self.task_dispatcher.shutdown(timeout=1)

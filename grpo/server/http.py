"""The web server under ref_server.py: waitress, with limits on connections, bodies and time.

waitress reads all sockets in one thread and hands a request to a worker thread only when its body is complete, so a
slow client holds no worker. This file adds a connection limit that strangers cannot exhaust for everybody, a limit on
the bytes of all bodies, and deadlines by the monotonic clock. grpo/server/channel.py adds the rest.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable

from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer

from grpo.config.errors import ConfigError, allow_open_files
from grpo.config.server import ServerConfig
from grpo.server.channel import BODY_BYTES, HEADER_BYTES, Channel
from grpo.wire.errors import ProtocolError

log = logging.getLogger(__name__)

THREADS = 128  # each waits for the model on behalf of one request
_LARGEST_BODIES = 16  # all bodies together may have this many times BODY_BYTES
_ACCEPT_PAUSE = 5.0  # seconds in which nobody is let in, where the system allows no more open files
_OTHER_FILES = 128  # open files beside connections: the model's, the log, pipes of threads

Admit = Callable[[str, dict[str, str]], "tuple[bool, ProtocolError | None]"]
"""(path, headers named as in CGI) -> whether the sender may ask everything, and the refusal of this request, if any"""
OnRefused = Callable[[str, str, str, ProtocolError], None]
"""(method, path, sender, error): called for each request that is refused before it reaches the app"""


class HttpServer(TcpWSGIServer):
    """A web server that listens once it is constructed, and answers while `run` runs."""

    def __init__(self, app, config: ServerConfig, admit: Admit, on_refused: OnRefused):
        """Listen. `admit` decides on each request when its headers are there.

        Raises ConfigError where the address is taken or not this machine's, or the system allows too few open files.
        """
        self.config, self.admit, self.on_refused = config, admit, on_refused
        self._next_check = self._next_accept = time.monotonic()
        # waitress warns of every request for which no thread is free, and repeats the paths that strangers send.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        logging.getLogger("waitress").setLevel(logging.WARNING)
        allow_open_files(
            config.max_connections + _OTHER_FILES,
            f", or lower max_connections={config.max_connections}, beside which it needs {_OTHER_FILES}",
        )
        adjustments = Adjustments(
            threads=THREADS,
            max_request_header_size=HEADER_BYTES + 1,  # waitress refuses the limit itself
            max_request_body_size=BODY_BYTES + 1,
            asyncore_use_poll=True,  # select() fails beyond 1,024 open files
            ident=None,
        )
        listener = _bind(config)
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

    def make_room_for_body(self, newcomer: Channel) -> bool:
        """Return whether the bodies of all requests, incoming and in work, are within their limit together.

        Where they are not, refuse incoming requests in favour of the newcomer's, the longest silent one first.
        """
        channels = list(self.active_channels.values())
        over = sum(channel.body_bytes for channel in channels) - _LARGEST_BODIES * BODY_BYTES
        partial = [channel for channel in channels if channel is not newcomer and channel.body_bytes]
        for channel in sorted(partial, key=lambda channel: channel.last_activity):
            if over <= 0:
                break
            if not channel.requests:
                over -= channel.body_bytes
                channel.give_up_body()
        return over <= 0

    def accept(self) -> tuple[socket.socket, tuple] | None:
        """Take a connection, or return None. Where the system has no file for it, it waits with those behind it."""
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # The listener stays ready: without a pause this thread would do nothing but try again.
            self._next_accept = time.monotonic() + _ACCEPT_PAUSE
            log.warning(
                "a connection waits: %s: raise the limit (ulimit -Hn), or lower max_connections", error.strerror
            )
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
        error = ProtocolError(
            503,
            "too_many_connections",
            f"{self.config.max_connections} connections have a request in work (--max_connections): come back in 5 s",
            retry_after=5,
        )
        with connection:
            connection.setblocking(False)
            try:
                connection.send(_raw(error))
            except OSError:
                log.debug("a connection beyond the limit closed before its refusal")
        self.on_refused("-", "-", str(address[0]), error)

    def _least_needed(self) -> Channel | None:
        """Return the connection to close for a new one; None while every connection has a request in work.

        Strangers go first, of the address that has most of them; then whoever is silent the longest.
        """
        waiting = [channel for channel in self.active_channels.values() if not channel.requests]
        strangers = Counter(channel.addr[0] for channel in waiting if not channel.known)
        return min(
            waiting,
            key=lambda channel: (channel.known, -strangers[channel.addr[0]], channel.last_activity),
            default=None,
        )

    def readable(self) -> bool:
        """Check all deadlines once a second. waitress calls this before each wait for the sockets."""
        now = time.monotonic()  # not waitress's wall clock: set back an hour, it would stop all deadlines for an hour
        if now >= self._next_check:
            self._next_check = now + 1
            for channel in list(self.active_channels.values()):
                channel.check_deadlines(self.config)
        return now >= self._next_accept


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

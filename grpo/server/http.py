"""The web server under ref_server.py's app: waitress, with limits on what a stranger may make it hold.

waitress reads all sockets in one thread and hands a request to a worker thread only when its body is there, so a slow
client holds no worker. What it lacks is here and in grpo/server/channel.py: a place for another connection when
strangers hold all of them, room for bodies, deadlines by a clock that nobody sets.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable

from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer

from grpo.config.errors import ConfigError
from grpo.config.server import ServerConfig
from grpo.server.channel import HEADER_BYTES, Channel
from grpo.wire.errors import ProtocolError

log = logging.getLogger(__name__)

THREADS = 128  # each waits for the model on behalf of one request
_LARGEST_BODIES = 16  # so many of max_request_mb is what all bodies may have together
_OTHER_FILES = 128  # open files that are no connections: the model's, the log, threads' pipes

Admit = Callable[[str, dict[str, str]], "tuple[bool, ProtocolError | None]"]
"""(path, headers in CGI's spelling) -> whether the sender may ask everything, and why the request is refused, if so"""
Refused = Callable[[str, str, str, ProtocolError], None]
"""(method, path, sender, error): told of each request that never reaches the app"""


class HttpServer(TcpWSGIServer):
    """Listens as soon as it is made; serves when `run` is called, in a thread of its own.

    Raises ConfigError where the address is taken or not this machine's, or the system allows too few open files.
    """

    def __init__(self, app, config: ServerConfig, admit: Admit, on_refused: Refused):
        self.config, self.admit, self.on_refused = config, admit, on_refused
        self._next_look = time.monotonic()
        # It warns of every request for which no thread is free, and repeats the paths that strangers send.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        logging.getLogger("waitress").setLevel(logging.WARNING)
        _allow_files(config.max_connections + _OTHER_FILES)
        adjustments = Adjustments(
            threads=THREADS,
            max_request_header_size=HEADER_BYTES + 1,  # waitress refuses the very limit
            max_request_body_size=(config.max_request_mb << 20) + 1,
            asyncore_use_poll=True,  # select() ends at 1,024 open files
            ident=None,
        )
        listener = _bind(config)
        address = (listener.family, listener.type, listener.proto, listener.getsockname())
        super().__init__(app, _sock=listener, bind_socket=False, sockinfo=address, adj=adjustments)
        self.channel_class = Channel

    @property
    def unanswered(self) -> int:
        """Connections of those who may ask with a request in work, or an answer that is not yet with the system."""
        channels = list(self.active_channels.values())
        return sum(channel.known and bool(channel.requests or channel.total_outbufs_len) for channel in channels)

    def make_room_for_body(self, newcomer: Channel) -> bool:
        """Whether all bodies, of requests on their way and in work, have room together.

        Where they have not, those that are on their way give way to the newcomer's: who is silent the longest first.
        """
        channels = list(self.active_channels.values())
        over = sum(channel.body_bytes for channel in channels) - _LARGEST_BODIES * (self.config.max_request_mb << 20)
        partial = [channel for channel in channels if channel is not newcomer and channel.body_bytes]
        for channel in sorted(partial, key=lambda channel: channel.last_activity):
            if over <= 0:
                break
            if not channel.requests:
                over -= channel.body_bytes
                channel.give_up_body()
        return over <= 0

    def handle_accept(self) -> None:
        if len(self.active_channels) < self.config.max_connections:
            super().handle_accept()
            return
        if (leaving := self._least_needed()) is not None:
            super().handle_accept()  # before the other is closed, or it could get its number, and events meant for it
            leaving.handle_close()
            return
        try:
            connection, address = self.accept()
        except (OSError, TypeError):
            return  # gone again
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
                log.debug("a connection too many is gone before its refusal")
        self.on_refused("-", "-", str(address[0]), error)

    def _least_needed(self) -> Channel | None:
        """The connection that makes room for another one; None while every one has a request in work.

        First go those of strangers, and of them those of the address that has most; then who is silent the longest.
        """
        waiting = [channel for channel in self.active_channels.values() if not channel.requests]
        strangers = Counter(channel.addr[0] for channel in waiting if not channel.known)
        return min(
            waiting,
            key=lambda channel: (channel.known, -strangers[channel.addr[0]], channel.last_activity),
            default=None,
        )

    def readable(self) -> bool:
        """Asked before each wait for the sockets, a second long at most."""
        now = time.monotonic()  # waitress looks by the wall clock: set back an hour, no deadline holds for an hour
        if now >= self._next_look:
            self._next_look = now + 1
            for channel in list(self.active_channels.values()):
                channel.check_deadlines(self.config)
        return True


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

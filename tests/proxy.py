"""A TCP proxy that delays, cuts and swallows connections. It knows nothing of HTTP."""

from __future__ import annotations

import itertools
import random
import select
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The fate of one connection, over all requests that it carries. The default passes everything on."""

    delay: float = 0.0
    """seconds by which each piece of an answer is late"""
    request_bytes: int | None = None
    """the connection ends after so many bytes to the server"""
    answer_bytes: int | None = None
    """the connection ends after so many bytes from the server"""
    reset: bool = False
    """the connection ends with a reset, not with a regular close"""
    black_hole: bool = False
    """the connection is accepted, and nothing ever happens on it"""


class Proxy:
    """A proxy in front of the server on `port` of this machine. `port` and `plan` may be replaced while it runs."""

    def __init__(self, port: int, plan: Callable[[], Plan] = Plan, tls: ssl.SSLContext | None = None):
        self.port, self.plan, self.tls = port, plan, tls
        self.happened: Counter[str] = Counter()
        """the number of accidents that really happened, by kind"""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.listener.getsockname()[1]}"
        self.closed = threading.Event()
        self._thread(self._accept)

    def close(self) -> None:
        self.closed.set()
        self.listener.close()

    def _thread(self, target: Callable, *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        self.listener.settimeout(0.2)
        while not self.closed.is_set():
            try:
                client, _ = self.listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            client.settimeout(None)
            self._thread(self._connection, client, self.plan())

    def _connection(self, client: socket.socket, plan: Plan) -> None:
        try:
            with client:
                if plan.black_hole:
                    self.happened["black hole"] += 1
                    self.closed.wait()
                    return
                if self.tls:
                    client = self.tls.wrap_socket(client, server_side=True)
                with client, socket.create_connection(("127.0.0.1", self.port)) as server:
                    self._pass_on(client, server, plan)
        except OSError:
            pass  # one end is gone; closing these sockets tells the other

    def _pass_on(self, client: socket.socket, server: socket.socket, plan: Plan) -> None:
        left = {client: plan.request_bytes, server: plan.answer_bytes}
        while not self.closed.is_set():
            for source in select.select([client, server], [], [], 0.2)[0]:
                data = source.recv(65536)
                if not data:
                    return
                if plan.delay and source is server:
                    self.happened["delay"] += 1
                    time.sleep(plan.delay)
                ends = left[source] is not None and len(data) >= left[source]
                if left[source] is not None:
                    data = data[: left[source]]
                    left[source] -= len(data)
                (server if source is client else client).sendall(data)
                if ends:
                    self.happened[
                        f"{'answer' if source is server else 'request'} {'reset' if plan.reset else 'cut'}"
                    ] += 1
                    if plan.reset:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return


@contextmanager
def proxy(port: int, plan: Callable[[], Plan] = Plan, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    between = Proxy(port, plan, tls)
    try:
        yield between
    finally:
        between.close()


def accidents(seed: int, longest: int) -> Callable[[], Plan]:
    """Return random plans: a connection ends within `longest` bytes, some are slow, and every 40th is a black hole."""
    chance, lock, count = random.Random(seed), threading.Lock(), itertools.count(1)

    def plan() -> Plan:
        with lock:
            end = {chance.choice(["answer_bytes", "answer_bytes", "request_bytes"]): chance.randrange(longest)}
            return Plan(
                **end,
                delay=chance.choice([0.0, 0.0, 0.0, 0.05]),
                reset=chance.random() < 0.5,
                black_hole=next(count) % 40 == 0,
            )

    return plan

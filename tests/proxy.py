"""A TCP proxy that delays, cuts and swallows connections. It knows nothing of HTTP."""

from __future__ import annotations

import itertools
import random
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass

NEVER = sys.maxsize


@dataclass(frozen=True)
class Plan:
    """The fate of one connection, over all requests that it carries. The default passes everything on."""

    delay: float = 0.0  # seconds by which each piece of an answer is late
    request_bytes: int = NEVER  # the connection ends after so many bytes to the server
    answer_bytes: int = NEVER  # the connection ends after so many bytes from the server
    reset: bool = False  # the connection ends with a reset, not with a regular close
    black_hole: bool = False  # the connection is accepted, and nothing ever happens on it


class Proxy:
    """A proxy in front of the server on `port` of this machine. `port` and `plan` may be replaced while it runs."""

    def __init__(self, port: int, plan: Callable[[], Plan] = Plan, tls: ssl.SSLContext | None = None):
        self.port, self.plan, self.tls = port, plan, tls
        self.happened: Counter[str] = Counter()  # the number of accidents that really happened, by kind
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.listener.getsockname()[1]}"
        self.closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        self.listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._connection, args=(client, self.plan()), daemon=True).start()

    def _connection(self, client: socket.socket, plan: Plan) -> None:
        with suppress(OSError), client:  # one end is gone; closing these sockets tells the other
            if plan.black_hole:
                self.happened["black hole"] += 1
                self.closed.wait()
                return
            if self.tls:
                client = self.tls.wrap_socket(client, server_side=True)
            with client, socket.create_connection(("127.0.0.1", self.port)) as server:
                self._pass_on(client, server, plan)

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
                data = data[: left[source]]
                left[source] -= len(data)
                (server if source is client else client).sendall(data)
                if left[source] == 0:
                    what = "answer" if source is server else "request"
                    self.happened[f"{what} {'reset' if plan.reset else 'cut'}"] += 1
                    if plan.reset:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return


def proxy(port: int, plan: Callable[[], Plan] = Plan, tls: ssl.SSLContext | None = None) -> closing[Proxy]:
    return closing(Proxy(port, plan, tls))


def accidents(seed: int, longest: int) -> Callable[[], Plan]:
    """Return random plans: a connection ends within `longest` bytes, some are slow, and every 40th is a black hole."""
    chance, lock, count = random.Random(seed), threading.Lock(), itertools.count(1)

    def plan() -> Plan:
        with lock:
            end = {chance.choice(["answer_bytes", "answer_bytes", "request_bytes"]): chance.randrange(longest)}
            delay, reset = chance.choice([0.0, 0.0, 0.0, 0.05]), chance.random() < 0.5
            return Plan(**end, delay=delay, reset=reset, black_hole=next(count) % 40 == 0)

    return plan

"""A TCP port for a program that is about to listen."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below those that Linux gives to outgoing connections and to whoever listens on port 0: one of them may be taken again
# before the program listens.
_PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(_PORTS)  # a seed must not give two runs the same one
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

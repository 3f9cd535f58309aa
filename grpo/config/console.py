"""The log of every program, above the progress bars and in colour on a terminal; starts and ends; free TCP ports."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from grpo.config.errors import ConfigError

_COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}


class _Formatter(logging.Formatter):
    def __init__(self, in_colour: bool):
        super().__init__("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        self._in_colour = in_colour

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno < logging.WARNING:
            return super().formatMessage(record)
        line = f"{record.asctime} {record.levelname}: {record.name}: {record.message}"
        return f"{_COLOURS[record.levelno]}{line}\033[0m" if self._in_colour else line


class _Handler(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if tqdm is None or not getattr(tqdm, "_instances", None):
            super().emit(record)
        else:
            with tqdm.external_write_mode(file=sys.stderr):
                super().emit(record)


def start_logging(level: int = logging.INFO) -> None:
    """Log to stderr from this level on. NO_COLOR (https://no-color.org) switches colours off."""
    handler = _Handler()
    handler.setFormatter(_Formatter(sys.stderr.isatty() and not os.environ.get("NO_COLOR")))
    logging.basicConfig(level=level, handlers=[handler])


_SET_PDEATHSIG = 1  # of linux/prctl.h


def start_program(words: list[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen:
    """Start Python with these words, as start_command does."""
    return start_command([sys.executable, *words], environment, **options)


def start_command(words: list[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen:
    """Start a command in a session of its own, which a Ctrl-C in the terminal does not reach. If this process is
    killed, the kernel kills it. `options` are Popen's; its streams are text."""
    prctl = ctypes.CDLL(None).prctl

    def die_together() -> None:
        prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    options |= {"start_new_session": True, "preexec_fn": die_together, "text": True}
    return subprocess.Popen(words, env=environment, **options)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError for an address that is taken or not this machine's."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # Python repeats the address
        remedy = {
            errno.EADDRINUSE: "another process listens there: stop it, or choose another port",
            errno.EACCES: "choose a port from 1024 on",
        }.get(error.errno, "choose another host")
        raise ConfigError(f"host={host!r} port={port}: {reason}: {remedy}") from error


# Below Linux's ports for outgoing connections and for port 0: such a port may be taken before the program listens.
_PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a port of this machine that is not in use."""
    while True:
        port = random.SystemRandom().choice(_PORTS)  # a seed must not give two runs the same one
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def end_now(code: int) -> NoReturn:
    """End this process without the interpreter's own end, which waits for threads of the user's code, of a web server
    or of a broken device, and in which a thread that wakes may crash (Python 3.11)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

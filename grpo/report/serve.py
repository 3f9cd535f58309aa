"""`python -m grpo.report --serve`: serves the page of running runs to this machine's browser."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import bottle
from waitress.server import BaseWSGIServer, create_server

from grpo.config.errors import ConfigError
from grpo.config.programs import ReportConfig
from grpo.report.page import make_page, page_data, run_folders
from grpo.report.read import read_run

HOST = "127.0.0.1"
FILES = ("metrics.jsonl", "completions.jsonl", "config.yaml", "starts.jsonl")
_THIS_MACHINE = re.compile(r"(localhost|127\.0\.0\.1)(:\d*)?", re.IGNORECASE)
SHARE = 0.05
"""the most of one core's time that reading the runs may take; large ones are read less often than they change"""


class LivePage:
    """Keep the page's data, and read it again when a browser asks and the runs' files have changed."""

    def __init__(self, folders: Sequence[Path], smoothing: int):
        """Read the runs. Raises ConfigError if a folder is missing."""
        self._folders, self._smoothing = folders, smoothing
        self._lock = threading.Lock()
        self._next_reading = 0.0
        self._state = self._file_state()
        self._data = self._read()

    def data(self) -> dict[str, Any]:
        """Return the page's data; each reading has another `version`. If the runs cannot be read any more, the data
        stays, with the reason as `lost`."""
        with self._lock:
            state = self._file_state()  # from before the reading: lines written during it are read the next time
            if state != self._state and time.monotonic() >= self._next_reading:
                self._state = state
                try:
                    self._data = self._read()
                except (ConfigError, OSError) as error:
                    self._data = self._data | {"lost": str(error), "version": str(time.time_ns())}
            return self._data

    def _read(self) -> dict[str, Any]:
        began = time.monotonic()
        runs = [read_run(folder, may_be_empty=True) for folder in self._folders]
        data = page_data(runs, self._smoothing) | {"version": str(time.time_ns())}
        end = time.monotonic()
        self._next_reading = end + (end - began) / SHARE
        return data

    def _file_state(self) -> list[tuple[int, ...]]:
        state = []
        for path in (folder / name for folder in self._folders for name in FILES):
            with suppress(OSError):  # not there yet, or not any more
                stat = path.stat()
                state.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return state


def make_server(config: ReportConfig) -> BaseWSGIServer:
    """Return a server that listens, for `run()`. Raises ConfigError if a run cannot be read or the port is taken."""
    page, app = LivePage(run_folders(config), config.smoothing), bottle.Bottle()

    @app.hook("before_request")
    def refuse_other_names() -> None:
        # A page of another site could let its own name point to this machine, and read the completions by it.
        if not _THIS_MACHINE.fullmatch(bottle.request.get_header("Host", "")):
            bottle.abort(403, f"use http://{HOST} or http://localhost")

    @app.get("/")
    def html() -> str:
        return make_page(page.data())

    @app.get("/data")
    def data() -> str | bottle.HTTPResponse:
        latest = page.data()
        if bottle.request.query.seen == latest["version"]:
            return bottle.HTTPResponse(status=204)
        bottle.response.content_type = "application/json"
        return json.dumps(latest)

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        listener = socket.create_server((HOST, config.port))
    except OSError as error:
        raise ConfigError(f"port={config.port}: {os.strerror(error.errno)}: choose another port") from error
    return create_server(app, sockets=[listener], ident=None)


def serve(config: ReportConfig) -> None:
    """Serve the page until Ctrl-C. Raises ConfigError as `make_server` does."""
    server = make_server(config)
    print(f"http://{HOST}:{server.effective_port}/ shows {', '.join(config.runs)} until Ctrl-C", flush=True)
    server.run()  # returns at Ctrl-C
    server.close()

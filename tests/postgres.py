"""A PostgreSQL of the tests' own: its programs are found where Debian and others put them, and no port is fixed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg
import pytest
from processes import free_port

_NUMBERS = count()


def programs() -> Path | None:
    """The folder of initdb and postgres."""
    on_path = [Path(folder) for folder in os.get_exec_path()]
    folders = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True), *on_path]  # Debian's
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class Postgres:
    """A server and its databases, in a folder of its own."""

    def __init__(self, folder: Path):
        self._data, self._port, self._log = folder / "data", free_port(), folder / "log"
        # It refuses to run as root.
        self._user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(folder, "nobody", "nogroup")
        self._run("initdb", "-D", self._data, "-U", "grpo", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        self.start()

    def _run(self, program: str, *words: object) -> None:
        command = [programs() / program, *map(str, words)]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._user)

    def start(self) -> None:
        words = "-D", self._data, "-p", self._port, "-c", f"unix_socket_directories={self._data.parent}"
        words += "-c", "fsync=off"  # what is lost is the process alone
        command = [programs() / "postgres", *map(str, words)]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **self._user)
        deadline = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < deadline and self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, number: int = signal.SIGINT) -> None:
        """SIGINT ends it at once, and every connection; SIGQUIT does so as a crash would."""
        self._process.send_signal(number)
        self._process.wait(timeout=30)

    def new_database(self) -> str:
        """Make a database; return its URL."""
        name = f"pool_{next(_NUMBERS)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def url(self, database: str, user: str = "grpo") -> str:
        return f"postgresql://{user}@127.0.0.1:{self._port}/{database}"


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Start a server; skip the test where none is installed."""
    if programs() is None:
        pytest.skip("no PostgreSQL is installed: apt-get install postgresql")
    with tempfile.TemporaryDirectory(prefix="grpo-postgres-") as folder:
        server = Postgres(Path(folder))
        try:
            yield server
        finally:
            server.stop()

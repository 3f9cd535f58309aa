"""A bucket of the tests' own, in moto's server, which answers as Amazon's S3 does."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import requests
from processes import free_port

_NUMBERS = count()
NAME = "pools"


class Bucket:
    """A server with one bucket. `environment` leads a program, or this one, to it."""

    def __init__(self, log: Path):
        self.port = free_port()
        self.environment = {"AWS_ACCESS_KEY_ID": "grpo", "AWS_SECRET_ACCESS_KEY": "secret"}
        self.environment |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with open(log, "w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while not self._is_made():
            assert time.monotonic() < deadline and self.process.poll() is None, log.read_text()
            time.sleep(0.1)

    def _is_made(self) -> bool:
        try:
            return requests.put(f"{self.environment['AWS_ENDPOINT_URL']}/{NAME}", timeout=5).ok
        except requests.ConnectionError:
            return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)

    def new_folder(self) -> str:
        return f"s3://{NAME}/{next(_NUMBERS)}/files"

    def names(self, folder: str) -> set[str]:
        """The files of a folder, as the server lists them."""
        prefix = folder.removeprefix(f"s3://{NAME}/") + "/"
        query = {"list-type": "2", "prefix": prefix}
        listing = requests.get(f"{self.environment['AWS_ENDPOINT_URL']}/{NAME}", params=query, timeout=30).text
        return {part.partition("</Key>")[0].removeprefix(prefix) for part in listing.split("<Key>")[1:]}


@contextmanager
def running_bucket(folder: Path) -> Iterator[Bucket]:
    """Start a server, to which programs and this process are led; skip the test where none is installed."""
    for name in ("s3fs", "moto"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"no {name} is installed: make test-clusters")
    bucket = Bucket(folder / "moto.log")
    try:
        yield bucket
    finally:
        bucket.end()

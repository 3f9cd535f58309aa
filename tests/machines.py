"""Machines to test with: network namespaces joined by a bridge, or loopback where such cannot be made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from conftest import ENVIRONMENT, REPOSITORY

NAMES = ("node-1", "node-2")


@dataclass
class Machine:
    host: str  # by which the others reach it
    prefix: list[str] = field(default_factory=list)  # what a command begins with to run there

    @contextmanager
    def running(self, command: list[str], log: Path) -> Iterator[subprocess.Popen]:
        """A command on its way, in a process group of its own, which is killed at the end."""
        with open(log, "w") as output:
            settings = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen([*self.prefix, *command], cwd=REPOSITORY, env=ENVIRONMENT, **settings)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # the group is not there in its first moment
            process.wait()


@contextmanager
def machines(folder: Path, names: tuple[str, ...] = NAMES) -> Iterator[dict[str, Machine]]:
    """By name, on a network of their own; the last one is the switch as well. Raises OSError or CalledProcessError
    where this system does not let us."""
    spaces = {name: f"grpo-{os.getpid()}-{name}" for name in names}
    addresses = {name: f"10.77.0.{place}" for place, name in enumerate(names, 1)}
    hosts = folder / "hosts"  # a machine knows the others by their names, as from a name server
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items()))
    switch = spaces[names[-1]]
    try:
        for space in spaces.values():
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "eth0", "type", "bridge")
        for number, name in enumerate(names[:-1]):  # a link's name has 15 letters at most
            pair = ("link", "add", f"to-{number}", "type", "veth", "peer", "name", "eth0", "netns", spaces[name])
            _ip("-n", switch, *pair)
            _ip("-n", switch, "link", "set", f"to-{number}", "master", "eth0", "up")
        for name, space in spaces.items():
            _ip("-n", space, "address", "add", f"{addresses[name]}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
        command = [sys.executable, "tests/in_namespace.py"]
        made = {name: Machine(name, [*command, space, name, str(hosts)]) for name, space in spaces.items()}
        subprocess.run(made[names[0]].prefix, cwd=REPOSITORY, check=True, capture_output=True)
        yield made
    finally:
        for space in spaces.values():
            with suppress(OSError):
                subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def loopback() -> dict[str, Machine]:
    return {name: Machine("127.0.0.1") for name in NAMES}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)

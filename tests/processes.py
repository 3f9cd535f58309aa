"""Which processes live, and the ports that they get."""

import ctypes
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

# A part for each worker of pytest-xdist, below the ports from which the programs pick.
_PART = 10_000 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_FIRST = 10_000 + _PART * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
# In another order than other tests that run on this machine.
_ports = itertools.cycle(random.SystemRandom().sample(range(_FIRST, _FIRST + _PART), _PART))


def free_port() -> int:
    """Return a port that is not in use, and that no other worker and no call before got: it is bound seconds later."""
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def left_of(pids: list[int], seconds: float = 5) -> list[int]:
    """Those that are still running after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def processes_below(process: subprocess.Popen) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Return the process ids of the ranks that live, rank 0's first: a later process may have a smaller id."""
    below, numbers, parents = [], {}, {}
    with suppress(psutil.NoSuchProcess):  # it has ended
        below = psutil.Process(process.pid).children(recursive=True)
    for child in below:
        with suppress(psutil.NoSuchProcess):
            if number := re.search(r"--local_rank=(\d+)", " ".join(child.cmdline())):
                numbers[child.pid], parents[child.pid] = int(number[1]), child.ppid()
    return sorted((pid for pid in numbers if parents[pid] not in numbers), key=numbers.get)


def wait_until_dead(pid: int, seconds: float) -> bool:
    return not left_of([pid], seconds)


def wait_for_file(path: Path, process: subprocess.Popen, seconds: float = 60) -> None:
    """Wait until a process has made the file."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)


def end_by_ctrl_c(process: subprocess.Popen, file: Path) -> list[int]:
    """Press Ctrl-C when the process has made the file; hold that it ends with 130. Return the processes below it."""
    try:
        wait_for_file(file, process)
        below = processes_below(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
    return below


def signal_another_thread(process: subprocess.Popen, number: int) -> None:
    """Give another thread than the main one a signal, as the system may after a stop."""
    *_, other = psutil.Process(process.pid).threads()
    ctypes.CDLL(None).tgkill(process.pid, other.id, number)

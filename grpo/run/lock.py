"""The lock of a run's folder: one trainer at a time writes there. It ends with its process, in whatever way."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from grpo.config.errors import ConfigError

log = logging.getLogger(__name__)

LOCK = "trainer.lock"
"""the lock's file in the run's folder; it names the host and the process that write there. Opening and closing the file
within that process releases the lock."""

_WAIT = 20.0  # seconds that a killed process may take to end


def lock_run(folder: Path) -> None:
    """Let no other trainer write into the folder until this process has ended.

    Raises ConfigError where another trainer still writes there after 20 seconds, OSError where the folder cannot be
    written.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # it stays open
    deadline, is_waiting = time.monotonic() + _WAIT, False
    # A record lock and not flock: a forked process does not inherit it, and NFS supports it.
    while (error := _try_to_lock(file)) is not None:
        if error not in (errno.EACCES, errno.EAGAIN):
            log.warning(
                "%s cannot be locked (%s): see to it that no other trainer writes there", folder, os.strerror(error)
            )
            break
        holder = os.pread(file, 1000, 0).decode(errors="replace").strip() or "unknown"
        if time.monotonic() > deadline:
            os.close(file)
            raise ConfigError(
                f"output_dir='{folder}': another trainer ({holder}) writes there: wait for its end, or name another "
                "folder"
            )
        if not is_waiting:
            log.info("waiting at most %.0f s for the end of the trainer (%s) that writes to %s", _WAIT, holder, folder)
            is_waiting = True
        time.sleep(0.2)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _try_to_lock(file: int) -> int | None:
    """Take the lock, or return the number of the error."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno
    return None

"""One trainer a run's folder: a lock that ends with its process, however that ends."""

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
"""in the run's folder, with the host and process that write there. Who opens and closes it in that process unlocks."""

_WAIT = 20.0  # seconds in which a process that was killed may still be ending


def lock_run(folder: Path) -> None:
    """Let no other trainer write into the folder until this process has ended.

    Raises ConfigError where another one still does after 20 seconds, OSError where the folder cannot be written.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # it stays open
    end, waits = time.monotonic() + _WAIT, False
    # A record lock and not flock: a process that is forked off does not hold it, and NFS knows it.
    while (refused := _lock(file)) is not None:
        if refused not in (errno.EACCES, errno.EAGAIN):
            log.warning(
                "%s cannot be locked (%s): see to it that no other trainer writes there", folder, os.strerror(refused)
            )
            break
        holder = os.pread(file, 1000, 0).decode(errors="replace").strip() or "unknown"
        if time.monotonic() > end:
            os.close(file)
            raise ConfigError(
                f"output_dir='{folder}': another trainer ({holder}) writes there: wait for its end, or name another "
                "folder"
            )
        if not waits:
            log.info("waiting at most %.0f s for the end of the trainer (%s) that writes to %s", _WAIT, holder, folder)
            waits = True
        time.sleep(0.2)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _lock(file: int) -> int | None:
    """Take the lock; return the error's number where that fails."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno
    return None

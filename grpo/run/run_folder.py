"""Finds, checks, makes and locks the folder of a run or an evaluation.

Imports no torch: grpo.launch checks the folder before it starts anything.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo.config.errors import ConfigError
from grpo.config.record_settings import RecordSection
from grpo.run.checkpoint_files import checkpoints, find_checkpoints
from grpo.run.json_lines import read_records

log = logging.getLogger(__name__)

LOCK = "trainer.lock"
"""the lock's file in the run's folder; it names the host and the process that write there. Opening and closing the file
in that process releases the lock."""

_WAIT = 20.0  # seconds that a killed process may take to end


def lock_run(folder: Path) -> None:
    """Let no other trainer write into the folder until this process has ended.

    Raises ConfigError if another trainer still writes there after 20 seconds, and OSError of the folder.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # it stays open
    deadline, is_waiting = time.monotonic() + _WAIT, False
    while True:
        try:
            # A record lock and not flock: a forked process does not inherit it, and NFS supports it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            holder = os.pread(file, 1000, 0).decode(errors="replace").strip() or "unknown"
        except OSError as error:
            reason = error.strerror
            log.warning("%s cannot be locked (%s): see to it that no other trainer writes there", folder, reason)
            break
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


def find_run_folder(config: RecordSection) -> Path:
    """Return the run's folder, which may not exist yet.

    Raises ConfigError as find_checkpoints, if the folder cannot be written, and for a new run if it has results.
    """
    checkpoint = next(iter(find_checkpoints(config)), None)
    folder = checkpoint.parent if checkpoint else Path(config.output_dir or time.strftime("runs/%Y%m%d-%H%M%S"))
    if config.resume_from_checkpoint is None:
        check_unused("output_dir", folder, may_have_begun=True)
    check_writable("output_dir", folder)
    return folder


def make_run_folder(config: RecordSection, folder: Path) -> None:
    """Make the run's folder, unless it exists, and lock it for this process.

    Raises ConfigError if it cannot be written, another trainer writes there, or it has results by now.
    """
    with writable("output_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock_run(folder)
    if config.resume_from_checkpoint is None:
        check_unused("output_dir", folder, may_have_begun=True)


def check_writable(field: str, folder: Path) -> None:
    """Raise ConfigError unless the folder can be made and written. Creates nothing."""
    with writable(field, folder), tempfile.TemporaryFile(dir=nearest_existing(folder)):
        pass


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


@contextmanager
def writable(field: str, folder: Path) -> Iterator[None]:
    """Turn an OSError of the `with` block into ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{field}='{folder}': {error.strerror}: name a folder that can be written") from error


def check_unused(field: str, folder: Path, may_have_begun: bool = False) -> None:
    """Raise ConfigError if the folder has an evaluation or a run; with `may_have_begun`, a run that did a step."""
    with writable(field, folder):  # reading may fail too, as with a name that is too long
        metrics = folder / "metrics.jsonl"
        has_run = any(record["step"] > 0 for record in read_records(metrics)) if may_have_begun else metrics.exists()
        is_used = has_run or checkpoints(folder) or (folder / "metrics.json").exists()
    if is_used:
        raise ConfigError(f"{field}='{folder}': it holds a run or an evaluation: name another folder, or delete it")

"""A worker's folder: its own alone, and where it is a temporary one, removed at the end or by the next worker."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo.config.errors import ConfigError

_LOCK, _PREFIX = "lock", "grpo-worker-"


@contextmanager
def open_folder(path: str | None) -> Iterator[Path]:
    """Give a folder that no other worker uses; without a path a temporary one, removed at the end.

    Raises ConfigError where it cannot be made, or another worker uses it.
    """
    folder, lock = _make_temporary() if path is None else _take(path)
    try:
        yield folder
    finally:
        if path is None:
            # A thread may still be writing there: under another name it finds the folder no more.
            shutil.rmtree(folder.rename(f"{folder}-removed"), ignore_errors=True)
        os.close(lock)


def _take(path: str) -> tuple[Path, int]:
    """Return the folder, and the descriptor of its lock, which ends with this process in whatever way."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder / _LOCK)
    except OSError as error:
        raise ConfigError(f"weights_folder={path!r}: {error.strerror}: name a folder that can be written") from error
    if lock is None:
        raise ConfigError(f"weights_folder={path!r}: another worker uses it: name another folder")
    return folder, lock


def _make_temporary() -> tuple[Path, int]:
    """Make a folder, after removing those of workers that were killed: each has the weights of a model."""
    for lost in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            lock = _lock(lost)
        except OSError:  # another user's, or another worker is removing it
            continue
        if lock is not None:
            shutil.rmtree(lost.parent, ignore_errors=True)
            os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = _lock(folder / "new")
    os.rename(folder / "new", folder / _LOCK)  # locked from the first: another worker may be looking
    return folder, lock


def _lock(path: Path) -> int | None:
    """Return the descriptor of a locked file, which is made; None where another process has locked it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file

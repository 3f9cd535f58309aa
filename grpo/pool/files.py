"""A pool's files: weights, models' folders and pictures, in a folder that several pools may share."""

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.wire.refusals import ProtocolError, malformed
from grpo.wire.tensors import FilePart

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20  # most bytes of a file in one answer
_ABANDONED_SECONDS = 3600  # without a byte; a file that no version and no run names is dropped then
_SHA256 = re.compile("[0-9a-f]{64}")


class Files:
    """Files named by their SHA-256, with `.part` behind it while they come. All methods may be called from any thread,
    and raise ProtocolError, 503, if the disk fails."""

    def __init__(self, folder: str):
        """Open the folder, or make it. Raises ConfigError."""
        self._folder = Path(folder)
        self._digests: dict[str, tuple[int, Any]] = {}  # of how many first bytes of a file
        self._threads = threading.Lock()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            reason = f"{error.strerror}: name a folder to write to, or another pool_file"
            raise ConfigError(f"pool_folder={folder!r}: {reason}") from error

    def close(self) -> None:
        os.close(self._lock_file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others, also other pools on this folder, from adding and dropping files inside."""
        with self._threads, self._failures():
            fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def add(self, piece: FilePart, data: bytes) -> int:
        """Keep a piece of a file, which may come twice; an empty one asks where to continue. Returns how many bytes are
        stored by now, from the first on without a gap. Raises ProtocolError: 400 for bytes beyond the size, 409 for a
        gap, or if the complete file has another SHA-256: the file is dropped then."""
        if piece.size < 1 or piece.offset + len(data) > piece.size:
            raise malformed(f"{len(data)} bytes from {piece.offset} on are beyond {piece.size}")
        with self.locked():
            size, part = self.size(piece.sha256), self._folder / f"{piece.sha256}.part"
            if size not in (None, piece.size):
                raise malformed(f"this file has {size} bytes, not {piece.size}")
            received = size or (part.stat().st_size if part.exists() else 0)
            if piece.offset > received:
                message = f"{received} bytes of this file are here: send what follows them"
                raise ProtocolError(409, "missing_piece", message)
            new = memoryview(data)[received - piece.offset :]
            if size or (not new and received < piece.size):
                if received:
                    os.utime(self._folder / piece.sha256 if size else part)  # whoever asks is about to name it
                return received
            digest = self._digest(part, received).copy()
            digest.update(new)
            _append(part, received, new)
            end = received + len(new)
            self._digests[part.name] = end, digest
            if end < piece.size:
                return end
            # Also of a pool that was killed here, and is now asked where to continue.
            del self._digests[part.name]
            if digest.hexdigest() == piece.sha256:
                os.replace(part, self._folder / piece.sha256)
                _sync(self._folder)
                return end
            part.unlink()
        message = "what came is not what was announced (SHA-256 differs): send all of it again"
        raise ProtocolError(409, "damaged", message)

    def claim(self, run: str, name: str) -> None:
        """Keep the folder, inside `locked`, for a run: another's pool would drop its files. Raises ProtocolError, 409,
        for a folder of another run."""
        claimed = self._folder / "run"
        if claimed.exists():
            owner, _, owner_name = claimed.read_text().partition(" ")
            if owner != run:
                remedy = "start the pool with another --pool_folder, or delete this one if that run is over"
                raise ProtocolError(409, "other_run", f"{self._folder} has the files of run {owner_name}: {remedy}")
        else:
            claimed.write_text(f"{run} {name}")

    def size(self, sha256: str) -> int | None:
        """Return the bytes of a file, None if it is missing or not complete."""
        with self._failures():
            try:
                return (self._folder / sha256).stat().st_size if _SHA256.fullmatch(sha256) else None
            except FileNotFoundError:
                return None

    def read(self, sha256: str, start: int, end: int) -> bytes:
        """Return the bytes of a complete file from `start` to before `end`; empty if it was dropped."""
        path = self._folder / sha256
        with self._failures():
            try:
                with open(path, "rb") as file:
                    file.seek(start)
                    return file.read(end - start)
            except FileNotFoundError:
                return b""

    def drop_unused(self, used: Set[str], gone: Set[str]) -> None:
        """Delete, inside `locked`, unused files: those whose last user is gone, and abandoned ones."""
        for path in self._folder.iterdir():
            sha256 = path.name.removesuffix(".part")
            if sha256 in used or not _SHA256.fullmatch(sha256):
                continue
            if sha256 in gone or time.time() - path.stat().st_mtime >= _ABANDONED_SECONDS:
                path.unlink()
                self._digests.pop(path.name, None)

    def _digest(self, part: Path, received: int) -> Any:
        """Return the digest of the stored bytes of a file."""
        length, digest = self._digests.get(part.name, (0, hashlib.sha256()))
        if length != received:  # after a restart, or another pool's piece
            with open(part, "rb") as file:
                digest = hashlib.file_digest(file, "sha256")
        return digest

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn the disk's errors into ProtocolError."""
        try:
            yield
        except OSError as error:
            message = f"{self._folder} cannot be written or read ({error.strerror}): its disk may be full"
            log.error(message)
            raise ProtocolError(503, "no_space", message, retry_after=5) from error


def _append(part: Path, received: int, data: memoryview) -> None:
    """Write all of the data behind the first bytes, to the disk, or none of it."""
    with open(part, "ab", buffering=0) as file:
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(received)
            raise


def _sync(folder: Path) -> None:
    """Bring the names of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

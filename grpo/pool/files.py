"""A pool's files: weights, models' folders and pictures, in a folder or a bucket that several pools may share."""

import fcntl
import hashlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from grpo.config.errors import ConfigError, one_line
from grpo.wire.refusals import ProtocolError, malformed
from grpo.wire.tensors import FilePart

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20  # most bytes of a file in one answer
_ABANDONED_SECONDS = 3600  # without a byte; a file that no version and no run names is dropped then
_SHA256 = re.compile("[0-9a-f]{64}")
_MOST_PARTS = 10_000  # of an upload to a bucket


def open_files(folder: str) -> "Files | BucketFiles":
    """Open a folder of this machine, or of a bucket. Raises ConfigError."""
    return BucketFiles(folder) if folder.startswith("s3://") else Files(folder)


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
        with self.locked():
            size, part = self.size(piece.sha256), self._folder / f"{piece.sha256}.part"
            _check_piece(piece, data, size)
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
            _check_owner(claimed.read_text(), run, self._folder)
        else:
            unfinished = self._folder / "run.unfinished"  # half a name on a full disk would be another run's
            unfinished.write_text(f"{run} {name}")
            _sync(unfinished)
            os.replace(unfinished, claimed)
            _sync(self._folder)

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


class BucketFiles:
    """Files in a bucket, as Files has them in a folder; their pieces wait on this machine, so that only complete files
    are in the bucket. No lock of the bucket's keeps other pools away: Store looks files up for what names them, and
    drops them, inside transactions of which no two happen at a time."""

    def __init__(self, folder: str):
        """Open a folder of a bucket, s3://BUCKET/PREFIX. Raises ConfigError, also if it may not be used."""
        try:
            from s3fs import S3FileSystem
        except ImportError as error:
            raise ConfigError(f"pool_folder={folder!r} needs s3fs ({error}): pip install s3fs") from error
        self._folder, self._path = folder, folder.removeprefix("s3://").rstrip("/")
        self._uploading, self._next_search = threading.Lock(), 0.0
        try:
            # A store that hangs is given up within a minute: PostgreSQL ends a transaction that sleeps for longer.
            retries = {"retries": {"mode": "standard"}}
            self._store = S3FileSystem(skip_instance_cache=True, use_listings_cache=False, config_kwargs=retries)
            self._store.retries = 1  # times those of botocore
            probe = f"{self._path}/{uuid4().hex}"
            self._store.pipe_file(probe, b"probe")
            self._store.cat_file(probe)
            self._store.rm_file(probe)
            self._store.exists(probe)  # of a missing file a bucket tells only those who may list it
            self._temporary = tempfile.TemporaryDirectory(prefix="grpo-pool-")
            self._incoming = Files(self._temporary.name)
        except Exception as error:  # of s3fs, botocore and aiohttp, which have no base in common
            remedy = "name a bucket where the AWS credentials may list, read, write and delete files"
            raise ConfigError(
                f"pool_folder={folder!r}: {one_line(error)}: {remedy}, and its AWS_ENDPOINT_URL if it is not Amazon's"
            ) from error

    def close(self) -> None:
        self._incoming.close()
        self._temporary.cleanup()

    def locked(self) -> AbstractContextManager[None]:
        """Keep other threads from adding pieces and dropping files inside."""
        return self._incoming.locked()

    def add(self, piece: FilePart, data: bytes) -> int:
        """Keep a piece as Files does, and the complete file in the bucket."""
        size = self.size(piece.sha256)
        _check_piece(piece, data, size)
        if size is not None:
            return size
        received = self._incoming.add(piece, data)
        if received == piece.size:
            self._upload(piece.sha256, piece.size)
        return received

    def _upload(self, sha256: str, size: int) -> None:
        path = Path(self._temporary.name) / sha256
        with self._uploading:
            if path.exists():  # else it has been uploaded for a client that did not wait for the answer
                part_bytes = max(PIECE_BYTES, size // (_MOST_PARTS - 1))
                self._ask("put_file", str(path), f"{self._path}/{sha256}", chunksize=part_bytes)
                path.unlink(missing_ok=True)

    def claim(self, run: str, name: str) -> None:
        """Keep the folder for a run as Files does."""
        if (claimed := self._ask("cat_file", f"{self._path}/run")) is not None:
            _check_owner(claimed.decode(), run, self._folder)
        else:  # "create" fails if another run, which has another database, has just claimed it
            self._ask("pipe_file", f"{self._path}/run", f"{run} {name}".encode(), mode="create")

    def size(self, sha256: str) -> int | None:
        """Return the bytes of a file, None if it is missing or not complete."""
        info = self._ask("info", f"{self._path}/{sha256}") if _SHA256.fullmatch(sha256) else None
        return info and info["size"]

    def read(self, sha256: str, start: int, end: int) -> bytes:
        """Return the bytes of a complete file from `start` to before `end`; empty if it was dropped."""
        return self._ask("cat_file", f"{self._path}/{sha256}", start=start, end=end) or b""

    def drop_unused(self, used: Set[str], gone: Set[str]) -> None:
        """Delete unused files as Files does. Abandoned ones are looked for now and then: a long listing takes time."""
        dropped, now = gone - used, time.time()
        self._incoming.drop_unused(set(), dropped)  # used files are in the bucket
        if now >= self._next_search:
            files = [file for file in self._ask("ls", self._path, detail=True) or [] if file["type"] == "file"]
            old = [file["name"] for file in files if now - file["LastModified"].timestamp() >= _ABANDONED_SECONDS]
            dropped |= {name for path in old if _SHA256.fullmatch(name := path.rpartition("/")[2])} - used
            self._next_search = now + _ABANDONED_SECONDS
        for sha256 in dropped:
            self._ask("rm_file", f"{self._path}/{sha256}")

    def _ask(self, method: str, *words: Any, **options: Any) -> Any:
        """Call a method of the store; return None for a file to read that is not there. Raises ProtocolError if it
        fails."""
        try:
            return getattr(self._store, method)(*words, **options)
        except Exception as error:  # of s3fs, botocore and aiohttp, which have no base in common
            is_absent = isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error.__cause__)
            if is_absent and method != "put_file":  # which lost its upload, or the file that it sends
                return None
            message = f"{self._folder} cannot be written or read ({one_line(error)})"
            log.error(message)
            raise ProtocolError(503, "no_space", message, retry_after=5) from error


def _check_piece(piece: FilePart, data: bytes, size: int | None) -> None:
    """Refuse a piece that is beyond its file, or of another size than the complete file's."""
    if piece.size < 1 or piece.offset + len(data) > piece.size:
        raise malformed(f"{len(data)} bytes from {piece.offset} on are beyond {piece.size}")
    if size not in (None, piece.size):
        raise malformed(f"this file has {size} bytes, not {piece.size}")


def _check_owner(claimed: str, run: str, folder: Path | str) -> None:
    """Refuse a folder that another run has claimed."""
    owner, _, name = claimed.partition(" ")
    if owner != run:
        remedy = "start the pool with another --pool_folder, or delete this one if that run is over"
        raise ProtocolError(409, "other_run", f"{folder} has the files of run {name}: {remedy}")


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


def _sync(path: Path) -> None:
    """Bring a file, or the names of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

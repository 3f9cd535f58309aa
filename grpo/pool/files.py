"""The files that a pool keeps in its database, in pieces: weights and the model's folder."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Set
from typing import Any

from grpo.pool.database import PIECE_BYTES, Database
from grpo.wire.errors import ProtocolError, malformed
from grpo.wire.weights import Piece

_ABANDONED_SECONDS = 3600  # without a byte; a file that nothing names is dropped then


class Files:
    """Files by their SHA-256. All methods may be called from any thread."""

    def __init__(self, database: Database):
        self._database = database
        self._digests: dict[str, tuple[int, Any]] = {}  # of files that are not complete, and of how many bytes
        self._touched: dict[str, float] = {}  # time.monotonic() of their last pieces

    def add(self, piece: Piece, data: bytes) -> int:
        """Keep a piece of a file. Return how many bytes are here by now, from the first on without a gap.

        Bytes that are here already are ignored, so a piece may come twice, and an empty one asks where to continue.

        Raises ProtocolError: 400 for what reaches beyond the size, 409 for what would leave a gap, or where the whole
        is not what was announced: it is dropped.
        """
        if piece.size < 1 or piece.offset + len(data) > piece.size:
            raise malformed(f"{len(data)} bytes from {piece.offset} on are beyond {piece.size}")
        with self._database.transaction():
            size, received = self._database.row("SELECT size, received FROM files WHERE sha256 = ?", piece.sha256) or (
                None,
                0,
            )
            if size not in (None, piece.size):
                raise malformed(f"this file has {size} bytes, not {piece.size}")
            if piece.offset > received:
                message = f"{received} bytes of this file are here: send what follows them"
                raise ProtocolError(409, "missing_piece", message)
            new = memoryview(data)[received - piece.offset :]
            if not new:
                if received:
                    self._touched[piece.sha256] = time.monotonic()  # whoever asks for it is about to name it
                return received
            digest = self._digest(piece.sha256, received).copy()
            digest.update(new)
            end = received + len(new)
            if size is None:
                self._database.sql("INSERT INTO files VALUES (?, ?, ?)", piece.sha256, piece.size, end)
            else:
                self._database.sql("UPDATE files SET received = ? WHERE sha256 = ?", end, piece.sha256)
            for start in range(0, len(new), PIECE_BYTES):
                row = piece.sha256, received + start, new[start : start + PIECE_BYTES]
                self._database.sql("INSERT INTO pieces VALUES (?, ?, ?)", *row)
            is_damaged = end == piece.size and digest.hexdigest() != piece.sha256
            if is_damaged:
                self._drop(piece.sha256)
            else:
                self._touched[piece.sha256] = time.monotonic()
                self._digests[piece.sha256] = end, digest
        if is_damaged:
            message = "what came is not what was announced (SHA-256 differs): send all of it again"
            raise ProtocolError(409, "damaged", message)
        return end

    def size(self, sha256: str) -> int | None:
        """Return the bytes of a file, None where it is not here or not complete."""
        row = self._database.row("SELECT size FROM files WHERE sha256 = ? AND received = size", sha256)
        return row[0] if row else None

    def read(self, sha256: str, start: int, end: int) -> bytes:
        """Return the bytes of a complete file from `start` on to before `end`; empty where it was dropped."""
        with self._database.lock:
            rows = self._database.rows(
                "SELECT start, data FROM pieces WHERE sha256 = ? AND start < ? AND start + length(data) > ? "
                "ORDER BY start",
                sha256,
                end,
                start,
            )
            return b"".join(memoryview(data)[max(0, start - at) : end - at] for at, data in rows)

    def drop_unused(self, used: Set[str], gone: Set[str]) -> None:
        """Delete, in the caller's transaction, what is not used: files whose last user is gone, and abandoned ones."""
        now = time.monotonic()
        for (sha256,) in self._database.rows("SELECT sha256 FROM files"):
            is_abandoned = now - self._touched.setdefault(sha256, now) >= _ABANDONED_SECONDS
            if sha256 not in used and (sha256 in gone or is_abandoned):
                self._drop(sha256)

    def _drop(self, sha256: str) -> None:
        self._database.sql("DELETE FROM pieces WHERE sha256 = ?", sha256)
        self._database.sql("DELETE FROM files WHERE sha256 = ?", sha256)
        self._digests.pop(sha256, None)
        self._touched.pop(sha256, None)

    def _digest(self, sha256: str, received: int) -> Any:
        """Return the digest of what is here of a file."""
        length, digest = self._digests.get(sha256, (0, hashlib.sha256()))
        if length != received:  # after a restart, or a piece that could not be stored
            digest = hashlib.sha256()
            for start in range(0, received, PIECE_BYTES):
                digest.update(self.read(sha256, start, min(received, start + PIECE_BYTES)))
        return digest

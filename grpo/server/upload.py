"""New weights on their way into the server: a safetensors file, sent in pieces, that has no name in its folder.

Memory holds one piece of it, and a server that is killed leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

from grpo.model.weights_file import WeightsFile
from grpo.wire.errors import ProtocolError, malformed
from grpo.wire.tensor_header import LONGEST_HEADER, HeaderError, data_begins
from grpo.wire.weights import Piece

log = logging.getLogger(__name__)


@dataclass
class Upload:
    """A file of which the first `received` bytes are here."""

    sha256: str
    size: int
    file: BinaryIO
    received: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    contents: WeightsFile | None = None
    """the file's tensors, once its header is here"""
    touched: float = 0.0
    """time.monotonic() of the last piece that brought something new; infinite while the upload is held"""


class UploadSlot:
    """The place of the one upload that a server accepts at a time. All methods may be called from any thread.

    Another upload waits until this one is installed, or has received nothing new for `patience` seconds.
    """

    def __init__(self, folder: str, weights: dict[str, torch.Tensor], patience: float):
        """`weights` are those of the model that the upload is for."""
        self._folder, self._weights, self._patience = folder, weights, patience
        # A name, and more than the rest of an entry takes; parsing a stranger's JSON could fill the memory.
        self._longest_header = LONGEST_HEADER + sum(len(name) + 256 for name in weights)
        self._upload: Upload | None = None
        self._installed = ""
        """SHA-256 of the last upload that was installed"""
        self._lock = threading.Lock()

    def add(self, piece: Piece, data: bytes) -> int:
        """Keep a piece of an upload. Return how many bytes are here by now, from the first on without a gap.

        Bytes that are here already are ignored, so a piece may come twice, and an empty one asks where to continue.

        Raises ProtocolError: 400 for what reaches beyond the size, 409 for what would leave a gap, 422 for weights of
        another model, 503 while there is another upload or no room on the disk.
        """
        if piece.offset + len(data) > piece.size:
            raise malformed(f"{len(data)} bytes from {piece.offset} on are beyond {piece.size}")
        with self._lock:
            if piece.sha256 == self._installed:
                return piece.size
            upload = self._upload_of(piece)
            if piece.offset > upload.received:
                message = f"{upload.received} bytes of this upload are here: send what follows them"
                raise ProtocolError(409, "missing_piece", message)
            before = upload.received
            try:
                self._append(upload, data[upload.received - piece.offset :])
            except HeaderError as error:
                self._drop()
                raise ProtocolError(422, "wrong_weights", str(error)) from error
            except OSError as error:
                self._drop()
                raise _no_space(self._folder, error) from error
            # A client that only asks where to continue, again and again, must not keep the others out.
            if upload.received > before or upload.touched == 0:
                upload.touched = max(upload.touched, time.monotonic())
            return upload.received

    def hold(self, sha256: str) -> Upload:
        """Return the complete upload, and let no other take its place. Raises ProtocolError, 409, for a missing piece.

        `release` ends it.
        """
        with self._lock:
            upload = self._upload
            if upload is None or upload.sha256 != sha256 or upload.received < upload.size:
                received = upload.received if upload is not None and upload.sha256 == sha256 else 0
                message = f"the upload is not complete: {received} bytes of it are here"
                raise ProtocolError(409, "missing_piece", message)
            upload.touched = math.inf
            return upload

    def release(self, upload: Upload, installed: bool) -> None:
        """Make place for the next upload. The file of one that was installed stays open: it is the caller's."""
        with self._lock:
            if installed:
                self._installed, self._upload = upload.sha256, None
            elif self._upload is upload:  # the next one may have begun
                self._drop()

    def drop_abandoned(self) -> None:
        """Drop an upload that has stalled, and free its disk space."""
        with self._lock:
            if self._upload is not None and self._seconds_left(self._upload) <= 0:
                log.warning("an upload was abandoned after %d of %d bytes", self._upload.received, self._upload.size)
                self._drop()

    def _seconds_left(self, upload: Upload) -> float:
        """Return the seconds until another upload may take this one's place."""
        return upload.touched + self._patience - time.monotonic()

    def _upload_of(self, piece: Piece) -> Upload:
        upload = self._upload
        if upload is not None and upload.sha256 == piece.sha256:
            if upload.size != piece.size:
                raise malformed(f"this upload has {upload.size} bytes, not {piece.size}")
            return upload
        if upload is not None and (left := self._seconds_left(upload)) > 0:
            wait = math.ceil(min(left, self._patience))
            message = f"another upload is under way, {upload.received} of {upload.size} bytes: come back in {wait} s"
            raise ProtocolError(503, "other_upload", message, retry_after=min(wait, 30))
        self._drop()
        largest = 8 + self._longest_header + sum(4 * tensor.numel() for tensor in self._weights.values())
        if piece.size > largest:
            message = f"{piece.size} bytes: this model's weights have {largest} at most"
            raise ProtocolError(422, "wrong_weights", message)
        try:
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        except OSError as error:
            raise _no_space(self._folder, error) from error
        self._upload = Upload(piece.sha256, piece.size, file)
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, piece.size))  # a full disk is reported before the weights come
        except OSError as error:
            self._drop()
            raise _no_space(self._folder, error) from error
        return self._upload

    def _append(self, upload: Upload, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(upload.file.fileno(), view, upload.received)
            upload.digest.update(view[:written])
            upload.received += written
            view = view[written:]
        if upload.contents is None and upload.received >= 8:
            begins = data_begins(os.pread(upload.file.fileno(), 8, 0), upload.size, self._longest_header)
            if upload.received >= begins:
                upload.contents = WeightsFile(upload.file, upload.size)
                self._check_shapes(upload.contents)

    def _check_shapes(self, contents: WeightsFile) -> None:
        """Raise HeaderError where the names or shapes are not the model's."""
        sent, expected = contents.entries.keys(), self._weights.keys()
        for names, complaint in ((sent - expected, "this model has no"), (expected - sent, "these weights lack")):
            if names:
                raise HeaderError(f"{complaint} tensor {min(names)[:100]!r}, and {len(names) - 1} others")
        for name, tensor in self._weights.items():
            if contents.entries[name].shape != tuple(tensor.shape):
                shapes = f"{list(contents.entries[name].shape)}, and in this model {list(tensor.shape)}"
                raise HeaderError(f"tensor {name[:100]!r} is {shapes}")

    def _drop(self) -> None:
        if self._upload is not None:
            self._upload.file.close()
            self._upload = None


def _no_space(folder: str, error: OSError) -> ProtocolError:
    message = f"no room for the weights in {folder} ({error.strerror}): the server's disk is full"
    log.error(message)
    return ProtocolError(503, "no_space", message, retry_after=5)

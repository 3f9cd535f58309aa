"""The replacement of the served weights by uploaded ones, between two requests.

An upload is a safetensors file, sent in pieces, that has no name in its folder. It is checked as a whole first. The
scorer then copies it over the served weights, between two requests, so no answer is of both. A card needs no room for a
second model. A file keeps the old weights: they are put back if nothing can be scored with the new ones.
"""

import hashlib
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import PreTrainedModel

from grpo.config.errors import ConfigError, require
from grpo.model.fingerprint import fingerprint_with
from grpo.model.weights_file import WeightsFile, blocks, named_weights, write_weights
from grpo.server.fair_queue import FairQueue
from grpo.wire.refusals import ProtocolError, malformed
from grpo.wire.tensors import LONGEST_HEADER, Commit, FilePart, HeaderError, data_begins

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Upload:
    """A file of which the first `received` bytes are here."""

    sha256: str
    size: int
    file: BinaryIO
    received: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    contents: WeightsFile | None = None  # the file's tensors, once its header is here
    touched: float = 0.0  # time.monotonic() of the last piece that brought something new; infinite while it is held


class UploadSlot:
    """The place of the one upload that a server accepts at a time. All methods may be called from any thread. Another
    upload waits until this one is installed, or has received nothing new for `patience` seconds."""

    def __init__(self, folder: str, weights: dict[str, torch.Tensor], patience: float):
        self._folder, self._weights, self._patience = folder, weights, patience
        # A name, and more than the rest of an entry takes; parsing a stranger's JSON could fill the memory.
        self._longest_header = LONGEST_HEADER + sum(len(name) + 256 for name in weights)
        self._upload: Upload | None = None
        self._installed = ""  # SHA-256 of the last upload that was installed
        self._lock = threading.Lock()

    def add(self, query: Mapping[str, str], data: bytes) -> int:
        """Keep a piece of an upload, which may come twice; an empty one asks where to continue. Returns how many bytes
        are here, from the first on without a gap. Raises ProtocolError: 400 for a piece beyond the size, 409 for a gap,
        422 for weights of another model, 503 while there is another upload or a full disk."""
        piece = FilePart.of(query)
        if piece.offset + len(data) > piece.size:
            raise malformed(f"{len(data)} bytes from {piece.offset} on are beyond {piece.size}")
        with self._lock:
            if piece.sha256 == self._installed:
                return piece.size
            try:
                upload = self._upload_of(piece)
                if piece.offset > upload.received:
                    message = f"{upload.received} bytes of this upload are here: send what follows them"
                    raise ProtocolError(409, "missing_piece", message)
                self._append(upload, data[upload.received - piece.offset :])
            except HeaderError as error:
                self._drop()
                raise ProtocolError(422, "wrong_weights", str(error)) from error
            except OSError as error:
                self._drop()
                message = f"no room for the weights in {self._folder} ({error.strerror}): the server's disk is full"
                log.error(message)
                raise ProtocolError(503, "no_space", message, retry_after=5) from error
            return upload.received

    @contextmanager
    def hold(self, sha256: str) -> Iterator[Upload]:
        """Lend the complete upload, whose open file is then the caller's; drop it after an error. No other takes its
        place meanwhile. Raises ProtocolError, 409, for a missing piece."""
        with self._lock:
            upload = self._upload
            if upload is None or (upload.sha256, upload.received) != (sha256, upload.size):
                message = "the upload is not complete: an empty piece asks where to continue"
                raise ProtocolError(409, "missing_piece", message)
            upload.touched = math.inf
        try:
            yield upload
        except BaseException:
            with self._lock:
                self._drop()
            raise
        with self._lock:
            self._installed, self._upload = sha256, None

    def drop_stalled(self) -> None:
        """Drop an upload that nobody has brought on for twice `patience` seconds, and free its disk space."""
        with self._lock:
            if self._upload is not None and time.monotonic() > self._upload.touched + 2 * self._patience:
                self._drop()

    def _upload_of(self, piece: FilePart) -> Upload:
        upload = self._upload
        if upload is not None and upload.sha256 == piece.sha256:
            if upload.size != piece.size:
                raise malformed(f"this upload has {upload.size} bytes, not {piece.size}")
            return upload
        if upload is not None and (left := upload.touched + self._patience - time.monotonic()) > 0:
            wait = math.ceil(min(left, 30))
            message = f"another upload is under way, {upload.received} of {upload.size} bytes: come back in {wait} s"
            raise ProtocolError(503, "other_upload", message, retry_after=wait)
        self._drop()
        largest = 8 + self._longest_header + sum(4 * tensor.numel() for tensor in self._weights.values())
        if piece.size > largest:
            message = f"{piece.size} bytes: this model's weights have {largest} at most"
            raise ProtocolError(422, "wrong_weights", message)
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._upload = Upload(sha256=piece.sha256, size=piece.size, file=file)
        os.posix_fallocate(file.fileno(), 0, max(1, piece.size))  # a full disk is reported before the weights come
        return self._upload

    def _append(self, upload: Upload, data: bytes) -> None:
        view = memoryview(data)
        # A client that only asks where to continue, again and again, must not keep the others out.
        if view or upload.touched == 0:
            upload.touched = time.monotonic()
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
        """Raise HeaderError for names or shapes that are not the model's."""
        sent = {name: list(entry.shape) for name, entry in contents.entries.items()}
        expected = {name: list(tensor.shape) for name, tensor in self._weights.items()}
        for name in sorted(sent.keys() | expected.keys()):
            shape, right = sent.get(name, "missing"), expected.get(name, "missing")
            if shape != right:
                raise HeaderError(f"tensor {name[:100]!r} is {shape}, and in this model {right}")

    def _drop(self) -> None:
        if self._upload is not None:
            self._upload.file.close()
            self._upload = None


class WeightSwap:
    """Replaces the model's weights by uploaded ones. All methods may be called from any thread."""

    def __init__(
        self, queue: FairQueue, model: PreTrainedModel, *, inputs: str, folder: str, patience: float, on_swap: Callable
    ):
        """`folder` keeps an upload for `patience` seconds without a new piece. `on_swap` is called with the new
        fingerprint and the SHA-256 of the file. Raises ConfigError for a folder that cannot be written, an adapter, or
        a model that is not all in memory."""
        self._queue, self._model, self._inputs = queue, model, inputs
        self._on_swap = on_swap
        self._weights = named_weights(model)
        self._committing = threading.Lock()
        remedy = "whole models come, and this one is an adapter: leave it out, or serve it merged into its base"
        require(not hasattr(model, "peft_config"), "update_folder", folder, remedy)
        remedy = "parts of this model are not in memory and cannot be replaced: leave it or device_map out"
        require(not any(tensor.is_meta for tensor in self._weights.values()), "update_folder", folder, remedy)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            write_weights(Path(f"/dev/fd/{file.fileno()}"), self._weights)
            self._kept = WeightsFile(file, os.fstat(file.fileno()).st_size)  # for an exchange that has to be undone
        except OSError as error:
            raise ConfigError(f"update_folder={folder!r}: {error.strerror}: name a folder to write to") from error
        self.uploads = UploadSlot(folder, self._weights, patience)

    def commit(self, query: Mapping[str, str]) -> dict:
        """Swap in the uploaded weights; return when that is done. A repeated commit does nothing. Raises ProtocolError:
        409 for another served model than the one to replace, a missing piece or a damaged file; 422 for weights of
        another model, not finite, or of no use; 503 when the server is ending."""
        commit = Commit.of(query)
        with self._committing:
            served = self._queue.fingerprint
            if served == commit.becomes:
                return {"model_fingerprint": served}
            if served != commit.replaces:
                message = f"the model is {served} and not {commit.replaces}: it was restarted or updated"
                raise ProtocolError(409, "wrong_model", message)
            began = time.monotonic()
            with self.uploads.hold(commit.sha256) as upload:
                self._check(upload, commit)
                # Returns when the new weights are served; raises ProtocolError when the old ones have to stay.
                new, old = upload.contents, self._kept
                self._queue.exchange(lambda: self._install(new), lambda: self._install(old), commit.becomes).result()
                old.close()
                self._kept = new
            self._on_swap(commit.becomes, commit.sha256)
            seconds = time.monotonic() - began
            log.info("new weights: %s replaces %s (%.1f s)", commit.becomes, commit.replaces, seconds)
        return {"model_fingerprint": commit.becomes}

    def _check(self, upload: Upload, commit: Commit) -> None:
        if upload.digest.hexdigest() != upload.sha256:
            message = "the bytes are not the announced ones (SHA-256 differs): send all of it again"
            raise ProtocolError(409, "damaged", message)
        if upload.contents is None:
            raise ProtocolError(422, "wrong_weights", "not safetensors: no header")
        for name, tensor in self._weights.items():
            for part in blocks(tensor.numel()):
                if not upload.contents.read(name, part).to(tensor.dtype).isfinite().all():
                    raise ProtocolError(422, "wrong_weights", f"tensor {name!r} holds NaN or infinity")
        becomes = fingerprint_with(self._model, self._inputs, upload.contents, upload.sha256)
        if becomes != commit.becomes:
            message = f"with these weights this model is {becomes} and not {commit.becomes}: its configuration differs"
            raise ProtocolError(422, "wrong_weights", message)

    @torch.no_grad()
    def _install(self, contents: WeightsFile) -> None:
        for name, tensor in self._weights.items():
            flat = tensor.view(-1)
            for part in blocks(len(flat)):
                flat[part].copy_(contents.read(name, part))

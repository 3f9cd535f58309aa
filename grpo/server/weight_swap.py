"""The server's side of a reference update: new weights come in by pieces, are checked, and take the served ones' place.

Until they are whole and right they lie in a file without a name: memory holds a piece of them, a card needs no room for
a second model, and a server that is killed leaves nothing behind. So do those that are served, to be put back where
nothing can be scored with the new ones. The swap is done by the scorer's worker, between the
last request that came before it and the first that came after, so that no answer is of both.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo.config.errors import ConfigError
from grpo.model.fingerprint import fingerprint_with
from grpo.model.weights_file import WeightsFile, blocks, named_weights, write_weights
from grpo.server.fair_queue import FairQueue
from grpo.wire.errors import ProtocolError, malformed
from grpo.wire.health import ModelInfo
from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.tensor_header import LONGEST_HEADER, HeaderError, data_begins
from grpo.wire.weights import Commit, Piece

log = logging.getLogger(__name__)


@dataclass
class Served:
    """A model that answers requests."""

    fingerprint: str
    """certain once an answer of it is there: new weights may turn out to be none, and the old ones stay"""


@dataclass
class _Upload:
    """A file that comes in, from its first byte on."""

    sha256: str
    size: int
    file: BinaryIO
    received: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    contents: WeightsFile | None = None
    """once its header is there"""
    touched: float = 0.0
    """time.monotonic() when a piece began it or brought it on last; infinite while it is read"""


class WeightSwap:
    """Says which weights a request meets, and lets others take their place. All methods may be called from any thread.

    One upload at a time: another one waits until that is swapped in, or was brought on by no piece for `patience`
    seconds.
    """

    def __init__(
        self,
        queue: FairQueue,
        model: PreTrainedModel,
        info: ModelInfo,
        folder: str | None,
        patience: float,
        on_swap: Callable[[str, str], None],
    ):
        """`info` describes `model`. `folder` keeps what comes in; None is where nothing does. `on_swap` is told the
        new fingerprint and the SHA-256 of the weights' file.

        Raises ConfigError for a folder that cannot be written, or a model of which parts are not in memory.
        """
        self._queue, self._model, self._tokens = queue, model, info.tokenizer_fingerprint
        self._model_served, self._folder, self._patience = Served(info.fingerprint), folder, patience
        self._on_swap = on_swap
        self._weights: dict[str, torch.Tensor] = {}
        self._upload: _Upload | None = None
        self._served = ""
        """SHA-256 of what was swapped in last"""
        self._uploading, self._committing, self._order = threading.Lock(), threading.Lock(), threading.Lock()
        if folder is None:
            return
        self._weights = named_weights(model)
        # A name, and more than the rest of an entry takes; JSON of a stranger's could fill the memory.
        self._longest_header = LONGEST_HEADER + sum(len(name) + 256 for name in self._weights)
        if hasattr(model, "peft_config"):
            raise ConfigError(
                f"update_folder={folder!r}: whole models come, and this one is an adapter: leave it out, or serve the "
                "adapter merged into its base"
            )
        if any(tensor.is_meta for tensor in self._weights.values()):
            raise ConfigError(
                f"update_folder={folder!r}: parts of this model are not in memory and cannot be replaced: leave out "
                "update_folder or device_map"
            )
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._kept = self._copy_weights()
            """of what is served, for an exchange that has to be undone"""
        except OSError as error:
            raise ConfigError(f"update_folder={folder!r}: {error.strerror}: name a folder to write to") from error

    def submit(self, request: LogprobsRequest, client: str) -> tuple[Future[np.ndarray], Served]:
        """Queue a request, as FairQueue.submit does. Returns also the model that will answer it."""
        with self._order:
            return self._queue.submit(request, client), self._model_served

    def add(self, query: Mapping[str, str], data: bytes) -> dict:
        """Keep a piece of an upload. Returns how many bytes are here by now, from the first on without a gap.

        What is here already is passed over, so a piece may come twice, and an empty one asks where to go on.

        Raises ProtocolError: 400 for what reaches beyond the size, 409 for what would leave a gap, 422 for weights of
        another model, 503 while there is another upload or no room on the disk.
        """
        piece = Piece.of(query)
        if piece.offset + len(data) > piece.size:
            raise malformed(f"{len(data)} bytes from {piece.offset} on are beyond {piece.size}")
        with self._uploading:
            if piece.sha256 == self._served:
                return {"received": piece.size}
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
            # Whoever only asks where to go on, again and again, must not keep the others out.
            if upload.received > before or upload.touched == 0:
                upload.touched = max(upload.touched, time.monotonic())
            return {"received": upload.received}

    def commit(self, query: Mapping[str, str]) -> dict:
        """Swap in what was uploaded; returns when that is done. What is done already is not done again.

        Raises ProtocolError: 409 where another model is served than the one to replace, a piece is missing, or the
        bytes are not those that were announced; 422 for weights of another model, not finite, or with which nothing
        can be scored; 503 when the server is ending.
        """
        commit = Commit.of(query)
        with self._committing:
            served = self._model_served.fingerprint
            if served != commit.becomes:
                if served != commit.replaces:
                    message = f"the model is {served} and not {commit.replaces}: it was restarted or updated"
                    raise ProtocolError(409, "wrong_model", message)
                began = time.monotonic()
                upload = self._whole(commit)
                try:
                    self._check(upload, commit)
                    self._exchange(upload.contents, Served(commit.becomes))
                    with self._uploading:
                        self._served, self._upload = upload.sha256, None  # its file is kept
                finally:
                    with self._uploading:
                        if self._upload is upload:  # the next one may have begun
                            self._drop()
                self._on_swap(commit.becomes, commit.sha256)
                seconds = time.monotonic() - began
                log.info("new weights: %s replaces %s (%.1f s)", commit.becomes, commit.replaces, seconds)
        return {"model_fingerprint": commit.becomes}

    def drop_abandoned(self) -> None:
        """Give back the room of an upload of which no piece has come for long."""
        with self._uploading:
            if self._upload is not None and self._left(self._upload) <= 0:
                log.warning("an upload was abandoned after %d of %d bytes", self._upload.received, self._upload.size)
                self._drop()

    def _left(self, upload: _Upload) -> float:
        """Seconds until another upload may take its place."""
        return upload.touched + self._patience - time.monotonic()

    def _upload_of(self, piece: Piece) -> _Upload:
        upload = self._upload
        if upload is not None and upload.sha256 == piece.sha256:
            if upload.size != piece.size:
                raise malformed(f"this upload has {upload.size} bytes, not {piece.size}")
            return upload
        if upload is not None and (left := self._left(upload)) > 0:
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
        self._upload = _Upload(piece.sha256, piece.size, file)
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, piece.size))  # a full disk is said before the weights come
        except OSError as error:
            self._drop()
            raise _no_space(self._folder, error) from error
        return self._upload

    def _append(self, upload: _Upload, data: bytes) -> None:
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
        names, own = contents.entries.keys(), self._weights.keys()
        for surplus, said in ((names - own, "this model has no"), (own - names, "these weights lack")):
            if surplus:
                raise HeaderError(f"{said} tensor {min(surplus)[:100]!r}, and {len(surplus) - 1} others")
        for name, tensor in self._weights.items():
            if contents.entries[name].shape != tuple(tensor.shape):
                shapes = f"{list(contents.entries[name].shape)}, and in this model {list(tensor.shape)}"
                raise HeaderError(f"tensor {name[:100]!r} is {shapes}")

    def _whole(self, commit: Commit) -> _Upload:
        with self._uploading:
            upload = self._upload
            if upload is None or upload.sha256 != commit.sha256 or upload.received < upload.size:
                here = upload.received if upload is not None and upload.sha256 == commit.sha256 else 0
                message = f"the upload is not complete: {here} bytes of it are here"
                raise ProtocolError(409, "missing_piece", message)
            upload.touched = math.inf
            return upload

    def _check(self, upload: _Upload, commit: Commit) -> None:
        if upload.digest.hexdigest() != upload.sha256:
            message = "what came is not what was announced (SHA-256 differs): send all of it again"
            raise ProtocolError(409, "damaged", message)
        if upload.contents is None:
            raise ProtocolError(422, "wrong_weights", "not safetensors: no header")
        for name, tensor in self._weights.items():
            for part in blocks(tensor.numel()):
                if not upload.contents.read(name, part).to(tensor.dtype).isfinite().all():
                    raise ProtocolError(422, "wrong_weights", f"tensor {name!r} holds NaN or infinity")
        becomes = fingerprint_with(self._model, self._tokens, upload.contents, upload.sha256)
        if becomes != commit.becomes:
            message = f"with these weights this model is {becomes} and not {commit.becomes}: its configuration differs"
            raise ProtocolError(422, "wrong_weights", message)

    def _exchange(self, contents: WeightsFile, new: Served) -> None:
        """Return when the new weights are served. Raises ProtocolError where the old ones have to stay."""
        old = self._model_served.fingerprint

        def undo() -> None:
            self._install(self._kept)
            new.fingerprint = old

        with self._order:
            swapped = self._queue.exchange(lambda: self._install(contents), undo)
            self._model_served = new
        swapped.result()
        self._kept.close()
        self._kept = contents

    def _copy_weights(self) -> WeightsFile:
        """Write what is served now into a file without a name."""
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        write_weights(Path(f"/dev/fd/{file.fileno()}"), self._weights)
        return WeightsFile(file, os.fstat(file.fileno()).st_size)

    @torch.no_grad()
    def _install(self, contents: WeightsFile) -> None:
        for name, tensor in self._weights.items():
            flat = tensor.view(-1)
            for part in blocks(len(flat)):
                flat[part].copy_(contents.read(name, part))

    def _drop(self) -> None:
        if self._upload is not None:
            self._upload.file.close()
            self._upload = None


def _no_space(folder: str | None, error: OSError) -> ProtocolError:
    message = f"no room for the weights in {folder} ({error.strerror}): the server's disk is full"
    log.error(message)
    return ProtocolError(503, "no_space", message, retry_after=5)

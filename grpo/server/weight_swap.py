"""The replacement of the served weights by uploaded ones, between two requests.

The upload (grpo/server/upload.py) is checked as a whole first. The worker then copies it over the served weights, after
the last request that came before it and before the first that came after, so no answer is of both. A card needs no room
for a second model. The old weights lie in a file without a name as well: they are put back where nothing can be scored
with the new ones.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from grpo.config.errors import ConfigError
from grpo.model.fingerprint import fingerprint_with
from grpo.model.weights_file import WeightsFile, blocks, named_weights, write_weights
from grpo.server.fair_queue import FairQueue
from grpo.server.upload import Upload, UploadSlot
from grpo.wire.errors import ProtocolError
from grpo.wire.weights import Commit, Piece

log = logging.getLogger(__name__)


class WeightSwap:
    """Takes uploaded weights and puts them in place of those of the model. All methods may be called by any thread."""

    def __init__(
        self,
        queue: FairQueue,
        model: PreTrainedModel,
        inputs_fingerprint: str,
        folder: str,
        patience: float,
        on_swap: Callable[[str, str], None],
    ):
        """`folder` keeps the uploads, each for `patience` seconds without a new piece. `on_swap` is called with the
        new fingerprint and the SHA-256 of the weights' file.

        Raises ConfigError for a folder that cannot be written, or a model of which parts are not in memory.
        """
        self._queue, self._model, self._inputs = queue, model, inputs_fingerprint
        self._folder, self._on_swap = folder, on_swap
        self._weights = named_weights(model)
        self._committing = threading.Lock()
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
            """the served weights, for an exchange that has to be undone"""
        except OSError as error:
            raise ConfigError(f"update_folder={folder!r}: {error.strerror}: name a folder to write to") from error
        self._uploads = UploadSlot(folder, self._weights, patience)

    def add(self, query: Mapping[str, str], data: bytes) -> dict:
        """Keep a piece of an upload; return how far it is. Raises ProtocolError as UploadSlot.add does."""
        return {"received": self._uploads.add(Piece.of(query), data)}

    def commit(self, query: Mapping[str, str]) -> dict:
        """Swap in what was uploaded; return when that is done. A commit may be repeated: the second does nothing.

        Raises ProtocolError: 409 where another model is served than the one to replace, a piece is missing, or the
        bytes are not those that were announced; 422 for weights of another model, not finite, or with which nothing
        can be scored; 503 when the server is ending.
        """
        commit = Commit.of(query)
        with self._committing:
            served = self._queue.fingerprint
            if served != commit.becomes:
                if served != commit.replaces:
                    message = f"the model is {served} and not {commit.replaces}: it was restarted or updated"
                    raise ProtocolError(409, "wrong_model", message)
                began = time.monotonic()
                upload, installed = self._uploads.hold(commit.sha256), False
                try:
                    self._check(upload, commit)
                    self._exchange(upload.contents, commit.becomes)
                    installed = True
                finally:
                    self._uploads.release(upload, installed)
                self._on_swap(commit.becomes, commit.sha256)
                seconds = time.monotonic() - began
                log.info("new weights: %s replaces %s (%.1f s)", commit.becomes, commit.replaces, seconds)
        return {"model_fingerprint": commit.becomes}

    def drop_abandoned(self) -> None:
        """Do as UploadSlot.drop_abandoned."""
        self._uploads.drop_abandoned()

    def _check(self, upload: Upload, commit: Commit) -> None:
        if upload.digest.hexdigest() != upload.sha256:
            message = "what came is not what was announced (SHA-256 differs): send all of it again"
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

    def _exchange(self, contents: WeightsFile, becomes: str) -> None:
        """Return when the new weights are served. Raises ProtocolError where the old ones have to stay."""
        self._queue.exchange(lambda: self._install(contents), lambda: self._install(self._kept), becomes).result()
        self._kept.close()
        self._kept = contents

    def _copy_weights(self) -> WeightsFile:
        """Write the served weights into a file without a name."""
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        write_weights(Path(f"/dev/fd/{file.fileno()}"), self._weights)
        return WeightsFile(file, os.fstat(file.fileno()).st_size)

    @torch.no_grad()
    def _install(self, contents: WeightsFile) -> None:
        for name, tensor in self._weights.items():
            flat = tensor.view(-1)
            for part in blocks(len(flat)):
                flat[part].copy_(contents.read(name, part))

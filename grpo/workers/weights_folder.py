"""A worker's folder: the model's files, and the weights of one version of the policy, brought over few bytes.

Of a run that trains an adapter a version is the adapter's weights alone; the base under it comes once.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from grpo.client.server_errors import FileFailure, ServerError
from grpo.config.errors import ConfigError
from grpo.pool.client import PoolClient, Retrier
from grpo.pool.database import lock_file
from grpo.pool.delta import DeltaError, apply_delta, sha256_of
from grpo.pool.protocol import ADAPTER, Probe, RunInfo, Task, Version
from grpo.workers.engine import EngineError, WorkerFailed

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
ADAPTER_WEIGHTS = f"{ADAPTER}/adapter_model.safetensors"
_MOST_DELTAS = 8  # instead of a whole file; each is less than half of it, and mostly a small part
_TRIES = 3
_PICTURE_BYTES = 1 << 30  # of the pictures that were fetched last
_Value = TypeVar("_Value")
_Pictured = TypeVar("_Pictured", Task, Probe)


class ModelFolder:
    """A folder with a model for an engine: configuration, tokenizer and `model.safetensors`. That file has a version's
    weights, or the base of an adapter which the folder `adapter` has."""

    def __init__(self, folder: Path, client: PoolClient, patience: Retrier):
        self.path = folder / "model"
        self._folder, self._client, self._patience = folder, client, patience
        self._pictures, self._lock = folder / "pictures", threading.Lock()
        self.path.mkdir(exist_ok=True)
        self._weights = self.path / WEIGHTS
        self.sha256 = sha256_of(self._weights) if self._weights.exists() else ""  # of the weights in the folder

    def bring_model(self, run: RunInfo) -> None:
        """Fetch what all versions share: the folder's other files, in place of those there, and an adapter's base.
        Raises as `bring`."""
        self._try_again(lambda: self._bring_model(run))

    def with_pictures(self, task: _Pictured) -> _Pictured:
        """Return a task or probe with its pictures in its prompt, for any thread. Raises ServerError if the pool has
        not got them, WorkerFailed if the folder cannot be written, and as Retrier."""
        if not task.pictures:
            return task
        from grpo.wire.picture_files import PicturedPrompt  # needs Pillow, which not every engine brings

        try:
            with self._lock:
                files = [self._picture(sha256) for sha256 in task.pictures]
        except FileFailure as failure:
            raise ServerError(f"{self._client.url} {failure}") from failure
        except OSError as error:
            raise self._full(error) from error
        return replace(task, prompt_ids=PicturedPrompt(task.prompt_ids, files))

    def _picture(self, sha256: str) -> bytes:
        path = self._pictures / sha256
        picture = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(picture).hexdigest() == sha256:  # a power cut may have emptied it
            return picture
        self._pictures.mkdir(exist_ok=True)
        self._patience(lambda: self._client.fetch_file(sha256, path))
        others = (file for file in self._pictures.iterdir() if file != path)  # whatever the clock said before
        kept = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in others)
        while kept and sum(size for _, size, _ in kept) + path.stat().st_size > _PICTURE_BYTES:
            kept.pop(0)[2].unlink()
        return path.read_bytes()

    def _full(self, error: OSError) -> WorkerFailed:
        reason = f"{error.strerror or error}: make room there, or name another folder"
        return WorkerFailed(f"weights_folder={str(self._folder)!r}: {reason}")

    def _bring_model(self, run: RunInfo) -> None:
        packed = self._folder / "model_files"
        self._fetch(run.model_files, packed)
        files = load_file(packed)
        packed.unlink()
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or str(path) in (WEIGHTS, ADAPTER_WEIGHTS):
                raise ServerError(f"{self._client.url} has a model file that is called {name!r}: no worker writes it")
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != WEIGHTS:
                entry.unlink()
        for name, content in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.tobytes())
        if run.base_weights is not None:
            if self.sha256 != run.base_weights:
                self._fetch_whole(run.base_weights)
            self._weights, self.sha256 = self.path / ADAPTER_WEIGHTS, ""  # from now on versions are the adapter's

    def bring(self, number: int, sha256: str) -> Version | None:
        """Bring a version with these weights, by the shortest chain of deltas or as a whole file. Return None if the
        pool has dropped the version. Raises ServerError, WorkerFailed, and as Retrier."""
        return self._try_again(lambda: self._bring(number, sha256))

    def _bring(self, number: int, sha256: str) -> Version | None:
        versions = {version.version: version for version in self._patience(self._client.versions)}
        target, began, read = versions.get(number), time.monotonic(), 0
        if target is None or target.sha256 != sha256:
            return None
        start, deltas = _chain(target, versions, lambda version: version.sha256 == self.sha256)
        if start is None or len(deltas) > _MOST_DELTAS:
            start, deltas = _chain(target, versions, lambda version: version.whole)
            if start is None:
                raise FileFailure(f"has no whole file from which deltas lead to version {target.version}")
        delta = self._folder / "delta"
        if start.sha256 != self.sha256:
            read = self._fetch_whole(start.sha256)
        for version in deltas:
            read += self._fetch(version.delta, delta)
            apply_delta(self._weights, delta, new=self._weights, sha256=version.sha256)
            self.sha256 = version.sha256
            delta.unlink()
        log.info("version %d: %.1f MB in %.1f s", number, read / 1e6, time.monotonic() - began)
        return target

    def _fetch_whole(self, sha256: str) -> int:
        """Fetch a file in the place of the weights; return its bytes."""
        fetched = self._folder / "whole"
        read = self._fetch(sha256, fetched)
        os.replace(fetched, self._weights)
        self.sha256 = sha256
        return read

    def _fetch(self, sha256: str, path: Path) -> int:
        for part in self._folder.glob("*.part"):
            if part.stem != sha256:  # of a version that was wanted before
                part.unlink()
        self._patience(lambda: self._client.fetch_file(sha256, path))
        return path.stat().st_size

    def _try_again(self, bring: Callable[[], _Value]) -> _Value:
        """Call `bring` some times, after a failure without the folder's weights. Raises ServerError, and WorkerFailed
        if the folder cannot be written."""
        for _ in range(_TRIES):
            try:
                return bring()
            except OSError as error:
                raise self._full(error) from error
            except DeltaError as error:
                reason = str(error)
            except FileFailure as failure:
                reason = f"{self._client.url} {failure}"
            log.warning("%s; fetching the whole file", reason)
            self.sha256 = ""
        raise ServerError(f"{self._client.url} gives no weights that fit together ({reason}): see its log")


def _chain(
    target: Version, versions: dict[int, Version], is_start: Callable[[Version], bool]
) -> tuple[Version | None, Sequence[Version]]:
    """Return the version to start from, None if no chain leads to `target`, and the versions whose deltas to apply."""
    deltas: list[Version] = []
    version: Version | None = target
    while version is not None and not is_start(version):
        deltas.append(version)
        version = versions.get(version.base)  # an older one: the pool takes no others
    return version, deltas[::-1]


def versions_file(run: RunInfo, folder: Path) -> Path:
    """Return the file of a model folder that each version of the policy replaces."""
    return folder / (WEIGHTS if run.base_weights is None else ADAPTER_WEIGHTS)


def read_tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return dtype, as the file names it, and shape of each tensor. Raises EngineError if the file is not whole."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()}
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path}: {error}") from error


def dtype_of(folder: Path) -> str:
    """Return the dtype of most of a model folder's weights, as torch names it if an engine may have it."""
    dtypes = [dtype for dtype, _ in read_tensors(folder / WEIGHTS).values()]
    dtype = max(dtypes, key=dtypes.count)
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(dtype, dtype)


_LOCK, _PREFIX = "lock", "grpo-worker-"


@contextmanager
def open_folder(path: str | None) -> Iterator[Path]:
    """Give a folder that no other worker uses; without a path a temporary one, removed at the end or by a later worker.
    Raises ConfigError if it cannot be made, or another worker uses it."""
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
        return folder, lock_file(folder / _LOCK)
    except BlockingIOError as error:
        raise ConfigError(f"weights_folder={path!r}: another worker uses it: name another folder") from error
    except OSError as error:
        raise ConfigError(f"weights_folder={path!r}: {error.strerror}: name a folder that can be written") from error


def _make_temporary() -> tuple[Path, int]:
    """Make a folder, after removing those of workers that were killed: each has the weights of a model."""
    for lost in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # a worker that runs, another user's, or another worker is removing it
            lock = lock_file(lost)
            shutil.rmtree(lost.parent, ignore_errors=True)
            os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = lock_file(folder / "new")
    os.rename(folder / "new", folder / _LOCK)  # locked from the first: another worker may be looking
    return folder, lock

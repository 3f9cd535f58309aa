"""Which checkpoints a run has, whether they are as they were written, and which of them it goes on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig

FORMAT = 4
PROGRESS = "progress.json"
"""written last: a folder that has it was saved to its end"""

_PIECE = 1 << 20  # bytes that are read at once
_THREADS = 4  # files that are read at the same time

Sums = dict[str, list]
"""size in bytes and SHA-256 by the file's path in the checkpoint"""


class Damaged(Exception):
    """What was saved cannot be used. The message names the file and what is wrong with it."""


def find_checkpoints(config: TrainerConfig) -> list[Path]:
    """Return the checkpoints to continue from, the newest first; none where the run begins.

    Raises ConfigError where the one that is named cannot be it.
    """
    asked = config.resume_from_checkpoint
    if asked is None:
        return []
    if asked == "last":
        if config.output_dir is None:
            raise ConfigError("resume_from_checkpoint='last': of which run? set output_dir to its folder")
        return checkpoints(Path(config.output_dir))[::-1]
    path = Path(asked)
    if not (path / PROGRESS).is_file():
        raise ConfigError(
            f"resume_from_checkpoint='{path}': there is no {PROGRESS} in it: name a folder checkpoint-STEP of a run, "
            "or 'last' with its output_dir"
        )
    if config.output_dir is not None and Path(config.output_dir).resolve() != path.resolve().parent:
        raise ConfigError(
            f"resume_from_checkpoint='{path}': it is of the run {path.parent}, not of "
            f"output_dir='{config.output_dir}': leave output_dir out"
        )
    if later := [other.name for other in checkpoints(path.parent) if step_of(other) > step_of(path)]:
        raise ConfigError(
            f"resume_from_checkpoint='{path}': the run has {' and '.join(later)} too, which go another way from there: "
            "delete them, or use 'last'"
        )
    return [path]


def checkpoints(run: Path) -> list[Path]:
    """List those of a run's folder that were saved to their end, the oldest first."""
    folders = [path.parent for path in run.glob(f"checkpoint-*/{PROGRESS}")]
    return sorted((folder for folder in folders if folder.name[11:].isdecimal()), key=step_of)


def readable(run: Path) -> dict[Path, dict[str, Any]]:
    """Read those of this format whose progress.json is not damaged, the oldest first.

    A damaged one must not keep a run from being saved. A run that goes on from it says so.
    """
    known = {}
    for checkpoint in checkpoints(run):
        with suppress(Damaged):
            known[checkpoint] = read_progress(checkpoint)
    return {checkpoint: about for checkpoint, about in known.items() if about["format"] == FORMAT}


def finished_steps(run: Path) -> int:
    """Return after how many steps the run has ended and saved its model; 0 where it has not."""
    try:
        return read_progress(run / "model").get("step", 0)
    except Damaged:
        return 0


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def best(accuracies: dict[Path, float | None]) -> Path | None:
    """Return the newest of the checkpoints with the highest accuracy."""
    known = {path: (accuracy, step_of(path)) for path, accuracy in accuracies.items() if accuracy is not None}
    return max(known, key=known.get, default=None)


def write_progress(folder: Path, about: dict[str, Any]) -> None:
    """Write what is in the folder, and a sum of that."""
    about = {"format": FORMAT} | about
    text = json.dumps(about | {"sha256": _sum_of(about)}, indent=2)
    (folder / PROGRESS).write_text(text + "\n", encoding="utf-8")


def read_progress(folder: Path) -> dict[str, Any]:
    """Read what write_progress wrote, of whatever format. Raises Damaged."""
    try:
        about = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except OSError as error:
        raise Damaged(f"{PROGRESS} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError):
        about = None
    if isinstance(about, dict) and isinstance(about.get("format"), int):
        written = about.pop("sha256", None)
        # Format 2 and those before had no sum.
        if written == _sum_of(about) or (written is None and about["format"] < 3):
            return about
    raise Damaged(f"{PROGRESS} is not as it was written")


def sum_files(folder: Path, names: Iterable[str]) -> Sums:
    """Read these files and sum them. Raises OSError."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(threads.map(lambda name: (name, _sum_file(folder / name)), names))


def damage(checkpoint: Path, share: int = 0, shares: int = 1) -> str | None:
    """Return what is wrong with the checkpoint; None where all is as it was written.

    This looks at progress.json and at one of `shares` equal parts of the other files.

    Raises ConfigError where the checkpoint is of another format.
    """
    try:
        about = read_progress(checkpoint)
    except Damaged as damaged:
        return str(damaged)
    if about["format"] != FORMAT:
        raise ConfigError(
            f"resume_from_checkpoint='{checkpoint}': the checkpoint's format is {about['format']!r} there and {FORMAT} "
            "here: use the version of this program that wrote it"
        )
    written: Sums = about["files"]

    def wrong(name: str) -> str | None:
        size, _ = written[name]
        try:
            left = (checkpoint / name).stat().st_size
            if left != size:
                return f"{name} has {left} bytes and had {size}"
            return None if _sum_file(checkpoint / name) == written[name] else f"{name} is not as it was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"

    names = sorted(written, key=lambda name: (written[name][0], name), reverse=True)
    with ThreadPoolExecutor(_THREADS) as threads:
        return next(filter(None, threads.map(wrong, names[share::shares])), None)


def _sum_file(path: Path) -> list:
    digest, size, piece = hashlib.sha256(), 0, bytearray(_PIECE)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
            size += count
    return [size, digest.hexdigest()]


def _sum_of(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()

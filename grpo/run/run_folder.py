"""The folder of a run or an evaluation: finds, checks, makes and locks it, and finds and checks its checkpoints.
Imports no torch: grpo.launch checks the folder before it starts anything.

Writes and reads its files with a JSON record per line too: metrics.jsonl, completions.jsonl, bad_steps.jsonl,
starts.jsonl. Pictures of recorded prompts are files beside the record, named by a digest of their bytes and written
once.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.config.trainer import RecordSection, settings_in
from grpo.wire.picture_files import SIGNATURES

log = logging.getLogger(__name__)

FORMAT = 6
PROGRESS = "progress.json"  # the file of a checkpoint that is written last: a folder that has it is complete
STOP = "stop"  # the file by which `grpo stop` asks; the next launcher, and the next trainer, removes it
LOCK = "trainer.lock"  # it names the process that writes there, which releases it if it opens and closes the file
PICTURES = "pictures"  # the folder of the pictures of recorded prompts

_WAIT = 20.0  # seconds that a killed process may take to end
_WAIT_FOR_MACHINE = 180.0  # the same of a machine that is lost: NFS keeps its locks for a lease, mostly 90 s
_THREADS = 4  # files read at the same time

Sums = dict[str, list]  # size in bytes and SHA-256 by the file's path in the checkpoint


class Damaged(Exception):
    """A saved folder that cannot be used. The message names the file and its damage."""


def lock_run(folder: Path) -> None:
    """Let no other trainer write into the folder until this process has ended. Raises ConfigError if another trainer
    still writes there after 20 seconds, 180 on another machine, and OSError of the folder."""
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # it stays open
    began, is_waiting = time.monotonic(), False
    while True:
        looked = time.monotonic()
        try:
            # A record lock and not flock: a forked process does not inherit it, and NFS supports it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            holder = os.pread(file, 1000, 0).decode(errors="replace").strip() or "unknown"
        except OSError as error:
            reason = error.strerror
            log.warning("%s cannot be locked (%s): see to it that no other trainer writes there", folder, reason)
            break
        longest = _WAIT if holder.endswith((f" on {socket.gethostname()}", "unknown")) else _WAIT_FOR_MACHINE
        if looked > began + longest:
            os.close(file)
            raise ConfigError(
                f"output_dir='{folder}': another trainer ({holder}) writes there: wait for its end, or name another "
                "folder"
            )
        if not is_waiting:
            log.info(
                "waiting at most %.0f s for the end of the trainer (%s) that writes to %s", longest, holder, folder
            )
            is_waiting = True
        time.sleep(0.2)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def find_run_folder(config: RecordSection) -> Path:
    """Return the run's folder, which may not exist yet. Raises ConfigError as find_checkpoints, if the folder cannot be
    written, and for a new run if it has results, or files of the user's with a run's names."""
    checkpoint = next(iter(find_checkpoints(config)), None)
    folder = checkpoint.parent if checkpoint else Path(config.output_dir or name_by_time())
    if config.resume_from_checkpoint is None:
        check_unused("output_dir", folder, may_have_begun=True)
    # A trainer locks its folder before it writes.
    if checkpoint is None and not any(os.path.exists(folder / name) for name in (LOCK, "metrics.jsonl")):
        _check_not_replaced("output_dir", folder, "config.yaml", "model")
    check_writable("output_dir", folder)
    return folder


def name_by_time() -> str:
    """Return the folder of a run that was given none."""
    return time.strftime("runs/%Y%m%d-%H%M%S")


def make_run_folder(config: RecordSection, folder: Path) -> None:
    """Make the run's folder, unless it exists, and lock it. Raises ConfigError if it cannot be written, or is used."""
    with writable("output_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock_run(folder)
    if config.resume_from_checkpoint is None:
        check_unused("output_dir", folder, may_have_begun=True)


def is_stop_asked(folder: Path) -> bool:
    """Tell whether `grpo stop` asked the trainer that is in the folder, or was the last one there."""
    with suppress(OSError):
        # Asked for a single name, NFS may answer for a minute from memory; it looks anew when a folder is opened.
        return STOP in os.listdir(folder)
    return False


def forget_stop(folder: Path) -> None:
    """Remove the file of an earlier `grpo stop`. Raises ConfigError if it cannot."""
    with writable("output_dir", folder):
        (folder / STOP).unlink(missing_ok=True)


def check_writable(field: str, folder: Path) -> None:
    """Raise ConfigError unless the folder can be made and written. Creates nothing."""
    with writable(field, folder), tempfile.TemporaryFile(dir=nearest_existing(folder)), suppress(FileNotFoundError):
        os.stat(folder)  # fails for a name that is too long


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


@contextmanager
def writable(field: str, folder: Path) -> Iterator[None]:
    """Turn an OSError of the `with` block into ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{field}='{folder}': {error.strerror}: name a folder that can be written") from error


def check_unused(field: str, folder: Path, may_have_begun: bool = False) -> None:
    """Raise ConfigError if the folder has a run, an evaluation, or files that one would replace; with `may_have_begun`,
    a run that did a step, or an evaluation."""
    with writable(field, folder):  # reading may fail too, as with a name that is too long
        metrics = folder / "metrics.jsonl"
        has_run = any(record["step"] > 0 for record in read_records(metrics)) if may_have_begun else metrics.exists()
        is_used = has_run or checkpoints(folder) or (folder / "metrics.json").exists()
    if is_used:
        raise ConfigError(f"{field}='{folder}': it holds a run or an evaluation: name another folder, or delete it")
    if not may_have_begun:
        _check_not_replaced(field, folder, "config.yaml", "completions.jsonl")


def _check_not_replaced(field: str, folder: Path, *names: str) -> None:
    """Raise ConfigError if the folder has one of these."""
    if there := [name for name in names if os.path.exists(folder / name)]:
        raise ConfigError(f"{field}='{folder}': its {' and '.join(there)} would be replaced: name another folder")


def find_checkpoints(config: RecordSection) -> list[Path]:
    """Return the checkpoints to continue from, the newest first, none if the run begins. Raises ConfigError."""
    name = config.resume_from_checkpoint
    if name is None:
        return []
    if name == "last":
        return checkpoints(Path(config.output_dir))[::-1]
    path = Path(name)
    found = checkpoints(path.parent)
    if path not in found:
        raise ConfigError(
            f"resume_from_checkpoint='{path}': it is no checkpoint-STEP, or there is no {PROGRESS} in it: name a "
            "folder checkpoint-STEP of a run, or 'last' with its output_dir"
        )
    if config.output_dir is not None and Path(config.output_dir).resolve() != path.parent.resolve():
        raise ConfigError(
            f"resume_from_checkpoint='{path}': it is of the run {path.parent}, not of "
            f"output_dir='{config.output_dir}': leave output_dir out"
        )
    later = [checkpoint.name for checkpoint in found if step_of(checkpoint) > step_of(path)]
    if later:
        raise ConfigError(
            f"resume_from_checkpoint='{path}': the run has {' and '.join(later)} too, which go another way from there: "
            "delete them, or use 'last'"
        )
    return [path]


def checkpoints(run: Path) -> list[Path]:
    """List the complete checkpoints in a run's folder, the oldest first."""
    folders = [path.parent for path in run.glob(f"checkpoint-*/{PROGRESS}")]
    return sorted((folder for folder in folders if folder.name[11:].isdecimal()), key=step_of)


def readable(run: Path) -> dict[Path, dict[str, Any]]:
    """Return progress.json of each checkpoint of this format, the oldest first, if it is undamaged: a damaged one is
    reported when a run resumes, and must not keep it from saving new ones."""
    contents = {}
    for checkpoint in checkpoints(run):
        with suppress(Damaged):
            if (content := read_progress(checkpoint))["format"] == FORMAT:
                contents[checkpoint] = content
    return contents


def finished_steps(run: Path) -> int:
    """Return max_steps of the run that ended in this folder and saved its model; 0 if none has ended."""
    try:
        return read_progress(run / "model").get("step", 0)
    except Damaged:
        return 0


def is_finished(run: Path) -> bool:
    """Tell whether the run in this folder has done its last step, and saved its model."""
    return finished_steps(run) >= settings_in(run).get("max_steps", math.inf)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def write_progress(folder: Path, content: dict[str, Any]) -> None:
    """Write progress.json: the content, the format's number and the SHA-256 of both."""
    content = {"format": FORMAT} | content
    text = json.dumps(content | {"sha256": _sum_content(content)}, indent=2)
    (folder / PROGRESS).write_text(text + "\n", encoding="utf-8")


def read_progress(folder: Path) -> dict[str, Any]:
    """Read what write_progress wrote, in this or any earlier format. Raises Damaged."""
    try:
        content = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except OSError as error:
        raise Damaged(f"{PROGRESS} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and isinstance(content.get("format"), int):
        written_sum = content.pop("sha256", None)
        if written_sum == _sum_content(content):
            return content
    raise Damaged(f"{PROGRESS} is not as it was written")


def sum_files(folder: Path, names: Iterable[str]) -> Sums:
    """Return size and SHA-256 of each of these files. Raises OSError."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(threads.map(lambda name: (name, _sum_file(folder / name)), names))


def damage(checkpoint: Path, share: int = 0, shares: int = 1) -> str | None:
    """Return the first damage of progress.json, and of part number `share` of `shares` parts of the other files; or
    None. The files of another format, which RunDescription.check refuses, are not looked at."""
    try:
        content = read_progress(checkpoint)
    except Damaged as damaged:
        return str(damaged)
    written: Sums = content["files"] if content["format"] == FORMAT else {}

    def check_file(name: str) -> str | None:
        path, (size, _) = checkpoint / name, written[name]
        try:
            is_whole = path.stat().st_size == size and _sum_file(path) == written[name]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None if is_whole else f"{name} is not as it was written"

    names = sorted(written, key=lambda name: (written[name][0], name), reverse=True)
    with ThreadPoolExecutor(_THREADS) as threads:
        return next(filter(None, threads.map(check_file, names[share::shares])), None)


def _sum_file(path: Path) -> list:
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        return [file.tell(), digest.hexdigest()]


def _sum_content(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Format one record and the line's end. NaN and infinite numbers become null: JSON has neither."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(finite, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"


def read_record(raw: bytes) -> dict[str, Any] | None:
    """Parse a line of a run's files; return None if it is damaged or has no step."""
    try:
        record = json.loads(raw.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**53 else None


def read_records(path: Path, marker: bytes = b"") -> list[dict[str, Any]]:
    """Return the records of a run's file whose lines have these bytes; none without the file."""
    try:
        with open(path, "rb") as lines:
            return [record for line in lines if marker in line and (record := read_record(line)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []


def with_error(row: Mapping[str, float], name: str) -> str:
    """Format a metric and, if the row has it, its standard error: 0.250 ± 0.054."""
    error = row.get(f"{name}_se")
    return f"{row[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def keep_pictures(folder: Path, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the pictures of records into `folder`/pictures. Return the records with these files' names instead."""
    return [
        record | {"pictures": [_keep_picture(folder / PICTURES, picture) for picture in pictures]}
        if (pictures := record.get("pictures"))
        else record
        for record in records
    ]


def _keep_picture(folder: Path, picture: bytes) -> str:
    kind = next(kind for kind, first in SIGNATURES.items() if picture.startswith(first))
    name = f"{hashlib.sha256(picture).hexdigest()[:16]}.{kind}"
    if not (folder / name).exists():
        folder.mkdir(exist_ok=True)
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_bytes(picture)
        os.replace(unfinished, folder / name)  # a run that is killed leaves no half of a picture
    return name

"""Writes and reads files with a JSON record per line: metrics.jsonl, completions.jsonl, bad_steps.jsonl, starts.jsonl.
Pictures of recorded prompts are files beside the record, named by a digest of their bytes and written once."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo.wire.picture_files import SIGNATURES

FOLDER = "pictures"


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
    if not path.exists():
        return []
    with open(path, "rb") as lines:
        return [record for line in lines if marker in line and (record := read_record(line)) is not None]


def with_error(row: Mapping[str, float], name: str) -> str:
    """Format a metric and, if the row has it, its standard error: 0.250 ± 0.054."""
    error = row.get(f"{name}_se")
    return f"{row[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def keep_pictures(folder: Path, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the pictures of records into `folder`/pictures. Return the records with these files' names instead."""
    return [
        record | {"pictures": [_keep(folder / FOLDER, picture) for picture in pictures]}
        if (pictures := record.get("pictures"))
        else record
        for record in records
    ]


def _keep(folder: Path, picture: bytes) -> str:
    kind = next(kind for kind, first in SIGNATURES.items() if picture.startswith(first))
    name = f"{hashlib.sha256(picture).hexdigest()[:16]}.{kind}"
    if not (folder / name).exists():
        folder.mkdir(exist_ok=True)
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_bytes(picture)
        os.replace(unfinished, folder / name)  # a run that is killed leaves no half of a picture
    return name

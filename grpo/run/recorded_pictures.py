"""The pictures of recorded prompts: files beside the record, each written once and told by a digest of its bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo.wire.pictures import SIGNATURES

FOLDER = "pictures"


def keep_pictures(folder: Path, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the pictures that records have as bytes into `folder`/pictures. Return the records with the names of these
    files as `pictures`; a record of a prompt without pictures has no such field, before and after."""
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

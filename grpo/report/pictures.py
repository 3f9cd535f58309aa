"""The recorded pictures that a page shows: small enough to stand in it."""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from grpo.report.read import Run, every_nth
from grpo.run.recorded_pictures import FOLDER

LARGEST_FILE = 40_000
"""bytes of a picture's file that is shown as it is; a larger one is made smaller"""
LONGEST_SIDE = 512
"""pixels of the longer side of a picture that is made smaller"""


def read_pictures(run: Run, blocks: Sequence[dict[str, Any]], size: int) -> dict[str, str]:
    """Return the pictures that blocks of `read_completions` name, as data URLs by name, in about `size` bytes.

    Where not all fit, those of training are left out evenly. Adds to the run's notes what is not shown.
    """
    # The same held-out problems are in every evaluation, and in each step of training there are others.
    names = {
        name: block["phase"]
        for phase in ("train", "eval")
        for block in blocks
        if block["phase"] == phase
        for group in block["groups"]
        for name in group.get("pictures", ())
    }
    sizes = {name: _size(run.folder / FOLDER / name) * 4 // 3 for name in names}
    shown: list[str] = []
    for phase in ("eval", "train"):
        of_phase = {name: sizes[name] for name in names if names[name] == phase and sizes[name]}
        shown += every_nth(of_phase, size - sum(sizes[name] for name in shown)) if of_phase else []
    urls = {name: url for name in shown if (url := _data_url(run.folder / FOLDER / name))}
    if len(urls) < len(names):
        run.notes.append(f"{len(urls)} of {len(names)} pictures are shown")
    return urls


def _size(path: Path) -> int:
    """Return about how many bytes a picture takes in a page; 0 where it is not there."""
    return min(path.stat().st_size, LARGEST_FILE) if path.is_file() else 0


@functools.lru_cache(maxsize=1000)
def _data_url(path: Path) -> str:
    """Return a picture for a page, empty where it cannot be read."""
    data, kind = path.read_bytes(), "png" if path.suffix == ".png" else "jpeg"
    if len(data) > LARGEST_FILE:
        try:
            with Image.open(path, formats=("PNG", "JPEG")) as picture:
                small = ImageOps.exif_transpose(picture).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # what Pillow raises of damaged files
            return ""
        small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        file = BytesIO()
        small.save(file, "JPEG", quality=80)
        data, kind = file.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

"""Finds a dataset's column of pictures, and reads those of a row as the bytes of PNG or JPEG files."""

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from grpo.config.errors import require
from grpo.config.sampling_settings import DataSection
from grpo.wire.logprobs import MOST_PICTURES, MOST_PIXELS_IN_ALL
from grpo.wire.picture_files import MOST_PIXELS, SIGNATURES, EncodedPicture, PictureError, check_picture

MOST_BYTES = 60 << 20  # most bytes of a prompt's pictures: a reference server takes requests of 64 MiB
DEFAULT_COLUMNS = "image", "images"
# What a PNG file can hold: any other mode is converted as it would be when the file is read.
_PNG_MODES = {"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"}


def find_column(config: DataSection, names: list[str]) -> str | None:
    """Return the column that has the pictures, or None. Raises ConfigError if the name is of none, or two would do."""
    name, others = config.dataset_image_column, {config.dataset_prompt_column, config.dataset_answer_column}
    usable = [column for column in names if column not in others]
    found = [column for column in usable if column == name or (name is None and column in DEFAULT_COLUMNS)]
    if len(found) > 1 or (name and not found):
        columns = f"beside prompts and answers {config.dataset_name} has the columns {', '.join(usable) or 'none'}"
        config.refuse("dataset_image_column", f"{columns}: name the one that has pictures, or '' for none")
    return found[0] if found else None


def decoded_columns(rows) -> list[str]:
    """Return the columns of a `datasets.Dataset` that it would decode to images, which take much memory."""
    return [name for name, feature in rows.features.items() if _undecoded(feature) != feature]


class PictureColumn:
    """A dataset's column of pictures: those of the prompts, or others that reward functions are given."""

    def __init__(self, name: str, dataset_name: str):
        self.name = name
        place = Path(dataset_name).expanduser()
        self._folder = place if place.is_dir() else place.parent if place.is_file() else Path()

    def without_decoding(self, rows):
        """Return the `datasets.Dataset` with each picture of the column as its file's bytes, or its path."""
        feature = _undecoded(rows.features[self.name])
        return rows if feature == rows.features[self.name] else rows.cast_column(self.name, feature)

    def read(self, value: Any, index: int) -> EncodedPicture | list[EncodedPicture] | None:
        """Return a row's pictures in the form that the dataset has: one, a list of them, or None. Raises PictureError
        for one that cannot be read, ConfigError for a value that is no picture."""
        if isinstance(value, list):
            return [self._read(item, index) for item in value if item]
        return self._read(value, index) if value else None

    def _read(self, value: Any, index: int) -> EncodedPicture:
        if isinstance(value, dict) and {*value} <= {"bytes", "path"}:
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, str):
            value = self._read_file(value, index)
        reason = f"row {index} (from 0) has {str(value)[:80]}: a picture is a file's bytes, or its path: name a column "
        require(isinstance(value, bytes | Image.Image), "dataset_image_column", self.name, f"{reason}of such, or ''")
        return EncodedPicture(encode_picture(value))

    def _read_file(self, path: str, index: int) -> bytes:
        reason = f"row {index} (from 0) has {path[:80]}: nothing is fetched from the network: download the pictures"
        require("://" not in path, "dataset_image_column", self.name, f"{reason} and give their paths, or set it to ''")
        try:
            return (self._folder / Path(path).expanduser()).read_bytes()
        except (OSError, ValueError, RuntimeError) as error:  # ValueError: a null character; RuntimeError: ~nobody
            reason = getattr(error, "strerror", None) or str(error)
            raise PictureError(f"cannot be read ({path[-80:]}: {reason})") from error


def encode_picture(picture: bytes | Image.Image) -> bytes:
    """Return a picture, or a file's content, as the content of a PNG or JPEG file, which stays as it is. Raises
    PictureError as `check_picture`, or if it cannot be converted."""
    is_encoded = isinstance(picture, bytes) and picture.startswith(tuple(SIGNATURES.values()))
    data = picture if is_encoded else _to_png(picture)
    check_picture(data)
    return data


def check_prompt(pictures: Sequence[bytes]) -> None:
    """Raise PictureError if a reference server would refuse a request with all pictures of a prompt."""
    count, size = len(pictures), sum(map(len, pictures))
    pixels = sum(width * height for width, height in map(check_picture, pictures))
    if count > MOST_PICTURES or pixels > MOST_PIXELS_IN_ALL or size > MOST_BYTES:
        raise PictureError(
            f"is among {count} with {pixels} pixels and {size} bytes: a prompt may have {MOST_PICTURES}, "
            f"{MOST_PIXELS_IN_ALL} and {MOST_BYTES}"
        )


def _undecoded(feature):
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    inner = getattr(feature, "feature", None)  # a list's
    if isinstance(inner, datasets.Image):
        return replace(feature, feature=datasets.Image(decode=False))
    return feature


def _to_png(picture: bytes | Image.Image) -> bytes:
    """Return a picture, of a file in any format that Pillow reads, as a PNG file of the same pixels."""
    file = BytesIO()
    try:
        opened = Image.open(BytesIO(picture)) if isinstance(picture, bytes) else picture
        if opened.width * opened.height > MOST_PIXELS or getattr(opened, "is_animated", False):
            raise PictureError(f"is animated, or has more than {MOST_PIXELS} pixels")
        turned = ImageOps.exif_transpose(opened)
        (turned if turned.mode in _PNG_MODES else turned.convert("RGB")).save(file, "PNG", compress_level=1)
    except (PictureError, MemoryError):
        raise
    except Exception as error:  # Pillow raises a dozen kinds of error for damaged files
        raise PictureError(f"cannot be converted to PNG ({str(error)[:100] or type(error).__name__})") from error
    return file.getvalue()

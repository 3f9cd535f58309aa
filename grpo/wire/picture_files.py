"""A prompt with pictures: its token ids, and the encoded pictures that some of the ids stand for."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any

import numpy as np
from PIL import ImageOps
from PIL.Image import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "jpg": b"\xff\xd8\xff"}  # the first bytes of a picture's file, by suffix


class PicturedPrompt(Sequence[int]):
    """Token ids, to be used as a list of them, with the pictures in their order in the prompt, each the bytes of a PNG
    or JPEG file, which the model's own processor turns into pixels (grpo/model/pictures.py)."""

    def __init__(self, ids: Sequence[int] | np.ndarray, pictures: Sequence[bytes]):
        self._ids = np.asarray(ids, np.int32)
        self.pictures = tuple(pictures)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place):
        return self._ids[place].tolist()

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self._ids.astype(dtype or np.int32)

    def __eq__(self, other) -> bool:
        return isinstance(other, PicturedPrompt) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> bytes:
        """A digest that no other prompt has."""
        digest = hashlib.sha256(self._ids.tobytes())
        for picture in self.pictures:
            digest.update(hashlib.sha256(picture).digest())
        return digest.digest()


def pictures_of(prompt: Sequence[int] | np.ndarray) -> tuple[bytes, ...]:
    """Return the pictures of a prompt, none for plain ids."""
    return prompt.pictures if isinstance(prompt, PicturedPrompt) else ()


def with_more(prompt: list[int] | PicturedPrompt, ids: Sequence[int]) -> list[int] | PicturedPrompt:
    """Return the prompt with these ids after it."""
    longer = [*prompt, *ids]
    return PicturedPrompt(longer, prompt.pictures) if isinstance(prompt, PicturedPrompt) else longer


def key_of(prompt: Sequence[int] | np.ndarray) -> bytes:
    """Return a key that no other prompt has: equal ids with other pictures are another prompt."""
    return prompt.digest if isinstance(prompt, PicturedPrompt) else np.asarray(prompt, np.int32).tobytes()


# Files, perhaps a stranger's, are checked before they are decoded.

MOST_PIXELS = 1 << 26  # most pixels of a picture: a square of 8,192; decoded it takes 256 MiB, whatever its file has
_MOST_READS = 1 << 17
"""most times that Pillow may read from a file: enough for a PNG of 64 MiB in chunks of 8 KiB. Of a file of empty chunks
it would keep millions, a hundred bytes each"""
_MOST_SCANS = 200  # of a progressive JPEG, an honest one has about ten: each takes as long as the whole picture
_PIXELS_PER_BYTE = 512
"""most pixels of a JPEG for each of its bytes: a block of 8 x 8 has a bit at least. libjpeg fills the rest of a shorter
file with grey, so that a file of a kilobyte would cost as much as the largest picture"""
# By the first bytes, and not by Image.open, whose readers of other formats would see a stranger's bytes too. A JPEG
# with several pictures (MPO, of many cameras) is read as its first.
_READERS = {SIGNATURES["png"]: PngImageFile, SIGNATURES["jpg"]: JpegImageFile}


class PictureError(ValueError):
    """A picture that cannot be used. The text says why, as the rest of a sentence: "is damaged (...)"."""

    def __init__(self, reason: str, is_large: bool = False):
        super().__init__(reason)
        self.is_large = is_large  # whether it only has too many pixels


class _File(BytesIO):
    """A picture's bytes, read so often at most."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads > _MOST_READS:
            raise PictureError("is damaged (it consists of too many parts)")
        return super().read(size)


def check_picture(data: bytes) -> tuple[int, int]:
    """Return (width, height) of a picture's header. Raises PictureError for a file that is no PNG or JPEG, is animated,
    or has more than MOST_PIXELS pixels. One whose end is missing or damaged passes: `open_picture` finds that."""
    return _read_header(data).size


def open_picture(data: bytes) -> Image:
    """Return a picture decoded to RGB, and turned as its camera was held, as transformers' `load_image` does. Raises
    PictureError: as `check_picture`, and for a file that is cut off or damaged."""
    picture = _read_header(data)
    with _refused_damage():
        ImageOps.exif_transpose(picture, in_place=True)
        return picture.convert("RGB")


@dataclass(frozen=True)
class EncodedPicture:
    """A picture of a dataset's column. Its deep copy is a PIL image: reward functions get copies."""

    file: bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> Image:
        """Return the picture in its file's mode, turned as its camera was held, as `datasets` does; decode it later."""
        picture = _read_header(self.file)
        if "exif" in picture.info:
            ImageOps.exif_transpose(picture, in_place=True)
        return picture


def _read_header(data: bytes) -> ImageFile:
    reader = next((reader for first, reader in _READERS.items() if data.startswith(first)), None)
    if reader is None:
        raise PictureError("is no PNG or JPEG file")
    with _refused_damage():
        picture = reader(_File(data))
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise PictureError(f"has {width} x {height} pixels: the limit is {MOST_PIXELS} in all", is_large=True)
    if getattr(picture, "is_animated", False):
        raise PictureError("is animated: use a file of one picture")
    if reader is JpegImageFile:
        if width * height > _PIXELS_PER_BYTE * len(data):
            raise PictureError(f"is damaged (it has {len(data)} bytes for {width} x {height} pixels)")
        if data.count(b"\xff\xda") > _MOST_SCANS:
            raise PictureError("is damaged (it consists of too many parts)")
    return picture


@contextmanager
def _refused_damage() -> Iterator[None]:
    try:
        yield
    except (MemoryError, PictureError):
        raise
    # Pillow raises a dozen kinds of error for damaged files, struct.error and SyntaxError among them.
    except Exception as error:
        raise PictureError(f"is damaged ({str(error)[:100] or type(error).__name__})") from error

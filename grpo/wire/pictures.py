"""A prompt with pictures: its token ids, and the encoded pictures that some of the ids stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "jpg": b"\xff\xd8\xff"}
"""the first bytes of the kinds of files that pictures are sent as, by suffix"""


class PicturedPrompt(Sequence[int]):
    """Token ids, to be used as a list of them, with the pictures in their order in the prompt.

    A picture is the bytes of a PNG or JPEG file: small, the same on both sides of the wire, and turned into pixels by
    the model's own processor (grpo/model/pictures.py) where they are needed.
    """

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

    def __repr__(self) -> str:
        return f"PicturedPrompt({len(self)} ids, {len(self.pictures)} pictures)"

    @cached_property
    def digest(self) -> bytes:
        """Return what tells the prompt from every other one."""
        digest = hashlib.sha256(self._ids.tobytes())
        for picture in self.pictures:
            digest.update(hashlib.sha256(picture).digest())
        return digest.digest()


def pictures_of(prompt: Sequence[int] | np.ndarray) -> tuple[bytes, ...]:
    """Return the pictures of a prompt, none for plain ids."""
    return prompt.pictures if isinstance(prompt, PicturedPrompt) else ()


def with_more(prompt: list[int] | PicturedPrompt, ids: Sequence[int]) -> list[int] | PicturedPrompt:
    """Return a prompt that goes on with these ids."""
    longer = [*prompt, *ids]
    return PicturedPrompt(longer, prompt.pictures) if isinstance(prompt, PicturedPrompt) else longer


def key_of(prompt: Sequence[int] | np.ndarray) -> bytes:
    """Return what tells a prompt from every other one: equal ids with other pictures are another prompt."""
    return prompt.digest if isinstance(prompt, PicturedPrompt) else np.asarray(prompt, np.int32).tobytes()

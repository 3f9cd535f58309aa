"""What a trainer says to a server whose weights it replaces, in the query of its requests (docs/protocol.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo.wire.errors import malformed


@dataclass(frozen=True)
class Piece:
    """Where a body of `POST /v1/weights` belongs: some bytes of a safetensors file with a model's weights."""

    sha256: str
    """of the whole file, in hex: which upload this is"""
    size: int
    """of the whole file, in bytes"""
    offset: int
    """of the body's first byte in the file"""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Piece:
        """From a request's query. Raises ProtocolError, 400."""
        return cls(_hex(query, "sha256", 64), _count(query, "size"), _count(query, "offset"))


@dataclass(frozen=True)
class Commit:
    """What `POST /v1/weights/commit` asks: these uploaded weights for that model, which then is another."""

    sha256: str
    replaces: str
    """fingerprint of the model that is served until then"""
    becomes: str
    """fingerprint of what it must be afterwards"""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Commit:
        """From a request's query. Raises ProtocolError, 400."""
        return cls(_hex(query, "sha256", 64), _hex(query, "replaces", 16), _hex(query, "becomes", 16))


def _hex(query: Mapping[str, str], name: str, digits: int) -> str:
    text = query.get(name, "")
    if len(text) != digits or set(text) - set("0123456789abcdef"):
        raise malformed(f"{name}={text[:80]!r} in the query: send {digits} hex digits")
    return text


def _count(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise malformed(f"{name}={text[:80]!r} in the query: send a number of bytes")
    return int(text)

"""The queries of the requests that replace a server's weights (docs/protocol.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo.wire.json_fields import check_hex
from grpo.wire.refusals import malformed


@dataclass(frozen=True)
class FilePart:
    """The query of `POST /v1/weights`: where its body belongs in a safetensors file with a model's weights."""

    sha256: str
    """SHA-256 of the whole file, in hex; it identifies the upload"""
    size: int
    """bytes of the whole file"""
    offset: int
    """place of the body's first byte in the file"""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> FilePart:
        """Read a request's query. Raises ProtocolError, 400."""
        return cls(check_hex("sha256", query.get("sha256"), 64), _count(query, "size"), _count(query, "offset"))


@dataclass(frozen=True)
class Commit:
    """The query of `POST /v1/weights/commit`: replace a model's weights by these uploaded ones."""

    sha256: str
    """SHA-256 of the uploaded file, in hex"""
    replaces: str
    """fingerprint of the model that is served before"""
    becomes: str
    """fingerprint that the model must have afterwards"""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Commit:
        """Read a request's query. Raises ProtocolError, 400."""
        digits = {"sha256": 64, "replaces": 16, "becomes": 16}
        return cls(*(check_hex(name, query.get(name), count) for name, count in digits.items()))


def _count(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise malformed(f"{name}={text[:80]!r} in the query: send a number of bytes")
    return int(text)

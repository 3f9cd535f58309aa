"""The tensors of a safetensors body: one dimension each, checked, and copied out of it. Files sent in pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from grpo.wire.json_fields import check_hex
from grpo.wire.refusals import malformed, refuse_doubles

LONGEST_HEADER = 64 << 10
"""most bytes of the header of a body, an honest one has less than 2,000: JSON takes many times its size in memory, and
every other thread waits while it is parsed"""


class HeaderError(ValueError):
    """Bytes that are no safetensors header, or not the header of this data."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    dtype: str  # dtype as the file names it: F32
    shape: tuple[int, ...]
    start: int  # place of its first byte in the file

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def data_begins(first: bytes, size: int, longest: int) -> int:
    """Return at which byte the tensors begin, from the first eight of `size` bytes. Raises HeaderError for a header of
    more than `longest` or `size` bytes."""
    length, limit = int.from_bytes(first, "little"), max(0, min(longest, size - 8))
    if length > limit:
        raise HeaderError(f"not safetensors: a header of {length} bytes; {limit} are the most")
    return 8 + length


def read_header(text: bytes, size: int, widths: Mapping[str, int]) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors and the metadata of a header, checked in full, or raise HeaderError. `size` is the number of
    bytes of the whole file, `widths` the bytes of a value of each allowed dtype."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=refuse_doubles)
        json.dumps(header, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"not safetensors: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise HeaderError("not safetensors: its header is not a JSON object")
    metadata = {} if (found := header.pop("__metadata__", None)) is None else found
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("not safetensors: its __metadata__ is not of texts")
    base = 8 + len(text)
    entries = {name: _read_entry(name, fields, base, widths) for name, fields in header.items()}
    starts, ends = [], [base]
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.count)):
        starts.append(entry.start)
        ends.append(entry.start + entry.count * widths[entry.dtype])
    if [*starts, size] != ends:
        raise HeaderError(f"not safetensors: its tensors do not fill its {size} bytes, each byte once")
    return entries, metadata


def _read_entry(name: str, fields: object, base: int, widths: Mapping[str, int]) -> Entry:
    complete = isinstance(fields, dict) and fields.keys() == {"dtype", "shape", "data_offsets"}
    dtype, shape, offsets = (fields[key] for key in ("dtype", "shape", "data_offsets")) if complete else (None,) * 3
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise HeaderError(f"tensor {name[:100]!r} needs dtype, shape and two data_offsets, and nothing else")
    if not isinstance(dtype, str) or dtype not in widths:
        raise HeaderError(f"tensor {name[:100]!r} has dtype {str(dtype)[:20]!r}: send {' or '.join(widths)}")
    # Few dimensions: the product of a million would take for ever.
    plausible = len(shape) <= 8 and all(type(number) is int and 0 <= number < 2**63 for number in (*shape, *offsets))
    if not plausible or offsets[1] - offsets[0] != math.prod(shape) * widths[dtype]:
        raise HeaderError(f"tensor {name[:100]!r}: its shape and its data_offsets do not fit together")
    return Entry(dtype, tuple(shape), base + offsets[0])


_DTYPES = {"I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "U8": np.dtype("u1")}
_WIDTHS = {name: dtype.itemsize for name, dtype in _DTYPES.items()}


def read_tensors(body: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors and the metadata of a body. Raises ProtocolError, 400."""
    try:
        begins = data_begins(body[:8], len(body), LONGEST_HEADER)
        entries, metadata = read_header(body[8:begins], len(body), _WIDTHS)
    except HeaderError as error:
        raise malformed(str(error)) from error
    tensors = {}
    for name, entry in entries.items():
        if len(entry.shape) != 1:
            raise malformed(f"tensor {name!r} has {len(entry.shape)} dimensions: send one dimension")
        # A copy: the data need not be aligned, and the rest of the body can be freed.
        tensors[name] = np.frombuffer(body, _DTYPES[entry.dtype], count=entry.count, offset=entry.start).copy()
    return tensors, metadata


def _of_dtype(tensors: dict[str, np.ndarray], name: str, dtype: type) -> np.ndarray:
    """Return the tensor of this name. Raises ProtocolError, 400, for a missing one or another dtype."""
    if name not in tensors:
        raise malformed(f"tensor {name!r} is missing")
    if tensors[name].dtype != dtype:
        raise malformed(f"tensor {name!r} is {tensors[name].dtype}: send {dtype.__name__}")
    return tensors[name]


int32, float32, uint8 = (partial(_of_dtype, dtype=dtype) for dtype in (np.int32, np.float32, np.uint8))


# The queries of the requests that replace a server's weights, or bring a pool a file (docs/protocol.md).


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """The query of `POST /v1/weights`: where its body belongs in a safetensors file with a model's weights."""

    sha256: str  # SHA-256 of the whole file, in hex; it identifies the upload
    size: int  # bytes of the whole file
    offset: int  # place of the body's first byte in the file

    @classmethod
    def of(cls, query: Mapping[str, str]) -> FilePart:
        """Read a request's query. Raises ProtocolError, 400."""
        sha256 = check_hex("sha256", query.get("sha256"), 64)
        return cls(sha256=sha256, size=_count(query, "size"), offset=_count(query, "offset"))


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The query of `POST /v1/weights/commit`: replace a model's weights by these uploaded ones."""

    sha256: str  # SHA-256 of the uploaded file, in hex
    replaces: str  # fingerprint of the model that is served before
    becomes: str  # fingerprint that the model must have afterwards

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Commit:
        """Read a request's query. Raises ProtocolError, 400."""
        return cls(
            sha256=check_hex("sha256", query.get("sha256"), 64),
            replaces=check_hex("replaces", query.get("replaces"), 16),
            becomes=check_hex("becomes", query.get("becomes"), 16),
        )


def _count(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise malformed(f"{name}={text[:80]!r} in the query: send a number of bytes")
    return int(text)

"""The header of a safetensors file or body, which may be a stranger's: how long it may be, and what must be in it.

The format is https://github.com/huggingface/safetensors#format: eight bytes of little-endian header length, JSON, the
tensors' data. What another reader could take in another way (a name twice, a field that is not in the format) is
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

LONGEST_HEADER = 64 << 10
"""bytes of a request's or an answer's: an honest one has less than 2,000. JSON costs many times its size, and while it
is read every other thread waits."""


class HeaderError(ValueError):
    """It is no safetensors header, or not one of this data. The message says what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    dtype: str
    """as in the file: F32"""
    shape: tuple[int, ...]
    start: int
    """of its first byte in the file"""

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def data_begins(first: bytes, size: int, longest: int) -> int:
    """From the first eight of `size` bytes: at which byte the tensors begin.

    Raises HeaderError for a header of more than `longest` bytes, or than there are.
    """
    length, most = int.from_bytes(first, "little"), max(0, min(longest, size - 8))
    if length > most:
        raise HeaderError(f"not safetensors: a header of {length} bytes; {most} are the most")
    return 8 + length


def read_header(text: bytes, size: int, widths: Mapping[str, int]) -> tuple[dict[str, Entry], dict[str, str]]:
    """A header's text -> its tensors and its metadata, checked in full.

    `size` is what the whole has in bytes, `widths` how many bytes a value of each allowed dtype takes. Raises
    HeaderError.
    """
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_doubles)
        json.dumps(header, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"not safetensors: its header is not JSON ({type(error).__name__})") from error
    if not isinstance(header, dict):
        raise HeaderError("not safetensors: its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
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


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise HeaderError("not safetensors: its header has a name twice")
    return fields


def _read_entry(name: str, fields: object, base: int, widths: Mapping[str, int]) -> Entry:
    named = isinstance(fields, dict) and fields.keys() == {"dtype", "shape", "data_offsets"}
    dtype, shape, offsets = (fields[key] for key in ("dtype", "shape", "data_offsets")) if named else (None,) * 3
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise HeaderError(f"tensor {name[:100]!r} needs dtype, shape and two data_offsets, and nothing else")
    if not isinstance(dtype, str) or dtype not in widths:
        raise HeaderError(f"tensor {name[:100]!r} has dtype {str(dtype)[:20]!r}: send {' or '.join(widths)}")
    # Few dimensions: the product of a million of them would take for ever.
    sane = len(shape) <= 8 and all(type(number) is int and 0 <= number < 2**63 for number in (*shape, *offsets))
    if not sane or offsets[1] - offsets[0] != math.prod(shape) * widths[dtype]:
        raise HeaderError(f"tensor {name[:100]!r}: its shape and its data_offsets do not fit together")
    return Entry(dtype, tuple(shape), base + offsets[0])

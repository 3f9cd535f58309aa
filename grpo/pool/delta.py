"""Deltas: a delta turns one safetensors file into another of the same tensors. After a small step of training few
16-bit words differ: PULSE (Miahi and Belilovsky, arXiv:2602.03839) counts one in a hundred.

The file begins with eight bytes of little-endian header length and a JSON header: `format`, SHA-256 of both files
(`old` and `new`), and their `size` in bytes. Then comes each block of 2**20 16-bit words of the files, their headers
included: three uint32 (compressed bytes, gaps, changed words), then a zlib stream of

- a uint16 for each changed word: the number of unchanged words before it; 65535 for 65535 of them and more to come;
- the changed words: new minus old (modulo 2**16), with the sign in the lowest bit. These are small: a weight mostly
  moves to the next number of its dtype.

Of both, all low bytes come before all high bytes. Everything is read, computed and written block by block.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

_FORMAT = 1
_BLOCK = 1 << 20  # words
_SKIP = 65535
_COUNTS = struct.Struct("<III")
_LONGEST_HEADER = 1024
_LONGEST_TENSORS = 16 << 20  # most bytes of a safetensors file's header
_THREADS = min(4, os.cpu_count() or 1)

Item, Result = TypeVar("Item"), TypeVar("Result")


class DeltaError(ValueError):
    """A delta that cannot be made or applied. The message begins with the file's path."""


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hex."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def make_delta(
    old: Path,
    new: Path,
    delta: Path,
    old_sha256: str | None = None,
    new_sha256: str | None = None,
    limit: int | None = None,
) -> int | None:
    """Write the delta from `old` to `new`. Return its bytes, or None if they would be above `limit`.

    A SHA-256 that the caller knows is not computed again. Raises DeltaError if the files have different tensors,
    OSError. No file is left then, nor with None.
    """
    unfinished = delta.with_name(delta.name + ".unfinished")
    with open(old, "rb") as old_file, open(new, "rb") as new_file:
        size = os.fstat(new_file.fileno()).st_size
        if os.fstat(old_file.fileno()).st_size != size or _read_tensors(old_file) != _read_tensors(new_file):
            raise DeltaError(f"{new}: no delta leads to it: {old} has other tensors")
        if size % 2:
            raise DeltaError(f"{new}: no delta leads to it: {size} bytes are not 16-bit words")
        sha256s = {"old": old_sha256 or sha256_of(old), "new": new_sha256 or sha256_of(new)}
        header = json.dumps({"format": _FORMAT, **sha256s, "size": size}).encode()

        def encode(part: range) -> bytes:
            return _encode(_read_words(old_file, part), _read_words(new_file, part))

        try:
            with open(unfinished, "wb") as file, closing(_in_order(encode, _blocks(size))) as encoded:
                file.write(len(header).to_bytes(8, "little") + header)
                for block in encoded:
                    file.write(block)
                    if limit is not None and file.tell() > limit:
                        return None
                length = file.tell()
            os.replace(unfinished, delta)
        finally:
            unfinished.unlink(missing_ok=True)
    return length


def apply_delta(old: Path, delta: Path, new: Path, old_sha256: str | None = None, new_sha256: str | None = None) -> str:
    """Apply a delta to `old`, write the result to `new`, and return its SHA-256 in hex.

    `old` is hashed only without `old_sha256`; `new_sha256` is the expected result. The delta may be a stranger's:
    memory does not grow with it, and `new` is as long as `old`. Raises DeltaError if the delta is damaged or leads from
    or to another file, OSError; `new` is then unchanged.
    """
    unfinished = new.with_name(new.name + ".unfinished")
    with open(old, "rb") as old_file, open(delta, "rb") as delta_file:
        try:
            header = _read_header(delta_file)
            size = os.fstat(old_file.fileno()).st_size
            if header["size"] != size or header["old"] != (old_sha256 or sha256_of(old)):
                raise DeltaError(f"it leads from another file than {old}")
            if new_sha256 not in (None, header["new"]):
                raise DeltaError(f"it leads to another file than the one with SHA-256 {new_sha256}")

            def decode(block: tuple[range, int, int, bytes]) -> np.ndarray:
                return _decode(_read_words(old_file, block[0]), *block[1:])

            digest = hashlib.sha256()
            with open(unfinished, "wb") as file, closing(_in_order(decode, _read_blocks(delta_file, size))) as decoded:
                for words in decoded:
                    file.write(words.data)
                    digest.update(words.data)
            if digest.hexdigest() != header["new"]:
                raise DeltaError("damaged (the result has another SHA-256)")
            os.replace(unfinished, new)
        except DeltaError as error:
            raise DeltaError(f"{delta}: cannot be applied: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)
    return digest.hexdigest()


def _blocks(size: int) -> Iterator[range]:
    return (range(start, min(start + _BLOCK, size // 2)) for start in range(0, size // 2, _BLOCK))


def _in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield `function(item)` of each item, in order. A few threads compute a few items ahead."""
    with ThreadPoolExecutor(_THREADS) as pool:
        running: deque[Future[Result]] = deque()
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > _THREADS:
                yield running.popleft().result()
        yield from (future.result() for future in running)


def _read_words(file: BinaryIO, part: range) -> np.ndarray:
    """Read 16-bit words, from any thread."""
    words = np.empty(len(part), "<u2")
    if os.preadv(file.fileno(), [words], 2 * part.start) != words.nbytes:
        raise DeltaError(f"{file.name}: damaged (it became shorter while it was read)")
    return words


def _read_tensors(file: BinaryIO) -> bytes:
    """Read the header of a safetensors file as it stands. Raises DeltaError."""
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if length <= _LONGEST_TENSORS else b""
    if not text or len(text) < length:
        raise DeltaError(f"{file.name}: no delta leads to it: not safetensors")
    return text


def _encode(old: np.ndarray, new: np.ndarray) -> bytes:
    """Return a block of a delta from the same words of both files."""
    places = np.flatnonzero(old != new)
    if not len(places):
        return _COUNTS.pack(0, 0, 0)
    gaps = np.diff(places, prepend=-1) - 1
    skips = gaps // _SKIP
    each = np.full(len(gaps) + skips.sum(), _SKIP, "<u2")
    each[np.cumsum(skips + 1) - 1] = gaps - skips * _SKIP
    steps = (new[places] - old[places]).view("<i2")
    signed = ((steps << 1) ^ (steps >> 15)).view("<u2")
    # Runs and Huffman codes alone: gaps do not repeat, and looking for repetitions takes longer and finds fewer runs.
    stream = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    data = stream.compress(_planes(each)) + stream.compress(_planes(signed)) + stream.flush()
    return _COUNTS.pack(len(data), len(each), len(signed)) + data


def _decode(old: np.ndarray, gaps: int, changed: int, data: bytes) -> np.ndarray:
    """Return the new words of a block. Raises DeltaError."""
    if not gaps and not changed and not data:
        return old
    length, stream = 2 * (gaps + changed), zlib.decompressobj()
    try:
        raw = stream.decompress(data, length + 1)
    except zlib.error as error:
        raise DeltaError(f"damaged ({error})") from error
    if len(raw) != length or not stream.eof or stream.unused_data:
        raise DeltaError("damaged (a block has another length)")
    each, signed = _words(raw[: 2 * gaps]), _words(raw[2 * gaps :])
    is_last = each != _SKIP
    places = np.cumsum(each.astype(np.int64) + is_last)[is_last] - 1
    if len(places) != changed or (changed and places[-1] >= len(old)):
        raise DeltaError("damaged (a changed word has no place)")
    old[places] += (signed >> 1) ^ -(signed & 1)
    return old


def _planes(words: np.ndarray) -> bytes:
    """Return all low bytes, then all high bytes."""
    return words.view(np.uint8).reshape(-1, 2).T.tobytes()


def _words(planes: bytes) -> np.ndarray:
    return np.frombuffer(planes, np.uint8).reshape(2, -1).T.copy().view("<u2")[:, 0]


def _read_header(file: BinaryIO) -> dict:
    """Read a delta's header. Raises DeltaError."""
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length)) if length <= _LONGEST_HEADER else None
    except (ValueError, RecursionError) as error:
        raise DeltaError(f"not a delta (its header is not JSON: {type(error).__name__})") from error
    if not isinstance(header, dict) or header.keys() != {"format", "old", "new", "size"}:
        raise DeltaError("not a delta (its header lacks fields)")
    if header["format"] != _FORMAT:
        raise DeltaError(f"not a delta (of format {str(header['format'])[:20]}; this program reads {_FORMAT})")
    return header


def _read_blocks(file: BinaryIO, size: int) -> Iterator[tuple[range, int, int, bytes]]:
    """Yield each block's words, counts and compressed bytes. Raises DeltaError."""
    for part in _blocks(size):
        counts = file.read(_COUNTS.size)
        if len(counts) < _COUNTS.size:
            raise DeltaError("damaged (it ends early)")
        compressed, gaps, changed = _COUNTS.unpack(counts)
        # zlib adds at most 5 bytes for each 16 kB, and a few around them.
        if changed > len(part) or gaps > changed + len(part) // _SKIP or compressed > 4 * len(part) + 65536:
            raise DeltaError("damaged (a block is too long)")
        data = file.read(compressed)
        if len(data) < compressed:
            raise DeltaError("damaged (it ends early)")
        yield part, gaps, changed, data
    if file.read(1):
        raise DeltaError("damaged (bytes follow its last block)")

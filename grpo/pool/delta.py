"""Deltas: a delta turns one safetensors file into another of the same tensors. After a small step of training few
16-bit words differ: PULSE (Miahi and Belilovsky, arXiv:2602.03839) counts one in a hundred.

After a header comes each block of 2**20 16-bit words of the files, their headers included: a little-endian uint32, the
number of compressed bytes (0 for equal words), then a zlib stream of

- a uint32 for each changed word: its distance from the changed word before it, of the first from the block's begin;
- a uint16 for each: new minus old (modulo 2**16), with the sign in the lowest bit. These are small: a weight mostly
  moves to the next number of its dtype.

Of both, all lowest bytes come first, then all next ones. Everything is read, computed and written block by block.
"""

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import numpy as np

# Format 1 had such a header, and names this one in its refusal.
_TEXT = b'{"format": 2, "old": "", "new": "", "size": 0}'
_HEADER = len(_TEXT).to_bytes(8, "little") + _TEXT
_BLOCK = 1 << 20  # words
_THREADS = min(4, len(os.sched_getaffinity(0)))


class DeltaError(Exception):
    """A delta that cannot be applied. The message begins with the file's path."""


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_delta(old: Path, new: Path, *, delta: Path, limit: int) -> int | None:
    """Write the delta between files of the same tensors. Return its bytes; None, and no file, if above `limit`."""
    unfinished = delta.with_name(delta.name + ".unfinished")
    with open(old, "rb") as old_file, open(new, "rb") as new_file:

        def encode(part: range) -> bytes:
            return _encode(_read_words(old_file, part), _read_words(new_file, part))

        try:
            with open(unfinished, "wb") as file, closing(_in_order(encode, _blocks(new_file))) as blocks:
                file.write(_HEADER)
                for data in blocks:
                    file.write(len(data).to_bytes(4, "little") + data)
                    if file.tell() > limit:
                        return None
                length = file.tell()
            os.replace(unfinished, delta)
        finally:
            unfinished.unlink(missing_ok=True)
    return length


def apply_delta(old: Path, delta: Path, *, new: Path, sha256: str) -> None:
    """Apply a delta to `old`, and write the result, which must have this SHA-256, to `new`. The delta may be a
    stranger's: memory does not grow with it, and `new` is as long as `old`. Raises DeltaError if it is damaged or leads
    from or to another file, OSError; `new` is then unchanged."""
    unfinished, digest = new.with_name(new.name + ".unfinished"), hashlib.sha256()
    with open(old, "rb") as old_file, open(delta, "rb") as delta_file:

        def read_blocks() -> Iterator[tuple[range, bytes]]:
            for part in _blocks(old_file):
                length = int.from_bytes(delta_file.read(4), "little")
                yield part, delta_file.read(min(length, 8 * _BLOCK))  # honest ones have 6 bytes a word at most

        def decode(block: tuple[range, bytes]) -> np.ndarray:
            return _decode(_read_words(old_file, block[0]), block[1])

        try:
            if delta_file.read(len(_HEADER)) != _HEADER:
                raise DeltaError(f"{delta}: no delta of format 2, which this program reads")
            with open(unfinished, "wb") as file, closing(_in_order(decode, read_blocks())) as decoded:
                for words in decoded:
                    file.write(words.data)
                    digest.update(words.data)
            if digest.hexdigest() != sha256:
                raise ValueError("the result has another SHA-256")
            os.replace(unfinished, new)
        except (zlib.error, ValueError, IndexError) as error:
            raise DeltaError(f"{delta}: damaged, or not from {old} ({error})") from error
        finally:
            unfinished.unlink(missing_ok=True)


def _blocks(file: BinaryIO) -> Iterator[range]:
    words = os.fstat(file.fileno()).st_size // 2
    return (range(start, min(start + _BLOCK, words)) for start in range(0, words, _BLOCK))


def _in_order(function: Callable, items: Iterable) -> Iterator:
    """Yield `function(item)` of each item, in order. A few threads compute a few items ahead."""
    with ThreadPoolExecutor(_THREADS) as pool:
        running: deque[Future] = deque()
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > _THREADS:
                yield running.popleft().result()
        yield from (future.result() for future in running)


def _read_words(file: BinaryIO, part: range) -> np.ndarray:
    """Read 16-bit words, from any thread."""
    words = np.empty(len(part), "<u2")
    os.preadv(file.fileno(), [words], 2 * part.start)
    return words


def _encode(old: np.ndarray, new: np.ndarray) -> bytes:
    places = np.flatnonzero(old != new)
    if not len(places):
        return b""
    steps = (new[places] - old[places]).view("<i2")
    # Runs and Huffman codes alone: gaps do not repeat, and looking for repetitions takes longer and finds fewer runs.
    stream = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    gaps = np.diff(places, prepend=0).astype("<u4")
    return stream.compress(_planes(gaps)) + stream.compress(_planes((steps << 1) ^ (steps >> 15))) + stream.flush()


def _decode(old: np.ndarray, data: bytes) -> np.ndarray:
    """Return the new words of a block. Raises zlib.error, ValueError or IndexError for data that no delta has."""
    if data:
        planes = np.frombuffer(zlib.decompressobj().decompress(data, 6 * len(old)), np.uint8).reshape(6, -1)
        gaps, signed = _numbers(planes[:4], "<u4"), _numbers(planes[4:], "<u2")
        old[np.cumsum(gaps, dtype=np.int64)] += (signed >> 1) ^ -(signed & 1)
    return old


def _planes(numbers: np.ndarray) -> bytes:
    """Return all lowest bytes, then all next ones."""
    return numbers.view(np.uint8).reshape(len(numbers), -1).T.tobytes()


def _numbers(planes: np.ndarray, dtype: str) -> np.ndarray:
    return planes.T.copy().view(dtype)[:, 0]

"""A model's weights in one safetensors file, written and read a block at a time: memory never holds a second model.

The format is https://github.com/huggingface/safetensors#format; the file is one that `from_pretrained` reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

_LONGEST_HEADER = 16 << 20
_BLOCK = 4 << 20  # values that are in memory at a time
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class WeightsError(ValueError):
    """A file does not hold a model's weights. The message says what is wrong with it."""


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What makes up a saved model: parameters and saved buffers of floating point, tied ones once. Not copies."""
    saved = model.state_dict().keys()
    everything = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in everything if name in saved and tensor.is_floating_point()}


def blocks(count: int) -> Iterator[slice]:
    """So many values, in parts of which a few fit the memory at a time."""
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


def sample(count: int) -> slice:
    """Which of so many values stand for all of them in a fingerprint: 64 at most."""
    step = max(1, count // 64)
    return slice(0, 64 * step, step)


def write_weights(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    change: Callable[[str, slice, torch.Tensor], torch.Tensor] | None = None,
) -> str:
    """Write tensors to a file, in `dtype` or each in its own. Returns the file's SHA-256 in hex.

    `change(name, part, values)` may give other values for the flat part of a tensor.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        kept = dtype or tensor.dtype
        start, end = end, end + tensor.numel() * kept.itemsize
        header[name] = {"dtype": _NAMES[kept], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data: bytes | memoryview) -> None:
            file.write(data)
            digest.update(data)

        write(len(text).to_bytes(8, "little") + text)
        for name, tensor in weights.items():
            flat = tensor.flatten()
            for part in blocks(len(flat)):
                values = flat[part].to("cpu", dtype or tensor.dtype)
                if change is not None:
                    values = change(name, part, values)
                write(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """of its first byte in the file"""

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class WeightsFile:
    """Reads parts of tensors from a safetensors file. Only its header need be there when it is made."""

    def __init__(self, file: BinaryIO, size: int):
        """`size` is what the file has when it is whole. Raises WeightsError if its header does not fit that."""
        self._file = file
        self.entries = _read_header(self._pread(self.header_size(self._pread(8, 0)) - 8, 8), size)

    @staticmethod
    def header_size(first: bytes) -> int:
        """From a file's first eight bytes: at which byte its tensors begin. Raises WeightsError."""
        length = int.from_bytes(first, "little")
        if length > _LONGEST_HEADER:
            raise WeightsError(f"not safetensors: a header of {length} bytes; {_LONGEST_HEADER} are the most")
        return 8 + length

    def read(self, name: str, part: slice) -> torch.Tensor:
        """What `tensor.flatten()[part]` gives of a tensor, on the CPU."""
        entry = self.entries[name]
        width, places = entry.dtype.itemsize, range(entry.count)[part]
        if not places:
            return torch.empty(0, dtype=entry.dtype)
        if places.step == 1:
            data = self._pread(len(places) * width, entry.start + places.start * width)
        else:
            data = b"".join(self._pread(width, entry.start + place * width) for place in places)
        return torch.frombuffer(bytearray(data), dtype=entry.dtype)

    def _pread(self, count: int, offset: int) -> bytes:
        data = os.pread(self._file.fileno(), count, offset)
        if len(data) < count:
            raise WeightsError("the file is shorter than its header says")
        return data


def _read_header(text: bytes, size: int) -> dict[str, Entry]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"not safetensors: its header is not JSON ({type(error).__name__})") from error
    if not isinstance(header, dict):
        raise WeightsError("not safetensors: its header is not a JSON object")
    header.pop("__metadata__", None)
    base = 8 + len(text)
    entries = {name: _read_entry(name, said, base) for name, said in header.items()}
    starts, ends = [], [base]
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.count)):
        starts.append(entry.start)
        ends.append(entry.start + entry.count * entry.dtype.itemsize)
    if [*starts, size] != ends:
        raise WeightsError(f"not safetensors: its tensors do not fill its {size} bytes, each byte once")
    return entries


def _read_entry(name: str, said: object, base: int) -> Entry:
    try:
        dtype, shape, (start, end) = str(said["dtype"]), tuple(said["shape"]), said["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"tensor {name[:100]!r} needs dtype, shape and two data_offsets") from error
    if dtype not in _DTYPES:
        raise WeightsError(f"tensor {name[:100]!r} has dtype {dtype[:20]!r}: send {', '.join(_DTYPES)}")
    # Few dimensions: the product of a million of them would take for ever.
    sane = len(shape) <= 8 and all(type(number) is int and 0 <= number < 2**63 for number in (*shape, start, end))
    if not sane or end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise WeightsError(f"tensor {name[:100]!r}: its shape and its data_offsets do not fit together")
    return Entry(_DTYPES[dtype], shape, base + start)

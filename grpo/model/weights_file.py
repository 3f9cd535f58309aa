"""Write and read a model's weights in one safetensors file, a block at a time: memory never holds a second model.

The format is https://github.com/huggingface/safetensors#format; the file is one that `from_pretrained` reads.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from grpo.model.sharded import detached
from grpo.wire.tensors import HeaderError, data_begins, read_header

_LONGEST_HEADER = 16 << 20
_BLOCK = 4 << 20  # values of a block
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
Change = Callable[[str, slice, Tensor], Tensor]  # of a name and a slice of its flattened tensor, with the values there


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a saved model, not copies: floating-point parameters and saved buffers, tied ones once. Of
    a sharded model they are to be read by copy_whole."""
    saved = model.state_dict().keys()
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: detached(tensor) for name, tensor in tensors if name in saved and tensor.is_floating_point()}


def blocks(count: int) -> Iterator[slice]:
    """Split `count` values into slices small enough that a few of them fit in memory."""
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


def sample(count: int) -> slice:
    """Return the slice of `count` values that a fingerprint is computed from: at most 64 values."""
    step = max(1, count // 64)
    return slice(0, 64 * step, step)


def write_weights(
    path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None, change: Change | None = None
) -> str:
    """Write tensors to a file, in `dtype` or each in its own and `change`d, and return the file's SHA-256 in hex."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, tensor in weights.items():
        file_dtype = dtype or tensor.dtype
        start, stop = stop, stop + tensor.numel() * file_dtype.itemsize
        header[name] = {"dtype": _NAMES[file_dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
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


class WeightsFile:
    """A safetensors file of which parts of tensors can be read. At first only its header must be complete."""

    def __init__(self, file: BinaryIO, size: int):
        """`size`: bytes of the complete file. Raises HeaderError if the header does not fit it."""
        self._file = file
        text = self._pread(data_begins(self._pread(8, 0), size, _LONGEST_HEADER) - 8, 8)
        self.entries, _ = read_header(text, size, {name: dtype.itemsize for name, dtype in _DTYPES.items()})

    def read(self, name: str, part: slice) -> Tensor:
        """Read `tensor.flatten()[part]` of the named tensor, to the CPU."""
        entry = self.entries[name]
        dtype, places = _DTYPES[entry.dtype], range(entry.count)[part]
        width = dtype.itemsize
        if not places:
            return torch.empty(0, dtype=dtype)
        if places.step == 1:
            data = self._pread(len(places) * width, entry.start + places.start * width)
        else:
            data = b"".join(self._pread(width, entry.start + place * width) for place in places)
        return torch.frombuffer(bytearray(data), dtype=dtype)

    def close(self) -> None:
        self._file.close()

    def _pread(self, count: int, offset: int) -> bytes:
        data = os.pread(self._file.fileno(), count, offset)
        if len(data) < count:
            raise HeaderError("the file is shorter than its header says")
        return data

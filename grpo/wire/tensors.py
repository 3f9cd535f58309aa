"""The tensors of a safetensors body: one dimension each, checked, and copied out of it."""

from __future__ import annotations

import numpy as np

from grpo.wire.errors import malformed
from grpo.wire.tensor_header import LONGEST_HEADER, HeaderError, data_begins, read_header

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
        tensors[name] = np.frombuffer(body, _DTYPES[entry.dtype], entry.count, entry.start).copy()
    return tensors, metadata


def int32(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the int32 tensor of this name. Raises ProtocolError, 400, where it is missing or of another dtype."""
    return _of_dtype(tensors, name, np.int32)


def float32(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the float32 tensor of this name. Raises ProtocolError, 400, where it is missing or of another dtype."""
    return _of_dtype(tensors, name, np.float32)


def uint8(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the uint8 tensor of this name. Raises ProtocolError, 400, where it is missing or of another dtype."""
    return _of_dtype(tensors, name, np.uint8)


def _of_dtype(tensors: dict[str, np.ndarray], name: str, dtype: type) -> np.ndarray:
    if name not in tensors:
        raise malformed(f"tensor {name!r} is missing")
    if tensors[name].dtype != dtype:
        raise malformed(f"tensor {name!r} is {tensors[name].dtype}: send {dtype.__name__}")
    return tensors[name]

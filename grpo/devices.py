"""The device that a process works on."""

from __future__ import annotations

import re

import torch

_OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED|ALLOCATION_FAILED|can't allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the memory of the host or of a card was too small.

    Only torch's own allocator has a class for it. cuBLAS, cuDNN, NCCL and CUDA itself take memory beside it, and their
    errors are RuntimeErrors, as a broken device's are.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None

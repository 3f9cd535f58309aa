"""Which device a process takes, what it refuses, what an error of it means. No card is needed: what depends on one is
computed from its names and numbers."""

import pytest
import torch

from grpo.devices import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("NCCL error ... Last error:\nCuda failure 2 'out of memory'"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_what_is_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        ValueError("out of memory"),
    ],
)
def test_what_is_another_failure(error):
    assert not is_out_of_memory(error)

"""What the Triton kernels have in common."""

import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(values, like):
    """Round to the dtype of a pointer: as float32."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def dot(left, right, total, PRECISION: tl.constexpr):
    """Add a product of matrices to `total`, float32."""
    if IS_INTERPRETED:  # its own takes no bfloat16; products of 16 bits are exact in float32
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return tl.dot(left, right, total, input_precision=PRECISION)


def precision(states: Tensor) -> str:
    """Return the `input_precision` of tl.dot: products of float32 would be rounded to 10 bits."""
    return "ieee" if states.element_size() == 4 else "tf32"

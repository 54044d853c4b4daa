"""What kernels do before they store a number in FP8; the meaning is ``quantise`` of ``kernels/fp8.py``."""

import triton
import triton.language as tl


@triton.jit
def saturated(x, scale):
    """``x / scale`` in fp32 within what e4m3fn holds, so that the cast that follows never makes a NaN."""
    return tl.minimum(tl.maximum(x.to(tl.float32) / scale, -448.0), 448.0)

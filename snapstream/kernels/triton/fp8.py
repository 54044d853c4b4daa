"""The step before a kernel stores a number in FP8; its meaning is ``quantise`` of ``kernels/fp8.py``."""

import triton
import triton.language as tl


@triton.jit
def saturated(x, scale):
    """``x / scale`` in fp32 within what e4m3fn holds, so that the cast that follows never makes a NaN."""
    # div_rn: a plain division may be off by two units in the last place
    return tl.minimum(tl.maximum(tl.div_rn(x.to(tl.float32), scale), -448.0), 448.0)

"""``silu(gate) * up`` of one fused projection, fp32 inside, one read and one write."""

import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

BLOCK = 1024


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``BLOCK`` columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    at = x_ptr + token * stride_x + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=mask, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * SIZE + column, (silu * up).to(out_ptr.dtype.element_ty), mask=mask)


@custom_op("snapstream::swiglu", mutates_args=())
def swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``."""
    return launch_swiglu(gate_up)


@swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def launch_swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``: ``[T, 2I]`` (gate | up) -> ``[T, I]``."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        raise ValueError("swiglu needs rows whose elements are contiguous")
    out = gate_up.new_empty(num_tokens, size)
    if num_tokens:
        swiglu_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
            gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=BLOCK, num_warps=4
        )
    return out

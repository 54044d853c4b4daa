"""``silu(gate) * up`` of one fused projection, fp32 inside, one read and one write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from snapstream.kernels.triton import configs
from snapstream.kernels.triton.one_token import overlaps, wait_for_inputs

# Root-mean-square norm of a row per program, alone or after adding to the residual stream (one read, one write).


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr,
    eps,
    stride_x, stride_residual,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``out = x / rms(x) * weight`` of one row; with a residual, ``residual += x`` first and that sum is normed."""
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    mask = column < SIZE
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at = residual_ptr + row * stride_residual + column
        x += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, rounded, mask=mask)
        x = rounded.to(tl.float32)  # the norm of the rounded sum, which the next layer will read
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + column, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=mask)


def launch_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The norm of ``x``, or after ``residual += x`` that of the sum; rows whose elements are contiguous."""
    num_rows, size = x.shape
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("RMSNorm needs rows whose elements are contiguous")
    out = x.new_empty(num_rows, size)
    strides = [size if tensor is None or num_rows == 1 else tensor.stride(0) for tensor in (x, residual)]  # one: any
    early = overlaps(x.device)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            x, x if residual is None else residual, weight, out,
            eps,
            *strides,
            SIZE=size, SIZE_PAD=configs.power_of_two(size), HAS_RESIDUAL=residual is not None, EARLY=early,
            num_warps=configs.norm_warps(size), launch_pdl=early,
        )  # fmt: skip
    return out


@custom_op("snapstream::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    return launch_rms_norm(x, None, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("snapstream::add_rms_norm", mutates_args=("residual",))
def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.add_rms_norm``."""
    return launch_rms_norm(x, residual, weight, eps)


@add_rms_norm.register_fake
def _(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


BLOCK = 1024


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """``BLOCK`` columns of one token."""
    wait_for_inputs(EARLY)
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
    out, early = gate_up.new_empty(num_tokens, size), overlaps(gate_up.device)
    if num_tokens:
        swiglu_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
            gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=BLOCK, EARLY=early, num_warps=4, launch_pdl=early
        )
    return out

"""Norms, SwiGLU and dense products of up to 16 tokens, and how kernels of a decode step overlap.

A decode step is bound by the bytes of its weights, and between two kernels memory is idle: the last programs of one
end, the first of the next start and wait for their first bytes. So the step of a single row has few kernels, the norm
before a product, SwiGLU or the sum of the residual stream in the same one, and each is launched while the one before
it still runs (programmatic dependent launch, compute capability 9): it loads its first weights, which no kernel writes,
and only then waits for its inputs. That is what looping over layers in one kernel saves (arXiv 2410.23668, section 4),
without a barrier. Products of 2 to 16 tokens start early too, and where a matrix has few rows each program takes a part
of its columns: the norm that follows adds up the parts. More tokens are multiplied by cuBLAS.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snapstream.kernels.triton import configs

Norm = tuple[Tensor, float]  # weight [D] of an RMSNorm, and its eps
SWIGLU_BLOCK = 1024
OVERLAPS = (9, 0)  # compute capability from which a kernel can start before the one in front has ended


def overlaps(device: torch.device) -> bool:
    """Whether kernels on ``device`` start early. Kernels of other libraries between them begin and end as ever."""
    return device.type == "cuda" and _overlaps(device.index or 0)


@cache
def _overlaps(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= OVERLAPS


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Let the next kernel start, and wait until all kernels before this one have ended.

    Every program of a kernel that is launched early calls it, before it writes or ends: the next one relies on this one
    having waited. In front of the call a kernel may read what no kernel writes, or only kernels that never start early
    and come before all that do, and nothing else.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def one_linear_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr,
    eps,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` outputs; ``BLOCK_K`` columns of their rows at a time, the next ones loading meanwhile.

    The norm is one factor of all sums; the same loop adds up its squares.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < NUM_OUT
    column = tl.arange(0, BLOCK_K)
    at = weight_ptr + row.to(tl.int64)[:, None] * NUM_IN + column[None, :]
    up_at = at + NUM_OUT * NUM_IN
    mask = is_row[:, None] & (column < NUM_IN)[None, :]
    weight = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    up = weight
    if GATED:
        up = tl.load(up_at, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(EARLY)
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in range(0, NUM_IN, BLOCK_K):
        is_in = start + column < NUM_IN
        x = tl.load(x_ptr + start + column, mask=is_in, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + column, mask=is_in, other=0.0).to(tl.float32)
        own, own_up = weight, up
        if NUM_IN > BLOCK_K:
            following = start + BLOCK_K
            mask = is_row[:, None] & (following + column < NUM_IN)[None, :]
            weight = tl.load(at + following, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                up = tl.load(up_at + following, mask=mask, other=0.0, eviction_policy="evict_first")
        sums += own.to(tl.float32) * x[None, :]
        if GATED:
            up_sums += own_up.to(tl.float32) * x[None, :]
    out, up_out = tl.sum(sums, 1), tl.sum(up_sums, 1)
    if HAS_NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / NUM_IN + eps)
        out *= inverse
        up_out *= inverse
    if HAS_BIAS:
        out += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
        if GATED:
            up_out += tl.load(bias_ptr + NUM_OUT + row, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * up_out
    if ADDS:
        out += tl.load(out_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=is_row)


def one_linear(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, gated: bool
) -> Tensor:  # fmt: skip
    """See ``reference.one_linear``."""
    return launch_one_linear(x, norm if norm is None else (norm, eps), weight, bias, gated=gated)


def add_one_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """See ``reference.add_one_linear``."""
    launch_one_linear(x, None, weight, bias, residual=residual)


def launch_one_linear(
    x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, *,
    gated: bool = False,
) -> Tensor:  # fmt: skip
    """See ``reference.one_linear``, or ``add_one_linear`` with ``residual``, which is returned. Rows are contiguous."""
    num_rows, num_in = weight.shape
    num_out = num_rows // (2 if gated else 1)
    if x.stride(1) != 1 or not weight.is_contiguous() or (residual is not None and residual.stride(1) != 1):
        raise ValueError("a product of one token needs a contiguous matrix, and rows of contiguous elements")
    out = x.new_empty(1, num_out) if residual is None else residual
    cut, early = configs.one_launch(num_in), overlaps(x.device)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    one_linear_kernel[(triton.cdiv(num_out, cut.rows),)](
        x, norm_weight, weight, weight if bias is None else bias, out,
        eps,
        NUM_IN=num_in, NUM_OUT=num_out, BLOCK_N=cut.rows, BLOCK_K=cut.block, HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None, GATED=gated, ADDS=residual is not None, EARLY=early, num_warps=cut.num_warps,
        launch_pdl=early,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def few_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    num_tokens, num_out, num_in, split_len,
    stride_x,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``ROWS`` outputs of all tokens over ``split_len`` columns, a multiple of ``BLOCK``: out ``[splits, T, O]``."""
    split = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token, column = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    is_row, is_token = row < num_out, token < num_tokens
    begin = split * split_len
    end = tl.minimum(begin + split_len, num_in)
    wait_for_inputs(EARLY)
    weight_at = weight_ptr + row[:, None] * num_in + column[None, :]
    x_at = x_ptr + token[:, None] * stride_x + column[None, :]
    sums = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        is_in = (start + column < num_in)[None, :]
        weight = tl.load(weight_at + start, mask=is_row[:, None] & is_in, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at + start, mask=is_token[:, None] & is_in, other=0.0)
        sums = tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row, mask=is_row & (split == 0), other=0.0).to(tl.float32)
        sums += bias[:, None]
    out_at = out_ptr + (split * num_tokens + token)[:, None].to(tl.int64) * num_out + row[None, :]
    tl.store(out_at, tl.trans(sums).to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])


def few_linear(x: Tensor, weight: Tensor, bias: Tensor | None, in_parts: bool) -> Tensor:
    """See ``reference.few_linear``; at most ``configs.FEW_TOKENS`` tokens, whose elements are contiguous."""
    if x.stride(1) != 1 or not weight.is_contiguous() or len(x) > configs.FEW_TOKENS:
        raise ValueError(
            f"a product of {len(x)} tokens needs a contiguous matrix, and at most {configs.FEW_TOKENS} rows of "
            "contiguous elements"
        )
    (num_out, num_in), early = weight.shape, overlaps(x.device)
    cut, out = configs.few_launch(num_out, num_in, in_parts=in_parts), x.new_empty(len(x), num_out)
    if in_parts:
        out = x.new_empty(cut.num_splits, len(x), num_out, dtype=torch.float32)
    few_linear_kernel[(triton.cdiv(num_out, cut.rows), cut.num_splits)](
        x, weight, weight if bias is None else bias, out,
        len(x), num_out, num_in, cut.split_len,
        x.stride(0),
        TOKENS=configs.FEW_TOKENS, ROWS=cut.rows, BLOCK=cut.block, STAGES=cut.num_stages, HAS_BIAS=bias is not None,
        EARLY=early, num_warps=cut.num_warps, launch_pdl=early,
    )  # fmt: skip
    return out


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr,
    eps,
    stride_x, stride_part, stride_residual,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PARTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``out = x / rms(x) * weight`` of one row; with a residual, ``residual += x`` first and that sum is normed.

    ``x`` is the sum of ``PARTS``.
    """
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    mask = column < SIZE
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * stride_part + row * stride_x + column, mask=mask, other=0.0)
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
    """The norm of ``x``, or after ``residual += x`` that of the sum; rows whose elements are contiguous. With a
    residual x may be fp32 parts ``[S, T, D]``, whose sum is added.
    """
    num_parts = len(x) if x.dim() == 3 else 1
    num_rows, size = x.shape[-2:]
    if x.stride(-1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("RMSNorm needs rows whose elements are contiguous")
    out = (x if residual is None else residual).new_empty(num_rows, size)
    strides = [size if tensor is None or num_rows == 1 else tensor.stride(-2) for tensor in (x, residual)]  # one: any
    early = overlaps(x.device)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            x, x if residual is None else residual, weight, out,
            eps,
            strides[0], x.stride(0) if num_parts > 1 else size, strides[1],
            SIZE=size, SIZE_PAD=configs.power_of_two(size), PARTS=num_parts, HAS_RESIDUAL=residual is not None,
            EARLY=early, num_warps=configs.norm_warps(size if num_parts == 1 else 4 * size), launch_pdl=early,
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    return launch_rms_norm(x, None, weight, eps)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.add_rms_norm``."""
    return launch_rms_norm(x, residual, weight, eps)


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """``silu(gate) * up`` of ``BLOCK`` columns of one token; fp32 inside."""
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    at = x_ptr + token * stride_x + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=mask, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * SIZE + column, (silu * up).to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``: ``[T, 2I]`` (gate | up) -> ``[T, I]``."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        raise ValueError("swiglu needs rows whose elements are contiguous")
    out, early = gate_up.new_empty(num_tokens, size), overlaps(gate_up.device)
    if num_tokens:
        swiglu_kernel[(num_tokens, triton.cdiv(size, SWIGLU_BLOCK))](
            gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=SWIGLU_BLOCK, EARLY=early, num_warps=4, launch_pdl=early
        )
    return out

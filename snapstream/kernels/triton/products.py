"""Products with a matrix per expert: one launch reads the matrices of those experts that have rows, each in place.

Rows are sorted by expert. A program multiplies up to BLOCK_M rows of one expert with BLOCK_N rows of its matrix; which
expert and which rows follow in the kernel from where the experts' rows end, so the grid depends on shapes alone and a
captured graph serves every choice of experts. FP8 weights (e4m3) are widened in registers, exactly, and the product
with a block of 128 by 128 is times its scale: activations keep their dtype (W8A16). A plain FP8 matrix is a stack of
one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels import pytorch
from snapstream.kernels.reference import BLOCK
from snapstream.kernels.triton import configs

# Products of few tokens with int8 and int4 weights as they lie: codes and scales are read once and never stored wide.
#
# A step of the loop takes a fixed number of groups of each row and multiplies each group's codes, which are exact in
# any float dtype, with its part of the input (W8A16, W4A16); the sums of a group, fp32, are times its scale. Every
# group of a step has an accumulator of its own, and these are added at the end: warps share a row of weights, a grid
# of one program per tile of outputs needs no atomics, and the order of a row's sums depends on the size of the groups
# alone, never on the batch. ``kernels/groups.py`` says what codes mean.


@triton.jit
def as_floats(codes, OFFSET: tl.constexpr):
    """``codes`` of 8 bits less their offset, fp32: in the last bits of 2^23 a code is added, not converted, which a
    multiprocessor does at twice the rate."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit(do_not_specialize=["num_tokens"])
def code_linear_kernel(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, num_tokens, stride_x,
    NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """``BLOCK_M`` tokens times ``BLOCK_N`` rows, ``GROUPS`` groups of each row at a time."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_row = token < num_tokens, row < NUM_OUT
    own = tl.arange(0, GROUPS)
    number = tl.arange(0, GROUP)
    BYTES: tl.constexpr = GROUP * BITS // 8  # of a group
    OFFSET: tl.constexpr = 2 ** (BITS - 1)
    NUM_GROUPS: tl.constexpr = NUM_IN // GROUP
    byte = tl.arange(0, BYTES)
    x_at = x_ptr + token.to(tl.int64)[:, None, None] * stride_x + (own * GROUP)[None, :, None] + number[None, None, :]
    codes_at = codes_ptr + row.to(tl.int64)[:, None, None] * (NUM_GROUPS * BYTES)
    codes_at += (own * BYTES)[None, :, None] + byte[None, None, :]
    scale_at = scales_ptr + row.to(tl.int64)[None, :] * NUM_GROUPS + own[:, None]
    kind: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros((GROUPS, BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, NUM_GROUPS, GROUPS):
        is_group = start + own < NUM_GROUPS
        x = tl.load(x_at + start * GROUP, mask=is_token[:, None, None] & is_group[None, :, None], other=0.0)
        mask = is_row[:, None, None] & is_group[None, :, None]
        codes = tl.load(codes_at + start * BYTES, mask=mask, other=0, eviction_policy="evict_first")
        scale = tl.load(scale_at + start, mask=is_row[None, :] & is_group[:, None], other=0.0)
        if BITS == 8:
            numbers = as_floats(codes, OFFSET).to(kind)
            part = tl.dot(tl.permute(numbers, (1, 0, 2)), tl.permute(x, (1, 2, 0)), input_precision="ieee")
        else:  # the lower half of a byte stands before the upper one
            even, odd = tl.split(tl.reshape(x, (BLOCK_M, GROUPS, BYTES, 2)))
            low = as_floats(codes & 15, OFFSET).to(kind)
            high = as_floats(codes >> 4, OFFSET).to(kind)
            part = tl.dot(tl.permute(low, (1, 0, 2)), tl.permute(even, (1, 2, 0)), input_precision="ieee")
            part = tl.dot(tl.permute(high, (1, 0, 2)), tl.permute(odd, (1, 2, 0)), part, input_precision="ieee")
        total += part * scale.to(tl.float32)[:, :, None]
    out = tl.sum(total, 0)  # [BLOCK_N, BLOCK_M]
    if HAS_BIAS:
        out += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + token.to(tl.int64)[None, :] * NUM_OUT + row[:, None]
    tl.store(out_at, out.to(kind), mask=is_token[None, :] & is_row[:, None])


def code_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See ``reference.code_linear``; codes and scales contiguous, rows of ``x`` may lie apart."""
    (num_tokens, num_in), num_out = x.shape, codes.shape[0]
    if x.stride(1) != 1 or not codes.is_contiguous() or not scales.is_contiguous():
        raise ValueError("a product with codes needs contiguous codes and scales, and rows of contiguous elements")
    out = x.new_empty(num_tokens, num_out)
    if not num_tokens:
        return out
    group = num_in // scales.shape[1]
    cut = configs.code_launch(num_tokens, num_out, group, x.element_size())
    code_linear_kernel[(triton.cdiv(num_tokens, cut.tokens), triton.cdiv(num_out, cut.rows))](
        x, codes, scales, scales if bias is None else bias, out, num_tokens, x.stride(0),
        NUM_IN=num_in, NUM_OUT=num_out, GROUP=group, BITS=8 * codes.shape[1] // num_in, HAS_BIAS=bias is not None,
        BLOCK_M=cut.tokens, BLOCK_N=cut.rows, GROUPS=cut.block, num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out


MANY = 32  # rows per expert, on average, from which PyTorch's grouped product takes bf16: arithmetic counts there
_ALIGNED = 8  # numbers of bf16 in the 16 bytes that it wants between rows


@triton.jit
def grouped_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, ends_ptr, out_ptr, stride_x,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """One tile of the result; programs beyond the last tile of rows return."""
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PAD)
    is_expert = experts < NUM_EXPERTS
    stops = tl.load(ends_ptr + experts, mask=is_expert, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=is_expert & (experts > 0), other=0)
    tiles = tl.where(is_expert, (stops - starts + BLOCK_M - 1) // BLOCK_M, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)  # those whose tiles all lie before
    if expert >= NUM_EXPERTS:
        return
    here = experts == expert
    first = tl.sum(tl.where(here, starts + (tile - (upto - tiles)) * BLOCK_M, 0), 0)
    stop = tl.sum(tl.where(here, stops, 0), 0)

    row = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < stop, column < NUM_OUT
    x_at = x_ptr + row.to(tl.int64)[:, None] * stride_x
    weight_at = weight_ptr + expert.to(tl.int64) * NUM_OUT * NUM_IN + column.to(tl.int64)[:, None] * NUM_IN
    scales_in: tl.constexpr = (NUM_IN + SCALED - 1) // SCALED
    scales_out: tl.constexpr = (NUM_OUT + SCALED - 1) // SCALED
    scale_at = scale_ptr + (expert.to(tl.int64) * scales_out + tl.program_id(1) * BLOCK_N // SCALED) * scales_in
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, NUM_IN, BLOCK_K):
        i = start + tl.arange(0, BLOCK_K)
        is_in = i < NUM_IN
        x = tl.load(x_at + i[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        weight = tl.load(weight_at + i[None, :], mask=is_column[:, None] & is_in[None, :], other=0.0)  # [BLOCK_N, K]
        part = tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision="ieee")
        if IS_FP8:
            part *= tl.load(scale_at + start // SCALED)
        total += part
    out_at = out_ptr + row.to(tl.int64)[:, None] * NUM_OUT + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def grouped_linear(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    """See ``reference.grouped_linear``. Shapes decide between the kernel and PyTorch's own product."""
    is_aligned = weight.shape[1] % _ALIGNED == 0 and weight.shape[2] % _ALIGNED == 0
    if scale is None and x.dtype == torch.bfloat16 and is_aligned and len(x) >= MANY * len(weight):
        return pytorch.grouped_linear(x, weight, None, ends)
    return launch_grouped_linear(x, weight, scale, ends)


def launch_grouped_linear(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    """See ``reference.grouped_linear``; ``weight`` contiguous, rows of ``x`` may lie apart."""
    num_rows, (num_experts, num_out, num_in) = x.shape[0], weight.shape
    if x.stride(1) != 1 or not weight.is_contiguous() or (scale is not None and not scale.is_contiguous()):
        raise ValueError("a product with experts needs contiguous matrices, and rows whose elements are contiguous")
    out = x.new_empty(num_rows, num_out)
    if not num_rows:
        return out
    cut = configs.grouped_launch(x.element_size())
    # Every expert may end in a tile that is not full; there are no more tiles than rows either.
    most_tiles = min(num_rows, num_rows // cut.rows + min(num_experts, num_rows))
    grouped_linear_kernel[(most_tiles, triton.cdiv(num_out, cut.columns))](
        x, weight, weight if scale is None else scale, ends, out, x.stride(0),
        NUM_EXPERTS=num_experts, EXPERTS_PAD=configs.power_of_two(num_experts, 2), NUM_IN=num_in, NUM_OUT=num_out,
        BLOCK_M=cut.rows, BLOCK_N=cut.columns, BLOCK_K=cut.block, SCALED=BLOCK, IS_FP8=scale is not None,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out

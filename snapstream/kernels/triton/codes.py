"""Products of few tokens with int8 and int4 weights as they lie: codes and scales are read once and never stored wide.

A step of the loop takes a fixed number of groups of each row and multiplies each group's codes, which are exact in any
float dtype, with its part of the input (W8A16, W4A16); the sums of a group, fp32, are times its scale. Every group of a
step has an accumulator of its own, and these are added at the end: warps share a row of weights, a grid of one program
per tile of outputs needs no atomics, and the order of a row's sums depends on the size of the groups alone, never on
the batch. ``kernels/groups.py`` says what codes mean.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from snapstream.kernels.triton import configs


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


@custom_op("snapstream::code_linear", mutates_args=())
def code_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See ``reference.code_linear``."""
    return launch_code_linear(x, codes, scales, bias)


@code_linear.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


def launch_code_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
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

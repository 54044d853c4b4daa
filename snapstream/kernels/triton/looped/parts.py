"""What the stages of the looped kernel share: tiles of weights, products of few tokens, the norm of the residual.

A program owns tiles of ``BLOCK_ROWS`` weight rows, the same in every step, and sums a row's products in one order, so
results are the same bits from run to run. Activations are read past L1, which other programs' stores do not reach;
weights are read once and leave the caches first. What takes its index vectors from the caller, both forms of the kernel
use: Gluon wants to know how they lie over threads.
"""

import triton
import triton.language as tl


@triton.jit
def weight_block(matrix_ptr, row, begin, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Columns ``begin ..`` of weight rows ``row [R]``: ``[R, BLOCK_COLS]``, zero outside of the matrix."""
    col = begin + tl.arange(0, BLOCK_COLS)
    at = matrix_ptr + row[:, None].to(tl.int64) * COLS + col[None, :]
    mask = (row < ROWS)[:, None] & (col < COLS)[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def residual_block(residual_ptr, entry, col, BATCH: tl.constexpr, COLS: tl.constexpr):
    """Columns ``col`` of the residual stream ``[B, COLS]``, fp32 ``[B', C]``."""
    at = residual_ptr + entry[:, None] * COLS + col[None, :]
    return tl.load(at, mask=(entry < BATCH)[:, None] & (col < COLS)[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def inverse_norms(residual_ptr, entry, col, eps, BATCH: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """``1 / rms`` of the residual stream of each entry ``[B']``; every program computes all of them."""
    x = residual_block(residual_ptr, entry, col, BATCH, COLS)
    total = tl.sum(x * x, 1)
    for begin in range(BLOCK_COLS, COLS, BLOCK_COLS):
        x = residual_block(residual_ptr, entry, begin + col, BATCH, COLS)
        total += tl.sum(x * x, 1)
    return 1.0 / tl.sqrt(total / COLS + eps)


@triton.jit
def activations(x_ptr, norm_ptr, inverse, entry, col, BATCH: tl.constexpr, COLS: tl.constexpr, IS_NORMED: tl.constexpr):
    """Columns ``col`` of ``x [B, COLS]``, fp32 ``[B', C]``; with ``IS_NORMED`` times norm and inverse, rounded as the
    norm alone would be."""
    is_col = col < COLS
    at = x_ptr + entry[:, None] * COLS + col[None, :]
    x = tl.load(at, mask=(entry < BATCH)[:, None] & is_col[None, :], other=0.0, cache_modifier=".cg").to(tl.float32)
    if IS_NORMED:
        weight = tl.load(norm_ptr + col, mask=is_col, other=0.0)
        x = (x * inverse[:, None] * weight.to(tl.float32)[None, :]).to(norm_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def product(
    matrix_ptr, row, first, x_ptr, norm_ptr, inverse, entry,
    BATCH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    IS_NORMED: tl.constexpr, USES_DOT: tl.constexpr,
):  # fmt: skip
    """Weight rows ``row [R]`` times every entry, fp32 ``[R, B']``; ``first`` is their first block, loaded before.

    Few entries are multiplied number by number and added up at the end of each block; many go through tensor cores.
    """
    acc = tl.zeros((row.shape[0], entry.shape[0]), tl.float32)
    block = first
    for begin in range(0, COLS, BLOCK_COLS):
        col = begin + tl.arange(0, BLOCK_COLS)
        x = activations(x_ptr, norm_ptr, inverse, entry, col, BATCH, COLS, IS_NORMED)
        if USES_DOT:
            acc = tl.dot(block, tl.trans(x.to(block.dtype)), acc, input_precision="ieee")
        else:
            acc += tl.sum(block.to(tl.float32)[:, None, :] * x[None, :, :], 2)
        block = weight_block(matrix_ptr, row, begin + BLOCK_COLS, ROWS, COLS, BLOCK_COLS)
    return acc


@triton.jit
def with_bias(acc, bias_ptr, row, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """``acc [R, B']`` plus the bias of its rows."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row, mask=row < ROWS, other=0.0).to(tl.float32)[:, None]
    return acc

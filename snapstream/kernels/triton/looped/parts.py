"""What the stages of both forms of the looped kernel share: the norm of the residual, inputs of products, biases.

Activations are read past L1, which other programs' stores do not reach. Index vectors come from the caller: Gluon wants
to know how they lie over threads. ``blocks.py`` has the products of the first form, ``ring.py`` those of the second.
"""

import triton
import triton.language as tl


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
def with_bias(acc, bias_ptr, row, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """``acc [R, B']`` plus the bias of its rows."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row, mask=row < ROWS, other=0.0).to(tl.float32)[:, None]
    return acc

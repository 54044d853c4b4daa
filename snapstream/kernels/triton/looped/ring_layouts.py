"""How tiles of the ring form lie over threads: warps stand side by side along the columns of a block.

So every number of an input is read once per block however many weight rows use it, a thread keeps one sum for each row
and entry, and threads add up once per tile. With tensor cores each warp multiplies columns of its own. Plain numbers
in, Gluon's layouts out.
"""

from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

LANES = 32


@constexpr_function
def width(bits):
    """Numbers that one instruction copies: 16 bytes."""
    return 128 // bits


@constexpr_function
def _across(cols, warps, bits):
    return min(warps, max(cols // (LANES * (128 // bits)), 1))


@constexpr_function
def copied(cols, warps, bits):
    """Of a block ``[R, C]`` that is copied, and of inputs ``[B', C]``."""
    across = _across(cols, warps, bits)
    return gl.BlockedLayout([1, 128 // bits], [1, LANES], [warps // across, across], [1, 0])


@constexpr_function
def spread(cols, warps, bits):
    """Of products number by number ``[R, B', C / width, width]``: the last axis within a thread."""
    across = _across(cols, warps, bits)
    return gl.BlockedLayout([1, 1, 1, 128 // bits], [1, 1, LANES, 1], [warps // across, 1, across, 1], [3, 2, 1, 0])


@constexpr_function
def by_warp(warps):
    """Of products of tensor cores ``[warps, R, B']``, to be added over the first axis."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def result(cols, warps, bits, uses_dot):
    """Of a tile's sums ``[R, B']``."""
    if uses_dot:
        return gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8]))
    across = _across(cols, warps, bits)
    whole = gl.BlockedLayout([1, 1, 1, 128 // bits], [1, 1, LANES, 1], [warps // across, 1, across, 1], [3, 2, 1, 0])
    return gl.SliceLayout(2, gl.SliceLayout(3, whole))


@constexpr_function
def slots(warps):
    """Of heads and of slots of a row as they are read, ``[n, E]``."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@constexpr_function
def scored(warps, bits):
    """Of scores and of what is attended; numbers of 32 bits take no tensor cores."""
    if bits == 32:
        return gl.BlockedLayout([1, 1], [4, 8], [1, warps], [1, 0])
    return gl.NVMMADistributedLayout([2, 0], [1, warps], [16, 8])


@constexpr_function
def factor(index, warps, bits):
    """Of the factor ``index`` of such a product."""
    if bits == 32:
        return gl.DotOperandLayout(index, gl.BlockedLayout([1, 1], [4, 8], [1, warps], [1, 0]), 0)
    return gl.DotOperandLayout(index, gl.NVMMADistributedLayout([2, 0], [1, warps], [16, 8]), 2)

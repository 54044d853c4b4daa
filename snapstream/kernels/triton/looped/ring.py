"""Weights that arrive through a ring in shared memory: asynchronous copies that run ahead of what is multiplied.

``STAGES`` slots hold the next blocks of the stream (``stream.py``), whatever stage or layer they belong to. A slot is
filled again behind the barrier of threads that the next block needs anyway, so one barrier a block is enough; the slot
of a stage's last block is filled between the two halves of the grid's barrier, when all threads have left it. While a
program waits there, ``STAGES`` blocks are in flight or have arrived.

Invariant: a block is read once, from the slot into which it was copied, and no slot is copied into before its block has
been read (``tests/kernels/triton/looped/test_ring.py``). ``state`` is ``(slot to read, slot to fill, slots owed, place
of the next copy)``; ``source`` is ``(stacks, last layer, sizes)``.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from snapstream.kernels.triton.looped import ring_layouts, stream
from snapstream.kernels.triton.looped.parts import activations


@gluon.jit
def fill(
    ring, state, source,
    STAGES: gl.constexpr, NUM_PROGRAMS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr,
    ENDS: gl.constexpr,
):  # fmt: skip
    """Starts the next copy, of nothing behind the end of the stream; the state after it."""
    reads, fills, owed, place = state
    stacks, last_layer, sizes = source
    role = place[1]
    bits: gl.constexpr = ring.dtype.primitive_bitwidth
    layout: gl.constexpr = ring_layouts.copied(BLOCK_COLS, gl.num_warps(), bits)
    width: gl.constexpr = ring_layouts.width(bits)
    stack = stacks[0]
    if role == stream.O_ROLE:
        stack = stacks[1]
    if role == stream.GATE_UP_ROLE:
        stack = stacks[2]
    if role == stream.DOWN_ROLE:
        stack = stacks[3]
    if role >= stream.HEAD_ROLE:
        stack = stacks[4]
    rows, cols = stream.rows_of(role, sizes), stream.cols_of(role, sizes)
    row = place[2] * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, layout))
    col = stream.first_col(place, sizes, BLOCK_COLS) + gl.arange(0, BLOCK_COLS, gl.SliceLayout(0, layout))
    at = stack + stream.part_offset(place, sizes, BLOCK_COLS) + (row[:, None].to(gl.int64) * cols + col[None, :])
    at = gl.multiple_of(gl.max_contiguous(at, [1, width]), [16, 16])  # launch.py refuses columns that are not
    mask = (row < rows)[:, None] & gl.max_constancy(col < cols, [width])[None, :]
    async_copy.async_copy_global_to_shared(ring.index(fills), at, mask)
    async_copy.commit_group()
    fills = tl.where(fills == STAGES - 1, 0, fills + 1)
    place = stream.following(place, gl.program_id(0), last_layer, sizes, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)
    return reads, fills, 0, place


@gluon.jit
def inputs_at(
    begin, x_ptr, norm_ptr, inverse,
    BATCH: gl.constexpr, BATCH_PAD: gl.constexpr, COLS: gl.constexpr, BLOCK_COLS: gl.constexpr, BITS: gl.constexpr,
    IS_NORMED: gl.constexpr,
):  # fmt: skip
    """Columns ``begin ..`` of every entry, fp32 ``[B', C]``, as weights of ``BITS`` want them."""
    layout: gl.constexpr = ring_layouts.copied(BLOCK_COLS, gl.num_warps(), BITS)
    entry = gl.arange(0, BATCH_PAD, gl.SliceLayout(1, layout))
    col = begin + gl.arange(0, BLOCK_COLS, gl.SliceLayout(0, layout))
    return activations(x_ptr, norm_ptr, inverse, entry, col, BATCH, COLS, IS_NORMED)


@gluon.jit
def product(
    ring, state, source, x, x_ptr, norm_ptr, inverse,
    BATCH: gl.constexpr, BATCH_PAD: gl.constexpr, COLS: gl.constexpr, IS_NORMED: gl.constexpr, USES_DOT: gl.constexpr,
    STAGES: gl.constexpr, NUM_PROGRAMS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr,
    ENDS: gl.constexpr,
):  # fmt: skip
    """The next tile of the stream times every entry, fp32 ``[R, B']``, and the state after its blocks.

    ``x`` are the inputs of its first block; each block loads those of the next, the last one those of the next tile,
    which are returned too: they come from the second-level cache, and no block should wait for them.
    """
    warps: gl.constexpr = gl.num_warps()
    bits: gl.constexpr = ring.dtype.primitive_bitwidth
    width: gl.constexpr = ring_layouts.width(bits)
    spread: gl.constexpr = ring_layouts.spread(BLOCK_COLS, warps, bits)
    by_warp: gl.constexpr = ring_layouts.by_warp(warps)
    if USES_DOT:
        acc = gl.zeros([warps, BLOCK_ROWS, BATCH_PAD], gl.float32, by_warp)
    else:
        acc = gl.zeros([BLOCK_ROWS, BATCH_PAD, BLOCK_COLS // width], gl.float32, gl.SliceLayout(3, spread))
    for begin in range(0, COLS, BLOCK_COLS):
        next_begin = tl.where(begin + BLOCK_COLS < COLS, begin + BLOCK_COLS, 0)
        next_x = inputs_at(next_begin, x_ptr, norm_ptr, inverse, BATCH, BATCH_PAD, COLS, BLOCK_COLS, bits, IS_NORMED)
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()  # the copies of all threads are here, and all threads have read the block before
        if state[2] > 0:
            state = fill(ring, state, source, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)
        reads, fills, owed, place = state
        slot = ring.index(reads)
        if USES_DOT:
            own = slot.reshape([BLOCK_ROWS, warps, BLOCK_COLS // warps]).permute([1, 0, 2])
            weights = own.load(gl.DotOperandLayout(0, by_warp, 2))
            right = gl.permute(gl.reshape(x.to(ring.dtype), [BATCH_PAD, warps, BLOCK_COLS // warps]), [1, 2, 0])
            acc = mma_v2(weights, gl.convert_layout(right, gl.DotOperandLayout(1, by_warp, 2)), acc)
        else:
            weights = slot.reshape([BLOCK_ROWS, BLOCK_COLS // width, width]).load(gl.SliceLayout(1, spread))
            right = gl.reshape(x, [BATCH_PAD, BLOCK_COLS // width, width])
            right = gl.convert_layout(right, gl.SliceLayout(0, spread))
            acc += gl.sum(weights.to(gl.float32)[:, None, :, :] * right[None, :, :, :], 3)
        x = next_x
        state = (tl.where(reads == STAGES - 1, 0, reads + 1), fills, 1, place)
    total = gl.sum(acc, 0) if USES_DOT else gl.sum(acc, 2)
    return total, x, state

"""The persistent kernel over dense weights, in Gluon: one stream of weights through a ring, over stages and layers.

Stages, barrier, buffers and launch arguments are those of ``kernel.py``; what differs is how weights come. There a
program loads the first block of its next stage while it waits; here ``STAGES`` blocks are always on their way, through
every barrier and the attention between the products: the pipelined outer loop of arXiv 2410.23668, section 3, said
literally. Compiled, and run by a stand-in for Gluon that ignores layouts; never yet on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from snapstream.kernels.triton.looped.blocks import (
    activations,
    arrive,
    inverse_norms,
    leave,
    merge_splits,
    rotated,
    wait,
    with_bias,
)

# How tiles of the ring form lie over threads: warps stand side by side along the columns of a block.
#
# So every number of an input is read once per block however many weight rows use it, a thread keeps one sum for each
# row and entry, and threads add up once per tile. With tensor cores each warp multiplies columns of its own. Plain
# numbers in, Gluon's layouts out.

LANES = 32


@constexpr_function
def copy_width(bits):
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
def spread_layout(cols, warps, bits):
    """Of products number by number ``[R, B', C / width, width]``: the last axis within a thread."""
    across = _across(cols, warps, bits)
    return gl.BlockedLayout([1, 1, 1, 128 // bits], [1, 1, LANES, 1], [warps // across, 1, across, 1], [3, 2, 1, 0])


@constexpr_function
def warp_layout(warps):
    """Of products of tensor cores ``[warps, R, B']``, to be added over the first axis."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def result_layout(cols, warps, bits, uses_dot):
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
def scored_layout(warps, bits):
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


# The order in which a program reads its blocks of weights through a launch, as one stream over all stages and layers.
#
# A place in the stream is ``(layer, role, tile, block)``: of a layer, one of its four matrices; of the matrix, a tile
# of rows that is this program's own; of the tile, a block of columns - of gate and up first all blocks of gate, then
# those of up. Behind the last layer stands the output embedding, behind that nothing. Scalars only, so that the ring
# of ``ring.py`` runs ahead of what is read by any number of blocks, past the end of a stage or of a layer, and so that
# Triton's interpreter can walk it. ``sizes`` are ``(HIDDEN, QKV, WIDE, INNER, VOCAB)``.

O_ROLE, GATE_UP_ROLE, DOWN_ROLE, HEAD_ROLE, NO_ROLE = (tl.constexpr(role) for role in range(1, 6))  # and 0: QKV


@triton.jit
def rows_of(role, sizes):
    """Rows of a matrix, of gate and of up each; none behind the last matrix."""
    into_residual = (role == O_ROLE) | (role == DOWN_ROLE)
    rows = tl.where(into_residual, sizes[0], tl.where(role == GATE_UP_ROLE, sizes[3], sizes[1]))
    return tl.where(role == NO_ROLE, 0, tl.where(role == HEAD_ROLE, sizes[4], rows))


@triton.jit
def cols_of(role, sizes):
    """Columns of a matrix."""
    return tl.where(role == O_ROLE, sizes[2], tl.where(role == DOWN_ROLE, sizes[3], sizes[0]))


@triton.jit
def settled(layer, role, tile, program, last_layer, sizes, BLOCK_ROWS: tl.constexpr, ENDS: tl.constexpr):
    """``(layer, role, tile)`` itself, or behind the last tile of a matrix this program's first in one that has any."""
    while (role < NO_ROLE) & (tile * BLOCK_ROWS >= rows_of(role, sizes)):
        role += 1
        tile = program
        is_next = role == HEAD_ROLE
        layer = tl.where(is_next, layer + 1, layer)
        role = tl.where(is_next & (layer < last_layer), 0, role)
        if not ENDS:
            role = tl.where(role == HEAD_ROLE, NO_ROLE, role)
    return layer, role, tile


@triton.jit
def first_place(program, first_layer, last_layer, sizes, BLOCK_ROWS: tl.constexpr, ENDS: tl.constexpr):
    """Where this program's stream begins."""
    layer, role = tl.cast(first_layer, tl.int32), tl.cast(0, tl.int32)
    layer, role, tile = settled(layer, role, program, program, last_layer, sizes, BLOCK_ROWS, ENDS)
    return layer, role, tile, tl.cast(0, tl.int32)


@triton.jit
def following(
    place, program, last_layer, sizes,
    NUM_PROGRAMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """The place behind ``place``."""
    layer, role, tile, block = place
    parts = tl.where(role == GATE_UP_ROLE, 2, 1)
    block += 1
    is_whole = block == parts * tl.cdiv(cols_of(role, sizes), BLOCK_COLS)
    tile = tl.where(is_whole, tile + NUM_PROGRAMS, tile)
    block = tl.where(is_whole, 0, block)
    layer, role, tile = settled(layer, role, tile, program, last_layer, sizes, BLOCK_ROWS, ENDS)
    return layer, role, tile, block


@triton.jit
def part_offset(place, sizes, BLOCK_COLS: tl.constexpr):
    """Numbers, int64, from the beginning of the place's stack to the part that its rows and columns count from."""
    layer, role, _, block = place
    rows, cols = rows_of(role, sizes), cols_of(role, sizes)
    parts = tl.where(role == GATE_UP_ROLE, 2, 1)
    above = tl.where(role >= HEAD_ROLE, 0, layer) * parts + block // tl.cdiv(cols, BLOCK_COLS)
    return above.to(tl.int64) * rows * cols


@triton.jit
def first_col(place, sizes, BLOCK_COLS: tl.constexpr):
    """Of the place's block."""
    return place[3] % tl.cdiv(cols_of(place[1], sizes), BLOCK_COLS) * BLOCK_COLS


# Weights that arrive through a ring in shared memory: asynchronous copies that run ahead of what is multiplied.
#
# ``STAGES`` slots hold the next blocks of the stream, whatever stage or layer they belong to. A slot
# is filled again behind the barrier of threads that the next block needs anyway, so one barrier a block is enough; the
# slot of a stage's last block is filled between the two halves of the grid's barrier, when all threads have left it.
# While a program waits there, ``STAGES`` blocks are in flight or have arrived.
#
# Invariant: a block is read once, from the slot into which it was copied, and no slot is copied into before its block
# has been read (``tests/kernels/triton/looped/test_ring.py``). ``state`` is ``(slot to read, slot to fill, slots owed,
# place of the next copy)``; ``source`` is ``(stacks, last layer, sizes)``.


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
    layout: gl.constexpr = copied(BLOCK_COLS, gl.num_warps(), bits)
    width: gl.constexpr = copy_width(bits)
    stack = stacks[0]
    if role == O_ROLE:
        stack = stacks[1]
    if role == GATE_UP_ROLE:
        stack = stacks[2]
    if role == DOWN_ROLE:
        stack = stacks[3]
    if role >= HEAD_ROLE:
        stack = stacks[4]
    rows, cols = rows_of(role, sizes), cols_of(role, sizes)
    row = place[2] * BLOCK_ROWS + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, layout))
    col = first_col(place, sizes, BLOCK_COLS) + gl.arange(0, BLOCK_COLS, gl.SliceLayout(0, layout))
    at = stack + part_offset(place, sizes, BLOCK_COLS) + (row[:, None].to(gl.int64) * cols + col[None, :])
    at = gl.multiple_of(gl.max_contiguous(at, [1, width]), [16, 16])  # launch.py refuses columns that are not
    mask = (row < rows)[:, None] & gl.max_constancy(col < cols, [width])[None, :]
    async_copy.async_copy_global_to_shared(ring.index(fills), at, mask)
    async_copy.commit_group()
    fills = tl.where(fills == STAGES - 1, 0, fills + 1)
    place = following(place, gl.program_id(0), last_layer, sizes, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)
    return reads, fills, 0, place


@gluon.jit
def inputs_at(
    begin, x_ptr, norm_ptr, inverse,
    BATCH: gl.constexpr, BATCH_PAD: gl.constexpr, COLS: gl.constexpr, BLOCK_COLS: gl.constexpr, BITS: gl.constexpr,
    IS_NORMED: gl.constexpr, CACHE: gl.constexpr,
):  # fmt: skip
    """Columns ``begin ..`` of every entry, fp32 ``[B', C]``, as weights of ``BITS`` want them."""
    layout: gl.constexpr = copied(BLOCK_COLS, gl.num_warps(), BITS)
    entry = gl.arange(0, BATCH_PAD, gl.SliceLayout(1, layout))
    col = begin + gl.arange(0, BLOCK_COLS, gl.SliceLayout(0, layout))
    return activations(x_ptr, norm_ptr, inverse, entry, col, BATCH, COLS, IS_NORMED, CACHE)


@gluon.jit
def product(
    ring, state, source, x, x_ptr, norm_ptr, inverse,
    BATCH: gl.constexpr, BATCH_PAD: gl.constexpr, COLS: gl.constexpr, IS_NORMED: gl.constexpr, USES_DOT: gl.constexpr,
    STAGES: gl.constexpr, NUM_PROGRAMS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr,
    ENDS: gl.constexpr, CACHE: gl.constexpr,
):  # fmt: skip
    """The next tile of the stream times every entry, fp32 ``[R, B']``, and the state after its blocks.

    ``x`` are the inputs of its first block; each block loads those of the next, the last one those of the next tile,
    which are returned too: they come from the second-level cache, and no block should wait for them.
    """
    warps: gl.constexpr = gl.num_warps()
    bits: gl.constexpr = ring.dtype.primitive_bitwidth
    width: gl.constexpr = copy_width(bits)
    spread: gl.constexpr = spread_layout(BLOCK_COLS, warps, bits)
    by_warp: gl.constexpr = warp_layout(warps)
    if USES_DOT:
        acc = gl.zeros([warps, BLOCK_ROWS, BATCH_PAD], gl.float32, by_warp)
    else:
        acc = gl.zeros([BLOCK_ROWS, BATCH_PAD, BLOCK_COLS // width], gl.float32, gl.SliceLayout(3, spread))
    for begin in range(0, COLS, BLOCK_COLS):
        next_begin = tl.where(begin + BLOCK_COLS < COLS, begin + BLOCK_COLS, 0)
        next_x = inputs_at(
            next_begin, x_ptr, norm_ptr, inverse, BATCH, BATCH_PAD, COLS, BLOCK_COLS, bits, IS_NORMED, CACHE
        )
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


# Attention: ``attend_split`` of ``blocks.py`` with explicit layouts and the next slots prefetched.
#
# Gluon does not pipeline a loop by itself, so the slots of the next tile are loaded into registers before this one's
# are used. Norms, rotation and the merge of splits are those of ``blocks.py``.


@gluon.jit
def times(a, b, acc):
    """``a @ b + acc``; numbers of 32 bits one by one, narrower ones by tensor cores."""
    bits: gl.constexpr = a.dtype.primitive_bitwidth
    left = gl.convert_layout(a, factor(0, gl.num_warps(), bits))
    right = gl.convert_layout(b, factor(1, gl.num_warps(), bits))
    if bits == 32:
        return gl.dot_fma(left, right, acc)
    else:
        return mma_v2(left, right, acc)


@gluon.jit
def old_slots(ptr, place, last, slot, dim, BEGIN: gl.constexpr, END: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Numbers ``BEGIN .. END`` of the slots at ``place [S]`` that were there before the step, zero elsewhere."""
    mask = ((place < last) & (place != slot))[:, None] & (dim < END - BEGIN)[None, :]
    return gl.load(ptr + place[:, None] * HEAD_DIM + BEGIN + dim[None, :], mask=mask, other=0.0)


@gluon.jit
def attend_split(
    heads_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr,
    entry, kv_head, split, slot, length, eps, scale_log2,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_PAD: gl.constexpr,
    HALF_PAD: gl.constexpr, GROUP_PAD: gl.constexpr, HAS_NORM: gl.constexpr,
    BLOCK_SLOTS: gl.constexpr, SPLIT_SLOTS: gl.constexpr, NUM_SPLITS: gl.constexpr,
):  # fmt: skip
    """As ``attend_split`` of ``blocks.py``."""
    group: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    half: gl.constexpr = HEAD_DIM // 2
    kind: gl.constexpr = heads_ptr.dtype.element_ty
    read: gl.constexpr = slots(gl.num_warps())
    scored: gl.constexpr = scored_layout(gl.num_warps(), kind.primitive_bitwidth)
    head = gl.arange(0, GROUP_PAD, gl.SliceLayout(1, read))
    pair = gl.arange(0, HALF_PAD, gl.SliceLayout(0, read))
    dim = gl.arange(0, HEAD_PAD, gl.SliceLayout(0, read))
    tile = gl.arange(0, BLOCK_SLOTS, gl.SliceLayout(1, read))
    scored_tile = gl.arange(0, BLOCK_SLOTS, gl.SliceLayout(0, scored))
    own = heads_ptr + entry * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    cos, sin = cos_ptr + entry * HEAD_DIM, sin_ptr + entry * HEAD_DIM
    query = kv_head * group + head
    q_low, q_high = rotated(own, q_norm_ptr, cos, sin, query * HEAD_DIM, head < group, pair, eps, HEAD_DIM, HAS_NORM)

    one = gl.arange(0, 1, gl.SliceLayout(1, read))
    key_at = (NUM_HEADS + kv_head + one) * HEAD_DIM
    new_low, new_high = rotated(own, k_norm_ptr, cos, sin, key_at, one < 1, pair, eps, HEAD_DIM, HAS_NORM)  # [1, E/2]
    value_at = own + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dim
    new_value = gl.load(value_at, mask=dim < HEAD_DIM, other=0.0, cache_modifier=".cg")
    first = split * SPLIT_SLOTS
    last = gl.minimum(first + SPLIT_SLOTS, length)
    k_low = old_slots(k_ptr, first + tile, last, slot, pair, 0, half, HEAD_DIM)
    k_high = old_slots(k_ptr, first + tile, last, slot, pair, half, HEAD_DIM, HEAD_DIM)
    v = old_slots(v_ptr, first + tile, last, slot, dim, 0, HEAD_DIM, HEAD_DIM)
    if (slot >= first) & (slot < first + SPLIT_SLOTS):
        to = k_ptr + slot * HEAD_DIM + pair[None, :]
        gl.store(to, new_low, mask=(pair < half)[None, :])
        gl.store(to + half, new_high, mask=(pair < half)[None, :])
        gl.store(v_ptr + slot * HEAD_DIM + dim, new_value, mask=dim < HEAD_DIM)

    best = gl.full([GROUP_PAD], float("-inf"), gl.float32, gl.SliceLayout(1, scored))
    total = gl.zeros([GROUP_PAD], gl.float32, gl.SliceLayout(1, scored))
    acc = gl.zeros([GROUP_PAD, HEAD_PAD], gl.float32, scored)
    for begin in range(first, last, BLOCK_SLOTS):
        following = begin + BLOCK_SLOTS + tile
        next_low = old_slots(k_ptr, following, last, slot, pair, 0, half, HEAD_DIM)
        next_high = old_slots(k_ptr, following, last, slot, pair, half, HEAD_DIM, HEAD_DIM)
        next_v = old_slots(v_ptr, following, last, slot, dim, 0, HEAD_DIM, HEAD_DIM)
        is_new = (begin + tile == slot)[:, None]
        k_low = gl.where(is_new, new_low, k_low)  # [BLOCK_SLOTS, E/2]
        k_high = gl.where(is_new, new_high, k_high)
        v = gl.where(is_new, new_value[None, :], v)  # [BLOCK_SLOTS, E]
        logits = times(q_low, gl.permute(k_low, [1, 0]), gl.zeros([GROUP_PAD, BLOCK_SLOTS], gl.float32, scored))
        logits = times(q_high, gl.permute(k_high, [1, 0]), logits) * scale_log2
        logits = gl.where((begin + scored_tile < last)[None, :], logits, float("-inf"))
        new_best = gl.maximum(best, gl.max(logits, 1))  # finite: every tile has a visible slot
        shrink, weights = gl.exp2(best - new_best), gl.exp2(logits - new_best[:, None])
        total = total * shrink + gl.sum(weights, 1)
        acc = times(weights.to(kind), v, acc * shrink[:, None])
        best = new_best
        k_low, k_high, v = next_low, next_high, next_v
    to_head = gl.arange(0, GROUP_PAD, gl.SliceLayout(1, scored))
    to_dim = gl.arange(0, HEAD_PAD, gl.SliceLayout(0, scored))
    to = (entry * NUM_HEADS + kv_head * group + to_head) * NUM_SPLITS + split
    out_at = partial_ptr + to[:, None] * HEAD_DIM + to_dim[None, :]
    gl.store(out_at, acc / total[:, None], mask=(to_head < group)[:, None] & (to_dim < HEAD_DIM)[None, :])
    gl.store(lse_ptr + to, best + tl.log2(total), mask=to_head < group)


@gluon.jit
def pass_barrier(
    counters_ptr, passed, ring, state, source,
    STAGES: gl.constexpr, NUM_PROGRAMS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr,
    ENDS: gl.constexpr,
):  # fmt: skip
    """Arrive, fill the slot that the stage left last, wait; the barriers passed and the state."""
    arrive(counters_ptr)
    if state[2] > 0:
        state = fill(ring, state, source, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)
    wait(counters_ptr, passed + NUM_PROGRAMS, NUM_PROGRAMS)
    return passed + NUM_PROGRAMS, state


@gluon.jit
def ring_kernel(
    tokens_ptr, rows_ptr, slots_ptr, lengths_ptr, cos_ptr, sin_ptr,
    embed_ptr, qkv_ptr, o_ptr, gate_up_ptr, down_ptr, head_ptr,
    input_norm_ptr, post_norm_ptr, final_norm_ptr, q_norm_ptr, k_norm_ptr,
    qkv_bias_ptr, o_bias_ptr, gate_up_bias_ptr, down_bias_ptr,
    keys_ptr, values_ptr,
    residual_ptr, heads_ptr, partial_ptr, lse_ptr, attended_ptr, inner_ptr, logits_ptr, counters_ptr,
    first_layer, last_layer, eps, scale_log2,
    BATCH: gl.constexpr, BATCH_PAD: gl.constexpr, HIDDEN: gl.constexpr, INNER: gl.constexpr, VOCAB: gl.constexpr,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_PAD: gl.constexpr,
    HALF_PAD: gl.constexpr, GROUP_PAD: gl.constexpr, NUM_ROWS: gl.constexpr, CAPACITY: gl.constexpr,
    HAS_HEAD_NORM: gl.constexpr, HAS_QKV_BIAS: gl.constexpr, HAS_O_BIAS: gl.constexpr, HAS_MLP_BIAS: gl.constexpr,
    BEGINS: gl.constexpr, ENDS: gl.constexpr, LOADS_AHEAD: gl.constexpr, USES_DOT: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr,
    BLOCK_SLOTS: gl.constexpr, SPLIT_SLOTS: gl.constexpr, NUM_SPLITS: gl.constexpr, SPLITS_PAD: gl.constexpr,
    STAGES: gl.constexpr, CACHE: gl.constexpr, PHASES: gl.constexpr,
):  # fmt: skip
    """Layers ``first_layer .. last_layer - 1``; with ``BEGINS`` the embedding before, with ``ENDS`` logits behind."""
    program = gl.program_id(0)
    kind: gl.constexpr = qkv_ptr.dtype.element_ty
    bits: gl.constexpr = kind.primitive_bitwidth
    inputs: gl.constexpr = copied(BLOCK_COLS, gl.num_warps(), bits)
    result: gl.constexpr = result_layout(BLOCK_COLS, gl.num_warps(), bits, USES_DOT)
    read: gl.constexpr = slots(gl.num_warps())
    QKV: gl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    WIDE: gl.constexpr = NUM_HEADS * HEAD_DIM
    shared: gl.constexpr = gl.SwizzledSharedLayout(copy_width(bits), 1, PHASES, [1, 0])
    ring = gl.allocate_shared_memory(kind, [STAGES, BLOCK_ROWS, BLOCK_COLS], shared)
    sizes = (HIDDEN, QKV, WIDE, INNER, VOCAB)
    source = ((qkv_ptr, o_ptr, gate_up_ptr, down_ptr, head_ptr), last_layer, sizes)
    state = (0, 0, 0, first_place(program, first_layer, last_layer, sizes, BLOCK_ROWS, ENDS))
    for _ in range(STAGES):
        state = fill(ring, state, source, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)

    line = gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, result))
    entry = gl.arange(0, BATCH_PAD, gl.SliceLayout(0, result))
    is_entry = (entry < BATCH)[None, :]
    all_entries = gl.arange(0, BATCH_PAD, gl.SliceLayout(1, inputs))
    cols = gl.arange(0, BLOCK_COLS, gl.SliceLayout(0, inputs))
    passed = 0  # barriers times programs

    if BEGINS:
        for begin in range(program * BLOCK_COLS, HIDDEN, NUM_PROGRAMS * BLOCK_COLS):
            col = begin + cols
            token = gl.load(tokens_ptr + all_entries, mask=all_entries < BATCH, other=0)
            mask = (all_entries < BATCH)[:, None] & (col < HIDDEN)[None, :]
            x = gl.load(embed_ptr + token[:, None] * HIDDEN + col[None, :], mask=mask, other=0.0)
            gl.store(residual_ptr + all_entries[:, None] * HIDDEN + col[None, :], x.to(gl.float32), mask=mask)
        arrive(counters_ptr)  # the ring is full: no block has been read yet
        passed += NUM_PROGRAMS
        wait(counters_ptr, passed, NUM_PROGRAMS)

    for layer in range(first_layer, last_layer):
        step = tl.cast(layer, tl.int64)

        # 1: norm, QKV
        inverse = inverse_norms(residual_ptr, all_entries, cols, eps, BATCH, HIDDEN, BLOCK_COLS, CACHE)
        norm = input_norm_ptr + step * HIDDEN
        x = inputs_at(0, residual_ptr, norm, inverse, BATCH, BATCH_PAD, HIDDEN, BLOCK_COLS, bits, True, CACHE)
        for tile in range(program, gl.cdiv(QKV, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, x, state = product(ring, state, source, x, residual_ptr, norm, inverse,
                                 BATCH, BATCH_PAD, HIDDEN, True, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS, CACHE)  # fmt: skip
            acc = with_bias(acc, qkv_bias_ptr + step * QKV, row, QKV, HAS_QKV_BIAS)
            to = heads_ptr + entry[None, :] * QKV + row[:, None]
            gl.store(to, acc.to(kind), mask=(row < QKV)[:, None] & is_entry)
        passed, state = pass_barrier(counters_ptr, passed, ring, state, source,
                                     STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)  # fmt: skip

        # 2: attention
        for task in range(program, BATCH * NUM_KV_HEADS * NUM_SPLITS, NUM_PROGRAMS):
            split, kv_head = task % NUM_SPLITS, task // NUM_SPLITS % NUM_KV_HEADS
            own = task // (NUM_SPLITS * NUM_KV_HEADS)
            length = gl.load(lengths_ptr + own).to(tl.int32)
            if split * SPLIT_SLOTS < length:
                row = gl.load(rows_ptr + own).to(tl.int64)
                slot = gl.load(slots_ptr + own).to(tl.int32)
                at = ((step * NUM_ROWS + row) * NUM_KV_HEADS + kv_head) * (CAPACITY * HEAD_DIM)
                attend_split(
                    heads_ptr, q_norm_ptr + step * HEAD_DIM, k_norm_ptr + step * HEAD_DIM, cos_ptr, sin_ptr,
                    keys_ptr + at, values_ptr + at, partial_ptr, lse_ptr,
                    own, kv_head, split, slot, length, eps, scale_log2,
                    NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, HALF_PAD, GROUP_PAD, HAS_HEAD_NORM,
                    BLOCK_SLOTS, SPLIT_SLOTS, NUM_SPLITS,
                )  # fmt: skip
                num_used = (length + SPLIT_SLOTS - 1) // SPLIT_SLOTS
                ended = counters_ptr + 2 + own * NUM_KV_HEADS + kv_head
                tl.debug_barrier()
                before = tl.atomic_add(ended, 1, sem="acq_rel", scope="gpu")
                if before == num_used - 1:
                    tl.debug_barrier()
                    merge_splits(partial_ptr, lse_ptr, attended_ptr, own, kv_head, num_used,
                                 gl.arange(0, SPLITS_PAD, gl.SliceLayout(1, read)),
                                 gl.arange(0, HEAD_PAD, gl.SliceLayout(0, read)),
                                 NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SPLITS)  # fmt: skip
                    gl.store(ended, 0)  # no program comes here again before the next layer's barrier
        passed, state = pass_barrier(counters_ptr, passed, ring, state, source,
                                     STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)  # fmt: skip

        # 3: O, and into the residual stream
        x = inputs_at(0, attended_ptr, o_ptr, 0, BATCH, BATCH_PAD, WIDE, BLOCK_COLS, bits, False, CACHE)
        for tile in range(program, gl.cdiv(HIDDEN, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, x, state = product(ring, state, source, x, attended_ptr, o_ptr, 0,
                                 BATCH, BATCH_PAD, WIDE, False, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS, CACHE)  # fmt: skip
            acc = with_bias(acc, o_bias_ptr + step * HIDDEN, row, HIDDEN, HAS_O_BIAS)
            to = residual_ptr + entry[None, :] * HIDDEN + row[:, None]
            mask = (row < HIDDEN)[:, None] & is_entry
            gl.store(to, gl.load(to, mask=mask, other=0.0, cache_modifier=".cg") + acc, mask=mask)
        passed, state = pass_barrier(counters_ptr, passed, ring, state, source,
                                     STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)  # fmt: skip

        # 4: norm, gate and up, SwiGLU
        inverse = inverse_norms(residual_ptr, all_entries, cols, eps, BATCH, HIDDEN, BLOCK_COLS, CACHE)
        norm = post_norm_ptr + step * HIDDEN
        bias = gate_up_bias_ptr + step * (2 * INNER)
        x = inputs_at(0, residual_ptr, norm, inverse, BATCH, BATCH_PAD, HIDDEN, BLOCK_COLS, bits, True, CACHE)
        for tile in range(program, gl.cdiv(INNER, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            left, x, state = product(ring, state, source, x, residual_ptr, norm, inverse,
                                 BATCH, BATCH_PAD, HIDDEN, True, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS, CACHE)  # fmt: skip
            right, x, state = product(ring, state, source, x, residual_ptr, norm, inverse,
                                 BATCH, BATCH_PAD, HIDDEN, True, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS, CACHE)  # fmt: skip
            left = with_bias(left, bias, row, INNER, HAS_MLP_BIAS)
            right = with_bias(right, bias + INNER, row, INNER, HAS_MLP_BIAS)
            to = inner_ptr + entry[None, :] * INNER + row[:, None]
            value = left / (1.0 + gl.exp(-left)) * right
            gl.store(to, value.to(kind), mask=(row < INNER)[:, None] & is_entry)
        passed, state = pass_barrier(counters_ptr, passed, ring, state, source,
                                     STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)  # fmt: skip

        # 5: down, and into the residual stream
        x = inputs_at(0, inner_ptr, down_ptr, 0, BATCH, BATCH_PAD, INNER, BLOCK_COLS, bits, False, CACHE)
        for tile in range(program, gl.cdiv(HIDDEN, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, x, state = product(ring, state, source, x, inner_ptr, down_ptr, 0,
                                 BATCH, BATCH_PAD, INNER, False, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS, CACHE)  # fmt: skip
            acc = with_bias(acc, down_bias_ptr + step * HIDDEN, row, HIDDEN, HAS_MLP_BIAS)
            to = residual_ptr + entry[None, :] * HIDDEN + row[:, None]
            mask = (row < HIDDEN)[:, None] & is_entry
            gl.store(to, gl.load(to, mask=mask, other=0.0, cache_modifier=".cg") + acc, mask=mask)
        passed, state = pass_barrier(counters_ptr, passed, ring, state, source,
                                     STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)  # fmt: skip

    if ENDS:
        inverse = inverse_norms(residual_ptr, all_entries, cols, eps, BATCH, HIDDEN, BLOCK_COLS, CACHE)
        x = inputs_at(0, residual_ptr, final_norm_ptr, inverse, BATCH, BATCH_PAD, HIDDEN, BLOCK_COLS, bits, True, CACHE)
        for tile in range(program, gl.cdiv(VOCAB, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, x, state = product(ring, state, source, x, residual_ptr, final_norm_ptr, inverse,
                                 BATCH, BATCH_PAD, HIDDEN, True, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS, CACHE)  # fmt: skip
            to = logits_ptr + entry[None, :].to(gl.int64) * VOCAB + row[:, None]
            gl.store(to, acc, mask=(row < VOCAB)[:, None] & is_entry)
    async_copy.wait_group(0)
    leave(counters_ptr, NUM_PROGRAMS)

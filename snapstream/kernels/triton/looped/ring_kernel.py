"""The second form of the persistent kernel, in Gluon: one stream of weights through a ring, over stages and layers.

Stages, barrier, buffers and launch arguments are those of ``kernel.py``; what differs is how weights come. There a
program loads the first block of its next stage while it waits; here ``STAGES`` blocks are always on their way, through
every barrier and the attention between the products: the pipelined outer loop of arXiv 2410.23668, section 3, said
literally. ``ring.py`` is the ring, ``stream.py`` its order, ``ring_layouts.py`` how tiles lie over threads. Compiled,
and run by a stand-in for Gluon that knows no layouts; never yet on a GPU.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from snapstream.kernels.triton.looped import ring_layouts, stream
from snapstream.kernels.triton.looped.attend import merge_splits
from snapstream.kernels.triton.looped.barrier import arrive, leave, wait
from snapstream.kernels.triton.looped.parts import inverse_norms, with_bias
from snapstream.kernels.triton.looped.ring import fill, inputs_at, product
from snapstream.kernels.triton.looped.ring_attend import attend_split


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
    BLOCK_SLOTS: gl.constexpr, SPLIT_SLOTS: gl.constexpr, NUM_SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Layers ``first_layer .. last_layer - 1``; with ``BEGINS`` the embedding before, with ``ENDS`` logits behind."""
    program = gl.program_id(0)
    kind: gl.constexpr = qkv_ptr.dtype.element_ty
    bits: gl.constexpr = kind.primitive_bitwidth
    inputs: gl.constexpr = ring_layouts.copied(BLOCK_COLS, gl.num_warps(), bits)
    result: gl.constexpr = ring_layouts.result(BLOCK_COLS, gl.num_warps(), bits, USES_DOT)
    read: gl.constexpr = ring_layouts.slots(gl.num_warps())
    QKV: gl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    WIDE: gl.constexpr = NUM_HEADS * HEAD_DIM
    shared: gl.constexpr = gl.SwizzledSharedLayout(ring_layouts.width(bits), 1, 1, [1, 0])
    ring = gl.allocate_shared_memory(kind, [STAGES, BLOCK_ROWS, BLOCK_COLS], shared)
    sizes = (HIDDEN, QKV, WIDE, INNER, VOCAB)
    source = ((qkv_ptr, o_ptr, gate_up_ptr, down_ptr, head_ptr), last_layer, sizes)
    state = (0, 0, 0, stream.first_place(program, first_layer, last_layer, sizes, BLOCK_ROWS, ENDS))
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
        inverse = inverse_norms(residual_ptr, all_entries, cols, eps, BATCH, HIDDEN, BLOCK_COLS)
        norm = input_norm_ptr + step * HIDDEN
        x = inputs_at(0, residual_ptr, norm, inverse, BATCH, BATCH_PAD, HIDDEN, BLOCK_COLS, bits, True)
        for tile in range(program, gl.cdiv(QKV, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, x, state = product(ring, state, source, x, residual_ptr, norm, inverse,
                                 BATCH, BATCH_PAD, HIDDEN, True, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS)  # fmt: skip
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
                                 gl.arange(0, GROUP_PAD, gl.SliceLayout(1, read)),
                                 gl.arange(0, HEAD_PAD, gl.SliceLayout(0, read)),
                                 NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SPLITS)  # fmt: skip
                    gl.store(ended, 0)  # nobody comes here again before the next layer's barrier
        passed, state = pass_barrier(counters_ptr, passed, ring, state, source,
                                     STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)  # fmt: skip

        # 3: O, and into the residual stream
        x = inputs_at(0, attended_ptr, o_ptr, 0, BATCH, BATCH_PAD, WIDE, BLOCK_COLS, bits, False)
        for tile in range(program, gl.cdiv(HIDDEN, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, x, state = product(ring, state, source, x, attended_ptr, o_ptr, 0,
                                 BATCH, BATCH_PAD, WIDE, False, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS)  # fmt: skip
            acc = with_bias(acc, o_bias_ptr + step * HIDDEN, row, HIDDEN, HAS_O_BIAS)
            to = residual_ptr + entry[None, :] * HIDDEN + row[:, None]
            mask = (row < HIDDEN)[:, None] & is_entry
            gl.store(to, gl.load(to, mask=mask, other=0.0, cache_modifier=".cg") + acc, mask=mask)
        passed, state = pass_barrier(counters_ptr, passed, ring, state, source,
                                     STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)  # fmt: skip

        # 4: norm, gate and up, SwiGLU
        inverse = inverse_norms(residual_ptr, all_entries, cols, eps, BATCH, HIDDEN, BLOCK_COLS)
        norm = post_norm_ptr + step * HIDDEN
        bias = gate_up_bias_ptr + step * (2 * INNER)
        x = inputs_at(0, residual_ptr, norm, inverse, BATCH, BATCH_PAD, HIDDEN, BLOCK_COLS, bits, True)
        for tile in range(program, gl.cdiv(INNER, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            left, x, state = product(ring, state, source, x, residual_ptr, norm, inverse,
                                 BATCH, BATCH_PAD, HIDDEN, True, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS)  # fmt: skip
            right, x, state = product(ring, state, source, x, residual_ptr, norm, inverse,
                                 BATCH, BATCH_PAD, HIDDEN, True, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS)  # fmt: skip
            left = with_bias(left, bias, row, INNER, HAS_MLP_BIAS)
            right = with_bias(right, bias + INNER, row, INNER, HAS_MLP_BIAS)
            to = inner_ptr + entry[None, :] * INNER + row[:, None]
            value = left / (1.0 + gl.exp(-left)) * right
            gl.store(to, value.to(kind), mask=(row < INNER)[:, None] & is_entry)
        passed, state = pass_barrier(counters_ptr, passed, ring, state, source,
                                     STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)  # fmt: skip

        # 5: down, and into the residual stream
        x = inputs_at(0, inner_ptr, down_ptr, 0, BATCH, BATCH_PAD, INNER, BLOCK_COLS, bits, False)
        for tile in range(program, gl.cdiv(HIDDEN, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, x, state = product(ring, state, source, x, inner_ptr, down_ptr, 0,
                                 BATCH, BATCH_PAD, INNER, False, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS)  # fmt: skip
            acc = with_bias(acc, down_bias_ptr + step * HIDDEN, row, HIDDEN, HAS_MLP_BIAS)
            to = residual_ptr + entry[None, :] * HIDDEN + row[:, None]
            mask = (row < HIDDEN)[:, None] & is_entry
            gl.store(to, gl.load(to, mask=mask, other=0.0, cache_modifier=".cg") + acc, mask=mask)
        passed, state = pass_barrier(counters_ptr, passed, ring, state, source,
                                     STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS, ENDS)  # fmt: skip

    if ENDS:
        inverse = inverse_norms(residual_ptr, all_entries, cols, eps, BATCH, HIDDEN, BLOCK_COLS)
        x = inputs_at(0, residual_ptr, final_norm_ptr, inverse, BATCH, BATCH_PAD, HIDDEN, BLOCK_COLS, bits, True)
        for tile in range(program, gl.cdiv(VOCAB, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, x, state = product(ring, state, source, x, residual_ptr, final_norm_ptr, inverse,
                                 BATCH, BATCH_PAD, HIDDEN, True, USES_DOT, STAGES, NUM_PROGRAMS, BLOCK_ROWS, BLOCK_COLS,
                                 ENDS)  # fmt: skip
            to = logits_ptr + entry[None, :].to(gl.int64) * VOCAB + row[:, None]
            gl.store(to, acc, mask=(row < VOCAB)[:, None] & is_entry)
    async_copy.wait_group(0)
    leave(counters_ptr, NUM_PROGRAMS)

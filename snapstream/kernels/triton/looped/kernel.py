"""The persistent kernel: one program per multiprocessor, every layer in five stages, a barrier after each.

    1  norm, QKV        2  head norm, rotation, slot, attention        3  O, add        4  norm, gate and up, SwiGLU
    5  down, add        and once: the embedding before, final norm and output embedding behind

Per-layer operands are base + layer * stride, the loop runs at run time (arXiv 2410.23668, section 3). With
``LOADS_AHEAD`` a program issues the first loads of its next stage's weights between arriving at a barrier and waiting
there: they depend on nothing that the barrier protects, so memory stays busy. The residual stream is fp32.

Weights are dense, or int8 and int4 codes with scales (``blocks.py``): the matrices of attention, of MLPs and the tables
each have ``BITS`` (0: dense) and ``GROUP`` of their own.

Buffers: ``residual [B, D]``, ``partial [B, H, splits, E]``, ``lse [B, H, splits]``, ``logits [B, V]`` fp32; ``heads
[B, H+2G, E]``, ``attended [B, H, E]``, ``inner [B, I]`` in the dtype of the norms; ``counters`` int32: two of the
barrier, then one per entry and kv head.
"""

import triton
import triton.language as tl

from snapstream.kernels.triton.looped.blocks import (
    arrive,
    attend_split,
    inverse_norms,
    layer_of,
    leave,
    merge_splits,
    opened,
    opened_pair,
    product,
    product_pair,
    table_rows,
    wait,
    with_bias,
)


@triton.jit
def looped_kernel(
    tokens_ptr, rows_ptr, slots_ptr, lengths_ptr, cos_ptr, sin_ptr,
    embed_ptr, qkv_ptr, o_ptr, gate_up_ptr, down_ptr, head_ptr,
    input_norm_ptr, post_norm_ptr, final_norm_ptr, q_norm_ptr, k_norm_ptr,
    qkv_bias_ptr, o_bias_ptr, gate_up_bias_ptr, down_bias_ptr,
    keys_ptr, values_ptr,
    residual_ptr, heads_ptr, partial_ptr, lse_ptr, attended_ptr, inner_ptr, logits_ptr, counters_ptr,
    first_layer, last_layer, eps, scale_log2,
    embed_scales_ptr, qkv_scales_ptr, o_scales_ptr, gate_up_scales_ptr, down_scales_ptr, head_scales_ptr,
    BATCH: tl.constexpr, BATCH_PAD: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, VOCAB: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, GROUP_PAD: tl.constexpr, NUM_ROWS: tl.constexpr, CAPACITY: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr, HAS_QKV_BIAS: tl.constexpr, HAS_O_BIAS: tl.constexpr, HAS_MLP_BIAS: tl.constexpr,
    BEGINS: tl.constexpr, ENDS: tl.constexpr, LOADS_AHEAD: tl.constexpr, USES_DOT: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, SPLIT_SLOTS: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    ATTENTION_BITS: tl.constexpr, ATTENTION_GROUP: tl.constexpr, MLP_BITS: tl.constexpr, MLP_GROUP: tl.constexpr,
    TABLE_BITS: tl.constexpr, TABLE_GROUP: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Layers ``first_layer .. last_layer - 1``; with ``BEGINS`` the embedding before, with ``ENDS`` logits behind."""
    program = tl.program_id(0)
    line = tl.arange(0, BLOCK_ROWS)
    entry = tl.arange(0, BATCH_PAD)
    cols = tl.arange(0, BLOCK_COLS)
    is_entry = entry < BATCH
    none = tl.zeros([BATCH_PAD], tl.float32)
    QKV: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    WIDE: tl.constexpr = NUM_HEADS * HEAD_DIM
    table = (head_ptr, head_scales_ptr)
    norm_kind: tl.constexpr = input_norm_ptr.dtype.element_ty
    passed = 0  # barriers times programs

    if BEGINS:
        for begin in range(program * BLOCK_COLS, HIDDEN, NUM_PROGRAMS * BLOCK_COLS):
            col = begin + cols
            token = tl.load(tokens_ptr + entry, mask=is_entry, other=0)
            mask = is_entry[:, None] & (col < HIDDEN)[None, :]
            x = table_rows(embed_ptr, embed_scales_ptr, token, col, mask, norm_kind, HIDDEN, TABLE_BITS, TABLE_GROUP)
            tl.store(residual_ptr + entry[:, None] * HIDDEN + col[None, :], x, mask=mask)
        arrive(counters_ptr)
        passed += NUM_PROGRAMS
        wait(counters_ptr, passed, NUM_PROGRAMS)

    for layer in range(first_layer, last_layer):
        step = tl.cast(layer, tl.int64)
        qkv = layer_of(qkv_ptr, qkv_scales_ptr, step, QKV * HIDDEN, ATTENTION_BITS, ATTENTION_GROUP)
        o = layer_of(o_ptr, o_scales_ptr, step, HIDDEN * WIDE, ATTENTION_BITS, ATTENTION_GROUP)
        gate_up = layer_of(gate_up_ptr, gate_up_scales_ptr, step, 2 * INNER * HIDDEN, MLP_BITS, MLP_GROUP)
        down = layer_of(down_ptr, down_scales_ptr, step, HIDDEN * INNER, MLP_BITS, MLP_GROUP)

        # 1: norm, QKV
        queue = opened(qkv, program, line, QKV, HIDDEN, 1, ATTENTION_BITS, ATTENTION_GROUP,
                       BLOCK_COLS, NUM_PROGRAMS, USES_DOT)  # fmt: skip
        if passed > 0:
            wait(counters_ptr, passed, NUM_PROGRAMS)
        inverse = inverse_norms(residual_ptr, entry, cols, eps, BATCH, HIDDEN, BLOCK_COLS, CACHE)
        norm = input_norm_ptr + step * HIDDEN
        for tile in range(program, tl.cdiv(QKV, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, _, queue = product(queue, qkv, line, residual_ptr, norm, inverse, entry,
                                    BATCH, QKV, HIDDEN, 1, ATTENTION_BITS, ATTENTION_GROUP, BLOCK_COLS,
                                    NUM_PROGRAMS, True, USES_DOT, CACHE)  # fmt: skip
            acc = with_bias(acc, qkv_bias_ptr + step * QKV, row, QKV, HAS_QKV_BIAS)
            to = heads_ptr + entry[None, :] * QKV + row[:, None]
            tl.store(to, acc.to(heads_ptr.dtype.element_ty), mask=(row < QKV)[:, None] & is_entry[None, :])
        arrive(counters_ptr)
        passed += NUM_PROGRAMS
        wait(counters_ptr, passed, NUM_PROGRAMS)

        # 2: attention
        for task in range(program, BATCH * NUM_KV_HEADS * NUM_SPLITS, NUM_PROGRAMS):
            split, kv_head = task % NUM_SPLITS, task // NUM_SPLITS % NUM_KV_HEADS
            own = task // (NUM_SPLITS * NUM_KV_HEADS)
            length = tl.load(lengths_ptr + own).to(tl.int32)
            if split * SPLIT_SLOTS < length:
                row = tl.load(rows_ptr + own).to(tl.int64)
                slot = tl.load(slots_ptr + own).to(tl.int32)
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
                                 tl.arange(0, SPLITS_PAD), tl.arange(0, HEAD_PAD),
                                 NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SPLITS)  # fmt: skip
                    tl.store(ended, 0)  # no program comes here again before the next layer's barrier
        arrive(counters_ptr)
        passed += NUM_PROGRAMS
        if LOADS_AHEAD:
            queue = opened(o, program, line, HIDDEN, WIDE, 1, ATTENTION_BITS, ATTENTION_GROUP,
                           BLOCK_COLS, NUM_PROGRAMS, USES_DOT)  # fmt: skip
        wait(counters_ptr, passed, NUM_PROGRAMS)

        # 3: O, and into the residual stream
        if not LOADS_AHEAD:
            queue = opened(o, program, line, HIDDEN, WIDE, 1, ATTENTION_BITS, ATTENTION_GROUP,
                           BLOCK_COLS, NUM_PROGRAMS, USES_DOT)  # fmt: skip
        for tile in range(program, tl.cdiv(HIDDEN, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, _, queue = product(queue, o, line, attended_ptr, final_norm_ptr, none, entry,
                                    BATCH, HIDDEN, WIDE, 1, ATTENTION_BITS, ATTENTION_GROUP, BLOCK_COLS,
                                    NUM_PROGRAMS, False, USES_DOT, CACHE)  # fmt: skip
            acc = with_bias(acc, o_bias_ptr + step * HIDDEN, row, HIDDEN, HAS_O_BIAS)
            to = residual_ptr + entry[None, :] * HIDDEN + row[:, None]
            mask = (row < HIDDEN)[:, None] & is_entry[None, :]
            tl.store(to, tl.load(to, mask=mask, other=0.0, cache_modifier=".cg") + acc, mask=mask)
        arrive(counters_ptr)
        passed += NUM_PROGRAMS
        if LOADS_AHEAD:
            queue = opened_pair(gate_up, program, line, INNER, HIDDEN, MLP_BITS, MLP_GROUP,
                           BLOCK_COLS, NUM_PROGRAMS, USES_DOT)  # fmt: skip
        wait(counters_ptr, passed, NUM_PROGRAMS)

        # 4: norm, gate and up, SwiGLU
        if not LOADS_AHEAD:
            queue = opened_pair(gate_up, program, line, INNER, HIDDEN, MLP_BITS, MLP_GROUP,
                           BLOCK_COLS, NUM_PROGRAMS, USES_DOT)  # fmt: skip
        inverse = inverse_norms(residual_ptr, entry, cols, eps, BATCH, HIDDEN, BLOCK_COLS, CACHE)
        norm = post_norm_ptr + step * HIDDEN
        for tile in range(program, tl.cdiv(INNER, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            left, right, queue = product_pair(queue, gate_up, line, residual_ptr, norm, inverse, entry,
                                              BATCH, INNER, HIDDEN, MLP_BITS, MLP_GROUP, BLOCK_COLS,
                                              NUM_PROGRAMS, USES_DOT, CACHE)  # fmt: skip
            bias = gate_up_bias_ptr + step * (2 * INNER)
            left = with_bias(left, bias, row, INNER, HAS_MLP_BIAS)
            right = with_bias(right, bias + INNER, row, INNER, HAS_MLP_BIAS)
            to = inner_ptr + entry[None, :] * INNER + row[:, None]
            value = left / (1.0 + tl.exp(-left)) * right
            tl.store(to, value.to(inner_ptr.dtype.element_ty), mask=(row < INNER)[:, None] & is_entry[None, :])
        arrive(counters_ptr)
        passed += NUM_PROGRAMS
        if LOADS_AHEAD:
            queue = opened(down, program, line, HIDDEN, INNER, 1, MLP_BITS, MLP_GROUP,
                           BLOCK_COLS, NUM_PROGRAMS, USES_DOT)  # fmt: skip
        wait(counters_ptr, passed, NUM_PROGRAMS)

        # 5: down, and into the residual stream
        if not LOADS_AHEAD:
            queue = opened(down, program, line, HIDDEN, INNER, 1, MLP_BITS, MLP_GROUP,
                           BLOCK_COLS, NUM_PROGRAMS, USES_DOT)  # fmt: skip
        for tile in range(program, tl.cdiv(HIDDEN, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, _, queue = product(queue, down, line, inner_ptr, final_norm_ptr, none, entry,
                                    BATCH, HIDDEN, INNER, 1, MLP_BITS, MLP_GROUP, BLOCK_COLS,
                                    NUM_PROGRAMS, False, USES_DOT, CACHE)  # fmt: skip
            acc = with_bias(acc, down_bias_ptr + step * HIDDEN, row, HIDDEN, HAS_MLP_BIAS)
            to = residual_ptr + entry[None, :] * HIDDEN + row[:, None]
            mask = (row < HIDDEN)[:, None] & is_entry[None, :]
            tl.store(to, tl.load(to, mask=mask, other=0.0, cache_modifier=".cg") + acc, mask=mask)
        arrive(counters_ptr)
        passed += NUM_PROGRAMS
        if not LOADS_AHEAD:
            wait(counters_ptr, passed, NUM_PROGRAMS)

    if ENDS:
        queue = opened(table, program, line, VOCAB, HIDDEN, 1, TABLE_BITS, TABLE_GROUP,
                       BLOCK_COLS, NUM_PROGRAMS, USES_DOT)  # fmt: skip
        wait(counters_ptr, passed, NUM_PROGRAMS)
        inverse = inverse_norms(residual_ptr, entry, cols, eps, BATCH, HIDDEN, BLOCK_COLS, CACHE)
        for tile in range(program, tl.cdiv(VOCAB, BLOCK_ROWS), NUM_PROGRAMS):
            row = tile * BLOCK_ROWS + line
            acc, _, queue = product(queue, table, line, residual_ptr, final_norm_ptr, inverse, entry,
                                    BATCH, VOCAB, HIDDEN, 1, TABLE_BITS, TABLE_GROUP, BLOCK_COLS,
                                    NUM_PROGRAMS, True, USES_DOT, CACHE)  # fmt: skip
            to = logits_ptr + entry[None, :].to(tl.int64) * VOCAB + row[:, None]
            tl.store(to, acc, mask=(row < VOCAB)[:, None] & is_entry[None, :])
    leave(counters_ptr, NUM_PROGRAMS)

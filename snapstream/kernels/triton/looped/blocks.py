"""Parts of the looped kernel: the barrier, the norm of the residual, attention, and products with weights.

Products take blocks of a matrix, dense or quantized ("codes"), loaded ahead of their use. A program owns tiles of ``R``
weight rows, the same in every step, and sums a row's products in one order, so results are the same bits from run to
run. It keeps a queue of blocks ``[R, C]`` of one matrix in registers: as one is used, the one ``depth`` places further
on is loaded, from the next tile if need be, so the end of a tile has as many loads in flight as its middle. Weights are
read once and are the first to leave the caches. Quantized blocks of gate and up (``PARTS`` of 2, stored one below the
other) alternate in one queue and share inputs; dense ones would spill with their inputs and have a queue each.

``BITS`` is 0 for dense weights; of codes it is 8 or 4, and ``GROUP`` numbers of a row share a scale
(``kernels/groups.py``). They come as words of 32 bits: a queue of bytes or of fp16 would be packed anew at each step,
which waits for what is on its way. For the same reason loops are unrolled by the length of the queue, so that no block
moves from register to register. Codes are exact in any float dtype: the sums of a group, fp32, are times its scale, and
every group of a block has sums of its own, which are added when a tile ends. So the order of a row's sums depends on
the cut alone, never on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A barrier of all programs in two halves, so that loads of the next stage's weights are on their way while it waits.
#
# ``arrive`` says that this program's stores are done, ``wait`` returns when all programs have said so. The counter
# only grows within a launch: barrier k is passed at ``k * programs``. The last program that ends a launch sets it to
# zero (``leave``), so a replayed graph begins like the first launch.
#
# Three facts that the code rests on: a scalar atomic runs on one thread with no barrier of its threads before it,
# hence ``debug_barrier``; a volatile load is no acquire, hence the instruction; and one thread that spins is enough,
# because the barrier of threads after it hands on what it has seen.


@triton.jit
def arrive(counter_ptr):
    """All stores of this program's threads are visible to a program that sees the counter grow."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter_ptr, target, NUM_PROGRAMS: tl.constexpr):
    """Until ``target`` programs have arrived in this launch. A program alone does not wait."""
    if NUM_PROGRAMS > 1:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred other, early;
            .reg .u32 thread, seen;
            mov.u32 thread, %tid.x;
            setp.ne.u32 other, thread, 0;
            @other bra passed;
            again:
            ld.acquire.gpu.global.u32 seen, [$1];
            setp.lt.u32 early, seen, $2;
            @early bra again;
            passed:
            mov.u32 $0, 0;
            }
            """,
            "=r,l,r",
            [counter_ptr, target],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit
def leave(counter_ptr, NUM_PROGRAMS: tl.constexpr):
    """The end of a launch: the last program to get here resets both counters."""
    tl.debug_barrier()
    left = tl.atomic_add(counter_ptr + 1, 1, sem="acq_rel", scope="gpu")
    if left == NUM_PROGRAMS - 1:
        tl.store(counter_ptr, 0)
        tl.store(counter_ptr + 1, 0)


# The norm of the residual, inputs of products, biases: both forms use them.
#
# Other programs' stores do not reach L1. So activations are read past it (``CACHE`` ".cg"), or through it (".ca"): the
# acquire in ``wait`` makes a multiprocessor forget what it had, and tiles after the first find their inputs there.
# Index vectors come from the caller, because Gluon needs their layouts.


@triton.jit
def residual_block(residual_ptr, entry, col, BATCH: tl.constexpr, COLS: tl.constexpr, CACHE: tl.constexpr):
    """Columns ``col`` of the residual stream ``[B, COLS]``, fp32 ``[B', C]``."""
    at = residual_ptr + entry[:, None] * COLS + col[None, :]
    return tl.load(at, mask=(entry < BATCH)[:, None] & (col < COLS)[None, :], other=0.0, cache_modifier=CACHE)


@triton.jit
def inverse_norms(
    residual_ptr, entry, col, eps,
    BATCH: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """``1 / rms`` of the residual stream of each entry ``[B']``; every program computes all of them."""
    x = residual_block(residual_ptr, entry, col, BATCH, COLS, CACHE)
    total = tl.sum(x * x, 1)
    for begin in range(BLOCK_COLS, COLS, BLOCK_COLS):
        x = residual_block(residual_ptr, entry, begin + col, BATCH, COLS, CACHE)
        total += tl.sum(x * x, 1)
    return 1.0 / tl.sqrt(total / COLS + eps)


@triton.jit
def activations(
    x_ptr, norm_ptr, inverse, entry, col,
    BATCH: tl.constexpr, COLS: tl.constexpr, IS_NORMED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Columns ``col`` of ``x [B, COLS]``, fp32 ``[B', C]``; with ``IS_NORMED`` times norm and inverse, rounded as the
    norm alone would be."""
    is_col = col < COLS
    at = x_ptr + entry[:, None] * COLS + col[None, :]
    x = tl.load(at, mask=(entry < BATCH)[:, None] & is_col[None, :], other=0.0, cache_modifier=CACHE).to(tl.float32)
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


# The attention stage of the looped kernel: norm and rotate heads, write a slot, attend over a split, merge.
#
# A task is one split of one kv head of one entry; the splits of a row depend on its capacity alone. The task whose
# split holds the new slot writes it, and puts the new key and value where its tile would have read them, so no store
# has to be read back. The last task of a head to end merges its splits, in slot order, whichever task is last.


@triton.jit
def rotated(
    heads_ptr, norm_ptr, cos_ptr, sin_ptr, at, is_head, pair, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Both halves ``[n, E/2]`` of the projected heads at ``at [n]``, normed, rotated, rounded as they are stored; a
    half's numbers are ``pair``."""
    half: tl.constexpr = HEAD_DIM // 2
    mask = is_head[:, None] & (pair < half)[None, :]
    low_at = heads_ptr + at[:, None] + pair[None, :]
    low = tl.load(low_at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    high = tl.load(low_at + half, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    kind: tl.constexpr = heads_ptr.dtype.element_ty
    if HAS_NORM:
        inverse = (1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps))[:, None]
        low *= inverse * tl.load(norm_ptr + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        high *= inverse * tl.load(norm_ptr + half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    low_cos = tl.load(cos_ptr + pair, mask=pair < half, other=0.0)[None, :]
    high_cos = tl.load(cos_ptr + half + pair, mask=pair < half, other=0.0)[None, :]
    low_sin = tl.load(sin_ptr + pair, mask=pair < half, other=0.0)[None, :]  # the rotation's minus is in the sine
    high_sin = tl.load(sin_ptr + half + pair, mask=pair < half, other=0.0)[None, :]
    return (low * low_cos + high * low_sin).to(kind), (high * high_cos + low * high_sin).to(kind)


@triton.jit
def attend_split(
    heads_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr,
    entry, kv_head, split, slot, length, eps, scale_log2,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, GROUP_PAD: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, SPLIT_SLOTS: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """One task: writes the new slot if it is its own, and the partial result of its slots ``[H/G, E]``.

    ``k_ptr, v_ptr`` are the row's slots of this kv head; ``partial [B, H, splits, E]``, ``lse [B, H, splits]`` fp32.
    """
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    head, pair, dim = tl.arange(0, GROUP_PAD), tl.arange(0, HALF_PAD), tl.arange(0, HEAD_PAD)
    own = heads_ptr + entry * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    cos, sin = cos_ptr + entry * HEAD_DIM, sin_ptr + entry * HEAD_DIM
    query = kv_head * group + head
    q_low, q_high = rotated(own, q_norm_ptr, cos, sin, query * HEAD_DIM, head < group, pair, eps, HEAD_DIM, HAS_NORM)

    one = tl.arange(0, 1)
    key_at = (NUM_HEADS + kv_head + one) * HEAD_DIM
    new_low, new_high = rotated(own, k_norm_ptr, cos, sin, key_at, one < 1, pair, eps, HEAD_DIM, HAS_NORM)  # [1, E/2]
    value_at = own + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dim
    new_value = tl.load(value_at, mask=dim < HEAD_DIM, other=0.0, cache_modifier=".cg")
    first = split * SPLIT_SLOTS
    last = tl.minimum(first + SPLIT_SLOTS, length)
    stored: tl.constexpr = k_ptr.dtype.element_ty
    if (slot >= first) & (slot < first + SPLIT_SLOTS):
        to = k_ptr + slot * HEAD_DIM + pair[None, :]
        tl.store(to, new_low.to(stored), mask=(pair < half)[None, :])
        tl.store(to + half, new_high.to(stored), mask=(pair < half)[None, :])
        tl.store(v_ptr + slot * HEAD_DIM + dim, new_value.to(stored), mask=dim < HEAD_DIM)

    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for begin in range(first, last, BLOCK_SLOTS):
        place = begin + tl.arange(0, BLOCK_SLOTS)
        is_seen, is_new = place < last, (place == slot)[:, None]
        is_old = is_seen & (place != slot)
        at = k_ptr + place[:, None] * HEAD_DIM + pair[None, :]
        mask = is_old[:, None] & (pair < half)[None, :]
        k_low = tl.where(is_new, new_low, tl.load(at, mask=mask, other=0.0))  # [BLOCK_SLOTS, E/2]
        k_high = tl.where(is_new, new_high, tl.load(at + half, mask=mask, other=0.0))
        logits = tl.dot(q_low, tl.trans(k_low.to(q_low.dtype)), input_precision="ieee")  # [GROUP_PAD, BLOCK_SLOTS]
        logits = tl.dot(q_high, tl.trans(k_high.to(q_low.dtype)), logits, input_precision="ieee") * scale_log2
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))  # finite: every tile has a visible slot
        shrink, weights = tl.exp2(best - new_best), tl.exp2(logits - new_best[:, None])
        at = v_ptr + place[:, None] * HEAD_DIM + dim[None, :]
        old = tl.load(at, mask=is_old[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        v = tl.where(is_new, new_value[None, :], old)  # [BLOCK_SLOTS, E]
        total = total * shrink + tl.sum(weights, 1)
        kind: tl.constexpr = q_low.dtype
        acc = tl.dot(weights.to(kind), v.to(kind), acc * shrink[:, None], input_precision="ieee")
        best = new_best
    to = (entry * NUM_HEADS + query) * NUM_SPLITS + split
    out_at = partial_ptr + to[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_at, acc / total[:, None], mask=(head < group)[:, None] & (dim < HEAD_DIM)[None, :])
    tl.store(lse_ptr + to, best + tl.log2(total), mask=head < group)


MERGED_AT_ONCE = tl.constexpr(4)  # query heads whose splits are on their way at the same time


@triton.constexpr_function
def smaller(a, b):
    return min(a, b)


@triton.jit
def merge_splits(
    partial_ptr, lse_ptr, out_ptr, entry, kv_head, num_used, split, dim,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Weighted mean of the splits that the row reaches, to ``out [B, H, E]``; ``split`` counts them, ``dim`` numbers.

    All splits of a head are one tile: one after the other, each would wait for the second-level cache.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    is_used, is_dim = split < num_used, dim < HEAD_DIM
    for first in tl.static_range(0, GROUP, MERGED_AT_ONCE):
        parts = ()
        for head in tl.static_range(first, smaller(first + MERGED_AT_ONCE, GROUP)):
            query = entry * NUM_HEADS + kv_head * GROUP + head
            at = query * NUM_SPLITS + split
            lse = tl.load(lse_ptr + at, mask=is_used, other=float("-inf"), cache_modifier=".cg")
            from_ = partial_ptr + at[:, None] * HEAD_DIM + dim[None, :]
            part = tl.load(from_, mask=is_used[:, None] & is_dim[None, :], other=0.0, cache_modifier=".cg")
            parts = parts + ((query, lse, part),)  # type: ignore[assignment]  # a tuple grows
        for index in tl.static_range(smaller(MERGED_AT_ONCE, GROUP - first)):
            query, lse, part = parts[index]
            share = tl.exp2(lse - tl.max(lse, 0))
            out = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
            tl.store(out_ptr + query * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=is_dim)


QUEUE_BYTES = 16384  # of codes: on their way for a multiprocessor at any time; more would spill
DEEPEST = 4  # more would compile for minutes


@triton.constexpr_function
def depth(rows, cols, block_cols, bits, parts):
    """Blocks of a queue: the most that divide the blocks of a tile, and of each part as many."""
    blocks = -(-cols // block_cols)
    most = min(QUEUE_BYTES * 8 // (rows * block_cols * bits), DEEPEST) // parts if bits else 1
    return parts * max(count for count in range(1, max(most, 1) + 1) if blocks % count == 0)


@triton.jit
def layer_of(numbers_ptr, scales_ptr, layer, SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Where a layer's matrix of ``SIZE`` numbers begins in a stack: its numbers or codes, and its scales."""
    if BITS == 0:
        return numbers_ptr + layer * SIZE, scales_ptr
    else:
        return numbers_ptr + layer * (SIZE * BITS // 32), scales_ptr + layer * (SIZE // GROUP)


@triton.jit
def table_rows(
    numbers_ptr, scales_ptr, row, col, mask, kind: tl.constexpr,
    COLS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Columns ``col [C]`` of rows ``row [B']`` of a table, fp32 ``[B', C]``, rounded as the table alone would be."""
    at = row.to(tl.int64)[:, None] * COLS + col[None, :]
    if BITS == 0:
        return tl.load(numbers_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        words = tl.load(numbers_ptr + at * BITS // 32, mask=mask, other=0) >> (at % (32 // BITS) * BITS).to(tl.int32)
        scales = tl.load(scales_ptr + at // GROUP, mask=mask, other=0)
        return (numbers_at(words, 0, BITS) * scale_numbers(scales)).to(kind).to(tl.float32)


@triton.jit
def numbers_at(words, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """The numbers, fp32, whose codes lie ``SHIFT`` bits up in ``words``: in the last bits of 2^23 a code is added, not
    converted, which a multiprocessor does at twice the rate."""
    codes = (words >> SHIFT) & (2**BITS - 1) | 0x4B000000
    return codes.to(tl.float32, bitcast=True) - (8388608.0 + 2 ** (BITS - 1))


@triton.jit
def numbers_of(words, BITS: tl.constexpr):
    """All numbers ``[R, C]`` of ``words [R, C * BITS / 32]`` in their order, fp32; a thread keeps its own."""
    COLS: tl.constexpr = words.shape[1] * 32 // BITS
    if BITS == 8:
        even = tl.join(numbers_at(words, 0, 8), numbers_at(words, 16, 8))
        odd = tl.join(numbers_at(words, 8, 8), numbers_at(words, 24, 8))
    else:
        low = tl.join(numbers_at(words, 0, 4), numbers_at(words, 16, 4))
        high = tl.join(numbers_at(words, 8, 4), numbers_at(words, 24, 4))
        even = tl.join(low, high)
        low = tl.join(numbers_at(words, 4, 4), numbers_at(words, 20, 4))
        high = tl.join(numbers_at(words, 12, 4), numbers_at(words, 28, 4))
        odd = tl.join(low, high)
    return tl.reshape(tl.join(even, odd), (words.shape[0], COLS))


@triton.jit
def scale_numbers(scales):
    """fp32 of the bits of fp16, which lie in whole registers."""
    return scales.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_block(
    matrix, place, line,
    ROWS: tl.constexpr, COLS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_COLS: tl.constexpr,
    USES_DOT: tl.constexpr,
):  # fmt: skip
    """The block at ``place``: numbers ``[R, C]``, zero outside of the matrix, or words of codes and bits of scales.

    ``matrix`` are the addresses of a layer's numbers or words and of its scales, ``place`` is (tile, column, part).
    """
    tile, begin, part = place
    row = tile * line.shape[0] + line
    is_row = row < ROWS
    row = (part * ROWS + row).to(tl.int64)
    if BITS == 0:
        col = begin + tl.arange(0, BLOCK_COLS)
        mask = is_row[:, None] & (col < COLS)[None, :]
        at = matrix[0] + row[:, None] * COLS + col[None, :]
        return (tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first"),)
    else:
        word = begin * BITS // 32 + tl.arange(0, BLOCK_COLS * BITS // 32)
        mask = is_row[:, None] & (word < COLS * BITS // 32)[None, :]
        at = matrix[0] + row[:, None] * (COLS * BITS // 32) + word[None, :]
        words = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
        group = begin // GROUP + tl.arange(0, BLOCK_COLS // GROUP)
        is_group = group < COLS // GROUP
        if USES_DOT:  # scales [C / g, R]
            at = matrix[1] + row[None, :] * (COLS // GROUP) + group[:, None]
            scales = tl.load(at, mask=is_row[None, :] & is_group[:, None], other=0)
        else:  # [R, C / g]
            at = matrix[1] + row[:, None] * (COLS // GROUP) + group[None, :]
            scales = tl.load(at, mask=is_row[:, None] & is_group[None, :], other=0)
        return words, scales.to(tl.int32)


@triton.jit
def following(
    place, COLS: tl.constexpr, PARTS: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_PROGRAMS: tl.constexpr
):  # fmt: skip
    """The place behind ``place``: the other part, then the next columns, then this program's next tile."""
    tile, begin, part = place
    if PARTS == 2:
        part = 1 - part
        begin = tl.where(part == 0, begin + BLOCK_COLS, begin)
    else:
        begin = begin + BLOCK_COLS
    is_whole = begin >= COLS
    return tl.where(is_whole, tile + NUM_PROGRAMS, tile), tl.where(is_whole, 0, begin), part


@triton.jit
def opened(
    matrix, program, line,
    ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_COLS: tl.constexpr, NUM_PROGRAMS: tl.constexpr, USES_DOT: tl.constexpr,
):  # fmt: skip
    """A full queue of the matrix: the next place to load, and the blocks that are on their way, next first."""
    place = (tl.cast(program, tl.int32), tl.cast(0, tl.int32), tl.cast(0, tl.int32))
    blocks = ()
    for _ in tl.static_range(depth(line.shape[0], COLS, BLOCK_COLS, BITS, PARTS)):
        block = load_block(matrix, place, line, ROWS, COLS, BITS, GROUP, BLOCK_COLS, USES_DOT)
        blocks = blocks + (block,)  # type: ignore[assignment]  # a tuple grows
        place = following(place, COLS, PARTS, BLOCK_COLS, NUM_PROGRAMS)
    return place, blocks


@triton.jit
def as_inputs(x, kind: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, USES_DOT: tl.constexpr):
    """Inputs ``x [B', C]`` fp32 as blocks meet them: tensor cores take them turned, and in groups."""
    if not USES_DOT:
        return x
    elif BITS == 0:
        return tl.trans(x.to(kind))
    else:
        return tl.permute(tl.reshape(x.to(kind), (x.shape[0], x.shape[1] // GROUP, GROUP)), (1, 2, 0))


@triton.jit
def add_block(
    acc, block, inputs, kind: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, USES_DOT: tl.constexpr
):  # fmt: skip
    """``acc`` and the products of a block.

    Few entries are multiplied number by number; a thread adds up the numbers that one load brings it, of codes a group,
    and threads add up at the end of a tile. Many entries go through tensor cores.
    """
    if BITS == 0:
        if USES_DOT:
            return tl.dot(block[0], inputs, acc, input_precision="ieee")
        else:
            RUNS: tl.constexpr = acc.shape[2]
            WIDTH: tl.constexpr = inputs.shape[1] // RUNS
            # Reshaped, not expanded: then a thread multiplies what it has loaded, and blocks stay where they are.
            numbers = tl.reshape(block[0].to(tl.float32), (acc.shape[0], 1, RUNS, WIDTH))
            return acc + tl.sum(numbers * tl.reshape(inputs, (1, inputs.shape[0], RUNS, WIDTH)), 3)  # [R, B', C / run]
    else:
        numbers, scales = numbers_of(block[0], BITS), scale_numbers(block[1])
        R: tl.constexpr = numbers.shape[0]
        NUM_GROUPS: tl.constexpr = numbers.shape[1] // GROUP
        if USES_DOT:
            numbers = tl.permute(tl.reshape(numbers.to(kind), (R, NUM_GROUPS, GROUP)), (1, 0, 2))
            return acc + tl.dot(numbers, inputs, input_precision="ieee") * scales[:, :, None]  # [C / g, R, B']
        else:
            part = tl.reshape(numbers[:, None, :] * inputs[None, :, :], (R, inputs.shape[0], NUM_GROUPS, GROUP))
            return acc + tl.sum(part, 3) * scales[:, None, :]  # [R, B', C / g]


@triton.jit
def no_sums(
    R: tl.constexpr, NUM_ENTRIES: tl.constexpr, BITS: tl.constexpr, NUM_GROUPS: tl.constexpr, USES_DOT: tl.constexpr
):  # fmt: skip
    """Where a tile begins: zeros in the shape that ``add_block`` adds to; dense weights have groups of 16 bytes."""
    if USES_DOT and BITS == 0:
        return tl.zeros((R, NUM_ENTRIES), tl.float32)
    elif USES_DOT:
        return tl.zeros((NUM_GROUPS, R, NUM_ENTRIES), tl.float32)
    else:
        return tl.zeros((R, NUM_ENTRIES, NUM_GROUPS), tl.float32)


@triton.jit
def summed(acc, BITS: tl.constexpr, USES_DOT: tl.constexpr):
    """Where a tile ends: ``[R, B']`` fp32."""
    if USES_DOT and BITS == 0:
        return acc
    elif USES_DOT:
        return tl.sum(acc, 0)
    else:
        return tl.sum(acc, 2)


@triton.jit
def product(
    queue, matrix, line, x_ptr, norm_ptr, inverse, entry,
    BATCH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    IS_NORMED: tl.constexpr, USES_DOT: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """The next tile of the queue times every entry: sums ``[R, B']`` fp32, of the second part too, and the queue."""
    kind: tl.constexpr = norm_ptr.dtype.element_ty
    NUM_GROUPS: tl.constexpr = BLOCK_COLS // (GROUP if BITS else 128 // kind.primitive_bitwidth)
    place, blocks = queue
    left = no_sums(line.shape[0], entry.shape[0], BITS, NUM_GROUPS, USES_DOT)
    right = left
    UNROLLED: tl.constexpr = depth(line.shape[0], COLS, BLOCK_COLS, BITS, PARTS) // PARTS
    LOADS_INPUTS_AHEAD: tl.constexpr = not USES_DOT
    STAGES: tl.constexpr = 2 if BITS else None  # of inputs of tensor cores, which Triton loads ahead by itself
    col = tl.arange(0, BLOCK_COLS)
    if LOADS_INPUTS_AHEAD:
        ahead = activations(x_ptr, norm_ptr, inverse, entry, col, BATCH, COLS, IS_NORMED, CACHE)
    for begin in tl.range(0, COLS, BLOCK_COLS, num_stages=STAGES, loop_unroll_factor=UNROLLED):
        if LOADS_INPUTS_AHEAD:
            x = ahead
            ahead = activations(
                x_ptr, norm_ptr, inverse, entry, begin + BLOCK_COLS + col, BATCH, COLS, IS_NORMED, CACHE
            )
        else:
            x = activations(x_ptr, norm_ptr, inverse, entry, begin + col, BATCH, COLS, IS_NORMED, CACHE)
        inputs = as_inputs(x, kind, BITS, GROUP, USES_DOT)
        left = add_block(left, blocks[0], inputs, kind, BITS, GROUP, USES_DOT)
        blocks = blocks[1:] + (load_block(matrix, place, line, ROWS, COLS, BITS, GROUP, BLOCK_COLS, USES_DOT),)
        place = following(place, COLS, PARTS, BLOCK_COLS, NUM_PROGRAMS)
        if PARTS == 2:
            right = add_block(right, blocks[0], inputs, kind, BITS, GROUP, USES_DOT)
            blocks = blocks[1:] + (load_block(matrix, place, line, ROWS, COLS, BITS, GROUP, BLOCK_COLS, USES_DOT),)
            place = following(place, COLS, PARTS, BLOCK_COLS, NUM_PROGRAMS)
    return summed(left, BITS, USES_DOT), summed(right, BITS, USES_DOT), (place, blocks)


@triton.jit
def opened_pair(
    matrix, program, line,
    ROWS: tl.constexpr, COLS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_COLS: tl.constexpr, NUM_PROGRAMS: tl.constexpr, USES_DOT: tl.constexpr,
):  # fmt: skip
    """What ``opened`` is for a matrix of two parts: of codes one queue, of dense weights one of each part."""
    if BITS:
        return opened(matrix, program, line, ROWS, COLS, 2, BITS, GROUP, BLOCK_COLS, NUM_PROGRAMS, USES_DOT)
    else:
        below = (matrix[0] + ROWS * COLS, matrix[1])
        above = opened(matrix, program, line, ROWS, COLS, 1, 0, 0, BLOCK_COLS, NUM_PROGRAMS, USES_DOT)
        return above, opened(below, program, line, ROWS, COLS, 1, 0, 0, BLOCK_COLS, NUM_PROGRAMS, USES_DOT)


@triton.jit
def product_pair(
    queue, matrix, line, x_ptr, norm_ptr, inverse, entry,
    BATCH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    USES_DOT: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """``product`` of a matrix of two parts with normed inputs."""
    if BITS:
        return product(queue, matrix, line, x_ptr, norm_ptr, inverse, entry,
                       BATCH, ROWS, COLS, 2, BITS, GROUP, BLOCK_COLS, NUM_PROGRAMS, True, USES_DOT, CACHE)  # fmt: skip
    else:
        above, below = queue
        under = (matrix[0] + ROWS * COLS, matrix[1])
        left, _, above = product(above, matrix, line, x_ptr, norm_ptr, inverse, entry,
                                 BATCH, ROWS, COLS, 1, 0, 0, BLOCK_COLS, NUM_PROGRAMS, True, USES_DOT,
                                 CACHE)  # fmt: skip
        right, _, below = product(below, under, line, x_ptr, norm_ptr, inverse, entry,
                                  BATCH, ROWS, COLS, 1, 0, 0, BLOCK_COLS, NUM_PROGRAMS, True, USES_DOT,
                                 CACHE)  # fmt: skip
        return left, right, (above, below)

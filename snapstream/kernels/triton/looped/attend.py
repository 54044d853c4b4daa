"""The attention stage of the looped kernel: norm and rotate heads, write a slot, attend over a split, merge.

A task is one split of one kv head of one entry; the splits of a row depend on its capacity alone. The task whose split
holds the new slot writes it, and puts the new key and value where its tile would have read them, so no store has to be
read back. The last task of a head to end merges its splits, in slot order whoever comes last.
"""

import triton
import triton.language as tl


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


@triton.jit
def split_result(partial_ptr, lse_ptr, at, is_head, dim, HEAD_DIM: tl.constexpr):
    """What a split found, ``[H/G, E]``, and the logarithm of its sum."""
    lse = tl.load(lse_ptr + at, mask=is_head, other=0.0, cache_modifier=".cg")
    mask = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    from_ = partial_ptr + at[:, None] * HEAD_DIM + dim[None, :]
    return tl.load(from_, mask=mask, other=0.0, cache_modifier=".cg"), lse


@triton.jit
def merge_splits(
    partial_ptr, lse_ptr, out_ptr, entry, kv_head, num_used, head, dim,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Weighted mean of the splits that the row reaches, in slot order, to ``out [B, H, E]``."""
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    is_head = head < group
    query = entry * NUM_HEADS + kv_head * group + head
    acc, best = split_result(partial_ptr, lse_ptr, query * NUM_SPLITS, is_head, dim, HEAD_DIM)
    total = tl.exp2(best - best)
    for split in range(1, num_used):
        part, lse = split_result(partial_ptr, lse_ptr, query * NUM_SPLITS + split, is_head, dim, HEAD_DIM)
        new_best = tl.maximum(best, lse)
        shrink, share = tl.exp2(best - new_best), tl.exp2(lse - new_best)
        total = total * shrink + share
        acc = acc * shrink[:, None] + part * share[:, None]
        best = new_best
    to = out_ptr + query[:, None] * HEAD_DIM + dim[None, :]
    mask = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(to, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)

"""The attention stage of the ring form: ``attend.attend_split`` with its layouts said, and the next slots on their way.

Gluon does not pipeline a loop by itself, so the slots of the next tile are loaded into registers before this one's are
used. Norms, rotation and the merge of splits are ``attend.py``'s own.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from snapstream.kernels.triton.looped import ring_layouts
from snapstream.kernels.triton.looped.attend import rotated


@gluon.jit
def times(a, b, acc):
    """``a @ b + acc``; numbers of 32 bits one by one, narrower ones by tensor cores."""
    bits: gl.constexpr = a.dtype.primitive_bitwidth
    left = gl.convert_layout(a, ring_layouts.factor(0, gl.num_warps(), bits))
    right = gl.convert_layout(b, ring_layouts.factor(1, gl.num_warps(), bits))
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
    """As ``attend.attend_split``."""
    group: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    half: gl.constexpr = HEAD_DIM // 2
    kind: gl.constexpr = heads_ptr.dtype.element_ty
    read: gl.constexpr = ring_layouts.slots(gl.num_warps())
    scored: gl.constexpr = ring_layouts.scored(gl.num_warps(), kind.primitive_bitwidth)
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

"""Decode attention over rows, split along the slots: each split is one program per kv head, a second kernel merges.

A program holds the whole group of query heads of its kv head, so K and V are read once, and only visible slots are
read: slots that were never written may hold anything. Splits are cut by the capacity alone and merged in slot order:
the result of a row depends on neither its neighbours nor the batch. ``configs.py`` says how large they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels.rows import CosSin, HeadNorm, Keep, LayerRows, RowPlaces
from snapstream.kernels.triton import configs
from snapstream.kernels.triton.dense import overlaps, wait_for_inputs
from snapstream.kernels.triton.rows import (
    FP8,
    INT4,
    INT8,
    as_words,
    hadamard,
    has_codes,
    kind_of,
    norm_rope,
    norm_rope_write,
    read_slots,
    rotation_steps,
    scale_strides,
    store_codes,
)

LOG2_E = 1.4426950408889634


@triton.jit
def decode_split_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, rows_ptr, lengths_ptr, out_ptr, lse_ptr,
    scale_log2,
    stride_sinks,
    stride_q_batch, stride_q_head,
    stride_k_row, stride_k_head, stride_k_slot,
    stride_v_row, stride_v_head, stride_v_slot,
    stride_scale_row, stride_scale_head,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT_SLOTS: tl.constexpr, NUM_SPLITS: tl.constexpr, STAGES: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, STEPS: tl.constexpr,
    HAS_SINKS: tl.constexpr, CAP_LOG2: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One split of one kv head of one row; writes the normalised partial result and its log-sum-exp (base 2).

    With a single split ``out`` is the result ``[B, H, E]``; else fp32 partials ``[B, H, splits, E]``. FP8 widens to the
    dtype of q, which holds it exactly; its scales, one per row and kv head, are left to the logits and to the end. So
    does int8, whose scales, one per slot, are left to logits and weights. With int4 q and the result are rotated.
    Learned sinks are added where the result is made: here or in the merge. ``CAP_LOG2`` is the cap of scores times
    ``LOG2_E``, or 0; with one ``scale_log2`` is times ``2 / cap``.
    """
    wait_for_inputs(EARLY)
    split, kv_head, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + entry).to(tl.int32)
    first = split * SPLIT_SLOTS
    if first >= length:
        return  # the merge reads the splits below the length only
    row = tl.load(rows_ptr + entry).to(tl.int64)
    last = tl.minimum(first + SPLIT_SLOTS, length)

    head = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    is_head, is_dim = head < GROUP, dim < HEAD_DIM
    query_head = kv_head * GROUP + head
    q_at = q_ptr + entry * stride_q_batch + query_head[:, None] * stride_q_head + dim[None, :]
    q = tl.load(q_at, mask=is_head[:, None] & is_dim[None, :], other=0.0)  # [GROUP_PAD, E]
    k_row = k_ptr + row * stride_k_row + kv_head.to(tl.int64) * stride_k_head
    v_row = v_ptr + row * stride_v_row + kv_head.to(tl.int64) * stride_v_head

    scale_at = row * stride_scale_row + kv_head * stride_scale_head
    if K_KIND == FP8:
        scale_log2 *= tl.load(k_scale_ptr + scale_at)
    if K_KIND == INT4:
        q = hadamard(q.to(tl.float32), GROUP_PAD, HEAD_PAD, STEPS).to(q_ptr.dtype.element_ty)

    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for begin in tl.range(first, last, BLOCK, num_stages=STAGES):
        slot = begin + tl.arange(0, BLOCK)
        is_seen = slot < last
        k = read_slots(k_row, slot, is_seen, stride_k_slot, HEAD_DIM, HEAD_PAD, K_KIND, q_ptr.dtype.element_ty)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [GROUP_PAD, BLOCK]
        if K_KIND == INT8:
            logits *= tl.load(k_scale_ptr + scale_at + slot, mask=is_seen, other=0.0)[None, :]
        if CAP_LOG2 != 0.0:  # tanh(x) = 1 - 2 / (1 + e^2x)
            logits = (1.0 - 2.0 / (1.0 + tl.exp2(logits))) * CAP_LOG2
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))  # finite: every tile has a visible slot
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(logits - new_best[:, None])
        v = read_slots(v_row, slot, is_seen, stride_v_slot, HEAD_DIM, HEAD_PAD, V_KIND, q_ptr.dtype.element_ty)
        total = total * shrink + tl.sum(weights, 1)
        if V_KIND == INT8:
            weights *= tl.load(v_scale_ptr + scale_at + slot, mask=is_seen, other=0.0)[None, :]
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        best = new_best

    if HAS_SINKS and NUM_SPLITS == 1:
        sink = tl.load(sinks_ptr + entry * stride_sinks + query_head, mask=is_head, other=0.0)
        total += tl.exp2(sink * 1.4426950408889634 - best)
    acc = acc / total[:, None]
    if V_KIND == FP8:
        acc *= tl.load(v_scale_ptr + scale_at)
    if V_KIND == INT4:
        acc = hadamard(acc, GROUP_PAD, HEAD_PAD, STEPS)
    place = (entry * (tl.num_programs(1) * GROUP) + query_head) * NUM_SPLITS + split  # [GROUP_PAD]
    out_at = out_ptr + place[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_head[:, None] & is_dim[None, :])
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + place, best + tl.log2(total), mask=is_head)


@triton.jit
def decode_merge_kernel(
    partial_ptr, lse_ptr, sinks_ptr, lengths_ptr, out_ptr,
    stride_sinks,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weighted mean of a head's partial results over the splits that its row reaches, in one order for all rows."""
    query_head, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + entry).to(tl.int32)  # of the step, written before its first kernel that starts early
    wait_for_inputs(EARLY)
    split, dim = tl.arange(0, SPLITS_PAD), tl.arange(0, HEAD_PAD)
    is_used = split < (length + SPLIT_SLOTS - 1) // SPLIT_SLOTS
    place = (entry * NUM_HEADS + query_head) * NUM_SPLITS + split
    lse = tl.load(lse_ptr + place, mask=is_used, other=float("-inf"))
    part_at = partial_ptr + place[:, None] * HEAD_DIM + dim[None, :]
    part = tl.load(part_at, mask=is_used[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    best = tl.max(lse, 0)
    share = tl.exp2(lse - best)
    total = tl.sum(share, 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + entry * stride_sinks + query_head) * 1.4426950408889634 - best)
    acc = tl.sum(part * (share / total)[:, None], 0)
    out_at = out_ptr + (entry * NUM_HEADS + query_head) * HEAD_DIM + dim
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def attend_rows(
    heads: Tensor, norm: HeadNorm, rope: CosSin, cache: LayerRows, places: RowPlaces, keep: Keep | None
) -> Tensor:
    """See ``reference.attend_rows``: two launches, three where a row is split, and one more for rows of integers.

    ValueError where values are keys.
    """
    if has_codes(cache):
        num_kv_heads = cache.num_kv_heads
        qk = norm_rope(heads, norm, rope, num_kv_heads)
        q, k, v = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:], heads[:, -num_kv_heads:]
        store_codes(k, v, cache, places.rows, places.slots)
    else:
        q = norm_rope_write(heads, norm, rope, cache, places.rows, places.slots)
    if keep is not None:
        keep(q)
    return decode_attention(q, cache, places.rows, places.lengths, norm.sinks, norm.cap)


def decode_attention(
    q: Tensor, cache: LayerRows, rows: Tensor, lengths: Tensor, sinks: Tensor | None = None, cap: float | None = None,
    launch: configs.DecodeLaunch | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.decode_attention``: ``q [B, H, E]``, ``rows, lengths [B]``, ``sinks`` fp32 -> ``[B, H, E]``.

    Any strides, as long as the last dimension is contiguous. Every length must be >= 1. ``launch`` is for the tuner.
    """
    cache.refuse_latents("decode attention in Triton")
    k, v = as_words(cache.k), as_words(cache.v)
    k_scale, v_scale = cache.scales
    batch, num_heads, head_dim = q.shape
    num_kv_heads, capacity = k.shape[1], k.shape[2]
    if q.stride(2) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError("decode attention needs a contiguous head dimension in q, k and v")
    k_kind = kind_of(cache.k, k_scale)
    num_bytes = 0.5 if k_kind == INT4.value else k.element_size()
    launch = launch or configs.decode_launch(head_dim, num_bytes, capacity, num_kv_heads, q.element_size())
    num_splits, early = launch.num_splits, overlaps(q.device)
    group = num_heads // num_kv_heads
    head_pad = configs.power_of_two(head_dim, 16)
    out = q.new_empty(batch, num_heads, head_dim)
    if num_splits == 1:
        partial, lse = out, out
    else:
        partial = torch.empty(batch, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, num_heads, num_splits, dtype=torch.float32, device=q.device)
    sink_logits, stride_sinks = (q, 0) if sinks is None else (sinks, sinks.stride(0) if sinks.dim() == 2 else 0)
    decode_split_kernel[(num_splits, num_kv_heads, batch)](
        q, k, v, k if k_scale is None else k_scale, v if v_scale is None else v_scale, sink_logits, rows, lengths,
        partial, lse,
        head_dim**-0.5 * LOG2_E * (1.0 if cap is None else 2.0 / cap),
        stride_sinks,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        *scale_strides(cache),
        GROUP=group, GROUP_PAD=configs.power_of_two(group, 16), HEAD_DIM=head_dim, HEAD_PAD=head_pad,
        BLOCK=launch.block, SPLIT_SLOTS=launch.split_slots, NUM_SPLITS=num_splits, STAGES=launch.num_stages,
        K_KIND=k_kind, V_KIND=kind_of(cache.v, v_scale), STEPS=rotation_steps(head_dim),
        HAS_SINKS=sinks is not None, CAP_LOG2=(cap or 0.0) * LOG2_E, EARLY=early,
        num_warps=launch.num_warps, num_stages=launch.num_stages, launch_pdl=early,
    )  # fmt: skip
    if num_splits > 1:
        launch_merge(partial, lse, lengths, out, launch.split_slots, sinks)
    return out


def launch_merge(
    partial: Tensor, lse: Tensor, lengths: Tensor, out: Tensor, split_slots: int, sinks: Tensor | None = None
) -> None:
    """Fill ``out [B, H, E]`` from results of splits ``[B, H, splits, E]`` fp32 and their log-sum-exps, base 2."""
    batch, num_heads, num_splits, size = partial.shape
    pads, early = (configs.power_of_two(num_splits), configs.power_of_two(size, 16)), overlaps(partial.device)
    decode_merge_kernel[(num_heads, batch)](
        partial, lse, lse if sinks is None else sinks, lengths, out,
        sinks.stride(0) if sinks is not None and sinks.dim() == 2 else 0,
        NUM_HEADS=num_heads, HEAD_DIM=size, HEAD_PAD=pads[1], SPLIT_SLOTS=split_slots, NUM_SPLITS=num_splits,
        SPLITS_PAD=pads[0], HAS_SINKS=sinks is not None, EARLY=early,
        num_warps=min(max(pads[0] * pads[1] // 1024, 1), 16), launch_pdl=early,
    )  # fmt: skip

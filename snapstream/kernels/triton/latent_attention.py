"""Decode attention over rows of latents ``c | r``, split along the slots and along the query heads.

All query heads share a latent, and its c is key and value at once. Tiles of c and r are loaded apart, so that neither
is padded to the size of both; their products are added, and the tile of c then serves the values. Of rows in FP8 the
one scale of a row multiplies scores and result, and tiles are widened in registers. A program holds as
many heads as its registers can accumulate. Only visible slots are read; splits are cut by the capacity alone and merged
by ``attention.decode_merge_kernel``, so that the result of a row depends on neither its neighbours nor the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels import reference
from snapstream.kernels.rows import CosSin, HeadNorm, Keep, LayerRows, RowPlaces
from snapstream.kernels.triton import attention, configs
from snapstream.kernels.triton.dense import overlaps, wait_for_inputs


@triton.jit
def latent_split_kernel(
    q_ptr, k_ptr, scale_ptr, sinks_ptr, rows_ptr, lengths_ptr, out_ptr, lse_ptr,
    scale_log2,
    stride_q_batch, stride_q_head, stride_row, stride_slot,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT_SLOTS: tl.constexpr, NUM_SPLITS: tl.constexpr, STAGES: tl.constexpr,
    IS_FP8: tl.constexpr, HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One split of a row for ``HEADS`` query heads; writes as ``attention.decode_split_kernel`` does, ``RANK`` wide."""
    wait_for_inputs(EARLY)
    split, tile, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + entry).to(tl.int32)
    first = split * SPLIT_SLOTS
    if first >= length:
        return  # the merge reads the splits below the length only
    row = tl.load(rows_ptr + entry).to(tl.int64)
    last = tl.minimum(first + SPLIT_SLOTS, length)

    head = tile * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS
    rank, turn = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    is_rank, is_turn = rank < RANK, turn < ROPE
    q_head = q_ptr + entry * stride_q_batch + head[:, None] * stride_q_head
    q_c = tl.load(q_head + rank[None, :], mask=is_head[:, None] & is_rank[None, :], other=0.0)  # [HEADS, R]
    q_r = tl.load(q_head + RANK + turn[None, :], mask=is_head[:, None] & is_turn[None, :], other=0.0)  # [HEADS, P]
    latents = k_ptr + row * stride_row
    if IS_FP8:
        scale_log2 *= tl.load(scale_ptr + row)

    best = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, RANK_PAD], tl.float32)
    for begin in tl.range(first, last, BLOCK, num_stages=STAGES):
        slot = begin + tl.arange(0, BLOCK)
        is_seen = slot < last
        at = latents + slot[:, None] * stride_slot
        c = tl.load(at + rank[None, :], mask=is_seen[:, None] & is_rank[None, :], other=0.0).to(q_c.dtype)  # [BLOCK, R]
        r = tl.load(at + RANK + turn[None, :], mask=is_seen[:, None] & is_turn[None, :], other=0.0).to(
            q_c.dtype
        )  # [BLOCK, P]
        logits = tl.dot(q_c, tl.trans(c), input_precision="ieee")
        logits = tl.dot(q_r, tl.trans(r), logits, input_precision="ieee") * scale_log2  # [HEADS, BLOCK]
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))  # finite: every tile has a visible slot
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(logits - new_best[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(c.dtype), c, acc * shrink[:, None], input_precision="ieee")
        best = new_best

    if HAS_SINKS and NUM_SPLITS == 1:  # else the merge adds them
        total += tl.exp2(tl.load(sinks_ptr + head, mask=is_head, other=0.0) * 1.4426950408889634 - best)
    acc = acc / total[:, None]
    if IS_FP8:
        acc *= tl.load(scale_ptr + row)
    place = (entry * NUM_HEADS + head) * NUM_SPLITS + split  # [HEADS]
    out_at = out_ptr + place[:, None] * RANK + rank[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_head[:, None] & is_rank[None, :])
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + place, best + tl.log2(total), mask=is_head)


def attend_rows(
    heads: Tensor, norm: HeadNorm, rope: CosSin | None, cache: LayerRows, places: RowPlaces, keep: Keep | None
) -> Tensor:
    """See ``reference.attend_rows``, over rows of either kind; of latents ``heads [B, H+1, E]``, which come rotated."""
    if rope is not None:
        return attention.attend_rows(heads, norm, rope, cache, places, keep)
    q, latents = heads[:, :-1], heads[:, -1:]
    if keep is not None:
        keep(q)
    reference.write_slots(latents, latents, cache, places.rows, places.slots)
    return decode_attention(q, cache, places.rows, places.lengths, norm.sinks)


def decode_attention(q: Tensor, cache: LayerRows, rows: Tensor, lengths: Tensor, sinks: Tensor | None = None) -> Tensor:
    """See ``reference.decode_attention``; ``sinks [H]`` fp32."""
    return launch_latent_attention(q, cache.k, cache.values.shape[-1], rows, lengths, cache.scales[0], sinks)


def launch_latent_attention(
    q: Tensor, latents: Tensor, rank: int, rows: Tensor, lengths: Tensor, scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``q [B, H, E]`` over ``latents [rows+1, 1, C, E]`` of one layer -> ``[B, H, rank]``.

    The last dimension must be contiguous; every length >= 1. ``scales [rows+1, 1]`` of rows in FP8, ``sinks [H]`` fp32.
    """
    batch, num_heads, size = q.shape
    capacity = latents.shape[2]
    if q.stride(2) != 1 or latents.stride(3) != 1:
        raise ValueError("latent attention needs a contiguous head dimension in q and latents")
    launch = configs.latent_launch(q.element_size(), latents.element_size(), capacity, num_heads)
    num_splits, rank_pad, early = launch.num_splits, configs.power_of_two(rank, 16), overlaps(q.device)
    out = q.new_empty(batch, num_heads, rank)
    if num_splits == 1:
        partial, lse = out, out
    else:
        partial = torch.empty(batch, num_heads, num_splits, rank, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, num_heads, num_splits, dtype=torch.float32, device=q.device)
    latent_split_kernel[(num_splits, triton.cdiv(num_heads, configs.LATENT_HEADS), batch)](
        q, latents, latents if scales is None else scales, q if sinks is None else sinks, rows, lengths, partial, lse,
        size**-0.5 * attention.LOG2_E,
        q.stride(0), q.stride(1), latents.stride(0), latents.stride(2),
        NUM_HEADS=num_heads, HEADS=configs.LATENT_HEADS, RANK=rank, RANK_PAD=rank_pad, ROPE=size - rank,
        ROPE_PAD=configs.power_of_two(size - rank, 16), BLOCK=launch.block, SPLIT_SLOTS=launch.split_slots,
        NUM_SPLITS=num_splits, STAGES=launch.num_stages, IS_FP8=scales is not None,
        HAS_SINKS=sinks is not None, EARLY=early,
        num_warps=launch.num_warps, num_stages=launch.num_stages, launch_pdl=early,
    )  # fmt: skip
    if num_splits > 1:
        attention.launch_merge(partial, lse, lengths, out, launch.split_slots, sinks)
    return out

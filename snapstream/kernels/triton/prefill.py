"""Attention of a prompt's chunk over all keys before it, with the mask aligned at the last key.

A program holds ``BLOCK_M`` queries of one head and walks over the keys that they see with a running softmax
(FlashAttention-2, arXiv 2307.08691, algorithm 1): first blocks that all of its queries see, then those that a mask
cuts. Heads of a group stand side by side in the grid, so that they read their keys and values together.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels.triton import configs
from snapstream.kernels.triton.attention import LOG2_E


@triton.jit
def _tile(
    q, k_head, v_head, best, total, acc, start, position, num_keys, scale_log2, stride_k_token, stride_v_token,
    WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    CAP_LOG2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys; the state of the softmax is that of ``decode_split_kernel``."""
    key = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_PAD)
    k_at = k_head + key.to(tl.int64)[:, None] * stride_k_token + dim[None, :]
    v_at = v_head + key.to(tl.int64)[:, None] * stride_v_token + dim[None, :]
    if MASKED or HEAD_DIM < HEAD_PAD:
        mask = (key < num_keys)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_at, mask=mask, other=0.0)
        v = tl.load(v_at, mask=mask, other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if CAP_LOG2 != 0.0:  # tanh(x) = 1 - 2 / (1 + e^2x)
        logits = (1.0 - 2.0 / (1.0 + tl.exp2(logits))) * CAP_LOG2
    if MASKED:
        is_seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen &= key[None, :] > position[:, None] - WINDOW
        logits = tl.where(is_seen, logits, -1e30)  # finite: a block may hide all its keys from a query
    new_best = tl.maximum(best, tl.max(logits, 1))
    shrink = tl.exp2(best - new_best)
    weights = tl.exp2(logits - new_best[:, None])
    if MASKED:
        weights = tl.where(is_seen, weights, 0.0)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_best, total, acc


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr,
    scale_log2, num_queries, num_keys,
    stride_q_token, stride_q_head, stride_k_head, stride_k_token, stride_v_head, stride_v_token,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HAS_SINKS: tl.constexpr,
    CAP_LOG2: tl.constexpr,
):  # fmt: skip
    """``BLOCK_M`` queries of one head; those that see most keys first. ``CAP_LOG2`` as in ``decode_split_kernel``."""
    head = tl.program_id(0).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_PAD)
    mask = (query < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = q_ptr + head * stride_q_head + query.to(tl.int64)[:, None] * stride_q_token + dim[None, :]
    q = tl.load(q_at, mask=mask, other=0.0)
    k_head = k_ptr + head // GROUP * stride_k_head
    v_head = v_ptr + head // GROUP * stride_v_head
    first = num_keys - num_queries + tile * BLOCK_M  # position of the first query
    position = first + tl.arange(0, BLOCK_M)
    last = tl.minimum(first + BLOCK_M, num_keys)
    best = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    else:
        whole = (first + 1) // BLOCK_N * BLOCK_N
        for start in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
            best, total, acc = _tile(
                q, k_head, v_head, best, total, acc, start, position, num_keys, scale_log2, stride_k_token,
                stride_v_token, WINDOW, HEAD_DIM, HEAD_PAD, BLOCK_N, CAP_LOG2, False,
            )  # fmt: skip
        begin = whole
    for start in tl.range(begin, last, BLOCK_N, num_stages=STAGES):
        best, total, acc = _tile(
            q, k_head, v_head, best, total, acc, start, position, num_keys, scale_log2, stride_k_token,
            stride_v_token, WINDOW, HEAD_DIM, HEAD_PAD, BLOCK_N, CAP_LOG2, True,
        )  # fmt: skip
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634 - best)
    out = acc / total[:, None]
    out_at = out_ptr + (query.to(tl.int64)[:, None] * tl.num_programs(0) + head) * HEAD_DIM + dim[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@cache
def shared_bytes(device: torch.device) -> int:
    """Most shared memory of a program; for devices that are no GPU that of an H200."""
    if device.type != "cuda":
        return 232_448
    found: int = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return found


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None, launch: configs.PrefillLaunch | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.prefill_attention``; any strides, with contiguous heads. ``launch`` is for the tuner."""
    num_queries, num_heads, head_dim = q.shape
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("prefill attention needs a contiguous head dimension in q, k and v")
    cut = launch or configs.prefill_launch(head_dim, q.element_size(), shared_bytes(q.device))
    out = q.new_empty(num_queries, num_heads, head_dim)
    prefill_attention_kernel[(num_heads, triton.cdiv(num_queries, cut.queries))](
        q, k, v, q if sinks is None else sinks, out,
        head_dim**-0.5 * LOG2_E * (1.0 if cap is None else 2.0 / cap), num_queries, k.shape[1],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        GROUP=num_heads // k.shape[0], HEAD_DIM=head_dim, HEAD_PAD=configs.power_of_two(head_dim, 16),
        WINDOW=window or 0, BLOCK_M=cut.queries, BLOCK_N=cut.block,
        STAGES=cut.num_stages, HAS_SINKS=sinks is not None, CAP_LOG2=(cap or 0.0) * LOG2_E,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out

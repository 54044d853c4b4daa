"""SnapKV scores in two passes over the staged keys; probabilities never reach memory.

Pass 1 finds the log-sum-exp of every observation query over a constant number of keys per program, the partial results
are merged in key order, pass 2 makes the products again and adds up the probabilities of queries and group. The kernels
read the keys twice and nothing more; how keys are cut depends on their number alone, so chunking a prompt cannot change
a score.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels import pytorch as plain_scores
from snapstream.kernels.triton import configs
from snapstream.kernels.triton.attention import LOG2_E

WIDEST = 256  # numbers of a key; tiles of wider ones do not fit into shared memory


@triton.jit(do_not_specialize=["first_query", "low", "high"])
def window_lse_kernel(
    q_ptr, k_ptr, lse_ptr,
    scale_log2, first_query, low, high,
    stride_q_token, stride_q_head, stride_k_head, stride_k_token,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp (base 2) of ``ROWS`` (head, query) pairs over one split of the keys ``[low, high)``."""
    split, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = part * ROWS + tl.arange(0, ROWS)  # head of the group x query that votes
    query = pair % WINDOW
    is_pair = pair < GROUP * WINDOW
    dim = tl.arange(0, HEAD_PAD)
    is_dim = dim < HEAD_DIM
    q_head = kv_head * GROUP + pair // WINDOW
    q_at = q_ptr + query[:, None] * stride_q_token + q_head[:, None] * stride_q_head + dim[None, :]
    q = tl.load(q_at, mask=is_pair[:, None] & is_dim[None, :], other=0.0)  # [ROWS, E]
    k_head = k_ptr + kv_head.to(tl.int64) * stride_k_head

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first = low + split * SPLIT
    last = tl.minimum(first + SPLIT, high)
    for begin in tl.range(first, last, BLOCK, num_stages=STAGES):
        token = begin + tl.arange(0, BLOCK)
        k_at = k_head + token.to(tl.int64)[:, None] * stride_k_token + dim[None, :]
        k = tl.load(k_at, mask=(token < last)[:, None] & is_dim[None, :], other=0.0)  # [BLOCK, E]
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [ROWS, BLOCK]
        is_seen = (token < last)[None, :] & (token[None, :] <= first_query + query[:, None])
        logits = tl.where(is_seen, logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)  # a query may see no key of a tile
        total = total * tl.exp2(best - anchor) + tl.sum(tl.exp2(logits - anchor[:, None]), 1)
        best = new_best
    place = (split * tl.num_programs(1) + kv_head) * (GROUP * WINDOW) + pair
    tl.store(lse_ptr + place, best + tl.log2(total), mask=is_pair)


@triton.jit(do_not_specialize=["first_query", "start", "stop"])
def votes_kernel(
    q_ptr, k_ptr, lse_ptr, scores_ptr,
    scale_log2, first_query, start, stop,
    stride_q_token, stride_q_head, stride_k_head, stride_k_token,
    WINDOW: tl.constexpr, WINDOW_BLOCK: tl.constexpr, GROUP: tl.constexpr, GROUP_MAX: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores of ``BLOCK`` candidates of one kv head: probabilities summed over the queries, merged over the group."""
    kv_head = tl.program_id(1)
    token = start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, HEAD_PAD)
    is_token, is_dim = token < stop, dim < HEAD_DIM
    k_at = k_ptr + kv_head.to(tl.int64) * stride_k_head + token.to(tl.int64)[:, None] * stride_k_token + dim[None, :]
    k = tl.trans(tl.load(k_at, mask=is_token[:, None] & is_dim[None, :], other=0.0))  # [E, BLOCK]

    votes = tl.zeros([BLOCK], tl.float32)
    for member in range(GROUP):
        own = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, WINDOW, WINDOW_BLOCK):
            query = begin + tl.arange(0, WINDOW_BLOCK)
            is_query = query < WINDOW
            head = kv_head * GROUP + member
            q_at = q_ptr + query[:, None] * stride_q_token + head * stride_q_head + dim[None, :]
            q = tl.load(q_at, mask=is_query[:, None] & is_dim[None, :], other=0.0)  # [WINDOW_BLOCK, E]
            lse = tl.load(lse_ptr + head * WINDOW + query, mask=is_query, other=float("-inf"))
            logits = tl.dot(q, k, input_precision="ieee") * scale_log2  # [WINDOW_BLOCK, BLOCK]
            # a query that sees no key casts no vote: its lse is -inf
            is_seen = (lse > float("-inf"))[:, None] & (token[None, :] <= first_query + query[:, None])
            weights = tl.where(is_seen, tl.exp2(logits - tl.where(lse > float("-inf"), lse, 0.0)[:, None]), 0.0)
            own += tl.sum(weights, 0)
        votes = tl.maximum(votes, own) if GROUP_MAX else votes + own
    tl.store(scores_ptr + kv_head.to(tl.int64) * (stop - start) + (token - start), votes, mask=is_token)


def scores_of_any_size(
    queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, *, over_row: bool, group_max: bool,
    sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.snapkv_scores``; keys wider than ``WIDEST`` (latents), sinks and capped scores take plain
    products.
    """
    if sinks is not None or cap is not None:
        return plain_scores.snapkv_scores(
            queries, keys, first_query, start, stop, over_row=over_row, group_max=group_max, sinks=sinks, cap=cap
        )
    score = plain_scores.snapkv_scores if keys.shape[2] > WIDEST else snapkv_scores
    return score(queries, keys, first_query, start, stop, over_row=over_row, group_max=group_max)


def snapkv_scores(
    queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, *, over_row: bool, group_max: bool,
    launch: configs.ScoreLaunch | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.snapkv_scores``: ``queries [w, H, E]``, ``keys [G, N, E]`` -> ``[G, stop - start]`` fp32.

    ``launch`` is for the tuner.
    """
    window, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    if queries.stride(2) != 1 or keys.stride(2) != 1:
        raise ValueError("SnapKV scores need a contiguous head dimension in queries and keys")
    group = num_heads // num_kv_heads
    scores = torch.empty(num_kv_heads, stop - start, dtype=torch.float32, device=keys.device)
    if stop <= start:
        return scores
    low, high = (0, num_keys) if over_row else (start, stop)
    launch = launch or configs.score_launch(head_dim, keys.element_size())
    num_splits = triton.cdiv(high - low, configs.SCORE_SPLIT)
    pairs = group * window
    rows = min(configs.power_of_two(pairs, 16), launch.rows)
    head_pad = configs.power_of_two(head_dim, 16)
    partial = torch.empty(num_splits, num_kv_heads, pairs, dtype=torch.float32, device=keys.device)
    scale = head_dim**-0.5 * LOG2_E
    strides = (queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1))
    window_lse_kernel[(num_splits, num_kv_heads, triton.cdiv(pairs, rows))](
        queries, keys, partial, scale, first_query, low, high, *strides,
        WINDOW=window, GROUP=group, HEAD_DIM=head_dim, HEAD_PAD=head_pad, ROWS=rows, BLOCK=launch.block,
        SPLIT=configs.SCORE_SPLIT, STAGES=launch.num_stages,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    # exp2 and log2 of at most N / 2048 numbers per query: plain PyTorch, in key order
    best = partial.amax(0)  # [G, pairs]
    anchor = best.nan_to_num(neginf=0.0)
    lse = anchor + (partial - anchor).exp2().sum(0).log2()
    votes_kernel[(triton.cdiv(stop - start, launch.block), num_kv_heads)](
        queries, keys, lse, scores, scale, first_query, start, stop, *strides,
        WINDOW=window, WINDOW_BLOCK=min(configs.power_of_two(window, 16), launch.window_block),
        GROUP=group, GROUP_MAX=group_max,
        HEAD_DIM=head_dim, HEAD_PAD=head_pad, BLOCK=launch.block, num_warps=4,
    )  # fmt: skip
    return scores

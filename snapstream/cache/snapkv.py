"""Which prompt tokens a row keeps: scores from the observation window, pooled, top-k per kv head.

The last ``window_len`` prompt queries vote. Per layer and query head: softmax of ``q k / sqrt(E)`` over the eviction
candidates, summed over the window; then query heads that share a kv head are merged, scores are pooled along the keys
with stride 1 and zero padding, and the best ``K`` positions are kept, ascending; ties go to the lower position
(SnapKV, arXiv 2404.14469, section 4; SnapStream, arXiv 2511.03092, section 3; the merge of grouped heads is ours, and
so are hops: before the pooling, the tokens that got most votes vote in turn, because what the question points at may
itself point at what the answer will need).
``compress.py`` uses the result; ``kernels/reference.py`` holds the plain meaning of the scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from snapstream.config import SnapKVConfig
from snapstream.kernels import dispatch


def pool_scores(scores: Tensor, config: SnapKVConfig) -> Tensor:
    """Smooth ``scores [G, n]`` along the candidates, so that neighbours of a hit are kept with it."""
    width = config.pool_kernel
    if width == 1:
        return scores
    if config.pooling == "avg":
        return F.avg_pool1d(scores[None], width, stride=1, padding=width // 2)[0]
    return F.max_pool1d(scores[None], width, stride=1, padding=width // 2)[0]


def select_topk(scores: Tensor, num_topk: int) -> Tensor:
    """Indices ``[G, K]`` of the ``num_topk`` best of ``scores [G, n]``, ascending; ties go to the lower index.

    A threshold and two running counts instead of a stable sort: no host synchronisation, a fixed output shape.
    """
    num_heads, num_candidates = scores.shape
    if num_topk >= num_candidates:
        return torch.arange(num_candidates, device=scores.device).expand(num_heads, -1).contiguous()
    threshold = scores.topk(num_topk, dim=-1).values[:, -1:]  # [G, 1]
    above = scores > threshold
    tied = scores == threshold
    room = num_topk - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1) <= room))
    place = torch.where(keep, keep.cumsum(-1) - 1, num_topk)  # everything else lands in one spare column
    chosen = torch.empty(num_heads, num_topk + 1, dtype=torch.int64, device=scores.device)
    index = torch.arange(num_candidates, device=scores.device).expand(num_heads, -1)
    chosen.scatter_(1, place, index)
    return chosen[:, :num_topk].contiguous()


def select_positions(
    queries: Tensor,
    keys: Tensor,
    layer: int,
    candidates: range,
    num_topk: int,
    config: SnapKVConfig,
) -> Tensor:
    """Prompt positions ``[G, K]`` to keep, ascending.

    ``queries [w, H, E]`` are the last queries of the prompt after RoPE, as many as ``config.num_queries`` says;
    ``keys [G, N, E]`` are all its keys, after RoPE. With ``config.selection == "random"`` the choice depends
    on layer, head and position alone, and neighbours are not pooled.
    """
    if config.selection == "random":
        chance = dispatch.random_scores(layer, keys.shape[0], candidates.start, candidates.stop, keys.device)
        return select_topk(chance, num_topk) + candidates.start
    window = queries[-config.window_len :]
    scores = dispatch.snapkv_scores(
        window,
        keys,
        keys.shape[1] - window.shape[0],
        candidates.start,
        candidates.stop,
        over_row=config.softmax_over == "row",
        group_max=config.group_reduce == "max",
    )  # [G, n] fp32
    pooled = pool_scores(scores, config)
    if config.num_hops:
        first = select_topk(pooled, -(-num_topk // 2))  # half of the slots are the window's, whatever hops find
        pooled = pool_scores(_add_hops(scores, queries, keys, candidates, config), config)
        pooled.scatter_(1, first, float("inf"))
    return select_topk(pooled, num_topk) + candidates.start


def _add_hops(scores: Tensor, queries: Tensor, keys: Tensor, candidates: range, config: SnapKVConfig) -> Tensor:
    """Votes of the window plus those of every hop, each hop's in proportion to what its voters got; all count alike."""
    total = latest = _normalised(scores)
    for _ in range(config.num_hops):
        voters = select_topk(latest, config.window_len)  # [G, m]; as many as the window has queries
        weights = latest.gather(1, voters)
        latest = _normalised(dispatch.hop_scores(weights, voters, queries, keys, candidates.start, candidates.stop))
        total = total + latest
    return total


def _normalised(scores: Tensor) -> Tensor:
    """Scores that sum to 1 per kv head (or to 0 where nobody voted)."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)

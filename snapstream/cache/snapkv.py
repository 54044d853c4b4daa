"""Which prompt tokens a row keeps: scores from the observation window, pooled, top-k per kv head.

The last ``window_len`` prompt queries vote. Per layer and query head: softmax of ``q k / sqrt(E)`` over the eviction
candidates, summed over the window; then query heads that share a kv head are merged, scores are pooled along the keys
with stride 1 and zero padding, and the best ``K`` positions are kept, ascending; ties go to the lower position
(SnapKV, arXiv 2404.14469, section 4; SnapStream, arXiv 2511.03092, section 3; the merge of grouped heads is ours).
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
    queries: Tensor, keys: Tensor, first_query: int, candidates: range, num_topk: int, config: SnapKVConfig
) -> Tensor:
    """Prompt positions ``[G, K]`` to keep, ascending.

    ``queries [w, H, E]`` are the observation queries after RoPE, the first of them at position ``first_query``;
    ``keys [G, N, E]`` are all keys of the prompt, after RoPE.
    """
    scores = dispatch.snapkv_scores(
        queries,
        keys,
        first_query,
        candidates.start,
        candidates.stop,
        over_row=config.softmax_over == "row",
        group_max=config.group_reduce == "max",
    )  # [G, n] fp32
    return select_topk(pool_scores(scores, config), num_topk) + candidates.start

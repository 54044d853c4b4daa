"""Which prompt tokens a row keeps: scores from the observation window, pooled, top-k per kv head.

The last ``window_len`` prompt queries vote. Per layer and query head: softmax of ``q k / sqrt(E)`` over the eviction
candidates, summed over the window; then query heads that share a kv head are merged, scores are pooled along the keys
with stride 1 and zero padding, and the best ``K`` positions are kept, ascending; ties go to the lower position
(SnapKV, arXiv 2404.14469, section 4; SnapStream, arXiv 2511.03092, section 3). Ours are the merge of grouped heads; the
pooling ahead, because a question points at the key and the answer stands behind it; and hops: before the pooling, the
tokens that got most votes vote in turn, because what the question points at may itself point at what the answer needs.
``compress.py`` uses the result; ``kernels/reference.py`` holds the plain meaning of the scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from snapstream.config import SnapKVConfig
from snapstream.kernels import reference
from snapstream.kernels.bound import Kernels, bind

MAX_HALVINGS = 32  # a score that halved as often is carried no further


def pool_scores(scores: Tensor, config: SnapKVConfig) -> Tensor:
    """Smooth ``scores [G, n]`` along the candidates, so that neighbours of a hit are kept with it.

    First SnapKV's centred pooling; then every score is carried ahead, halved every ``pool_half_life`` tokens, and a
    candidate takes the best that reaches it (beyond the papers; ``reference.carry_ahead`` is the plain meaning).
    """
    pooled = pool_centred(scores, config)
    return carry_ahead(pooled, config.pool_half_life) if config.pool_half_life else pooled


def pool_centred(scores: Tensor, config: SnapKVConfig) -> Tensor:
    """SnapKV's pooling alone."""
    width = config.pool_kernel
    if width == 1:
        return scores
    pool = F.avg_pool1d if config.pooling == "avg" else F.max_pool1d
    return pool(scores[None], width, stride=1, padding=width // 2)[0]


def carry_ahead(scores: Tensor, half_life: int) -> Tensor:
    """``out[g, j] = max over d of scores[g, j - d] * 2^(-d / half_life)`` for scores >= 0, in doubling steps.

    After steps of 1, 2, 4 ... every score has reached twice as far ahead, so a few passes do for any distance.
    """
    out, step = scores.clone(), 1
    while step < min(scores.shape[-1], MAX_HALVINGS * half_life):
        carried = out[:, :-step] * 2.0 ** (-step / half_life)  # a copy: the next line writes what it was read from
        torch.maximum(out[:, step:], carried, out=out[:, step:])
        step *= 2
    return out


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
    kernels: Kernels | None = None,
) -> Tensor:
    """Prompt positions ``[G, K]`` to keep, ascending.

    ``queries [w, H, E]`` are the last queries of the prompt after RoPE, as many as ``config.num_queries`` says;
    ``keys [G, N, E]`` are all its keys, after RoPE. With ``config.selection == "random"`` the choice depends
    on layer, head and position alone, and neighbours are not pooled.
    """
    if config.selection == "random":
        chance = reference.random_scores(layer, keys.shape[0], candidates.start, candidates.stop, keys.device)
        return select_topk(chance, num_topk) + candidates.start
    kernels = kernels or bind(keys.device)
    window = queries[-config.window_len :]
    scores = kernels.snapkv_scores(
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
        # Half of the slots are the window's, whatever hops find; only what it points at is carried ahead.
        first = select_topk(pooled, -(-num_topk // 2))
        pooled = pool_centred(_add_hops(kernels, scores, queries, keys, candidates, config), config)
        pooled.scatter_(1, first, float("inf"))
    return select_topk(pooled, num_topk) + candidates.start


def _add_hops(
    kernels: Kernels, scores: Tensor, queries: Tensor, keys: Tensor, candidates: range, config: SnapKVConfig
) -> Tensor:
    """Votes of the window plus those of every hop, each hop's in proportion to what its voters got; all count alike."""
    total = latest = _normalised(scores)
    for _ in range(config.num_hops):
        voters = select_topk(latest, config.window_len)  # [G, m]; as many as the window has queries
        weights = latest.gather(1, voters)
        latest = _normalised(kernels.hop_scores(weights, voters, queries, keys, candidates.start, candidates.stop))
        total = total + latest
    return total


def _normalised(scores: Tensor) -> Tensor:
    """Scores that sum to 1 per kv head (or to 0 where nobody voted)."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)

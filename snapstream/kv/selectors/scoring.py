"""Top-k selection, and pooling of scores along the candidates so that tokens next to a hit are kept with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def select_topk(scores: Tensor, num_topk: int) -> Tensor:
    """Indices ``[G, K]`` of the ``num_topk`` best of ``scores [G, n]``, ascending; ties go to the lower index.

    A threshold and two running counts instead of a stable sort: no host synchronization, fixed output shape.
    """
    num_heads, num_candidates = scores.shape
    if num_topk == 0:
        return torch.empty(num_heads, 0, dtype=torch.int64, device=scores.device)
    if num_topk >= num_candidates:
        return torch.arange(num_candidates, device=scores.device).expand(num_heads, -1).contiguous()
    threshold = scores.topk(num_topk, dim=-1).values[:, -1:]  # [G, 1]
    above = scores > threshold
    tied = scores == threshold
    room = num_topk - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1) <= room))
    place = torch.where(keep, keep.cumsum(-1) - 1, num_topk)  # all others go to a spare column
    chosen = torch.empty(num_heads, num_topk + 1, dtype=torch.int64, device=scores.device)
    index = torch.arange(num_candidates, device=scores.device).expand(num_heads, -1)
    chosen.scatter_(1, place, index)
    return chosen[:, :num_topk].contiguous()


MAX_HALVINGS = 32  # a score halved this often is carried no further


def pool_max(scores: Tensor, width: int) -> Tensor:
    """Centered max pooling of ``scores [G, n]`` with an odd ``width`` and stride 1."""
    return F.max_pool1d(scores[None], width, stride=1, padding=width // 2)[0]


def carry_ahead(scores: Tensor, half_life: int) -> Tensor:
    """``out[g, j] = max over d of scores[g, j - d] * 2^(-d / half_life)`` for scores >= 0, in doubling steps.

    Each step doubles the distance, so a few passes cover any; a half-life of 0 carries nothing. Reference:
    ``kernels/reference.py``.
    """
    out, step = scores.clone(), 1
    while step < min(scores.shape[-1], MAX_HALVINGS * half_life):
        carried = out[:, :-step] * 2.0 ** (-step / half_life)  # a copy: the next line writes its source
        torch.maximum(out[:, step:], carried, out=out[:, step:])
        step *= 2
    return out

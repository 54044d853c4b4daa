"""Diverse: part of the slots goes to keys that are unlike the rest, whatever the question. Not in a paper.

The observation window finds what the question points at; a later question, or the next link of a chain, points at
other tokens. KeyDiff (arXiv 2504.15364) keeps keys far from the mean key of the prompt, which needs no queries. SnapKV
selects first; then the best of the others by that distance, pooled so that neighbors stay together.

The cost is the tail of SnapKV's scores: long values lose their ends at small budgets. docs/research/accuracy.md has
both, on documents whose facts stand in filler, where unlike keys *are* the facts, and on dense ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snapstream.config.values import as_number
from snapstream.kv.selectors.snapkv import POOL_WIDTH, SnapKV

if TYPE_CHECKING:
    from torch import Tensor

    from snapstream.kernels.interface import Kernels


@dataclass(frozen=True, kw_only=True)
class Diverse(SnapKV):
    """SnapKV's votes for ``1 - share`` of the slots, unlike keys for the rest. A full row re-selects by votes alone."""

    name: ClassVar[str] = "diverse"
    share: float = 0.5  # of the top-k slots; docs/research/accuracy.md has the sweep

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "share", as_number("share", self.share, 0.0, 1.0))

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        votes = self.votes(queries[-self.observation_len :], keys, candidates, kernels)  # [G, n]
        chosen = choose(self.pool(votes), keys, candidates, num_topk, self.share, kernels)
        return chosen + candidates.start


def choose(pooled: Tensor, keys: Tensor, candidates: range, num_topk: int, share: float, kernels: Kernels) -> Tensor:
    """Indices ``[G, K]`` among the candidates, ascending: the best of ``pooled [G, n]``, then the most unlike keys."""
    from snapstream.kv.selectors.scoring import pool_max, select_topk

    first = select_topk(pooled, min(num_topk, math.ceil((1.0 - share) * num_topk)))  # [G, K']
    if first.shape[1] == num_topk:
        return first
    unlike = pool_max(kernels.key_diversity(keys, candidates.start, candidates.stop), POOL_WIDTH)  # [G, n]
    return select_topk(unlike.scatter_(1, first, float("inf")), num_topk)

"""Diverse: part of the slots goes to keys that differ from the rest, whatever the question. Not in a paper.

Observation queries find what the question points at; a later question, or the next link of a chain, points at other
tokens. KeyDiff (arXiv 2504.15364) keeps keys far from the mean key of the prompt, which needs no queries. SnapKV
selects first; the rest are the best of the others by that distance, pooled so that neighboring tokens stay together.

The cost is the tail of SnapKV's scores: long values lose their ends at small budgets. So only slots beyond the first
``num_scored`` are shared, and a head with fewer, by its budget, is SnapKV's alone. docs/research/accuracy.md measures
it, on documents whose facts are embedded in filler, where distinct keys *are* the facts, and on dense ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snapstream.config.values import as_number, set_counts
from snapstream.kv.selectors.snapkv import POOL_WIDTH, SnapKV

if TYPE_CHECKING:
    from torch import Tensor

    from snapstream.kernels.interface import Kernels


@dataclass(frozen=True, kw_only=True)
class Diverse(SnapKV):
    """SnapKV, and distinct keys for a share of the slots."""

    name: ClassVar[str] = "diverse"
    share: float = 0.75  # of the top-k slots beyond num_scored; docs/research/accuracy.md has the sweeps
    num_scored: int = 128  # top-k slots of a head that SnapKV fills first

    def __post_init__(self) -> None:
        super().__post_init__()
        set_counts(self, num_scored=0)
        object.__setattr__(self, "share", as_number("share", self.share, 0.0, 1.0))

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        scores = self.scores(queries[-self.observation_len :], keys, candidates, kernels)  # [G, n]
        chosen = choose(self.pool(scores), keys, candidates, num_topk, self.by_scores(num_topk), kernels)
        return chosen + candidates.start

    def by_scores(self, num_topk: int) -> int:
        """How many of a head's top-k slots SnapKV fills."""
        first = min(num_topk, self.num_scored)
        return first + min(num_topk - first, math.ceil((1.0 - self.share) * (num_topk - first)))


def choose(pooled: Tensor, keys: Tensor, candidates: range, num_topk: int, num_scored: int, kernels: Kernels) -> Tensor:
    """Indices ``[G, K]`` among the candidates, ascending: the best of ``pooled [G, n]``, then distinct keys."""
    from snapstream.kv.selectors.scoring import pool_max, select_topk

    first = select_topk(pooled, num_scored)  # [G, K']
    if first.shape[1] == num_topk:
        return first
    distinct = pool_max(kernels.key_diversity(keys, candidates.start, candidates.stop), POOL_WIDTH)  # [G, n]
    return select_topk(distinct.scatter_(1, first, float("inf")), num_topk)

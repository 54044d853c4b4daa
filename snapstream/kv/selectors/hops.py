"""Hops: the tokens that the end of the prompt attends to score the others in turn, for chains of facts. Not in a paper.

A question points at some tokens, and these may point at others that the answer needs. SnapKV's scores come first; then,
in each of ``num_hops`` rounds, the queries of the best-scored tokens score the others, weighted by their own scores;
all rounds count equally. SnapKV alone selects half of the slots; only that half is pooled ahead. The cost is a layer's
queries of the whole prompt, held until the layer is staged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snapstream.config.values import set_counts
from snapstream.kv.selectors.snapkv import POOL_WIDTH, SnapKV

if TYPE_CHECKING:
    from torch import Tensor

    from snapstream.kernels.interface import Kernels

SMALLEST = 2.0**-126  # smallest normal fp32 number: avoids dividing by a zero sum


@dataclass(frozen=True, kw_only=True)
class Hops(SnapKV):
    """SnapKV and ``num_hops`` more rounds of scores."""

    name: ClassVar[str] = "hops"
    num_hops: int = 4  # links of a chain that are followed; docs/research/accuracy.md has the sweep

    def __post_init__(self) -> None:
        super().__post_init__()
        set_counts(self, num_hops=1)

    @property
    def needs_all_queries(self) -> bool:
        return True

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        from snapstream.kv.selectors.scoring import pool_max, select_topk

        scores = self.scores(queries[-self.observation_len :], keys, candidates, kernels)  # [G, n]
        first = select_topk(self.pool(scores), -(-num_topk // 2))  # [G, K / 2]; only these are carried ahead
        total = add_hops(scores, queries, keys, candidates, self.num_hops, self.observation_len, kernels)
        best = pool_max(total, POOL_WIDTH).scatter_(1, first, float("inf"))
        return select_topk(best, num_topk) + candidates.start


def add_hops(
    scores: Tensor, queries: Tensor, keys: Tensor, candidates: range, num_hops: int, num_sources: int, kernels: Kernels
) -> Tensor:
    """``scores [G, n]`` plus those of every hop, normalized to equal sums.

    In each hop the ``num_sources`` best tokens of the hop before score all candidates, weighted by their own scores.
    ``queries [N, H, E]`` and ``keys [G, N, E]`` are those of the whole prompt.
    """
    from snapstream.kv.selectors.scoring import select_topk

    total = latest = _normalized(scores)
    for _ in range(num_hops):
        sources = select_topk(latest, num_sources)  # [G, m]
        weights = latest.gather(1, sources)
        latest = _normalized(kernels.hop_scores(weights, sources, queries, keys, candidates.start, candidates.stop))
        total = total + latest
    return total


def _normalized(scores: Tensor) -> Tensor:
    """Scores that sum to 1 per kv head, or to 0 if all are 0."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(SMALLEST)

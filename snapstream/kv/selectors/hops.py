"""Hops: the tokens that the end of the prompt attends to score the others in turn, for chains of facts. Not in a paper.

A question points at some tokens, and these may point at others that the answer needs. SnapKV's scores come first; then,
in each of ``num_hops`` rounds, the tokens with the best scores score the others with their own queries, weighted by
their scores, and all rounds count equally. Half of the slots are selected by SnapKV, whatever the rounds find; only
that half is pooled ahead. The cost is a layer's queries of the whole prompt, held until the layer is staged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snapstream.config.values import set_counts
from snapstream.kv.selectors.snapkv import POOL_WIDTH, SnapKV

if TYPE_CHECKING:
    from torch import Tensor

    from snapstream.kernels.interface import Kernels

SMALLEST = 2.0**-126  # of fp32's normal numbers: keeps a sum of no votes from dividing by zero


@dataclass(frozen=True, kw_only=True)
class Hops(SnapKV):
    """SnapKV's votes and ``num_hops`` rounds more. A full row re-selects by SnapKV's votes alone."""

    name: ClassVar[str] = "hops"
    num_hops: int = 4  # a chain of as many links is followed; docs/research/accuracy.md has the sweep

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

        votes = self.votes(queries[-self.observation_len :], keys, candidates, kernels)  # [G, n]
        first = select_topk(self.pool(votes), -(-num_topk // 2))  # [G, K / 2]; only these are carried ahead
        total = votes_of_rounds(votes, queries, keys, candidates, self.num_hops, self.observation_len, kernels)
        best = pool_max(total, POOL_WIDTH).scatter_(1, first, float("inf"))
        return select_topk(best, num_topk) + candidates.start


def votes_of_rounds(
    votes: Tensor, queries: Tensor, keys: Tensor, candidates: range, num_hops: int, num_voters: int, kernels: Kernels
) -> Tensor:
    """``votes [G, n]`` plus those of every round, in proportion to what its ``num_voters`` voters got; all count alike.

    ``queries [N, H, E]`` and ``keys [G, N, E]`` are those of the whole prompt.
    """
    from snapstream.kv.selectors.scoring import select_topk

    total = latest = _normalised(votes)
    for _ in range(num_hops):
        voters = select_topk(latest, num_voters)  # [G, m]
        weights = latest.gather(1, voters)
        latest = _normalised(kernels.hop_scores(weights, voters, queries, keys, candidates.start, candidates.stop))
        total = total + latest
    return total


def _normalised(votes: Tensor) -> Tensor:
    """Votes that sum to 1 per kv head, or to 0 where all are 0."""
    return votes / votes.sum(-1, keepdim=True).clamp_min(SMALLEST)

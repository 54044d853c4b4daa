"""SnapKV (arXiv 2404.14469, section 4), as SnapStream uses it (arXiv 2511.03092, section 3): the default.

The last ``observation_len`` prompt queries are the observation window. Per layer and query head: softmax of
``q k / sqrt(E)`` over the eviction candidates, summed over these queries and over the query heads that share a kv head.
The scores are pooled along the keys and the best ``K`` positions kept, ascending; ties go to the lower position.
Reference: ``kernels/reference.py``.

Two differences from the paper: grouped heads are merged, so that a group shares one set of tokens, and scores are also
pooled ahead, because a question points at the key and the answer follows it. docs/research/accuracy.md has the sweeps
behind every constant, ``evals/selectors.py`` the swept variants, SnapKV as published among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snapstream.config.kv import DEFAULT_OBSERVATION, Selector
from snapstream.config.values import set_counts

if TYPE_CHECKING:
    from torch import Tensor

    from snapstream.kernels.interface import Kernels

# Width of the centered max pooling, as in SnapKV's code. Widths of 1 to 13 and an average did no better; 29 spends as
# many slots on weak hits as on strong ones.
POOL_WIDTH = 7


@dataclass(frozen=True, kw_only=True)
class SnapKV(Selector):
    """Scores by the observation queries; a hit is kept with the tokens around it, and with more of those after it."""

    name: ClassVar[str] = "snapkv"
    observation_len: int = DEFAULT_OBSERVATION
    pool_half_life: int = 8  # tokens ahead over which a pooled score halves; 0 carries none ahead, as in the paper

    def __post_init__(self) -> None:
        set_counts(self, observation_len=1, pool_half_life=0)

    def select(
        self, queries: Tensor, keys: Tensor, layer: int, candidates: range, num_topk: int, kernels: Kernels
    ) -> Tensor:
        from snapstream.kv.selectors.scoring import select_topk

        scores = self.scores(queries[-self.observation_len :], keys, candidates, kernels)  # [G, n]
        return select_topk(self.pool(scores), num_topk) + candidates.start

    def scores(self, queries: Tensor, keys: Tensor, candidates: range, kernels: Kernels) -> Tensor:
        """Of the candidates among ``keys [G, N, E]``, summed over the last ``queries [w, H, E]``: ``[G, n]`` fp32."""
        first_query = keys.shape[1] - queries.shape[0]
        return kernels.snapkv_scores(
            queries, keys, first_query, candidates.start, candidates.stop, over_row=False, group_max=False
        )

    def pool(self, scores: Tensor) -> Tensor:
        """``scores [G, n]`` as the top-k ranks them: smoothed along the candidates."""
        from snapstream.kv.selectors.scoring import carry_ahead, pool_max

        return carry_ahead(pool_max(scores, POOL_WIDTH), self.pool_half_life)

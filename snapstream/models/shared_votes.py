"""Votes for the tokens of a row where the query heads of one kv head are spread over ranks.

A selector merges the votes of all query heads that share a kv head. With one kv head on several ranks - of latents, on
all of them - each rank has the votes of its own query heads only, so they are merged over the ranks before a selector
sees them: every rank then keeps the same tokens. Kv heads that are whole on a rank need nothing of this.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from snapstream.cache.spec import KVSpec
from snapstream.distributed.group import Group, ReduceOp
from snapstream.kernels.bound import Kernels


def share_votes(kernels: Kernels, whole: KVSpec, own: KVSpec, group: Group) -> Kernels:
    """``kernels`` whose votes are those of whole kv heads; ``own``: the rank's share of the rows of ``whole``."""
    copies = group.size * own.num_kv_heads // whole.num_kv_heads
    if copies == 1:
        return kernels
    votes = _SharedVotes(kernels, whole.num_kv_heads, copies, group)
    return replace(kernels, snapkv_scores=votes.snapkv_scores, hop_scores=votes.hop_scores)


class _SharedVotes:
    """Each rank has one of G kv heads, and ``copies`` ranks have the same."""

    def __init__(self, kernels: Kernels, num_kv_heads: int, copies: int, group: Group) -> None:
        self._kernels, self._num_kv_heads, self._copies, self._group = kernels, num_kv_heads, copies, group
        self._own = slice(group.rank // copies, group.rank // copies + 1)

    def snapkv_scores(
        self, queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, *, over_row: bool, group_max: bool
    ) -> Tensor:
        """See ``reference.snapkv_scores``."""
        own = self._kernels.snapkv_scores(
            queries, keys, first_query, start, stop, over_row=over_row, group_max=group_max
        )
        return self._merged(own, "max" if group_max else "sum")

    def hop_scores(
        self, weights: Tensor, voters: Tensor, queries: Tensor, keys: Tensor, start: int, stop: int
    ) -> Tensor:
        """See ``reference.hop_scores``, a mean over query heads."""
        own = self._kernels.hop_scores(weights, voters, queries, keys, start, stop)
        return self._merged(own, "sum") / self._copies

    def _merged(self, own: Tensor, op: ReduceOp) -> Tensor:
        """``own [1, n]``, merged over the ranks that have this kv head. Votes are >= 0, so zeros do not count."""
        everyone = own.new_zeros(self._num_kv_heads, own.shape[1])  # [G, n]
        everyone[self._own] = own
        return self._group.all_reduce(everyone, op)[self._own]

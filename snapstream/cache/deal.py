"""Whole rows dealt out to ranks: row ``n`` of the engine lies on rank ``n mod W``, there as row ``n div W``.

What a step needs of it are tensors of sizes that follow from the batch's alone, so that it can be captured: a rank
takes its own entries of a batch, filled up with entries of its padding row. Counters and the sampler's state are the
same on all ranks and know nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.kernels.bound import RowPlaces


class BatchShare(NamedTuple):
    """One rank's entries of a batch of B rows; b are at most as many as it has rows."""

    entries: Tensor  # [b] int64, into the batch; where it has fewer, any
    places: RowPlaces  # of these entries, in the rank's own rows
    order: Tensor  # [B] int64: of each entry of the batch, where it stands behind each other among all ranks' [W b]


class Deal:
    """The rows of one rank."""

    def __init__(self, num_rows: int, rank: int, num_ranks: int) -> None:
        self._num_rows, self._rank, self._num_ranks = num_rows, rank, num_ranks
        self.num_own = -(-num_rows // num_ranks)  # the same on every rank

    def own(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Those of ``rows`` that lie here, as they are counted here; every rank has a padding row."""
        here = (row for row in rows if row == self._num_rows or row % self._num_ranks == self._rank)
        return tuple(self.num_own if row == self._num_rows else row // self._num_ranks for row in here)

    def owner(self, row: int) -> int:
        """The rank on which a row lies."""
        return row % self._num_ranks

    def share(self, batch: RowPlaces) -> BatchShare:
        """Of a batch of B rows, none twice but the padding row, which no rank has to attend."""
        rows = batch.rows
        size = min(len(rows), self.num_own)
        owners = torch.where(rows < self._num_rows, rows % self._num_ranks, self._num_ranks)  # [B]
        ranks = torch.arange(self._num_ranks, device=rows.device)
        has = owners[:, None] == ranks  # [B, W]
        nth = (has.cumsum(0) - 1).masked_fill(~has, 0).sum(1)  # [B], of an entry among those of its rank
        order = torch.where(owners < self._num_ranks, owners * size + nth, 0)
        is_own = owners == self._rank
        entries = (~is_own).to(torch.int8).argsort(stable=True)[:size]  # own ones first, in their order
        is_own = is_own[entries]
        places = RowPlaces(
            torch.where(is_own, rows[entries] // self._num_ranks, self.num_own),
            torch.where(is_own, batch.slots[entries], 0),
            torch.where(is_own, batch.lengths[entries], 1),
        )
        return BatchShare(entries, places, order)

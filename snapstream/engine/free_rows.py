"""The rows that nobody owns, and which of them is taken next.

Low rows first, which keeps rows in use together. Where whole rows are dealt out to ranks (``cache/deal.py``), a row of
the rank with fewest in use: a step lasts as long as that of the rank with most. No torch.
"""

from __future__ import annotations

from heapq import heappop, heappush

from snapstream.config import ParallelConfig


class FreeRows:
    """All of ``num_rows`` at first."""

    def __init__(self, num_rows: int, parallel: ParallelConfig) -> None:
        num_ranks = parallel.size if parallel.attention == "dp" else 1
        self._free = [list(range(rank, num_rows, num_ranks)) for rank in range(num_ranks)]  # a heap per rank
        self._num_used = [0] * num_ranks

    def __len__(self) -> int:
        return sum(map(len, self._free))

    def take(self) -> int:
        """A row; IndexError where there is none."""
        ranks = [rank for rank, free in enumerate(self._free) if free]
        if not ranks:
            raise IndexError("no row is free")
        rank = min(ranks, key=lambda rank: (self._num_used[rank], rank))
        self._num_used[rank] += 1
        return heappop(self._free[rank])

    def give(self, row: int) -> None:
        """A row that was taken."""
        rank = row % len(self._free)
        self._num_used[rank] -= 1
        heappush(self._free[rank], row)

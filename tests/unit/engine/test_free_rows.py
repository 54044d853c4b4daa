"""Which free row is taken next."""

from __future__ import annotations

import random

import pytest

from snapstream.config import ParallelConfig
from snapstream.engine.free_rows import FreeRows


def test_low_rows_first() -> None:
    for parallel in (ParallelConfig(), ParallelConfig(size=4)):
        rows = FreeRows(6, parallel)
        taken = [rows.take() for _ in range(4)]
        rows.give(1)
        rows.give(0)
        assert taken == [0, 1, 2, 3] and [rows.take() for _ in range(len(rows))] == [0, 1, 4, 5]
        with pytest.raises(IndexError, match="no row is free"):
            rows.take()


@pytest.mark.parametrize("num_rows", [5, 16, 30])
def test_the_rank_with_fewest_rows_in_use_is_next(num_rows: int) -> None:
    """A row of a rank that has fewest in use, of those that have a free one."""
    rows = FreeRows(num_rows, ParallelConfig(size=4, attention="dp"))
    drawn, taken = random.Random(0), list[int]()
    for _ in range(200):
        if taken and (drawn.random() < 0.45 or not len(rows)):
            rows.give(taken.pop(drawn.randrange(len(taken))))
            continue
        before = [sum(row % 4 == rank for row in taken) for rank in range(4)]
        has_free = [before[rank] < len(range(rank, num_rows, 4)) for rank in range(4)]
        row = rows.take()
        assert row not in taken
        taken.append(row)
        assert before[row % 4] == min(used for used, free in zip(before, has_free, strict=True) if free)
    assert sorted([*taken, *(rows.take() for _ in range(len(rows)))]) == list(range(num_rows))

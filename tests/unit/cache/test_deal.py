"""Which rows lie on which rank, and a batch put together again from what the ranks attended."""

from __future__ import annotations

import random

import pytest
import torch

from snapstream.cache.deal import Deal
from snapstream.kernels.bound import RowPlaces


@pytest.mark.parametrize("num_ranks", [2, 3, 16])
def test_every_row_lies_on_one_rank(num_ranks: int) -> None:
    deals = [Deal(37, rank, num_ranks) for rank in range(num_ranks)]
    found = [(rank, row) for rank, deal in enumerate(deals) for row in deal.own(range(37))]
    assert len(set(found)) == len(found) == 37
    assert max(row for _, row in found) < deals[0].num_own == -(-37 // num_ranks)
    assert all(deal.own([37]) == (deal.num_own,) for deal in deals)  # the padding row


@pytest.mark.parametrize("num_ranks", [2, 3, 16])
@pytest.mark.parametrize("batch", [1, 4, 23, 37])
def test_a_batch_is_put_together_again(num_ranks: int, batch: int) -> None:
    """Each rank hands in its own entries, which name row, slot and length; ``order`` finds each where it belongs.
    Entries of the padding row come back as anything.
    """
    drawn = random.Random(batch)
    for num_padding in (0, 2):
        rows = torch.tensor(drawn.sample(range(37), batch) + [37] * num_padding)
        batch_places = RowPlaces(rows, rows + 100, rows + 200)
        shares = [Deal(37, rank, num_ranks).share(batch_places) for rank in range(num_ranks)]
        sizes = {len(share.entries) for share in shares}
        assert sizes == {min(batch + num_padding, -(-37 // num_ranks))}
        told = []
        for rank, (entries, places, order) in enumerate(shares):
            is_padding = places.rows == Deal(37, rank, num_ranks).num_own
            assert (places.slots[is_padding] == 0).all() and (places.lengths[is_padding] == 1).all()
            row = places.rows * num_ranks + rank
            assert torch.equal(rows[entries][~is_padding], row[~is_padding])
            assert torch.equal(places.slots[~is_padding], row[~is_padding] + 100)
            assert torch.equal(places.lengths[~is_padding], row[~is_padding] + 200)
            assert torch.equal(order, shares[0].order)
            told.append(row)
        together = torch.cat(told)[shares[0].order]
        assert torch.equal(together[:batch], rows[:batch])


def test_a_share_is_made_without_a_look_at_the_rows() -> None:
    """It can be captured: nothing of it is read on the host, so no size depends on which rows a batch has."""
    share = Deal(12, 1, 3).share
    traced = torch.compile(share, fullgraph=True, backend="eager")
    for rows in ([0, 3, 6, 9], [1, 4, 7, 10], [5, 12, 12, 12]):
        places = RowPlaces(torch.tensor(rows), torch.arange(4), torch.arange(4) + 1)
        ours, theirs = share(places), traced(places)
        assert torch.equal(ours.entries, theirs.entries) and torch.equal(ours.order, theirs.order)
        assert all(map(torch.equal, ours.places, theirs.places))

"""What selectors share: the best with their ties, pooling, scores carried ahead."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.selectors import Variant
from snapstream.cache.selectors.pooling import MAX_HALVINGS, carry_ahead, pool_max
from snapstream.cache.selectors.topk import select_topk
from snapstream.kernels import reference
from tests.unit.cache import row_by_lists


@settings(max_examples=300)
@given(
    scores=st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=3),
    count=st.integers(1, 14),
)
def test_ties_go_to_the_lower_position(scores: list[list[int]], count: int) -> None:
    got = select_topk(torch.tensor(scores, dtype=torch.float32), count)
    assert got.tolist() == [row_by_lists.best(row, count) for row in scores]


def test_pooling_keeps_the_neighbours_of_a_hit() -> None:
    scores = torch.zeros(1, 20)
    scores[0, 10] = 1.0
    for pooling in ("avg", "max"):
        rule = Variant(pool_width=5, pooling=pooling, pool_half_life=0)
        assert select_topk(rule.pool(scores), 5).tolist() == [[8, 9, 10, 11, 12]]


def test_a_hit_reaches_further_ahead_than_behind() -> None:
    """The stronger of two hits gets the longer tail; a slot more goes to whoever has more votes left."""
    scores = torch.zeros(1, 100)
    scores[0, 20], scores[0, 60] = 8.0, 1.0
    pooled = carry_ahead(pool_max(scores, 3), 4)
    assert pooled[0, 18] == 0 and pooled[0, [19, 20, 21]].tolist() == [8.0, 8.0, 8.0]
    assert pooled[0, [25, 29, 33, 61, 65]].tolist() == [4.0, 2.0, 1.0, 1.0, 0.5]
    # 19 to 21 at full strength, 22 to 32 above 1; of the four tied at 1 the first, 33.
    assert select_topk(pooled, 15).tolist() == [[*range(19, 34)]]
    assert select_topk(pooled, 18).tolist() == [[*range(19, 34), 59, 60, 61]]


@pytest.mark.parametrize("half_life", [1, 3, 8, 64])
@pytest.mark.parametrize("length", [1, 2, 31, 700])
def test_carrying_ahead_in_doubling_steps_equals_the_reference(half_life: int, length: int) -> None:
    torch.manual_seed(half_life)
    scores = torch.rand(3, length) ** 20  # a few hits, much noise
    before = scores.clone()
    got = carry_ahead(scores, half_life)
    torch.testing.assert_close(got, reference.carry_ahead(scores, half_life), rtol=1e-5, atol=2.0**-MAX_HALVINGS)
    assert torch.equal(scores, before)  # hops add to the scores after pooling them

"""Staging ranges: disjoint, inside the pool, long prompts out of the reserve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstream.engine.staging_pool import StagingPool


def test_long_prompts_stay_out_of_the_reserve() -> None:
    pool = StagingPool(100, short_reserve=20)
    assert pool.take(80, is_short=False) == 0
    assert pool.take(1, is_short=False) is None
    assert pool.take(20, is_short=True) == 80


def test_short_prompts_use_the_reserve_first_and_then_the_rest() -> None:
    pool = StagingPool(100, short_reserve=20)
    assert pool.take(15, is_short=True) == 80
    assert pool.take(15, is_short=True, reserve_only=True) is None
    assert pool.take(15, is_short=True) == 0


def test_a_short_range_may_straddle_the_border() -> None:
    pool = StagingPool(100, short_reserve=20)
    assert pool.take(70, is_short=False) == 0
    assert pool.take(30, is_short=True) == 70


def test_first_fit_reuses_a_gap_only_if_it_is_large_enough() -> None:
    pool = StagingPool(100, short_reserve=0)
    starts = [pool.take(size, is_short=False) for size in (10, 20, 30)]
    assert starts == [0, 10, 30]
    pool.give(10)
    assert pool.take(21, is_short=False) == 60
    assert pool.take(20, is_short=False) == 10


def test_limits_and_wrong_use() -> None:
    pool = StagingPool(100, short_reserve=20)
    with pytest.raises(ValueError, match="no staging range begins at 5"):
        pool.give(5)
    with pytest.raises(ValueError, match="range of 0 tokens.*least is 1"):
        pool.take(0, is_short=True)
    with pytest.raises(ValueError, match="short_reserve is 101.*100"):
        StagingPool(100, short_reserve=101)


# (size, is_short, reserve_only) takes a range; an int gives back one of those in use.
OPERATIONS = st.lists(
    st.one_of(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), st.integers(0, 7)), max_size=60
)


@given(num_tokens=st.integers(1, 60), reserve=st.integers(0, 60), operations=OPERATIONS)
def test_agrees_with_a_pool_of_single_tokens(
    num_tokens: int, reserve: int, operations: list[tuple[int, bool, bool] | int]
) -> None:
    """Model: a list of one owner per token. A range is refused only if no run of free tokens would do."""
    reserve = min(reserve, num_tokens)
    pool = StagingPool(num_tokens, short_reserve=reserve)
    owner: list[int | None] = [None] * num_tokens
    sizes: dict[int, int] = {}
    for operation in operations:
        if isinstance(operation, int):
            if sizes:
                start = sorted(sizes)[operation % len(sizes)]
                pool.give(start)
                for token in range(start, start + sizes.pop(start)):
                    owner[token] = None
            continue
        size, is_short, reserve_only = operation
        low = num_tokens - reserve if is_short and reserve_only else 0
        high = num_tokens if is_short else num_tokens - reserve
        places = range(low, high - size + 1)
        fits = [place for place in places if set(owner[place : place + size]) == {None}]
        has_room = pool.has_room(size, is_short=is_short)
        start_or_none = pool.take(size, is_short=is_short, reserve_only=reserve_only)
        if not (is_short and reserve_only):
            assert has_room == (start_or_none is not None)
        assert (start_or_none is None) == (not fits)
        if start_or_none is not None:
            assert start_or_none in fits
            sizes[start_or_none] = size
            owner[start_or_none : start_or_none + size] = [start_or_none] * size
        assert pool.num_free == owner.count(None)

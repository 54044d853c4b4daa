"""Which free row is taken next."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstream.config import ParallelConfig
from snapstream.engine.admission import AGE, FreeRows, StagingPool, WaitingQueue
from tests.engine.build import config_of, drain, engine_of, request_of


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


# Staging ranges: disjoint, inside the pool, long prompts out of the reserve.


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


# The order of those who wait: priorities count, and nobody starves, whatever keeps coming.

# Each: a priority that arrives, or the next one taken, or one that gives up (by index).
EVENTS = st.lists(
    st.one_of(st.integers(-100, 100), st.just("take"), st.tuples(st.just("leave"), st.integers(0, 9))), max_size=200
)


def waiting(number: int, priority: int) -> Any:
    return SimpleNamespace(request_id=f"r{number}", request=SimpleNamespace(priority=priority))


@given(EVENTS)
def test_nobody_is_overtaken_more_often_than_priorities_say(events: list[Any]) -> None:
    queue, arrived, taken = WaitingQueue(), [], []
    for event in events:
        if isinstance(event, int):
            arrived.append(waiting(len(arrived), event))
            queue.add(arrived[-1])
        elif event == "take" and len(queue):
            taken.append(next(iter(queue)))
            queue.remove(taken[-1])
        elif len(queue) and event != "take":
            queue.remove(list(queue)[event[1] % len(queue)])
    numbers = {live.request_id: number for number, live in enumerate(arrived)}
    for place, live in enumerate(taken):
        own = numbers[live.request_id]
        passed = [other for other in taken[:place] if numbers[other.request_id] > own]
        for level in {other.request.priority for other in passed}:
            assert level < live.request.priority, "nobody of the same or a higher one"
            count = sum(other.request.priority == level for other in passed)
            assert count <= AGE * (live.request.priority - level)
    rest = list(queue)
    assert all(live in queue for live in rest) and not any(live in queue for live in taken)
    keys = [numbers[live.request_id] + AGE * live.request.priority for live in rest]
    assert keys == sorted(keys)


def test_a_stream_of_urgent_ones_does_not_starve_the_others() -> None:
    queue = WaitingQueue()
    patient = waiting(0, 2)
    queue.add(patient)
    for number in range(1, 10_000):
        queue.add(waiting(number, 0))
        first = next(iter(queue))
        queue.remove(first)
        if first is patient:
            break
    assert number == 2 * AGE


@pytest.mark.parametrize(("priorities", "order"), [((0, 0, 0), "abc"), ((5, 0, -1), "cba"), ((0, 1, -1), "cab")])
def test_the_engine_gives_rows_in_that_order(priorities: tuple[int, ...], order: str) -> None:
    engine, runner = engine_of(config_of(max_rows=1))
    engine.add_request(request_of("first"))
    engine.step()
    for name, priority in zip("abc", priorities, strict=True):
        request = request_of(name)
        engine.add_request(type(request)(**{**vars(request), "priority": priority}))
    drain(engine)
    opened = [entry.request_id for plan in runner.plans for spec in plan.opened_jobs for entry in spec.entries]
    assert opened == ["first", *order]


@pytest.mark.parametrize("priority", [-101, 101, 0.5, "high"])
def test_a_priority_out_of_range_is_refused(priority: Any) -> None:
    engine, _ = engine_of()
    request = request_of("a")
    with pytest.raises(ValueError, match="priority is .* from -100 to 100"):
        engine.add_request(type(request)(**{**vars(request), "priority": priority}))

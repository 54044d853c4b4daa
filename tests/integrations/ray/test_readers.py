"""Who reads a prompt for a replica that answers, and what becomes of it; without ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from snapstream.integrations.ray.replicas import (
    Fault,
    Load,
    ReplicaLost,
    ReplicaPrefill,
    ReplicaRegistry,
    Route,
    ScaleByLoad,
    rank_for_prefill,
)
from snapstream.server.engine.api import RequestDelta, SampleDelta
from snapstream.server.engine.remote_prefill import PrefillFailed
from snapstream.types import FinishReason, RowTicket
from tests.integrations.ray.test_replicated_engine import METADATA, REQUEST, FakeReplicas, Step
from tests.waiting import until_async

TICKET = RowTicket(host="127.0.0.1", port=1, key="0" * 32)


def sent(problem: str = "") -> RequestDelta:
    """The end of a request with a ticket."""
    reason = FinishReason.ERROR if problem else FinishReason.STOP
    sample = SampleDelta(index=0, token_ids=(), finish_reason=reason, stop_reason=problem or None)
    return RequestDelta(request_id="r", is_finished=True, samples=(sample,))


def waiting(**queued: int) -> dict[str, Load]:
    return {name: Load(rows=8, queued_tokens=count) for name, count in queued.items()}


def with_readers(replicas: FakeReplicas, test: Callable[[ReplicaPrefill], Awaitable[None]]) -> None:
    async def main() -> None:
        readers = ReplicaPrefill(replicas, lambda: METADATA.engine)
        names = frozenset(replicas.scripts)
        await until_async(lambda: all(readers.choose(REQUEST, names - {name}) == name for name in names))
        await test(readers)
        await readers.close()

    asyncio.run(main())


def test_the_fewest_waiting_tokens_are_asked_first() -> None:
    assert rank_for_prefill(waiting(a=50, b=10, c=30), b"", 5) == ["b", "c", "a"]
    first, second = rank_for_prefill(waiting(a=0, b=0), b"key", 5)
    assert rank_for_prefill(waiting(**{first: 10, second: 10}), b"key", 5)[0] == first
    assert rank_for_prefill(waiting(**{first: 100, second: 0}), b"key", 5)[0] == second  # too much waits there


def test_what_was_asked_for_counts_before_it_is_reported() -> None:
    registry = ReplicaRegistry(prefill_only=True)
    assert registry.best(Route()) == ""
    registry.rank(("a", "b"), Route())
    assert registry.best(Route()) == "a"  # neither has reported: each is worth a try
    for name in "ab":
        registry.note_load(name, Load(rows=2))
    claim = registry.claim(70)
    claim.take("a")
    assert registry.best(Route()) == "b" and registry.best(Route(avoid=frozenset("b"))) == "a"
    claim.give_back()
    registry.mark_unavailable("a", "it died")
    assert registry.best(Route()) == "b" == registry.best(Route(avoid=frozenset("b")))


def test_a_row_that_went_is_read() -> None:
    replicas = FakeReplicas({"a": [sent()]})

    async def test(readers: ReplicaPrefill) -> None:
        await readers.prefill(readers.choose(REQUEST, frozenset()), REQUEST, TICKET)
        assert replicas.asked == ["a"] and readers.unavailable is None

    with_readers(replicas, test)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (sent("the receiver refused the row"), "refused"),
        (Fault("dead", "the engine died"), "died"),
        (Fault("value", "too long"), "too long"),
        (ReplicaLost("its node is gone"), "node"),
    ],
)
def test_a_row_that_was_lost_is_asked_for_elsewhere(step: Step, why: str) -> None:
    replicas = FakeReplicas({"a": [step], "b": [sent()]})

    async def test(readers: ReplicaPrefill) -> None:
        with pytest.raises(PrefillFailed, match=why):
            await readers.prefill("a", REQUEST, TICKET)
        assert readers.choose(REQUEST, frozenset("a")) == "b" == readers.choose(REQUEST, frozenset())
        await readers.prefill("b", REQUEST, TICKET)

    with_readers(replicas, test)


def test_who_leaves_closes_the_call() -> None:
    replicas = FakeReplicas({"a": [None], "b": []})

    async def test(readers: ReplicaPrefill) -> None:
        reading = asyncio.create_task(readers.prefill("a", REQUEST, TICKET))
        await until_async(lambda: replicas.asked)
        assert readers.choose(REQUEST, frozenset()) == "b"
        reading.cancel()
        await asyncio.wait([reading])
        assert replicas.num_closed == 1 and readers.choose(REQUEST, frozenset()) == "a"

    with_readers(replicas, test)


def test_stored_beginnings_are_forgotten_by_all() -> None:
    replicas = FakeReplicas({"a": [], "b": []})

    async def test(readers: ReplicaPrefill) -> None:
        await readers.reset_prefixes("mine")
        assert sorted(replicas.resets) == ["mine@a", "mine@b"]

    with_readers(replicas, test)


def test_readers_scale_by_tokens_and_others_by_rows() -> None:
    class Metrics:
        aggregated_metrics = {"rows": {"a": 4.0}, "open_rows": {"a": 8.0}, "queued_tokens": {"a": 50.0}}
        target_num_replicas = 1

    assert ScaleByLoad(queued_tokens=10)(Metrics())[0] == 5
    assert ScaleByLoad(rows_in_use=1.0)(Metrics())[0] == 2

"""To whom a request goes; without ray."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace

import pytest

from snapstream.config import EngineConfig, KVBudget, PrefixStoreConfig
from snapstream.engine.worker import EngineStats
from snapstream.integrations.ray.replicas import (
    NUM_TICKS,
    Leases,
    Load,
    ReplicaRegistry,
    Report,
    Route,
    ScaleByLoad,
    rank_for_decode,
    route_key,
)
from snapstream.types import Request, SamplingParams

NAMES = ("a", "b", "c")


def loads(**open_rows: int) -> dict[str, Load]:
    return {name: Load(rows=8, open_rows=count) for name, count in open_rows.items()}


def request(token_ids: list[int], namespace: str = "") -> Request:
    return Request(
        request_id="r", prompt_token_ids=tuple(token_ids), sampling=SamplingParams(max_tokens=1), namespace=namespace
    )


def report(name: str, load: Load, stats: EngineStats) -> Report:
    metadata: object = None
    return Report(replica=name, load=load, stats=stats, metadata=metadata, pid=1)  # type: ignore[arg-type]


def test_without_a_key_most_free_rows_go_first() -> None:
    assert rank_for_decode(loads(a=5, b=1, c=3), b"", 1) == ["b", "c", "a"]
    assert rank_for_decode(loads(a=12, b=9, c=20), b"", 1) == ["b", "a", "c"]  # none has a free one: the shortest queue


def test_a_key_keeps_its_replica_until_that_has_too_much_to_do() -> None:
    first = rank_for_decode(loads(a=0, b=0, c=0), b"key", 1)[0]
    others = {name: 0 for name in NAMES if name != first}
    assert rank_for_decode(loads(**{first: 0}, **others), b"key", 1)[0] == first
    assert rank_for_decode(loads(**{first: 2}, **others), b"key", 1)[0] != first  # 1.5 of the mean of 3 rows is 2
    busy = {name: 4 for name in others}
    assert rank_for_decode(loads(**{first: 4}, **busy), b"key", 1)[0] == first
    assert rank_for_decode(loads(**{first: 8}, **busy), b"key", 1)[0] != first  # it has no free row
    assert sorted(rank_for_decode(loads(a=8, b=8, c=9), b"key", 1)) == list(NAMES)


def test_keys_spread_and_move_only_with_their_replica() -> None:
    keys = [bytes([number, 7]) for number in range(200)]
    before = {key: rank_for_decode(loads(a=0, b=0, c=0), key, 1)[0] for key in keys}
    assert all(count > 40 for count in Counter(before.values()).values())
    without = {key: rank_for_decode(loads(a=0, c=0), key, 1)[0] for key in keys}
    assert all(without[key] == before[key] for key in keys if before[key] != "b")


def test_a_key_is_what_the_prefix_store_goes_by() -> None:
    config = EngineConfig(
        max_model_len=4096, max_rows=4, budget=KVBudget.of(64), prefix_blocks=8,
        prefix_store=PrefixStoreConfig(num_bytes=1, block_len=16),
    )  # fmt: skip
    prompt = list(range(1030))
    key = route_key(request(prompt), config)
    assert key and key == route_key(request([*prompt, 9, 9]), config) == route_key(request(prompt[:1024]), config)
    assert key != route_key(request([*prompt[:1023], 99]), config) != route_key(request(prompt, "other"), config)
    assert route_key(request(prompt[:1023]), config) == b""  # the freest replica
    assert route_key(request(prompt), None) == route_key(request(prompt), replace(config, prefix_store=None)) == b""


def test_own_requests_count_before_a_replica_reports_them() -> None:
    registry = ReplicaRegistry()
    assert sorted(registry.rank(NAMES, Route())) == list(NAMES)
    for name in NAMES:
        registry.note_load(name, Load(rows=4))
    two, one, late = registry.claim(2), registry.claim(1), registry.claim(4)
    two.take("a")
    one.take("b")
    late.give_back()
    late.take("c")  # Ray chose when the caller had left
    assert registry.rank(NAMES, Route(size=1)) == ["c", "b", "a"]
    two.give_back()
    assert registry.rank(NAMES, Route(size=1)) == ["a", "c", "b"]


def test_absent_and_avoided_replicas_are_asked_last_of_all() -> None:
    registry = ReplicaRegistry()
    registry.rank(NAMES, Route())
    for name in NAMES:
        registry.note_load(name, Load(rows=4))
    registry.note_load("a", Load(rows=4, unavailable="it loads"))
    assert registry.num_ready == 2 and registry.unavailable_reasons == ["it loads"]
    assert registry.rank(NAMES, Route()) == ["b", "c"]
    assert registry.rank(NAMES, Route(avoid=frozenset("b"))) == ["c"]
    assert registry.rank(NAMES, Route(avoid=frozenset("bc"))) == ["a"]  # rather than one that has failed it
    assert sorted(registry.rank(NAMES, Route(avoid=frozenset("abc")))) == list(NAMES)
    assert registry.rank(NAMES, Route(to="a")) == ["a"]
    assert registry.rank(("b", "c"), Route(to="a")) == ["b", "c"]  # it is no more
    registry.mark_unavailable("b", "it died")
    assert registry.rank(("b", "c"), Route()) == ["c"]
    registry.note_load("a", Load(rows=4))
    assert registry.num_ready == 1  # who is not offered is not listened to


def test_totals_outlive_replicas_and_gauges_do_not() -> None:
    registry = ReplicaRegistry()
    registry.rank(("a", "b"), Route())
    stats = EngineStats(rows_free=3, rows_total=4, num_running=1, prompt_tokens_total=10, restarts_total=1)
    for name in ("a", "b"):
        registry.note_report(report(name, Load(rows=4), stats))
    both = registry.stats()
    assert (both.rows_free, both.rows_total, both.num_running, both.prompt_tokens_total) == (6, 8, 2, 20)
    registry.rank(("b", "c"), Route())
    left = registry.stats()
    assert (left.rows_free, left.rows_total, left.num_running, left.prompt_tokens_total) == (3, 4, 1, 20)
    assert left.restarts_total == 2


def test_a_route_leaves_its_board_behind() -> None:
    route = Route(ReplicaRegistry(), "ingress", key=b"key", size=2, on_taken=print)
    arrived = pickle.loads(pickle.dumps(route))
    assert isinstance(arrived, Route) and arrived.registry is None
    assert (arrived.caller, arrived.key) == ("ingress", b"")


def test_a_caller_that_asks_no_more_while_others_do_is_gone() -> None:
    leases = Leases()
    for caller in ("", "one", "two"):
        leases.open(caller)
    for _ in range(NUM_TICKS):
        leases.renew("two")
        assert leases.tick() == []
    leases.renew("new")  # it has no request here
    assert leases.tick() == ["one"]
    for _ in range(NUM_TICKS - 2):
        leases.open("two")  # another request of it is no sign
        leases.renew("new")
        assert leases.tick() == []
    leases.renew("new")
    assert leases.tick() == ["two"]


def test_nobody_is_gone_while_nobody_asks() -> None:
    leases = Leases()
    leases.open("one")
    for _ in range(3 * NUM_TICKS):
        leases.renew("")  # who has no lease is no ingress
        assert leases.tick() == []


class Context:
    """The part of Ray's that a policy reads."""

    def __init__(self, target: int, **found: list[float]) -> None:
        self.target_num_replicas = target
        self.aggregated_metrics = {name: dict(enumerate(values)) for name, values in found.items()}


@pytest.mark.parametrize(
    ("open_rows", "queued", "want"),
    [([0, 0], [0, 0], 1), ([6, 6], [0, 0], 2), ([8, 8], [0, 0], 3), ([8, 24], [0, 0], 5), ([1, 1], [1500, 1501], 4)],
)
def test_scaling_goes_by_rows_and_by_waiting_tokens(open_rows: list[float], queued: list[float], want: int) -> None:
    policy = ScaleByLoad(rows_in_use=0.8, queued_tokens=1000)
    context = Context(2, rows=[8, 8], open_rows=open_rows, queued_tokens=queued)
    assert policy(context) == (want, {})


def test_scaling_waits_for_the_first_reports() -> None:
    assert ScaleByLoad(0.8, 1000)(Context(3)) == (3, {})

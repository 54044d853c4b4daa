"""One replica without a cluster, over a scripted engine: batches, loads, leases, health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from snapstream.engine.worker import Deltas
from snapstream.integrations.ray import actors
from snapstream.integrations.ray.replicas import DeltaBatch, Fault, Route
from snapstream.server.engine.api import EngineDead, EngineSpec, EngineStats, RequestDelta, SampleDelta
from snapstream.types import FinishReason, QueueFull, Request, SamplingParams
from tests.integrations.ray.test_replicated_engine import METADATA
from tests.waiting import until_async

REQUEST = Request(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=9, n=2))
ROUTE = Route(caller="ingress")


def delta(*, is_last: bool = False) -> RequestDelta:
    end = FinishReason.LENGTH if is_last else None
    return RequestDelta(
        request_id="r", is_finished=is_last, samples=(SampleDelta(index=0, token_ids=(1,), finish_reason=end),)
    )


@dataclass
class ScriptedEngine:
    """In the place of the engine process: says what a test hands it."""

    said: asyncio.Queue[RequestDelta | Exception] = field(default_factory=asyncio.Queue)
    unavailable: EngineDead | None = None
    metadata: Any = METADATA
    num_aborted: int = 0
    is_shut: bool = False

    async def start(self) -> None: ...

    async def generate(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        is_over = False
        try:
            while not is_over:
                item = await self.said.get()
                if isinstance(item, Exception):
                    raise item
                is_over = item.is_finished
                yield item
        finally:
            self.num_aborted += not is_over

    def stats(self) -> EngineStats:
        return EngineStats()

    async def shutdown(self, drain_s: float) -> None:
        self.is_shut = True


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(actors, "monotonic", clock)
    monkeypatch.setattr(actors, "TICK_S", 0.0)  # a tick for every turn of the loop
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    yield clock


Test = Callable[[Any, ScriptedEngine], Awaitable[None]]


def run(monkeypatch: pytest.MonkeyPatch, test: Test) -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        monkeypatch.setattr(actors, "EngineProcess", lambda spec, *, stall_timeout_s, prefill: engine)
        server: Any = object.__new__(actors.EngineReplica)
        await server.__init__(EngineSpec(model="m"), 0.0)
        await test(server, engine)
        await server.__del__()
        assert engine.is_shut

    asyncio.run(main())


async def load_of(server: Any) -> tuple[int, int]:
    load = (await server.report(ROUTE)).load
    return load.open_rows, load.queued_tokens


def test_what_gathers_goes_out_together(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    async def test(server: Any, engine: ScriptedEngine) -> None:
        batches: AsyncGenerator[DeltaBatch, None] = server.generate(REQUEST, Route())
        first = await anext(batches)
        assert (first.replica, first.deltas, first.load.open_rows) == ("a", Deltas(()), 2)
        assert await load_of(server) == (2, 3)
        for each in (delta(), delta(), delta()):
            engine.said.put_nowait(each)
        await until_async(engine.said.empty)
        second = await anext(batches)
        assert len(second.deltas.deltas) == 3 and second.load.queued_tokens == 0
        engine.said.put_nowait(delta(is_last=True))
        last = await anext(batches)
        assert last.deltas.deltas[0].is_finished and last.load.open_rows == 0
        assert [each async for each in batches] == [] and engine.num_aborted == 0

    run(monkeypatch, test)


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("no"), "value"), (QueueFull("no"), "queue_full"), (EngineDead("no"), "dead")]
)
def test_errors_are_data(monkeypatch: pytest.MonkeyPatch, clock: Clock, error: Exception, kind: str) -> None:
    async def test(server: Any, engine: ScriptedEngine) -> None:
        engine.said.put_nowait(error)
        *_, last = [each async for each in server.generate(REQUEST, Route())]
        assert last.fault == Fault(kind, "no")  # type: ignore[arg-type]
        assert type(last.fault.error()) is type(error) and await load_of(server) == (0, 0)

    run(monkeypatch, test)


def test_a_bug_is_told_and_nobody_waits(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    async def test(server: Any, engine: ScriptedEngine) -> None:
        engine.said.put_nowait(RuntimeError("a bug"))
        *_, last = [each async for each in server.generate(REQUEST, Route())]
        assert last.fault == Fault("dead", "the replica failed: RuntimeError: a bug")
        assert await load_of(server) == (0, 0)

    run(monkeypatch, test)


def test_a_reader_that_closes_aborts(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    async def test(server: Any, engine: ScriptedEngine) -> None:
        batches = server.generate(REQUEST, Route())
        await anext(batches)
        engine.said.put_nowait(delta())
        await anext(batches)
        await batches.aclose()
        assert engine.num_aborted == 1 and await load_of(server) == (0, 0)

    run(monkeypatch, test)


def test_a_caller_that_asks_no_more_loses_its_requests(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    async def test(server: Any, engine: ScriptedEngine) -> None:
        batches = server.generate(REQUEST, ROUTE)
        await anext(batches)  # then nobody reads on, and nobody closes it
        while engine.num_aborted == 0:  # another ingress asks
            await server.report(Route(caller="other"))
            await asyncio.sleep(0)
        assert await load_of(server) == (0, 0)
        await batches.aclose()

    run(monkeypatch, test)


def test_it_is_unhealthy_when_its_engine_stays_away(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    async def test(server: Any, engine: ScriptedEngine) -> None:
        await server.check_health()
        engine.unavailable = EngineDead("it loads")
        await server.check_health()
        clock.now += 59
        await server.check_health()
        engine.unavailable = None  # it came back
        await server.check_health()
        engine.unavailable = EngineDead("it loads again")
        clock.now += 59
        await server.check_health()
        clock.now += 61
        with pytest.raises(EngineDead, match="it loads again"):
            await server.check_health()
        clock.now = 0
        engine.unavailable = EngineDead("it is not restarted", is_final=True)
        with pytest.raises(EngineDead, match="not restarted"):
            await server.check_health()

    run(monkeypatch, test)

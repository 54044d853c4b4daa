"""One engine made of many: what is repeated, what is told, and what is counted; without ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from snapstream.assets import TINY_MODEL
from snapstream.config import EngineConfig, KVBudget
from snapstream.engine.worker import Deltas
from snapstream.integrations.ray.replicas import (
    MAX_TRIES,
    DeltaBatch,
    Fault,
    Load,
    ReplicaLost,
    ReplicatedEngine,
    Report,
    Route,
)
from snapstream.models.registry import read_model_config
from snapstream.server.engine.api import EngineDead, EngineMetadata, EngineStats, RequestDelta, SampleDelta
from snapstream.types import FinishReason, QueueFull, Request, SamplingParams
from tests.waiting import until_async

METADATA = EngineMetadata(
    model="tiny",
    engine=EngineConfig(budget=KVBudget.of(128), max_model_len=512, max_rows=4),
    architecture=read_model_config(TINY_MODEL),
    pid=1,
)
REQUEST = Request(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=2))
EMPTY = Load(rows=4)


def delta(token: int, *, is_last: bool = False) -> RequestDelta:
    end = FinishReason.LENGTH if is_last else None
    sample = SampleDelta(index=0, text=str(token), token_ids=(token,), logprobs=None, finish_reason=end)
    return RequestDelta(request_id="r", is_finished=is_last, samples=(sample,))


Step = RequestDelta | Fault | Exception | None  # None: it says nothing more
WHOLE: list[Step] = [delta(1), delta(2, is_last=True)]


@dataclass
class FakeReplicas:
    """Replicas that say what they are told to, in the place of Ray and its actors."""

    scripts: dict[str, list[Step]]
    asked: list[str] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)
    num_closed: int = 0
    dead: set[str] = field(default_factory=set)
    faults: list[Exception] = field(default_factory=list)  # of the next reports
    metadata: EngineMetadata = METADATA

    def _take(self, route: Route) -> str:
        assert route.registry is not None
        [name, *_] = route.registry.rank(sorted(self.scripts), route)
        if route.on_taken is not None:
            route.on_taken(name)
        if name in self.dead:
            raise ReplicaLost("it died")
        return name

    async def generate(self, request: Request, route: Route) -> AsyncGenerator[DeltaBatch, None]:
        name = self._take(route)
        self.asked.append(name)
        try:
            yield DeltaBatch(name, EMPTY)
            for step in self.scripts[name]:
                if step is None:
                    await asyncio.Event().wait()
                if isinstance(step, Exception):
                    raise step
                is_fault = isinstance(step, Fault)
                deltas = () if is_fault else (step,)
                yield DeltaBatch(name, EMPTY, Deltas(deltas), step if is_fault else None)  # type: ignore[arg-type]
        finally:
            self.num_closed += 1

    async def report(self, route: Route) -> Report:
        name = self._take(route)
        if self.faults:
            raise self.faults.pop()
        stats = EngineStats(rows_free=4, rows_total=4)
        return Report(replica=name, load=EMPTY, stats=stats, metadata=self.metadata, pid=1)

    async def reset_prefixes(self, namespace: str | None, route: Route) -> None:
        self.resets.append(f"{namespace}@{self._take(route)}")


async def started(replicas: FakeReplicas) -> ReplicatedEngine:
    engine = ReplicatedEngine(replicas)
    await engine.replicas.look()
    await engine.replicas.look()
    return engine


async def tokens(engine: ReplicatedEngine) -> list[int]:
    return [token async for each in engine.generate(REQUEST) for sample in each.samples for token in sample.token_ids]


def run(replicas: FakeReplicas) -> list[int]:
    async def main() -> list[int]:
        return await tokens(await started(replicas))

    return asyncio.run(main())


@pytest.mark.parametrize(
    "loss",
    [Fault("dead", "the engine died"), ReplicaLost("its node is gone"), Fault("queue_full", "12 requests wait")],
    ids=["engine", "replica", "queue"],
)
def test_a_request_without_a_delta_is_repeated_elsewhere(loss: Step) -> None:
    replicas = FakeReplicas({"a": [loss], "b": WHOLE})
    assert run(replicas) == [1, 2]
    assert replicas.asked == ["a", "b"] and replicas.num_closed == 2


def test_one_with_a_delta_is_not() -> None:
    replicas = FakeReplicas({"a": [delta(1), ReplicaLost("its node is gone")], "b": WHOLE})

    async def main() -> list[int]:
        engine, got = await started(replicas), []
        with pytest.raises(EngineDead, match="its node is gone"):
            async for each in engine.generate(REQUEST):
                got.append(each.samples[0].token_ids[0])
        return got

    assert asyncio.run(main()) == [1] and replicas.asked == ["a"]


@pytest.mark.parametrize(
    ("loss", "error"),
    [(Fault("dead", "gone"), EngineDead), (Fault("queue_full", "full"), QueueFull), (ReplicaLost("x"), EngineDead)],
)
def test_when_all_fail_the_last_error_is_told(loss: Step, error: type[Exception]) -> None:
    replicas = FakeReplicas({name: [loss] for name in "abcde"})
    with pytest.raises(error):
        run(replicas)
    assert replicas.asked == list("abcde")[:MAX_TRIES]


def test_what_no_engine_can_serve_is_asked_once() -> None:
    replicas = FakeReplicas({"a": [Fault("value", "too long")], "b": WHOLE})
    with pytest.raises(ValueError, match="too long"):
        run(replicas)
    assert replicas.asked == ["a"]


def test_a_lone_replica_that_restarts_its_engine_is_not_asked_in_vain() -> None:
    replicas = FakeReplicas({"a": [Fault("dead", "it is restarted in 1 s")]})
    with pytest.raises(EngineDead, match="restarted"):
        run(replicas)
    assert replicas.asked == ["a"]


def test_an_answer_that_ends_early_is_an_error() -> None:
    replicas = FakeReplicas({"a": [delta(1)]})
    with pytest.raises(EngineDead, match="ended early"):
        run(replicas)


def test_leaving_closes_the_call_and_frees_its_rows() -> None:
    replicas = FakeReplicas({"a": [delta(1), None], "b": [delta(1), None]})

    async def main() -> None:
        engine = await started(replicas)
        first, second = engine.generate(REQUEST), engine.generate(REQUEST)
        await anext(first)
        await anext(second)
        assert replicas.asked == ["a", "b"]  # the first one counts, though no replica has reported it
        await first.aclose()
        assert replicas.num_closed == 1
        draining = asyncio.create_task(engine.shutdown(300))
        await asyncio.sleep(0)
        assert engine.unavailable is not None and not draining.done()
        await second.aclose()
        await draining

    asyncio.run(main())


def test_it_is_ready_while_one_replica_is() -> None:
    replicas = FakeReplicas({"a": WHOLE, "b": WHOLE})

    async def main() -> None:
        engine = ReplicatedEngine(replicas)
        assert engine.unavailable is not None
        with pytest.raises(EngineDead, match="loaded"):
            _ = engine.metadata
        await engine.replicas.look()
        await engine.replicas.look()
        assert engine.unavailable is None and engine.metadata is METADATA and engine.stats().rows_total == 8
        replicas.dead = {"a"}
        await engine.replicas.look()
        assert engine.unavailable is None
        replicas.dead = {"a", "b"}
        await engine.replicas.look()
        assert (
            engine.unavailable is not None and "it died" in str(engine.unavailable) and not engine.unavailable.is_final
        )
        replicas.dead = set()
        await engine.replicas.look()
        assert engine.unavailable is None

    asyncio.run(main())


def test_prefixes_are_forgotten_everywhere_before_the_next_request() -> None:
    replicas = FakeReplicas({"a": WHOLE, "b": WHOLE})

    async def main() -> None:
        engine = await started(replicas)
        engine.reset_prefixes("mine")
        assert not replicas.resets
        assert await tokens(engine) == [1, 2]
        assert sorted(replicas.resets) == ["mine@a", "mine@b"]

    asyncio.run(main())


def test_it_goes_on_watching() -> None:
    """Also after an error that nobody has foreseen."""
    replicas = FakeReplicas({"a": WHOLE})

    async def main() -> None:
        engine = ReplicatedEngine(replicas)
        replicas.faults = [RuntimeError("a bug"), KeyError("another")]
        watching = asyncio.create_task(engine.replicas.watch())
        await until_async(lambda: engine.unavailable is None)
        assert not replicas.faults
        replicas.dead = {"a"}
        await until_async(lambda: engine.unavailable is not None)
        replicas.dead = set()
        await until_async(lambda: engine.unavailable is None)
        watching.cancel()

    asyncio.run(main())

"""The engine on a thread: the loop that both engines share, without a second process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapstream.llm import LLM
from snapstream.server.engine.api import EngineDead
from tests.server.engine.running import (
    LONG,
    SETTINGS,
    collect,
    collect_all,
    expected,
    make_request,
    until_at_rest,
    whole,
)
from tests.server.local_engine import LocalEngine
from tests.waiting import until_async


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS, progress=False) as engine:
        yield engine


def test_answers_are_those_of_generate(llm: LLM) -> None:
    want = expected(llm, 6)

    async def main() -> None:
        engine = LocalEngine(llm)
        answers = await collect_all(engine, [make_request(number) for number in range(6)])
        assert [whole(answer) for answer in answers] == want
        await engine.shutdown(5)
        assert not engine.is_ready
        with pytest.raises(EngineDead, match="shutting down"):
            await collect(engine, make_request(0))

    asyncio.run(main())


def test_a_drain_that_takes_too_long_ends_the_rest(llm: LLM) -> None:
    async def main() -> None:
        engine = LocalEngine(llm)
        running = asyncio.create_task(collect_all(engine, [make_request(n, LONG) for n in range(3)]))
        await until_async(lambda: engine.stats().num_running == 3)
        await engine.shutdown(0)
        for answer in await running:
            assert isinstance(answer, EngineDead) and "shut down before" in str(answer)

    asyncio.run(main())


def test_an_error_in_the_engine_reaches_every_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = llm.engine.step, iter(range(100))

    def breaks() -> object:
        if next(count) == 20:
            raise RuntimeError("the device is gone")
        return step()

    monkeypatch.setattr(llm.engine, "step", breaks)

    async def main() -> None:
        engine = LocalEngine(llm)
        for answer in await collect_all(engine, [make_request(n, LONG) for n in range(6)]):
            assert isinstance(answer, EngineDead) and "the device is gone" in str(answer)
        assert not engine.is_ready
        await engine.shutdown(1)

    asyncio.run(main())


def test_an_early_close_gives_the_row_back(llm: LLM) -> None:
    async def main() -> None:
        engine = LocalEngine(llm)
        stream = engine.generate(make_request(0, LONG))
        await anext(stream)
        await stream.aclose()
        await until_at_rest(engine)
        assert engine.stats().generation_tokens_total < LONG.max_tokens
        await engine.shutdown(1)

    asyncio.run(main())

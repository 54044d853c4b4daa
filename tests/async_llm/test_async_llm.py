"""``AsyncLLM``: the answers of ``LLM`` for many tasks and loops at once, and a row back from whoever leaves."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import testclient

from snapstream import LLM, AsyncLLM, SamplingParams
from snapstream.assets import TINY_MODEL
from snapstream.engine.core import Engine
from snapstream.types import QueueFull
from tests.llm.conftest import write_checkpoint
from tests.waiting import HANG_S, until_async

TEXTS = [f"{word} and so on" for word in ("one", "two", "three", "four", "five", "six")]
SHORT = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
LONG = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"budget": 64, "max_rows": 3, "max_model_len": 4096, "chunk_len": 32, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("async"), 4096)


@pytest.fixture(scope="module")
def want(folder: Path) -> Iterator[list[Any]]:
    """The first answers of the synchronous front, each alone."""
    with LLM(folder, **SETTINGS) as llm:
        yield [llm.generate(text, SHORT)[0] for text in TEXTS]


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncIterator[AsyncLLM]:
    async with await asyncio.to_thread(AsyncLLM, folder, **{**SETTINGS, **settings}) as llm:
        yield llm


def run(folder: Path, work: Callable[[AsyncLLM], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with opened(folder, **settings) as llm:
            await work(llm)

    asyncio.run(asyncio.wait_for(main(), HANG_S))


class Held:
    """Steps that do nothing while it is held, so that what waits goes on waiting, however slow the machine is."""

    def __init__(self) -> None:
        self.is_held = False


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    step, state = Engine.step, Held()

    def held_step(engine: Engine) -> Any:
        if not state.is_held:
            return step(engine)
        time.sleep(0.001)
        return []

    monkeypatch.setattr(Engine, "step", held_step)
    yield state


async def until_at_rest(llm: AsyncLLM) -> None:
    """Nobody runs or waits, and every row is free."""
    await until_async(
        lambda: (
            llm.stats.rows_free == llm.stats.rows_total == 3 and not llm.stats.num_running and not llm.stats.num_waiting
        )
    )


async def read(llm: AsyncLLM, text: str) -> Any:
    outputs = [output async for output in llm.stream(text, SHORT)]
    return outputs[-1]


def same(output: Any, other: Any) -> bool:
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    names = ("prompt", "prompt_token_ids", "text", "token_ids", "finish_reason")
    return all(getattr(output, name) == getattr(other, name) for name in names)


def test_many_tasks_share_one_engine_and_each_has_its_own_answer(folder: Path, want: list[Any]) -> None:
    async def work(llm: AsyncLLM) -> None:
        streamed = await asyncio.gather(*(read(llm, text) for text in TEXTS))
        assert all(map(same, streamed, want))
        batch = await llm.generate(TEXTS, SHORT)
        assert all(map(same, batch, want)) and all(output.timings.total_ms > 0 for output in batch)
        messages = [{"role": "user", "content": "hi"}]
        [told] = await llm.chat(messages, SHORT)
        assert told.prompt_token_ids == tuple(await llm.chat_token_ids(messages))
        await until_at_rest(llm)

    run(folder, work)


def test_an_output_grows_and_is_the_same_object(folder: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        seen, counts = [], []
        async for output in llm.stream(TEXTS[0], SHORT):
            seen.append(output)
            counts.append(len(output.token_ids))
        assert len({id(output) for output in seen}) == 1
        assert counts == sorted(counts) and counts[-1] == 12

    run(folder, work)


def test_leaving_frees_the_row(folder: Path, held: Held) -> None:
    async def work(llm: AsyncLLM) -> None:
        closed = llm.stream(TEXTS[0], LONG)
        await anext(closed)
        await closed.aclose()

        async def breaks() -> None:
            async for _ in llm.stream(TEXTS[1], LONG):
                break

        await breaks()
        task = asyncio.create_task(llm.generate(TEXTS, LONG))
        await until_async(lambda: llm.stats.num_running == 3 and llm.stats.num_waiting == 3)
        held.is_held = True
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.is_held = False
        await until_at_rest(llm)

    run(folder, work)


def test_wrong_input_reaches_its_own_task(folder: Path, want: list[Any]) -> None:
    async def work(llm: AsyncLLM) -> None:
        good = asyncio.gather(*(read(llm, text) for text in TEXTS))
        for params, what in ((SamplingParams(max_tokens=5000), "4096"), (None, "stream takes one prompt; 2")):
            with pytest.raises(ValueError, match=what):
                async for _ in llm.stream(TEXTS[0] if params else TEXTS[:2], params):  # type: ignore[arg-type]
                    pass
        with pytest.raises(TypeError):
            await llm.generate("a", budget="much", selector=object())  # type: ignore[arg-type]
        assert all(map(same, await good, want))

    run(folder, work)


def test_a_slow_reader_misses_nothing(folder: Path, want: list[Any]) -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream(TEXTS[2], SHORT)
        first = await anext(stream)
        await until_async(lambda: not llm.stats.num_running)  # the answer is whole before it is read on
        await until_async(lambda: first.is_finished)
        rest = [output async for output in stream]
        assert len(rest) <= 1 and same(first, want[2])

    run(folder, work)


def test_a_full_queue_makes_a_batch_wait_and_refuses_a_stream(folder: Path, want: list[Any], held: Held) -> None:
    async def work(llm: AsyncLLM) -> None:
        blockers = [llm.stream(text, LONG) for text in TEXTS[:3]]
        for blocker in blockers:
            await anext(blocker)
        await until_async(lambda: llm.stats.num_running == 3 and not llm.stats.num_waiting)
        held.is_held = True
        waiting = asyncio.create_task(read(llm, TEXTS[0]))
        await until_async(lambda: llm.stats.num_waiting == 1)
        with pytest.raises(QueueFull, match="the limit is 1"):
            await read(llm, TEXTS[1])
        batch = asyncio.create_task(llm.generate(TEXTS, SHORT))
        for blocker in blockers:
            await blocker.aclose()
        held.is_held = False
        assert all(map(same, await batch, want)) and same(await waiting, want[0])

    run(folder, work, max_waiting=1)


def test_several_loops_and_one_that_ends_unasked(folder: Path, want: list[Any]) -> None:
    async def work(llm: AsyncLLM) -> None:
        answers: dict[int, Any] = {}

        def elsewhere(number: int) -> None:
            answers[number] = asyncio.run(read(llm, TEXTS[number]))

        threads = [threading.Thread(target=elsewhere, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        here = await read(llm, TEXTS[4])
        for thread in threads:
            await asyncio.to_thread(thread.join, HANG_S)
        assert same(here, want[4]) and all(same(answers[number], want[number]) for number in range(4))

        def leaves() -> None:
            """A loop that is closed while it waits: nobody there cancels anything."""
            loop = asyncio.new_event_loop()
            stream = llm.stream(TEXTS[0], LONG)
            loop.run_until_complete(anext(stream))
            loop.close()
            kept.append(stream)

        kept: list[Any] = []
        await asyncio.to_thread(leaves)
        await until_at_rest(llm)

    run(folder, work)


def test_close_ends_open_streams_with_an_error(folder: Path) -> None:
    async def main() -> None:
        async with opened(folder) as llm:
            tasks = [asyncio.create_task(llm.generate(text, LONG)) for text in TEXTS]
            await until_async(lambda: llm.stats.num_running == 3 and llm.stats.num_waiting == 3)
            await asyncio.gather(llm.close(), llm.close())
            for task in tasks:
                with pytest.raises(RuntimeError, match="this AsyncLLM is closed"):
                    await task
        with pytest.raises(RuntimeError, match="this AsyncLLM is closed"):
            await llm.generate("a")

    asyncio.run(asyncio.wait_for(main(), HANG_S))


def test_a_step_that_fails_ends_everybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = Engine.step, iter(range(100))

    def breaks(engine: Engine) -> Any:
        if next(count) == 20:
            raise RuntimeError("the device is gone")
        return step(engine)

    monkeypatch.setattr(Engine, "step", breaks)

    async def work(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(llm.generate(text, LONG)) for text in TEXTS]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, RuntimeError) and "the device is gone" in str(outcome)
        with pytest.raises(RuntimeError, match="nothing more is run"):
            await llm.generate("a")

    run(folder, work)


# The web application of docs/python.md runs as it is printed.

DOC = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_web_application_streams_what_generate_gives() -> None:
    block = re.findall(r"```python\n(.*?)```", DOC.split("## AsyncLLM")[1], re.DOTALL)[0]
    names: dict[str, Any] = {}
    block = block.replace("path/to/Llama-3.2-1B-Instruct", str(TINY_MODEL)).replace("budget=8192", "budget=256")
    exec(compile(block.replace("max_tokens=64", "max_tokens=64, temperature=0"), "docs/python.md", "exec"), names)
    with LLM(TINY_MODEL, budget=256, dtype="float32", progress=False) as llm:
        want = llm.generate("Once upon a time", SamplingParams(max_tokens=64, temperature=0))[0].text
    with testclient.TestClient(names["app"]) as client:
        assert client.get("/ask", params={"question": "Once upon a time"}).text == want != ""
        assert names["app"].state.llm.stats.rows_total > 0

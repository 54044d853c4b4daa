"""Every way in which a rank can die under a server: its requests are told, the engine comes back, no process stays.

One server lives through all of it, because an engine of two ranks takes seconds to start. It decodes by looped steps
where there is a compiler.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import is_running
from snapstream.config import EngineOptions
from snapstream.llm import LLM
from snapstream.request import Request, SamplingParams
from snapstream.server.engine.api import EngineDead
from snapstream.server.engine.messages import EngineSpec
from snapstream.server.engine.process import EngineProcess
from tests.server.engine.running import (
    LONG,
    MAX_MODEL_LEN,
    SETTINGS,
    Whole,
    collect,
    collect_all,
    expected,
    make_request,
    until_at_rest,
    whole,
    write_model,
)
from tests.waiting import HANG_S, until_async

LOST = r"rank 1 was killed by SIGKILL"


def followers_of(pid: int) -> list[int]:
    """Processes that follow the engine process ``pid``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_follower = b"follow_leader" in (folder / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == pid and is_follower:
            found.append(int(folder.name))
    return found


class Served:
    """An engine over two ranks behind a front, and the event loop it belongs to."""

    def __init__(self, runner: asyncio.Runner, engine: EngineProcess) -> None:
        self.runner, self.engine = runner, engine

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.runner.run(asyncio.wait_for(coroutine, HANG_S))

    @property
    def follower(self) -> int:
        [pid] = followers_of(self.engine.facts.pid)
        return pid


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def want(folder: Path) -> list[Whole]:
    with LLM(folder, **SETTINGS, progress=False) as llm:
        return expected(llm, 6)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    spec = EngineSpec(model=str(folder), num_threads=2, options=EngineOptions(**SETTINGS, tensor_parallel=2))
    with asyncio.Runner() as runner:
        engine = EngineProcess(spec, first_backoff_s=0.0)
        runner.run(engine.start())
        own = Served(runner, engine)
        yield own
        last, leader = own.follower, engine.facts.pid
        runner.run(engine.shutdown(0))
        assert not is_running(leader) and not is_running(last), "a shut down server leaves no process"


async def answers_are(engine: EngineProcess, want: list[Whole]) -> None:
    answers = await collect_all(engine, [make_request(number) for number in range(len(want))])
    assert [whole(answer) for answer in answers] == want
    await until_at_rest(engine)


def test_a_server_over_two_ranks_answers_as_one_device(served: Served, want: list[Whole]) -> None:
    assert served.engine.facts.notes[0].startswith("ranks: 2 (cpu, 1 thread each)")
    served.run(answers_are(served.engine, want))


def test_a_follower_that_is_killed_amid_a_prefill_ends_the_engine(served: Served) -> None:
    """It stops before the prompt comes, so that the leader waits for it in a layer of that prompt."""
    long = Request(
        request_id="long", prompt_token_ids=(7,) * (MAX_MODEL_LEN - 8), sampling=SamplingParams(max_tokens=8)
    )

    async def main() -> None:
        engine, follower = served.engine, served.follower
        os.kill(follower, signal.SIGSTOP)
        asking = asyncio.create_task(collect(engine, long))
        await until_async(lambda: engine.stats().num_waiting == 1)  # the last that is heard before that step
        os.kill(follower, signal.SIGKILL)
        with pytest.raises(EngineDead, match=LOST):
            await asking
        assert not engine.is_ready

    served.run(main())


def test_a_follower_that_is_killed_while_it_loads_fails_the_start(served: Served, want: list[Whole]) -> None:
    """The server tries again, and again if it must."""

    async def main() -> None:
        engine, before = served.engine, served.engine.facts.pid
        starting: list[int] = []

        def is_starting() -> bool:
            starting[:] = [pid for child in children_of(os.getpid()) for pid in followers_of(child)]
            return bool(starting) and not engine.is_ready

        await until_async(is_starting)
        os.kill(starting[0], signal.SIGKILL)
        await until_async(lambda: engine.is_ready)
        assert engine.facts.pid != before and engine.stats().restarts_total >= 2
        await answers_are(engine, want)

    served.run(main())


def test_a_follower_that_is_killed_amid_decode_ends_the_engine(served: Served, want: list[Whole]) -> None:
    async def main() -> None:
        engine, old = served.engine, served.engine.facts.pid
        stream = engine.generate(make_request(1, LONG))
        await anext(stream)
        running = asyncio.create_task(collect_all(engine, [make_request(n, LONG, f"more-{n}") for n in range(8)]))
        await until_async(lambda: engine.stats().num_running + engine.stats().num_waiting == 9)
        os.kill(served.follower, signal.SIGKILL)
        with pytest.raises(EngineDead, match=LOST):
            async for _ in stream:
                pass
        assert all(isinstance(outcome, EngineDead) for outcome in await running)
        await until_async(lambda: engine.is_ready)
        assert not is_running(old)
        await answers_are(engine, want)

    served.run(main())


def test_a_follower_that_is_killed_at_rest_ends_the_engine(served: Served) -> None:
    """Nobody asks for anything, so no step can fail of it; a watcher sees it."""

    async def main() -> None:
        engine = served.engine
        os.kill(served.follower, signal.SIGKILL)
        await until_async(lambda: not engine.is_ready)
        assert engine.absence is not None and "rank 1 was killed by SIGKILL" in str(engine.absence)
        await until_async(lambda: engine.is_ready)

    served.run(main())


def test_a_leader_that_is_killed_takes_its_followers_with_it(served: Served, want: list[Whole]) -> None:
    async def main() -> None:
        engine, leader, follower = served.engine, served.engine.facts.pid, served.follower
        asking = asyncio.create_task(collect(engine, make_request(1, LONG)))
        await until_async(lambda: engine.stats().num_running == 1)
        os.kill(leader, signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGKILL"):
            await asking
        await until_async(lambda: not is_running(follower))
        await until_async(lambda: engine.is_ready)
        await answers_are(engine, want)

    served.run(main())


def children_of(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append(int(folder.name))
    return found

"""The engine in its own process: right answers, refusals, aborts, and every way in which one of the two can die.

One process serves most tests; ``Served`` keeps its event loop between them. An engine does not outlive its server.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import is_running
from snapstream.config import EngineOptions
from snapstream.engine.worker import Beat, EngineStats, EngineWorker, Ping, Stop, ToEngine
from snapstream.llm import LLM
from snapstream.server.engine import process
from snapstream.server.engine.api import EngineDead, EngineSpec
from snapstream.server.engine.process import EngineProcess, Heartbeat, build
from snapstream.server.telemetry import Metrics
from snapstream.startup.build import build_runner
from snapstream.types import QueueFull, SamplingParams
from tests.server.engine.running import (
    BUDGET,
    LONG,
    MAX_MODEL_LEN,
    MAX_ROWS,
    MAX_WAITING,
    SETTINGS,
    Answer,
    Whole,
    collect,
    collect_all,
    expected,
    make_request,
    prompt,
    until_at_rest,
    whole,
)
from tests.waiting import HANG_S, until, until_async


class Served:
    """An engine process and the event loop it belongs to."""

    def __init__(self, runner: asyncio.Runner, engine: EngineProcess) -> None:
        self.runner, self.engine = runner, engine

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.runner.run(asyncio.wait_for(coroutine, HANG_S))


@pytest.fixture(scope="module")
def spec(folder: Path) -> EngineSpec:
    return EngineSpec(model=str(folder), num_threads=1, options=EngineOptions(**SETTINGS))


@pytest.fixture(scope="module")
def want(folder: Path) -> list[Whole]:
    with LLM(folder, **SETTINGS, progress=False) as llm:
        return expected(llm, 12)


@pytest.fixture(scope="module")
def served(spec: EngineSpec) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        engine = EngineProcess(spec)
        runner.run(engine.start())
        yield Served(runner, engine)
        runner.run(engine.shutdown(0))


@pytest.fixture(autouse=True)
def _no_core_files() -> Iterator[None]:
    """Writing one takes longer than a crash may go unnoticed."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)


def test_facts_are_those_of_the_loaded_engine(served: Served, folder: Path) -> None:
    metadata = served.engine.metadata
    with LLM(folder, **SETTINGS, progress=False) as llm:
        assert (metadata.model, metadata.engine, metadata.architecture) == (str(folder), llm.config, llm.model_config)
    assert (metadata.engine.max_model_len, metadata.engine.max_rows, metadata.engine.budget.capacity) == (
        MAX_MODEL_LEN,
        MAX_ROWS,
        BUDGET,
    )
    assert metadata.pid != os.getpid() and is_running(metadata.pid)


def test_answers_are_those_of_generate(served: Served, want: list[Whole]) -> None:
    async def main() -> None:
        before = await until_at_rest(served.engine)
        answers = await collect_all(served.engine, [make_request(number) for number in range(12)])
        for number, answer in enumerate(answers):
            assert whole(answer) == want[number], number
            assert isinstance(answer, Answer) and answer.timings is not None and answer.compression is not None
            assert answer.timings.total_ms >= answer.timings.first_token_ms > 0
            assert (answer.compression.evicted_tokens > 0) == (len(prompt(number)) > BUDGET)
        assert max(answer.num_deltas for answer in answers if isinstance(answer, Answer)) > 4, "answers are streamed"
        after = await until_at_rest(served.engine)
        assert after.rows_total == after.rows_free == MAX_ROWS
        assert after.prompt_tokens_total - before.prompt_tokens_total == sum(len(prompt(n)) for n in range(12))
        num_output = sum(len(answer.token_ids) for answer in answers if isinstance(answer, Answer))
        assert after.generation_tokens_total - before.generation_tokens_total == num_output
        evicting = [a for a in answers if isinstance(a, Answer) and a.compression and a.compression.evicted_tokens]
        assert after.compressions_total - before.compressions_total == len(evicting) > 0
        assert after.compression_seconds_total > before.compression_seconds_total

    served.run(main())


def test_an_early_close_frees_the_row(served: Served) -> None:
    async def main() -> None:
        before = (await until_at_rest(served.engine)).generation_tokens_total
        streams = [served.engine.generate(make_request(number, LONG)) for number in range(MAX_ROWS)]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            await stream.aclose()
        stats = await until_at_rest(served.engine)
        assert 0 < stats.generation_tokens_total - before < MAX_ROWS * LONG.max_tokens, "they ended early"
        task = asyncio.create_task(collect(served.engine, make_request(0, LONG)))
        await until_async(lambda: served.engine.stats().num_running)
        task.cancel()  # the other way to leave
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_at_rest(served.engine)

    served.run(main())


def test_a_bad_request_is_refused_while_others_go_on(served: Served, want: list[Whole]) -> None:
    too_long = make_request(1, SamplingParams(max_tokens=MAX_MODEL_LEN + 1), "too-long")

    async def main() -> None:
        good = [make_request(number) for number in range(3)]
        *answers, bad = await collect_all(served.engine, [*good, too_long])
        assert isinstance(bad, ValueError) and f"the limit is {MAX_MODEL_LEN}" in str(bad)
        assert [whole(answer) for answer in answers] == want[:3]
        again = await collect_all(served.engine, [make_request(1), make_request(2, request_id="id-1")])
        assert whole(again[0]) == want[1]
        assert isinstance(again[1], ValueError) and "in use" in str(again[1])

    served.run(main())


def test_a_full_queue_refuses_and_serves_what_it_took(served: Served, want: list[Whole]) -> None:
    async def main() -> None:
        engine = served.engine
        blockers = [asyncio.create_task(collect(engine, make_request(n, LONG, f"blocks-{n}"))) for n in range(MAX_ROWS)]
        await until_async(lambda: engine.stats().num_running == MAX_ROWS)
        asking = asyncio.create_task(
            collect_all(engine, [make_request(n % 6, request_id=f"many-{n}") for n in range(40)])
        )
        await until_async(lambda: engine.stats().num_waiting == MAX_WAITING)
        for blocker in blockers:
            blocker.cancel()
        await asyncio.gather(*blockers, return_exceptions=True)
        answers = await asking
        taken = {n: answer for n, answer in enumerate(answers) if isinstance(answer, Answer)}
        assert len(taken) >= MAX_WAITING
        assert all(isinstance(answer, QueueFull) for n, answer in enumerate(answers) if n not in taken)
        assert len(taken) < 40
        assert all(whole(answer) == want[n % 6] for n, answer in taken.items())
        await until_at_rest(served.engine)

    served.run(main())


def test_signals_of_the_terminal_are_left_to_the_front(served: Served, want: list[Whole]) -> None:
    async def main() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(served.engine.metadata.pid, number)
        assert whole(await collect(served.engine, make_request(3))) == want[3]

    served.run(main())


def test_a_killed_engine_fails_every_request_at_once_and_comes_back(served: Served, want: list[Whole]) -> None:
    engine = served.engine

    async def main() -> None:
        before, old_pid = engine.stats(), engine.metadata.pid
        first = engine.generate(make_request(99, LONG))
        await anext(first)
        running = asyncio.create_task(collect_all(engine, [make_request(n, LONG) for n in range(2 * MAX_ROWS)]))
        await until_async(lambda: engine.stats().num_running + engine.stats().num_waiting == 1 + 2 * MAX_ROWS)
        os.kill(old_pid, signal.SIGKILL)
        outcomes = await running
        with pytest.raises(EngineDead, match="SIGKILL"):
            async for _ in first:
                pass
        assert all(isinstance(outcome, EngineDead) for outcome in outcomes), outcomes
        assert not engine.is_ready and engine.stats().num_running == 0
        page = Metrics(lambda: "tiny", engine.stats, has_vllm_names=True).render().decode()
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "rows_used", "rows_free"):
            assert f'snapstream:{gauge}{{model_name="tiny"}} 0.0' in page, gauge
        assert engine.unavailable is not None and not engine.unavailable.is_final
        with pytest.raises(EngineDead):
            await collect(engine, make_request(0))
        await until_async(lambda: engine.is_ready)
        assert engine.metadata.pid != old_pid and not is_running(old_pid)
        answers = await collect_all(engine, [make_request(number) for number in range(5)])
        assert [whole(answer) for answer in answers] == want[:5]
        after = await until_at_rest(engine)
        assert after.restarts_total == 1
        assert after.generation_tokens_total > before.generation_tokens_total
        assert after.prompt_tokens_total > before.prompt_tokens_total

    served.run(main())


def test_the_log_says_how_many_ranks_are_waited_for_and_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError("no process")

    monkeypatch.setattr(process, "EngineChild", refused)
    options = EngineOptions(tensor_parallel=4, local_ranks=1, master_addr="10.0.0.1:7690")
    with caplog.at_level("INFO"), pytest.raises(OSError, match="no process"):
        asyncio.run(EngineProcess(EngineSpec(model="m", options=options)).start())
    assert "the engine waits for 3 ranks at 10.0.0.1:7690" in caplog.text


def test_the_log_says_what_a_loading_engine_does(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stages: list[str] = []
    build(spec, on_stage=stages.append).close()
    first, *reading, last = stages
    assert (first, last) == ("choosing and compiling kernels", "preparing the engine")
    shares = [int(re.fullmatch(r"reading the weights, (\d+) %", stage)[1]) for stage in reading]  # type: ignore[index]
    assert shares[0] == 0 and shares == sorted(set(shares)) and len(shares) > 3
    monkeypatch.setattr(process, "LOADING_NOTE_S", 0.01)
    caplog.set_level(logging.INFO, "snapstream.server.engine.process")

    async def run() -> None:
        engine = EngineProcess(spec)
        await engine.start()
        try:
            assert "still loading after " in caplog.text
            caplog.clear()
            await asyncio.sleep(0.1)
            assert "still loading" not in caplog.text
        finally:
            await engine.shutdown(0)

    asyncio.run(run())


def test_without_restart_a_killed_engine_stays_dead(spec: EngineSpec) -> None:
    async def main() -> None:
        engine = EngineProcess(spec, restart=False, first_backoff_s=0.0)
        metadata = await engine.start()
        running = asyncio.create_task(collect_all(engine, [make_request(0, LONG)]))
        await until_async(lambda: engine.stats().num_running == 1)
        os.kill(metadata.pid, signal.SIGSEGV)
        [outcome] = await running
        assert isinstance(outcome, EngineDead) and "SIGSEGV" in str(outcome)
        assert not engine.is_ready and engine.stats().restarts_total == 0
        assert outcome.is_final and engine.unavailable is not None and engine.unavailable.is_final
        assert "SIGSEGV" in str(engine.unavailable) and "not restarted" in str(engine.unavailable)
        assert not [child for child in multiprocessing.active_children() if child.pid == metadata.pid]
        await engine.shutdown(HANG_S)

    asyncio.run(asyncio.wait_for(main(), HANG_S))


def test_shutdown_drains_and_leaves_nothing(spec: EngineSpec, want: list[Whole]) -> None:
    async def main() -> None:
        engine = EngineProcess(spec)
        pid = (await engine.start()).pid
        running = asyncio.create_task(collect_all(engine, [make_request(number) for number in range(8)]))
        long = asyncio.create_task(collect(engine, make_request(9, replace(LONG, max_tokens=300))))
        await asyncio.sleep(0)  # both have submitted their requests
        ending = asyncio.create_task(engine.shutdown(HANG_S))
        await asyncio.sleep(0)
        assert not engine.is_ready
        with pytest.raises(EngineDead, match="shutting down"):
            await collect(engine, make_request(50))
        assert [whole(answer) for answer in await running] == want[:8]
        assert len((await long).token_ids) == 300
        await ending
        assert not Path(f"/proc/{pid}").exists(), "not even a zombie"
        await engine.shutdown(1)  # may be repeated

    asyncio.run(asyncio.wait_for(main(), HANG_S))


def test_an_engine_that_cannot_be_built_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {child.pid for child in multiprocessing.active_children()}

    async def main() -> None:
        with pytest.raises(ValueError, match="max_model_len is 100000"):
            await EngineProcess(EngineSpec(model=str(folder), options=EngineOptions(max_model_len=100_000))).start()
        monkeypatch.setattr("snapstream.server.engine.process.LOAD_TIMEOUT_S", 0.01)
        slow = EngineProcess(EngineSpec(model=str(folder)))
        with pytest.raises(EngineDead, match=r"not ready within 0\.01 s"):
            await slow.start()
        assert not slow.is_ready
        assert {child.pid for child in multiprocessing.active_children()} <= others

    asyncio.run(asyncio.wait_for(main(), HANG_S))


# An engine that no longer gets on is noticed, ended and replaced, whether it works or is idle.

STALL_S = 3.0


async def answered(engine: EngineProcess) -> Answer:
    """An answer, from whichever engine serves; on a machine that is busy enough a sound one may be replaced, too."""
    while True:
        try:
            return await collect(engine, make_request(1))
        except EngineDead:
            await until_async(lambda: engine.is_ready)


def test_a_stopped_engine_is_ended_and_replaced(folder: Path) -> None:
    with LLM(folder, **SETTINGS, progress=False) as llm:
        want = expected(llm, 2)[1]

    async def main() -> None:
        spec = EngineSpec(model=str(folder), num_threads=1, options=EngineOptions(**SETTINGS))
        engine = EngineProcess(spec, first_backoff_s=0.0, stall_timeout_s=STALL_S)
        await engine.start()
        assert whole(await answered(engine)) == want

        running = [asyncio.create_task(collect(engine, make_request(n, LONG))) for n in range(6)]
        await until_async(lambda: engine.stats().num_running or not engine.is_ready)
        before, pid = engine.stats().stalls_total, engine.metadata.pid
        os.kill(pid, signal.SIGSTOP)  # amid its work
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, EngineDead) and "made no progress for 3 s" in str(outcome)
        assert not engine.is_ready and engine.stats().stalls_total > before
        assert engine.unavailable is not None and not engine.unavailable.is_final
        await until_async(lambda: engine.is_ready)
        assert engine.metadata.pid != pid and not Path(f"/proc/{pid}").exists()
        assert whole(await answered(engine)) == want

        before, pid = engine.stats().stalls_total, engine.metadata.pid
        os.kill(pid, signal.SIGSTOP)  # with nothing to do
        await until_async(lambda: engine.stats().stalls_total > before)
        await until_async(lambda: engine.is_ready and engine.metadata.pid != pid)
        assert engine.stats().restarts_total >= 2
        await engine.shutdown(0)

    asyncio.run(asyncio.wait_for(main(), HANG_S))


def test_every_unit_of_a_prompt_is_a_sign_of_life(folder: Path) -> None:
    """A step may hold hundreds of units; each shows that the engine gets on."""
    units: list[int] = []
    make_runner = partial(build_runner, on_unit=lambda: units.append(1))
    with LLM(folder, **SETTINGS, progress=False, make_runner=make_runner) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        llm.generate([[3 + i % 250 for i in range(320)]], params)
        assert len(units) > 10 * llm.model_config.num_layers, "ten chunks through each layer, and the log-probabilities"


def test_a_pulse_is_sent_now_and_then() -> None:
    now, sent = [0.0], []
    pulse = Heartbeat(sent.append, clock=lambda: now[0])
    for step in range(100):
        now[0] = step * 0.03
        pulse.note()
    assert 15 <= len(sent) <= 30 and all(isinstance(beat, Beat) for beat in sent)


class Port:
    def __init__(self, *messages: ToEngine) -> None:
        self.waiting, self.sent = list(messages), []

    def receive(self, *, block: bool) -> ToEngine | None:
        return self.waiting.pop(0) if self.waiting else None

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("count", [1, 3])
def test_a_ping_is_answered(folder: Path, count: int) -> None:
    with LLM(folder, **SETTINGS, progress=False) as llm:
        port = Port(*[Ping()] * count, Stop())
        EngineWorker(llm.engine, 4, port).run()
    assert [message for message in port.sent if not isinstance(message, EngineStats)] == [Beat()] * count


SOURCE = Path(__file__).parents[3]

FRONT = """
import asyncio, multiprocessing, sys
from snapstream.config import EngineOptions
from snapstream.server.engine.process import EngineProcess
from snapstream.server.engine.api import EngineSpec

async def main():
    options = EngineOptions(budget=64, max_rows=2, max_model_len=512)
    engine = EngineProcess(EngineSpec(model=sys.argv[1], options=options, num_threads=1))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    if sys.argv[2] == "serving":
        await starting
    [child] = multiprocessing.active_children()
    print(child.pid, flush=True)
    assert "torch" not in sys.modules, "the front does not load torch"
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["loading", "serving"])
def test_a_front_that_is_killed_leaves_no_engine_behind(folder: Path, tmp_path: Path, state: str) -> None:
    script = tmp_path / "front.py"
    script.write_text(FRONT)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        [sys.executable, str(script), str(folder), state], stdout=subprocess.PIPE, text=True, env=env
    ) as front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        assert is_running(pid)
        front.kill()
    until(lambda: not is_running(pid))  # else the engine outlives its front

"""Every way in which a rank can die under a server: its requests are told, the engine comes back, no process stays.

One server lives through all of it, because an engine of two ranks takes seconds to start. It decodes by looped steps
where there is a compiler.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from benchmarks.server_process import is_running
from snapstream.config import EngineOptions
from snapstream.distributed import control
from snapstream.distributed.control import RankLost, WorkerRanks
from snapstream.llm import LLM
from snapstream.server.engine.api import EngineDead, EngineSpec
from snapstream.server.engine.process import EngineProcess
from snapstream.step import StepPlan
from snapstream.types import Request, SamplingParams
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
from tests.waiting import HANG_S, until, until_async

LOST = r"rank 1 was killed by SIGKILL"


def children_of(pid: int, command: bytes = b"") -> list[int]:
    """Processes that ``pid`` started, of those whose command line has ``command``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_meant = command in (folder / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == pid and is_meant:
            found.append(int(folder.name))
    return found


def workers_of(pid: int) -> list[int]:
    """Worker ranks of the engine process ``pid``."""
    return children_of(pid, b"spawned_worker")


class Served:
    """An engine over two ranks behind a front, and the event loop it belongs to."""

    def __init__(self, runner: asyncio.Runner, engine: EngineProcess) -> None:
        self.runner, self.engine = runner, engine

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it once the engine is ready: the test before, if any ran here, may have killed it."""
        self.until_ready()
        self.runner.run(asyncio.wait_for(coroutine, HANG_S))

    def until_ready(self) -> None:
        self.runner.run(until_async(lambda: self.engine.is_ready))

    @property
    def worker(self) -> int:
        [pid] = workers_of(self.engine.metadata.pid)
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
        own.until_ready()
        last, rank_0 = own.worker, engine.metadata.pid
        runner.run(engine.shutdown(0))
        assert not is_running(rank_0) and not is_running(last), "a shut down server leaves no process"


async def answers_are(engine: EngineProcess, want: list[Whole]) -> None:
    answers = await collect_all(engine, [make_request(number) for number in range(len(want))])
    assert [whole(answer) for answer in answers] == want
    await until_at_rest(engine)


def test_a_server_over_two_ranks_answers_as_one_device(served: Served, want: list[Whole]) -> None:
    assert "ranks: 2 (cpu, 1 thread each)" in served.engine.metadata.notes
    served.run(answers_are(served.engine, want))


def test_a_worker_that_is_killed_amid_a_prefill_ends_the_engine(served: Served) -> None:
    """It stops before the prompt comes, so that rank 0 waits for it in a layer of that prompt."""
    long = Request(
        request_id="long", prompt_token_ids=(7,) * (MAX_MODEL_LEN - 8), sampling=SamplingParams(max_tokens=8)
    )

    async def main() -> None:
        engine, worker = served.engine, served.worker
        os.kill(worker, signal.SIGSTOP)
        asking = asyncio.create_task(collect(engine, long))
        await until_async(lambda: engine.stats().num_waiting == 1)  # the last that is heard before that step
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EngineDead, match=LOST):
            await asking
        assert not engine.is_ready

    served.run(main())


def test_a_worker_that_is_killed_while_it_loads_fails_the_start(served: Served, want: list[Whole]) -> None:
    """The server tries again, and again if it must."""

    async def main() -> None:
        engine, before = served.engine, served.engine.metadata.pid
        starting: list[int] = []

        def is_starting() -> bool:
            starting[:] = [pid for child in children_of(os.getpid()) for pid in workers_of(child)]
            return bool(starting) and not engine.is_ready

        restarts = engine.stats().restarts_total
        os.kill(served.worker, signal.SIGKILL)
        await until_async(lambda: not engine.is_ready)
        await until_async(is_starting)
        os.kill(starting[0], signal.SIGKILL)
        await until_async(lambda: engine.is_ready)
        assert engine.metadata.pid != before and engine.stats().restarts_total >= restarts + 2
        await answers_are(engine, want)

    served.run(main())


def test_a_worker_that_is_killed_amid_decode_ends_the_engine(served: Served, want: list[Whole]) -> None:
    async def main() -> None:
        engine, old = served.engine, served.engine.metadata.pid
        stream = engine.generate(make_request(1, LONG))
        await anext(stream)
        running = asyncio.create_task(collect_all(engine, [make_request(n, LONG, f"more-{n}") for n in range(8)]))
        await until_async(lambda: engine.stats().num_running + engine.stats().num_waiting == 9)
        os.kill(served.worker, signal.SIGKILL)
        with pytest.raises(EngineDead, match=LOST):
            async for _ in stream:
                pass
        assert all(isinstance(outcome, EngineDead) for outcome in await running)
        await until_async(lambda: engine.is_ready)
        assert not is_running(old)
        await answers_are(engine, want)

    served.run(main())


def test_a_worker_that_is_killed_at_rest_ends_the_engine(served: Served) -> None:
    """Nobody asks for anything, so no step can fail of it; a watcher sees it."""

    async def main() -> None:
        engine = served.engine
        os.kill(served.worker, signal.SIGKILL)
        await until_async(lambda: not engine.is_ready)
        assert engine.unavailable is not None and "rank 1 was killed by SIGKILL" in str(engine.unavailable)
        await until_async(lambda: engine.is_ready)

    served.run(main())


def test_a_killed_rank_0_takes_its_workers_with_it(served: Served, want: list[Whole]) -> None:
    async def main() -> None:
        engine, rank_0, worker = served.engine, served.engine.metadata.pid, served.worker
        asking = asyncio.create_task(collect(engine, make_request(1, LONG)))
        await until_async(lambda: engine.stats().num_running == 1)
        os.kill(rank_0, signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGKILL"):
            await asking
        await until_async(lambda: not is_running(worker))
        await until_async(lambda: engine.is_ready)
        await answers_are(engine, want)

    served.run(main())


@pytest.mark.parametrize("executor", [None, "eager"])
def test_a_stopped_worker_ends_the_call_of_an_llm(folder: Path, executor: str | None) -> None:
    """In looped steps it is waited for in shared memory, else in a collective."""
    with LLM(folder, **SETTINGS | {"executor": executor}, tensor_parallel=2, stall_timeout=2.0, progress=False) as llm:
        [worker] = workers_of(os.getpid())
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(RankLost, match=r"a step did not end within 2 s \(stall_timeout\)"):
            llm.generate([[7] * 20])
    assert not is_running(worker)


# Worker ranks as rank 0 sees them: waited for, watched, told, ended. They run no model here, and start at once.


@contextmanager
def started(*entries: str) -> Iterator[tuple[WorkerRanks, SimpleQueue[str]]]:
    lost: SimpleQueue[str] = SimpleQueue()
    workers = WorkerRanks(len(entries), lost.put)
    try:
        for rank, entry in enumerate(entries, start=1):
            workers.spawn(rank, f"tests.distributed.entries:{entry}", {})
        yield workers, lost
    finally:
        workers.close()
        assert not any(is_running(pid) for pid in workers.pids)


def test_all_are_waited_for_told_and_ended() -> None:
    with started("good", "good") as (workers, lost):
        workers.wait("here", HANG_S)
        assert [hello.host for hello in workers.hellos()] == ["here", "here"]
        workers.wait("ready", HANG_S)
        for step in range(3):
            workers.send(StepPlan(step_id=step, decode_rows=tuple(range(2000))))
        assert workers.lost is None and all(is_running(pid) for pid in workers.pids)
        workers.close()
        workers.close()  # may be repeated
        assert workers.lost is None and lost.empty(), "who is ended is not lost"


@pytest.mark.parametrize(
    ("step", "why"), [(13, "rank 2 was killed by SIGKILL"), (14, "rank 2: RuntimeError: too much")]
)
def test_one_that_dies_is_noticed_and_named(step: int, why: str) -> None:
    with started("good", "weak") as (workers, lost):
        workers.wait("ready", HANG_S)
        woken: list[int] = []
        workers.when_lost(lambda: woken.append(1))
        workers.send(StepPlan(step_id=step))
        assert lost.get(timeout=HANG_S) == why == workers.lost
        assert woken, "whoever waits for it is told"
        workers.when_lost(lambda: woken.append(2))
        assert woken[-1] == 2, "at once, where it has gone"
        with pytest.raises(RankLost, match=why):
            workers.send(StepPlan(step_id=15))
        with pytest.raises(RankLost, match=why):
            workers.check_lost()
        assert lost.empty(), "it is told once"


@pytest.mark.parametrize(
    ("entry", "error", "why"),
    [
        ("refusing", ValueError, "rank 1: this is not rank 0's checkpoint"),
        ("mute", RankLost, "rank 1 ended with code 7"),
        ("babbling", RankLost, "rank 1 sent 5 bytes that are not a valid message"),
    ],
)
def test_one_that_cannot_start_says_why(entry: str, error: type[Exception], why: str) -> None:
    with started(entry, "good") as (workers, lost):
        with pytest.raises(error, match=why):
            workers.wait("ready", HANG_S)
        assert lost.empty(), "the waiting caller knows"


def test_one_that_is_late_is_named() -> None:
    with started("deaf") as (workers, _):
        workers.wait("here", HANG_S)
        with pytest.raises(RankLost, match=r"ranks \[1\] were not ready within 0\.01 s"):
            workers.wait("ready", 0.01)


def test_one_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with started("deaf") as (workers, _):
        workers.wait("here", HANG_S)
        monkeypatch.setattr(control, "STOP_S", 0.0)
        workers.close()
        assert not any(is_running(pid) for pid in workers.pids)


RANK_0 = """
import sys, time
from snapstream.distributed.control import WorkerRanks
workers = WorkerRanks(1)
workers.spawn(1, "tests.distributed.entries:good", {})
workers.wait("ready", 300)
print(*workers.pids, flush=True)
time.sleep(600)
"""


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=LINUX)])
def test_a_killed_rank_0_leaves_none_behind(is_stopped: bool) -> None:
    """A stopped worker cannot notice that its channel is closed."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", RANK_0], stdout=subprocess.PIPE, text=True, env=env) as rank_0:
        assert rank_0.stdout is not None
        pid = int(rank_0.stdout.readline())
        assert is_running(pid)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        rank_0.kill()
    until(lambda: not is_running(pid))


def test_a_thread_that_ends_leaves_its_workers() -> None:
    """The parent-death signal comes when a thread ends, not the process."""
    workers = WorkerRanks(1)
    spawning = threading.Thread(target=workers.spawn, args=(1, "tests.distributed.entries:good", {}))
    spawning.start()
    spawning.join()
    try:
        workers.wait("ready", HANG_S)
        workers.send(StepPlan(step_id=0))
        assert workers.lost is None and is_running(workers.pids[0])
    finally:
        workers.close()


def test_a_step_that_takes_too_long_ends_the_workers() -> None:
    workers = WorkerRanks(1, stall_timeout_s=1.0)
    workers.spawn(1, "tests.distributed.entries:good", {})
    try:
        workers.wait("ready", HANG_S)
        with workers.step():
            pass  # in time
        os.kill(workers.pids[0], signal.SIGSTOP)
        with workers.step():
            until(lambda: workers.lost is not None)
        assert workers.lost == "a step did not end within 1 s (stall_timeout)"
        until(lambda: not is_running(workers.pids[0]))
    finally:
        workers.close()


def test_garbage_is_no_reason_to_stay() -> None:
    """Threads of rank 0 do not hold what nobody else holds: see ``ParallelRunner``."""
    with started("good") as (workers, _):
        workers.wait("ready", HANG_S)
        holder = type("Holder", (), {})()
        weakref.finalize(holder, workers.close)
        del holder
        gc.collect()
        assert not any(is_running(pid) for pid in workers.pids)

"""Streams, queues and interrupts of ``LLM``: whoever leaves or fails frees what he held, and harms no other."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from snapstream import LLM, SamplingParams
from snapstream.engine.core import Engine
from snapstream.exec.prefill import PrefillJob
from snapstream.types import Request
from tests.llm.test_generate import GREEDY, PROMPT
from tests.waiting import HANG_S

ENDLESS = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)


def test_stream_grows_and_ends_with_what_generate_gives(llm: LLM) -> None:
    want = llm.generate(PROMPT, GREEDY)[0]
    texts, counts = [], []
    for output in llm.stream(PROMPT, GREEDY):
        texts.append(output.text)
        counts.append(len(output.token_ids))
    assert counts == list(range(1, 21)) and texts[-1] == want.text
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))


def test_a_closed_stream_frees_its_row(llm: LLM) -> None:
    stream = llm.stream(PROMPT, ENDLESS)
    next(stream)
    stream.close()
    assert_at_rest(llm)


class CtrlC:
    """A signal to the main thread, from within the engine's n-th call of something."""

    def __init__(self, original: Callable[..., Any], number: int = 1) -> None:
        self.original, self.number, self.count = original, number, 0

    def __get__(self, owner: Any, _: Any = None) -> Callable[..., Any]:
        return lambda *arguments: self(owner, *arguments)

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        if self.count == self.number:
            assert threading.current_thread() is not threading.main_thread(), "steps run on the engine's thread"
            os.kill(os.getpid(), signal.SIGINT)
        return self.original(*arguments)


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """Also under a test runner that ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def assert_at_rest(llm: LLM) -> None:
    engine = llm.engine
    assert (engine.num_running, engine.num_waiting, engine.rows_free, engine.has_work) == (0, 0, 4, False)


def test_ctrl_c_frees_every_row(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "step", CtrlC(Engine.step, 4))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 6, ENDLESS)
    monkeypatch.undo()
    assert_at_rest(llm)
    assert len(llm.generate([PROMPT] * 6, GREEDY)) == 6


def test_ctrl_c_in_a_conversation_and_a_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream() -> None:
        for _ in llm.stream(PROMPT, ENDLESS):
            pass

    for call in (stream, lambda: llm.chat([{"role": "user", "content": "hello"}], ENDLESS)):
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", CtrlC(Engine.step, 3))
            with pytest.raises(KeyboardInterrupt):
                call()
        assert_at_rest(llm)


def test_open_streams_and_generate_share_the_engine(llm: LLM) -> None:
    """Each reader gets its own whole answer, in whatever order they read; closing one leaves the others."""
    want = {text: llm.generate(text, GREEDY)[0].token_ids for text in ("abc", "xyz", "123")}
    first, second = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    next(first), next(second), next(first)
    assert llm.generate("123", GREEDY)[0].token_ids == want["123"]
    dropped = llm.stream("gone", GREEDY)
    next(dropped)
    dropped.close()
    assert list(first)[-1].token_ids == want["abc"]
    assert list(second)[-1].token_ids == want["xyz"]
    assert_at_rest(llm)


def test_a_stream_that_ends_inside_a_step_is_released(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector closes streams wherever it runs, on the engine's thread too."""
    want = llm.generate("abc", GREEDY)[0].token_ids
    streams = [llm.stream("left", ENDLESS)]
    next(streams[0])
    submit, nested = llm.engine.runner.submit, []

    def collected(plan: Any) -> Any:
        if not nested:
            nested.append(plan)
            streams.clear()
            gc.collect()
            with pytest.raises(RuntimeError, match="in the middle of a step"):
                llm.generate("abc", GREEDY)
        return submit(plan)

    monkeypatch.setattr(llm.engine.runner, "submit", collected)
    assert llm.generate("abc", GREEDY)[0].token_ids == want
    assert nested
    assert_at_rest(llm)


def test_streams_are_refused_before_they_start(llm: LLM) -> None:
    with pytest.raises(ValueError, match="make 320"):
        llm.stream("a" * 300, GREEDY)
    with pytest.raises(ValueError, match="stream takes one prompt; 2 were given"):
        llm.stream(["a", "b"], GREEDY)


def test_ready_made_requests_need_ids_of_their_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that is in use is refused, and whoever has it reads on."""
    one = Request(request_id="mine", prompt_token_ids=(5, 6, 7), sampling=GREEDY)
    (output,) = llm.answer([one])
    assert output.request_id == "mine" and output.token_ids == llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    with pytest.raises(ValueError, match="request id 'mine' is in use"):
        llm.answer([one, one])
    goes_on, step, num_left = threading.Event(), Engine.step, count(3, -1)

    def held(engine: Engine) -> Any:
        if next(num_left) <= 0:
            goes_on.wait(HANG_S)
        return step(engine)

    monkeypatch.setattr(Engine, "step", held)
    stream = llm.stream(PROMPT, GREEDY)
    running = next(stream)
    with pytest.raises(ValueError, match=f"request id '{running.request_id}' is in use"):
        llm.answer([replace(one, request_id=running.request_id)])
    goes_on.set()
    assert list(stream)[-1].token_ids == llm.generate(PROMPT, GREEDY)[0].token_ids
    with pytest.raises(TypeError, match="request 0 is 'abc'; it must be a Request"):
        llm.answer(["abc"])  # type: ignore[list-item]


def test_ctrl_c_inside_a_step_keeps_no_job(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: weakref.WeakSet[PrefillJob] = weakref.WeakSet()
    interrupt = CtrlC(PrefillJob.run_unit, 2)

    def noted(job: PrefillJob, unit: int) -> None:
        jobs.add(job)
        interrupt(job, unit)

    monkeypatch.setattr(PrefillJob, "run_unit", noted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 6, ENDLESS)
    monkeypatch.undo()
    assert_at_rest(llm)
    gc.collect()
    assert interrupt.count >= 2 and not jobs
    assert len(llm.generate([PROMPT] * 6, GREEDY)) == 6


def test_ctrl_c_ends_only_the_call_that_waits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It interrupts a wait and no step, so what other readers get is whole."""
    whole = llm.generate([PROMPT], GREEDY)[0].token_ids
    first, second = llm.stream(PROMPT, ENDLESS), llm.stream(PROMPT, GREEDY)
    next(first), next(second)
    monkeypatch.setattr(Engine, "step", CtrlC(Engine.step))
    with pytest.raises(KeyboardInterrupt):
        for _ in first:
            pass
    monkeypatch.undo()
    output = list(second)[-1]
    assert output.finish_reason == "length" and output.token_ids == whole
    assert_at_rest(llm)
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == whole


def test_ctrl_c_behind_an_arrival_leaves_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has the request, and nothing has come of it."""
    monkeypatch.setattr(Engine, "add_request", CtrlC(Engine.add_request))
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.stream([3, 4, 5], ENDLESS):
            pass
    monkeypatch.undo()
    assert_at_rest(llm)


def test_a_failed_step_closes_the_engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(checkpoint, budget=64, max_model_len=128, progress=False)
    monkeypatch.setattr(PrefillJob, "run_unit", lambda job, unit: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate("x", GREEDY)
    with pytest.raises(RuntimeError, match="an earlier step of this LLM failed"):
        llm.generate("x", GREEDY)
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("x", GREEDY)


def test_a_bounded_queue_is_fed_as_it_empties(checkpoint: Path) -> None:
    with LLM(checkpoint, budget=64, max_rows=1, max_waiting=2, max_model_len=128, progress=False) as llm:
        assert [len(o.token_ids) for o in llm.generate(["x"] * 7, GREEDY)] == [20] * 7


# Several threads on one LLM take turns: every call has the answer that it has alone, and the engine survives.

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TEXTS = [f"{word} and so on" for word in ("one", "two", "three", "four", "five", "six")]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Threads that stepped while another did; every step gives others the chance to come in between."""
    busy, overlaps, step = threading.Lock(), [], Engine.step

    def watched(engine: Engine) -> Any:
        if not busy.acquire(blocking=False):
            overlaps.append(threading.current_thread().name)
            busy.acquire()
        try:
            sleep(0.002)
            return step(engine)
        finally:
            busy.release()

    monkeypatch.setattr(Engine, "step", watched)
    yield overlaps


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Every call in a thread of its own, all started at once."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait(HANG_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(HANG_S) for future in [pool.submit(run, call) for call in calls]]


def read(llm: LLM, text: str) -> list[int]:
    *_, last = llm.stream(text, PARAMS)
    return last.token_ids


def generate(llm: LLM, *texts: str) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(list(texts), PARAMS)]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[int]]:
    return {text: generate(llm, text)[0] for text in TEXTS}


def test_generate_in_several_threads(llm: LLM, alone: dict[str, list[int]], steps: list[str]) -> None:
    got = together(*(lambda pair=pair: generate(llm, *pair) for pair in (TEXTS[:2], TEXTS[2:4], TEXTS[4:])))
    assert [ids for own in got for ids in own] == [alone[text] for text in TEXTS]
    assert steps == []


def test_streams_in_several_threads(llm: LLM, alone: dict[str, list[int]], steps: list[str]) -> None:
    got = together(*(lambda text=text: read(llm, text) for text in TEXTS[:4]))
    assert got == [alone[text] for text in TEXTS[:4]]
    assert steps == []


def test_streams_beside_batches_and_conversations(llm: LLM, alone: dict[str, list[int]], steps: list[str]) -> None:
    talk = [{"role": "user", "content": "hello"}]
    want = llm.chat(talk, PARAMS)[0].token_ids
    streamed, batch, chat = together(
        lambda: read(llm, TEXTS[0]),
        lambda: generate(llm, *TEXTS[1:]),
        lambda: [llm.chat(talk, PARAMS)[0].token_ids for _ in range(3)],
    )
    assert (streamed, batch, chat) == (alone[TEXTS[0]], [alone[text] for text in TEXTS[1:]], [want] * 3)
    assert steps == []
    assert_at_rest(llm)


def test_an_open_stream_holds_nobody_up(llm: LLM, alone: dict[str, list[int]]) -> None:
    """Another thread generates between two reads; so does the reader itself."""
    stream = llm.stream(TEXTS[0], PARAMS)
    next(stream)
    assert together(lambda: generate(llm, TEXTS[1])) == [[alone[TEXTS[1]]]]
    assert generate(llm, TEXTS[2]) == [alone[TEXTS[2]]]
    *_, last = stream
    assert last.token_ids == alone[TEXTS[0]]


def test_a_stream_may_change_its_thread(llm: LLM, alone: dict[str, list[int]]) -> None:
    stream = llm.stream(TEXTS[0], PARAMS)
    next(stream)
    (last,) = together(lambda: list(stream)[-1])
    assert last.token_ids == alone[TEXTS[0]]


def test_a_dropped_llm_ends_its_thread(checkpoint: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(checkpoint, budget=64, max_model_len=128, progress=False)
    llm.generate("x", GREEDY)
    (thread,) = [one for one in set(threading.enumerate()) - before if one.name.startswith("engine")]
    stream = llm.stream("x", GREEDY)
    next(stream)
    del llm
    assert len(list(stream)[-1].token_ids) == 20  # a stream keeps the engine
    del stream
    gc.collect()
    thread.join(HANG_S)
    assert not thread.is_alive()


LEFT_OPEN = """
import os, sys, time
from snapstream import LLM, SamplingParams
from snapstream.engine.core import Engine
llm = LLM(sys.argv[1], budget=64, max_model_len=256, progress=False)
endless = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
want = llm.generate("x", SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids
child = os.fork()
if child == 0:
    try:
        llm.generate("x", endless)
    except RuntimeError as error:
        assert "forked" in str(error), error
        sys.exit(7)  # with the handlers that run at an exit
    sys.exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
step = Engine.step
Engine.step = lambda engine: (time.sleep(0.05), step(engine))[1]
stream = llm.stream("x", endless)
next(stream)
print("left", llm.engine_thread.client.num_open)
"""


@pytest.mark.slow
def test_exit_and_fork_with_an_engine_thread(checkpoint: Path) -> None:
    """A stream is open and the engine steps when the interpreter ends."""
    command = [sys.executable, "-c", LEFT_OPEN, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and "left 1" in done.stdout, done.stderr
    assert "rror" not in done.stderr and "terminate" not in done.stderr, done.stderr


DROPPED = """
import sys, time
from snapstream import LLM, SamplingParams
from snapstream.engine.client import EngineWorker
run = EngineWorker.run

def slowly(worker):
    run(worker)
    time.sleep(0.5)
    print("ended", flush=True)

EngineWorker.run = slowly
llm = LLM(sys.argv[1], budget=64, max_model_len=256, progress=False)
llm.generate("x", SamplingParams(max_tokens=4))
del llm
"""


@pytest.mark.slow
def test_exit_waits_for_the_thread_of_an_engine_that_was_dropped(checkpoint: Path) -> None:
    """It may be in native code, which must not run on while the interpreter shuts down."""
    command = [sys.executable, "-c", DROPPED, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and done.stdout == "ended\n", done.stderr


def test_close_ends_calls_that_wait(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(checkpoint, budget=64, max_model_len=128, progress=False)
    stepped, step = threading.Event(), Engine.step

    def slow(engine: Engine) -> Any:
        stepped.set()
        sleep(0.002)
        return step(engine)

    def call() -> None:
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.generate(["x"] * 50, ENDLESS)

    def close() -> None:
        assert stepped.wait(HANG_S)
        llm.close()

    monkeypatch.setattr(Engine, "step", slow)
    together(call, close)

"""Several threads on one LLM take turns: every call has the answer that it has alone, and the engine survives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest

from snapstream.engine.core import Engine
from snapstream.llm import LLM
from snapstream.request import FinishReason, SamplingParams
from tests.waiting import HANG_S

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
    assert steps == [] and not llm.engine.has_work


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


def test_ctrl_c_in_one_thread(llm: LLM, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step takes all that was open with it; the reader in another thread sees that, and the engine goes on."""
    stream, step = llm.stream(TEXTS[0], PARAMS), Engine.step
    next(stream)

    def interrupted(engine: Engine) -> Any:
        step(engine)
        raise KeyboardInterrupt

    def call() -> None:
        with pytest.raises(KeyboardInterrupt):
            generate(llm, TEXTS[1])

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        call()
    assert together(lambda: list(stream)[-1].finish_reason) == [FinishReason.ABORT]
    assert generate(llm, *TEXTS[:2]) == [alone[TEXTS[0]], alone[TEXTS[1]]]
    assert not llm.engine.has_work and llm.engine.rows_free == 4

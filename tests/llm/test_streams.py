"""Streams, queues and interrupts of ``LLM``: whoever leaves or fails frees what he held, and harms no other."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapstream import LLM, SamplingParams
from snapstream.engine.core import Engine
from snapstream.request import Request
from snapstream.runner.decode_eager import EagerDecode
from snapstream.runner.decode_looped import LoopedDecode
from snapstream.runner.prefill import PrefillJob
from tests.llm.test_generate import GREEDY, PROMPT


def test_stream_grows_and_ends_with_what_generate_gives(llm: LLM) -> None:
    want = llm.generate(PROMPT, GREEDY)[0]
    texts, counts = [], []
    for output in llm.stream(PROMPT, GREEDY):
        texts.append(output.text)
        counts.append(len(output.token_ids))
    assert counts == list(range(1, 21)) and texts[-1] == want.text
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))


def test_a_closed_stream_frees_its_row(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    next(stream)
    assert llm.engine.num_running == 1
    stream.close()
    assert (llm.engine.num_running, llm.engine.rows_free, llm.engine.has_work) == (0, 4, False)


def test_ctrl_c_frees_every_row(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    step = llm.engine.step

    def interrupted() -> list[Any]:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 6, GREEDY)
    monkeypatch.undo()
    assert (llm.engine.num_running, llm.engine.num_waiting, llm.engine.rows_free) == (0, 0, 4)
    assert len(llm.generate([PROMPT] * 6, GREEDY)) == 6


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
    assert (llm.engine.num_running, llm.engine.rows_free, llm.engine.has_work) == (0, 4, False)


def test_a_stream_that_ends_amid_a_step_is_released_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector closes streams wherever it runs, in the middle of a step of another reader too."""
    want = llm.generate("abc", GREEDY)[0].token_ids
    left = llm.stream("left", SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    next(left)
    submit, nested = llm.engine.runner.submit, []

    def collected(plan: Any) -> Any:
        if not nested:
            nested.append(plan)
            left.close()
            with pytest.raises(RuntimeError, match="amid a step"):
                llm.generate("abc", GREEDY)
        return submit(plan)

    monkeypatch.setattr(llm.engine.runner, "submit", collected)
    assert llm.generate("abc", GREEDY)[0].token_ids == want
    assert (llm.engine.num_running, llm.engine.rows_free, llm.engine.has_work) == (0, 4, False)


def test_streams_are_refused_before_they_start(llm: LLM) -> None:
    with pytest.raises(ValueError, match="make 320"):
        llm.stream("a" * 300, GREEDY)
    with pytest.raises(ValueError, match="stream takes one prompt; 2 were given"):
        llm.stream(["a", "b"], GREEDY)


def test_ready_made_requests_need_ids_of_their_own(llm: LLM) -> None:
    """An id that is in use is refused, and whoever has it reads on."""
    one = Request(request_id="mine", prompt_token_ids=(5, 6, 7), sampling=GREEDY)
    (output,) = llm.answer([one])
    assert output.request_id == "mine" and output.token_ids == llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    with pytest.raises(ValueError, match="request id 'mine' is in use"):
        llm.answer([one, one])
    stream = llm.stream(PROMPT, GREEDY)
    running = next(stream)
    with pytest.raises(ValueError, match=f"request id '{running.request_id}' is in use"):
        llm.answer([replace(one, request_id=running.request_id)])
    assert list(stream)[-1].token_ids == llm.generate(PROMPT, GREEDY)[0].token_ids
    with pytest.raises(TypeError, match="request 0 is 'abc'; it must be a Request"):
        llm.answer(["abc"])  # type: ignore[list-item]


def test_ctrl_c_inside_a_step_keeps_no_job(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run_unit, units = PrefillJob.run_unit, 0
    jobs: weakref.WeakSet[PrefillJob] = weakref.WeakSet()

    def interrupted(job: PrefillJob, unit: int) -> None:
        nonlocal units
        units += 1
        jobs.add(job)
        if units == 2:
            raise KeyboardInterrupt
        run_unit(job, unit)

    monkeypatch.setattr(PrefillJob, "run_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 6, GREEDY)
    monkeypatch.undo()
    gc.collect()
    assert units == 2 and not jobs and llm.engine.rows_free == 4
    assert len(llm.generate([PROMPT] * 6, GREEDY)) == 6


def test_ctrl_c_inside_a_step_ends_every_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted step did to a row is unknown, so nobody reads on as if nothing had happened."""
    whole = llm.generate([PROMPT], GREEDY)[0].token_ids
    first, second = llm.stream(PROMPT, GREEDY), llm.stream(PROMPT, GREEDY)
    next(first)
    read = list(next(second).token_ids)
    for executor in (LoopedDecode, EagerDecode):  # whichever this machine decodes with
        monkeypatch.setattr(executor, "step", lambda *_: raise_interrupt())
    with pytest.raises(KeyboardInterrupt):
        for _ in first:
            pass
    monkeypatch.undo()
    steps, step = iter(range(100)), llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (next(steps), step())[1])  # an endless wait is a StopIteration
    output = list(second)[-1]
    assert output.finish_reason == "abort" and len(output.token_ids) < len(whole)
    assert len(read) <= len(output.token_ids) and output.token_ids == whole[: len(output.token_ids)]
    assert (llm.engine.num_running, llm.engine.rows_free, llm.engine.has_work) == (0, 4, False)
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == whole


def test_ctrl_c_behind_an_arrival_leaves_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has the request, and the stream that would end it does not exist yet."""
    add = Engine.add_request

    def interrupted(engine: Engine, request: Request) -> Any:
        monkeypatch.undo()
        add(engine, request)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(llm.stream([3, 4, 5], SamplingParams(max_tokens=50)))
    assert (llm.engine.num_running, llm.engine.num_waiting, llm.engine.has_work) == (0, 0, False)


def raise_interrupt() -> Any:
    raise KeyboardInterrupt


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

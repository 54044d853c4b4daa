"""Ctrl-C between any two lines of the host's half of a step: no row, no id and no answer is left over."""

from __future__ import annotations

from typing import Any

import pytest

from snapstream.engine.live import LiveRequest, LiveSample
from snapstream.engine.scheduler import Scheduler
from tests.engine.build import abort, config_of, engine_of, request_of


class Once:
    """Calls the original, before or after which Ctrl-C comes, the first time."""

    def __init__(self, original: Any, *, is_after: bool) -> None:
        self.original, self.is_after, self.is_done = original, is_after, False

    def __get__(self, owner: Any, _: Any = None) -> Any:
        def call(*arguments: Any) -> Any:
            if self.is_done:
                return self.original(owner, *arguments)
            self.is_done = True
            if self.is_after:
                self.original(owner, *arguments)
            raise KeyboardInterrupt

        return call


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(LiveSample, "take"), (Scheduler, "release"), (LiveRequest, "mark"), (LiveSample, "end")],
)
def test_an_interrupted_end_leaves_nothing_over(
    kind: type, name: str, is_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ends with an end token amid the step's other rows; the interrupt meets its bookkeeping."""
    engine, runner = engine_of(config_of(max_rows=2), {"a": [1, 0], "b": [1, 1, 1, 1, 1, 0]})
    requests = [request_of("a", max_tokens=9), request_of("b", max_tokens=9)]
    outputs = [engine.add_request(request) for request in requests]
    engine.step()
    engine.step()
    monkeypatch.setattr(kind, name, Once(getattr(kind, name), is_after=is_after))
    with pytest.raises(KeyboardInterrupt):
        for _ in range(9):
            engine.step()
    for request in requests:  # as the driver does
        abort(engine, runner, request.request_id)
    for _ in range(9):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work and engine.rows_free == 2
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert all(output.is_finished for output in outputs)
    for request in requests:
        engine.add_request(request)  # the ids are free again


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_interrupted_abort_ends_every_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = engine_of(config_of(max_rows=1))
    outputs = [engine.add_request(request_of("a", max_tokens=50)), engine.add_request(request_of("b", max_tokens=50))]
    engine.step()  # "b" waits
    monkeypatch.setattr(Scheduler, "abort", Once(Scheduler.abort, is_after=False))
    with pytest.raises(KeyboardInterrupt):
        abort(engine, runner, name)
    assert [output.is_finished for output in outputs] == [True, True]
    told = [output.request_id for _ in range(9) if engine.has_work for output in engine.step()]
    assert sorted(told) == ["a", "b"] and not engine.has_work, "whoever waits for them hears of it"
    assert (engine.rows_free, engine.num_running, engine.num_waiting) == (1, 0, 0)


def test_a_second_ctrl_c_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the first is being dealt with; the next call does that again."""
    engine, _ = engine_of(config_of(max_rows=1))
    engine.add_request(request_of("a", max_tokens=50))
    engine.step()
    monkeypatch.setattr(Scheduler, "plan", Once(Scheduler.plan, is_after=True))
    monkeypatch.setattr(Scheduler, "start_over", Once(Scheduler.start_over, is_after=False))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.rows_free == 0, "it was kept from it"
    engine.step()
    assert engine.rows_free == 1 and not engine.has_work

"""Requests whose rows arrive, and requests whose rows are sent, in an engine of the strict fake runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.config import Chunking, EngineConfig, KVBudget
from snapstream.engine.core import Engine, TicketIssued
from snapstream.step import KVTransferFailed, PrefillEntry
from snapstream.types import FinishReason, Grammar, QueueFull, Request, RowTicket, SamplingParams
from tests.engine.alone import EOS, VOCAB_SIZE, LetterTokenizer, run_alone
from tests.engine.build import abort, config_of, drain, engine_of, request_of
from tests.engine.fake_connector import FakeConnector
from tests.engine.fake_runner import FakeRunner, draw_by_hash
from tests.engine.test_engine_properties import Session

TICKET = RowTicket(host="127.0.0.1", port=1, key="00" * 16)


def connected(**fields: Any) -> tuple[Engine, FakeRunner, FakeConnector]:
    engine, runner = engine_of(config_of(**fields))
    connector = FakeConnector()
    engine.connect(connector)
    return engine, runner, connector


def arriving(request_id: str, **sampling: Any) -> Request:
    return replace(request_of(request_id, **sampling), is_prefilled_remotely=True)


def to_send(request_id: str, size: int = 3) -> Request:
    return replace(request_of(request_id, size, max_tokens=1), ticket=TICKET)


def issued(engine: Engine) -> list[str]:
    return [notice.request_id for notice in engine.take_notices() if isinstance(notice, TicketIssued)]


def test_a_request_waits_for_its_row_without_work_and_decodes_then() -> None:
    engine, runner, connector = connected()
    output = engine.add_request(arriving("a", n=2))
    engine.step()
    assert issued(engine) == ["a"]
    assert not engine.has_work and engine.rows_free == 2 and engine.num_running == 1
    connector.arrive("a")
    assert engine.has_work
    assert set(drain(engine)) == {"a"}
    assert [len(sample.token_ids) for sample in output.samples] == [3, 3]
    assert output.cached_tokens == 1 and output.timings.first_token_ms > 0
    assert engine.rows_free == 4 and not connector.tickets
    assert not any(plan.units for plan in runner.plans)


def test_tickets_are_issued_as_rows_come_free_and_in_order() -> None:
    engine, runner, connector = connected(max_waiting=1)
    for name in "abcde":
        engine.add_request(arriving(name))
    engine.step()
    assert issued(engine) == list("abcd")
    assert engine.num_waiting == 1 and not engine.has_work
    with pytest.raises(QueueFull):
        engine.add_request(arriving("f"))
    abort(engine, runner, "b")
    drain(engine)
    assert issued(engine) == ["e"]
    assert sorted(connector.tickets) == list("acde")


def test_grammars_are_compiled_while_the_prompt_is_read_elsewhere() -> None:
    engine, runner, _ = connected()
    engine.add_request(arriving("a", grammar=Grammar.regex("a+")))
    engine.add_request(arriving("b"))
    drain(engine)
    assert [[entry.request_id for entry in plan.prepared] for plan in runner.plans] == [["a"]]


def test_a_lost_row_gets_another_ticket_once_per_loss() -> None:
    engine, _, connector = connected()
    engine.add_request(arriving("a"))
    engine.step()
    first = connector.tickets["a"].key
    connector.lose("a")
    drain(engine)
    missed = [notice for notice in engine.take_notices() if isinstance(notice, KVTransferFailed)]
    assert [(one.request_id, one.key, one.reason) for one in missed] == [("a", first, "cut")]
    engine.reissue("a", first)
    engine.reissue("a", first)  # the caller heard of the loss twice: from the engine, and from who was to send
    assert issued(engine) == ["a"]
    connector.arrive("a")
    engine.reissue("a", "no key of this request")
    assert "a" in drain(engine)


def test_an_abort_frees_row_and_ticket_at_any_moment() -> None:
    engine, runner, connector = connected()
    engine.add_request(arriving("waiting"))
    engine.add_request(arriving("whole"))
    engine.step()
    connector.arrive("whole")
    abort(engine, runner, "waiting")
    abort(engine, runner, "whole")
    assert {output.finish_reason for output in drain(engine).values()} == {FinishReason.ABORT}
    assert engine.rows_free == 4 and not connector.tickets and not connector.news


def test_a_sent_row_ends_its_request_when_it_has_gone() -> None:
    engine, runner, connector = connected()
    output = engine.add_request(to_send("a", 9))
    assert list(connector.open_senders) == ["a"], "connected while it waits: the other side hears that it lives"
    drain(engine)
    assert connector.open_senders["a"] == ["report"] and not output.is_finished and engine.rows_free == 3
    del runner.sending["a"]
    connector.sent("a")
    assert set(drain(engine)) == {"a"}
    assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, [])
    assert output.compression is not None and engine.rows_free == 4
    assert engine.transfer_stats.num_sent == 1


@pytest.mark.parametrize("num_steps", [0, 1, 9])
def test_a_row_that_cannot_be_sent_ends_its_request_wherever_it_is(num_steps: int) -> None:
    engine, runner, connector = connected(chunk_len=4, prefill_quantum=1)
    output = engine.add_request(to_send("a", 60))
    for _ in range(num_steps if num_steps < 9 else 60):
        if engine.has_work:
            engine.step()
    runner.aborted.add("a")
    runner.sending.pop("a", None)
    connector.sent("a", "the connection broke")
    drain(engine)
    assert (output.finish_reason, output.samples[0].stop_reason) == (FinishReason.ERROR, "the connection broke")
    assert (engine.rows_free, engine.staging_free) == (4, runner.config.pool_tokens)
    assert engine.transfer_stats.num_failed == 1


def test_an_engine_that_is_not_connected_takes_no_travellers() -> None:
    engine, _ = engine_of()
    for request in (arriving("a"), to_send("b")):
        with pytest.raises(ValueError, match="no connector is configured"):
            engine.add_request(request)
    engine.connect(FakeConnector(receives=False))
    with pytest.raises(ValueError, match="no transfer address"):
        engine.add_request(arriving("a"))


def test_requests_with_a_ticket_do_not_count_for_the_queue() -> None:
    engine, _, connector = connected(max_waiting=1, max_rows=1)
    for number in range(5):
        engine.add_request(to_send(f"r{number}"))
    assert len(connector.open_senders) == 5


Event = tuple[str, int]


@st.composite
def scripts(draw: st.DrawFn) -> tuple[EngineConfig, list[tuple[Request, Event]]]:
    config = EngineConfig(
        budget=KVBudget.full(40),
        max_model_len=40,
        max_rows=draw(st.integers(1, 5)),
        chunking=Chunking(chunk_len=draw(st.integers(1, 8)), short_len=draw(st.integers(1, 8))),
        short_reserve=draw(st.integers(0, 8)),
    )
    kinds = st.sampled_from(["arrives", "sent", "own"])
    events = st.tuples(st.sampled_from(["step", "arrive", "lose", "gone", "fail", "abort", "none"]), st.integers(0, 6))
    script = []
    for number in range(draw(st.integers(1, 12))):
        kind, size = draw(kinds), draw(st.integers(1, 28))
        sampling = SamplingParams(
            n=1 if kind == "sent" else draw(st.integers(1, config.max_rows)),
            max_tokens=1 if kind == "sent" else draw(st.integers(1, 8)),
            seed=number,
        )
        prompt = tuple((number + place) % VOCAB_SIZE for place in range(size))
        request = Request(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling)
        request = replace(request, is_prefilled_remotely=kind == "arrives", ticket=TICKET if kind == "sent" else None)
        script += [(request, event) for event in draw(st.lists(events, min_size=1, max_size=6))]
    return config, script


def play(session: Session, connector: FakeConnector, event: Event) -> None:
    """One thing happens; ``place`` chooses to whom."""
    kind, place = event
    waiting, sending = list(connector.tickets), list(session.runner.sending)
    match kind:
        case "step":
            for _ in range(place):
                session.step()
        case "arrive" if waiting:
            connector.arrive(waiting[place % len(waiting)])
        case "lose" if waiting:
            connector.lose(waiting[place % len(waiting)])
        case "gone" if sending:
            ready = [name for name in sending if connector.open_senders.get(name) == ["report"]]
            for name in ready[:1]:
                del session.runner.sending[name]
                connector.sent(name)
        case "fail" if connector.open_senders:
            name = list(connector.open_senders)[place % len(connector.open_senders)]
            session.runner.sending.pop(name, None)
            session.runner.aborted.add(name)
            connector.sent(name, "broke")
        case "abort":
            name = f"r{len(session.requests) - 1 - place}"
            if name in session.requests and name not in session.finished and name not in session.runner.aborted:
                session.runner.sending.pop(name, None)
                session.abort(name)
    for notice in session.engine.take_notices():
        if isinstance(notice, KVTransferFailed):
            session.engine.reissue(notice.request_id, notice.key)


@settings(max_examples=150, deadline=None)
@given(script=scripts())
def test_whatever_comes_is_lost_or_leaves_every_request_ends_and_everything_is_freed(
    script: tuple[EngineConfig, list[tuple[Request, Event]]],
) -> None:
    config, events = script
    requests: dict[str, Request] = {}

    def length_of(entry: PrefillEntry, index: int) -> int:
        return len(run_alone(requests[entry.request_id], index).token_ids)

    runner = FakeRunner(config, 2, draw_by_hash(VOCAB_SIZE), length_of)
    engine = Engine(
        runner, config, vocab_size=VOCAB_SIZE, num_layers=2, eos_token_ids=(EOS,), tokenizer=LetterTokenizer()
    )
    connector = FakeConnector()
    engine.connect(connector)
    session = Session(engine, runner, requests)
    for request, event in events:
        if request.request_id not in requests:
            session.add(request)
        play(session, connector, event)
    for _ in range(60 * len(requests)):
        session.step()
        for name in list(connector.tickets)[:1]:
            connector.arrive(name)
        play(session, connector, ("gone", 0))
    assert not engine.has_work

    assert session.finished.keys() == requests.keys()
    for name, output in session.finished.items():
        for sample in output.samples:
            if sample.finish_reason is FinishReason.ABORT or requests[name].ticket is not None:
                assert requests[name].ticket is None or not sample.token_ids
                continue
            assert sample == run_alone(requests[name], sample.index)
    assert (engine.rows_free, engine.staging_free) == (config.max_rows, config.pool_tokens)
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert not connector.tickets and not connector.open_senders and not connector.news
    assert not runner.jobs and not runner.sending

"""Aborts at any moment, and when the id of a request is free again."""

import pytest

from snapstream.request import FinishReason
from tests.engine.alone import HalfLetters
from tests.engine.build import abort, config_of, drain, engine_of, request_of

ABORT = FinishReason.ABORT


def test_abort_while_waiting() -> None:
    engine, runner = engine_of(config_of(max_rows=1))
    engine.add_request(request_of("a"))
    engine.add_request(request_of("b"))
    assert (engine.num_running, engine.num_waiting) == (0, 2)
    engine.step()
    assert (engine.num_running, engine.num_waiting, engine.rows_free) == (1, 1, 0)
    assert abort(engine, runner, "b")
    assert (engine.num_running, engine.num_waiting) == (1, 0)
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["b"].finish_reason is ABORT and outputs["b"].token_ids == []
    assert outputs["b"].timings.total_ms > 0.0
    assert len(drain(engine)["a"].token_ids) == 3


def test_abort_while_decoding_keeps_what_was_read_and_frees_the_row_at_once() -> None:
    engine, runner = engine_of(config_of(max_rows=1))
    output = engine.add_request(request_of("a", max_tokens=50, stop="aaax"))
    for _ in range(5):
        engine.step()
    assert (len(output.token_ids), output.text) == (4, "a")
    assert abort(engine, runner, "a")
    assert engine.rows_free == 1
    assert output.text == "aaaa"  # what was held back cannot become a stop string any more
    engine.add_request(request_of("b"))
    assert engine.step() == [output]
    assert (len(output.token_ids), output.finish_reason) == (4, ABORT)
    assert len(drain(engine)["b"].token_ids) == 3
    assert len(output.token_ids) == 4


def test_abort_after_the_last_unit_was_planned() -> None:
    engine, runner = engine_of()
    output = engine.add_request(request_of("a"))
    engine.step()  # the whole prefill; its result is not read yet
    assert abort(engine, runner, "a")
    drain(engine)
    assert (output.token_ids, output.compression, engine.rows_free) == ([], None, 4)


def test_abort_of_what_is_not_there() -> None:
    engine, runner = engine_of()
    assert not engine.abort("nobody")
    engine.add_request(request_of("a"))
    assert abort(engine, runner, "a")
    assert not engine.abort("a")
    assert [output.request_id for output in engine.step()] == ["a"]
    assert not engine.has_work
    assert not engine.abort("a")
    assert runner.plans == []


def test_ids_in_use_are_refused_and_free_again_afterwards() -> None:
    engine, _ = engine_of()
    engine.add_request(request_of("a"))
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request(request_of("a"))
    drain(engine)
    engine.add_request(request_of("a"))
    assert len(drain(engine)["a"].token_ids) == 3


def test_the_id_of_an_aborted_prompt_is_in_use_until_its_job_has_ended() -> None:
    """Results of a prefill are matched by id: two prompts of one id must not end in the same step."""
    engine, runner = engine_of(config_of(prefill_quantum=1))
    for names in (["stream"], ["first"], ["a", "b"]):
        for name in names:
            engine.add_request(request_of(name, 1, max_tokens=50))
        engine.step()  # of two layers each; in the last one "first" ends, the job of "a" and "b" opens
    assert abort(engine, runner, "a")
    assert "a" in {output.request_id for output in engine.step()}
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request(request_of("a"))
    engine.step()
    engine.add_request(request_of("a"))


def test_the_id_of_a_dropped_prompt_is_free_once_it_was_handed_out() -> None:
    engine, runner = engine_of()
    engine.add_request(request_of("a", 40))
    engine.step()
    assert abort(engine, runner, "a")
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request(request_of("a", 1))
    engine.step()
    runner.aborted.clear()
    engine.add_request(request_of("a", 1))
    assert len(drain(engine)["a"].token_ids) == 3


def test_an_aborted_sample_shows_no_stop_string_either() -> None:
    engine, runner = engine_of(scripts={"r": [1, 2, 2, 2]}, tokenizer=HalfLetters())
    output = engine.add_request(request_of("r", max_tokens=9, stop="x"))
    for _ in range(3):
        engine.step()
    assert abort(engine, runner, "r")
    assert (output.text, output.finish_reason) == ("a", ABORT)
    drain(engine)

"""The engine loop: one step late, ends of samples, refusals, outputs and timings."""

from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Any

import pytest

from snapstream.config import KVBudget
from snapstream.engine.seeds import sample_seed
from snapstream.engine.validate import QueueFull
from snapstream.request import FinishReason, Request, SamplingParams
from tests.engine.alone import HalfLetters
from tests.engine.build import config_of, drain, engine_of, request_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_results_are_read_one_step_late() -> None:
    engine, runner = engine_of()
    engine.add_request(request_of("r", max_tokens=3))
    counts = []
    while engine.has_work:
        counts.append([len(output.token_ids) for output in engine.step()])
    assert runner.events == ["submit 0", "submit 1", "read 0", "submit 2", "read 1", "read 2"]
    assert counts == [[], [1], [2], [3]]


def test_nothing_is_submitted_when_there_is_nothing_to_do() -> None:
    engine, runner = engine_of()
    assert not engine.has_work
    assert engine.step() == []
    assert runner.plans == []


def test_the_surplus_token_of_a_row_that_has_ended_is_discarded() -> None:
    engine, runner = engine_of(scripts={"r": [1, 2, 0]})  # the end token is third
    output = engine.add_request(request_of("r", max_tokens=50))
    drain(engine)
    num_drawn = 1 + sum(len(plan.decode_rows) for plan in runner.plans)
    assert num_drawn == 4
    assert output.token_ids == [1, 2, 0]


def test_a_stale_result_does_not_reach_the_new_owner_of_the_row() -> None:
    engine, runner = engine_of(config_of(max_rows=1), {"old": [1, 2, 0], "new": [3, 4, 0]})
    old = engine.add_request(request_of("old", max_tokens=50))
    new = engine.add_request(request_of("new", max_tokens=50))
    drain(engine)
    assert (old.token_ids, new.token_ids) == ([1, 2, 0], [3, 4, 0])
    # "new" is prefilled right after the last step that decodes for "old", whose result is then in flight.
    prefills = [plan.step_id for plan in runner.plans if plan.units]
    assert runner.plans[prefills[1] - 1].decode_rows == (0,)


def test_no_row_is_scheduled_beyond_max_tokens() -> None:
    engine, runner = engine_of()
    engine.add_request(request_of("one", max_tokens=1))
    engine.add_request(request_of("many", max_tokens=7))
    drain(engine)
    assert sum(len(plan.decode_rows) for plan in runner.plans) == 6


@pytest.mark.parametrize(
    ("script", "sampling", "ids", "text", "reason", "stop_reason"),
    [
        ([1, 2, 0], {}, [1, 2, 0], "ab", STOP, None),
        ([0], {}, [0], "", STOP, None),
        ([1, 0, 2], {"max_tokens": 3, "ignore_eos": True}, [1, 0, 2], "ab", LENGTH, None),
        ([0], {"max_tokens": 1, "ignore_eos": True, "skip_special_tokens": False}, [0], "$", LENGTH, None),
        ([1, 0], {"ignore_eos": True, "stop_token_ids": [0]}, [1, 0], "a", STOP, 0),
        ([1, 0], {"stop_token_ids": [0]}, [1, 0], "a", STOP, None),
        ([1, 5], {"stop_token_ids": [4, 5]}, [1, 5], "a", STOP, 5),
        ([1, 5], {"stop_token_ids": [5], "include_stop": True}, [1, 5], "a", STOP, 5),
        ([0, 5, 1, 5], {"stop_token_ids": [5], "min_tokens": 3}, [0, 5, 1, 5], "ea", STOP, 5),
        ([0, 1, 0], {"min_tokens": 3}, [0, 1, 0], "a", STOP, None),
        ([1, 2, 3], {"stop": "bc"}, [1, 2, 3], "a", STOP, "bc"),
        ([1, 2, 3], {"stop": "bc", "include_stop": True}, [1, 2, 3], "abc", STOP, "bc"),
        ([1, 2, 3], {"stop": "bc", "max_tokens": 3}, [1, 2, 3], "a", STOP, "bc"),
        ([1, 2, 3], {"stop": "bc", "min_tokens": 9}, [1, 2, 3], "a", STOP, "bc"),
        ([1, 2, 4], {"stop": "bc", "max_tokens": 3}, [1, 2, 4], "abd", LENGTH, None),
        ([1, 2], {"stop": "bc", "max_tokens": 2}, [1, 2], "ab", LENGTH, None),
        ([1, 2, 0], {"stop": "bc"}, [1, 2, 0], "ab", STOP, None),
        ([1, 2, 0], {"max_tokens": 3}, [1, 2, 0], "ab", STOP, None),
    ],
)  # fmt: skip
def test_how_samples_end(
    script: Sequence[int],
    sampling: dict[str, Any],
    ids: list[int],
    text: str,
    reason: FinishReason,
    stop_reason: int | str | None,
) -> None:
    engine, _ = engine_of(scripts={"r": script})
    sampling = {"max_tokens": 20, **sampling}
    sample = engine.add_request(request_of("r", **sampling)).samples[0]
    drain(engine)
    assert (sample.token_ids, sample.text) == (ids, text)
    assert (sample.finish_reason, sample.stop_reason) == (reason, stop_reason)


def test_text_that_may_become_a_stop_string_is_held_back_and_shown_when_it_does_not() -> None:
    engine, _ = engine_of(scripts={"r": [1, 2, 2, 3, 0]})
    engine.add_request(request_of("r", max_tokens=20, stop="bd"))
    texts = []
    while engine.has_work:
        texts += [output.text for output in engine.step()]
    assert texts == ["a", "a", "ab", "abbc", "abbc"]


def test_without_a_tokenizer_there_are_ids_but_no_text() -> None:
    engine, _ = engine_of(scripts={"r": [1, 2, 0]}, tokenizer=None)
    output = engine.add_request(request_of("r", max_tokens=9))
    with pytest.raises(ValueError, match="without a tokenizer"):
        engine.add_request(request_of("s", stop="x"))
    drain(engine)
    assert (output.token_ids, output.text, output.finish_reason) == ([1, 2, 0], "", STOP)


@pytest.mark.parametrize("script", [[1, 2], [1, 2, 0]])
def test_a_stop_string_in_the_last_of_the_text_is_not_missed(script: list[int]) -> None:
    engine, _ = engine_of(scripts={"r": script}, tokenizer=HalfLetters())
    output = engine.add_request(request_of("r", max_tokens=len(script), stop="x"))
    drain(engine)
    assert (output.text, output.finish_reason, output.samples[0].stop_reason) == ("a", STOP, "x")


def test_samples_of_a_request_share_one_prefill_and_end_each_in_its_own_time() -> None:
    engine, runner = engine_of()
    draws = {0: [1, 0], 1: [2, 2, 2, 0], 2: [0]}
    runner.draw = lambda entry, index, count: (draws[index] + [1])[min(count, len(draws[index]))]
    runner.length_of = lambda entry, index: len(draws[index])
    output = engine.add_request(request_of("r", n=3, max_tokens=9, seed=7))
    drain(engine)
    assert [sample.token_ids for sample in output.samples] == list(draws.values())
    (spec,) = [spec for plan in runner.plans for spec in plan.opened_jobs]
    assert spec.entries[0].seeds == tuple(sample_seed(7, index) for index in range(3))


def test_seeds_of_requests_without_one_come_from_the_engine() -> None:
    def seeds(random: Random) -> list[tuple[int, ...]]:
        engine, runner = engine_of(random=random)
        for name in ("a", "b"):
            engine.add_request(request_of(name, seed=None, n=2))
        drain(engine)
        return [entry.seeds for plan in runner.plans for spec in plan.opened_jobs for entry in spec.entries]

    assert seeds(Random(1)) == seeds(Random(1))
    assert len({*seeds(Random(1)), *seeds(Random(2))}) == 4


def test_logprobs_and_compression_are_passed_on_only_where_asked_for() -> None:
    engine, _ = engine_of()
    budget = KVBudget.full(2)
    asked = engine.add_request(
        Request(
            request_id="asked",
            prompt_token_ids=(5, 6, 7),
            sampling=SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0),
            budget=budget,
        )
    )
    plain = engine.add_request(request_of("plain"))
    drain(engine)
    assert asked.logprobs is not None and [entry.logprob for entry in asked.logprobs] == [-2.0, -3.0]
    assert asked.prompt_logprobs is not None and asked.prompt_logprobs[0] is None
    assert len(asked.prompt_logprobs) == 3
    assert asked.compression is not None and asked.compression.evicted_tokens == 1
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)
    assert plain.compression is not None and plain.compression.evicted_tokens == 0


def test_timings() -> None:
    ticks = count()
    engine, _ = engine_of(clock=lambda: float(next(ticks)))
    timings = engine.add_request(request_of("r", max_tokens=3)).timings  # arrives at 0
    engine.step()  # at 1 its first unit is submitted; at 2, 3, 4 its tokens are read
    assert (timings.queue_ms, timings.prefill_ms) == (1000.0, 0.0)
    engine.step()
    assert (timings.prefill_ms, timings.first_token_ms, timings.decode_ms) == (1000.0, 2000.0, 0.0)
    drain(engine)
    assert (timings.decode_ms, timings.per_token_ms, timings.total_ms) == (2000.0, 1000.0, 4000.0)


def test_the_queue_is_bounded_if_asked_for() -> None:
    engine, _ = engine_of(config_of(max_waiting=2, max_rows=1))
    for name in ("a", "b", "c"):  # a row is free, so the first does not wait
        engine.add_request(request_of(name))
    with pytest.raises(QueueFull, match="2 requests wait for a row; the limit is 2"):
        engine.add_request(request_of("d"))
    engine.step()
    with pytest.raises(QueueFull, match="2 requests wait for a row; the limit is 2"):
        engine.add_request(request_of("d"))
    assert drain(engine).keys() == {"a", "b", "c"}
    engine.add_request(request_of("d"))
    assert drain(engine).keys() == {"d"}


def test_a_refused_request_leaves_the_others_alone() -> None:
    engine, _ = engine_of()
    engine.add_request(request_of("good"))
    with pytest.raises(ValueError, match="make 103; the limit is 100"):
        engine.add_request(request_of("bad", 100))
    assert engine.num_waiting == 1
    assert drain(engine).keys() == {"good"}


def test_a_runner_that_answers_another_step_is_found_out() -> None:
    engine, runner = engine_of()
    engine.add_request(request_of("a"))
    engine.step()
    object.__setattr__(runner.unread[0].answer, "step_id", 5)
    with pytest.raises(RuntimeError, match="step 0 with step 5"):
        engine.step()

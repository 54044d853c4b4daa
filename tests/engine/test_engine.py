"""The engine loop: one step late, ends of samples, refusals, outputs and timings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest

from snapstream.config import EngineConfig, KVBudget
from snapstream.engine.admission import LEAST_TOKENS, unit_work
from snapstream.engine.core import Engine
from snapstream.engine.request_state import RequestDelta, sample_seed
from snapstream.engine.worker import Abort, Deltas, EngineWorker, FromEngine, Stop, Submit, ToEngine
from snapstream.step import JobSpec, PendingStep, StepPlan, StepResult
from snapstream.types import NOT_FINITE, FinishReason, QueueFull, Request, SamplingParams
from tests.engine.alone import HalfLetters
from tests.engine.build import abort, config_of, drain, engine_of, request_of
from tests.engine.fake_runner import FakeRunner

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


# Aborts at any moment, and when the id of a request is free again.

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


# What the engine does with the runner's word that a grammar lets nothing follow.

GO_ON = [1] * 9


class _Ending:
    """Says of some steps how grammars ended in them."""

    def __init__(self, runner: FakeRunner, ends: dict[int, dict[int, str]]) -> None:
        self._runner, self._ends = runner, ends  # by step id

    disk_cache = None

    def is_ready(self, job_id: int) -> bool:
        return True

    def close(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> PendingStep:
        pending = self._runner.submit(plan)
        ends = self._ends.get(plan.step_id, {})

        class Ended:
            def result(self) -> StepResult:
                return replace(pending.result(), grammar_ends=ends)

        return Ended()


@pytest.mark.parametrize(
    ("ends", "max_tokens", "count", "reason", "stop_reason"),
    [
        ({}, 5, 5, FinishReason.LENGTH, None),
        ({2: {0: ""}}, 5, 3, FinishReason.STOP, None),
        ({0: {0: ""}}, 5, 1, FinishReason.STOP, None),  # with the first token
        ({4: {0: ""}}, 5, 5, FinishReason.STOP, None),  # with the last that is allowed
        ({2: {0: "grammar: no way on"}}, 5, 3, FinishReason.ERROR, "grammar: no way on"),
        ({2: {1: ""}}, 5, 5, FinishReason.LENGTH, None),  # another row
    ],
)
def test_ends(
    ends: dict[int, dict[int, str]], max_tokens: int, count: int, reason: FinishReason, stop_reason: str | None
) -> None:
    engine, runner = engine_of(config_of(), around=lambda runner: _Ending(runner, ends))
    if count < max_tokens:
        runner.length_of = lambda entry, index: count  # type: ignore[method-assign]
    engine.add_request(request_of("r", max_tokens=max_tokens))
    sample = drain(engine)["r"].samples[0]
    assert (len(sample.token_ids), sample.finish_reason, sample.stop_reason) == (count, reason, stop_reason)
    assert engine.rows_free == 4


# What the engine does with the runner's word that a row's logits were not finite: a token id below 0.


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("sampling", [{}, {"stop": ["zz"]}, {"min_tokens": 4}, {"stop_token_ids": [5]}])
def test_the_request_ends_and_others_go_on(count: int, sampling: dict[str, object]) -> None:
    engine, _ = engine_of(config_of(), {"bad": [*range(1, count + 1), -1]})
    engine.add_request(request_of("bad", max_tokens=9, **sampling))
    engine.add_request(request_of("good", max_tokens=9))
    outputs = drain(engine)
    sample = outputs["bad"].samples[0]
    assert (sample.finish_reason, sample.stop_reason) == (FinishReason.ERROR, NOT_FINITE)
    assert sample.token_ids == list(range(1, count + 1)) and sample.text == "abc"[:count]
    assert outputs["good"].finish_reason is FinishReason.LENGTH and outputs["good"].token_ids == [1] * 9
    assert engine.rows_free == 4 and not engine.has_work


def test_log_probabilities_have_as_many_entries_as_tokens() -> None:
    engine, _ = engine_of(config_of(), {"bad": [1, 2, -1]})
    engine.add_request(request_of("bad", max_tokens=9, logprobs=0))
    sample = drain(engine)["bad"].samples[0]
    assert sample.logprobs is not None and [one.token_id for one in sample.logprobs] == sample.token_ids == [1, 2]


# While rows decode, a step holds units of so much work: few of a long prompt, many of a short one.

LONG = 90
KEYS = 30  # a token's matrix products weigh as so many keys
WORK = 3 * LEAST_TOKENS * (KEYS + 50)


def paced(**fields: int) -> tuple[Engine, FakeRunner, EngineConfig]:
    config = config_of(step_work=WORK, token_keys=KEYS, least_chunk_len=1, chunk_len=8, short_len=8, **fields)
    engine, runner = engine_of(config)
    return engine, runner, config


def works(config: EngineConfig, runner: FakeRunner) -> list[tuple[StepPlan, list[int]]]:
    """Per plan, the work of each of its units."""
    specs: dict[int, JobSpec] = {spec.job_id: spec for plan in runner.plans for spec in plan.opened_jobs}
    return [
        (
            plan,
            [
                unit_work(config.chunking, specs[u.job_id], i)
                for u in plan.units
                for i in range(u.first, u.first + u.count)
            ],
        )
        for plan in runner.plans
    ]


def test_steps_of_decoding_rows_hold_no_more_work_than_that() -> None:
    engine, runner, config = paced()
    engine.add_request(request_of("stream", 1, max_tokens=95))
    engine.step()
    engine.add_request(request_of("long", LONG))
    drain(engine)
    busy = [own for plan, own in works(config, runner) if plan.decode_rows and own]
    assert all(sum(own) <= WORK for own in busy)
    assert max(len(own) for own in busy) > min(len(own) for own in busy[:-1])  # late units see more keys
    assert all(sum(own) + max(own) > WORK * 0.9 for own in busy[:-1])  # and no step is left half empty


def test_a_unit_that_is_too_large_runs_alone() -> None:
    """With units of a fixed length the last ones may exceed a step's work: one by one, never not at all."""
    config = config_of(step_work=LEAST_TOKENS * (KEYS + 20), token_keys=KEYS)
    engine, runner = engine_of(config)
    engine.add_request(request_of("stream", 1, max_tokens=95))
    engine.step()
    engine.add_request(request_of("long", LONG))
    drain(engine)
    busy = [own for plan, own in works(config, runner) if plan.decode_rows and own]
    assert any(own[0] > config.chunking.step_work for own in busy)
    assert all(len(own) == 1 or sum(own) <= config.chunking.step_work for own in busy)


def test_without_decode_a_step_is_bound_by_its_number_of_units() -> None:
    engine, runner, config = paced()
    engine.add_request(request_of("long", LONG))
    engine.step()
    plan, own = works(config, runner)[0]
    assert not plan.decode_rows and len(own) == 8 and sum(own) > WORK  # four passes of two layers
    drain(engine)


def test_a_prompt_that_ends_within_a_step_makes_the_rest_of_it_wait_for_its_decode() -> None:
    engine, runner, config = paced(max_rows=8)
    engine.add_request(request_of("short", 2, max_tokens=9))
    engine.add_request(request_of("long", LONG))
    engine.step()
    _, own = works(config, runner)[0]
    assert len(own) < 8 and sum(own) <= WORK
    drain(engine)


@pytest.mark.parametrize(("size", "chunk_len"), [(8, 8), (90, 4)])
def test_a_job_carries_its_own_chunk_len(size: int, chunk_len: int) -> None:
    config = config_of(step_work=4 * (KEYS + 90), token_keys=KEYS, least_chunk_len=2, chunk_len=8, short_len=8)
    engine, runner = engine_of(config)
    engine.add_request(request_of("a", size))
    drain(engine)
    (spec,) = runner.plans[0].opened_jobs
    assert spec.chunk_len == chunk_len
    assert spec.num_chunks == -(-size // chunk_len)


class ScriptedPort:
    """Gives its messages between steps, and notes the deltas with the time at which they are sent."""

    def __init__(self, clock: list[float], *messages: ToEngine, step_s: float) -> None:
        self.clock, self.messages, self.step_s = clock, list(messages), step_s
        self.sent: list[tuple[float, tuple[RequestDelta, ...]]] = []

    def receive(self, *, block: bool) -> ToEngine | None:
        if self.messages:
            return self.messages.pop(0)
        self.clock[0] += self.step_s
        return Stop() if block else None

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            self.sent.append((self.clock[0], message.deltas))


def deltas_of(interval_s: float, step_s: float) -> list[tuple[float, tuple[RequestDelta, ...]]]:
    """Of a request of 40 tokens beside one of 12, with a delta interval and steps that take ``step_s``."""
    clock = [0.0]
    engine, _ = engine_of()
    requests = (request_of("long", max_tokens=40), request_of("short", max_tokens=12, n=2))
    port = ScriptedPort(clock, *map(Submit, requests), step_s=step_s)
    EngineWorker(engine, 4, port, delta_interval_s=interval_s, clock=lambda: clock[0]).run()
    return port.sent


def ids_of(sent: Sequence[tuple[float, tuple[RequestDelta, ...]]]) -> dict[tuple[str, int], tuple[list[int], str]]:
    """Tokens and text by request and sample."""
    added: dict[tuple[str, int], tuple[list[int], str]] = {}
    for _, deltas in sent:
        for delta in deltas:
            for sample in delta.samples:
                ids, text = added.get((delta.request_id, sample.index), ([], ""))
                added[delta.request_id, sample.index] = ([*ids, *sample.token_ids], text + sample.text)
    return added


def test_tokens_of_fast_steps_are_sent_together() -> None:
    each, together = deltas_of(0.0, 0.001), deltas_of(0.008, 0.001)
    assert ids_of(together) == ids_of(each)
    assert len(each) >= 40 and len(together) <= 10
    times = [at for at, _ in together]
    first = {delta.request_id: at for at, deltas in reversed(each) for delta in deltas}
    last = {delta.request_id: at for at, deltas in each for delta in deltas if delta.is_finished}
    for at in (*first.values(), *last.values()):
        assert at in times, "a request's first and last tokens do not wait"
    ended = [delta.request_id for _, deltas in together for delta in deltas if delta.is_finished]
    assert sorted(ended) == ["long", "short"]


def test_tokens_of_slow_steps_are_sent_one_by_one() -> None:
    slow, each = deltas_of(0.008, 0.010), deltas_of(0.0, 0.010)
    assert [at for at, _ in slow] == [at for at, _ in each] and ids_of(slow) == ids_of(each)


def test_the_tokens_before_an_abort_are_sent() -> None:
    clock = [0.0]
    engine, _ = engine_of()
    port = ScriptedPort(clock, Submit(request_of("r", max_tokens=90)), step_s=0.001)
    worker = EngineWorker(engine, 4, port, delta_interval_s=1.0, clock=lambda: clock[0])
    receive, num_asked = port.receive, count()

    def abort_later(*, block: bool) -> ToEngine | None:
        return Abort(("r",)) if next(num_asked) == 30 else receive(block=block)

    port.receive = abort_later  # type: ignore[method-assign]
    worker.run()
    ((ids, text),) = ids_of(port.sent).values()
    assert len(port.sent) == 2 and len(ids) > 10 and len(text) == len(ids)
    assert port.sent[-1][1][0].is_finished

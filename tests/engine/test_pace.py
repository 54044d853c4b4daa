"""While rows decode, a step holds units of so much work: few of a long prompt, many of a short one."""

from __future__ import annotations

import pytest

from snapstream.config import EngineConfig
from snapstream.engine.core import Engine
from snapstream.engine.pace import LEAST_TOKENS, unit_work
from snapstream.step import JobSpec, StepPlan
from tests.engine.build import config_of, drain, engine_of, request_of
from tests.engine.fake_runner import FakeRunner

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


@pytest.mark.parametrize(("size", "chunk_len"), [(8, 0), (90, 4)])
def test_a_job_carries_its_own_chunk_len(size: int, chunk_len: int) -> None:
    config = config_of(step_work=4 * (KEYS + 90), token_keys=KEYS, least_chunk_len=2, chunk_len=8, short_len=8)
    engine, runner = engine_of(config)
    engine.add_request(request_of("a", size))
    drain(engine)
    (spec,) = runner.plans[0].opened_jobs
    assert spec.chunk_len == chunk_len
    assert spec.num_chunks(config.chunking.chunk_len) == -(-size // (chunk_len or 8))

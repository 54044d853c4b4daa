"""Who runs next: packing, overtaking, ageing, and nobody left behind."""

import pytest

from snapstream.engine.core import Engine
from snapstream.engine.scheduler import IDLE_PASSES, PATIENCE_STEPS
from snapstream.step import StepPlan
from tests.engine.build import NUM_LAYERS, abort, config_of, drain, engine_of, request_of
from tests.engine.fake_runner import FakeRunner


def entry_ids(plan: StepPlan) -> list[list[str]]:
    return [[entry.request_id for entry in spec.entries] for spec in plan.opened_jobs]


def num_units(plan: StepPlan) -> int:
    return sum(unit.count for unit in plan.units)


def ended_at(runner: FakeRunner, request_id: str) -> int:
    """Step in which the request's prefill ends."""
    specs = {spec.job_id: spec for plan in runner.plans for spec in plan.opened_jobs}
    for plan in runner.plans:
        for unit in plan.units:
            spec = specs[unit.job_id]
            is_last = unit.first + unit.count == spec.num_units(NUM_LAYERS)
            if is_last and any(entry.request_id == request_id for entry in spec.entries):
                return plan.step_id
    raise AssertionError(f"{request_id} was never prefilled")


def keep_decoding(engine: Engine, request_id: str = "stream") -> None:
    """A request that is decoding all the time from now on."""
    engine.add_request(request_of(request_id, 1, max_tokens=99))
    engine.step()


def test_short_prompts_that_wait_together_share_a_job_of_one_chunk() -> None:
    engine, runner = engine_of()
    for name in ("a", "b", "c"):
        engine.add_request(request_of(name, 2))
    engine.step()
    assert entry_ids(runner.plans[0]) == [["a", "b"]]  # 4 tokens are a chunk
    assert runner.plans[0].decode_rows == ()
    engine.step()
    assert entry_ids(runner.plans[1]) == [["c"]]
    assert len(runner.plans[1].decode_rows) == 2
    drain(engine)


def test_a_short_prompt_longer_than_a_chunk_runs_by_itself() -> None:
    engine, runner = engine_of(config_of(short_len=7))
    engine.add_request(request_of("a", 6))
    engine.add_request(request_of("b", 1))
    engine.step()
    assert entry_ids(runner.plans[0]) == [["a"]]
    drain(engine)


def test_short_prompts_that_arrive_while_one_job_waits_to_run_are_packed_into_the_next() -> None:
    engine, runner = engine_of(config_of(prefill_quantum=1, max_rows=8))
    keep_decoding(engine)
    engine.add_request(request_of("first", 1))
    engine.step()  # one of its two units runs
    engine.add_request(request_of("x", 1))
    engine.step()  # "first" has less left, so the job of "x" is opened without running
    engine.add_request(request_of("y", 1))
    engine.step()  # "x" starts, and "y" still waits
    engine.add_request(request_of("z", 1))
    engine.step()
    assert [entry_ids(plan) for plan in runner.plans] == [
        [["stream"]],
        [["first"]],
        [["x"]],
        [],
        [["y", "z"]],
    ]
    drain(engine)


def test_the_quantum_binds_while_rows_decode_and_is_larger_otherwise() -> None:
    engine, runner = engine_of(config_of(prefill_quantum=3))
    engine.add_request(request_of("alone", 40))
    engine.step()
    assert num_units(runner.plans[0]) == IDLE_PASSES * NUM_LAYERS
    drain(engine)

    engine, runner = engine_of(config_of(prefill_quantum=3))
    keep_decoding(engine)
    engine.add_request(request_of("beside", 40))
    drain(engine)
    beside = [plan for plan in runner.plans[1:] if plan.units]
    assert [num_units(plan) for plan in beside] == [3] * 6 + [2]
    assert all(plan.decode_rows for plan in beside)


def test_no_large_step_once_a_row_waits_for_its_first_decode() -> None:
    engine, runner = engine_of()
    engine.add_request(request_of("a", 4))
    engine.add_request(request_of("long", 40))
    engine.step()
    assert num_units(runner.plans[0]) == NUM_LAYERS
    drain(engine)


def test_prompts_that_only_want_one_token_do_not_end_a_large_step() -> None:
    engine, runner = engine_of()
    for name in ("a", "b"):
        engine.add_request(request_of(name, 4, max_tokens=1))
    engine.step()
    assert entry_ids(runner.plans[0]) == [["a"], ["b"]]
    assert num_units(runner.plans[0]) == 2 * NUM_LAYERS
    drain(engine)


def test_a_short_prompt_overtakes_a_long_one_in_prefill() -> None:
    engine, runner = engine_of()
    keep_decoding(engine)
    engine.add_request(request_of("long", 80))
    for _ in range(3):
        engine.step()
    engine.add_request(request_of("short", 2))
    added = len(runner.plans)
    drain(engine)
    assert ended_at(runner, "short") == added
    assert ended_at(runner, "long") > added + 10


def test_of_two_long_prompts_the_one_with_less_left_goes_first() -> None:
    engine, runner = engine_of()
    keep_decoding(engine)
    engine.add_request(request_of("longer", 60))
    engine.add_request(request_of("shorter", 30))
    drain(engine)
    assert ended_at(runner, "shorter") < ended_at(runner, "longer")


def test_a_long_prompt_ends_under_an_overload_of_short_ones() -> None:
    engine, runner = engine_of(config_of(max_rows=8))
    keep_decoding(engine)
    engine.add_request(request_of("long", 40))
    num_passes = 10  # 40 tokens in chunks of 4, each a whole quantum
    for number in range(200):
        engine.add_request(request_of(f"short{number}", 4, max_tokens=1))  # a whole quantum each
        engine.step()
    drain(engine)
    assert ended_at(runner, "long") <= num_passes * (PATIENCE_STEPS + 1)
    served_between = [ended_at(runner, f"short{number}") for number in range(20)]
    assert sum(step < ended_at(runner, "long") for step in served_between) == 20


def test_a_short_prompt_waits_for_at_most_one_step_of_an_overdue_long_one() -> None:
    engine, runner = engine_of(config_of(max_rows=8))
    keep_decoding(engine)
    engine.add_request(request_of("long", 90))
    added = {}
    for number in range(40):
        added[f"short{number}"] = len(runner.plans)
        engine.add_request(request_of(f"short{number}", 4, max_tokens=1))
        engine.step()
        engine.step()
    drain(engine)
    assert max(ended_at(runner, name) - step for name, step in added.items()) == 1


def test_short_prompts_pass_a_long_one_that_waits_for_staging_but_do_not_take_its_room() -> None:
    engine, runner = engine_of(config_of(max_rows=8, short_reserve=4, prefill_quantum=1))
    keep_decoding(engine)
    engine.add_request(request_of("first", 60))
    engine.add_request(request_of("second", 60))  # the long zone holds 100
    for number in range(100):
        engine.add_request(request_of(f"short{number}", 3, max_tokens=1))
        engine.step()
    drain(engine)
    opened = [spec for plan in runner.plans for spec in plan.opened_jobs]
    order = [entry.request_id for spec in opened for entry in spec.entries]
    assert order.index("short5") < order.index("second") < order.index("short99")
    passing = opened[order.index("first") + 1 : order.index("second")]
    assert all(spec.staging_start >= runner.config.pool_tokens - 4 for spec in passing)
    first_ended = ended_at(runner, "first")
    second_opened = next(plan.step_id for plan in runner.plans if ["second"] in entry_ids(plan))
    assert second_opened == first_ended + 1


def test_short_prompts_that_pass_nobody_may_use_the_whole_pool() -> None:
    engine, runner = engine_of(config_of(max_rows=8, short_reserve=0, staging_tokens=100))
    for name, size in (("a", 4), ("long", 90), ("b", 4)):
        engine.add_request(request_of(name, size))
    drain(engine, max_steps=100)
    assert [spec.staging_start for plan in runner.plans for spec in plan.opened_jobs] == [0, 4, 0]


def test_a_long_prompt_does_not_pass_a_long_one() -> None:
    engine, runner = engine_of()
    for name, size in (("first", 60), ("second", 60), ("third", 20)):
        engine.add_request(request_of(name, size))
    drain(engine)
    order = [ids for plan in runner.plans for ids in entry_ids(plan)]
    assert order == [["first"], ["second"], ["third"]]


@pytest.mark.parametrize("size", [1, 10])
def test_nobody_passes_a_request_that_waits_for_rows(size: int) -> None:
    engine, runner = engine_of()
    for number in range(3):
        engine.add_request(request_of(f"early{number}", 1, max_tokens=4 + 3 * number))
    engine.step()
    engine.add_request(request_of("many", size, n=4))
    for number in range(30):
        engine.add_request(request_of(f"late{number}", 1))
        engine.step()
    drain(engine)
    order = [request_id for plan in runner.plans for ids in entry_ids(plan) for request_id in ids]
    assert order.index("many") == 3


def test_rows_whose_end_is_known_by_count_are_reused_without_a_gap() -> None:
    engine, runner = engine_of(config_of(max_rows=1))
    engine.add_request(request_of("a", 1, max_tokens=2))
    engine.add_request(request_of("b", 1, max_tokens=2))
    drain(engine)
    assert [(bool(plan.units), bool(plan.decode_rows)) for plan in runner.plans] == [
        (True, False),
        (False, True),
        (True, False),
        (False, True),
    ]


def test_a_job_is_dropped_when_all_its_prompts_are_aborted() -> None:
    engine, runner = engine_of(config_of(prefill_quantum=1))
    keep_decoding(engine)
    engine.add_request(request_of("a", 2))
    engine.add_request(request_of("b", 2))
    engine.step()
    assert abort(engine, runner, "a")
    assert (engine.num_running, engine.rows_free) == (2, 1)  # the row of "a" is still to be written
    assert abort(engine, runner, "b")
    assert (engine.num_running, engine.rows_free, engine.staging_free) == (1, 3, runner.config.pool_tokens)
    engine.step()
    assert runner.plans[-1].dropped_jobs == (1,)
    drain(engine)


def test_an_aborted_prompt_leaves_the_others_of_its_job_alone() -> None:
    engine, runner = engine_of(config_of(prefill_quantum=1))
    keep_decoding(engine)
    engine.add_request(request_of("a", 2))
    engine.add_request(request_of("b", 2))
    engine.step()
    assert abort(engine, runner, "a")
    finished = drain(engine)
    assert all(not plan.dropped_jobs for plan in runner.plans)
    assert finished["a"].token_ids == [] and len(finished["b"].token_ids) == 3
    assert engine.rows_free == 4

"""What a prefill job refuses and reports; its results are compared in tests/parity."""

from __future__ import annotations

import pytest
import torch

from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import Chunking, EngineConfig, KVBudget, ModelConfig
from snapstream.models.decoder import Decoder
from snapstream.models.weights import DecoderWeights
from snapstream.request import SamplingParams
from snapstream.runner.model_runner import ModelRunner
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=50, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, intermediate_size=24, max_position=64,
)  # fmt: skip
BUDGET = KVBudget(num_sink=2, num_topk=4, num_recent=8)
SELECTOR = SnapKV(observation_len=4)


@pytest.fixture
def runner() -> ModelRunner:
    config = EngineConfig(
        budget=BUDGET, max_model_len=64, max_rows=2, chunking=Chunking(chunk_len=8, short_len=8), short_reserve=16,
        selector=SnapKV(observation_len=4),
    )  # fmt: skip
    weights = DecoderWeights.random(MODEL, torch.float32, "cpu", seed=0)
    return ModelRunner(Decoder(MODEL, weights), config)


def entry(length: int, row: int, sampling: SamplingParams | None = None) -> PrefillEntry:
    return PrefillEntry(
        request_id=f"r{row}",
        token_ids=tuple(range(1, length + 1)),
        rows=(row,),
        seeds=(row,),
        sampling=sampling or SamplingParams(temperature=0.0),
        budget=BUDGET,
        selector=SELECTOR,
    )


def test_units_run_in_order_and_the_last_one_ends_the_job(runner: ModelRunner) -> None:
    job = JobSpec(job_id=3, staging_start=5, entries=(entry(20, 0), entry(3, 1)))
    assert (job.num_tokens, job.num_chunks(8), job.num_units(8, 2)) == (23, 3, 6)
    first = runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(UnitRange(3, 0, 5),))).result()
    assert first.prefilled == {}
    last = runner.submit(StepPlan(step_id=2, units=(UnitRange(3, 5, 1),))).result()
    assert set(last.prefilled) == {"r0", "r1"}
    long, short = last.prefilled["r0"].compression, last.prefilled["r1"].compression
    assert (long.kept_tokens, long.evicted_tokens) == (14, 6)
    assert (short.kept_tokens, short.evicted_tokens) == (3, 0)
    assert long.row_bytes == 2 * 2 * 2 * 4 * 14 * 4 and long.full_bytes == 2 * 2 * 2 * 4 * 20 * 4
    with pytest.raises(KeyError):
        runner.submit(StepPlan(step_id=3, units=(UnitRange(3, 6, 1),)))


def test_a_unit_out_of_order_is_a_bug_and_ends_the_job(runner: ModelRunner) -> None:
    job = JobSpec(job_id=3, staging_start=0, entries=(entry(20, 0),))
    runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(UnitRange(3, 0, 2),)))
    with pytest.raises(RuntimeError, match="unit 3 was planned, unit 2 is next"):
        runner.submit(StepPlan(step_id=1, units=(UnitRange(3, 3, 1),)))
    assert runner.num_jobs == 0


def test_a_dropped_job_is_forgotten(runner: ModelRunner) -> None:
    job = JobSpec(job_id=1, staging_start=0, entries=(entry(20, 0),))
    runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(UnitRange(1, 0, 1),)))
    runner.submit(StepPlan(step_id=1, dropped_jobs=(1,)))
    with pytest.raises(KeyError):
        runner.submit(StepPlan(step_id=2, units=(UnitRange(1, 1, 1),)))


def test_kept_positions_are_reported_when_asked_for(runner: ModelRunner) -> None:
    asked = SamplingParams(temperature=0.0, return_kept=True)
    job = JobSpec(job_id=1, staging_start=0, entries=(entry(30, 0, asked), entry(10, 1, asked)))
    plan = StepPlan(step_id=0, opened_jobs=(job,), units=(UnitRange(1, 0, job.num_units(8, 2)),))
    result = runner.submit(plan).result()
    kept = result.prefilled["r0"].compression.kept_positions
    assert kept is not None and len(kept) == 2 and all(len(layer) == 2 for layer in kept)
    for head in (head for layer in kept for head in layer):
        assert len(head) == 4 and list(head) == sorted(set(head)) and head[0] >= 2 and head[-1] < 22
    assert result.prefilled["r1"].compression.kept_positions is None  # it fitted: nothing was chosen


def test_what_was_kept_may_come_as_bits(runner: ModelRunner) -> None:
    asked = SamplingParams(temperature=0.0, return_kept="bitmap")
    job = JobSpec(job_id=1, staging_start=0, entries=(entry(30, 0, asked), entry(10, 1, asked)))
    plan = StepPlan(step_id=0, opened_jobs=(job,), units=(UnitRange(1, 0, job.num_units(8, 2)),))
    prefilled = runner.submit(plan).result().prefilled
    told = prefilled["r0"].compression
    assert told.kept_positions is None and told.kept_bitmap is not None
    assert (told.kept_bitmap.num_layers, told.kept_bitmap.num_kv_heads, told.kept_bitmap.num_tokens) == (2, 2, 30)
    bits = told.kept_bitmap.bits
    assert [sum(byte.bit_count() for byte in bits[i : i + 4]) for i in range(0, 16, 4)] == [told.kept_tokens] * 4
    assert prefilled["r1"].compression.kept_bitmap is None  # it fitted: nothing was chosen

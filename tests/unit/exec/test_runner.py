"""The batch of a decode step is made anew when rows or their parameters change, and only then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.stand_ins import random_weights
from snapstream.config import Chunking, EngineConfig, KVBudget, KVDType, ModelConfig
from snapstream.exec.row_state import SamplingNeeds
from snapstream.exec.rows import Rows
from snapstream.exec.runner import DecodeBatches, ModelRunner
from snapstream.kv import layout
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.kv.spec import Full, KVSpec
from snapstream.models.decoder import Decoder
from snapstream.models.weights import DecoderWeights
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange
from snapstream.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def test_rows_that_go_on_are_not_uploaded_again() -> None:
    batches = DecodeBatches(torch.device("cpu"))
    params = {2: GREEDY, 5: GREEDY}
    first = batches.of((2, 5), params)
    assert first.rows.tolist() == [2, 5] and first.rows.dtype == torch.int64
    assert first.params == [GREEDY, GREEDY] and first.needs == SamplingNeeds()
    assert batches.of((2, 5), {**params, 3: GREEDY}) is first


def test_other_rows_and_a_row_with_another_owner_are_another_batch() -> None:
    batches = DecodeBatches(torch.device("cpu"))
    params = {2: GREEDY, 5: GREEDY}
    batches.of((2, 5), params)
    assert batches.of((5,), params).rows.tolist() == [5]
    params[5] = replace(GREEDY, temperature=1.0, top_k=3)
    drawn = batches.of((5,), params)
    assert drawn.needs == SamplingNeeds(random=True, top_k=True) and drawn.params == [params[5]]


# The counters on the device agree with the integer arithmetic of the layout.

budgets = st.builds(KVBudget, num_sink=st.integers(0, 5), num_topk=st.integers(0, 7), num_recent=st.integers(1, 7))


ONE_LAYER = KVSpec(layers=(Full(num_kv_heads=1, key_dim=2, value_dim=2),), num_heads=1)


def slots_and_lengths(rows: Rows, batch: torch.Tensor) -> tuple[list[int], list[int]]:
    (places,) = rows.places(batch, ONE_LAYER)
    return places.slots.tolist(), places.lengths.tolist()


def admit(rows: Rows, row: int, prompt_len: int, budget: KVBudget) -> None:
    rows.admit(torch.tensor([row]), torch.tensor([rows.entry(prompt_len, budget)]))


@settings(max_examples=200, deadline=None)
@given(owners=st.lists(st.tuples(budgets, st.integers(1, 40)), min_size=3, max_size=3), fed=st.integers(1, 30))
def test_slots_and_lengths_follow_the_layout(owners: list[tuple[KVBudget, int]], fed: int) -> None:
    rows = Rows(3, "cpu")
    for row, (budget, prompt_len) in enumerate(owners):
        admit(rows, row, prompt_len, budget)
    batch = torch.tensor([2, 0, 1])
    for step in range(fed):
        slots, lengths = slots_and_lengths(rows, batch)
        for i, row in enumerate(batch.tolist()):
            budget, prompt_len = owners[row]
            ordinal = prompt_len + step
            start = layout.ring_start(budget, prompt_len)
            assert slots[i] == layout.slot_of(ordinal, start, budget.capacity)
            assert lengths[i] == layout.num_visible(ordinal + 1, budget.capacity)
        rows.advance(batch, torch.tensor([7, 8, 9]))
    assert rows.last_token.tolist() == [8, 9, 7, 0]


def test_a_step_leaves_other_rows_alone() -> None:
    rows = Rows(2, "cpu")
    budget = KVBudget(num_sink=1, num_topk=2, num_recent=3)
    admit(rows, 0, 10, budget)
    admit(rows, 1, 4, budget)
    rows.advance(torch.tensor([0]), torch.tensor([5]))
    assert rows.num_tokens.tolist() == [11, 4, 0]
    assert rows.last_token.tolist() == [5, 0, 0]


def test_the_padding_row_may_stand_more_than_once() -> None:
    rows = Rows(1, "cpu")
    batch = torch.tensor([1, 1, 1])
    for _ in range(5):
        assert slots_and_lengths(rows, batch) == ([0, 0, 0], [1, 1, 1])
        rows.advance(batch, torch.tensor([3, 3, 3]))


def test_every_row_has_a_visible_slot_even_one_that_nobody_owns() -> None:
    """Kernels need a length of at least 1; unused entries of a batch point at the padding row."""
    rows = Rows(3, "cpu")
    assert slots_and_lengths(rows, torch.arange(4))[1] == [1, 1, 1, 1]


# What a prefill job refuses and reports; its results are compared in tests/parity.

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
    weights = random_weights(MODEL, torch.float32, "cpu", seed=0)
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
    job = JobSpec(job_id=3, staging_start=5, entries=(entry(20, 0), entry(3, 1)), chunk_len=8)
    assert (job.num_tokens, job.num_chunks, job.num_units(2)) == (23, 3, 6)
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
    job = JobSpec(job_id=3, staging_start=0, entries=(entry(20, 0),), chunk_len=8)
    runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(UnitRange(3, 0, 2),)))
    with pytest.raises(RuntimeError, match="unit 3 was planned, unit 2 is next"):
        runner.submit(StepPlan(step_id=1, units=(UnitRange(3, 3, 1),)))
    assert not runner.jobs


def test_a_dropped_job_is_forgotten(runner: ModelRunner) -> None:
    job = JobSpec(job_id=1, staging_start=0, entries=(entry(20, 0),), chunk_len=8)
    runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(UnitRange(1, 0, 1),)))
    runner.submit(StepPlan(step_id=1, dropped_jobs=(1,)))
    with pytest.raises(KeyError):
        runner.submit(StepPlan(step_id=2, units=(UnitRange(1, 1, 1),)))


def test_kept_positions_are_reported_when_asked_for(runner: ModelRunner) -> None:
    asked = SamplingParams(temperature=0.0, return_kept=True)
    job = JobSpec(job_id=1, staging_start=0, entries=(entry(30, 0, asked), entry(10, 1, asked)), chunk_len=8)
    plan = StepPlan(step_id=0, opened_jobs=(job,), units=(UnitRange(1, 0, job.num_units(2)),))
    result = runner.submit(plan).result()
    kept = result.prefilled["r0"].compression.kept_positions
    assert kept is not None and len(kept) == 2 and all(len(layer) == 2 for layer in kept)
    for head in (head for layer in kept for head in layer):
        assert len(head) == 4 and list(head) == sorted(set(head)) and head[0] >= 2 and head[-1] < 22
    assert result.prefilled["r1"].compression.kept_positions is None  # it fitted: nothing was chosen


def test_what_was_kept_may_come_as_bits(runner: ModelRunner) -> None:
    asked = SamplingParams(temperature=0.0, return_kept="bitmap")
    job = JobSpec(job_id=1, staging_start=0, entries=(entry(30, 0, asked), entry(10, 1, asked)), chunk_len=8)
    plan = StepPlan(step_id=0, opened_jobs=(job,), units=(UnitRange(1, 0, job.num_units(2)),))
    prefilled = runner.submit(plan).result().prefilled
    told = prefilled["r0"].compression
    assert told.kept_positions is None and told.kept_bitmap is not None
    assert (told.kept_bitmap.num_layers, told.kept_bitmap.num_kv_heads, told.kept_bitmap.num_tokens) == (2, 2, 30)
    bits = told.kept_bitmap.bits
    assert [sum(byte.bit_count() for byte in bits[i : i + 4]) for i in range(0, 16, 4)] == [told.kept_tokens] * 4
    assert prefilled["r1"].compression.kept_bitmap is None  # it fitted: nothing was chosen


# A submitted step asks the device for nothing, and sends it a number of parcels that does not grow with the rows.
# Both are shown without a GPU: tensors on the meta device have no values, so whatever reads one on the host raises;
# and a parcel is a tensor made of host numbers, which torch reports as ``lift_fresh``.

NO_WAITING_MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=50, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, intermediate_size=24, max_position=64, qk_norm=True, eos_token_ids=(2,),
)  # fmt: skip
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=1, logprobs=2, min_tokens=2)
EVERYTHING = replace(SAMPLED, logit_bias={5: 1.0}, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.2)
# What is told of a prompt reaches the host with the result.
TOLD = replace(SAMPLED, prompt_logprobs=2, return_kept=True)
BITMAP = replace(SAMPLED, return_kept="bitmap")


class Parcels(TorchDispatchMode):
    """Counts tensors made of host numbers, and numbers read from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            self.sent += 1
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read from the device"
        return func(*args, **(kwargs or {}))


def runner_on(device: str, kv_dtype: KVDType = "auto") -> ModelRunner:
    config = EngineConfig(
        budget=BUDGET, max_model_len=64, max_rows=6, chunking=Chunking(chunk_len=64, short_len=64), short_reserve=64,
        selector=SnapKV(observation_len=4), kv_dtype=kv_dtype,
        prefill_attention="cpu" if device == "cpu" else "auto",  # by no trial
    )  # fmt: skip
    return ModelRunner(Decoder(NO_WAITING_MODEL, DecoderWeights.empty(NO_WAITING_MODEL, torch.float32, device)), config)


def prefill(rows: tuple[int, ...], step_id: int = 0, sampling: SamplingParams = SAMPLED) -> StepPlan:
    entry = PrefillEntry(
        request_id="r",
        token_ids=tuple(range(3, 30)),
        rows=rows,
        seeds=rows,
        sampling=sampling,
        budget=BUDGET,
        selector=SELECTOR,
    )
    job = JobSpec(job_id=step_id, staging_start=0, entries=(entry,), chunk_len=64)
    return StepPlan(step_id=step_id, opened_jobs=(job,), units=(UnitRange(step_id, 0, NO_WAITING_MODEL.num_layers),))


@pytest.mark.parametrize(
    "sampling", [SAMPLED, EVERYTHING, TOLD, BITMAP], ids=["sampled", "everything", "told", "bitmap"]
)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_step_reads_nothing_from_the_device(kv_dtype: KVDType, sampling: SamplingParams) -> None:
    runner = runner_on("meta", kv_dtype)
    runner.submit(prefill((0, 3, 5), sampling=sampling))
    runner.submit(StepPlan(step_id=1, decode_rows=(0, 3, 5)))


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("rows", [(0,), (0, 3, 5), (0, 1, 2, 3, 4, 5)])
def test_parcels_do_not_grow_with_the_rows(rows: tuple[int, ...], kv_dtype: KVDType) -> None:
    runner = runner_on("cpu", kv_dtype)
    for tensor in runner.decoder.weights.stored().values():
        tensor.fill_(0.1)
    with Parcels() as finish:
        runner.submit(prefill(rows))
    assert finish.sent <= 5  # token ids; rows and counters; the sampler's two kinds of numbers; one more to spare
    with Parcels() as decode:
        runner.submit(StepPlan(step_id=1, decode_rows=rows))
    assert decode.sent == 1  # the row indices
    with Parcels() as decode:
        runner.submit(StepPlan(step_id=2, decode_rows=rows))
    assert decode.sent == 0, "they are the same"

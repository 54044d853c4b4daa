"""A submitted step asks the device for nothing, and sends it a number of parcels that does not grow with the rows.

Both are shown without a GPU: tensors on the meta device have no values, so whatever reads one on the host raises; and a
parcel is a tensor made of host numbers, which torch reports as ``lift_fresh``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import Chunking, EngineConfig, KVBudget, KVDType, ModelConfig, RescoringConfig
from snapstream.models.decoder import Decoder
from snapstream.models.weights import DecoderWeights
from snapstream.request import SamplingParams
from snapstream.runner.model_runner import ModelRunner
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=50, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, intermediate_size=24, max_position=64, qk_norm=True, eos_token_ids=(2,),
)  # fmt: skip
BUDGET = KVBudget(num_sink=2, num_topk=4, num_recent=8)
SELECTOR = SnapKV(observation_len=4)
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


def runner_on(device: str, kv_dtype: KVDType = "auto", rescoring: RescoringConfig | None = None) -> ModelRunner:
    config = EngineConfig(
        budget=BUDGET, max_model_len=64, max_rows=6, chunking=Chunking(chunk_len=64, short_len=64), short_reserve=64,
        selector=SnapKV(observation_len=4), kv_dtype=kv_dtype, rescoring=rescoring,
        prefill_attention="cpu" if device == "cpu" else "auto",  # by no trial
    )  # fmt: skip
    return ModelRunner(Decoder(MODEL, DecoderWeights.empty(MODEL, torch.float32, device)), config)


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
    job = JobSpec(job_id=step_id, staging_start=0, entries=(entry,))
    return StepPlan(step_id=step_id, opened_jobs=(job,), units=(UnitRange(step_id, 0, MODEL.num_layers),))


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


def test_a_refresh_sends_nothing() -> None:
    """Numbers that the host knows go as arguments of launches: an index that is a list would be a parcel, and so would
    a number that is assigned to one entry."""
    runner = runner_on("cpu", rescoring=RescoringConfig(every=4, num_queries=4))
    for tensor in runner.decoder.weights.stored().values():
        tensor.fill_(0.1)
    with Parcels() as finish:
        runner.submit(prefill((0, 3, 5)))
    assert finish.sent <= 5
    lengths = []
    for step in range(6):  # the row is full from the start; it is refreshed once four queries are there
        with Parcels() as decode:
            runner.submit(StepPlan(step_id=1 + step, decode_rows=(0, 3, 5)))
        assert decode.sent == (step == 0)  # the row indices, which then stay the same
        lengths.append(int(runner.rows.num_tokens[3]))
    assert lengths[-1] < lengths[0]  # a refresh sets the row back

"""Several prompts of a chunk attended in one call are the prompts attended one by one, wherever chunks cut them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import Chunking, EngineConfig, KVBudget, ModelConfig
from snapstream.kernels import reference
from snapstream.kernels.prefill.packages import PackedLens
from snapstream.models.decoder import Decoder
from snapstream.models.weights import DecoderWeights
from snapstream.request import SamplingParams
from snapstream.runner.model_runner import ModelRunner
from snapstream.step import JobSpec, PrefillEntry, StepPlan, UnitRange

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=90, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, intermediate_size=48, max_position=256, qk_norm=True, eos_token_ids=(2,),
)  # fmt: skip
BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SELECTOR = SnapKV(observation_len=8)


class Packed:
    """A kernel for packed prompts, by the reference; remembers what it was given."""

    def __init__(self) -> None:
        self.lens: list[PackedLens] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lens: PackedLens) -> Tensor:
        self.lens.append(lens)
        queries, keys = pairwise(lens.queries.tolist()), pairwise(lens.keys.tolist())
        assert lens.queries[-1] == len(q) and lens.keys[-1] == k.shape[1]
        parts = []
        for (a, b), (c, d) in zip(queries, keys, strict=True):
            assert b - a <= lens.max_queries and d - c <= lens.max_keys
            parts.append(reference.prefill_attention(q[a:b], k[:, c:d], v[:, c:d]))
        return torch.cat(parts)


def rows_after(
    lengths: tuple[int, ...], chunk_len: int, packed: Packed | None, own_chunk_len: int = 0
) -> tuple[Tensor, list[int]]:
    """Keys of all rows and the first tokens, after a job of prompts of these lengths."""
    config = EngineConfig(
        budget=BUDGET,
        max_model_len=256,
        max_rows=len(lengths),
        chunking=Chunking(chunk_len=chunk_len),
        selector=SnapKV(observation_len=8),
    )
    runner = ModelRunner(Decoder(MODEL, DecoderWeights.random(MODEL, torch.float32, "cpu", seed=0)), config)
    runner.prefill_attention = replace(
        runner.prefill_attention, attend=reference.prefill_attention, attend_packed=packed
    )
    entries = tuple(
        PrefillEntry(
            request_id=f"r{i}", token_ids=tuple((7 * i + 3 * j) % 80 + 3 for j in range(n)), rows=(i,), seeds=(i,),
            sampling=SamplingParams(temperature=0.0), budget=BUDGET, selector=SELECTOR,
        )
        for i, n in enumerate(lengths)
    )  # fmt: skip
    job = JobSpec(job_id=0, staging_start=17, entries=entries, chunk_len=own_chunk_len)
    units = UnitRange(0, 0, job.num_units(chunk_len, MODEL.num_layers))
    result = runner.submit(StepPlan(step_id=0, opened_jobs=(job,), units=(units,))).result()
    return runner.cache.k, [result.prefilled[entry.request_id].tokens[0].token_id for entry in entries]


@pytest.mark.parametrize("chunk_len", [7, 32, 64, 200])
def test_one_call_equals_a_call_per_prompt(chunk_len: int) -> None:
    lengths = (70, 5, 1, 33, 18)
    packed = Packed()
    got_keys, got = rows_after(lengths, chunk_len, packed)
    keys, expected = rows_after(lengths, chunk_len, None)
    assert torch.equal(got_keys, keys) and got == expected
    assert packed.lens, "some chunk holds several prompts"
    per_chunk = {id(lens) for lens in packed.lens}
    assert len(packed.lens) == len(per_chunk) * (MODEL.num_layers - 1)  # lengths are uploaded once, not per layer


def test_a_prompt_alone_in_its_chunks_takes_the_plain_call() -> None:
    packed = Packed()
    rows_after((70,), 32, packed)
    assert not packed.lens


def test_a_job_may_have_a_chunk_len_of_its_own() -> None:
    """Long prompts on a GPU are cut shorter than the engine's units (engine/pace.py)."""
    keys, expected = rows_after((70, 40), 64, None)
    got_keys, got = rows_after((70, 40), 64, None, own_chunk_len=7)
    torch.testing.assert_close(got_keys, keys)
    assert got == expected

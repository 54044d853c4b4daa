"""What ``plan`` counts of engines on several ranks, at the sizes of published models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published import DEEPSEEK_V3, MIXTRAL_8X7B, QWEN3_30B
from snapstream.config import EngineOptions, KVBudget, ModelConfig
from snapstream.config.weights import StoredWeights, WeightForm
from snapstream.models.families import kv_spec_of
from snapstream.models.registry import model_config_from_dict
from snapstream.plan.fit import engine_config
from snapstream.plan.memory import EngineMemory, engine_memory

R1 = replace(model_config_from_dict(DEEPSEEK_V3), stored=StoredWeights(codes=WeightForm(width="fp8")))
QWEN = model_config_from_dict(QWEN3_30B)
LENGTH = 32_768


def memory(model: ModelConfig, size: int, max_rows: int = 1, slots: int = 8192, **ways: Any) -> EngineMemory:
    options = EngineOptions(dtype="bfloat16", tensor_parallel=size, **(ways if size > 1 else {}))
    config = engine_config(model, options, KVBudget.of(slots), LENGTH, device="cuda", max_rows=max_rows)
    return engine_memory(model, config)


@pytest.mark.parametrize("attention", ["tp", "dp"])
@pytest.mark.parametrize("size", [1, 8, 16])
def test_no_row_more_would_fit(size: int, attention: str) -> None:
    """Rows that are said to fit do, and one more does not, for all remainders of rows and ranks."""
    for more in range(6):
        room = (141 if size > 1 else 720) * 10**9 + more * 7 * 10**8
        fit = memory(R1, size, attention=attention).rows_that_fit(room)
        assert fit > 0
        assert memory(R1, size, fit, attention=attention).total_bytes <= room
        assert memory(R1, size, fit + 1, attention=attention).total_bytes > room


def test_rows_that_are_dealt_out_take_one_rank_each() -> None:
    """Latents lie whole on every rank where heads are split; dealt out, 16 ranks hold about 16 times the rows."""
    split, dealt = (memory(R1, 16, attention=attention) for attention in ("tp", "dp"))
    assert split.row_bytes == dealt.row_bytes == kv_spec_of(R1, "bfloat16").row_bytes(8192)
    free = 20 * 10**9
    more_rows = dealt.rows_that_fit(dealt.fixed_bytes + free) / split.rows_that_fit(split.fixed_bytes + free)
    assert 11 < more_rows < 16  # less than 16: each rank draws the tokens of all rows
    rows = [memory(R1, 16, max_rows, attention="dp").total_bytes for max_rows in (16, 17, 32)]
    everywhere = dealt.state_bytes + dealt.batch_bytes
    assert rows[1] - rows[0] == dealt.row_bytes + everywhere
    assert rows[2] - rows[1] == 15 * everywhere


def test_heads_are_split() -> None:
    """A rank of 4 has a quarter of the keys and values; ranks more than kv heads share them."""
    row, staging = (kv_spec_of(QWEN, "bfloat16").row_bytes(8192), kv_spec_of(QWEN, "bfloat16").staging_bytes(1))
    one, four, eight = (memory(QWEN, size) for size in (1, 4, 8))
    assert [one.row_bytes, four.row_bytes, eight.row_bytes] == [row, row // 4, row // 4]
    pool = LENGTH + 4096
    assert one.staging_bytes - four.staging_bytes == pool * (staging - staging // 4)
    assert four.state_bytes == one.state_bytes


def test_staging_of_latents_expands_a_ranks_heads() -> None:
    """128 heads over 16 ranks: 8 are expanded on each, the latents and hidden states are whole."""
    pool = LENGTH + 4096
    for attention in ("tp", "dp"):
        found = memory(R1, 16, attention=attention).staging_bytes
        assert found == 2 * pool * (7168 + 576 + 2 * 8 * 192)


def test_a_ranks_chunks_may_be_longer() -> None:
    """Its temporaries are smaller, and weights are read once per chunk."""
    budget = KVBudget.of(8192)
    model = model_config_from_dict(MIXTRAL_8X7B)
    chunks = [
        engine_config(
            model, EngineOptions(dtype="bfloat16", tensor_parallel=size), budget, LENGTH, device="cuda"
        ).chunking
        for size in (1, 8)
    ]
    assert chunks[0].chunk_len < chunks[1].chunk_len


@pytest.mark.parametrize("size", [3, 256])
def test_sizes_that_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"split over {size} ranks"):
        memory(R1, size)

"""``plan`` and the engine agree on the bytes of a mixture of experts; see test_memory.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from snapstream.config import Chunking, EngineConfig, KVBudget
from snapstream.distributed.group import Alone
from snapstream.exec.executors import mlp_size
from snapstream.kernels.interface import bind, has_triton
from snapstream.models.layers import mlp_of
from snapstream.models.registry import model_config_from_dict
from snapstream.models.weights import DecoderWeights
from snapstream.plan.memory import FRAMEWORK_BYTES, engine_memory
from tests.live import LiveBytes
from tests.unit.exec.allocated import measured, without_kernels
from tests.unit.exec.test_memory import CHUNK, LENGTH, ROWS, SLOTS
from tests.unit.plan.test_memory import GLM_45_AIR, MIXTRAL_8X7B, QWEN3_30B

PUBLISHED = {"qwen": QWEN3_30B, "mixtral": MIXTRAL_8X7B, "glm": GLM_45_AIR}
pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed, and its operators know their shapes")


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_and_engine_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_config_from_dict(PUBLISHED[name] | {"num_hidden_layers": 3})
    config = EngineConfig(
        budget=KVBudget.of(SLOTS), max_model_len=LENGTH, max_rows=ROWS, dtype="bfloat16",
        chunking=Chunking(chunk_len=CHUNK, short_len=CHUNK),
    )  # fmt: skip
    static, peak = measured(model, config, monkeypatch)
    planned = engine_memory(model, replace(config, device="cuda"))
    at_start = planned.weight_bytes + planned.staging_bytes + (ROWS + 1) * (planned.row_bytes + planned.state_bytes)
    assert at_start == pytest.approx(static, rel=1e-3)
    assert peak <= planned.total_bytes - FRAMEWORK_BYTES


@pytest.mark.parametrize("name", PUBLISHED)
def test_temporaries_of_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    model = model_config_from_dict(PUBLISHED[name] | {"num_hidden_layers": 2})
    with LiveBytes("meta") as live, torch.inference_mode():
        weights = DecoderWeights.empty(model, torch.bfloat16, "meta")
        mlp = mlp_of(1, model, weights.layer(1), bind("meta", "triton"), Alone())
        x = torch.empty(CHUNK, model.hidden_size, dtype=torch.bfloat16, device="meta")
        before = live.peak = live.now
        mlp(x)
    counted = 2 * CHUNK * (mlp_size(model) + model.hidden_size)  # the sum of the chosen is one of a layer's four [T, D]
    assert 0.85 * counted < live.peak - before <= counted

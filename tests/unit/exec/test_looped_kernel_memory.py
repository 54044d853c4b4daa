"""What looped steps of a GPU hand from stage to stage is what ``plan`` says, in bytes of real tensors. Nothing runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from snapstream.config import EngineConfig, KVBudget
from snapstream.exec.executors import executor_of
from snapstream.exec.looped import looped_kernel_bytes
from snapstream.exec.runner import ModelRunner
from snapstream.models.decoder import Decoder
from snapstream.models.registry import model_config_from_dict
from snapstream.models.weights import DecoderWeights
from tests.live import LiveBytes

pytest.importorskip("triton")
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 512,
    "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 1024,
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("capacity", "num_kv_heads", "max_rows"), [(96, 2, 16), (2048, 2, 3), (16_384, 8, 1)])
def test_plan_and_buffers_agree(dtype: Any, capacity: int, num_kv_heads: int, max_rows: int) -> None:
    from snapstream.exec.looped_gpu import LoopedHalves

    model = model_config_from_dict(SHAPE | {"num_key_value_heads": num_kv_heads})
    config = EngineConfig(
        budget=KVBudget(num_sink=4, num_topk=0, num_recent=capacity - 4), max_model_len=capacity, max_rows=max_rows,
        dtype=dtype, executor="eager",
    )  # fmt: skip
    weights = DecoderWeights.empty(model, getattr(torch, dtype), "cpu")
    runner = ModelRunner(Decoder(model, weights), config)
    with LiveBytes("cpu") as live:
        halves = LoopedHalves(runner.step_parts, max_rows)
        held = live.now
    planned = looped_kernel_bytes(model, config)
    assert held <= max_rows * planned <= 1.03 * held
    on_gpu = replace(config, device="cuda", executor="looped")
    looped, graph = (executor_of(name, "cuda").batch_bytes(model, on_gpu) for name in ("looped", "graph"))
    assert looped - graph == planned
    del halves

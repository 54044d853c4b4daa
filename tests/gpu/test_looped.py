"""The looped kernel on the device: many programs, so that barriers wait, again and again and inside a captured graph.

python -m pytest tests/gpu/test_looped.py
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from snapstream.kernels.rows import RowPlaces
from snapstream.models.decoder import Decoder
from snapstream.models.registry import model_config_from_dict
from snapstream.models.weights import DecoderWeights
from tests.kernels.triton.checks import assert_near

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
CAPACITY, NUM_ROWS = 1000, 17
STEPS = 200
SHAPES = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 16,
              "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 12,
              "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False},
}  # fmt: skip


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("batch", [1, 3, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_looped_steps_equal_the_twin_eagerly_and_captured(shape: str, batch: int, dtype: torch.dtype) -> None:
    from snapstream.kernels.triton.looped import twin
    from snapstream.kernels.triton.looped.launch import Looped
    from snapstream.runner.looped_kernel import looped_model

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(batch)
    config = model_config_from_dict(
        {"vocab_size": 5000, "hidden_size": 1024, "num_hidden_layers": 6, "intermediate_size": 2816,
         "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 4096, "rope_theta": 10000.0,
         **SHAPES[shape]}
    )  # fmt: skip
    decoder = Decoder(config, DecoderWeights.random(config, dtype, "cuda", seed=1))
    model = looped_model(decoder)
    size = (config.num_layers, NUM_ROWS, config.num_kv_heads, CAPACITY, config.head_dim)
    keys, values = torch.randn(2, *size, device="cuda").to(dtype)
    rows = torch.randperm(NUM_ROWS, device="cuda")[:batch]
    counts = torch.randint(1, CAPACITY, (batch,), device="cuda")
    places = RowPlaces(rows, counts, counts + 1)
    positions = counts + 100
    rope, token_ids = decoder.rope(positions, positions + 1), torch.randint(0, 5000, (batch,), device="cuda")
    want = twin.step(model, keys.clone(), values.clone(), token_ids, places, rope).logits
    assert want is not None
    factor = 8.0 if dtype == torch.bfloat16 else 4.0
    for looped in (Looped(model, keys, values, batch), Looped(model, keys, values, batch).without_loads_ahead()):
        first = looped.run(token_ids, places, rope).clone()
        assert_near(first, want, dtype, factor)
        for _ in range(STEPS):  # a barrier that opens too early shows as another sum
            assert torch.equal(looped.run(token_ids, places, rope), first)
        assert_near(looped.run_layers(token_ids, places, rope), want, dtype, factor)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            looped.run(token_ids, places, rope)
        looped.logits.zero_()
        for _ in range(STEPS):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(looped.logits[:batch], first)
        assert not looped.counters.any()

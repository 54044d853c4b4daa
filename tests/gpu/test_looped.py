"""The looped kernel on the device: many programs, so that barriers wait, again and again and inside a captured graph.

python -m pytest tests/gpu/test_looped.py
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.stand_ins import random_share, random_weights
from snapstream.config import KVBudget, WeightFormats
from snapstream.kernels.rows import RowPlaces
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM
from snapstream.models.decoder import Decoder
from snapstream.models.registry import model_config_from_dict
from snapstream.models.sharding import Share
from snapstream.types import SamplingParams
from tests.kernels.triton.checks import assert_near
from tests.parity.checkpoints import VOCAB, make_model, save

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


@pytest.mark.parametrize("form", ["registers", "ring", "int8", "int4"])  # codes are loaded through registers
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("batch", [1, 3, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_looped_steps_equal_the_twin_eagerly_and_captured(
    form: str, shape: str, batch: int, dtype: torch.dtype
) -> None:
    from snapstream.exec.looped_gpu import looped_model
    from snapstream.kernels.triton.looped.launch import Looped, num_multiprocessors, register_launch, ring_variants
    from tests.kernels.triton.looped import twin

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(batch)
    config = model_config_from_dict(
        {"vocab_size": 5000, "hidden_size": 1024, "num_hidden_layers": 6, "intermediate_size": 2816,
         "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 4096, "rope_theta": 10000.0,
         **SHAPES[shape]}
    )  # fmt: skip
    if form in ("registers", "ring"):
        decoder = Decoder(config, random_weights(config, dtype, "cuda", seed=1))
    else:
        share = Share(whole=config, own=config)
        decoder = Decoder(config, random_share(share, dtype, "cuda", 1, WeightFormats.of(form)))
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
    if form == "ring":
        cuts = ring_variants(model, num_multiprocessors(keys.device), batch)
        formats = [Looped(model, keys, values, batch, cut) for cut in cuts.values()]
        assert formats[0].launch == Looped(model, keys, values, batch).launch  # what an engine runs
    else:
        launch = register_launch(model, num_multiprocessors(keys.device), batch)
        ahead = Looped(model, keys, values, batch, launch)
        formats = [ahead, ahead.without_loads_ahead()]
    for looped in formats:
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


@pytest.mark.parametrize(
    ("name", "weights"), [("llama-gqa-tied", "auto"), ("qwen2", "auto"), ("qwen3", "auto"), ("qwen3", "int4")]
)
def test_an_engine_answers_as_eager(name: str, weights: Any, tmp_path: Path) -> None:
    """Prompts above and below the budget, more of them than rows, greedy and drawn, through captured looped steps."""
    sizes = {} if weights == "auto" else {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    folder = save(make_model(name, **sizes), tmp_path)
    rng = random.Random(7)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (70, 5, 120, 33, 18, 1, 90)]
    params = [
        SamplingParams(max_tokens=6 + 2 * index, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        for index in range(len(prompts))
    ]
    answers = []
    for executor in ("eager", "looped"):
        with LLM(folder, budget=KVBudget(num_sink=2, num_topk=14, num_recent=16), selector=SnapKV(observation_len=8),
                 max_rows=5, max_model_len=160, progress=False, device="cuda", executor=executor,
                 weights=weights) as llm:  # fmt: skip
            answers.append([output.token_ids for output in llm.generate(prompts, params)])
            runner: Any = llm.engine.runner
            assert runner.config.executor == executor
    assert answers[0] == answers[1]

"""Attention of looped steps where its tiles end: groups and sizes of heads, parts of rows, all kinds of rows."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from snapstream.config import KVDType, ModelConfig
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.models.registry import model_config_from_dict
from snapstream.runner.decode_eager import EagerDecode
from snapstream.runner.decode_looped import LoopedDecode
from tests.parity.test_looped import runner_of

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def model_of(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return model_config_from_dict({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": 40,
        "max_position_embeddings": 4096,
    })  # fmt: skip


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "capacity"),
    [(1, 1, 64, 1024), (4, 1, 64, 1025), (7, 1, 96, 1039), (9, 1, 40, 1023), (6, 2, 20, 2064), (8, 1, 256, 300)],
)
def test_rows_of_any_kind_and_length(
    heads: int, kv_heads: int, head_dim: int, capacity: int, instructions: InstructionSet
) -> None:
    """Eager's logits, the same bits alone and beside others; unseen slots (NaN, in FP8 zeros) change none."""
    for kv_dtype in get_args(KVDType):
        runner = runner_of(model_of(heads, kv_heads, head_dim), "float32", kv_dtype, instructions, capacity, 0)
        cache, rows = runner.cache, torch.tensor([3, 0, 4, 1, 2])
        for tensor in (cache.k_scale, cache.v_scale) if kv_dtype == "int8" else (cache.k, cache.v):
            assert tensor is not None
            for row, seen in ((0, 1), (1, 2)):
                tensor[:, row, :, seen:] = 0.0 if kv_dtype == "fp8" else float("nan")
        looped, eager = LoopedDecode(runner.step_parts, 1), EagerDecode(runner.step_parts)
        with torch.inference_mode():
            got = looped.logits(rows).clone()
            want = eager.logits(rows)  # which writes the tokens that are there already, once more
            again = torch.cat([looped.logits(row[None]).clone() for row in rows])
        looped.close()
        limit = 2e-5 if kv_dtype == "auto" else 2e-2  # as a new token's numbers may round to their neighbours
        torch.testing.assert_close(got, want, rtol=0, atol=limit * float(want.abs().max()))
        assert torch.equal(again, got)

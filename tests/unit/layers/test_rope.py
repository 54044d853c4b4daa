"""Rope frequencies against transformers for settings of published models, and the laws of the rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from snapstream.config import RopeConfig
from snapstream.kernels.plain import rotate
from snapstream.layers.rope import Rope, rope_frequencies
from snapstream.models.rope_config import parse_rope

HEAD_DIM = 128
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {  # max_position_embeddings, rope parameters
    "Llama 3.1": (131072, {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "Llama 3.2": (131072, {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "Vicuna 16k": (4096, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "Qwen2.5 yarn": (32768, {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                             "original_max_position_embeddings": 32768}),
    "DeepSeek V2 yarn": (163840, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32,
                                  "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.0,
                                  "original_max_position_embeddings": 4096}),
    "yarn, not truncated": (131072, {"rope_type": "yarn", "rope_theta": 1e5, "factor": 32, "truncate": False,
                                     "original_max_position_embeddings": 4096}),
    "yarn, empty ramp": (2048, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 4,
                                "beta_slow": 4, "truncate": False, "original_max_position_embeddings": 1024}),
}  # fmt: skip


def llama_config(max_position: int, parameters: dict[str, Any]) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=max_position,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("name", list(SETTINGS))
def test_frequencies_equal_transformers(name: str) -> None:
    max_position, parameters = SETTINGS[name]
    theirs, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](llama_config(max_position, dict(parameters)))
    rope = Rope(parse_rope({"rope_parameters": parameters}, max_position), HEAD_DIM, "cpu")
    torch.testing.assert_close(rope.frequencies, theirs, rtol=2e-6, atol=0.0)
    assert rope.scale == pytest.approx(scale, rel=1e-6)
    plain = rope_frequencies(RopeConfig(theta=parameters["rope_theta"]), HEAD_DIM)
    assert not torch.allclose(rope.frequencies, plain, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("length", [1, 4096, 4097, 10_000, 60_000])
def test_dynamic_frequencies_equal_transformers(length: int) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](llama_config(4096, dict(parameters)), seq_len=length)
    rope = Rope(parse_rope({"rope_parameters": parameters}, 4096), HEAD_DIM, "cpu")
    position = torch.tensor([length - 1])
    cos, sin = rope.angles(position, torch.tensor([length]))
    angle = (length - 1) * theirs.double()
    # fp32 keeps about 7 digits of an angle, whoever computes it
    torch.testing.assert_close(cos[0, 0, : HEAD_DIM // 2].double(), angle.cos(), rtol=0, atol=2e-6 * length + 1e-6)
    torch.testing.assert_close(sin[0, 0, HEAD_DIM // 2 :].double(), angle.sin(), rtol=0, atol=2e-6 * length + 1e-6)


def test_dynamic_stretching_needs_more_than_a_pair() -> None:
    rope = parse_rope({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, 4096)
    with pytest.raises(ValueError, match="rotates 2 numbers of a head; it needs 4 or more"):
        Rope(rope, 2, "cpu")


def test_rotation_is_that_of_the_complex_plane() -> None:
    """The pair (x[i], x[i + E/2]) turns by position times frequency i."""
    rope = Rope(RopeConfig(), 8, "cpu")
    positions = torch.tensor([0, 1, 5, 1000])
    heads = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    rotated = rotate(heads, rope.angles(positions, positions + 1))
    plane = torch.complex(heads[..., :4], heads[..., 4:]).to(torch.complex128)
    turn = torch.polar(torch.ones(4, 4).double(), positions[:, None] * rope.frequencies.double())
    want = plane * turn[:, None]
    torch.testing.assert_close(rotated, torch.cat((want.real, want.imag), -1).float(), rtol=0, atol=3e-4)
    assert torch.equal(rotated[0], heads[0])


def test_scores_depend_on_distance_alone() -> None:
    rope = Rope(RopeConfig(), 16, "cpu")
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(1)).unbind()

    def score(at: int, distance: int) -> torch.Tensor:
        here, there = torch.tensor([at]), torch.tensor([at - distance])
        return (rotate(q, rope.angles(here, here + 1)) * rotate(k, rope.angles(there, there + 1))).sum()

    torch.testing.assert_close(score(50, 7), score(500, 7), rtol=0, atol=1e-3)
    assert (score(50, 7) - score(50, 8)).abs() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rotated_in_fp32(dtype: torch.dtype) -> None:
    rope = Rope(RopeConfig(), 16, "cpu")
    positions = torch.arange(900, 908)
    heads = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    angles = rope.angles(positions, positions + 1)
    rotated = rotate(heads, angles)
    assert rotated.dtype == dtype
    assert torch.equal(rotated, rotate(heads.float(), angles).to(dtype))

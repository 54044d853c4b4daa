"""Stacked storage: shapes, counts and views agree; random weights keep activations of order 1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from snapstream.config import ModelConfig
from snapstream.kernels.bound import CosSin, HeadNorm
from snapstream.models.decoder import Decoder
from snapstream.models.shapes import num_parameters, weight_shapes
from snapstream.models.weights import DecoderWeights

PLAIN = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=300, hidden_size=64, num_layers=8, num_heads=8,
    num_kv_heads=2, head_dim=8, intermediate_size=160, max_position=64,
)  # fmt: skip
RICH = replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tie_word_embeddings=True)


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_stored_tensors_have_the_counted_shapes(config: ModelConfig) -> None:
    weights = DecoderWeights.empty(config, torch.bfloat16, "meta")
    assert {role: tuple(tensor.shape) for role, tensor in weights.stored().items()} == weight_shapes(config)
    assert weights.num_bytes == 2 * num_parameters(config)


def test_known_parameter_counts() -> None:
    """Published sizes: Llama 3.1 8B has 8,030,261,248 parameters, Qwen2.5 0.5B 494,032,768."""
    llama = replace(PLAIN, vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
                    head_dim=128, intermediate_size=14336)  # fmt: skip
    qwen = replace(PLAIN, vocab_size=151936, hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2,
                   head_dim=64, intermediate_size=4864, qkv_bias=True, tie_word_embeddings=True)  # fmt: skip
    assert num_parameters(llama) == 8_030_261_248
    assert num_parameters(qwen) == 494_032_768


def test_layers_are_views() -> None:
    weights = DecoderWeights.random(RICH, torch.float32, "cpu", seed=0)
    for index in range(RICH.num_layers):
        layer = weights.layer(index)
        for role in layer.matrices:
            assert layer.matrix(role).dense().data_ptr() == weights.matrices[role].dense()[index].data_ptr(), role
        for role in layer.vectors:
            assert layer.vector(role).data_ptr() == weights.vectors[role][index].data_ptr(), role
        assert len(layer.matrices) == 4 and len(layer.vectors) == 8


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_random_weights_are_seeded_and_tame(config: ModelConfig) -> None:
    weights = DecoderWeights.random(config, torch.float32, "cpu", seed=3)
    again = DecoderWeights.random(config, torch.float32, "cpu", seed=3)
    other = DecoderWeights.random(config, torch.float32, "cpu", seed=4)
    assert all(torch.equal(tensor, again.stored()[role]) for role, tensor in weights.stored().items())
    assert not torch.equal(weights.stored()["qkv"], other.stored()["qkv"])

    class Echo:
        def attend(self, layer: int, heads: torch.Tensor, norm: HeadNorm, rope: CosSin) -> torch.Tensor:
            return heads[:, -config.num_kv_heads :].repeat_interleave(config.group_size, 1)

    decoder = Decoder(config, weights)
    positions = torch.arange(32)
    with torch.inference_mode():
        hidden = decoder.embed(positions)
        for index in range(config.num_layers):
            hidden = decoder.layer(index, hidden, decoder.rope(positions, positions + 1), Echo())
        assert 0.3 < decoder.logits(hidden).std() < 3.0
        assert 0.3 < hidden.std() < 3.0

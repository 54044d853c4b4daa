"""The benchmark of a mixture of experts: bytes of a step, a GGUF file of experts, the table."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from benchmarks import tables
from benchmarks.experts import ARMS, QUICK, forms_of, mixture_folder, step_bytes
from benchmarks.peers.gguf_file import gguf_name, gguf_tensors
from snapstream.models.registry import read_model_config
from snapstream.models.shapes import decode_weight_bytes
from snapstream.models.weights import DecoderWeights

SHAPE = QUICK | {"hidden_size": 64, "num_experts": 4, "moe_intermediate_size": 32, "num_hidden_layers": 2,
                 "vocab_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip


def test_bytes_of_a_step() -> None:
    """With all experts it is everything that is stored, for every format; each expert weighs the same."""
    with mixture_folder(SHAPE) as folder:
        model = read_model_config(folder)
    for arm in ARMS:
        forms = forms_of(arm)
        most = step_bytes(model, forms, 4)
        assert most == decode_weight_bytes(model, "float32", forms, 10_000)
        if arm.module == "run_snapstream":
            assert most == DecoderWeights.empty(model, torch.float32, "cpu", forms).num_bytes
        expert = sum(forms.layers.num_bytes(shape) for shape in ((2 * 32, 64), (64, 32)))  # gate and up in one
        assert most - step_bytes(model, forms, 3) == pytest.approx(2 * expert)


def test_experts_of_a_layer_are_one_tensor() -> None:
    assert gguf_name("model.layers.3.mlp.experts.17.down_proj.weight") == "blk.3.ffn_down_exps.weight"
    assert gguf_name("model.layers.3.mlp.gate.weight") == "blk.3.ffn_gate_inp.weight"
    with mixture_folder(SHAPE) as folder:
        found = gguf_tensors(Path(folder))
        assert found["blk.1.ffn_up_exps.weight"].shape == (4, 32, 64)
        assert found["blk.1.ffn_down_exps.weight"].shape == (4, 64, 32)
        assert not any("experts" in name for name in found)
        assert not numpy.array_equal(found["blk.1.ffn_up_exps.weight"][0], found["blk.1.ffn_up_exps.weight"][1])


def test_the_table() -> None:
    lines = [
        {"engine": "a", "batch": 1, "decode_tokens_per_s": 1234.5, "experts_chosen": 4.0, "share_of_read_rate": 0.5},
        {"engine": "a", "batch": 8, "decode_tokens_per_s": None, "experts_chosen": 12.25, "share_of_read_rate": None,
         "same_tokens": 0.75},
    ]  # fmt: skip
    figures = {"prompt_len": 64, "new_tokens": 49, "threads": 2, "arms": lines, "left_out": {"c": "not installed"},
               "versions": {"torch": "2"}}  # fmt: skip
    text = tables.experts(figures)
    assert "4.0 experts of each layer at batch 1, 12.2 experts of each layer at batch 8:" in text
    assert "| a | 1,234 |  | 50% |  |  | 75% |" in text
    assert text.endswith("Left out: c (not installed).\n\nVersions: torch 2.")

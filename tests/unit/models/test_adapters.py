"""What a folder of PEFT must hold to be served; everything else is refused with every reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from snapstream.config import EngineOptions, ModelConfig
from snapstream.models.adapters import Projection, projections, read_adapter, read_pairs, with_loras
from snapstream.models.lora import load_adapters
from snapstream.models.matrix import make_matrix
from snapstream.models.registry import model_config_from_dict

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (32, 24), DOWN: (24, 40)}
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none"}


def tensors(rank: int = 3, **shapes: tuple[int, int]) -> dict[str, Tensor]:
    found = {}
    for module, (rows, columns) in (SHAPES | shapes).items():
        found[f"base_model.model.{module}.lora_A.weight"] = torch.ones(rank, columns)
        found[f"base_model.model.{module}.lora_B.weight"] = torch.ones(rows, rank)
    return found


def write(folder: Path, changes: dict[str, Any] | None = None, numbers: dict[str, Tensor] | None = None) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | (changes or {})))
    save_file(tensors() if numbers is None else numbers, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def model() -> ModelConfig:
    return model_config_from_dict(LLAMA)


def test_what_is_read(model: ModelConfig, tmp_path: Path) -> None:
    """Ranks and scales by the patterns of PEFT; later projections of a matrix begin behind the earlier ones."""
    changes = {"rank_pattern": {"layers.1.*": 2}, "alpha_pattern": {"q_proj": 12}, "use_rslora": True}
    numbers = {name: own for name, own in tensors().items() if "layers.0" in name}
    numbers |= {name: own for name, own in tensors(2).items() if "layers.1" in name}
    pairs = read_pairs("a", write(tmp_path, changes, numbers), model)
    assert [(*own.projection[:2], own.rank) for own in pairs] == [(0, "qkv", 3), (1, "down", 2)]
    assert [own.scale for own in pairs] == pytest.approx([12 / 3**0.5, 6 / 2**0.5])
    known = projections(model)
    assert {name.rpartition(".")[2]: own.first for name, own in known.items() if ".1." in name} == {
        "q_proj": 0, "k_proj": 32, "v_proj": 48, "o_proj": 0, "gate_proj": 0, "up_proj": 40, "down_proj": 0,
    }  # fmt: skip
    assert known[DOWN] == Projection(1, "down", 0, (24, 40), None, None)


def test_content_is_part_of_what_is_known(model: ModelConfig, tmp_path: Path) -> None:
    """The same weights under another name are the same; other weights or settings under one name are others."""
    folder = write(tmp_path)
    first = read_adapter("a", str(folder), model)
    assert first.shapes == ((3, 24), (3, 40), (32, 3), (24, 3)) and first.rank == 3
    assert read_adapter("b", str(folder), model) == replace(first, name="b")
    digests = {first.digest}
    for changes, scale in (({}, 2.0), ({"lora_alpha": 7}, 1.0)):
        write(folder, changes, {name: own * scale for name, own in tensors().items()})
        digests.add(read_adapter("a", str(folder), model).digest)
    assert len(digests) == 3


EXPERT = "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight"
HEAD = "base_model.model.lm_head.lora_A.weight"
DORA = f"base_model.model.{Q}.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("changes", "numbers", "reasons"),
    [
        ({"peft_type": "IA3", "bias": "all"}, {}, ["peft_type is 'IA3'", "bias is 'all'"]),
        ({"use_dora": True}, {}, ["use_dora is True"]),
        ({"modules_to_save": ["lm_head"]}, {}, [r"modules_to_save is \['lm_head'\]"]),
        ({"fan_in_fan_out": True}, {}, ["fan_in_fan_out is True"]),
        ({"lora_bias": True}, {}, ["lora_bias is True"]),
        ({"layer_replication": [[0, 2]]}, {}, ["layer_replication is"]),
        ({"init_lora_weights": "pissa_niter_4"}, {}, ["init_lora_weights is 'pissa_niter_4'"]),
        ({"rank_pattern": [1]}, {}, [r"rank_pattern is \[1\]"]),
        ({"rank_pattern": {"(": 1}}, {}, [r"the key '\(', no regular expression"]),
        ({"rank_pattern": {"(q+)+!": 1}}, {}, [r"the key .\(q\+\)\+!., which repeats .* a group"]),
        ({"alpha_pattern": {".*" * 5: 1}}, {}, ["repeats more than 4 times"]),
        ({"r": "3"}, {}, ["r is '3'"]),
        ({"r": 0}, {}, ["the rank of model.layers.0.self_attn.q_proj is 0", "the rank of .*down_proj is 0"]),
        ({"r": 4096}, {}, ["is 4096; it must be from 1 to 512"]),
        ({"lora_alpha": float("inf")}, {}, ["lora_alpha is inf"]),
        ({"r": 2}, {}, [r"q_proj.lora_A.weight has the shape \[3, 24\]; it must be \[2, 24\]"]),
        ({}, {f"base_model.model.{Q}.lora_B.weight": torch.ones(24, 3)}, [r"\[24, 3\]; it must be \[32, 3\]"]),
        ({}, {f"base_model.model.{Q}.lora_A.weight": torch.ones(3, 24, dtype=torch.int8)}, ["has the dtype I8"]),
        ({}, {f"base_model.model.{Q}.lora_B.weight": None}, ["q_proj.lora_B.weight is missing"]),
        ({}, {EXPERT: torch.ones(3, 24), HEAD: torch.ones(3, 24)}, [HEAD, EXPERT]),
        ({}, {DORA: torch.ones(32)}, [DORA]),
        ({}, {f"base_model.model.{Q}.lora_A.weight": torch.full((3, 24), float("nan"))}, ["are not finite"]),
        ({}, {f"base_model.model.{Q}.lora_B.weight": torch.full((32, 3), 3e38)}, ["are not finite"]),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(
    changes: dict[str, Any], numbers: dict[str, Tensor | None], reasons: list[str], model: ModelConfig, tmp_path: Path
) -> None:
    given = {name: own for name, own in (tensors() | numbers).items() if own is not None}
    folder = write(tmp_path, changes, given)
    with pytest.raises(ValueError, match=".*".join(("lora 'mine'", *reasons))):
        options = with_loras(model, EngineOptions(loras={"mine": folder}))  # type: ignore[arg-type]
        load_adapters(options.loras, model, torch.float32, "cpu", make_matrix)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["StableLmForCausalLM"], "hidden_size": 32}, "its norms have biases"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": None,
          "first_k_dense_replace": 2}, "its attention keeps latents"),
    ],
)  # fmt: skip
def test_models_that_have_no_adapters(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        read_adapter("mine", str(write(tmp_path)), model_config_from_dict(LLAMA | changes))


def test_files_that_are_missing_or_broken(model: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="has no adapter_model.safetensors; files of other formats are not read"):
        read_adapter("mine", str(tmp_path), model)
    write(tmp_path, numbers={})
    with pytest.raises(ValueError, match="holds no tensors"):
        read_adapter("mine", str(tmp_path), model)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        read_adapter("mine", str(tmp_path), model)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"a": "x", "b": Path("y")}, [("a", "x"), ("b", "y")]),
        (("a=x/=y", "some/folder", "org/name"), [("a", "x/=y"), ("folder", "some/folder"), ("name", "org/name")]),
    ],
)
def test_names(given: Any, names: list[tuple[str, str]]) -> None:
    assert list(EngineOptions(loras=given).loras) == names


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("a=x", "y/a"), r"\['a'\] is the name of several"),
        ({"": "x"}, "the name of 'x' is ''"),
        ({"a": 5}, "the folder of 'a' is 5; it must be a path"),
        ("a=x", "loras is 'a=x'; it must be a mapping"),
        (None, "loras is None; it must be a mapping"),
    ],
)
def test_names_that_are_refused(given: Any, reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        EngineOptions(loras=given)

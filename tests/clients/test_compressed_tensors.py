"""Checkpoints of ``snapstream quantize`` in transformers with compressed-tensors: the same logits, bit by bit."""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.stand_ins import checkpoint_of
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.config import WeightFormat
from snapstream.models.checkpoint import load_weights
from snapstream.models.quantize import quantize_checkpoint
from snapstream.models.registry import read_model_config
from tests.parity.checkpoints import make_model
from tests.parity.test_packings import CASES, written

pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")


INT8 = WeightFormat(dtype="int8", group=32)


def check(source: Path, form: WeightFormat, codes: Path, attention: WeightFormat | None = None) -> None:
    """Their logits from codes are those from the numbers that ours stand for."""
    quantize_checkpoint(source, codes, form, attention=attention)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(codes, dtype=torch.float32).eval()
    wide = checkpoint_of(load_weights(codes, read_model_config(codes), torch.float32, "cpu", False))
    (codes.parent / "wide").mkdir()
    save_file({name: numbers.contiguous().clone() for name, numbers in wide.items()},
              codes.parent / "wide" / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    copyfile(source / "config.json", codes.parent / "wide" / "config.json")
    ours = transformers.AutoModelForCausalLM.from_pretrained(codes.parent / "wide", dtype=torch.float32).eval()
    ids = torch.tensor([[5, 30, 17, 42, 100]])
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "deepseek-v3", "glm4-moe"])
@pytest.mark.parametrize("attention", [None, INT8], ids=["uniform", "mixed"])
def test_transformers_reads_experts(attention: WeightFormat | None, name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    sizes |= {"q_lora_rank": 32, "kv_lora_rank": 32} if name == "deepseek-v3" else {}
    make_model(name, **sizes).save_pretrained(tmp_path / "own")
    check(tmp_path / "own", WeightFormat(dtype="int4", group=32), tmp_path / "codes", attention)


@pytest.mark.parametrize(
    "form", [WeightFormat(dtype="int4", group=32), WeightFormat(dtype="int8", group=128)], ids=lambda form: form.dtype
)
@pytest.mark.parametrize("attention", [None, INT8], ids=["uniform", "mixed"])
@pytest.mark.parametrize("source", [TINY_MODEL, TINY_DRAFT_MODEL], ids=["llama", "qwen3"])
def test_transformers_reads_what_quantize_writes(
    source: Path, attention: WeightFormat | None, form: WeightFormat, tmp_path: Path
) -> None:
    check(source, form, tmp_path / "codes", attention)


@pytest.mark.parametrize("case", ["packed-zeros", "packed-row", "packed-8-zeros", "int8-row", "fp8-row"])
def test_other_schemes_are_the_numbers_of_the_library(case: str, tmp_path: Path) -> None:
    """Decompressed by it, and loaded here."""
    own, wide = written("qwen3", CASES[case][0], tmp_path)
    settings = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32, quantization_config=settings)
    numbers = dict(theirs.named_parameters())
    for name, ours in load_file(wide / "model.safetensors").items():
        assert torch.allclose(numbers[name].float(), ours, rtol=2e-3, atol=1e-6), (
            name
        )  # products in the dtype of scales

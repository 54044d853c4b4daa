"""MXFP4 checkpoints of gpt-oss: experts are kept as stored, and answers are those of the numbers they stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from snapstream.config import EngineOptions, WeightFormat
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.llm import LLM
from snapstream.models.matrix import encode
from snapstream.models.registry import model_config_from_dict, read_model_config
from snapstream.models.sharding import weight_bytes
from snapstream.plan.fit import weight_formats
from snapstream.plan.plan import make_plan
from snapstream.types import SamplingParams
from tests.parity.checkpoints import VOCAB, greedy_along, make_model, save
from tests.unit.models.test_registry import GPT_OSS_20B, GPT_OSS_120B

FORM = WeightFormat(dtype="mxfp4", group=32)
PUBLISHED = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 96}
PROMPTS = [[5 + 7 * i % (VOCAB - 10) for i in range(n)] for n in (90, 5, 33, 1)]
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def narrowed(folder: Path, target: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4 of one of floats, and the numbers that transformers makes of it."""
    settings = json.loads((folder / "config.json").read_text())
    packed, wide = dict[str, Tensor](), dict[str, Tensor]()
    for name, numbers in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = wide[name] = numbers
            continue
        codes, scales = encode(numbers.transpose(1, 2), FORM)  # [X, out, in / 2], [X, out, in / 32]
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = codes.unflatten(-1, (-1, 16)).contiguous(), scales
        wide[name] = convert_moe_packed_tensors(packed[f"{name}_blocks"], scales, dtype=torch.float32).contiguous()
    for kind, own in (("mxfp4", packed), ("wide", wide)):
        (target / kind).mkdir()
        save_file(own, target / kind / "model.safetensors", metadata={"format": "pt"})
        extra = {"quantization_config": PUBLISHED} if kind == "mxfp4" else {}
        (target / kind / "config.json").write_text(json.dumps(settings | extra))
    return target / "mxfp4", target / "wide"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = save(make_model("gpt-oss", **SIZES), tmp_path_factory.mktemp("source"))
    return narrowed(folder, tmp_path_factory.mktemp("both"))


def answers(folder: Path, **options: Any) -> list[list[int]]:
    settings = {"max_model_len": 160, "chunk_len": 32, "max_rows": 3, "progress": False, "activations": "dtype"}
    with LLM(folder, **settings | {"kv_dtype": "float32"} | options) as llm:
        weights = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
        is_kept = folder.name == "mxfp4"
        for name, matrix in weights.matrices.items():
            assert (matrix.form == FORM) == (is_kept and name.startswith("experts")), name
        if llm.config.executor == "eager":  # panels fill their last rows
            assert weights.num_bytes == weight_bytes(llm.model_config, "float32", llm.config.weights)
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_answers_are_those_of_transformers(both: tuple[Path, Path]) -> None:
    """In chunks and batches, full rows and rows of 48 slots, by both executors."""
    packed, wide = both
    model = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    for executor in ["eager"] if find_compiler() is None else ["eager", "looped"]:
        for prompt, answer in zip(PROMPTS, answers(packed, executor=executor, budget="full"), strict=True):
            assert answer == greedy_along(model, prompt, answer)
        assert answers(packed, executor=executor, budget=48) == answers(wide, executor=executor, budget=48)


def test_the_same_numbers_in_bfloat16(both: tuple[Path, Path]) -> None:
    """Where the dtype is not float32 experts stay packed, too."""
    with LLM(both[0], dtype="bfloat16", max_model_len=64, progress=False) as llm:
        matrices = llm.engine.runner.decoder.weights.matrices  # type: ignore[attr-defined]
        assert matrices["experts_down"].form == FORM and matrices["qkv"].form.dtype == "bfloat16"
        assert len(llm.generate([PROMPTS[1]], PARAMS)[0].token_ids) == PARAMS.max_tokens


@pytest.mark.parametrize(
    ("place", "name", "scale", "what"), [(0, "gate_up_proj", 255, "NaN"), (1, "down_proj", 254, "infinity as float32")]
)
def test_scales_that_give_no_finite_number(
    both: tuple[Path, Path], tmp_path: Path, place: int, name: str, scale: int, what: str
) -> None:
    tensors = load_file(both[0] / "model.safetensors")
    tensors[f"model.layers.{place}.mlp.experts.{name}_scales"][2, 3, 0] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((both[0] / "config.json").read_bytes())
    with pytest.raises(ValueError, match=f"layers.{place}.mlp.experts.{name}_scales holds {what}"):
        LLM(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dequantize": True}, "quantization_config.dequantize is True; read is none or False"),
        ({"modules_to_not_convert": ["lm_head"]}, r"modules_to_not_convert is \['lm_head'\]; read is lm_head, model"),
        ({"modules_to_not_convert": None}, "modules_to_not_convert is None"),
    ],
)
def test_other_mxfp4_is_refused(both: tuple[Path, Path], changes: dict[str, Any], reason: str) -> None:
    settings = json.loads((both[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=reason):
        model_config_from_dict(settings | {"quantization_config": PUBLISHED | changes})
    with pytest.raises(ValueError, match="which is read for gpt-oss alone"):
        model_config_from_dict(settings | {"architectures": ["LlamaForCausalLM"], "quantization_config": PUBLISHED})


def test_other_weights_are_refused(both: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="weights is 'int8'; the checkpoint has mxfp4 in groups of 32: use 'auto'$"):
        weight_formats(read_model_config(both[0]), EngineOptions(weights="int8"), device="cpu")
    with pytest.raises(ValueError, match="rows of experts_gate_up have 80 numbers, which must be a multiple of 32"):
        config = read_model_config(both[0])
        weight_formats(replace(config, hidden_size=80), EngineOptions(), device="cpu")


@pytest.mark.parametrize(("settings", "size"), [(GPT_OSS_20B, 12.8), (GPT_OSS_120B, 60.8)])
def test_the_published_models(settings: dict[str, Any], size: float, tmp_path: Path) -> None:
    """Checkpoints of 12.8 and 60.8 GiB (arXiv 2508.10925, table 1); half of the layers keep 128 tokens."""
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": PUBLISHED}))
    model = read_model_config(tmp_path)
    plan = make_plan(model, EngineOptions(dtype="bfloat16"), budgets=[8192], prompt_len=131_072)
    assert plan.weight_bytes / 2**30 == pytest.approx(size, abs=0.06)
    full, row = plan.rows
    layer = 2 * 8 * 64 * 2  # bytes of a token
    assert full.row_bytes == model.num_layers // 2 * layer * (131_072 + 128)
    assert row.row_bytes == model.num_layers // 2 * layer * (8192 + 128)

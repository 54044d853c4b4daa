"""Checkpoints in FP8 blocks: read as they are, and the answers are those of the same numbers written wide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from snapstream.config import WeightForm, WeightForms
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import load
from snapstream.kernels.reference import widen_blocks
from snapstream.llm import LLM
from snapstream.models.block_panels import BlockPanels
from snapstream.models.blocks import Blocks, quantise
from snapstream.models.narrow import make_weight
from snapstream.models.panels import make_panels
from snapstream.models.registry import model_config_from_dict, read_model_config
from snapstream.models.shapes import weight_bytes
from snapstream.request import SamplingParams
from snapstream.runner.decode_eager import EagerDecode
from snapstream.runner.decode_looped import LoopedDecode
from tests.parity.checkpoints import make_model, save
from tests.parity.test_looped import random_runner

PUBLISHED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
             "modules_to_not_convert": ["lm_head"]}  # fmt: skip
WIDE = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "bias")  # names of what stays as it is
# Parts of a stack begin at whole blocks.
SIZES = {"hidden_size": 144, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2,
         "intermediate_size": 256}  # fmt: skip
# Rotated rows of a head lie within a block, as in the published models.
LATENT_SIZES = {"num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64, "v_head_dim": 64}  # fmt: skip
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5 + 7 * i % 190 for i in range(n)] for n in (90, 1, 17)]


def narrowed(folder: Path, target: Path) -> tuple[Path, Path]:
    """A checkpoint in FP8 blocks of one of floats, and the same numbers as floats."""
    tensors, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    codes, wide = dict[str, Tensor](), dict[str, Tensor]()
    for name, numbers in tensors.items():
        if any(part in name for part in WIDE):
            codes[name] = wide[name] = numbers
            continue
        codes[name], scales = quantise(numbers)
        codes[f"{name}_scale_inv"] = scales
        wide[name] = widen_blocks(codes[name], scales)
    for kind, own in (("fp8", codes), ("wide", wide)):
        (target / kind).mkdir()
        save_file(own, target / kind / "model.safetensors")
        extra = {"quantization_config": PUBLISHED} if kind == "fp8" else {}
        (target / kind / "config.json").write_text(json.dumps(settings | extra))
    return target / "fp8", target / "wide"


@pytest.fixture(scope="module", params=["qwen3", "glm4-moe", "qwen3-moe", "deepseek-v3"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    sizes = SIZES if request.param == "qwen3" else SIZES | {"moe_intermediate_size": 128}
    sizes = sizes | LATENT_SIZES if request.param.startswith("deepseek") else sizes
    folder = save(make_model(request.param, **sizes), tmp_path_factory.mktemp("source"))
    return narrowed(folder, tmp_path_factory.mktemp("both"))


@pytest.mark.parametrize("executor", ["eager", None])
def test_answers_are_those_of_the_wide_twin(both: tuple[Path, Path], executor: str | None) -> None:
    """In fp32, in chunks, alone and in a batch, and with compressed rows; by plain calls and by default."""
    form = Blocks if executor == "eager" or find_compiler() is None else BlockPanels
    answers: list[Any] = []
    for folder in both:
        with LLM(
            folder, dtype="float32", budget=48, chunk_len=32, max_rows=2, max_model_len=128, executor=executor,
            progress=False,
        ) as llm:  # fmt: skip
            weights = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
            kinds = {name for name, weight in weights.matrices.items() if isinstance(weight, form)}
            answers.append([output.token_ids for output in llm.generate(PROMPTS, PARAMS)])
        if folder == both[0]:
            stays = {
                name for name in weights.matrices if name in ("embed", "lm_head", "kv_b")
            }  # kv_b is widened at load
            assert kinds == set(weights.matrices) - stays
            planned = weight_bytes(llm.model_config, "float32", llm.config.weights)
            assert weights.num_bytes == planned or form is BlockPanels  # which fill up rows to 32
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) == len(PROMPTS)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("instructions", instruction_sets())
def test_looped_steps_equal_eager(both: tuple[Path, Path], instructions: InstructionSet) -> None:
    """Over the same numbers row by row; a row's logits are the same bits alone and in a batch."""
    model = read_model_config(both[0])
    forms = WeightForms(layers=WeightForm(width="fp8"), tables=WeightForm(width="float32"))
    own, plain = (
        random_runner(model, forms, "auto", make, 40, 3) for make in (make_panels(load(instructions)), make_weight)
    )
    looped, rows = LoopedDecode(own.step_parts, 1), torch.tensor([3, 0, 4, 2])
    with torch.inference_mode():
        got = looped.logits(rows).clone()
        alone = torch.cat([looped.logits(rows[i : i + 1]).clone() for i in range(len(rows))])
        want = EagerDecode(plain.step_parts).logits(rows)
    looped.close()
    assert torch.equal(alone, got)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation_scheme": "static"}, "activation_scheme is 'static'; read is none or 'dynamic'"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\]; read is \[128, 128\]"),
        ({"weight_block_size": None}, r"weight_block_size is None; read is \[128, 128\]"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'; read is none or 'e4m3'"),
        ({"quant_method": "fbgemm_fp8"}, r"quantization_config is present \(fbgemm_fp8\)"),
    ],
)
def test_other_forms_of_fp8_are_refused(both: tuple[Path, Path], changes: dict[str, Any], reason: str) -> None:
    settings = json.loads((both[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=reason):
        model_config_from_dict(settings | {"quantization_config": PUBLISHED | changes})


def test_refused_widths_and_files(both: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="weights is 'int8'; the checkpoint has fp8 in blocks of 128 by 128: use 'auto'"
    ):
        LLM(both[0], weights="int8", progress=False)
    tensors = load_file(both[0] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    spoiled: dict[str, dict[str, Tensor]] = {
        f"{name} holds NaN": {name: torch.full_like(tensors[name].view(torch.uint8), 127).view(torch.float8_e4m3fn)},
        f"lacks {name}_scale_inv": {f"{name}_scale_inv": torch.empty(0)},
        f"{name} in model.safetensors is stored as F32": {name: tensors[name].float()},
    }
    (tmp_path / "config.json").write_text((both[0] / "config.json").read_text())
    for reason, changed in spoiled.items():
        kept = {key: tensor for key, tensor in (tensors | changed).items() if tensor.numel()}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=reason):
            LLM(tmp_path, progress=False)


def test_parts_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    folder = save(make_model("qwen3", **SIZES | {"intermediate_size": 80}), tmp_path / "source")
    narrow, _ = narrowed(folder, tmp_path)
    with pytest.raises(ValueError, match=r"rows 0 to 80 of an FP8 matrix \[160, 144\] are not whole blocks of 128"):
        LLM(narrow, progress=False)

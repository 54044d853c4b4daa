"""GPTQ, AWQ and the other schemes of compressed-tensors: the numbers of every layout are those that it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from snapstream.config import EngineOptions
from snapstream.config.engine import ParallelConfig
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.llm import LLM
from snapstream.models.checkpoint import load_weights
from snapstream.models.quantize import quantize_checkpoint
from snapstream.models.registry import model_config_from_dict, read_model_config
from snapstream.models.sharding import Share, weight_bytes
from snapstream.plan.fit import weight_formats
from snapstream.types import SamplingParams
from tests.parity.checkpoints import VOCAB, greedy_along, make_model, save

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 1}
PROMPTS = [[3 + (11 * i + 7 * n) % (VOCAB - 10) for i in range(n)] for n in (1, 31, 32, 33, 64, 90, 5)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
EXECUTORS = ["eager"] if find_compiler() is None else ["eager", "looped"]
INT8, INT4 = "int8 in groups of {}", "int4 in groups of {}"


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False} | more


def awq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"} | more


def compressed(kind: str = "pack-quantized", inputs: Any = None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights | more, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}  # fmt: skip


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
# What config.json says, and the format in memory; None: floats.
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "gptq": (gptq(), INT4.format(32)),
    "gptq-v2": (gptq(checkpoint_format="gptq_v2", group_size=64), INT4.format(64)),
    "gptq-row": (gptq(group_size=-1), INT4.format(128)),
    "gptq-8": (gptq(bits=8, group_size=128), INT8.format(128)),
    "gptq-zeros": (gptq(sym=False), INT8.format(32)),
    "gptq-8-zeros": (gptq(sym=False, bits=8), None),
    "gptq-order": (gptq(desc_act=True), None),
    "gptq-small": (gptq(group_size=16), None),
    "awq": (awq(), INT8.format(64)),
    "awq-128": (awq(group_size=128), INT8.format(128)),
    "packed-zeros": (compressed(symmetric=False), INT8.format(32)),
    "packed-row": (compressed(strategy="channel", group_size=None), INT4.format(128)),
    "packed-8-zeros": (compressed(symmetric=False, num_bits=8, strategy="channel", group_size=None), None),
    "packed-order": (compressed(actorder="group"), None),
    "int8-row": (compressed("int-quantized", DYNAMIC, num_bits=8, strategy="channel", group_size=None),
                 INT8.format(128)),
    "fp8-row": (compressed("float-quantized", DYNAMIC | {"type": "float"}, num_bits=8, type="float",
                           strategy="channel", group_size=None), None),
}  # fmt: skip


def words(numbers: list[int], bits: int) -> int:
    """A word of numbers, the first in the lowest bits, as a signed number of 32 bits."""
    whole = sum(number << bits * at for at, number in enumerate(numbers))
    return whole - 2**32 if whole >= 2**31 else whole


def packed(numbers: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned ``numbers [a, b]`` along ``dim`` in words of int32, one after the other."""
    rows = numbers.tolist() if dim == 1 else numbers.T.tolist()
    count = 32 // bits
    turns = range(count) if order is None else order
    out = [[words([row[at + i] for i in turns], bits) for at in range(0, len(row), count)] for row in rows]
    found = torch.tensor(out, dtype=torch.int32)
    return found if dim == 1 else found.T.contiguous()


def quantized(name: str, shape: tuple[int, int], says: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors of a matrix in a layout, and the numbers ``[out, in]`` that they stand for."""
    (num_out, num_in), base = shape, name.removesuffix(".weight")
    weights = says if "bits" in says else says["config_groups"]["group_0"]["weights"]
    bits, size = weights.get("bits", weights.get("num_bits")), weights["group_size"]
    group = num_in if size in (None, -1) else size
    count, most = num_in // group, 2**bits
    has_zeros = not weights.get("sym", weights.get("symmetric", not weights.get("zero_point", False)))
    scales = (torch.rand(num_out, count) + 0.5).mul(0.6 / most).half()
    values = torch.randint(0, most, shape)
    zeros = torch.randint(most // 2 - 3, most // 2 + 4, (num_out, count)) if has_zeros else torch.full(
        (num_out, count), most // 2)  # fmt: skip
    groups = torch.arange(num_in) // group
    if weights.get("desc_act") or weights.get("actorder") == "group":
        groups = groups[torch.randperm(num_in)]
    wide = (values - zeros[:, groups]).float() * scales.float()[:, groups]
    if says["quant_method"] == "gptq":
        shift = 0 if says.get("checkpoint_format") == "gptq_v2" else 1
        return {
            f"{base}.qweight": packed(values.T, bits, 0), f"{base}.qzeros": packed(zeros.T - shift, bits, 1),
            f"{base}.scales": scales.T.contiguous(), f"{base}.g_idx": groups.int(),
            f"{base}.bias": torch.zeros(num_out),
        }, wide  # fmt: skip
    if says["quant_method"] == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            f"{base}.qweight": packed(values.T, 4, 1, order), f"{base}.qzeros": packed(zeros.T, 4, 1, order),
            f"{base}.scales": scales.T.contiguous(),
        }, wide  # fmt: skip
    found = {f"{name}_scale": scales}
    if says["format"] == "float-quantized":
        numbers = (torch.randn(shape) * 8).to(torch.float8_e4m3fn)
        return found | {name: numbers}, numbers.float() * scales.float()
    if says["format"] == "int-quantized":
        return found | {name: (values - 128).to(torch.int8)}, wide
    found |= {f"{name}_packed": packed(values, bits, 1), f"{name}_shape": torch.tensor(shape)}
    found |= {f"{name}_zero_point": packed(zeros, bits, 0)} if has_zeros else {}
    return found | ({f"{name}_g_idx": groups.int()} if weights.get("actorder") else {}), wide


def written(model: str, says: dict[str, Any], target: Path, **more: int) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the numbers that it stands for."""
    folder = save(make_model(model, **SIZES | more), target / "source")
    settings = json.loads((folder / "config.json").read_text())
    torch.manual_seed(3)
    own, wide = dict[str, Tensor](), dict[str, Tensor]()
    for name, numbers in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors, wide[name] = quantized(name, (numbers.shape[0], numbers.shape[1]), says)
            own |= {key: one for key, one in tensors.items() if not (key.endswith("bias") and model == "qwen2")}
        else:
            own[name] = wide[name] = numbers
    for kind, tensors in (("own", own), ("wide", wide)):
        (target / kind).mkdir()
        save_file({key: one.contiguous() for key, one in tensors.items()}, target / kind / "model.safetensors")
        extra = {"quantization_config": says} if kind == "own" else {}
        (target / kind / "config.json").write_text(json.dumps(settings | extra))
    return target / "own", target / "wide"


def answers(folder: Path, **options: Any) -> list[list[int]]:
    settings = {"max_model_len": 128, "chunk_len": 32, "max_rows": 3, "progress": False, "activations": "dtype"}
    settings |= {"kv_dtype": "float32", "budget": "full"}
    with LLM(folder, **settings | options) as llm:
        weights = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
        if llm.config.executor == "eager":
            assert weights.num_bytes == weight_bytes(llm.model_config, "float32", llm.config.weights)
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


# Other widths and groups of what the others have.
ALIKE = {"gptq-v2", "gptq-row", "gptq-8", "gptq-8-zeros", "awq-128", "packed-row", "packed-8-zeros"}


@pytest.mark.parametrize("case", [pytest.param(own, marks=[pytest.mark.slow] * (own in ALIKE)) for own in CASES])
def test_numbers_and_answers(case: str, tmp_path: Path) -> None:
    """Kept as integers where they are the same numbers, else dequantized, with a line that says so."""
    says, form = CASES[case]
    model = {"gptq": "qwen2", "awq": "llama-gqa-tied"}.get(case, "qwen3")
    own, wide = written(model, says, tmp_path)
    config = read_model_config(own)
    stored = config.stored
    assert (stored.quantized and stored.quantized.describe()) == form
    formats = weight_formats(config, EngineOptions(), device="cpu")
    loaded = load_weights(own, config, torch.float32, "cpu", False, formats)
    plain = load_weights(wide, read_model_config(wide), torch.float32, "cpu", False)
    assert all(torch.equal(loaded.stored()[name], numbers) for name, numbers in plain.stored().items())
    if form is None:
        with LLM(own, max_model_len=64, progress=False, executor="eager") as llm:
            assert f"weights: {stored.dequantized[0]} are dequantized as they are read" in "".join(llm.notes)
    with pytest.raises(ValueError, match="is quantized already"):
        quantize_checkpoint(own, tmp_path / "out", stored.quantized)  # type: ignore[arg-type]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    for executor in EXECUTORS:
        for prompt, answer in zip(PROMPTS, answers(own, executor=executor), strict=True):
            assert answer == greedy_along(theirs, prompt, answer)


def test_experts(tmp_path: Path) -> None:
    """Routers stay floats."""
    says = awq(modules_to_not_convert=["gate"])
    own, wide = written("qwen3-moe", says, tmp_path, moe_intermediate_size=64)
    assert read_model_config(own).stored.quantized is not None
    assert answers(own, executor="eager") == answers(wide, executor="eager", weights="float32")


@pytest.mark.parametrize("is_inside", [False, True])
def test_the_text_part_of_a_checkpoint_with_a_tower(is_inside: bool, tmp_path: Path) -> None:
    """As published: the tower stays floats; quantization_config stands beside or in text_config."""
    own, wide = written("qwen3", says := awq(modules_to_not_convert=["visual"]), tmp_path)
    plain = load_weights(wide, read_model_config(wide), torch.float32, "cpu", False)
    text = json.loads((wide / "config.json").read_text())
    around = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    (text if is_inside else around)["quantization_config"] = says
    (own / "config.json").write_text(json.dumps(around))
    config = read_model_config(own)
    assert config.stored.quantized is not None
    formats = weight_formats(config, EngineOptions(), device="cpu")
    loaded = load_weights(own, config, torch.float32, "cpu", False, formats)
    assert all(torch.equal(loaded.stored()[name], numbers) for name, numbers in plain.stored().items())


@pytest.mark.parametrize("case", ["gptq", "gptq-order", "awq", "packed-zeros"])
def test_a_rank_reads_its_shard(case: str, tmp_path: Path) -> None:
    """kv heads of 16 numbers cut through groups, which are floats then: the same numbers."""
    own, wide = written("qwen3", CASES[case][0], tmp_path, head_dim=16, num_key_value_heads=2)
    for rank in range(2):
        found = []
        for folder in (own, wide):
            config = read_model_config(folder)
            formats = weight_formats(config, EngineOptions(), device="cpu")
            share = Share.of(config, ParallelConfig(size=2), rank, formats if folder == own else None)
            found.append(load_weights(folder, config, torch.float32, "cpu", False, formats, share=share).stored())
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*map(dict.values, found), strict=True))


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (gptq(bits=3), "quantization_config.bits is 3; read is 4 or 8"),
        (gptq(group_size=None), "quantization_config.group_size is None; read is -1 .a row. or 8 to"),
        (gptq(group_size=True), "group_size is True"),
        (gptq(dynamic={"-:lm_head": {}}), "quantization_config.dynamic is"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; read is none or 'gptq' or 'gptq_v2'"),
        (gptq(lm_head=True), "quantization_config.lm_head is True"),
        (awq(version="gemv"), "quantization_config.version is 'gemv'"),
        (awq(bits=8), "quantization_config.bits is 8; read is 4"),
        (awq(modules_to_not_convert=["down_proj"]), r"modules_to_not_convert is \['down_proj'\]; every matrix must"),
        (awq(modules_to_not_convert=3), "modules_to_not_convert is 3"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "present .bitsandbytes.; .*its blocks run across"),
        ({"quant_method": "hqq"}, "present .hqq.; of quantized weights compressed-tensors, fp8, gptq, awq are read"),
        (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), "strategy is 'tensor'; read is"),
        (
            compressed("int-quantized", DYNAMIC | {"dynamic": False}, num_bits=8, strategy="channel"),
            "input_activations",
        ),
        (compressed("nvfp4-pack-quantized"), "quantization_config.format is 'nvfp4-pack-quantized'; read is"),
    ],
)
def test_what_is_refused(says: dict[str, Any], reason: str) -> None:
    settings = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 1, "quantization_config": says}
    with pytest.raises(ValueError, match=reason):
        model_config_from_dict(settings)


@pytest.mark.parametrize(
    ("case", "suffix", "change", "reason"),
    [
        ("gptq", "qzeros", lambda x: x + 1, "has zeros other than 8, and quantization_config says that there are none"),
        ("gptq", "g_idx", lambda x: x.flip(0), "is an activation order, and quantization_config has no desc_act"),
        ("gptq", "bias", lambda x: x + 1, "checkpoint holds model.layers.0.mlp.down_proj.bias"),
        ("gptq", "scales", lambda x: x.float().log().mul(0).log(), "scales holds infinity"),
        ("gptq", "qweight", lambda x: x[:-1], r"qweight in model.safetensors has shape \[31, 128\]; the config asks"),
        ("fp8-row", "weight", lambda x: (x.view(torch.uint8) | 127).view(x.dtype), "down_proj.weight holds NaN"),
        ("fp8-row", "weight_scale", lambda x: x.float().mul(0).add(1e38), "down_proj.weight holds infinity as float"),
        ("packed-order", "weight_scale", lambda x: x.float().mul(0).add(1e38), "_scale holds infinity as float32"),
    ],
)
def test_files_that_contradict_their_config(case: str, suffix: str, change: Any, reason: str, tmp_path: Path) -> None:
    own, _ = written("qwen3", CASES[case][0], tmp_path)
    tensors = load_file(own / "model.safetensors")
    name = f"model.layers.0.mlp.down_proj.{suffix}"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, own / "model.safetensors")
    with pytest.raises(ValueError, match=reason):
        load_weights(own, read_model_config(own), torch.float32, "cpu", False)

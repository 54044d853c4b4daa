"""Checkpoints in codes: written whole or not at all, read as the same numbers, refused where they contradict."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.stand_ins import checkpoint_of
from snapstream.cli import main
from snapstream.config import WeightFormat, WeightFormats
from snapstream.kernels.groups import dequantize
from snapstream.llm import LLM
from snapstream.models import quantize
from snapstream.models.checkpoint import load_weights, pack_matrix
from snapstream.models.quantize import quantize_checkpoint
from snapstream.models.registry import read_model_config
from snapstream.models.weights import DecoderWeights
from snapstream.types import SamplingParams
from tests.parity.checkpoints import make_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
INT4, INT8 = WeightFormat(dtype="int4", group=32), WeightFormat(dtype="int8", group=32)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def save(folder: Path, dtype: torch.dtype = torch.float32, name: str = "qwen3", **options: Any) -> Path:
    make_model(name, **SIZES).to(dtype).save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "weights.bin").write_bytes(b"not a settings file")
    return folder


def load(folder: Path, formats: WeightFormats | None = None) -> DecoderWeights:
    return load_weights(folder, read_model_config(folder), torch.float32, "cpu", False, formats)


def numbers_of(folder: Path, formats: WeightFormats | None = None) -> dict[str, Tensor]:
    return checkpoint_of(load(folder, formats))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [INT4, WeightFormat(dtype="int8", group=64)], ids=["int4", "int8"])
def test_round_trip(form: WeightFormat, dtype: torch.dtype, tmp_path: Path) -> None:
    """Kept as codes or widened it is the same model, near the one it was made of; embeddings are untouched."""
    source, target = save(tmp_path / "own", dtype), tmp_path / "codes"
    quantize_checkpoint(source, target, form)
    config = read_model_config(target)
    assert config.stored.quantized == form and config.stored.dtype == str(dtype).removeprefix("torch.")
    formats = WeightFormats(layers=form, tables=WeightFormat(dtype="float32"))
    kept, widened, before = numbers_of(target, formats), numbers_of(target), numbers_of(source)
    assert all(torch.equal(kept[name], widened[name]) for name in widened)
    for name, numbers in before.items():
        if "_proj" not in name:
            assert torch.equal(kept[name], numbers), name
        else:
            most, steps = (127, 0.5) if form.bits == 8 else (8, 1.0)
            step = numbers.abs().unflatten(-1, (-1, form.group)).amax(-1, keepdim=True) / most
            error = (kept[name] - numbers).abs().unflatten(-1, (-1, form.group))
            assert (error <= steps * step * 1.01 + 2**-8 * step * most).all(), name
    if dtype == torch.float32:  # scales lose nothing on the way to the file
        loaded = numbers_of(source, formats)
        assert all(torch.equal(kept[name], loaded[name]) for name in loaded)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((target / "config.json").read_text())["hidden_size"] == 64


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v3-dense"])
def test_attention_in_int8_beside_int4_is_what_quantising_while_loading_gives(name: str, tmp_path: Path) -> None:
    """Bit for bit, in memory and in answers, the model that ``weights="int4"`` makes of the checkpoint of floats."""
    more: dict[str, dict[str, int]] = {
        "qwen3-moe": {"moe_intermediate_size": 32},
        "deepseek-v3-dense": {"kv_lora_rank": 32, "q_lora_rank": 64, "num_attention_heads": 4, "head_dim": 8},
    }
    source, target = tmp_path / "own", tmp_path / "codes"
    make_model(name, **(SIZES | more.get(name, {}))).save_pretrained(source)
    quantize_checkpoint(source, target, INT4, attention=INT8)
    stored = read_model_config(target).stored
    assert (stored.quantized, stored.attention) == (INT4, INT8)
    formats = WeightFormats.of("int4")
    kept, loaded, plain = numbers_of(target, formats), numbers_of(source, formats), numbers_of(source)
    widened = numbers_of(target)
    assert all(torch.equal(kept[key], loaded[key]) for key in kept if "kv_b_proj" not in key)  # which lies wide
    for key, packed in (
        (key, tensor) for file in target.glob("*.safetensors") for key, tensor in load_file(file).items()
    ):
        if key.endswith("_packed"):
            bits = 32 * packed.shape[1] // plain[key.removesuffix("_packed")].shape[1]
            assert bits == (8 if ".self_attn." in key else 4), key
            assert not torch.equal(widened[key.removesuffix("_packed")], plain[key.removesuffix("_packed")])
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers = []
    for folder, executor in ((target, "looped"), (target, "eager"), (source, "looped")):
        with LLM(folder, max_model_len=64, weights="int4", executor=executor, progress=False) as llm:
            answers.append(llm.generate([5, 6, 7, 8], params)[0].token_ids)
            assert llm.config.weights is not None and "attention" in llm.config.weights.describe()
    assert answers[0] == answers[1] and (answers[0] == answers[2] or name.startswith("deepseek"))
    with pytest.raises(
        ValueError, match="the checkpoint has int4 in groups of 32, attention int8 in groups of 32: use"
    ):
        LLM(target, weights="int8", progress=False)


EXPERTS: dict[str, dict[str, int]] = {
    "qwen3-moe": {"moe_intermediate_size": 32, "head_dim": 16},
    "mixtral": {"intermediate_size": 32},
    "deepseek-v3": {"moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "intermediate_size": 64},
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_become_codes_and_routers_stay(name: str, tmp_path: Path) -> None:
    """Each expert's matrices under their own names; what is read is what quantising while loading gives."""
    source, target = tmp_path / "own", tmp_path / "codes"
    make_model(name, hidden_size=64, **EXPERTS[name]).save_pretrained(source, max_shard_size="100KB")
    quantize_checkpoint(source, target, INT4)
    config = read_model_config(target)
    assert config.stored.quantized == INT4
    formats = WeightFormats(layers=INT4, tables=WeightFormat(dtype="float32"))
    kept, widened, loaded = numbers_of(target, formats), numbers_of(target), numbers_of(source, formats)
    plain = numbers_of(source)
    for key, numbers in kept.items():
        assert torch.equal(numbers, widened[key]), key
        if "kv_b_proj" not in key:  # which lies wide in memory, so it is not rounded while loading
            assert torch.equal(numbers, loaded[key]), key
        is_matrix = "_proj" in key or re.search(r"\.w[123]\.", key) is not None
        assert torch.equal(numbers, plain[key]) is not is_matrix, key
    names = {name for file in target.glob("*.safetensors") for name in load_file(file)}
    assert sum(".experts." in name and name.endswith("_packed") for name in names) == sum(
        ".experts." in name for name in plain
    )
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers = []
    for executor in ("looped", "eager"):
        with LLM(target, max_model_len=64, executor=executor, activations="dtype", progress=False) as llm:
            answers.append(llm.generate([5, 6, 7, 8], params)[0].token_ids)
    assert answers[0] == answers[1]


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    source = make_model("gpt-oss-panels", hidden_size=64)
    source.save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="in one tensor, .*: --weights int4"):
        quantize_checkpoint(tmp_path / "own", tmp_path / "codes", INT4)
    assert not (tmp_path / "codes").exists()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers = []
    for executor in ("looped", "eager"):
        with LLM(
            tmp_path / "own", max_model_len=64, weights="int4", executor=executor, activations="dtype", progress=False
        ) as llm:
            answers.append(llm.generate([5, 6, 7, 8], params)[0].token_ids)
    assert answers[0] == answers[1]


def test_shards_and_their_index(tmp_path: Path) -> None:
    source, target = save(tmp_path / "own", max_shard_size="60KB"), tmp_path / "codes"
    told: list[str] = []
    quantize_checkpoint(source, target, INT4, told.append)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert files == sorted(path.name for path in source.glob("*.safetensors")) and len(files) == len(told) > 2
    index = json.loads((target / "model.safetensors.index.json").read_text())
    stored = {name: file for file in files for name in load_file(target / file)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files for t in load_file(target / file).values())
    whole = tmp_path / "whole"
    quantize_checkpoint(save(tmp_path / "one"), whole, INT4)
    first, second = numbers_of(target), numbers_of(whole)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_answers_by_every_width_that_it_may_have(tmp_path: Path) -> None:
    source, target = save(tmp_path / "own"), tmp_path / "codes"
    (source / "tokenizer.json").unlink()
    quantize_checkpoint(source, target, INT4)
    eight = tmp_path / "eight"  # while it loads, int4 rounds less than the form has words for
    quantize_checkpoint(source, eight, WeightFormat(dtype="int8", group=32))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers = {}
    wanted = (
        ("codes", target, "auto"),
        ("int4", target, "int4"),
        ("tables", eight, "int8"),
        ("loaded", source, "int8"),
    )
    for name, folder, weights in wanted:
        with LLM(folder, max_model_len=64, weights=weights, progress=False) as llm:
            assert llm.config.weights is not None
            answers[name] = llm.generate([5, 6, 7, 8], params)[0].token_ids
            tables = llm.config.weights.tables.dtype
        assert tables == ("float32" if name == "codes" else "int8")
    assert answers["tables"] == answers["loaded"]
    with pytest.raises(ValueError, match="weights is 'int8'; the checkpoint has int4 in groups of 32: use 'auto'"):
        LLM(target, weights="int8", progress=False)
    with pytest.raises(ValueError, match="weights is 'bfloat16'; the checkpoint has int4"):
        LLM(target, weights="bfloat16", progress=False)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = save(tmp_path / "own"), tmp_path / "codes"
    assert main(["quantize", str(source), str(target), "--weights", "int4", "--group", "64"]) == 0
    assert capsys.readouterr().out == f"{target}: int4 in groups of 64, attention int8 in groups of 64\n"
    assert main(["plan", str(target), "--json", "--dtype", "float32"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["weights"] == "int4 in groups of 64, attention int8 in groups of 64, embedding and head float32"
    four, eight = WeightFormat(dtype="int4", group=64), WeightFormat(dtype="int8", group=64)
    formats = WeightFormats(layers=four, attention=eight, tables=WeightFormat(dtype="float32"))
    weights = load(target, formats)
    assert weights.dequantized is not None
    assert (plan["weight_bytes"], plan["dequantized_bytes"]) == (weights.num_bytes, weights.dequantized.num_bytes)
    assert main(["quantize", str(target), str(tmp_path / "more")]) == 2
    assert "is quantized already (int4 in groups of 64, attention int8" in capsys.readouterr().err
    uniform = tmp_path / "uniform"
    assert main(["quantize", str(source), str(uniform), "--weights", "int4", "--attention", "int4"]) == 0
    assert capsys.readouterr().out == f"{uniform}: int4 in groups of 32\n"
    assert read_model_config(uniform).stored.attention is None
    assert main(["quantize", str(source), str(tmp_path / "more"), "--group", "48"]) == 2
    assert "group is 48; it must be one of 32, 64, 128" in capsys.readouterr().err
    assert main(["quantize", str(source), str(tmp_path / "more"), "--group", "16"]) == 2
    assert "group is 16; it must be one of 32, 64, 128" in capsys.readouterr().err


def test_nothing_is_left_of_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "own", max_shard_size="60KB")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"{re.escape(str(source))} exists; quantize writes a new folder"):
        quantize_checkpoint(source, source, INT4)
    with pytest.raises(ValueError, match="absent is not a folder; quantize makes codes in it"):
        quantize_checkpoint(source, tmp_path / "absent" / "codes", INT4)
    with pytest.raises(ValueError, match="the rows of qkv have 64 numbers, which must be a multiple of 128"):
        quantize_checkpoint(source, tmp_path / "codes", WeightFormat(dtype="int4", group=128))
    make_model("deepseek-v3", hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
               q_lora_rank=32).save_pretrained(tmp_path / "latents")  # fmt: skip
    with pytest.raises(ValueError, match="the rows of kv_b have 24 numbers"):
        quantize_checkpoint(tmp_path / "latents", tmp_path / "codes", INT4)
    shutil.rmtree(tmp_path / "latents")
    written: list[Path] = []

    def full(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        if written:
            raise OSError(28, "No space left on device")
        save_file(tensors, file, metadata)
        written.append(file)

    monkeypatch.setattr(quantize, "save_file", full)
    with pytest.raises(ValueError, match="codes cannot be written: .* No space left on device"):
        quantize_checkpoint(source, tmp_path / "codes", INT4)
    assert written and sorted(tmp_path.iterdir()) == before


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    source = save(tmp_path / "own")
    tensors = load_file(source / "model.safetensors")
    tensors[Q_PROJ][3, 1] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=f"{Q_PROJ} holds NaN or infinity"):
        quantize_checkpoint(source, tmp_path / "codes", INT4)
    assert not (tmp_path / "codes").exists()


def _other_shape(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}_shape"] = torch.tensor([64, 128])


def _no_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{Q_PROJ}_scale"]


def _zero_points(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}_zero_point"] = torch.zeros(2, 2, dtype=torch.int32)


def _coarse(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}_scale"] = tensors[f"{Q_PROJ}_scale"][:, :1].clone()


def _bytes(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}_packed"] = tensors[f"{Q_PROJ}_packed"].to(torch.int64)


def _plain(tensors: dict[str, Tensor]) -> None:
    tensors[Q_PROJ] = torch.zeros(64, 64)


def _infinite(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}_scale"][0, 0] = 1e6  # infinity as fp16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_shape, rf"{Q_PROJ}_shape holds \[64, 128\]; the config asks for \[64, 64\]"),
        (_no_scales, f"checkpoint lacks {Q_PROJ}_scale"),
        (_zero_points, f"checkpoint holds {Q_PROJ}_zero_point, which Qwen3ForCausalLM does not use"),
        (_coarse, rf"{Q_PROJ}_scale in model.safetensors has shape \[64, 1\]; the config asks for \[64, 2\]"),
        (_bytes, f"{Q_PROJ}_packed in model.safetensors is stored as I64; known: I32"),
        (_plain, f"checkpoint holds {Q_PROJ}, which Qwen3ForCausalLM does not use"),
        (_infinite, f"{Q_PROJ}_scale holds infinity as float16"),
    ],
)
def test_broken_codes(change: Callable[[dict[str, Tensor]], None], words: str, tmp_path: Path) -> None:
    target = tmp_path / "codes"
    quantize_checkpoint(save(tmp_path / "own"), target, INT4)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        load(target)


def test_rows_that_lie_in_another_order(tmp_path: Path) -> None:
    """Latent attention: rotated rows are stored as halves, and some matrices stay wide."""
    sizes = {**SIZES, "num_attention_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 64, "head_dim": 8}
    source, target = tmp_path / "own", tmp_path / "codes"
    make_model("deepseek-v3-dense", **sizes).save_pretrained(source)
    quantize_checkpoint(source, target, INT4)
    widened = numbers_of(target)
    for name, numbers in numbers_of(source).items():
        codes = pack_matrix(name, numbers, INT4) if "_proj" in name else None
        wide = (
            numbers
            if codes is None
            else dequantize(codes[f"{name}_packed"].view(torch.uint8), codes[f"{name}_scale"], 4)
        )
        assert torch.equal(widened[name], wide), name
    kept = numbers_of(target, WeightFormats(layers=INT4, tables=WeightFormat(dtype="float32")))
    assert all(torch.equal(kept[name], widened[name]) for name in widened)


def test_rows_of_zeros_behind_values(tmp_path: Path) -> None:
    """Values smaller than keys (MiMo), read from codes as quantized while loading."""
    source, target = tmp_path / "own", tmp_path / "codes"
    make_model("mimo-v2-panels", intermediate_size=96).save_pretrained(source)
    quantize_checkpoint(source, target, INT4)
    formats = WeightFormats(layers=INT4, tables=WeightFormat(dtype="float32"))
    kept, loaded = (load(folder, formats).stored() for folder in (target, source))
    assert all(torch.equal(kept[name], loaded[name]) for name in kept)
    values = kept["qkv.full"][0, -48:]  # of one kv head: 32 numbers, stored as 48
    assert values[:32].any(-1).all() and not values[32:].any()

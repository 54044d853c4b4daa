"""GGUF files: answers are those of the checkpoint that they were exported from, in every format of their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from snapstream.config import EngineOptions
from snapstream.config.engine import ParallelConfig
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.llm import LLM
from snapstream.models.checkpoint import load_weights
from snapstream.models.registry import read_model_config
from snapstream.models.sharding import Share, weight_bytes
from snapstream.plan.fit import weight_formats
from snapstream.types import SamplingParams
from tests.gguf_files import dequantized, write_gguf
from tests.parity.checkpoints import VOCAB, greedy, make_model, save

LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 34, 47, 63, 64, 65, 66, 90, 96)  # chunks are 32 tokens
PROMPTS = [[3 + (11 * i + 7 * n) % (VOCAB - 10) for i in range(n)] for n in LENGTHS]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
EXECUTORS = ["eager"] if find_compiler() is None else ["eager", "looped"]


def answers(model: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    """In batches of 16, by which the last prompt of 17 waits; checks the bytes that ``plan`` says."""
    settings = {"max_model_len": 128, "chunk_len": 32, "max_rows": 16, "progress": False, "activations": "dtype"}
    with LLM(model, **settings | {"budget": "full"} | options) as llm:
        weights = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
        if llm.config.executor == "eager":  # panels fill their last rows
            assert weights.num_bytes == weight_bytes(llm.model_config, "float32", llm.config.weights)
        return [output.token_ids for output in llm.generate(prompts, PARAMS)]


def wanted(model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [greedy(model, prompt, PARAMS.max_tokens) for prompt in prompts]


ARCHITECTURES = [
    ("llama-mha", {"head_dim": 20}), ("llama-gqa-tied", {"num_attention_heads": 6, "num_key_value_heads": 1}),
    ("llama-llama3", {}), ("llama-linear", {}), ("llama-yarn", {}), ("mistral", {"head_dim": 8}), ("qwen2", {}),
    ("qwen3", {"num_key_value_heads": 1}), ("qwen3-moe", {"num_key_value_heads": 1}),
    ("mixtral", {"num_attention_heads": 6, "num_key_value_heads": 3}), ("gemma3", {"query_pre_attn_scalar": 20}),
    ("gemma3-panels", {"query_pre_attn_scalar": 32}), ("granite", {}), ("olmo2", {}),
    ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}), ("seed-oss", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), ARCHITECTURES, ids=[name for name, _ in ARCHITECTURES])
def test_fp32_is_the_model_of_transformers(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    model = make_model(name, **sizes)
    file = write_gguf(save(model, tmp_path), tmp_path / "model.gguf")
    expected = wanted(model)
    for executor in EXECUTORS:
        assert answers(file, executor=executor) == expected
    assert answers(file, executor="eager", budget=48) == answers(tmp_path, executor="eager", budget=48)


@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss-panels"])
@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "F32"])
def test_gpt_oss_keeps_its_experts(name: str, kind: str, tmp_path: Path) -> None:
    """MXFP4 as stored, in rows of gate and up by turns; the other matrices are floats."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 64,
        "swiglu_limit": 7.0,
    }
    folder = save(make_model(name, **sizes), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", {"exps": "MXFP4", "": kind})
    wide = dequantized(file, folder, tmp_path / "wide")
    model = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    loaded = [
        load_weights(one, config, torch.float32, "cpu", False, weight_formats(config, EngineOptions(), device="cpu"))
        for one, config in ((one, read_model_config(one)) for one in (file, wide))
    ]
    assert loaded[0].matrices["experts_gate_up"].form.is_mxfp4
    for own, theirs in zip(*(one.stored().values() for one in loaded), strict=True):
        assert torch.equal(own, theirs if kind != "Q8_0" else theirs.half().float()) or torch.equal(own, theirs)
    if kind != "Q8_0":  # rounded to fp16
        for executor in EXECUTORS:
            assert answers(file, executor=executor) == wanted(model)
    with pytest.raises(ValueError, match="experts are stored as F16; read of GptOssForCausalLM is MXFP4"):
        read_model_config(write_gguf(folder, tmp_path / "f16.gguf", "F16"))


SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 1}
INT8, INT4, FP16 = "int8 in groups of 32", "int4 in groups of 32", "float16"
KINDS: list[tuple[str, str | dict[str, str], dict[str, str]]] = [  # formats of qkv, down and embed
    ("llama-mha", "Q8_0", {"qkv": INT8, "down": INT8, "embed": INT8}),
    ("qwen3", "Q4_0", {"qkv": INT4, "down": INT4, "embed": INT8}),
    ("llama-gqa-tied", {"attn": "Q8_0", "token": "Q6_K", "": "Q4_0"}, {"qkv": INT8, "down": INT4, "embed": FP16}),
    ("qwen2", {"ffn_down": "IQ4_NL", "ffn": "Q4_0", "": "Q5_0"}, {"qkv": INT8, "down": INT8, "embed": INT8}),
    ("qwen3-moe", "Q8_0", {"qkv": INT8, "experts_down": INT8, "embed": INT8}),
    ("llama-mha", {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token": "Q4_1", "": "Q4_K"},
     {"qkv": FP16, "down": FP16, "embed": FP16}),
    ("qwen3", {"attn": "Q5_1", "ffn_down": "MXFP4", "ffn": "IQ4_XS", "": "Q8_0"},
     {"qkv": FP16, "down": FP16, "embed": FP16}),
    ("qwen3", "BF16", {"qkv": "bfloat16", "down": "bfloat16", "embed": "bfloat16"}),
    ("qwen2", "F16", {"qkv": FP16, "down": FP16, "embed": FP16}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "formats"), KINDS, ids=[f"{name}-{kind}" for name, kind, _ in KINDS])
def test_quantized_tensors_are_the_numbers_of_the_reference(
    name: str, kind: str | dict[str, str], formats: dict[str, str], tmp_path: Path
) -> None:
    """Types that fit integers in groups keep their values; the others are dequantized, with a line that says so."""
    more = {"moe_intermediate_size": 64} if name == "qwen3-moe" else {}
    folder = save(make_model(name, **SIZES | more), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    wide = dequantized(file, folder, tmp_path / "wide")
    with LLM(file, max_model_len=64, progress=False, executor="eager") as llm:
        own = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
        assert {name: own.matrices[name].form.describe() for name in formats} == formats
        lines = [line for line in llm.notes if "dequantized" in line]
        types = llm.model_config.stored.dequantized
        assert [line.partition(" are")[0] for line in lines] == ([f"weights: {', '.join(types)}"] if types else [])
        with LLM(wide, max_model_len=64, progress=False, executor="eager", weights="float32") as twin:
            numbers = twin.engine.runner.decoder.weights.stored()  # type: ignore[attr-defined]
            for key, mine in own.stored().items():
                rounded = numbers[key].half().float() if own.matrices.get(key) and FP16 in formats.values() else 0
                is_kept = torch.equal(mine, numbers[key])
                assert is_kept or (torch.is_tensor(rounded) and torch.equal(mine, rounded)), key
    stored = llm.model_config.stored
    if stored.dequantized and stored.quantized:  # the tables are rounded to fp16
        assert len({str(answers(file, executor=executor)) for executor in EXECUTORS}) == 1
    elif not stored.dequantized:
        model = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
        for executor in EXECUTORS:
            assert answers(file, executor=executor) == wanted(model)
    else:
        for executor in EXECUTORS:
            assert answers(file, executor=executor, weights="float32") == answers(wide, weights="float32")


def test_a_model_in_several_files(tmp_path: Path) -> None:
    folder = save(make_model("qwen3"), tmp_path)
    whole = write_gguf(folder, tmp_path / "whole.gguf", "F16")
    first = write_gguf(folder, tmp_path / "split.gguf", "F16", num_tensors=9)
    assert first.name == "split-00001-of-00004.gguf"
    assert answers(first, PROMPTS[:3]) == answers(whole, PROMPTS[:3])
    second = tmp_path / "split-00002-of-00004.gguf"
    with pytest.raises(ValueError, match="is a part of a model; give its first file, split-00001-of-00004.gguf"):
        read_model_config(second)
    second.unlink()
    with pytest.raises(ValueError, match="1 of 4 files missing: split-00002-of-00004.gguf"):
        read_model_config(first)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_a_rank_reads_its_shard(kind: str, tmp_path: Path) -> None:
    """Slices of quantized blocks are the slices of their numbers; kv heads of 16 numbers cut through groups."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 16, "num_key_value_heads": 2}
    folder = save(make_model("llama-mha", **sizes), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", {"attn_output": "Q8_0", "": kind})
    wide = dequantized(file, folder, tmp_path / "wide")
    two, options = ParallelConfig(size=2), EngineOptions(weights="auto" if kind != "Q6_K" else "float32")
    for rank in range(2):
        loaded = []
        for model in (file, wide):
            config = read_model_config(model)
            formats = weight_formats(config, options, device="cpu")
            share = Share.of(config, two, rank, formats if model == file else None)
            loaded.append(load_weights(model, config, torch.float32, "cpu", False, formats, share=share).stored())
        assert all(torch.equal(mine[: len(own)], own) for mine, own in zip(*map(dict.values, loaded), strict=True))

"""GGUF files: answers are those of the checkpoint that they were exported from, in every format of their tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from snapstream.config import EngineOptions
from snapstream.config.engine import ParallelConfig
from snapstream.config.weights import WeightFormats, WeightsOption
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.llm import LLM
from snapstream.models.checkpoint import load_weights
from snapstream.models.registry import read_model_config, tensor_specs
from snapstream.models.sharding import Share, weight_bytes
from snapstream.models.weights import DecoderWeights
from snapstream.plan.fit import weight_formats
from snapstream.types import SamplingParams
from tests.gguf_files import MODELS, Tensors, dequantized, write_gguf
from tests.parity.checkpoints import VOCAB, greedy_along, make_model, save

LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 34, 47, 63, 64, 65, 66, 90, 96)  # chunks are 32 tokens
PROMPTS = [[3 + (11 * i + 7 * n) % (VOCAB - 10) for i in range(n)] for n in LENGTHS]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
NUMBERED = replace(PARAMS, prompt_logprobs=0)
EXECUTORS = ["eager"] if find_compiler() is None else ["eager", "looped"]


def outputs(model: Path, prompts: list[list[int]], params: SamplingParams = PARAMS, **options: Any) -> Any:
    """In batches of 16, by which the last prompt of 17 waits; checks the bytes that ``plan`` says."""
    settings = {"max_model_len": 128, "chunk_len": 32, "max_rows": 16, "progress": False, "activations": "dtype"}
    with LLM(model, **settings | {"kv_dtype": "float32", "budget": "full"} | options) as llm:
        weights = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
        if llm.config.executor == "eager":  # panels fill their last rows
            assert weights.num_bytes == weight_bytes(llm.model_config, "float32", llm.config.weights)
        return llm.generate(prompts, params)


def answers(model: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    return [output.token_ids for output in outputs(model, prompts, **options)]


def check(file: Path, model: Any, prompts: list[list[int]] = PROMPTS) -> None:
    """Every executor answers as transformers' model."""
    first, *others = (answers(file, prompts, executor=executor) for executor in EXECUTORS)
    assert first == [greedy_along(model, *pair) for pair in zip(prompts, first, strict=True)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", MODELS)
def test_fp32_is_the_folder(name: str, tmp_path: Path) -> None:
    """Log-probabilities of prompts, and greedy tokens. Sums over a head may have another order.

    That the folder answers as transformers' model is a test of every architecture (``test_rows.py``).
    """
    folder = save(make_model(name, **MODELS[name]), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf")
    ours, theirs = (outputs(model, PROMPTS, NUMBERED, executor="eager") for model in (file, folder))
    for mine, own in zip(ours, theirs, strict=True):
        assert mine.token_ids == own.token_ids
        numbers = [[entry.logprob for entry in one.prompt_logprobs[1:]] for one in (mine, own)]
        assert np.allclose(*numbers, atol=1e-3 if name == "qwen3-next" else 1e-4)  # rounding grows in gated DeltaNet
    for executor in EXECUTORS[1:]:
        assert answers(file, executor=executor) == [mine.token_ids for mine in ours]
    assert answers(file, PROMPTS[-3:], budget=48) == answers(folder, PROMPTS[-3:], budget=48)


@pytest.mark.parametrize(("name", "kind"), [("gpt-oss", "Q8_0"), ("gpt-oss", "F32"), ("gpt-oss-panels", "BF16")])
def test_gpt_oss_keeps_its_experts(name: str, kind: str, tmp_path: Path) -> None:
    """MXFP4 as stored, in rows of gate and up by turns; attention and tables in integers, too, or floats."""
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
    matrices = loaded[0].matrices
    assert matrices["experts_gate_up"].form.is_mxfp4
    others = {matrices[name].form.describe() for name in ("qkv", "o", "embed")}
    assert others == {{"Q8_0": INT8, "F32": "float32", "BF16": "bfloat16"}[kind]}
    for own, theirs in zip(*(one.stored().values() for one in loaded), strict=True):
        assert torch.equal(own, theirs)
    check(file, model, PROMPTS[::4])
    fine = read_model_config(write_gguf(folder, tmp_path / "fine.gguf", {"exps": "MXFP4", "": "Q5_1"})).stored
    assert fine.dequantized == ("Q5_1",) and fine.attention is None is fine.tables
    with pytest.raises(ValueError, match="experts are stored as F16; read of GptOssForCausalLM is MXFP4"):
        read_model_config(write_gguf(folder, tmp_path / "f16.gguf", "F16"))


SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 1}
INT8, INT4, FP16 = "int8 in groups of 32", "int4 in groups of 32", "float16"
UINT4, Q3, Q4, Q5, Q6, IQ4 = "uint4 in groups of 32", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"
MIXED = "qkv.q4_k-32+q4_k-32+q6_k-16"
KINDS: list[tuple[str, str | dict[str, str], dict[str, str]]] = [  # formats of qkv, down and embed
    ("llama-mha", "Q8_0", {"qkv": INT8, "down": INT8, "embed": INT8}),
    ("qwen3", "Q4_0", {"qkv": INT4, "down": INT4, "embed": INT8}),
    ("llama-gqa-tied", {"attn": "Q8_0", "token": "Q6_K", "": "Q4_0"}, {"qkv": INT8, "down": INT4, "embed": Q6}),
    ("llama-gqa-tied", {"token": "Q4_1", "": "Q4_0"}, {"qkv": INT4, "down": INT4, "embed": UINT4}),
    ("qwen3", {"token": "Q5_1", "": "Q4_0"}, {"qkv": INT4, "down": INT4, "embed": FP16}),
    ("llama-mha", {"attn": "Q4_0", "output.": "Q6_K", "": "Q4_0"},
     {"qkv": INT4, "down": INT4, "embed": INT4, "lm_head": Q6}),
    ("qwen3", "Q6_K", {"qkv": Q6, "down": Q6, "embed": Q6}),
    ("qwen2", {"attn_v": "Q6_K", "ffn_gate": "Q5_0", "ffn_up": "Q6_K", "attn": "Q8_0", "": "Q4_0"},
     {"qkv.int8-32+int8-32+q6_k-16.0": INT8, "qkv.int8-32+int8-32+q6_k-16.1": Q6, "gate_up": INT8, "down": INT4,
      "embed": INT8}),
    ("llama-gqa-tied", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token": "Q6_K", "": "Q4_K"},
     {f"{MIXED}.0": Q4, f"{MIXED}.1": Q6, "o": Q4, "gate_up": Q4, "down": Q6, "embed": Q6}),
    # As llama.cpp's Q4_K_M mixes them.
    ("llama-mha", {"0.attn_v": "Q6_K", "0.ffn_down": "Q6_K", "attn_output": "Q4_K", "output": "Q6_K", "": "Q4_K"},
     {f"{MIXED}.0": Q4, f"{MIXED}.1": Q6, "qkv.q4_k-32": Q4, "down.q6_k-16": Q6, "down.q4_k-32": Q4, "o": Q4,
      "gate_up": Q4, "embed": Q4, "lm_head": Q6}),
    ("lfm2", {"0.ffn_down": "Q6_K", "token": "Q6_K", "": "Q4_K"},
     {"qkv": Q4, "o": Q4, "gate_up": Q4, "down.q6_k-16": Q6, "down.q4_k-32": Q4, "embed": Q6}),
    ("qwen2", {"0.ffn": "Q4_0", "attn_k": "Q8_0", "ffn_gate": "Q6_K", "attn_output": "Q4_1", "": "Q4_K"},
     {"qkv": INT8, "o": UINT4, "gate_up.int4-32": INT4, "gate_up": INT8, "embed": Q4}),
    ("qwen3-moe", {"0.attn_v": "Q6_K", "0.ffn_down": "Q6_K", "": "Q4_K"},
     {f"{MIXED}.0": Q4, "qkv.q4_k-32": Q4, "experts_gate_up": Q4, "experts_down.q6_k-16": Q6,
      "experts_down.q4_k-32": Q4}),
    ("qwen3-moe", {"1.ffn_down": "Q8_0", "0.ffn_gate": "Q4_1", "0.ffn_up": "Q4_1", "ffn_gate": "Q6_K", "": "Q4_0"},
     {"experts_gate_up.uint4-32": UINT4, "experts_gate_up": INT8, "experts_down.int4-32": INT4,
      "experts_down.int8-32": INT8}),
    ("qwen2", {"ffn_down": "IQ4_NL", "ffn": "Q4_0", "": "Q5_0"}, {"qkv": INT8, "down": INT8, "embed": INT8}),
    ("qwen3-moe", "Q8_0", {"qkv": INT8, "experts_down": INT8, "embed": INT8}),
    ("qwen3-moe", "Q6_K", {"qkv": Q6, "experts_down": Q6, "embed": Q6}),
    ("llama-mha", {"attn_v": "IQ1_S", "ffn_down": "Q5_1", "token": "Q4_1", "": "Q4_K"},
     {"qkv.q4_k-32+q4_k-32+other.0": Q4, "qkv.q4_k-32+q4_k-32+other.1": INT8, "down": INT8, "embed": UINT4,
      "lm_head": Q4}),
    ("qwen3-moe", "Q4_K", {"qkv": Q4, "experts_gate_up": Q4, "experts_down": Q4, "embed": Q4}),
    # As llama.cpp's Q5_K_M, Q3_K_M and IQ4_XS mix them.
    ("llama-mha", {"0.attn_v": "Q6_K", "0.ffn_down": "Q6_K", "attn_output": "Q5_K", "output": "Q6_K", "": "Q5_K"},
     {"qkv.q5_k-32+q5_k-32+q6_k-16.0": Q5, "qkv.q5_k-32": Q5, "down.q6_k-16": Q6, "down.q5_k-32": Q5, "o": Q5,
      "gate_up": Q5, "embed": Q5, "lm_head": Q6}),
    ("qwen3", {"0.attn_v": "Q5_K", "attn_v": "Q4_K", "0.ffn_down": "Q5_K", "ffn_down": "Q4_K", "attn_output": "Q4_K",
     "token": "Q6_K", "": "Q3_K"},
     {"qkv.q3_k-16+q3_k-16+q5_k-32.0": Q3, "qkv.q3_k-16+q3_k-16+q4_k-32.1": Q4, "gate_up": Q3, "down.q5_k-32": Q5,
      "down.q4_k-32": Q4, "o": Q4, "embed": Q6}),
    ("qwen3-moe", {"0.attn_v": "Q5_K", "token": "Q6_K", "": "IQ4_XS"},
     {"qkv.iq4_xs-32+iq4_xs-32+q5_k-32.0": IQ4, "experts_gate_up": IQ4, "experts_down": IQ4, "embed": Q6}),
    # As llama.cpp's Q2_K, IQ3_XXS, IQ2_M and IQ2_XXS do.
    ("qwen3", {"attn_v": "Q4_K", "ffn_down": "Q3_K", "attn_output": "Q3_K", "token": "Q6_K", "": "Q2_K"},
     {"qkv.q2_k-16+q2_k-16+q4_k-32.0": "q2_k", "o": Q3, "gate_up": "q2_k", "down": Q3, "embed": Q6}),
    ("llama-gqa-tied", {"attn_output": "IQ3_S", "attn_v": "IQ3_S", "attn": "IQ2_S", "0.ffn_down": "Q4_K",
     "ffn_down": "Q3_K", "token": "Q2_K", "": "IQ3_XXS"},
     {"qkv.iq2_s-16+iq2_s-16+iq3_s-32.0": "iq2_s", "qkv.iq2_s-16+iq2_s-16+iq3_s-32.1": "iq3_s", "o": "iq3_s",
      "gate_up": "iq3_xxs", "down.q4_k-32": Q4, "down.q3_k-16": Q3, "embed": "q2_k"}),
    ("qwen3-moe", {"attn_v": "Q4_K", "attn": "IQ2_XS", "0.ffn_down": "Q2_K", "token": "IQ3_S", "": "IQ2_XXS"},
     {"o": "iq2_xs", "experts_gate_up": "iq2_xxs", "experts_down.q2_k-16": "q2_k", "experts_down.iq2_xxs-32": "iq2_xxs",
      "embed": "iq3_s"}),
    ("qwen3", {"attn": "Q5_1", "ffn_down": "MXFP4", "ffn": "IQ1_S", "": "Q8_0"},
     {"qkv": INT8, "down": INT8, "embed": INT8}),
    ("qwen3", "BF16", {"qkv": "bfloat16", "down": "bfloat16", "embed": "bfloat16"}),
    ("qwen2", "F16", {"qkv": FP16, "down": FP16, "embed": FP16}),
    ("qwen3", {"attn_v": "F16", "0.ffn_down": "F16", "": "Q4_K"},
     {"qkv.q4_k-32+q4_k-32+other.0": Q4, "qkv.q4_k-32+q4_k-32+other.1": FP16, "down": FP16, "down.q4_k-32": Q4}),
    ("qwen3", {"attn_q": "F32", "": "Q6_K"}, {"qkv.other+q6_k-16+q6_k-16.0": "float32", "down": Q6, "embed": Q6}),
]  # fmt: skip


def numbers_of(weights: DecoderWeights) -> dict[tuple[str, int | None], torch.Tensor]:
    """Numbers that an engine computes with, by name and layer."""
    found: dict[tuple[str, int | None], torch.Tensor] = {}
    for name, spec in tensor_specs(weights.config).items():
        if not spec.per_layer:
            found[name, None] = weights.stored()[name]
    for layer in range(weights.config.num_layers):
        own = weights.layer(layer)
        found |= {(name, layer): matrix.dense() for name, matrix in own.matrices.items()}
        found |= {(name, layer): vector for name, vector in own.vectors.items()}
    return found


def weights_of(folder: Path, width: Any) -> dict[tuple[str, int | None], torch.Tensor]:
    with LLM(folder, max_model_len=64, progress=False, executor="eager", weights=width) as llm:
        return numbers_of(llm.engine.runner.decoder.weights)  # type: ignore[attr-defined]


QUICK = {
    2,
    8,
    10,
    12,
    20,
    21,
    22,
    23,
    24,
    25,
    26,
    28,
    29,
}  # without the slow tests: one of each family, and each way to read a tensor


@pytest.mark.parametrize(
    ("name", "kind", "formats"),
    [pytest.param(*own, marks=[pytest.mark.slow] * (index not in QUICK)) for index, own in enumerate(KINDS)],
    ids=[f"{name}-{kind}" for name, kind, _ in KINDS],
)
def test_quantized_tensors_are_the_numbers_of_the_reference(
    name: str, kind: str | dict[str, str], formats: dict[str, str], tmp_path: Path
) -> None:
    """Types that fit integers in groups keep their values; the others are dequantized and layers of them int8, with a
    line that says so.
    """
    more: dict[str, Any] = {"lfm2": {"block_auto_adjust_ff_dim": False, "conv_bias": False}}.get(name, {})
    if name == "qwen3-moe":
        more = {"moe_intermediate_size": 64 if kind == "Q8_0" else 256}
    folder = save(make_model(name, **SIZES | more), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    wide = dequantized(file, folder, tmp_path / "wide")
    with LLM(file, max_model_len=64, progress=False, executor="eager") as llm:
        own = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
        assert {name: own.matrices[name].form.describe() for name in formats} == formats
        lines = [line for line in llm.notes if "dequantized" in line]
        assert llm.config.weights is not None
        types = llm.model_config.stored.dequantized_in(llm.config.weights)
        assert [line.partition(" are")[0] for line in lines] == ([f"weights: {', '.join(types)}"] if types else [])
        numbers, again = (weights_of(wide, width) for width in ("float32", "int8"))
        assert numbers_of(own).keys() == numbers.keys()
        for key, mine in numbers_of(own).items():
            wanted_rows = numbers[key]
            is_kept = (mine == wanted_rows).flatten(1).all(1) if mine.dim() > 1 else mine == wanted_rows
            rounded = again[key] if types and key[0] != "embed" else wanted_rows.half().float()
            assert is_kept.all() or torch.equal(mine[~is_kept], rounded[~is_kept]), key
            assert is_kept.any() or types, key
    stored, prompts = llm.model_config.stored, PROMPTS[::4]
    if types and stored.quantized:  # the tables are rounded to fp16
        assert len({str(answers(file, prompts, executor=executor)) for executor in EXECUTORS}) == 1
    elif not types:
        model = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
        check(file, model, prompts)
    else:
        theirs = answers(wide, prompts, weights="float32")
        for executor in EXECUTORS:
            assert answers(file, prompts, executor=executor, weights="float32") == theirs
        assert len({str(answers(file, prompts, executor=executor)) for executor in EXECUTORS}) == 1


BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64}
DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
KDA = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": None}
LAYERS: list[tuple[str, str | dict[str, str], dict[str, Any], dict[str, str]]] = [  # formats of matrices
    ("qwen3.5", "Q4_0", DELTA, {"delta_in": INT4, "delta_gates": "float32", "delta_out": INT4, "qkv": INT4}),
    ("qwen3.5", "Q8_0", DELTA | {"linear_value_head_dim": 16}, {"delta_in": INT8, "delta_out": INT8}),
    ("qwen3-next", {"attn_gate": "Q4_1", "": "Q5_1"}, DELTA | EXPERTS | {"shared_expert_intermediate_size": 96},
     {"delta_in": INT8, "experts_down": INT8}),
    ("qwen3-next", {"attn_gate": "Q4_0", "": "Q8_0"}, DELTA | EXPERTS | {"shared_expert_intermediate_size": 96},
     {"delta_in": INT8, "experts_down": INT8, "shared_down": INT8, "delta_gates": "float32"}),
    ("deepseek-v3.2", {"attn_k_b": "F16", "indexer": "F32", "": "Q8_0"},
     EXPERTS | {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32, "head_dim": None},
     {"q": INT8, "q_a": INT8, "kv_b": "float32", "experts_down": INT8}),
    ("granite-hybrid-moe", "Q4_0", {"mamba_d_head": 128, "mamba_n_heads": 6, "intermediate_size": 64,
     "shared_intermediate_size": 96}, {"mamba_in": INT4, "mamba_out": INT4, "shared_gate_up": INT4, "qkv": INT4}),
    ("falcon-h1", "Q8_0", {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
     {"mamba_in": INT8, "mamba_out": INT8, "qkv": INT8, "gate_up": INT8, "down": INT8}),
    ("lfm2-moe", "Q8_0", EXPERTS, {"conv_in": INT8, "experts_gate_up": INT8, "qkv": INT8}),
    ("phi3-window", "IQ4_NL", {}, {"qkv": INT8, "gate_up": INT8}),
    ("glm4-moe", "Q4_0", EXPERTS, {"qkv": INT4, "experts_gate_up": INT4, "shared_down": INT4}),
    ("minimax-m2", "Q4_K", {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 256},
     {"qkv": Q4, "experts_down": Q4}),
    ("qwen3.5", {"ssm_out": "Q4_K", "": "Q4_K"}, DELTA | {"linear_value_head_dim": 128, "head_dim": 64},
     {"delta_in": Q4, "delta_out": UINT4, "qkv": Q4}),
    ("qwen3.5", "Q4_1", DELTA, {"delta_in": UINT4, "delta_out": UINT4, "qkv": UINT4}),
    ("glm4-moe", {"1.ffn_down": "Q8_0", "": "Q4_1"}, EXPERTS | {"num_hidden_layers": 3},
     {"down": UINT4, "experts_down.int8-32": INT8, "experts_down.uint4-32": UINT4, "shared_down.int8-32": INT8,
      "shared_down.uint4-32": UINT4, "shared_gate_up": UINT4}),
    ("gemma4-shared", {"per_layer_model": "F16", "": "Q8_0"}, {},
     {"qkv": INT8, "down": INT8, "per_layer_gate": INT8, "per_layer_in": FP16, "embed_per_layer": INT8}),
    ("gemma4-panels", {"per_layer_model": "BF16", "per_layer_token": "Q5_K", "token": "Q6_K", "": "Q4_0"},
     {"global_head_dim": 64, "hidden_size_per_layer_input": 256}, {"qkv": INT4, "down": INT4, "embed": Q6,
     "embed_per_layer": Q5}),
    # llama.cpp leaves these as they were.
    ("gemma3n", {"altup": "F16", "laurel": "F16", "per_layer_model": "F16", "": "Q8_0"},
     {"hidden_size_per_layer_input": 32},
     {"streams_in": FP16, "laurel_in": FP16, "embed": INT8, "embed_per_layer": INT8, "qkv": INT8}),
    ("nemotron-3", {"attn_v": "Q6_K", "token": "Q6_K", "": "Q4_K"},
     {"mamba_head_dim": 64, "mamba_num_heads": 8, "moe_intermediate_size": 256, "num_attention_heads": 8,
      "moe_shared_expert_intermediate_size": 512},
     {"mamba_in": Q4, "mamba_out": Q4, "experts_down": Q4, "embed": Q6, f"{MIXED}.1": Q6}),
    ("starcoder2", {"attn_v": "Q6_K", "": "Q4_K"}, {"num_attention_heads": 8}, {f"{MIXED}.1": Q6, "down": Q4}),
    ("gemma4-moe", "Q4_0", EXPERTS, {"qkv": INT4, "down": INT4, "experts_gate_up": INT4, "experts_down": INT4}),
    ("laguna", "Q4_0", EXPERTS | {"shared_expert_intermediate_size": 96},
     {"qkv": INT4, "experts_down": INT4, "shared_down": INT4}),
    ("step3.7", {"attn_v": "Q6_K", "": "Q4_K"}, {"moe_intermediate_size": 256, "share_expert_dim": 512,
     "num_attention_heads": 8, "num_sliding_attention_heads": 16}, {"experts_down": Q4, "shared_gate_up": Q4}),
    ("llama4", "Q8_0", {"intermediate_size": 64, "intermediate_size_mlp": 96},
     {"qkv": INT8, "down": INT8, "experts_down": INT8, "shared_down": INT8}),
    ("hunyuan-moe", "Q4_1", {"intermediate_size": 64}, {"qkv": UINT4, "experts_gate_up": UINT4}),
    ("qwen3.5", {"0.ssm_out": "Q8_0", "attn_gate": "Q8_0", "": "Q4_1"}, DELTA | {"num_hidden_layers": 4},
     {"delta_in": INT8, "delta_out.int8-32": INT8, "delta_out.uint4-32": UINT4}),
    ("deepseek-v2-lite", {"1.attn_kv_a_mqa": "Q8_0", "1.ffn_down": "Q8_0", "attn_k_b": "F16", "": "Q4_1"},
     EXPERTS | {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "head_dim": None, "num_hidden_layers": 3},
     {"kv_a.int8-32": INT8, "kv_a.uint4-32": UINT4, "experts_down.int8-32": INT8, "experts_down.uint4-32": UINT4}),
    ("kimi-linear", {"attn_k_b": "F16", "": "Q8_0"}, EXPERTS | KDA | {"q_lora_rank": 64, "linear_head_dim": 32},
     {"delta_in": INT8, "delta_gates": "float32", "q": INT8, "delta_out": INT8, "experts_down": INT8}),
    # Queries and gates of latent attention are one matrix; of delta attention q, k, v and gates.
    ("ling3", {"attn_v": "Q6_K", "attn_k_b": "F16", "": "Q4_K"},
     KDA | {"moe_intermediate_size": 256, "kv_lora_rank": 256, "linear_head_dim": 64, "v_head_dim": 64},
     {"delta_in": INT8, "delta_out": Q4, "q": Q4, "kv_a": Q4, "experts_gate_up": Q4}),
    ("mistral4", {"attn_k_b": "F16", "": "Q4_1"}, EXPERTS | KDA | {"q_lora_rank": 64},
     {"q": UINT4, "kv_a": UINT4, "experts_gate_up": UINT4}),
    ("mimo-v2", "Q4_0", EXPERTS | {"head_dim": 36, "v_head_dim": 32},
     {"qkv": INT4, "qkv.full": INT4, "o": INT4, "experts_down": INT4}),
    ("minimax-m3-panels", "Q4_1",
     {"intermediate_size": 64, "shared_intermediate_size": 64, "dense_intermediate_size": 96},
     {"qkv": UINT4, "down": UINT4, "experts_down": UINT4, "shared_gate_up": UINT4}),
    ("granite-moe-swa", {"attn_v": "Q6_K", "": "Q4_K"},
     {"num_attention_heads": 8, "intermediate_size": 256, "shared_intermediate_size": 512},
     {f"{MIXED}.1": Q6, "experts_gate_up": Q4, "shared_gate_up": Q4, "shared_down": Q4}),
    ("cohere-plus", "Q8_0", {"hidden_size": 256, "head_dim": 64}, {"qkv": INT8, "down": INT8}),
    ("cohere2-moe", "Q8_0", {"intermediate_size": 64, "prefix_dense_intermediate_size": 96},
     {"qkv": INT8, "down": INT8, "experts_gate_up": INT8, "shared_down": INT8}),
    ("apertus", "Q6_K", {"num_attention_heads": 8}, {"qkv": Q6, "gate_up": Q6, "down": Q6, "embed": Q6}),
    ("glm", "Q5_0", {"num_attention_heads": 8}, {"qkv": INT8, "gate_up": INT8}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "sizes", "formats"), LAYERS, ids=[f"{one[0]}-{one[1]}" for one in LAYERS])
def test_quantized_layers_of_every_kind(
    name: str, kind: str | dict[str, str], sizes: dict[str, Any], formats: dict[str, str], tmp_path: Path
) -> None:
    """The numbers of a file that holds them in fp32, whatever order the file has them in."""
    own = {key: value for key, value in (MODELS[name] | BLOCKS | sizes).items() if value is not None}
    folder = save(make_model(name, **own), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    wide = write_gguf(folder, tmp_path / "wide.gguf", numbers_of=file)
    model = read_model_config(file)
    types = model.stored.dequantized_in(weight_formats(model, EngineOptions(), device="cpu"))
    with LLM(file, max_model_len=64, progress=False, executor="eager") as llm:
        weights = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
        assert {key: weights.matrices[key].form.describe() for key in formats} == formats
        numbers = [weights_of(wide, width) for width in ("float32", *["int8"] * bool(types))]
        for key, mine in numbers_of(weights).items():
            wanted = [*(own[key] for own in numbers), numbers[0][key].half().float()]
            assert any(torch.equal(mine, own) for own in wanted), key
    assert len({str(answers(file, PROMPTS[::4], executor=executor)) for executor in EXECUTORS}) == 1


@pytest.mark.parametrize(
    ("kind", "form"), [("Q8_0", INT8), ("Q5_0", INT8), ("Q6_K", Q6), ("Q5_K", Q5), ("Q4_1", UINT4)]
)
def test_a_quantized_embedding_whose_rows_are_normed(kind: str, form: str, tmp_path: Path) -> None:
    """Muse Glimmer's keeps its integers; the norm of a row is in its scales, which are fp16."""
    folder = save(make_model("muse-glimmer-panels", **MODELS["muse-glimmer-panels"] | BLOCKS), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", {"token": kind, "": "F32"})
    wide = write_gguf(folder, tmp_path / "wide.gguf", numbers_of=file)
    with LLM(file, max_model_len=64, progress=False, executor="eager") as llm:
        embed = llm.engine.runner.decoder.weights.matrices["embed"]  # type: ignore[attr-defined]
        assert embed.form.describe() == form
        torch.testing.assert_close(embed.dense(), weights_of(wide, "float32")["embed", None], rtol=0, atol=4e-3)
    assert len({str(answers(file, PROMPTS[::4], executor=executor)) for executor in EXECUTORS}) == 1


def joined(found: Tensors) -> Tensors:
    """Gate and up of all experts in one tensor, as newer files have them."""
    out = {name: own for name, own in found.items() if "gate_exps" not in name and "up_exps" not in name}
    for name, own in found.items():
        if "gate_exps" in name:
            both = own, found[name.replace("gate_exps", "up_exps")]
            out[name.replace("gate_exps", "gate_up_exps")] = np.concatenate(both, 1)
    return out


def whole(found: Tensors) -> Tensors:
    """Keys and values of latents in one tensor, as older files have them."""
    out = {name: own for name, own in found.items() if "_k_b." not in name and "_v_b." not in name}
    for name, own in found.items():
        if "attn_k_b" in name:
            both = own.swapaxes(1, 2), found[name.replace("attn_k_b", "attn_v_b")]
            out[name.replace("attn_k_b", "attn_kv_b")] = np.concatenate(both, 1).reshape(-1, own.shape[1])
    return out


def fused(found: Tensors) -> Tensors:
    """Queries, keys and values in one tensor, as in files of ChatGLM and with the converter's option for it."""
    out = {name: own for name, own in found.items() if not any(part in name for part in ("_q.", "_k.", "_v."))}
    for name in found:
        if "attn_q." in name:
            out[name.replace("_q.", "_qkv.")] = np.concatenate(
                [found[name.replace("_q.", f"_{one}.")] for one in "qkv"]
            )
    return out


def predicting(found: Tensors) -> Tensors:
    """A last layer that predicts another token."""
    return found | {name.replace("blk.1.", "blk.3."): own for name, own in found.items() if "blk.1." in name}


@pytest.mark.parametrize(
    ("name", "change", "more"),
    [
        ("qwen3-moe", joined, {}),
        ("deepseek-v3", whole, {}),
        ("glm", fused, {}),
        ("qwen2", fused, {}),
        ("llama-gqa-tied", fused, {}),
        ("exaone4", fused, {}),
        ("glm4-lite", predicting, {"block_count": 4, "nextn_predict_layers": 1}),
    ],
)
def test_other_layouts_of_a_file(
    name: str, change: Callable[[Tensors], Tensors], more: dict[str, Any], tmp_path: Path
) -> None:
    folder = save(make_model(name, **MODELS[name]), tmp_path)
    files = [
        write_gguf(folder, tmp_path / "plain.gguf"),
        write_gguf(folder, tmp_path / "other.gguf", change=change, more=more),
    ]
    assert len({str(answers(file, PROMPTS[::4], executor="eager")) for file in files}) == 1


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("qwen2", "Qwen2VLForConditionalGeneration"),
        ("qwen3", "Qwen3VLForConditionalGeneration"),
        ("qwen3-moe", "Qwen3VLMoeForConditionalGeneration"),
        ("glm4", "Glm46VForConditionalGeneration"),
        ("glm4-moe", "Glm4vMoeForConditionalGeneration"),
    ],
)
def test_models_that_see(name: str, own: str, tmp_path: Path) -> None:
    """Their files are those of the text part, with settings for pictures."""
    folder = save(make_model(name, **MODELS[name]), tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").symlink_to(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | {"architectures": [own]}
    (other / "config.json").write_text(json.dumps(settings))
    more = {"rope.dimension_sections": [4, 3, 3, 0], "n_deepstack_layers": 3}
    file = write_gguf(other, tmp_path / "model.gguf", more=more)
    assert answers(file, PROMPTS[::4], executor="eager") == answers(folder, PROMPTS[::4], executor="eager")


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q6_K", {"attn_v": "Q6_K", "ffn_down": "Q5_K", "output": "Q6_K", "": "Q4_K"}])
def test_two_ranks(kind: str | dict[str, str], tmp_path: Path) -> None:
    """Each reads its rows and whole blocks of its columns."""
    folder = save(make_model("llama-mha", **SIZES | {"num_key_value_heads": 2, "head_dim": 128}), tmp_path / "model")
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    found = []
    for ranks in (1, 2):
        with LLM(file, tensor_parallel=ranks, max_model_len=64, progress=False) as llm:
            outputs = llm.generate([[5, 6, 7, 8, 9], [11, 12, 13]], SamplingParams(max_tokens=12, temperature=0.0))
            found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(("width", "layers", "tables", "line"), [
    ("auto", Q6, Q6, None),
    ("int8", INT8, INT8, f"layers are kept in {INT8}"),
    ("int4", INT4, INT8, f"layers are kept in {INT4}"),
    ("float32", "float32", "float32", "layers are kept in float32"),
])  # fmt: skip
def test_another_format_than_that_of_the_file(
    width: str, layers: str, tables: str, line: str | None, tmp_path: Path
) -> None:
    """K-quants are read as floats, and as these quantized where that is asked for."""
    folder = save(make_model("llama-mha", **SIZES), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", {"ffn_down": "Q8_0", "": "Q6_K"})
    wide = dequantized(file, folder, tmp_path / "wide")
    options: dict[str, Any] = {"max_model_len": 64, "progress": False, "executor": "eager"}
    with (
        LLM(file, weights=width, **options) as llm,
        LLM(wide, weights="float32" if width == "auto" else width, **options) as twin,
    ):
        own, theirs = (one.engine.runner.decoder.weights for one in (llm, twin))  # type: ignore[attr-defined]
        assert own.matrices["gate_up"].form.describe() == layers
        assert own.matrices["embed"].form.describe() == own.matrices["lm_head"].form.describe() == tables
        for key, mine in own.stored().items():
            assert torch.equal(mine, theirs.stored()[key]), key
        notes = [note.partition(" (--")[0] for note in llm.notes if "dequantized" in note]
        assert notes == ([f"weights: Q6_K, Q8_0 are dequantized as they are read; {line}"] if line else [])
    on_gpu = weight_formats(llm.model_config, EngineOptions(dtype="bfloat16"), device="cuda")
    assert on_gpu.describe() == "bfloat16"
    assert llm.model_config.stored.dequantized_in(on_gpu) == ("Q6_K", "Q8_0")


@pytest.mark.parametrize(
    ("kind", "width"),
    [("Q4_0", "auto"), ("Q8_0", "auto"), ("Q6_K", "auto"), ("Q6_K", "float32"), ("Q4_K", "auto"), ("Q4_K", "int8")],
)  # fmt: skip
def test_a_rank_reads_its_shard(kind: str, width: WeightsOption, tmp_path: Path) -> None:
    """Slices of quantized blocks are the slices of their numbers; kv heads of 16 numbers cut through groups."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 16, "num_key_value_heads": 2}
    folder = save(make_model("llama-mha", **sizes), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", {"attn_output": "Q8_0", "": kind})
    wide = dequantized(file, folder, tmp_path / "wide")
    two, options = ParallelConfig(size=2), EngineOptions(weights=width)
    for rank in range(2):
        loaded = []
        for model in (file, wide):
            config = read_model_config(model)
            formats = weight_formats(config, options, device="cpu")
            if model == wide and width == "auto" and kind.endswith("K"):  # whose codes do not reach 127
                formats = WeightFormats.of("float32")
            share = Share.of(config, two, rank, formats if model == file else None)
            loaded.append(load_weights(model, config, torch.float32, "cpu", False, formats, share=share).stored())
        assert all(torch.equal(mine[: len(own)], own) for mine, own in zip(*map(dict.values, loaded), strict=True))


def test_a_rank_whose_shard_is_padding(tmp_path: Path) -> None:
    """Three blocks of 256 inner numbers leave none for the fourth rank."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64}
    file = write_gguf(save(make_model("llama-mha", **sizes), tmp_path), tmp_path / "model.gguf", "Q4_K")
    config = read_model_config(file)
    formats = weight_formats(config, EngineOptions(), device="cpu")
    share = Share.of(config, ParallelConfig(size=4), 3, formats)
    found = load_weights(file, config, torch.float32, "cpu", False, formats, share=share).stored()
    assert found["gate_up"].shape[1:] == (512, 256) and found["o"].any()
    assert not found["gate_up"].any() and not found["down"].any()

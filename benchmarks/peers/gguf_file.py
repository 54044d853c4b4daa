"""GGUF files for llama.cpp, of a checkpoint or of a shape with random weights. Their vocabulary is the folder's, with
its chat template, or made-up words.

Tensors and settings are named by ``tests/gguf_files.py``. Needs ``gguf``, ``safetensors`` and numpy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import gguf_files

NORMAL, CONTROL = 1, 3  # kinds of tokens


def write_gguf(folder: Path, file: Path, kind: str) -> None:
    """``kind``: f32, f16, bf16, q8_0 or q4_0; the checkpoint is one file of fp32."""
    has_tokenizer = (folder / "tokenizer.json").exists()
    tokens = _tokenizer(folder) if has_tokenizer else _words(gguf_files.settings_of(folder)["vocab_size"])
    gguf_files.write_gguf(folder, file, kind.upper(), tokens=tokens)


def write_random_gguf(settings: dict[str, Any], file: Path, kind: str) -> None:
    """Random weights of a Llama, Qwen3, Qwen3-MoE or LFM2 with tied embeddings, or a gpt-oss: ``settings`` as in
    config.json.

    Blocks are drawn as bytes, so that billions of weights take seconds. Types are mixed as in llama.cpp's own files: of
    all but q8_0 and f16 the embedding, which is the output too, is q6_k; for the rest see ``_type_of``. Experts of
    gpt-oss are mxfp4 in any.
    """
    import gguf
    import numpy

    types, random = gguf.GGMLQuantizationType, numpy.random.default_rng(0)
    hidden, inner, size = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    queries, keys = settings["num_attention_heads"] * size, settings["num_key_value_heads"] * size
    arch, layers = gguf_files.arch_of(settings), range(settings["num_hidden_layers"])
    kinds = settings.get("layer_types", ["full_attention"] * len(layers))
    num_experts = settings.get("num_local_experts", settings.get("num_experts", 0))
    inner, is_gpt_oss = settings.get("moe_intermediate_size", inner), arch == "gpt-oss"
    writer = gguf_files.start(file, settings, _words(settings["vocab_size"]))

    def add(name: str, rows: int, cols: int, kind: str = kind) -> None:
        own, shape = getattr(types, kind.upper()), (num_experts, rows) if "_exps" in name else (rows,)
        if kind == "f16":
            numbers = random.standard_normal((*shape, cols), dtype=numpy.float32) * 0.02
            return writer.add_tensor(name, numbers.astype(numpy.float16), raw_dtype=own)
        length, num_bytes = gguf.GGML_QUANT_SIZES[own]
        blocks = random.integers(0, 256, (*shape, cols // length, num_bytes), dtype=numpy.uint8)
        factors = {
            "q4_0": [4e-3], "q8_0": [3e-4], "q3_k": [3e-4], "q4_k": [1e-4, 7.5e-4], "q5_k": [4e-5, 7.5e-4],
            "q6_k": [1e-5], "iq4_xs": [1e-5], "mxfp4": [], "q2_k": [1e-3, 1.5e-3], "iq2_s": [4e-4],
            "iq3_xxs": [1.5e-4], "iq3_s": [1.5e-4],
        }[kind]  # fmt: skip
        head = 2 * len(factors)
        scale = slice(-head, None) if kind in ("q2_k", "q3_k", "q6_k") else slice(head)
        blocks[..., scale] = numpy.array(factors, numpy.float16).view("u1")
        if kind == "mxfp4":
            blocks[..., 0] = 120  # 2^-7
        writer.add_tensor(name, blocks.reshape(*shape, -1), raw_dtype=own)

    def add_norm(name: str, *shape: int) -> None:
        writer.add_tensor(name, numpy.ones(shape, numpy.float32), raw_dtype=types.F32)

    add("token_embd.weight", settings["vocab_size"], hidden, kind if kind in ("q8_0", "f16") else "q6_k")
    add_norm("token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight", hidden)
    if is_gpt_oss:
        add("output.weight", settings["vocab_size"], hidden)
    mlp = [("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner)]
    mlp = [(f"{name}_exps" if num_experts else name, *size_of) for name, *size_of in mlp]
    attention = [("attn_q", queries, hidden), ("attn_k", keys, hidden), ("attn_v", keys, hidden),
                 ("attn_output", hidden, queries)]  # fmt: skip
    convolution = [("shortconv.in_proj", 3 * hidden, hidden), ("shortconv.out_proj", hidden, hidden)]
    for layer in layers:
        start = f"blk.{layer}."
        for name, rows, cols in (*(convolution if kinds[layer] == "conv" else attention), *mlp):
            own = "mxfp4" if name.endswith("_exps") and is_gpt_oss else _type_of(kind, name, layer, len(layers))
            add(f"{start}{name}.weight", rows, cols, own)
        if num_experts:
            router = random.standard_normal((num_experts, hidden), dtype=numpy.float32)
            writer.add_tensor(f"{start}ffn_gate_inp.weight", router, raw_dtype=types.F32)
        norms = {"attn_norm": hidden, "post_attention_norm" if is_gpt_oss else "ffn_norm": hidden}
        if is_gpt_oss:
            add_norm(f"{start}attn_sinks.weight", settings["num_attention_heads"])
            for name, rows, _ in (*attention, *mlp, ("ffn_gate_inp", num_experts, 0)):
                add_norm(f"{start}{name}.bias", *[num_experts] * name.endswith("_exps"), rows)
        elif kinds[layer] == "conv":
            taps = random.standard_normal((hidden, settings["conv_L_cache"]), dtype=numpy.float32)
            writer.add_tensor(f"{start}shortconv.conv.weight", taps, raw_dtype=types.F32)
        elif arch != "llama":
            norms |= {"attn_q_norm": size, "attn_k_norm": size}
        for name, count in norms.items():
            add_norm(f"{start}{name}.weight", count)
    gguf_files.end(writer)


def _type_of(kind: str, name: str, layer: int, num_layers: int) -> str:
    """The type of a matrix in llama.cpp's own files of a kind: values and down projections of some layers have more
    bits, in q4_k_m and q5_k_m the first and the last eighth and every third between.
    """
    eighth, is_value, is_down = num_layers // 8, name == "attn_v", name.startswith("ffn_down")
    if kind in ("q4_k_m", "q5_k_m"):
        has_more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        return "q6_k" if (is_value or is_down) and has_more else kind.removesuffix("_m")
    if kind == "q3_k_m":
        has_more = (is_value and layer < 2) or (is_down and layer < num_layers // 16)
        return "q5_k" if has_more else "q4_k" if is_value or is_down or name == "attn_output" else "q3_k"
    if kind == "q2_k":
        return "q3_k" if is_value or is_down or name == "attn_output" else kind
    if kind == "iq3_xxs":
        own = {"attn_q": "iq2_s", "attn_k": "iq2_s", "attn_v": "iq3_s", "attn_output": "iq3_s"}.get(name, kind)
        return ("q4_k" if layer < eighth else "q3_k") if is_down else own
    return "q5_k" if kind == "iq4_xs" and is_down and layer < eighth else kind


def _words(vocab_size: int) -> dict[str, Any]:
    """Words that say their ids: ``w17``. Prompts are ids, and answers are read off their words."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"w{index}" for index in range(vocab_size)],
        "tokenizer.ggml.scores": [0.0] * vocab_size,
        "tokenizer.ggml.token_type": [CONTROL if index < 3 else NORMAL for index in range(vocab_size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def _tokenizer(folder: Path) -> dict[str, Any]:
    """Byte-level BPE. llama.cpp knows how a text is cut before the merges by name only: here as Llama 3 does, which may
    make a few other tokens of it."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    by_id = {index: token for token, index in (tokenizer["model"]["vocab"] | special).items()}
    tokens = [by_id[index] for index in range(len(by_id))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": special[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": special[settings["eos_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }

"""Writes a Qwen3, Qwen3-MoE or LFM2 checkpoint as a GGUF file: the same numbers under llama.cpp's names, and the
folder's byte-level tokenizer and chat template, or made-up words. Or random weights of a shape, without a checkpoint.

f32, f16, bf16, q8_0 or q4_0; norms and routers stay fp32, as llama.cpp keeps them; the experts of a layer are one
tensor there, of each of their three matrices. Needs ``gguf``, ``safetensors`` and numpy.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    # LFM2
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "embedding_norm": "token_embd_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
}  # fmt: skip


EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


def gguf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` of ``model.layers.3.self_attn.q_proj.weight``."""
    stem = name.removeprefix("model.").removesuffix(".weight")
    if not stem.startswith("layers."):
        return f"{NAMES[stem]}.weight"
    _, layer, own = stem.split(".", 2)
    expert = EXPERT.fullmatch(own)
    return f"blk.{layer}.{NAMES[own]}.weight" if expert is None else f"blk.{layer}.ffn_{expert[2]}_exps.weight"


def gguf_tensors(folder: Path) -> dict[str, Any]:
    """All tensors under llama.cpp's names, those of experts stacked in their order."""
    import numpy

    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, numbers in load_file(folder / "model.safetensors").items():
        expert = EXPERT.search(name.removesuffix(".weight"))
        if expert is None:
            found[gguf_name(name)] = numbers
        else:
            experts.setdefault(gguf_name(name), {})[int(expert[1])] = numbers
    for name, own in experts.items():
        found[name] = numpy.stack([own[index] for index in range(len(own))])
    return found


def write_gguf(folder: Path, file: Path, kind: str) -> None:
    """``kind``: f32, f16, bf16, q8_0 or q4_0; the checkpoint is one file of fp32."""
    import gguf

    settings = json.loads((folder / "config.json").read_text())
    num_experts = settings.get("num_experts", settings.get("num_local_experts"))
    kind_of_model = settings["model_type"].replace("_", "")
    writer = _begin(settings, file, kind_of_model)
    if kind_of_model == "lfm2":
        writer.add_shortconv_l_cache(settings["conv_L_cache"])
    if num_experts is not None:
        _add_experts(writer, settings, num_experts)
    if (folder / "tokenizer.json").exists():
        _add_tokenizer(writer, folder, gguf.TokenType)
    else:
        _add_words(writer, settings["vocab_size"], gguf.TokenType)
    quantised = getattr(gguf.GGMLQuantizationType, kind.upper())
    for name, numbers in gguf_tensors(folder).items():
        is_plain = numbers.ndim == 1 or "gate_inp" in name or "shortconv.conv" in name
        own = gguf.GGMLQuantizationType.F32 if is_plain else quantised
        numbers = numbers.squeeze(1) if "shortconv.conv" in name else numbers
        writer.add_tensor(name, gguf.quants.quantize(numbers, own), raw_dtype=own)
    _end(writer)


def write_random_gguf(settings: dict[str, Any], file: Path, kind: str) -> None:
    """Random weights of a Llama, Qwen3, Qwen3-MoE or LFM2 with tied embeddings: ``settings`` as in config.json.

    Blocks are drawn as bytes, so that billions of weights take seconds. Of q4_0 and q4_k_m the embedding, which is the
    output too, is q6_k as in llama.cpp's own files, and of q4_k_m some values and down projections, of experts too.
    """
    import gguf
    import numpy

    types, random = gguf.GGMLQuantizationType, numpy.random.default_rng(0)
    hidden, inner, size = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    queries, keys = settings["num_attention_heads"] * size, settings["num_key_value_heads"] * size
    kind_of_model, layers = settings["model_type"], range(settings["num_hidden_layers"])
    full = settings.get("full_attn_idxs", layers)  # layers with attention; the others have short convolutions
    writer = _begin(settings, file, kind_of_model)
    num_experts = settings.get("num_experts", 0)
    if num_experts:
        inner = settings["moe_intermediate_size"]
        _add_experts(writer, settings, num_experts)
    if kind_of_model == "llama":
        writer.add_rope_dimension_count(size)
    if kind_of_model == "lfm2":
        writer.add_shortconv_l_cache(settings["conv_L_cache"])
    _add_words(writer, settings["vocab_size"], gguf.TokenType)

    def add(name: str, rows: int, cols: int, kind: str = kind) -> None:
        own, shape = getattr(types, kind.upper()), (num_experts, rows) if "_exps" in name else (rows,)
        if kind == "f16":
            numbers = random.standard_normal((*shape, cols), dtype=numpy.float32) * 0.02
            return writer.add_tensor(name, numbers.astype(numpy.float16), raw_dtype=own)
        length, num_bytes = gguf.GGML_QUANT_SIZES[own]
        blocks = random.integers(0, 256, (*shape, cols // length, num_bytes), dtype=numpy.uint8)
        factors = {"q4_0": [4e-3], "q8_0": [3e-4], "q6_k": [1e-5], "q4_k": [1e-4, 7.5e-4]}[kind]
        scale = slice(-2, None) if kind == "q6_k" else slice(0, 2 * len(factors))
        blocks[..., scale] = numpy.array(factors, numpy.float16).view("u1")
        writer.add_tensor(name, blocks.reshape(*shape, -1), raw_dtype=own)

    def add_norm(name: str, count: int) -> None:
        writer.add_tensor(name, numpy.ones(count, numpy.float32), raw_dtype=types.F32)

    add("token_embd.weight", settings["vocab_size"], hidden, "q6_k" if kind in ("q4_0", "q4_k_m") else kind)
    add_norm("token_embd_norm.weight" if kind_of_model == "lfm2" else "output_norm.weight", hidden)
    mlp = [("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner)]
    mlp = [(f"{name}_exps" if num_experts else name, *size_of) for name, *size_of in mlp]
    attention = [("attn_q", queries, hidden), ("attn_k", keys, hidden), ("attn_v", keys, hidden),
                 ("attn_output", hidden, queries)]  # fmt: skip
    convolution = [("shortconv.in_proj", 3 * hidden, hidden), ("shortconv.out_proj", hidden, hidden)]
    for layer in layers:
        start = f"blk.{layer}."
        for name, rows, cols in (*(attention if layer in full else convolution), *mlp):
            own = kind
            if kind == "q4_k_m":
                has_more = name in ("attn_v", "ffn_down", "ffn_down_exps") and has_more_bits(layer, len(layers))
                own = "q6_k" if has_more else "q4_k"
            add(f"{start}{name}.weight", rows, cols, own)
        if num_experts:
            router = random.standard_normal((num_experts, hidden), dtype=numpy.float32)
            writer.add_tensor(f"{start}ffn_gate_inp.weight", router, raw_dtype=types.F32)
        norms = {"attn_norm": hidden, "ffn_norm": hidden}
        if layer not in full:
            taps = random.standard_normal((hidden, settings["conv_L_cache"]), dtype=numpy.float32)
            writer.add_tensor(f"{start}shortconv.conv.weight", taps, raw_dtype=types.F32)
        elif kind_of_model != "llama":
            norms |= {"attn_q_norm": size, "attn_k_norm": size}
        for name, count in norms.items():
            add_norm(f"{start}{name}.weight", count)
    _end(writer)


def has_more_bits(layer: int, num_layers: int) -> bool:
    """Whether llama.cpp's Q4_K_M has Q6_K in a layer: the first and the last eighth, and every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _begin(settings: dict[str, Any], file: Path, architecture: str) -> Any:
    """A writer with the sizes that every architecture has."""
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    heads, kinds = settings["num_key_value_heads"], settings.get("layer_types", [])
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"] or settings.get("full_attn_idxs")
    if full is not None:
        heads = [heads if layer in full else 0 for layer in range(settings["num_hidden_layers"])]
    writer.add_head_count_kv(heads)
    size = settings.get("head_dim", settings["hidden_size"] // settings["num_attention_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(settings.get("rms_norm_eps", settings.get("norm_eps")))
    writer.add_rope_freq_base(settings["rope_parameters"]["rope_theta"])
    return writer


def _add_experts(writer: Any, settings: dict[str, Any], num_experts: int) -> None:
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(settings["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(settings["moe_intermediate_size"])


def _end(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_words(writer: Any, vocab_size: int, kinds: Any) -> None:
    """Words that say their ids: ``w17``. Prompts are ids, and answers are read off their words."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{index}" for index in range(vocab_size)])
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([kinds.CONTROL if index < 3 else kinds.NORMAL for index in range(vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def _add_tokenizer(writer: Any, folder: Path, kinds: Any) -> None:
    """Byte-level BPE. llama.cpp knows how a text is cut before the merges by name only: here as Llama 3 does, which may
    make a few other tokens of it."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    by_id = {index: token for token, index in (tokenizer["model"]["vocab"] | special).items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([by_id[index] for index in range(len(by_id))])
    writer.add_token_types([kinds.CONTROL if by_id[index] in special else kinds.NORMAL for index in range(len(by_id))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(special[settings["bos_token"]])
    writer.add_eos_token_id(special[settings["eos_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])

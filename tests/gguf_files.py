"""GGUF files of checkpoints that transformers wrote, by the writer of ggml's package and llama.cpp's conventions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3", "GraniteForCausalLM": "granite", "Olmo2ForCausalLM": "olmo2",
    "SeedOssForCausalLM": "seed_oss", "Gemma3ForCausalLM": "gemma3", "GptOssForCausalLM": "gpt-oss",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe",
}  # fmt: skip
PERMUTED = ("llama", "smollm3", "granite")
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
EXPERT_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def permuted(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k of Llama as llama.cpp keeps them: the two halves of a head by turns."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def tensors_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of a checkpoint under llama.cpp's names, experts stacked, q and k of Llama permuted."""
    settings = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[settings["architectures"][0]]
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch], settings["num_hidden_layers"]
    )
    heads = {"q_proj": settings["num_attention_heads"], "k_proj": settings["num_key_value_heads"]}
    found: dict[str, np.ndarray[Any, Any]] = {}
    experts: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for name, numbers in load_file(folder / "model.safetensors").items():
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            stack = f"blk.{expert[1]}.ffn_{EXPERT_NAMES[expert[3]]}_exps.weight"
            experts.setdefault(stack, {})[int(expert[2])] = numbers
            continue
        projection = name.split(".")[-2]
        if arch in PERMUTED and projection in heads:
            numbers = permuted(numbers, heads[projection])
        if arch == "gemma3" and name.endswith("norm.weight"):
            numbers = numbers + 1
        if arch == "gpt-oss" and ".experts." in name:
            found |= experts_of(name, numbers)
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        found[own + ".weight" * name.endswith("sinks")] = numbers
    return found | {name: np.stack([own[at] for at in range(len(own))]) for name, own in experts.items()}


def experts_of(name: str, numbers: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Of gpt-oss, from transposed stacks with columns of gate and up by turns."""
    prefix = f"blk.{name.split('.')[2]}"
    kind = "bias" if name.endswith("_bias") else "weight"
    rows = numbers if kind == "bias" else numbers.swapaxes(1, 2)
    if "gate_up" not in name:
        return {f"{prefix}.ffn_down_exps.{kind}": np.ascontiguousarray(rows)}
    parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]}
    return {f"{prefix}.ffn_{part}_exps.{kind}": np.ascontiguousarray(own) for part, own in parts.items()}


def rope_factors(settings: dict[str, Any]) -> np.ndarray[Any, Any] | None:
    """Divisors of the frequencies, as llama.cpp's converter computes those of Llama 3.1."""
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim, old = settings["head_dim"], rope["original_max_position_embeddings"]
    low, high = old / rope["low_freq_factor"], old / rope["high_freq_factor"]
    found = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        length = 2 * np.pi / frequency
        smooth = (old / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        middle = 1 / ((1 - smooth) / rope["factor"] + smooth)
        found.append(1.0 if length < high else rope["factor"] if length > low else middle)
    return np.array(found, dtype=np.float32)


def raw_blocks(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray[Any, Any]:
    """Random blocks of a type, with scales that keep activations in range; for types that gguf does not quantize to."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    data = draw.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-3).tobytes(), dtype=np.uint8)
    places = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,)}
    for at in places[kind]:
        data[..., at : at + 2] = scale
    return data.reshape(*shape[:-1], -1)


def write_gguf(
    folder: Path, file: Path, kind: str | dict[str, str] = "F32", *, tokens: dict[str, Any] | None = None,
    num_tensors: int = 0,
) -> Path:  # fmt: skip
    """``kind``: of the matrices, or by a part of their names; ``num_tensors``: of each file of a split model."""
    settings = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[settings["architectures"][0]]
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=num_tensors)
    heads = settings["num_attention_heads"]
    head_dim = settings["head_dim"] = settings.get("head_dim") or settings["hidden_size"] // heads
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    rope = settings["rope_parameters"]
    if arch == "granite":
        writer.add_attention_scale(settings["attention_multiplier"])
        writer.add_embedding_scale(settings["embedding_multiplier"])
        writer.add_residual_scale(settings["residual_multiplier"])
        writer.add_logit_scale(settings["logits_scaling"])
    if arch == "gemma3":
        sliding, rope = rope["sliding_attention"], rope["full_attention"]
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in settings["layer_types"]])
    if arch in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(settings["sliding_window"])
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(settings["intermediate_size"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    experts = settings.get("num_experts", settings.get("num_local_experts"))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(settings["num_experts_per_tok"])
    if "moe_intermediate_size" in settings:
        writer.add_expert_feed_forward_length(settings["moe_intermediate_size"])
    for name, value in (tokens or {"tokenizer.ggml.model": "no_vocab"}).items():
        _add(writer, name, value)
    found = tensors_of(folder)
    if (factors := rope_factors(settings)) is not None:
        found["rope_freqs.weight"] = factors
    for seed, (name, numbers) in enumerate(found.items()):
        chosen = kind if isinstance(kind, str) else next(own for part, own in kind.items() if part in name)
        own = Kind[chosen] if numbers.ndim > 1 and "gate_inp" not in name and "bias" not in name else Kind.F32
        try:
            data = gguf.quants.quantize(numbers, own)
        except NotImplementedError:
            data = raw_blocks(numbers.shape, own, seed)
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if file.exists() else next(iter(sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))))


def _add(writer: Any, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case str():
            writer.add_string(name, value)
        case list():
            writer.add_array(name, value)


def dequantized(file: Path, folder: Path, target: Path) -> Path:
    """The checkpoint ``folder`` with the numbers of a GGUF file, as gguf's reader and reference dequantize them."""
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(file)
    own = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    settings = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}
    out: dict[str, np.ndarray[Any, Any]] = {}
    arch = ARCHITECTURES[settings["architectures"][0]]
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch], settings["num_hidden_layers"]
    )
    for name, numbers in load_file(folder / "model.safetensors").items():
        expert = EXPERT.fullmatch(name)
        if arch == "gpt-oss" and ".experts." in name:
            stored_names = list(experts_of(name, numbers))
            parts = [own[one] if "bias" in one else own[one].swapaxes(1, 2) for one in stored_names]
            found = np.stack(parts, -1).reshape(numbers.shape)
        elif expert is not None:
            found = own[f"blk.{expert[1]}.ffn_{EXPERT_NAMES[expert[3]]}_exps.weight"][int(expert[2])]
        else:
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None
            stored += ".weight" * name.endswith("sinks")
            found, part = own[stored], stored.split(".")[-2]
            if arch in PERMUTED and part in heads:  # back to halves
                turns = found.reshape(heads[part], -1, 2, *found.shape[1:])
                found = turns.swapaxes(1, 2).reshape(found.shape)
        out[name] = np.ascontiguousarray(found.reshape(numbers.shape), dtype=np.float32)
    target.mkdir(exist_ok=True)
    save_file(out, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target

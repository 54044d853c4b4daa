"""GGUF files of checkpoints that transformers wrote, by the writer of ggml's package and llama.cpp's conventions.

Benchmarks of llama.cpp write theirs with it, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral3", "SmolLM3ForCausalLM": "smollm3", "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granitehybrid", "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe", "SeedOssForCausalLM": "seed_oss", "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3", "GptOssForCausalLM": "gpt-oss",
    "Qwen2ForCausalLM": "qwen2", "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next", "Qwen3_5ForCausalLM": "qwen35", "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Phi3ForCausalLM": "phi3", "Lfm2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2moe",
    "CohereForCausalLM": "command-r", "Cohere2ForCausalLM": "cohere2", "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe", "SolarOpenForCausalLM": "glm4moe",
    "Glm4MoeLiteForCausalLM": "deepseek2", "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2", "Dots1ForCausalLM": "dots1", "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ernie4_5ForCausalLM": "ernie4_5", "Ernie4_5_MoeForCausalLM": "ernie4_5-moe", "Exaone4ForCausalLM": "exaone4",
    "InternLM3ForCausalLM": "llama", "IQuestCoderForCausalLM": "llama", "YoutuForCausalLM": "deepseek2",
    "DeepseekV32ForCausalLM": "deepseek32", "GlmMoeDsaForCausalLM": "glm-dsa", "HYV3ForCausalLM": "hy_v3",
    "MellumForCausalLM": "mellum", "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4", "NemotronHForCausalLM": "nemotron_h_moe",
    "Starcoder2ForCausalLM": "starcoder2", "PhiForCausalLM": "phi2", "StableLmForCausalLM": "stablelm",
    "NemotronForCausalLM": "nemotron",
    "Qwen2VLForConditionalGeneration": "qwen2vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl", "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe", "ArceeForCausalLM": "arcee",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense", "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe", "ExaoneMoeForCausalLM": "exaone-moe", "AfmoeForCausalLM": "afmoe",
    "Step3p7ForConditionalGeneration": "step35", "LagunaForCausalLM": "laguna",
    "MuseGlimmerForConditionalGeneration": "muse-glimmer", "Llama4ForCausalLM": "llama4",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe", "FalconH1ForCausalLM": "falcon-h1",
    "Mistral4ForCausalLM": "mistral4", "ApertusForCausalLM": "apertus", "Jais2ForCausalLM": "jais2",
    "OlmoForCausalLM": "olmo", "GraniteSWAForCausalLM": "granite_swa", "GraniteMoeSWAForCausalLM": "granite_swa",
    "Cohere2MoeForCausalLM": "cohere2moe", "GlmForCausalLM": "chatglm", "KimiLinearForCausalLM": "kimi-linear",
    "BailingHybridForCausalLM": "bailingmoe3", "MiniMaxM3SparseForConditionalGeneration": "minimax-m3",
    "MiMoV2FlashForCausalLM": "mimo2", "Glm4vForConditionalGeneration": "glm4",
    "Glm46VForConditionalGeneration": "glm4", "Glm4vMoeForConditionalGeneration": "glm4moe",
}  # fmt: skip
# Newer than the package: an architecture that names its tensors alike.
NAMED_AS = {
    "laguna": "step35", "muse-glimmer": "afmoe", "deepseek32": "glm-dsa", "hy_v3": "dots1", "mellum": "qwen3moe",
    "granite_swa": "granitehybrid", "cohere2moe": "dots1", "minimax-m3": "dots1", "bailingmoe3": "kimi-linear",
}  # fmt: skip


def longrope(original: int) -> dict[str, Any]:
    """Changes of a Phi-3: transformers takes other divisors for prompts beyond the original context."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": original, "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.7],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 7.0],
    }  # fmt: skip
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


# Models of tests/parity/checkpoints.py by name, and what files can say of them. A file has one multiplier of YaRN, and
# DeepSeek-V2's groups decide how experts are chosen.
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.7,
         "original_max_position_embeddings": 64}  # fmt: skip
_LATENT: dict[str, Any] = {"rope_parameters": _YARN}
_LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4,
           "use_qk_norm": True}  # fmt: skip
_KIMI = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 12, "short_conv_kernel_size": 4}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_MUSE = {"post_norm_eps": 1e-8, "layer_rope_theta": [10000.0, 0, 10000.0]}
MODELS: dict[str, dict[str, Any]] = {
    "llama-mha": {"head_dim": 20}, "llama-gqa-tied": {}, "llama-llama3": {}, "llama-linear": {}, "llama-yarn": {},
    "mistral": {"head_dim": 8}, "ministral3": {}, "mixtral": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen2": {}, "qwen2-moe": {}, "qwen3": {"num_key_value_heads": 1}, "qwen3-moe": {"num_key_value_heads": 1},
    "qwen3-next": {}, "qwen3.5": {},
    "qwen3.5-moe": {},
    "gemma": {}, "gemma2": {"query_pre_attn_scalar": 20}, "gemma2-panels": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 20}, "gemma3-panels": {"query_pre_attn_scalar": 32},
    "arcee": {}, "hunyuan-dense": {}, "granite-moe": {}, "granite-moe-shared": {}, "exaone-moe": {},
    "afmoe": {"global_attn_every_n_layers": 4, "num_hidden_layers": 5},
    "starcoder2": {"sliding_window": 4096}, "starcoder2-plain": {"sliding_window": 4096}, "phi": {}, "stablelm": {},
    "stablelm-parallel": {}, "minitron": {}, "nemotron-h": {}, "nemotron-3": {"hybrid_override_pattern": "MEM*EE*"},
    "nemotron-super": {},
    "gemma3n": {}, "gemma3n-panels": {},
    "gemma4": {}, "gemma4-shared": {}, "gemma4-panels": {}, "gemma4-moe": {},
    "phi3-window": {}, "phi3-longrope": longrope(128), "granite": {}, "granite-hybrid": {},
    "granite-hybrid-moe": {"mamba_proj_bias": False}, "lfm2": {"conv_bias": False, "block_auto_adjust_ff_dim": False},
    "lfm2-all": {}, "lfm2-moe": {"tie_word_embeddings": True}, "cohere": {"tie_word_embeddings": True}, "cohere2": {},
    "glm4": {}, "glm4-moe": {}, "glm4-lite": _LATENT, "deepseek-v2": _LATENT,
    "deepseek-v2-lite": {**_LATENT, "n_group": 1, "topk_group": 1}, "deepseek-v3": _LATENT, "kimi-k2": _LATENT,
    "dots1": {"sliding_window": None}, "minimax-m2": {}, "ernie": {"use_bias": False}, "ernie-moe": {}, "olmo2": {},
    "olmo3": {}, "olmoe": {"attention_bias": False}, "exaone4": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4}, "seed-oss": {}, "internlm3": {},
    "iquest-coder": {}, "granite-4-dense": {}, "youtu": _LATENT, "deepseek-v3.2": _LATENT, "glm-5": {}, "hy3": {},
    "mellum": {"norm_topk_prob": True}, "step3.7": {}, "step3.7-panels": {}, "laguna": {},
    "laguna-panels": {}, "muse-glimmer": {"post_norm_eps": 1e-8}, "muse-glimmer-panels": _MUSE,
    "llama4": _LLAMA4, "llama4-panels": {**_LLAMA4, "num_hidden_layers": 4},
    "hunyuan-moe": {}, "hunyuan-moe-panels": {}, "solar-open": {},
    "mistral4": {"rope_parameters": {**_YARN, "original_max_position_embeddings": 32, "mscale": 1.0,
                                     "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    "apertus": {}, "apertus-panels": {}, "jais2": {}, "olmo": {"attention_bias": False},
    "granite-swa": {"layer_rope_theta": [10000.0, 0, 10000.0, 10000.0, 0, 10000.0]},
    "granite-moe-swa": {"shared_intermediate_size": 40},
    "cohere-plus": {"tie_word_embeddings": True}, "cohere2-moe": {},
    "cohere2-moe-rms": {"shared_expert_combination_strategy": "average"},
    "glm": {"head_dim": 8}, "kimi-linear": {"linear_num_heads": 4, **_ONE_GROUP},
    "kimi-linear-48b": {"linear_attn_config": {**_KIMI, "num_heads": 4}, **_ONE_GROUP},
    "ling3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "num_hidden_layers": 4,
              "layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax-m3": {"swiglu_limit": 7.0, "shared_intermediate_size": 24},
    "minimax-m3-panels": {"swiglu_limit": 7.0, "shared_intermediate_size": 64},
    "mimo-v2": {"routed_scaling_factor": 1.0}, "mimo-v2-panels": {}, "mimo-v2-full": {},
    "falcon-h1": {}, "falcon-h1-panels": {}, "falcon-h1-norm": {"tie_word_embeddings": False},
}  # fmt: skip
PERMUTED = ("llama", "muse-glimmer", "mistral3", "smollm3", "granite", "granitehybrid", "granitemoe", "arcee",
            "granite_swa", "olmo")  # fmt: skip
OFFSET = ("nemotron", "gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe", "step35",
          "minimax-m3")  # norms have 1 added  # fmt: skip
KDA = ("kimi-linear", "bailingmoe3")
TURNED = ("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration")
TOWERS = ("vision_model.", "vit_large_projector.", "model.vision_", "vision_tower.", "multi_modal_", "patch_merge_")
OLD_NAMES = {  # of published files, which transformers writes
    "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.", "attention_sink_bias": "sinks", "_moe.router.weight": "_moe.router.layer.weight",
}  # fmt: skip
DELTA = ("qwen3next", "qwen35", "qwen35moe")
EXPERT = re.compile(r"\w+\.layers\.(\d+)\.(?:mlp|mixer|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+)\.weight")
STREAM = re.compile(r"model\.altup_(unemb)?(?:ed_)?projections\.(\d+)\.weight")
EXPERT_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}

Tensors = dict[str, np.ndarray[Any, Any]]


def permuted(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k of Llama as llama.cpp keeps them: the two halves of a head by turns."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def turned(rows: np.ndarray[Any, Any], size: int, share: float) -> np.ndarray[Any, Any]:
    """Rows of q or k of GLM-4 whose pairs (0, 1), (2, 3) of a head, as far as it is rotated, are halves."""
    order = np.arange(size)
    order[: int(size * share)] = np.concatenate([order[at : int(size * share) : 2] for at in (0, 1)])
    return np.ascontiguousarray(rows.reshape(-1, size, *rows.shape[1:])[:, order]).reshape(rows.shape)


def settings_of(folder: Path) -> dict[str, Any]:
    """Of a checkpoint, with the size of a head and the kinds of layers."""
    settings = json.loads((folder / "config.json").read_text())
    settings |= settings.get("text_config") or {}
    if (kinds := settings.get("layers_block_type")) is not None:
        settings |= {"num_hidden_layers": len(kinds), "layer_types": kinds, "rope_parameters": {"rope_type": "default"}}
    settings["head_dim"] = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    return settings


def arch_of(settings: dict[str, Any]) -> str:
    """Granite 4.0 without recurrent layers is written as Granite 3."""
    arch = ARCHITECTURES[settings["architectures"][0]]
    if arch == "nemotron_h_moe" and "moe" not in settings["layer_types"]:
        return "nemotron_h"
    return "granite" if arch == "granitehybrid" and "linear_attention" not in settings["layer_types"] else arch


def names_of(arch: str, num_layers: int) -> Any:
    """The package's map from names of safetensors."""
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[NAMED_AS.get(arch, arch)], num_layers)


def tensors_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of a checkpoint under llama.cpp's names, experts stacked, q and k of Llama permuted."""
    settings = settings_of(folder)
    arch = arch_of(settings)
    names = names_of(arch, settings["num_hidden_layers"])
    heads = {"q_proj": settings["num_attention_heads"], "k_proj": settings.get("num_key_value_heads")}
    found: dict[str, np.ndarray[Any, Any]] = {}
    experts: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for stored, numbers in load_file(folder / "model.safetensors").items():
        name = stored
        for old, new in OLD_NAMES.items():
            name = name.replace(old, new)
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            stack = f"blk.{expert[1]}.ffn_{EXPERT_NAMES[expert[3]]}_exps.weight"
            experts.setdefault(stack, {})[int(expert[2])] = numbers
            continue
        if (stream := STREAM.fullmatch(name)) is not None:
            stack = "altup_unembd_proj.weight" if stream[1] else "altup_proj.weight"
            experts.setdefault(stack, {})[int(stream[2])] = numbers
            continue
        if name.startswith(TOWERS):
            continue
        name = name.replace("model.language_model.", "model.")
        if arch in ("minimax-m3", "kimi-linear"):
            name = name.replace(".block_sparse_moe.", ".mlp.")
        projection = name.split(".")[-2]
        if settings["architectures"][0] in TURNED and projection in heads:
            numbers = turned(numbers, settings["head_dim"], settings["rope_parameters"]["partial_rotary_factor"])
        if arch in PERMUTED and projection in heads:
            numbers = permuted(numbers, heads[projection])
        if arch in OFFSET and name.endswith("norm.weight") and "linear_attn" not in name:
            numbers = numbers + 1
        if arch == "muse-glimmer" and name.endswith("layernorm.weight"):
            numbers = numbers + 1
        if arch == "muse-glimmer" and projection in heads:  # norms without weights, and the scale of queries
            scale = settings["qk_scale_factor"] if projection == "q_proj" else 1.0
            own = f"blk.{name.split('.')[2]}.attn_{projection[0]}_norm.weight"
            found[own] = np.full(settings["head_dim"], scale, dtype=np.float32)
        if arch == "falcon-h1":
            numbers = numbers * falcon_multiplier(name, settings)
        if arch == "gpt-oss" and ".experts." in name:
            found |= experts_of(name, numbers)
            continue
        for own, part in parts_of(name, numbers, settings, arch).items():
            mapped = names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert mapped is not None or own.startswith("blk."), name
            found[(mapped or own) + ".weight" * name.endswith("sinks")] = part
    return found | {name: np.stack([own[at] for at in range(len(own))]) for name, own in experts.items()}


def falcon_multiplier(name: str, settings: dict[str, Any]) -> np.ndarray[Any, Any] | np.float32:
    """What llama.cpp's converter multiplies a tensor of Falcon-H1 with."""
    of = {part: settings[f"{part}_multiplier"] for part in
          ("embedding", "lm_head", "attention_in", "attention_out", "key", "ssm_in", "ssm_out")}  # fmt: skip
    gate, down = settings["mlp_multipliers"] or (1.0, 1.0)
    scales = {
        "embed_tokens": of["embedding"], "lm_head": of["lm_head"], "q_proj": of["attention_in"],
        "k_proj": of["attention_in"] * of["key"], "v_proj": of["attention_in"], "o_proj": of["attention_out"],
        "gate_proj": gate, "down_proj": down, "out_proj": of["ssm_out"],
    }  # fmt: skip
    projection = name.split(".")[-2]
    if projection != "in_proj":
        return np.float32(scales.get(projection, 1.0))
    inner, states = settings["mamba_d_ssm"], settings["mamba_n_groups"] * settings["mamba_d_state"]
    sizes = (inner, inner, states, states, settings["mamba_n_heads"])
    rows: np.ndarray[Any, Any] = np.repeat(settings["ssm_multipliers"] or [1.0] * 5, sizes) * of["ssm_in"]
    return rows[:, None].astype(np.float32)


def parts_of(
    name: str, numbers: np.ndarray[Any, Any], settings: dict[str, Any], arch: str
) -> dict[str, np.ndarray[Any, Any]]:
    """A tensor as llama.cpp's converter has it before names are mapped; names with ``blk.`` are mapped."""
    layer = f"blk.{name.split('.')[2]}" if name.startswith("model.layers.") else ""
    if "act_fn" in name:
        return {}
    if name.endswith("sinks"):
        return {f"{layer}.attn_sinks": numbers}
    if ".self_attn.index_" in name:
        return {f"{layer}.indexer.{name.rpartition('index_')[2]}": numbers}
    if arch in KDA and (own := kda_part(name, numbers, arch, settings["num_attention_heads"])) is not None:
        return {f"{layer}.{own[0]}": own[1]}
    if arch == "granite_swa" and (stacked := re.search(r"(experts|shared_mlp)\.(gate_up|input|down|output)", name)):
        kind = "exps" if stacked[1] == "experts" else "shexp"
        part = "down" if stacked[2] in ("down", "output") else "gate_up" if kind == "exps" else "up"
        return {f"{layer}.ffn_{part}_{kind}.weight": numbers}
    if arch == "mistral4" and name.endswith("gate_up_proj"):
        return {f"{layer}.ffn_gate_up_exps.weight": numbers}
    if "router." in name and name.endswith("scale"):
        stored = "ffn_down_exps" if "per_expert" in name else "ffn_gate_inp"
        return {f"{layer}.{stored}.scale": numbers}
    if name.endswith(("layer_scalar", "correct_output_scale")):
        return {name + ".weight": numbers}
    if name.endswith("experts.e_score_correction_bias"):
        return {f"{layer}.exp_probs_b.bias": numbers}
    if name.endswith("correction_bias"):
        return {name.removesuffix("_bias") + ".bias": numbers}
    if name.endswith(("expert_bias", "router_bias")):
        return {name + ".bias" * (arch != "hy_v3"): numbers}
    if name.endswith("kv_b_proj.weight"):
        rows = numbers.reshape(settings["num_attention_heads"], -1, numbers.shape[1])
        keys, values = np.split(rows, [settings["qk_nope_head_dim"]], 1)
        columns = np.ascontiguousarray(keys.swapaxes(1, 2))
        return {f"{layer}.attn_k_b.weight": columns, f"{layer}.attn_v_b.weight": values}
    if name.endswith("input_linear.weight"):
        kind = "exps" if "block_sparse" in name else "shexp" if settings["num_local_experts"] else ""
        gate, up = np.split(numbers, 2, -2)
        return {f"{layer}.{f'ffn_{part}_{kind}'.rstrip('_')}.weight": own for part, own in (("gate", gate), ("up", up))}
    if name.endswith("shared_mlp.output_linear.weight") and not settings["num_local_experts"]:
        return {f"{layer}.ffn_down.weight": numbers}
    if name.endswith("_proj") and ".experts." in name:  # all experts in one tensor
        if name.endswith("down_proj"):
            return {f"{layer}.ffn_down_exps.weight": numbers.swapaxes(1, 2) if arch == "llama4" else numbers}
        gate, up = np.split(numbers.swapaxes(1, 2) if arch == "llama4" else numbers, 2, 1)
        return {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        numbers = numbers[:, 0]
    if name.endswith((".A_log", "mamba.D", "mixer.D")):
        numbers = -np.exp(numbers) if name.endswith("A_log") else numbers
        numbers = numbers[:, None] if "linear_attn" not in name else numbers
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        numbers = numbers.reshape(settings.get("mamba_n_groups") or settings["n_groups"], -1)
    if "linear_attn" in name:
        return delta_parts(name, numbers, settings, arch, layer)
    return {name.replace(".dt_bias", ".dt_proj.bias"): numbers}


def kda_part(
    name: str, numbers: np.ndarray[Any, Any], arch: str, heads: int
) -> tuple[str, np.ndarray[Any, Any]] | None:
    """The name and numbers of a tensor of delta attention, or of a gate of latent attention; None: another."""
    part = name.partition(".self_attn.")[2]
    stored = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "b_proj.weight": "ssm_beta.weight",
              "o_norm.weight": "ssm_norm.weight", "g_proj.weight": "ssm_g_a.weight"}  # fmt: skip
    if part == "g_proj.weight" and len(numbers) == heads:
        return "attn_gate.weight", numbers
    if part == "A_log" and arch == "bailingmoe3":
        return "ssm_a", np.exp(numbers)[:, None]
    if part == "A_log":
        return "ssm_a", -np.exp(numbers)
    if part.endswith("conv1d.weight"):
        return f"ssm_conv1d_{part[0]}.weight", numbers[None]  # of four dimensions
    if part[:2] in ("f_", "g_") and part not in stored:
        return f"ssm_{part[0]}_{'b' if part[2] == 'b' else 'a'}.weight", numbers
    return (stored[part], numbers) if part in stored else None


def delta_parts(
    name: str, numbers: np.ndarray[Any, Any], settings: dict[str, Any], arch: str, layer: str
) -> dict[str, np.ndarray[Any, Any]]:
    """Of DeltaNet: in Qwen3-Next q, k, v and z apart, in Qwen3.5 value heads by turns of their key heads."""
    keys, values, size, value_size = (
        settings[f"linear_{part}"] for part in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    each = values // keys
    if "in_proj_qkvz" in name:
        heads = numbers.reshape(keys, -1, numbers.shape[1])
        cuts = np.split(heads, [size, 2 * size, 2 * size + each * value_size], 1)
        q, k, v, z = (part.reshape(-1, numbers.shape[1]) for part in cuts)
        return {f"{layer}.attn_qkv.weight": np.concatenate((q, k, v)), f"{layer}.attn_gate.weight": z}
    if arch != "qwen3next":

        def tiled(rows: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
            heads = rows.reshape(keys, each, length, *rows.shape[1:])
            return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)

        if "in_proj_qkv" in name or "conv1d" in name:
            first, rest = np.split(numbers, [2 * keys * size])
            numbers = np.concatenate((first, tiled(rest, value_size)))
        elif "in_proj_z" in name:
            numbers = tiled(numbers, value_size)
        elif "out_proj" in name:
            numbers = np.ascontiguousarray(tiled(numbers.T, value_size).T)
        elif "norm" not in name:
            numbers = tiled(numbers, 1)
    return {name.replace(".dt_bias", ".dt_proj.bias"): numbers}


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
    if isinstance(rope.get("full_attention"), dict) and rope["full_attention"]["rope_type"] == "proportional":
        size = gemma4_metadata(settings)["attention.key_length"]
        rotated = int(size * rope["full_attention"]["partial_rotary_factor"] / 2)
        return np.array([1.0] * rotated + [1e30] * (size // 2 - rotated), dtype=np.float32)
    size, rope = settings["head_dim"], rope.get("full_attention", rope)
    if rope.get("rope_type") != "llama3":
        return None
    dim, old = int(size * rope.get("partial_rotary_factor", 1.0)), rope["original_max_position_embeddings"]
    low, high = old / rope["low_freq_factor"], old / rope["high_freq_factor"]
    found = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        length = 2 * np.pi / frequency
        smooth = (old / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        middle = 1 / ((1 - smooth) / rope["factor"] + smooth)
        found.append(1.0 if length < high else rope["factor"] if length > low else middle)
    return np.array(found + [1.0] * (size // 2 - len(found)), dtype=np.float32)


def raw_blocks(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray[Any, Any]:
    """Random blocks of a type, with scales that keep activations in range; for types that gguf does not quantize to."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    data = draw.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    own = {Kind.Q6_K: 2**-14, Kind.Q4_K: 2**-9}.get(kind, 2e-3)  # times a whole number exact in fp16
    scale = np.frombuffer(np.float16(own).tobytes(), dtype=np.uint8)
    places = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
    for at in places.get(kind, (0,)):
        data[..., at : at + 2] = scale
    return data.reshape(*shape[:-1], -1)


def start(
    file: Path, settings: dict[str, Any], tokens: dict[str, Any], num_tensors: int = 0,
    more: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """A writer of a model with these ``settings``, which lacks the tensors; ``num_tensors`` and ``more`` as below."""
    arch = arch_of(settings)
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=num_tensors)
    for name, value in (metadata_of(settings, arch) | (more or {})).items():
        _add(writer, f"{arch}.{name}", value)
    for name, value in tokens.items():
        _add(writer, name, value)
    return writer


def end(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    folder: Path, file: Path, kind: str | dict[str, str] = "F32", *, tokens: dict[str, Any] | None = None,
    num_tensors: int = 0, numbers_of: Path | None = None, change: Callable[[Tensors], Tensors] | None = None,
    more: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """``kind``: of the matrices, or by a part of their names; ``num_tensors``: of each file of a split model;
    ``numbers_of``: a file of this model whose numbers it has; ``change`` of its tensors; ``more`` settings.
    """
    settings = settings_of(folder)
    writer = start(file, settings, tokens or {"tokenizer.ggml.model": "no_vocab"}, num_tensors, more)
    if arch_of(settings) == "apertus":
        for part in ("alpha_p", "alpha_n", "beta", "eps"):  # settings without a prefix
            loaded = load_file(folder / "model.safetensors")
            values = [loaded[f"model.layers.{at}.mlp.act_fn.{part}"] for at in range(settings["num_hidden_layers"])]
            _add(writer, f"xielu.{part}", [float(own.reshape(())) for own in values])
    found = tensors_of(folder)
    if numbers_of is not None:
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(numbers_of).tensors}
        found = {name: gguf.quants.dequantize(stored[name].data, stored[name].tensor_type) for name in found}
    found = found if change is None else change(found)
    if (factors := rope_factors(settings)) is not None:
        found["rope_freqs.weight"] = factors
    for kind_of, factors in (settings.get("rope_parameters") or {}).items():
        if kind_of in ("short_factor", "long_factor"):
            found[f"rope_factors_{kind_of.removesuffix('_factor')}.weight"] = np.array(factors, dtype=np.float32)
    for seed, (name, numbers) in enumerate(found.items()):
        chosen = kind if isinstance(kind, str) else next(own for part, own in kind.items() if part in name)
        is_plain = any(part in name for part in ("gate_inp", "bias", "conv1d", "shortconv.conv", "norm"))
        own = Kind[chosen] if numbers.ndim > 1 and not is_plain and not name.endswith(("ssm_a", "ssm_d")) else Kind.F32
        try:
            data = gguf.quants.quantize(numbers, own)
        except NotImplementedError:
            data = raw_blocks(numbers.shape, own, seed)
        writer.add_tensor(name, data, raw_dtype=own)
    end(writer)
    return file if file.exists() else next(iter(sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))))


# Settings of config.json that files have under another name.
FIELDS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon", "use_parallel_residual": "use_parallel_residual",
    "sliding_window": "attention.sliding_window",
    "num_experts_per_tok": "expert_used_count", "moe_k": "expert_used_count", "num_experts": "expert_count",
    "num_local_experts": "expert_count", "n_routed_experts": "expert_count", "moe_num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count", "routed_scaling_factor": "expert_weights_scale",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "n_group": "expert_group_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length", "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count", "num_dense_layers": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count", "q_lora_rank": "attention.q_lora_rank",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "kv_lora_rank": "attention.kv_lora_rank", "conv_L_cache": "shortconv.l_cache", "logit_scale": "logit_scale",
    "full_attention_interval": "full_attention_interval", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "router_scaling_factor": "expert_weights_scale",
    "index_topk": "attention.indexer.top_k", "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank", "mamba_d_conv": "ssm.conv_kernel",
    "num_kv_shared_layers": "attention.shared_kv_layers", "top_k_experts": "expert_used_count",
    "moe_latent_size": "moe_latent_size",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input", "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count", "mamba_n_heads": "ssm.time_step_rank",
    "num_expert_group": "expert_group_count", "model_max_length": "context_length",
    "num_experts_per_token": "expert_used_count",
}  # fmt: skip
SIGMOID = ("kimi-linear", "bailingmoe3", "minimax-m3", "mimo2",
           "afmoe", "exaone-moe", "glm4moe", "dots1", "minimax-m2", "lfm2moe", "hy_v3", "deepseek32", "glm-dsa",
           "step35", "laguna")  # fmt: skip
# And which layers have them.
WINDOWS = (
    "exaone-moe",
    "gemma3",
    "gemma3n",
    "gemma4",
    "exaone4",
    "olmo2",
    "mellum",
    "step35",
    "laguna",
    "muse-glimmer",
    "granite_swa",
    "cohere2moe",
    "mimo2",
)
NORMED = ("dots1", "exaone-moe", "glm4moe", "lfm2moe", "nemotron_h_moe", "deepseek2", "deepseek32", "glm-dsa",
          "mistral4", "cohere2moe")  # fmt: skip
LATENTS = ("deepseek2", "deepseek32", "glm-dsa", "mistral4", *KDA)


def metadata_of(settings: dict[str, Any], arch: str) -> dict[str, Any]:
    """The settings of a file, as llama.cpp's converter writes them."""
    found = {FIELDS[name]: value for name, value in settings.items() if name in FIELDS and value is not None}
    heads, head_dim, layers = settings["num_attention_heads"], settings["head_dim"], settings["num_hidden_layers"]
    found |= {"block_count": layers, "attention.key_length": head_dim, "attention.value_length": head_dim}
    kv_heads, kinds = settings.get("num_key_value_heads", heads), settings.get("layer_types") or []
    if arch == "falcon-h1":
        found.pop("embedding_scale")
        found["ssm.inner_size"] = settings["mamba_d_ssm"]
    if arch in ("lfm2", "lfm2moe", "granitehybrid"):
        kv_heads = [kv_heads if "attention" in kind and "linear" not in kind else 0 for kind in kinds]
    found["attention.head_count_kv"] = kv_heads
    rope = settings.get("rope_parameters") or {"rope_type": "default"}
    if any(isinstance(own, dict) for own in rope.values()):  # of layers with a window, and of the others
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if settings.get("sliding_window") is not None and arch in WINDOWS:
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    if arch not in (*WINDOWS, "afmoe", "cohere2", "gemma2", "gpt-oss", "phi3"):
        found.pop("attention.sliding_window", None)
    if "rope_theta" in rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        betas = {f"rope.scaling.yarn_{name}": name for name in ("beta_fast", "beta_slow")}
        found |= {key: float(rope[name]) for key, name in betas.items() if name in rope}
    if rope.get("original_max_position_embeddings"):
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        old = rope["original_max_position_embeddings"]
        stretch = max(settings["max_position_embeddings"] / old, 1.0)
        found["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(stretch) / np.log(old)))
    if "llama_4_scaling_beta" in rope and arch != "mistral4":  # whose files lack it
        found["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
        found["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
    if arch.startswith("nemotron_h"):
        inner = settings["moe_intermediate_size" if arch.endswith("moe") else "intermediate_size"]
        mamba = settings["mamba_num_heads"] * settings["mamba_head_dim"]
        found |= {
            "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in kinds],
            "feed_forward_length": [inner * (kind in ("mlp", "moe")) for kind in kinds], "ssm.inner_size": mamba,
            "ssm.conv_kernel": settings["conv_kernel"], "ssm.state_size": settings["ssm_state_size"],
            "ssm.group_count": settings["n_groups"], "ssm.time_step_rank": settings["mamba_num_heads"],
            "expert_shared_feed_forward_length": settings["moe_shared_expert_intermediate_size"],
        }  # fmt: skip
    if arch == "nemotron":
        found["attention.layer_norm_epsilon"] = settings["norm_eps"]
    if arch == "nemotron_h":
        found = {name: value for name, value in found.items() if not name.startswith("expert")}
    if arch in ("afmoe", "exaone-moe"):
        found["expert_shared_count"] = settings["num_shared_experts"]
    if arch == "exaone-moe":
        found["leading_dense_block_count"] = settings["mlp_layer_types"].count("dense")
        found["expert_shared_feed_forward_length"] = settings["num_shared_experts"] * settings["moe_intermediate_size"]
    if arch == "afmoe":
        found |= {"expert_weights_scale": settings["route_scale"], "expert_weights_norm": True}
    if arch.startswith("hunyuan") and "alpha" in rope:
        found["rope.freq_base"] *= rope["alpha"] ** (head_dim / (head_dim - 2))
    if arch == "gemma3n":
        normal = NormalDist()
        found |= {
            "activation_sparsity_scale": [
                normal.inv_cdf(share) if share else float("-inf") for share in settings["activation_sparsity_pattern"]
            ],
            "altup.active_idx": settings["altup_active_idx"], "altup.num_inputs": settings["altup_num_inputs"],
        }  # fmt: skip
    if arch == "gemma4":
        found |= gemma4_metadata(settings)
    if arch == "muse-glimmer":
        found |= {
            "logit_scale": settings["output_multiplier"],
            "final_logit_softcapping": settings["final_logit_softcapping"],
        }
    if arch == "laguna":
        found |= {
            "attention.head_count": settings["num_attention_heads_per_layer"], "expert_weights_norm": True,
            "expert_weights_scale": settings["moe_routed_scaling_factor"],
            "leading_dense_block_count": settings["mlp_layer_types"].count("dense"),
            "rope.dimension_count_swa": int(
                head_dim * settings["rope_parameters"]["sliding_attention"].get("partial_rotary_factor", 1.0)
            ),
        }  # fmt: skip
    if arch == "llama4":
        found |= {
            "feed_forward_length": settings["intermediate_size_mlp"],
            "expert_feed_forward_length": settings["intermediate_size"],
            "interleave_moe_layer_step": settings["interleave_moe_layer_step"],
        }  # fmt: skip
    if arch == "hunyuan-moe":
        found |= {
            "expert_used_count": settings["moe_topk"], "expert_shared_count": 1,
            "expert_feed_forward_length": settings["intermediate_size"],
            "expert_shared_feed_forward_length": settings["intermediate_size"],
        }  # fmt: skip
    if arch == "step35":
        windowed = settings["num_sliding_attention_heads"]
        found |= {
            "attention.head_count": [windowed if kind == "sliding_attention" else heads for kind in kinds],
            "attention.head_count_kv": [kv_heads] * layers, "swiglu_clamp_exp": settings["swiglu_limits"],
            "swiglu_clamp_shexp": settings["swiglu_limits_shared"], "moe_every_n_layers": 1,
            "expert_shared_feed_forward_length": settings["share_expert_dim"], "expert_weights_norm": True,
            "expert_weights_scale": settings["moe_router_scaling_factor"],
            "leading_dense_block_count": settings["mlp_layer_types"].count("dense"),
        }  # fmt: skip
        found.pop("rope.dimension_count")
    if arch == "gpt-oss":
        found["expert_feed_forward_length"] = settings["intermediate_size"]
    if arch == "minimax-m2":
        found["expert_feed_forward_length"] = settings["intermediate_size"]
    if arch in SIGMOID or settings["architectures"][0] in ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"):
        found["expert_gating_func"] = 2
    if settings.get("norm_topk_prob") is not None and arch in NORMED:
        found["expert_weights_norm"] = settings["norm_topk_prob"]
    if arch == "ernie4_5-moe":
        found["interleave_moe_layer_step"] = 1
        shared = settings["moe_num_shared_experts"] * settings["moe_intermediate_size"]
        found["expert_shared_feed_forward_length"] = shared
    if arch == "hy_v3":
        shared = settings["num_shared_experts"] * settings["moe_intermediate_size"]
        found |= {"expert_shared_feed_forward_length": shared, "expert_weights_norm": True}
    if arch in LATENTS:
        rank, rotated = settings["kv_lora_rank"], settings["qk_rope_head_dim"]
        found |= {
            "attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank,
            "attention.key_length_mla": settings["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": settings["v_head_dim"], "rope.dimension_count": rotated,
        }  # fmt: skip
        if "mscale_all_dim" in rope:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
        if "mlp_layer_types" in settings:
            found["leading_dense_block_count"] = settings["mlp_layer_types"].count("dense")
        if settings["architectures"] == ["YoutuForCausalLM"]:
            found |= {"leading_dense_block_count": layers, "expert_shared_count": 0}
            found["expert_feed_forward_length"] = settings["intermediate_size"]
    if arch in KDA:
        full, shared = [int(kind == "full_attention") for kind in kinds], settings["num_shared_experts"]
        found |= {
            "attention.head_count_kv": full, "attention.value_length": head_dim, "expert_shared_count": shared,
            "kda.head_dim": settings["linear_head_dim"], "ssm.conv_kernel": settings["linear_conv_kernel_dim"],
        }  # fmt: skip
    if arch == "bailingmoe3":
        found |= {
            "kda.safe_gate": settings["kda_safe_gate"], "kda.gate_lower_bound": settings["kda_lower_bound"],
            "expert_shared_feed_forward_length": shared * settings["moe_intermediate_size"],
            "expert_weights_norm": settings["moe_renormalize"], "attention.value_length": settings["linear_head_dim"],
        }  # fmt: skip
    if arch == "olmo":
        found["attention.layer_norm_epsilon"] = 1e-5
    if arch == "granite_swa":
        found["attention.rope_pattern"] = [theta != 0 for theta in settings["layer_rope_theta"]]
    if arch == "cohere2moe":
        found |= {
            "expert_feed_forward_length": settings["intermediate_size"],
            "feed_forward_length": settings.get("prefix_dense_intermediate_size") or settings["intermediate_size"],
            "expert_shared_count": settings["num_shared_experts"],
            "expert_shared_feed_forward_length": settings["intermediate_size"] * settings["num_shared_experts"],
            "expert_gating_func": 2 if settings["expert_selection_fn"] == "sigmoid" else 1,
            "leading_dense_block_count": (settings["mlp_layer_types"] or []).count("dense"),
        }  # fmt: skip
    if arch == "mimo2":
        windowed = settings.get("swa_num_key_value_heads") or 2 * kv_heads
        found |= {
            "attention.head_count_kv": [windowed if kind == "sliding_attention" else kv_heads for kind in kinds],
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
            "attention.value_length": settings["v_head_dim"],
            "attention.value_scale": settings["attention_value_scale"],
        }  # fmt: skip
        found.pop("expert_weights_scale")
    if arch == "minimax-m3":
        found |= {
            "feed_forward_length": settings["dense_intermediate_size"], "expert_shared_count": 1,
            "expert_feed_forward_length": settings["intermediate_size"], "expert_weights_norm": True,
            "attention.indexer.head_count": settings["index_n_heads"],
            "attention.indexer.top_k": settings["index_topk_blocks"],
            "attention.indexer.block_size": settings["index_block_size"],
            "attention.indexer.local_blocks": settings["index_local_blocks"],
            "leading_dense_block_count": settings["mlp_layer_types"].count("dense"),
        }  # fmt: skip
        found.pop("expert_shared_feed_forward_length")
    if arch in DELTA:
        found["ssm.inner_size"] = settings["linear_num_value_heads"] * settings["linear_value_head_dim"]
        pairs = found["rope.dimension_count"] // 2
        if arch == "qwen35moe":  # as newer files do
            found["attention.recurrent_layers"] = [kind == "linear_attention" for kind in kinds]
        found["rope.dimension_sections"] = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    if "mamba_expand" in settings and arch != "falcon-h1":
        found["ssm.inner_size"] = settings["mamba_expand"] * settings["hidden_size"]
        found["rope.scaling.finetuned"] = settings["position_embedding_type"] == "rope"
        if not settings["num_local_experts"]:
            found |= {"feed_forward_length": settings["shared_intermediate_size"], "expert_used_count": 0}
    return found


def gemma4_metadata(settings: dict[str, Any]) -> dict[str, Any]:
    kinds, size = settings["layer_types"], settings["head_dim"]
    wide: dict[str, Any] = next(iter((settings.get("per_layer_config") or {}).values()), {})
    full = settings.get("global_head_dim") or wide.get("head_dim", size)
    heads = settings["num_key_value_heads"]
    others = settings.get("num_global_key_value_heads") or wide.get("num_key_value_heads", heads)
    inner, own = settings["intermediate_size"], len(kinds) - settings["num_kv_shared_layers"]
    found = {
        "attention.key_length": full, "attention.value_length": full, "attention.key_length_swa": size,
        "attention.value_length_swa": size, "rope.dimension_count": full, "rope.dimension_count_swa": size,
    }  # fmt: skip
    if others != heads:
        found["attention.head_count_kv"] = [heads if kind == "sliding_attention" else others for kind in kinds]
    if settings["use_double_wide_mlp"]:
        found["feed_forward_length"] = [inner * (1 + (at >= own)) for at in range(len(kinds))]
    return found


def _add(writer: Any, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
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
    arch = arch_of(settings)
    names = names_of(arch, settings["num_hidden_layers"])
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

"""Qwen2, Qwen3, their mixtures of experts, and the text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from snapstream.config.model import MoEConfig
from snapstream.models.config_json import Settings, flag, whole_number
from snapstream.models.family import (
    Family,
    Recipe,
    attention_biases,
    read_experts,
    windows_by_type,
    windows_of_all_layers,
)
from snapstream.models.tensors import named

_DEFAULTS: Settings = {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096}


def _windows(settings: Settings) -> Recipe:
    first = whole_number(settings, "max_window_layers", 28)
    return windows_by_type(settings, lambda layer: layer >= first)


def softmax_experts(settings: Settings, **fields: Any) -> MoEConfig:
    """Softmax over all experts; whether the weights of the chosen ones add up to 1 is a field."""
    name = "num_experts" if settings.get("num_experts") is not None else "num_local_experts"
    return read_experts(settings, name, normalise="norm_topk_prob", **fields)


# A gated MLP of its own size, next to the experts, that every token passes.
SHARED: dict[str, Any] = {"num_shared": 1, "own_shared": "shared_expert_intermediate_size"}


def _qwen3_moe(settings: Settings) -> Recipe:
    biases = attention_biases(settings)
    return {**biases, "qk_norm": True, "moe": softmax_experts(settings), **windows_of_all_layers(settings)}


def _qwen2_moe(settings: Settings) -> Recipe:
    first = whole_number(settings, "max_window_layers", 28)
    windows = windows_by_type(settings, lambda layer: layer % 2 == 0 and layer < first)
    moe = softmax_experts(settings, has_shared_gate=True, **SHARED)
    return {"qkv_bias": flag(settings, "qkv_bias"), "moe": moe, **windows}


def qwen3_moe_refusals(settings: Settings) -> list[str]:
    """Models in which only some layers have experts."""
    step, dense = whole_number(settings, "decoder_sparse_step", 1), settings.get("mlp_only_layers")
    reasons = []
    if step != 1:
        reasons.append(f"decoder_sparse_step is {step}; only models whose every layer has experts (1) are supported")
    if dense:
        reasons.append(f"mlp_only_layers is {dense!r}; only models whose every layer has experts are supported")
    return reasons


def without_mrope(settings: Settings) -> Settings:
    """Text has the same position on every axis of mrope, so its rotation is the plain one."""
    found = dict(settings)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := found.get(name), dict):
            found[name] = {key: own for key, own in rope.items() if not key.startswith("mrope") and own != "mrope"}
    return found


QWEN2 = Family(defaults=_DEFAULTS, recipe=lambda settings: {"qkv_bias": True, **_windows(settings)}, has_windows=True)
QWEN3 = Family(
    defaults={**_DEFAULTS, "head_dim": 128},
    recipe=lambda settings: {**attention_biases(settings), "qk_norm": True, **_windows(settings)},
    has_windows=True,
)
QWEN3_MOE = Family(
    defaults={
        **_DEFAULTS, "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    recipe=_qwen3_moe,
    refusals=qwen3_moe_refusals,
    has_windows=True,
    has_experts=True,
)  # fmt: skip
QWEN2_MOE = Family(
    defaults={
        **_DEFAULTS, "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60,
        "num_experts_per_tok": 4, "num_key_value_heads": 16, "qkv_bias": True, "shared_expert_intermediate_size": 5632,
    },
    recipe=_qwen2_moe,
    refusals=qwen3_moe_refusals,
    has_windows=True,
    has_experts=True,
    tensors=named({"mlp.shared_experts.": "mlp.shared_expert."}),
)  # fmt: skip
QWEN2_VL = replace(
    QWEN2,
    defaults={
        **_DEFAULTS, "num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "bos_token_id": 151643, "eos_token_id": 151645,
    },
    rewrite=without_mrope,
    is_text_part=True,
)  # fmt: skip
QWEN3_VL = replace(
    QWEN3, defaults={**QWEN3.defaults, "rope_theta": 500000.0}, rewrite=without_mrope, is_text_part=True
)  # fmt: skip
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    defaults={
        **_DEFAULTS, "num_key_value_heads": 16, "num_local_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    rewrite=without_mrope,
    recipe=lambda settings: _qwen3_moe({**settings, "norm_topk_prob": True}),  # whatever the file says
    may_fuse_experts=True,
    is_text_part=True,
)  # fmt: skip

FAMILIES = {
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_MOE,
}

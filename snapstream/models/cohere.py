"""Cohere: Command R, Command R7B, Command A and a mixture of experts: attention and MLP side by side after one norm.

No torch.
"""

from __future__ import annotations

from snapstream.config.model import LayerNorms, MoEConfig, Multipliers
from snapstream.models.config_json import Settings, flag, number, whole_number
from snapstream.models.family import (
    Family,
    Recipe,
    attention_biases,
    layer_kind_refusals,
    num_dense,
    num_layers,
    refuse_absent_window,
    windows_by_type,
)


def _rewrite(settings: Settings) -> Settings:
    return {**settings, "rms_norm_eps": settings.get("layer_norm_eps")}


def _cohere(settings: Settings) -> Recipe:
    return {
        **attention_biases(settings), "is_parallel": True, "is_centered": True,
        "multipliers": Multipliers(logits=number(settings, "logit_scale", above=0.0)),
        "norms": LayerNorms("input_layernorm", None, None, None),
    }  # fmt: skip


def _cohere2(settings: Settings) -> Recipe:
    """Layers without a window have no rotary embedding."""
    step, heads = whole_number(settings, "sliding_window_pattern"), whole_number(settings, "num_attention_heads")
    windows = windows_by_type(settings, lambda layer: (layer + 1) % step != 0)
    has = windows.get("windows") or (None,) * num_layers(settings)
    return {
        **_cohere(settings), **windows, "rotated_layers": tuple(window is not None for window in has),
        "head_dim": whole_number(settings, "hidden_size") // max(heads, 1),
    }  # fmt: skip


def _moe_rewrite(settings: Settings) -> Settings:
    """The fields of layers with an MLP, which come first, and norms of either kind."""
    has_rms_norm = settings.get("rms_norm_eps") is not None
    own = {"moe_intermediate_size": settings.get("intermediate_size"), "is_centered": not has_rms_norm}
    if settings.get("prefix_dense_intermediate_size") is not None:
        own["intermediate_size"] = settings["prefix_dense_intermediate_size"]
    return {**(settings if has_rms_norm else _rewrite(settings)), **own}


def _cohere2_moe(settings: Settings) -> Recipe:
    """First layers with an MLP have a pattern of windows of their own; if that is 1, they are rotated without any."""
    own, step = (
        whole_number(settings, f"{prefix}sliding_window_pattern") for prefix in ("prefix_dense_", "")
    )  # fmt: skip
    first, start = num_dense(settings), whole_number(settings, "first_k_dense_replace")
    shared = whole_number(settings, "num_shared_experts")
    windows = windows_by_type(
        settings, lambda layer: (layer + 1) % own != 0 if layer < start else (layer - start + 1) % step != 0
    )
    has = windows.get("windows") or (None,) * num_layers(settings)
    is_sigmoid = settings["expert_selection_fn"] == "sigmoid"
    share = 0.5 if shared and settings["shared_expert_combination_strategy"] == "average" else 1.0
    moe = MoEConfig(
        num_experts=whole_number(settings, "num_experts"),
        top_k=whole_number(settings, "num_experts_per_tok"),
        inner=whole_number(settings, "moe_intermediate_size"),
        num_shared=shared,
        first_dense=first,
        scoring="sigmoid" if is_sigmoid else "softmax",
        normalise=not is_sigmoid or flag(settings, "norm_topk_prob"),
        scale=share,
        shared_scale=share,
    )
    rotated = (window is not None or (layer < first and own == 1) for layer, window in enumerate(has))
    return {
        **_cohere(settings), **windows, "rotated_layers": tuple(rotated), "is_centered": flag(settings, "is_centered"),
        "moe": moe,
    }  # fmt: skip


def _cohere2_moe_refusals(settings: Settings) -> list[str]:
    reasons = [*_cohere2_refusals(settings), *layer_kind_refusals(settings)]
    if (pattern := whole_number(settings, "prefix_dense_sliding_window_pattern")) < 1:
        reasons.append(f"prefix_dense_sliding_window_pattern is {pattern}; it must be >= 1")
    known = {"expert_selection_fn": ("softmax", "sigmoid"), "shared_expert_combination_strategy": ("average", "sum")}
    for name, values in known.items():
        if settings.get(name) not in values:
            reasons.append(f"{name} is {settings.get(name)!r}; it must be {values[0]!r} or {values[1]!r}")
    return reasons


def _refusals(settings: Settings) -> list[str]:
    if flag(settings, "use_qk_norm"):
        return ["use_qk_norm is true (Command R+); only models without norms of queries and keys are supported"]
    return []


def _cohere2_refusals(settings: Settings) -> list[str]:
    reasons = refuse_absent_window(settings)
    if whole_number(settings, "sliding_window_pattern") < 1:
        reasons.append(f"sliding_window_pattern is {settings['sliding_window_pattern']}; it must be >= 1")
    return reasons


_DEFAULTS: Settings = {
    "bos_token_id": 5, "eos_token_id": 255001, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}  # fmt: skip
COHERE = Family(
    defaults={**_DEFAULTS, "rope_theta": 500000.0},
    rewrite=_rewrite,
    recipe=_cohere,
    refusals=_refusals,
    is_interleaved=True,
)
COHERE2 = Family(
    defaults={**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    rewrite=_rewrite,
    recipe=_cohere2,
    refusals=_cohere2_refusals,
    has_windows=True,
    is_interleaved=True,
)
COHERE2_MOE = Family(
    defaults={
        **_DEFAULTS, "expert_selection_fn": "softmax", "first_k_dense_replace": 0, "head_dim": 128,
        "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
        "prefix_dense_sliding_window_pattern": 1, "rms_norm_eps": None,
        "shared_expert_combination_strategy": "average", "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    rewrite=_moe_rewrite,
    recipe=_cohere2_moe,
    refusals=_cohere2_moe_refusals,
    has_experts=True,
    has_windows=True,
    is_interleaved=True,
)  # fmt: skip

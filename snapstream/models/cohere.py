"""Cohere: Command R, Command R7B and Command A: attention and MLP side by side after one LayerNorm. No torch."""

from __future__ import annotations

from snapstream.config.model import LayerNorms, Multipliers
from snapstream.models.config_json import Settings, flag, number, whole_number
from snapstream.models.family import (
    Family,
    Recipe,
    attention_biases,
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

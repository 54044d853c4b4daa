"""Gemma 1; Gemma 3, text: four norms a layer, GELU, windows with a rope of their own (arXiv 2503.19786). No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from snapstream.config.model import LayerNorms, Multipliers
from snapstream.models.config_json import Settings, flag, number, whole_number
from snapstream.models.family import (
    Family,
    Recipe,
    attention_biases,
    refuse_absent_window,
    ropes_by_kind,
    windows_by_type,
)

_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def _gemma3(settings: Settings) -> Recipe:
    """query_pre_attn_scalar takes the place of E in 1 / sqrt(E)."""
    step = whole_number(settings, "sliding_window_pattern")
    windows = windows_by_type(settings, lambda layer: (layer + 1) % step != 0)
    hidden, head_dim = whole_number(settings, "hidden_size"), whole_number(settings, "head_dim")
    ropes = ropes_by_kind(
        settings,
        {"rope_theta": settings["rope_theta"], "rope_scaling": settings.get("rope_scaling")},
        {"rope_theta": settings["rope_local_base_freq"]},
    )
    if not windows:
        ropes.pop("window_rope")
    scale = number(settings, "query_pre_attn_scalar", above=0.0)
    return {
        **attention_biases(settings), **windows, **ropes,
        "activation": "gelu_tanh", "head_dim": head_dim, "multipliers": Multipliers(
            embedding=math.sqrt(max(hidden, 1)), attention=math.sqrt(max(head_dim, 1) / scale)
        ),
        "max_position": whole_number(settings, "max_position_embeddings"), "norm_offset": 1.0, "norms": _NORMS,
        "qk_norm": True,
    }  # fmt: skip


def _gemma(settings: Settings) -> Recipe:
    """Llama with GELU, norms that add 1 to their weights, and scaled embeddings (arXiv 2403.08295, section 2)."""
    hidden = whole_number(settings, "hidden_size")
    return {
        **attention_biases(settings), "activation": "gelu_tanh", "norm_offset": 1.0,
        "multipliers": Multipliers(embedding=math.sqrt(max(hidden, 1))),
    }  # fmt: skip


def _gemma_refusals(settings: Settings) -> list[str]:
    """``gelu`` in old files means the approximation by tanh, which ``hidden_activation`` names in newer ones."""
    reasons = []
    name = "hidden_act" if settings.get("hidden_activation") is None else "hidden_activation"
    if settings.get(name) not in ("gelu", "gelu_pytorch_tanh"):
        reasons.append(f"{name} is {settings.get(name)!r}; only 'gelu_pytorch_tanh' is supported for Gemma")
    if flag(settings, "use_bidirectional_attention"):
        reasons.append("use_bidirectional_attention is true; only causal attention is supported")
    return reasons


def _refusals(settings: Settings) -> list[str]:
    reasons = refuse_absent_window(settings)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if settings.get(name) is not None:
            reasons.append(f"{name} is {settings[name]!r}; only models without soft caps are supported (as Gemma 3)")
    if flag(settings, "use_bidirectional_attention"):
        reasons.append("use_bidirectional_attention is true; only causal attention is supported")
    if (activation := settings.get("hidden_activation")) != "gelu_pytorch_tanh":
        reasons.append(f"hidden_activation is {activation!r}; only 'gelu_pytorch_tanh' is supported for Gemma 3")
    if whole_number(settings, "sliding_window_pattern") < 1:
        reasons.append(f"sliding_window_pattern is {settings['sliding_window_pattern']}; it must be >= 1")
    return reasons


GEMMA = Family(
    defaults={
        "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 16, "tie_word_embeddings": True,
    },
    recipe=_gemma,
    refusals=_gemma_refusals,
    has_own_activation=True,
)  # fmt: skip
GEMMA3 = Family(
    defaults={
        "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0,
        "rope_theta": 1_000_000.0, "sliding_window": 4096, "sliding_window_pattern": 6, "tie_word_embeddings": True,
    },
    recipe=_gemma3,
    refusals=_refusals,
    has_windows=True,
    has_own_activation=True,
    has_rope_by_kind=True,
)  # fmt: skip
# The text part of 4b, 12b and 27b, whose text_config leaves out what the config class of transformers fills in.
GEMMA3_TEXT_PART = replace(
    GEMMA3,
    defaults={
        **GEMMA3.defaults, "max_position_embeddings": 131072, "num_attention_heads": 8, "vocab_size": 262208,
    },
    is_text_part=True,
)  # fmt: skip

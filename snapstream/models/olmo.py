"""OLMo 2 and 3, and EXAONE 4: norms after attention and MLP instead of before. No torch."""

from __future__ import annotations

from dataclasses import replace

from snapstream.config.model import LayerNorms
from snapstream.models.config_json import Settings
from snapstream.models.family import (
    Family,
    Recipe,
    attention_biases,
    num_layers,
    refuse_absent_window,
    ropes_by_kind,
    windows_by_type,
)

_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_OLMO3_THETA = 500000.0
_DEFAULTS: Settings = {"eos_token_id": 50279, "rms_norm_eps": 1e-5}


def _olmo2(settings: Settings) -> Recipe:
    return {**attention_biases(settings), "norms": _NORMS, "has_whole_qk_norm": True}


def _olmo3(settings: Settings) -> Recipe:
    """rope_theta and rope_scaling are of the layers without a window only, as transformers reads them."""
    windows = windows_by_type(settings, lambda layer: (layer + 1) % 4 != 0)
    full = {"rope_theta": settings["rope_theta"], "rope_scaling": settings.get("rope_scaling")}
    ropes = ropes_by_kind(settings, full, {"rope_theta": _OLMO3_THETA})
    if not windows:
        ropes.pop("window_rope")
    return {**_olmo2(settings), **windows, **ropes}


def _exaone4(settings: Settings) -> Recipe:
    return {"norms": _NORMS, **exaone_attention(settings)}


def exaone_attention(settings: Settings) -> Recipe:
    """In a model with windows the layers without one have no rotary embedding."""
    pattern = settings.get("sliding_window_pattern")
    step = pattern if isinstance(pattern, int) and pattern > 0 else 1
    recipe: Recipe = {"qk_norm": True, **windows_by_type(settings, lambda i: (i + 1) % step != 0)}
    if settings.get("sliding_window") is None:
        return recipe
    windows = recipe.get("windows", (None,) * num_layers(settings))
    return {**recipe, "rotated_layers": tuple(window is not None for window in windows)}


def exaone_refusals(settings: Settings) -> list[str]:
    pattern = settings.get("sliding_window_pattern")
    is_listed = settings.get("layer_types") is not None or settings.get("sliding_window") is None
    if is_listed or (isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1):
        return []
    return [f"sliding_window_pattern is {pattern!r}; without layer_types it must be a whole number >= 1"]


OLMO2 = Family(defaults=_DEFAULTS, recipe=_olmo2)
OLMO3 = Family(
    defaults={**_DEFAULTS, "rope_theta": _OLMO3_THETA, "sliding_window": 4096}, recipe=_olmo3,
    refusals=refuse_absent_window, has_windows=True, has_rope_by_kind=True,
)  # fmt: skip
EXAONE4 = Family(
    defaults={
        "bos_token_id": 0, "eos_token_id": 2, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    recipe=_exaone4,
    refusals=exaone_refusals,
    has_windows=True,
)  # fmt: skip
EXAONE4_5_TEXT_PART = replace(EXAONE4, is_text_part=True, skipped=("mtp",))

"""OLMo; OLMo 2, 3 and hybrid, and EXAONE 4: norms after attention and MLP instead of before. No torch."""

from __future__ import annotations

from dataclasses import replace

from snapstream.config import ModelConfig
from snapstream.config.model import LayerNorms
from snapstream.config.recurrent import DeltaNet
from snapstream.models.config_json import Settings, flag, rope_settings, whole_number
from snapstream.models.family import (
    ATTENTION,
    LINEAR,
    Family,
    Recipe,
    attention_biases,
    filled,
    num_layers,
    refuse_absent_window,
    refuse_clipping,
    ropes_by_kind,
    windows_alone_rotated,
    windows_by_type,
    with_recurrence,
)
from snapstream.models.qwen_next import delta_net, delta_tensors
from snapstream.models.tensors import TensorSpecs, decoder_tensors, renamed, without_norm_weights

_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_OLMO3_THETA = 500000.0
_DEFAULTS: Settings = {"eos_token_id": 50279, "rms_norm_eps": 1e-5}


def _olmo2(settings: Settings) -> Recipe:
    return {**attention_biases(settings), "norms": _NORMS, "has_whole_qk_norm": True}


def _olmo3(settings: Settings) -> Recipe:
    """rope_theta and rope_scaling are of the layers without a window only, as transformers reads them."""
    windows = windows_by_type(settings, lambda layer: (layer + 1) % 4 != 0)
    full = {"rope_theta": settings["rope_theta"], "rope_scaling": settings.get("rope_scaling")}
    return {**_olmo2(settings), **ropes_by_kind(settings, windows, full, {"rope_theta": _OLMO3_THETA})}


def _hybrid_settings(settings: Settings) -> Settings:
    """Sizes of recurrent layers follow from those of attention; a null rope_theta: no rotary embedding."""
    heads, count = whole_number(settings, "num_attention_heads"), num_layers(settings)
    types = [ATTENTION if layer % 4 == 3 or layer == count - 1 < 3 else LINEAR for layer in range(count)]
    found = filled(settings, layer_types=types, linear_num_key_heads=heads, linear_num_value_heads=heads)
    key_heads = max(whole_number(found, "linear_num_key_heads"), 1)
    found = filled(found, linear_key_head_dim=int(0.75 * whole_number(found, "hidden_size") / key_heads))
    found = filled(found, linear_value_head_dim=2 * whole_number(found, "linear_key_head_dim"))
    if rope_settings(found)["rope_theta"] is None:
        found |= {"rope_theta": 10000.0, "rope_parameters": None, "rope_scaling": None, "is_rotated": False}
    return found


def _hybrid(settings: Settings) -> Recipe:
    """Recurrent layers have norms before both parts, and an epsilon of their own, as transformers has it."""
    most_beta = 2.0 if flag(settings, "linear_allow_neg_eigval") else 1.0
    recipe = with_recurrence(
        settings, _olmo2(settings), lambda own: replace(delta_net(own), most_beta=most_beta, norm_eps=1e-5)
    )
    if not settings.get("is_rotated", True):
        recipe["rotated_layers"] = (False,) * num_layers(settings)
    return {**recipe, "recurrent_norms": LayerNorms()} if "recurrent" in recipe else recipe


def _hybrid_tensors(config: ModelConfig) -> TensorSpecs:
    net, specs = config.recurrent, {**decoder_tensors(config), **delta_tensors(config)}
    if not isinstance(net, DeltaNet):
        return specs
    keys, size = net.key_size, net.channels
    mixed = {"q": (slice(keys),), "k": (slice(keys, 2 * keys),), "v": (slice(2 * keys, size),)}
    for role, name, parts in (
        ("delta_in", "proj", {**mixed, "g": (slice(size, None),)}),
        ("conv_kernel", "conv1d", mixed),
    ):
        own = {f"linear_attn.{part}_{name}.weight": place for part, place in parts.items()}
        specs[role] = replace(specs[role], parts=own, segments={})
    names = {"in_proj_b": "b_proj", "in_proj_a": "a_proj", "attn.norm": "attn.o_norm", "out_proj": "o_proj"}
    return renamed(specs, names)


def exaone_attention(settings: Settings) -> Recipe:
    """In a model with windows the layers without one have no rotary embedding."""
    pattern = settings.get("sliding_window_pattern")
    step = pattern if isinstance(pattern, int) and pattern > 0 else 1
    read = windows_by_type if settings.get("sliding_window") is None else windows_alone_rotated
    return {"qk_norm": True, **read(settings, lambda i: (i + 1) % step != 0)}


def exaone_refusals(settings: Settings) -> list[str]:
    pattern = settings.get("sliding_window_pattern")
    is_listed = settings.get("layer_types") is not None or settings.get("sliding_window") is None
    if is_listed or (isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1):
        return []
    return [f"sliding_window_pattern is {pattern!r}; without layer_types it must be a whole number >= 1"]


# Norms are LayerNorms without weights, and with an epsilon that no file says.
OLMO = Family(
    defaults={"eos_token_id": 50279},
    rewrite=lambda settings: {**settings, "rms_norm_eps": 1e-5},
    recipe=lambda settings: {**attention_biases(settings), "is_centered": True},
    refusals=refuse_clipping,
    tensors=lambda config: without_norm_weights(decoder_tensors(config)),
)
OLMO2 = Family(defaults=_DEFAULTS, recipe=_olmo2)
OLMO3 = Family(
    defaults={**_DEFAULTS, "rope_theta": _OLMO3_THETA, "sliding_window": 4096}, recipe=_olmo3,
    refusals=refuse_absent_window, has_windows=True, has_rope_by_kind=True,
)  # fmt: skip
OLMO_HYBRID = Family(
    defaults={
        "bos_token_id": None, "eos_token_id": 100257, "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4,
    },
    rewrite=_hybrid_settings,
    recipe=_hybrid,
    tensors=_hybrid_tensors,
    other_layer_types=(LINEAR,),
    aliases={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
)  # fmt: skip
EXAONE4 = Family(
    defaults={
        "bos_token_id": 0, "eos_token_id": 2, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    recipe=lambda settings: {"norms": _NORMS, **exaone_attention(settings)},
    refusals=exaone_refusals,
    has_windows=True,
)  # fmt: skip

FAMILIES = {
    "Exaone4ForCausalLM": EXAONE4,
    "Exaone4_5_ForConditionalGeneration": replace(EXAONE4, is_text_part=True, skipped=("mtp",)),
    "OlmoForCausalLM": OLMO,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "OlmoHybridForCausalLM": OLMO_HYBRID,
}

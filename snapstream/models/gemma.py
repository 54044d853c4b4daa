"""Gemma 1; Gemma 2 to 4, text: four norms a layer, GELU, windows; caps of scores in Gemma 2 (arXiv 2408.00118), another
rope of layers with windows since Gemma 3 (arXiv 2503.19786). The text part of Muse Glimmer, with the same norms.
No torch.

Gemma 4 differs by size: 31B has larger and fewer kv heads in layers without a window, where one projection gives keys
and values; 26B-A4B has experts beside every MLP; in E2B and E4B the last layers attend to the keys and values of
earlier ones, and every layer has token embeddings of its own. So it is in Gemma 3n, whose layers also run over several
residual streams (``config.model.AltUp``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from snapstream.config import ModelConfig
from snapstream.config.model import AltUp, HeadSizes, LayerNorms, Multipliers
from snapstream.models.config_json import Settings, flag, number, rope_settings, whole_number
from snapstream.models.family import (
    ATTENTION,
    WINDOW,
    Family,
    Recipe,
    attention_biases,
    below_one,
    cap_of,
    filled,
    layers_of,
    num_layers,
    other_values,
    read_experts,
    refuse_absent_window,
    ropes_by_kind,
    unbuilt,
    windows_by_type,
)
from snapstream.models.tensors import (
    TensorSpecs,
    decoder_tensors,
    in_fp32,
    norm,
    renamed,
    with_gates_apart,
    without_norm_weights,
)

_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def _multipliers(settings: Settings) -> Multipliers:
    """Of Gemma 2 and 3: query_pre_attn_scalar takes the place of E in 1 / sqrt(E)."""
    hidden, head_dim = whole_number(settings, "hidden_size"), whole_number(settings, "head_dim")
    scale = number(settings, "query_pre_attn_scalar", above=0.0)
    return Multipliers(embedding=math.sqrt(max(hidden, 1)), attention=math.sqrt(max(head_dim, 1) / scale))


def _gemma2(settings: Settings) -> Recipe:
    return {
        **attention_biases(settings), **windows_by_type(settings, lambda layer: layer % 2 == 0),
        "activation": "gelu_tanh", "logit_cap": cap_of(settings, "final_logit_softcapping"),
        "multipliers": _multipliers(settings), "norm_offset": 1.0, "norms": _NORMS,
        "score_cap": cap_of(settings, "attn_logit_softcapping"),
    }  # fmt: skip


def _gemma3(settings: Settings) -> Recipe:
    step = whole_number(settings, "sliding_window_pattern")
    windows = windows_by_type(settings, lambda layer: (layer + 1) % step != 0)
    return {
        **attention_biases(settings), **_gemma3_ropes(settings, windows),
        "activation": "gelu_tanh", "head_dim": whole_number(settings, "head_dim"),
        "multipliers": _multipliers(settings),
        "max_position": whole_number(settings, "max_position_embeddings"), "norm_offset": 1.0, "norms": _NORMS,
        "qk_norm": True,
    }  # fmt: skip


def _gemma3_ropes(settings: Settings, windows: Recipe) -> Recipe:
    full = {"rope_theta": settings["rope_theta"], "rope_scaling": settings.get("rope_scaling")}
    return ropes_by_kind(settings, windows, full, {"rope_theta": settings["rope_local_base_freq"]})


def _gemma3n_settings(settings: Settings) -> Settings:
    """Layer types, sparsities and inner sizes as transformers completes them; one inner size of all layers."""
    count, inner = num_layers(settings), settings["intermediate_size"]
    num_sparse = 10 if count > 10 else 0
    found = filled(
        settings, layer_types=[WINDOW if (layer + 1) % 5 else ATTENTION for layer in range(count)],
        activation_sparsity_pattern=[0.95] * num_sparse + [0.0] * (count - num_sparse),
    )  # fmt: skip
    if isinstance(inner, list) and len(inner) == count and inner.count(inner[0]) == count:
        found["intermediate_size"] = inner[0]
    return found


def _normed_heads(settings: Settings) -> Recipe:
    """What Gemma 3n and 4 share. Scores are not divided by sqrt(E): queries and keys are normed."""
    hidden = whole_number(settings, "hidden_size")
    return {
        "activation": "gelu_tanh", "kv_sources": _kv_sources(settings), "has_value_norm": True,
        "has_unscaled_scores": True, "per_layer_dim": whole_number(settings, "hidden_size_per_layer_input", 0),
        "logit_cap": cap_of(settings, "final_logit_softcapping"),
        "multipliers": Multipliers(embedding=math.sqrt(max(hidden, 1))), "norms": _NORMS, "qk_norm": True,
        "max_position": whole_number(settings, "max_position_embeddings"),
    }  # fmt: skip


def _gemma3n(settings: Settings) -> Recipe:
    windows = windows_by_type(settings, lambda layer: False)
    shares = settings["activation_sparsity_pattern"]
    if not isinstance(shares, list) or any(type(share) not in (int, float) for share in shares):
        raise ValueError(f"activation_sparsity_pattern is {str(shares)[:200]}; it must be a list of numbers by layer")
    return {
        **_normed_heads(settings), **_gemma3_ropes(settings, windows), "head_dim": whole_number(settings, "head_dim"),
        "per_layer_lines": whole_number(settings, "vocab_size_per_layer_input"),
        "altup": AltUp(
            num_streams=whole_number(settings, "altup_num_inputs"), laurel_rank=whole_number(settings, "laurel_rank"),
            sparsities=tuple(map(float, shares)),
        ),
    }  # fmt: skip


def _gemma3n_refusals(settings: Settings) -> list[str]:
    """Published models all have these values."""
    expected = {"altup_active_idx": 0, "altup_correct_scale": True, "attention_bias": False,
                "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
    inner, reasons = settings["intermediate_size"], refuse_absent_window(settings)
    if isinstance(inner, list):
        reasons.append(f"intermediate_size is {str(inner)[:200]}; it must be one size, or an equal one for each layer")
    return reasons + other_values(settings, expected)


def _gemma4_settings(settings: Settings) -> Settings:
    """Without layer_types every sixth layer has no window; the last one never has."""
    types = [WINDOW if (layer + 1) % 6 else ATTENTION for layer in range(num_layers(settings))]
    found = filled(settings, layer_types=types)
    if isinstance(given := found["layer_types"], list) and given:
        found["layer_types"] = [*given[:-1], ATTENTION]
    return found


def _full_heads(settings: Settings) -> HeadSizes:
    """Of layers without a window, in either spelling: by name, or in the overrides of each layer. ValueError for
    overrides of anything else.
    """
    given, heads = settings.get("per_layer_config"), whole_number(settings, "num_key_value_heads")
    if given is None:
        own = settings.get("num_global_key_value_heads") if flag(settings, "attention_k_eq_v") else None
        return HeadSizes(
            heads if own is None else whole_number(settings, "num_global_key_value_heads"),
            whole_number(settings, "global_head_dim"),
        )
    full = set(layers_of(settings, ATTENTION))
    overrides = list(given.values()) if isinstance(given, dict) else []
    own = overrides[0] if overrides and all(isinstance(one, dict) for one in overrides) else {}
    known = {"head_dim", "num_key_value_heads"}
    layers = {int(layer) for layer in given if layer.isdecimal()} if own else set()
    if not known >= set(own) or layers != full or len(layers) != len(overrides) or any(one != own for one in overrides):
        raise ValueError(
            f"per_layer_config is {str(given)[:200]}; it must give head_dim and num_key_value_heads of the layers with "
            "full attention, all alike"
        )
    head_dim = whole_number(own, "head_dim", whole_number(settings, "head_dim"))
    return HeadSizes(whole_number(own, "num_key_value_heads", heads), head_dim)


def _kv_sources(settings: Settings) -> tuple[int, ...] | None:
    """The last num_kv_shared_layers layers attend to the keys and values of the last layer of their kind before."""
    count, shared = num_layers(settings), whole_number(settings, "num_kv_shared_layers")
    if not shared:
        return None
    kinds, first = settings["layer_types"], count - shared
    last = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    missing = [kind for kind in kinds if kind not in last]
    if missing:
        raise ValueError(
            f"num_kv_shared_layers is {shared} of {count} layers; none before them is of the kind {missing[0]!r}"
        )
    return (*range(first), *(last[kind] for kind in kinds[first:]))


def _gemma4(settings: Settings) -> Recipe:
    windows = windows_by_type(settings, lambda layer: False)
    ropes = ropes_by_kind(settings, windows, {"rope_theta": 1_000_000.0}, {"rope_theta": 10000.0})
    full, size = _full_heads(settings), HeadSizes(
        whole_number(settings, "num_key_value_heads"), whole_number(settings, "head_dim")
    )  # fmt: skip
    if not windows:  # then all layers have the heads of full layers
        size = full
    recipe: Recipe = {
        **_normed_heads(settings), **ropes, "num_kv_heads": size.num_kv_heads, "head_dim": size.head_dim,
        "full_heads": full if windows and full != size else None, "has_layer_scalars": True,
        "keys_are_values": flag(settings, "attention_k_eq_v"),
        "has_wide_mlps": flag(settings, "use_double_wide_mlp") and bool(settings.get("num_kv_shared_layers")),
    }  # fmt: skip
    if flag(settings, "enable_moe_block"):
        recipe["moe"] = read_experts(settings, top_k="top_k_experts", normalise=True, is_beside_mlp=True)
    return recipe


def _gemma4_refusals(settings: Settings) -> list[str]:
    kind, reasons = settings.get("use_bidirectional_attention"), refuse_absent_window(settings)
    if kind not in (None, False, "vision"):
        reasons.append(f"use_bidirectional_attention is {kind!r}; only causal attention is supported")
    reasons += other_values(settings, _GELU) + unbuilt(settings, "attention_bias")
    own, vocab = settings.get("vocab_size_per_layer_input"), settings.get("vocab_size")
    if settings.get("hidden_size_per_layer_input") and own != vocab:
        reasons.append(f"vocab_size_per_layer_input is {own!r}; it must be vocab_size ({vocab!r})")
    return reasons


def _gemma4_tensors(config: ModelConfig) -> TensorSpecs:
    """Experts have three norms of their own, and the router two scales."""
    specs, hidden, names = decoder_tensors(config), config.hidden_size, {"mlp.gate.weight": "router.proj.weight"}
    if config.moe is None:
        return specs
    if config.has_fused_experts:
        names["mlp.experts."] = "experts."
    return {
        **renamed(specs, names),
        "mlp_part_norm": norm(config, hidden, "post_feedforward_layernorm_1.weight"),
        "experts_norm": norm(config, hidden, "pre_feedforward_layernorm_2.weight"),
        "experts_part_norm": norm(config, hidden, "post_feedforward_layernorm_2.weight"),
        "router_scale": in_fp32("router.scale", hidden),
        "expert_scale": in_fp32("router.per_expert_scale", config.moe.num_experts),
    }


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


def _gemma2_refusals(settings: Settings) -> list[str]:
    reasons = refuse_absent_window(settings)
    if flag(settings, "use_bidirectional_attention"):
        reasons.append("use_bidirectional_attention is true; only causal attention is supported")
    return reasons + other_values(settings, _GELU)


def _gemma3_refusals(settings: Settings) -> list[str]:
    reasons = [
        f"{name} is {settings[name]!r}; only models without soft caps are supported (as Gemma 3)"
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
        if settings.get(name) is not None
    ]
    return reasons + _gemma2_refusals(settings) + below_one(settings, "sliding_window_pattern")


def _muse_settings(settings: Settings) -> Settings:
    """Unless the file says otherwise every fourth layer, from the last, has full attention and is not rotated."""
    count, theta = num_layers(settings), rope_settings(settings)["rope_theta"]
    full = [(count - 1 - layer) % 4 == 0 for layer in range(count)]
    types, thetas = [ATTENTION if own else WINDOW for own in full], [0 if own else theta for own in full]
    return filled(settings, layer_types=types, layer_rope_theta=thetas)


def _muse(settings: Settings) -> Recipe:
    return {
        **windows_by_type(settings, lambda layer: False), "qk_norm": True, "norm_offset": 1.0, "norms": _NORMS,
        "out_norm_eps": number(settings, "post_norm_eps", above=0.0, most=1.0),
        "rotated_layers": tuple(theta != 0 for theta in settings["layer_rope_theta"]),
        "gate_dim": whole_number(settings, "head_dim"), "logit_cap": cap_of(settings, "final_logit_softcapping"),
        "multipliers": Multipliers(
            attention=number(settings, "qk_scale_factor", above=0.0),
            logits=number(settings, "output_multiplier", above=0.0),
        ),
    }  # fmt: skip


def _muse_refusals(settings: Settings) -> list[str]:
    """Also other bases of rope by layer, which transformers does not compute."""
    known = {"attention_bias": False, "hidden_activation": "silu", "tie_word_embeddings": False}
    reasons, thetas = other_values(settings, known), settings["layer_rope_theta"]
    base = rope_settings(settings)["rope_theta"]
    if not isinstance(thetas, list) or any(theta not in (0, base) for theta in thetas):
        reasons.append(f"layer_rope_theta is {str(thetas)[:200]}; it must be a list of 0 and rope_theta, {base}")
    return reasons


def _muse_tensors(config: ModelConfig) -> TensorSpecs:
    """The embedding and the heads have norms without weights; those of the last norm are its factors."""
    specs = without_norm_weights(with_gates_apart(config, decoder_tensors(config)), ("q_norm", "k_norm"))
    return {
        **specs, "embed": replace(specs["embed"], row_eps=config.rms_norm_eps),
        "final_norm": replace(specs["final_norm"], offset=0.0),
    }  # fmt: skip


GEMMA = Family(
    defaults={
        "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 16, "tie_word_embeddings": True,
    },
    recipe=_gemma,
    refusals=_gemma_refusals,
    has_own_activation=True,
)  # fmt: skip
GEMMA2 = Family(
    defaults={
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
    },
    recipe=_gemma2,
    refusals=_gemma2_refusals,
    has_windows=True,
    has_own_activation=True,
)  # fmt: skip
VAULT_GEMMA = replace(
    GEMMA2,
    recipe=lambda settings: {
        **_gemma2(settings),
        "norms": LayerNorms("input_layernorm", None, _NORMS.before_mlp, None),
    },
)
GEMMA3 = Family(
    defaults={
        "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0,
        "rope_theta": 1_000_000.0, "sliding_window": 4096, "sliding_window_pattern": 6, "tie_word_embeddings": True,
    },
    recipe=_gemma3,
    refusals=_gemma3_refusals,
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
MUSE_GLIMMER = Family(
    defaults={
        "bos_token_id": 200_000, "eos_token_id": 200_001, "final_logit_softcapping": 20.0, "head_dim": 128,
        "hidden_activation": "silu", "hidden_size": 6656, "intermediate_size": 19968,
        "max_position_embeddings": 131_072, "num_attention_heads": 32, "num_hidden_layers": 52,
        "num_key_value_heads": 2, "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8,
        "qk_scale_factor": 3.87, "rms_norm_eps": 1e-5, "sliding_window": 2048, "vocab_size": 202_048,
    },
    rewrite=_muse_settings,
    recipe=_muse,
    refusals=_muse_refusals,
    has_windows=True,
    has_own_activation=True,
    is_text_part=True,
    tensors=_muse_tensors,
)  # fmt: skip
GEMMA3N = Family(
    defaults={
        "altup_active_idx": 0, "altup_correct_scale": True, "altup_num_inputs": 4, "attention_bias": False,
        "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
        "intermediate_size": 16384, "laurel_rank": 64, "max_position_embeddings": 32768, "num_attention_heads": 8,
        "num_hidden_layers": 35, "num_key_value_heads": 2, "num_kv_shared_layers": 15,
        "rope_local_base_freq": 10000.0, "rope_theta": 1_000_000.0, "sliding_window": 512, "tie_word_embeddings": True,
        "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
    },
    rewrite=_gemma3n_settings,
    recipe=_gemma3n,
    refusals=_gemma3n_refusals,
    has_windows=True,
    has_own_activation=True,
    has_rope_by_kind=True,
)  # fmt: skip
GEMMA4 = Family(
    defaults={
        "bos_token_id": 2, "eos_token_id": 1, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "hidden_size_per_layer_input": 256,
        "intermediate_size": 9216, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_hidden_layers": 30,
        "num_key_value_heads": 4, "num_kv_shared_layers": 0, "sliding_window": 512, "tie_word_embeddings": True,
        "vocab_size": 262144,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "vocab_size_per_layer_input": 262144,
    },
    rewrite=_gemma4_settings,
    recipe=_gemma4,
    refusals=_gemma4_refusals,
    has_windows=True,
    has_experts=True,
    may_fuse_experts=True,
    has_own_activation=True,
    has_rope_by_kind=True,
    tensors=_gemma4_tensors,
)  # fmt: skip
# The same without experts and embeddings for each layer.
GEMMA4_UNIFIED = replace(
    GEMMA4,
    defaults={
        **GEMMA4.defaults, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024,
    },
)  # fmt: skip

FAMILIES = {
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "VaultGemmaForCausalLM": VAULT_GEMMA,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3_TEXT_PART,
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(GEMMA3N, is_text_part=True),  # beside towers for images and sound
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": replace(GEMMA4, is_text_part=True),
    "Gemma4UnifiedForCausalLM": GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": replace(GEMMA4_UNIFIED, is_text_part=True),
    "MuseGlimmerForConditionalGeneration": MUSE_GLIMMER,
}

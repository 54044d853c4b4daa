"""Llama, and families that differ from it in biases, multipliers, rotation or names of tensors. No torch."""

from __future__ import annotations

from dataclasses import replace

from snapstream.config import ModelConfig
from snapstream.config.model import LayerNorms, LengthScale
from snapstream.config.values import MAX_DIM
from snapstream.models.config_json import Settings, flag, number, rope_settings, whole_number
from snapstream.models.family import (
    Family,
    Recipe,
    attention_biases,
    below_one,
    cap_of,
    num_layers,
    other_values,
    read_experts,
    refuse_clipping,
    unbuilt,
    windows_by_type,
    windows_of_all_layers,
    with_changed_rope,
    with_default_rope,
)
from snapstream.models.mixtures import HUNYUAN_NAMES, hunyuan_settings
from snapstream.models.tensors import TensorSpecs, decoder_tensors, named, renamed, without_norm_weights


def _llama(settings: Settings) -> Recipe:
    return {**attention_biases(settings), "mlp_bias": flag(settings, "mlp_bias")}


def _internlm3(settings: Settings) -> Recipe:
    """Published files name the biases otherwise; transformers has one flag for those of q, k, v and o."""
    has_bias = flag(settings, "qkv_bias") or flag(settings, "attention_bias")
    return {"qkv_bias": has_bias, "o_bias": has_bias, "mlp_bias": flag(settings, "bias") or flag(settings, "mlp_bias")}


def _internlm3_refusals(settings: Settings) -> list[str]:
    biases = _internlm3(settings)
    if biases["qkv_bias"] == biases["mlp_bias"]:
        return []
    return [f"qkv_bias is {biases['qkv_bias']} and bias is {biases['mlp_bias']}; only both or none are supported"]


def _phi3_settings(settings: Settings) -> Settings:
    """Older files call longrope su or yarn; the original context stands outside of the rope settings."""
    kind = rope_settings(settings)["rope_type"]
    kind = "longrope" if kind in ("su", "yarn") else kind
    return with_changed_rope(settings, lambda rope: {**rope, "rope_type": kind})


def _with_llama3(settings: Settings, theta: float, factor: float) -> Settings:
    return with_default_rope(
        settings, rope_type="llama3", rope_theta=theta, factor=factor, high_freq_factor=4.0, low_freq_factor=1.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip


def _nanochat_tensors(config: ModelConfig) -> TensorSpecs:
    """No norm has weights, and the embedding has one. Heads are turned backwards: as if their halves were exchanged."""
    specs = renamed(without_norm_weights(decoder_tensors(config)), {"up_proj.": "fc1.", "down_proj.": "fc2."})
    size = config.head_dim
    order = {
        f"self_attn.{name}_proj.weight": tuple(
            first + (i + size // 2) % size for first in range(0, count * size, size) for i in range(size)
        )
        for name, count in (("q", config.num_heads), ("k", config.num_kv_heads))
    }
    return {
        **specs,
        "embed": replace(specs["embed"], row_eps=config.rms_norm_eps),
        "qkv": replace(specs["qkv"], row_order=order),
    }


LLAMA = Family(defaults={"bos_token_id": 1, "eos_token_id": 2}, recipe=_llama)
CWM = Family(
    defaults={
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": 8192,
    },
    rewrite=lambda settings: _with_llama3(settings, 1_000_000.0, 16.0),
    recipe=lambda settings: {
        "mlp_bias": flag(settings, "mlp_bias"), **windows_by_type(settings, lambda layer: layer % 4 != 0),
    },
    has_windows=True,
)  # fmt: skip
ARCEE = Family(
    defaults={"bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
    recipe=lambda settings: {**attention_biases(settings), "activation": "relu2"},
    refusals=lambda settings: other_values(settings, {"hidden_act": "relu2"}) + unbuilt(settings, "mlp_bias"),
    has_own_activation=True,
)
APERTUS = Family(
    defaults={"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "xielu", "rms_norm_eps": 1e-5},
    rewrite=lambda settings: _with_llama3(settings, 12_000_000.0, 8.0),
    recipe=lambda settings: {
        **attention_biases(settings),
        "activation": "xielu",
        "qk_norm": True,
        "norms": LayerNorms("attention_layernorm", None, "feedforward_layernorm", None),
    },
    # The last three are not read by transformers; published files have them.
    refusals=lambda settings: other_values(
        settings, {"hidden_act": "xielu", "qk_norm": True, "post_norm": False, "mlp_bias": False}
    ),
    has_own_activation=True,
)
HUNYUAN_DENSE = Family(
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    rewrite=hunyuan_settings,
    recipe=lambda settings: {**attention_biases(settings), "qk_norm": True, "norms_after_rope": True},
    tensors=named(HUNYUAN_NAMES),
)
NANOCHAT = Family(
    defaults={"bos_token_id": 0, "eos_token_id": 1, "final_logit_softcapping": 15.0, "hidden_act": "relu2"},
    recipe=lambda settings: {
        "activation": "relu2",
        "logit_cap": cap_of(settings, "final_logit_softcapping"),
        "norms_after_rope": True,
        "qk_norm": True,
    },
    refusals=lambda settings: other_values(
        settings, {"hidden_act": "relu2", "attention_bias": False, "tie_word_embeddings": False}
    ),
    has_own_activation=True,
    tensors=_nanochat_tensors,
)
INTERNLM3 = Family(
    defaults={"bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    recipe=_internlm3,
    refusals=_internlm3_refusals,
)
HELIUM = Family(
    defaults={**LLAMA.defaults, "head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
    recipe=lambda settings: {**_llama(settings), "o_bias": False},
    is_interleaved=True,
)
IQUEST_CODER = Family(
    defaults={**LLAMA.defaults, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    recipe=_llama,
    refusals=refuse_clipping,
)
SEED_OSS = Family(
    defaults={
        "attention_bias": True, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "num_key_value_heads": 8,
    },
    recipe=lambda settings: {**_llama(settings), "o_bias": flag(settings, "attention_out_bias")},
)  # fmt: skip
ERNIE4_5 = Family(
    defaults={
        "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    recipe=lambda settings: dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), flag(settings, "use_bias")),
    is_interleaved=True,
)  # fmt: skip
PHI3 = Family(
    defaults={
        "bos_token_id": 1, "eos_token_id": 32000, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
    rewrite=_phi3_settings,
    recipe=lambda settings: {"has_fused_qkv": True, "has_fused_gate_up": True, **windows_of_all_layers(settings)},
    has_windows=True,
    is_partly_rotated=True,
)  # fmt: skip


def _smollm3(settings: Settings) -> Recipe:
    rotated = _rotated_layers(settings)
    recipe: Recipe = {**_llama(settings), **windows_by_type(settings, lambda layer: not rotated[layer])}
    return recipe if all(rotated) else {**recipe, "rotated_layers": rotated}


def _rotated_layers(settings: Settings) -> tuple[bool, ...]:
    """``no_rope_layers`` has, in spite of its name, a 1 for each layer with rotary embedding."""
    num_layers, given = whole_number(settings, "num_hidden_layers"), settings.get("no_rope_layers")
    if given is not None:
        return tuple(layer == 1 for layer in given[:num_layers])
    interval = whole_number(settings, "no_rope_layer_interval")
    return tuple((layer + 1) % interval != 0 for layer in range(min(num_layers, MAX_DIM + 1)))


def _smollm3_refusals(settings: Settings) -> list[str]:
    num_layers, given = whole_number(settings, "num_hidden_layers"), settings.get("no_rope_layers")
    if given is None:
        return below_one(settings, "no_rope_layer_interval")
    if not isinstance(given, list) or len(given) < num_layers or any(layer not in (0, 1) for layer in given):
        return [f"no_rope_layers is {given!r}; it must be a list with a 0 or a 1 for each of the {num_layers} layers"]
    return []


SMOLLM3 = Family(
    defaults={
        "bos_token_id": 128000, "eos_token_id": 128001, "num_key_value_heads": 4, "rope_theta": 2e6,
        "tie_word_embeddings": True, "use_sliding_window": False, "no_rope_layer_interval": 4,
    },
    recipe=_smollm3,
    refusals=_smollm3_refusals,
    has_windows=True,
)  # fmt: skip


CHUNKED = "chunked_attention"
LLAMA4_NAMES = {
    "mlp.gate.": "feed_forward.router.", "mlp.": "feed_forward.", ".shared_experts.": ".shared_expert.",
}  # fmt: skip


def _llama4_settings(settings: Settings) -> Settings:
    """intermediate_size is that of experts; an empty list of layers without rotary embedding counts as none."""
    return {
        **settings, "moe_intermediate_size": settings.get("intermediate_size"),
        "intermediate_size": settings["intermediate_size_mlp"],
        "no_rope_layers": settings.get("no_rope_layers") or None,
    }  # fmt: skip


def _llama4(settings: Settings) -> Recipe:
    rotated, layers, step = _rotated_layers(settings), num_layers(settings), settings["interleave_moe_layer_step"]
    chunked = [kind == CHUNKED for kind in settings.get("layer_types") or ()] or rotated
    size = whole_number(settings, "attention_chunk_size") if any(chunked) else None
    given = settings.get("moe_layers")
    chosen = tuple(
        index for index in range(layers) if (index in given if given is not None else not (index + 1) % step)
    )
    moe = read_experts(
        settings, "num_local_experts", num_shared=1, chosen=chosen, scoring="sigmoid", chooses_by_logits=True,
        scales_inputs=True,
    )  # fmt: skip
    recipe: Recipe = {
        **attention_biases(settings), "windows": tuple(size if own else None for own in chunked), "has_chunks": True,
        "rotated_layers": rotated, "qk_norm": flag(settings, "use_qk_norm") and any(rotated),
        "moe": moe if chosen else None,
    }  # fmt: skip
    if settings.get("attn_temperature_tuning"):
        beta = number(settings, "attn_scale", above=0.0)
        recipe["length_scale"] = LengthScale(beta, whole_number(settings, "floor_scale"), is_unrotated=True)
    return recipe


def _llama4_refusals(settings: Settings) -> list[str]:
    reasons, given = _smollm3_refusals(settings), settings.get("moe_layers")
    if given is None:
        reasons += below_one(settings, "interleave_moe_layer_step")
    if given is not None and not (isinstance(given, list) and all(isinstance(layer, int) for layer in given)):
        reasons.append(f"moe_layers is {given!r}; it must be a list of the layers that have experts")
    tuning = settings.get("attn_temperature_tuning")
    if tuning is not None and not isinstance(tuning, int):  # published: 4
        reasons.append(f"attn_temperature_tuning is {tuning!r}; it must be true or false")
    if settings.get("attention_chunk_size") is not None:
        reasons += below_one(settings, "attention_chunk_size")
    kind = rope_settings(settings)["rope_type"]
    if flag(settings, "use_qk_norm") and kind in ("yarn", "longrope"):
        reasons.append(f"rope {kind} is not supported with norms after the rotation (use_qk_norm)")
    return reasons


def _llama4_tensors(config: ModelConfig) -> TensorSpecs:
    """Norms of heads have no weights, and are those of rotated layers; experts in one tensor are transposed."""
    specs = decoder_tensors(replace(config, has_transposed_experts=config.has_fused_experts))
    if config.qk_norm:
        rotated = tuple(index for index, own in enumerate(config.rotated_layers or ()) if own)
        norms = without_norm_weights(specs, ("q_norm", "k_norm"))
        specs = {**norms, **{name: replace(norms[name], layers=rotated) for name in ("q_norm", "k_norm")}}
    return renamed(specs, LLAMA4_NAMES)


LLAMA4 = Family(
    defaults={
        "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True, "bos_token_id": 1,
        "eos_token_id": 2, "floor_scale": 8192, "head_dim": 128, "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 16384, "no_rope_layer_interval": 4, "num_experts_per_tok": 1,
        "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "use_qk_norm": True,
    },
    rewrite=_llama4_settings,
    recipe=_llama4,
    refusals=_llama4_refusals,
    has_experts=True,
    may_fuse_experts=True,
    tensors=_llama4_tensors,
    other_layer_types=(CHUNKED,),
    is_interleaved=True,
)  # fmt: skip

FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": replace(LLAMA4, is_text_part=True),
    "SmolLM3ForCausalLM": SMOLLM3,
    "NanoChatForCausalLM": NANOCHAT,
    "SeedOssForCausalLM": SEED_OSS,
    "InternLM3ForCausalLM": INTERNLM3,
    "HeliumForCausalLM": HELIUM,
    "IQuestCoderForCausalLM": IQUEST_CODER,
    "CwmForCausalLM": CWM,
    "ArceeForCausalLM": ARCEE,
    "ApertusForCausalLM": APERTUS,
    "HunYuanDenseV1ForCausalLM": HUNYUAN_DENSE,
    "Ernie4_5ForCausalLM": ERNIE4_5,
    "Phi3ForCausalLM": PHI3,
}

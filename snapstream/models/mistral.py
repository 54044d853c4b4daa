"""Mistral, Ministral, Mixtral and Mistral Small 4. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from snapstream.config.model import LengthScale
from snapstream.models.config_json import Settings, number, rope_settings, whole_number
from snapstream.models.deepseek import V3_DEFAULTS, deepseek_v3, latent_refusals, routing_refusals
from snapstream.models.family import (
    Family,
    Recipe,
    read_experts,
    windows_by_type,
    windows_of_all_layers,
    with_changed_rope,
    with_default_rope,
)
from snapstream.models.tensors import ExpertNames, decoder_tensors

_DEFAULTS: Settings = {"bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 8}
_MIXTRAL_NAMES = ExpertNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2")


MISTRAL = Family(defaults={**_DEFAULTS, "sliding_window": 4096}, recipe=windows_of_all_layers, has_windows=True)


def _with_rope(settings: Settings, theta: float, factor: float, original: int) -> Settings:
    return with_default_rope(
        settings, rope_type="yarn", rope_theta=theta, factor=factor, original_max_position_embeddings=original,
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
    )  # fmt: skip


def _length_scale(settings: Settings) -> LengthScale:
    rope = rope_settings(settings)
    return LengthScale(number(rope, "llama_4_scaling_beta"), whole_number(rope, "original_max_position_embeddings"))


def _mistral4_settings(settings: Settings) -> Settings:
    """``partial_rotary_factor`` says in other words which part of a head ``qk_rope_head_dim`` rotates."""
    settings = _with_rope(settings, 10000.0, 128.0, 8192)
    rotated, plain = (whole_number(settings, name) for name in ("qk_rope_head_dim", "qk_nope_head_dim"))
    shares = {rotated / max(rotated + plain, 1), None}

    def without_share(own: Settings) -> dict[str, Any]:
        return {key: value for key, value in own.items() if key != "partial_rotary_factor" or value not in shares}

    return with_changed_rope(without_share(settings), without_share)


def _mistral4(settings: Settings) -> Recipe:
    """DeepSeek-V3's latents, and softmax scores in groups that are judged by their two best experts."""
    recipe = deepseek_v3(settings)
    moe = recipe["moe"]
    if moe is not None:
        recipe["moe"] = replace(moe, scoring="softmax", has_bias=False)
    return {**recipe, "num_mtp_layers": 0, "length_scale": _length_scale(settings)}


_MISTRAL4_DEFAULTS: Settings = {
    **V3_DEFAULTS, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 0, "kv_lora_rank": 256, "n_group": 1,
    "n_routed_experts": 128, "num_experts_per_tok": 4, "q_lora_rank": 1024, "qk_nope_head_dim": 64,
    "routed_scaling_factor": 1.0, "topk_group": 1,
}  # fmt: skip
MINISTRAL3 = Family(
    defaults={**_DEFAULTS, "head_dim": 128, "rms_norm_eps": 1e-5},
    rewrite=lambda settings: _with_rope(settings, 1e6, 16.0, 16384),
    recipe=lambda settings: {**windows_of_all_layers(settings), "length_scale": _length_scale(settings)},
    has_windows=True,
)
MISTRAL4 = Family(
    defaults=_MISTRAL4_DEFAULTS,
    rewrite=_mistral4_settings,
    recipe=_mistral4,
    refusals=lambda settings: [*latent_refusals(settings), *routing_refusals(settings, "softmax", ())],
    has_experts=True,
    may_fuse_experts=True,
)
MISTRAL3_TEXT_PART = replace(
    MISTRAL,
    # Mistral Small 3.1 and 3.2, Ministral 3, Mistral Small 4.
    text_parts={"mistral": MISTRAL, "ministral3": MINISTRAL3, "mistral4": MISTRAL4},
    has_experts=True,
    may_fuse_experts=True,
    is_text_part=True,
)
MINISTRAL = Family(
    defaults={**_DEFAULTS, "sliding_window": 4096},
    recipe=lambda settings: windows_by_type(settings, lambda layer: True),
    has_windows=True,
)
MIXTRAL = Family(
    defaults={
        **_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
    },
    # Softmax over all experts; the weights of the chosen ones add up to 1.
    recipe=lambda settings: {
        "moe": read_experts(settings, "num_local_experts", inner="intermediate_size", normalise=True),
        **windows_of_all_layers(settings),
    },
    has_experts=True,
    has_windows=True,
    tensors=partial(decoder_tensors, names=_MIXTRAL_NAMES),
)  # fmt: skip

FAMILIES = {
    "MistralForCausalLM": MISTRAL,
    "MinistralForCausalLM": MINISTRAL,
    "Ministral3ForCausalLM": MINISTRAL3,
    "Mistral4ForCausalLM": MISTRAL4,
    "Mistral3ForConditionalGeneration": MISTRAL3_TEXT_PART,
    "MixtralForCausalLM": MIXTRAL,
}

"""GLM-4, dense, since 0414 with four norms a layer; GLM-4 MoE and Solar Open (grouped-query attention), GLM-4 MoE Lite
and GLM-5 (latents), with DeepSeek-V3's routing. No torch.
"""

from __future__ import annotations

from dataclasses import replace

from snapstream.config.model import LayerNorms
from snapstream.models.config_json import Settings, flag
from snapstream.models.deepseek import V3_DEFAULTS, deepseek_v3, deepseek_v3_refusals, with_indexer
from snapstream.models.family import Family, Recipe, num_mtp_layers, other_values, read_sigmoid_moe
from snapstream.models.qwen import without_mrope

_MOE_DEFAULTS: Settings = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "n_routed_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_mtp_layers": 1,
}  # fmt: skip
_LITE_DEFAULTS: Settings = {
    **V3_DEFAULTS, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
}  # fmt: skip


SANDWICH_NORMS = LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


def _glm(settings: Settings) -> Recipe:
    return {"qkv_bias": flag(settings, "attention_bias"), "has_fused_gate_up": True}  # none of o


def _solar(settings: Settings) -> Recipe:
    return {"moe": read_sigmoid_moe(settings), "qkv_bias": flag(settings, "attention_bias")}  # none of o


def _glm4_moe(settings: Settings) -> Recipe:
    has_norms = flag(settings, "use_qk_norm")
    return {**_solar(settings), "num_mtp_layers": num_mtp_layers(settings), "qk_norm": has_norms}


GLM = Family(
    defaults={
        "attention_bias": True, "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 0.00000015625,
    },
    recipe=_glm,
    is_partly_rotated=True,
    is_interleaved=True,
)  # fmt: skip
GLM4 = replace(GLM, recipe=lambda settings: {**_glm(settings), "norms": SANDWICH_NORMS})
GLM4_MOE = Family(
    defaults=_MOE_DEFAULTS, recipe=_glm4_moe, has_experts=True, is_partly_rotated=True, has_predictions=True
)
# The text parts of GLM-4.1V and GLM-4.6V Flash, and of GLM-4.5V and GLM-4.6V.
GLM4V = replace(
    GLM4,
    defaults={"num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
    rewrite=without_mrope,
    recipe=lambda settings: {**GLM4.recipe(settings), "qkv_bias": True},
    is_text_part=True,
)
GLM4V_MOE = replace(
    GLM4_MOE,
    defaults={**_MOE_DEFAULTS, "attention_bias": True, "use_qk_norm": False},
    rewrite=without_mrope,
    is_text_part=True,
)
GLM4_MOE_LITE = Family(
    defaults=_LITE_DEFAULTS, recipe=deepseek_v3, refusals=deepseek_v3_refusals, has_experts=True, has_predictions=True
)
GLM_MOE_DSA = with_indexer({
    **V3_DEFAULTS, "rms_norm_eps": 1e-5, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1,
    "topk_group": 1,
})  # fmt: skip
SOLAR_OPEN = Family(
    defaults={
        **_MOE_DEFAULTS, "first_k_dense_replace": 0, "head_dim": 128, "intermediate_size": 1280,
        "moe_intermediate_size": 1280, "partial_rotary_factor": 1.0, "rope_theta": 1_000_000.0,
    },
    recipe=_solar,
    # Fields that transformers does not read and that would change the model.
    refusals=lambda settings: other_values(settings, {"first_k_dense_replace": 0, "use_qk_norm": False}),
    has_experts=True,
)  # fmt: skip

FAMILIES = {
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "GlmMoeDsaForCausalLM": GLM_MOE_DSA,
    "SolarOpenForCausalLM": SOLAR_OPEN,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4vForConditionalGeneration": GLM4V,
    "Glm46VForConditionalGeneration": GLM4V,
    "Glm4vMoeForConditionalGeneration": GLM4V_MOE,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
}

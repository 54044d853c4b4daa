"""DeepSeek-V2, V3 and V3.2, A.X K1, Youtu-LLM and Hy V4: multi-head latent attention (arXiv 2405.04434) and shared
experts. No torch.

Three config.json fields have another meaning here: ``head_dim`` is the rotated part of a head,
``num_key_value_heads`` counts expanded heads although a row holds one latent for all, and YaRN's ``mscale_all_dim``
changes the softmax scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from snapstream.config.model import HyperConnections, LatentConfig, LayerClamps, LayerNorms, MoEConfig, SwiGLUClamp
from snapstream.models.config_json import Settings, flag, number, parse_rope, rope_settings, whole_number
from snapstream.models.family import (
    Family,
    Recipe,
    num_dense,
    num_layers,
    num_mtp_layers,
    read_experts,
    read_sigmoid_moe,
    unbuilt,
)

_LATENTS: Settings = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_interleave": True, "num_mtp_layers": 1,
}  # fmt: skip
_V2_DEFAULTS: Settings = {
    **_LATENTS, "bos_token_id": 1, "eos_token_id": 2, "n_routed_experts": 64, "moe_intermediate_size": 1407,
    "n_shared_experts": 2, "first_k_dense_replace": 0, "topk_method": "greedy", "routed_scaling_factor": 1.0,
}  # fmt: skip
V3_DEFAULTS: Settings = {
    **_LATENTS, "bos_token_id": 0, "eos_token_id": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip


def _read_latent(settings: Settings) -> Recipe:
    """Latent attention as fields of ``ModelConfig``; the latent is the head of a single kv head."""
    nope_dim, rope_dim = whole_number(settings, "qk_nope_head_dim"), whole_number(settings, "qk_rope_head_dim")
    q_rank = settings.get("q_lora_rank")
    latent = LatentConfig(
        q_rank=None if q_rank is None else whole_number(settings, "q_lora_rank"),
        kv_rank=whole_number(settings, "kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=whole_number(settings, "v_head_dim"),
        softmax_scale=_softmax_scale(settings, nope_dim + rope_dim),
        is_interleaved=flag(settings, "rope_interleave"),
    )
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.latent_dim,
        "num_mtp_layers": num_mtp_layers(settings),
    }


def deepseek_v3(settings: Settings) -> Recipe:
    """Latent attention, and after the first layers experts with sigmoid scores in groups (arXiv 2412.19437, 2.1)."""
    return {**_read_latent(settings), "moe": _experts(settings, read_sigmoid_moe)}


def _sparse(settings: Settings) -> Recipe:
    """Sparse attention (DeepSeek-V3.2): an indexer chooses ``index_topk`` tokens for a query. It is left out."""
    recipe = deepseek_v3({**settings, "rope_interleave": True})
    return {**recipe, "index_topk": whole_number(settings, "index_topk")}


def with_indexer(defaults: Settings) -> Family:
    """An architecture with sparse attention in every layer."""
    return Family(
        defaults={"index_topk": 2048, **defaults},
        recipe=_sparse,
        refusals=deepseek_v3_refusals,
        other_layer_types=("indexed_attention", "deepseek_sparse_attention"),  # of transformers, and of older ones
        has_experts=True,
        has_predictions=True,
        skipped=(".indexer.",),
    )


def swiglu_clamps(settings: Settings, *, has_mlps: bool) -> LayerClamps | None:
    """``swiglu_limit`` of the experts, with ``has_mlps`` of MLPs and shared experts, too; None if it is not over 0."""
    limit, count = number(settings, "swiglu_limit"), num_layers(settings)
    clamp = SwiGLUClamp(limit, limit) if limit > 0 else None
    return clamp and LayerClamps((clamp if has_mlps else None,) * count, (clamp,) * count)


def hyper_connections(settings: Settings, iterations: int, **others: Any) -> HyperConnections:
    """The settings that models with hyper-connections share; ``others``: further fields."""
    eps = number(settings, "hc_eps", above=0.0)
    return HyperConnections(num_streams=whole_number(settings, "hc_mult"), iterations=iterations, eps=eps, **others)


def _hy_v4(settings: Settings) -> Recipe:
    """DeepSeek-V3.2 with hyper-connections that do not mix, sinks, and gates of attention."""
    most_added = number(settings, "hc_magnitude", above=0.0)
    return {
        **deepseek_v3({**settings, "rope_interleave": False}), "index_topk": whole_number(settings, "index_topk"),
        "hyper": hyper_connections(settings, 0, most_added=most_added),
        "clamps": swiglu_clamps(settings, has_mlps=False), "has_sinks": True,
        "gate_dim": whole_number(settings, "v_head_dim"),
    }  # fmt: skip


def _axk1(settings: Settings) -> Recipe:
    """DeepSeek-V3 with a norm of what experts add."""
    recipe = deepseek_v3(settings)
    return recipe if recipe["moe"] is None else {**recipe, "norms": LayerNorms(after_mlp="post_mlp_layernorm")}


def _deepseek_v2(settings: Settings) -> Recipe:
    """Latent attention, and after the first layers experts with softmax scores (arXiv 2405.04434, section 2.2)."""
    return {**_read_latent(settings), "num_mtp_layers": 0, "moe": _experts(settings, _read_softmax_moe)}


def _experts(settings: Settings, read: Callable[[Settings], MoEConfig]) -> MoEConfig | None:
    """The experts; None if no layer has any."""
    return None if num_dense(settings) >= whole_number(settings, "num_hidden_layers") else read(settings)


def _softmax_scale(settings: Settings, query_dim: int) -> float:
    """1 / sqrt(head size), times the square of YaRN's factor for ``mscale_all_dim`` (DeepSeek-V2, section 3.1.4)."""
    rope = parse_rope(settings, whole_number(settings, "max_position_embeddings"))
    growth = 1.0
    if rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
        growth = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return float(max(query_dim, 1) ** -0.5 * growth**2)


def deepseek_v3_refusals(settings: Settings) -> list[str]:
    """Why a model of latents with sigmoid routing would not be computed faithfully."""
    return [*latent_refusals(settings), *routing_refusals(settings, "sigmoid", ("noaux_tc",))]


def _deepseek_v2_refusals(settings: Settings) -> list[str]:
    """Why a model of latents with softmax routing would not be computed faithfully."""
    routing = routing_refusals(settings, "softmax", ("greedy", "group_limited_greedy"))
    return [*latent_refusals(settings), *routing, *unbuilt(settings, "norm_topk_prob")]


def _read_softmax_moe(settings: Settings) -> MoEConfig:
    """DeepSeek-V2's routing: unnormalized softmax scores; group-limited only with that ``topk_method``."""
    has_groups = settings.get("topk_method") == "group_limited_greedy"
    return read_experts(
        settings, "n_routed_experts", num_shared="n_shared_experts", first_dense="first_k_dense_replace",
        num_groups=whole_number(settings, "n_group") if has_groups else 1,
        top_groups=whole_number(settings, "topk_group") if has_groups else 1, scale="routed_scaling_factor",
    )  # fmt: skip


def routing_refusals(settings: Settings, scoring: str, methods: tuple[str, ...]) -> list[str]:
    """Fields that transformers does not read and that would change the routing."""
    reasons = []
    for name, known in (("scoring_func", (scoring,)), ("topk_method", methods), ("moe_layer_freq", (1,))):
        value = settings.get(name)
        if value is not None and value not in known:
            expected = " or ".join(map(repr, known)) or "absent"
            reasons.append(f"{name} is {value!r}; of this architecture it must be {expected}")
    return reasons


def latent_refusals(settings: Settings) -> list[str]:
    """Why latent attention would not be computed faithfully."""
    reasons, rope = unbuilt(settings, "attention_bias"), rope_settings(settings)
    kind = rope["rope_type"]
    if rope.get("mscale_all_dim") and kind not in ("default", "yarn"):
        reasons.append(f"rope type {kind!r} with mscale_all_dim is not supported; only yarn has it")
    return reasons


DEEPSEEK_V2 = Family(defaults=_V2_DEFAULTS, recipe=_deepseek_v2, refusals=_deepseek_v2_refusals, has_experts=True)
DEEPSEEK_V3 = Family(
    defaults=V3_DEFAULTS, recipe=deepseek_v3, refusals=deepseek_v3_refusals, has_experts=True, has_predictions=True
)
KIMI_K25 = replace(DEEPSEEK_V3, is_text_part=True)
DEEPSEEK_V32 = with_indexer(V3_DEFAULTS)
YOUTU = Family(
    defaults={**_LATENTS, "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": True},
    recipe=lambda settings: {**_read_latent(settings), "num_mtp_layers": 0},  # without experts
    refusals=latent_refusals,
)
AXK1 = Family(
    defaults={
        **V3_DEFAULTS, "bos_token_id": 163691, "eos_token_id": 163691, "first_k_dense_replace": 1,
        "n_routed_experts": 192,
    },
    recipe=_axk1,
    # topk_method says whether there are corrections, as the files do; groups have the score of DeepSeek-V3.
    refusals=lambda settings: deepseek_v3_refusals({**settings, "topk_method": None}),
    has_experts=True,
    may_lack_corrections=True,
)  # fmt: skip
# Published files have the names on the left.
_HYPER_NAMES = {
    f".hc_{half}_layer.hc_{part}": f".{own}_hc.{part}"
    for half, own in (("attn", "attn"), ("mlp", "ffn")) for part in ("fn", "base", "scale")
}  # fmt: skip
HY_V4 = replace(
    with_indexer({
        **V3_DEFAULTS, "bos_token_id": 120000, "eos_token_id": 120025, "first_k_dense_replace": 1, "hc_eps": 1e-6,
        "hc_magnitude": 2.0, "hc_mult": 4, "moe_intermediate_size": 768, "n_group": 1, "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.827, "swiglu_limit": 10.0, "topk_group": 1, "v_head_dim": 256,
    }),
    recipe=_hy_v4, may_fuse_experts=True, has_predictions=False,
    aliases={
        ".hc_pre.hc_": ".hc_", **_HYPER_NAMES, ".hc_head_": ".hc_", ".self_attn.gate_proj.": ".self_attn.g_proj.",
        ".self_attn.linear_gate.": ".self_attn.g_proj.", ".linear_gate.": ".gate_proj.",
        ".learnable_sink_param": ".sinks",
    },
)  # fmt: skip

FAMILIES = {
    "HYV4ForCausalLM": HY_V4,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "AXK1ForCausalLM": AXK1,
    "KimiK25ForConditionalGeneration": KIMI_K25,  # as published, and as transformers has it
    "Kimi_K25ForConditionalGeneration": KIMI_K25,
    "YoutuForCausalLM": YOUTU,
}

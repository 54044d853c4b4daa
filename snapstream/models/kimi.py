"""Kimi delta attention with latent attention: Kimi Linear (Moonshot AI, arXiv 2510.26692), whose latents are not
rotated; Ling 3.0 (inclusionAI), whose heads of latent attention have gates; GLM-5.3-Flash (Z.ai), with
hyper-connections and an indexer, which is left out. No torch.
"""

from __future__ import annotations

from dataclasses import replace

from snapstream.config import ModelConfig
from snapstream.config.recurrent import DeltaNet
from snapstream.models.config_json import Settings, flag, number, whole_number
from snapstream.models.deepseek import (
    V3_DEFAULTS,
    deepseek_v3,
    deepseek_v3_refusals,
    hyper_connections,
    latent_refusals,
    swiglu_clamps,
)
from snapstream.models.family import (
    ATTENTION,
    LINEAR,
    Family,
    Recipe,
    filled,
    num_layers,
    other_values,
    unbuilt,
    with_recurrence,
)
from snapstream.models.tensors import ExpertNames, TensorSpec, TensorSpecs, decoder_tensors, in_fp32, vector

# Names in published files of what others name as on the right.
FIELDS = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
}  # fmt: skip
NETS = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip
DEFAULTS: Settings = {
    **V3_DEFAULTS, "q_lora_rank": None, "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "bos_token_id": 163584,
    "eos_token_id": 163586, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
    "num_key_value_heads": 32,
}  # fmt: skip


def _rewrite(settings: Settings) -> Settings:
    """DeepSeek's names; layers are named by number from 1 on, by kind, or are of attention after every four."""
    found = {**settings, **{own: settings[name] for name, own in FIELDS.items() if settings.get(name) is not None}}
    net = found.get("linear_attn_config") or {}
    if not isinstance(net, dict):
        raise ValueError(f"linear_attn_config is {net!r}; it must be an object of settings")
    found |= {own: net[name] for name, own in NETS.items() if name in net}
    layers, full = range(num_layers(found)), net.get("full_attn_layers")
    full = [layer + 1 for layer in layers if layer and layer % 4 == 0] if not isinstance(full, list) else full
    found = filled(found, layer_types=[ATTENTION if layer + 1 in full else LINEAR for layer in layers])
    unused = "rope_scaling", "rope_parameters", "num_nextn_predict_layers"  # nothing is rotated or predicted further
    return {**found, **dict.fromkeys(unused), "rope_theta": 10000.0, "rope_interleave": False, "num_mtp_layers": 0}


def _refusals(settings: Settings) -> list[str]:
    known = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
    return [*latent_refusals(settings), *other_values(settings, known), *unbuilt(settings, "tie_word_embeddings")]


def _recipe(settings: Settings) -> Recipe:
    recipe = {**deepseek_v3(settings), "rotated_layers": (False,) * num_layers(settings)}
    return with_recurrence(settings, recipe, _delta_net)


def _delta_net(settings: Settings) -> DeltaNet:
    heads, size = whole_number(settings, "linear_num_heads"), whole_number(settings, "linear_head_dim")
    kernel = whole_number(settings, "linear_conv_kernel_dim")
    return DeltaNet(key_heads=heads, value_heads=heads, key_dim=size, value_dim=size, kernel=kernel, gate_rank=size)


def _tensors(config: ModelConfig) -> TensorSpecs:
    names = ExpertNames(gate="w1", up="w3", down="w2")
    return {**decoder_tensors(config, names), **_delta_tensors(config, is_flat=False)}


def _delta_tensors(config: ModelConfig, *, is_flat: bool = True) -> TensorSpecs:
    """``delta_in`` projects to queries, keys, values, and what decays and gates of outputs are made of. ``is_flat``:
    rates of decay are stored as ``[H]``, not ``[1, 1, H, 1]``.
    """
    net, hidden = config.recurrent, config.hidden_size
    if not isinstance(net, DeltaNet):
        return {}
    size, rank, heads = net.key_size, net.gate_rank, net.value_heads
    cuts = {name: slice(at * size, (at + 1) * size) for at, name in enumerate("qkv")}
    names = ("f", "g") if net.has_full_gates else ("f_a", "g_a")
    low = dict(zip(names, (slice(3 * size, 3 * size + rank), slice(3 * size + rank, None)), strict=True))
    decay = (heads,) if is_flat else (1, 1, heads, 1)
    specs = {
        "delta_in": TensorSpec(
            shape=(net.projected, hidden), shard_dim=0,
            parts={f"self_attn.{name}_proj.weight": (cut,) for name, cut in (cuts | low).items()},
        ),
        **{
            f"delta_{name}": TensorSpec(
                shape=(rows, columns), parts={f"self_attn.{part}_proj.weight": ()}, is_dense=True, shard_dim=0
            )
            for name, part, rows, columns in (
                ("gates", "b", heads, hidden), ("decay_up", "f_b", size, rank), ("gate_up", "g_b", size, rank),
            )
        },
        "conv_kernel": TensorSpec(
            shape=(net.channels, 1, net.kernel), is_matrix=False, dtype="float32", shard_dim=0,
            parts={f"self_attn.{name}_conv1d.weight": (cut,) for name, cut in cuts.items()},
        ),
        "delta_decay": in_fp32("self_attn.A_log", *decay, shard_dim=len(decay) - 1 - (not is_flat)),
        "delta_step": in_fp32("self_attn.dt_bias", size, shard_dim=0),
        "delta_norm": vector(net.value_dim, "self_attn.o_norm.weight"),
        "delta_out": TensorSpec(shape=(hidden, size), parts={"self_attn.o_proj.weight": ()}, shard_dim=1),
    }  # fmt: skip
    absent = ("delta_decay_up", "delta_gate_up") if net.has_full_gates else ()
    return {name: replace(own, layers=config.recurrent_layers) for name, own in specs.items() if name not in absent}


def _ling_settings(settings: Settings) -> Settings:
    """Sizes of recurrent layers are those of attention, whose own ``head_dim`` transformers writes in its place."""
    found = {**settings, **{own: settings[name] for name, own in FIELDS.items() if settings.get(name) is not None}}
    if found.get("layer_types") is None:
        step = max(whole_number(found, "layer_group_size"), 1)
        found["layer_types"] = [LINEAR if (layer + 1) % step else ATTENTION for layer in range(num_layers(found))]
    found = filled(found, linear_head_dim=found["head_dim"])
    sizes = {"linear_num_heads": "num_attention_heads", "linear_conv_kernel_dim": "short_conv_kernel_size"}
    return {**found, **{name: found.get(own) for name, own in sizes.items()}, "rope_interleave": True}


def _ling_refusals(settings: Settings) -> list[str]:
    known = {"moe_router_enable_expert_bias": True, "q_lora_rank": None, "score_function": "sigmoid",
             "tie_word_embeddings": False}  # fmt: skip
    return [*deepseek_v3_refusals(settings), *other_values(settings, known)]


def _ling(settings: Settings) -> Recipe:
    recipe = _recipe(settings)
    del recipe["rotated_layers"]
    if isinstance(net := recipe.get("recurrent"), DeltaNet):
        floor = number(settings, "kda_lower_bound", most=0.0) if flag(settings, "kda_safe_gate") else None
        recipe["recurrent"] = replace(net, gate_rank=net.key_size, has_full_gates=True, decay_floor=floor)
    return {**recipe, "gate_dim": 1}


def _glm_settings(settings: Settings) -> Settings:
    """Layers by kind, of which every fourth is attention; both spellings of the sizes of the others."""
    net, count = settings.get("linear_attn_config") or {}, num_layers(settings)
    if not isinstance(net, dict):
        raise ValueError(f"linear_attn_config is {net!r}; it must be an object of settings")
    names = {**NETS, "gate_lower_bound": "linear_lower_bound"}
    found = {**settings, **{own: net[name] for name, own in names.items() if name in net}}
    if net.get("safe_gate", bool(net)) and found["linear_lower_bound"] is None:
        found["linear_lower_bound"] = -5.0
    kinds = found.get("layer_types") or [ATTENTION if layer % 4 == 3 else LINEAR for layer in range(count)]
    unused = dict.fromkeys(("rope_scaling", "rope_parameters"))
    found = filled(found, mlp_layer_types=["dense"] * min(3, count) + ["sparse"] * (count - 3))
    return {**found, **unused, "layer_types": kinds, "rope_theta": 10000.0, "rope_interleave": False}


def _glm(settings: Settings) -> Recipe:
    recipe = deepseek_v3(settings)
    floor = settings["linear_lower_bound"]
    recipe |= {
        "latent": replace(recipe["latent"], norm_eps=number(settings, "rms_norm_eps", above=0.0)),
        "rotated_layers": (False,) * num_layers(settings), "index_topk": whole_number(settings, "index_topk"),
        "hyper": hyper_connections(settings, whole_number(settings, "hc_sinkhorn_iters"), has_head=False),
        "clamps": swiglu_clamps(settings, has_mlps=True),
    }  # fmt: skip
    recipe = with_recurrence(settings, recipe, _delta_net)
    if isinstance(net := recipe.get("recurrent"), DeltaNet) and floor is not None:
        recipe["recurrent"] = replace(net, decay_floor=number(settings, "linear_lower_bound", most=0.0))
    return recipe


def _glm_refusals(settings: Settings) -> list[str]:
    known = {"qk_rope_head_dim": 0, "tie_word_embeddings": False}
    reasons = [*deepseek_v3_refusals(settings), *other_values(settings, known)]
    if whole_number(settings, "hc_sinkhorn_iters") < 1:
        reasons.append("hc_sinkhorn_iters is 0; it must be >= 1")
    return reasons


GLM5_NEXT = Family(
    defaults={
        **DEFAULTS, "bos_token_id": None, "eos_token_id": None, "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "index_topk": 2048, "linear_lower_bound": -5.0, "linear_num_heads": 64, "moe_intermediate_size": 2048,
        "n_routed_experts": 288, "num_experts_per_tok": 8, "q_lora_rank": 1536, "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0, "v_head_dim": 256,
    },
    rewrite=_glm_settings, recipe=_glm, refusals=_glm_refusals,
    tensors=lambda config: {**decoder_tensors(config), **_delta_tensors(config)},
    other_layer_types=(LINEAR, "indexed_attention"), has_experts=True, is_text_part=True, skipped=(".indexer.",),
    aliases={
        ".self_attn.forget_gate.": ".self_attn.",
        **{f".hc_{half}_{part}": f".{half}_hc.{part}" for half in ("attn", "ffn") for part in ("fn", "base", "scale")},
    },
)  # fmt: skip
LING3 = Family(
    defaults={
        **DEFAULTS, "bos_token_id": None, "eos_token_id": 156895, "first_k_dense_replace": 2, "head_dim": 128,
        "kda_lower_bound": -5.0, "kda_safe_gate": True, "layer_group_size": 6, "linear_head_dim": None,
        "moe_intermediate_size": 768, "n_group": 8, "n_routed_experts": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 6_000_000.0, "routed_scaling_factor": 2.5, "short_conv_kernel_size": 4, "topk_group": 4,
    },
    rewrite=_ling_settings, recipe=_ling, refusals=_ling_refusals,
    tensors=lambda config: {**decoder_tensors(config), **_delta_tensors(config)},
    other_layer_types=(LINEAR,), has_experts=True,
    aliases={
        ".attention.dense.": ".self_attn.o_proj.", ".attention.": ".self_attn.", ".word_embeddings.": ".embed_tokens.",
        ".gate.expert_bias": ".gate.e_score_correction_bias",
    },
)  # fmt: skip
KIMI_LINEAR = Family(
    defaults=DEFAULTS, rewrite=_rewrite, recipe=_recipe, refusals=_refusals, tensors=_tensors,
    other_layer_types=(LINEAR,), has_experts=True, aliases={".block_sparse_moe.": ".mlp."},  # of published experts
)  # fmt: skip

FAMILIES = {
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "BailingHybridForCausalLM": LING3,
    "Glm5NextForConditionalGeneration": GLM5_NEXT,
}

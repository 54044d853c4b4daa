"""Mixtures of experts with the attention of Llama, Qwen, OLMo or EXAONE: MiniMax M2 and M3, dots.llm1, ERNIE 4.5,
OLMoE, Hy3, Mellum, K-EXAONE, Kolibri, Flint, Hunyuan, Trinity, Laguna, MiMo, Step 3.5. No torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from snapstream.config import ModelConfig
from snapstream.config.model import HeadSizes, LayerClamps, LayerNorms, Multipliers, SwiGLUClamp
from snapstream.models.config_json import Settings, flag, number, rope_settings, whole_number
from snapstream.models.family import (
    ATTENTION,
    CORRECTED,
    WINDOW,
    Family,
    Recipe,
    attention_biases,
    below_one,
    num_dense,
    num_layers,
    oai_clamps,
    other_values,
    read_experts,
    read_sigmoid_moe,
    refuse_absent_window,
    refuse_clipping,
    ropes_by_kind,
    unbuilt,
    windows_alone_rotated,
    windows_by_type,
)
from snapstream.models.glm import SANDWICH_NORMS
from snapstream.models.olmo import exaone_attention, exaone_refusals
from snapstream.models.qwen import SHARED, softmax_experts
from snapstream.models.tensors import ExpertNames, Place, TensorSpecs, decoder_tensors, named, renamed, with_gates_apart

_MINIMAX_EXPERTS = ExpertNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2")


_MINIMAX_NAMES = {
    ".gate.e_score_correction_bias": ".e_score_correction_bias",
    "mlp.shared_experts.": "block_sparse_moe.shared_experts.",
}
_ROUTER_NAMES = {".gate.e_score_correction_bias": ".expert_bias", "mlp.gate.weight": "mlp.router.gate.weight"}


def _minimax_settings(settings: Settings) -> Settings:
    """Published files say how much of a head is rotated as a number of elements."""
    if settings.get("rotary_dim") is None or settings.get("partial_rotary_factor") is not None:
        return settings
    share = whole_number(settings, "rotary_dim") / max(whole_number(settings, "head_dim"), 1)
    return {**settings, "partial_rotary_factor": share}


def _minimax_refusals(settings: Settings) -> list[str]:
    """Fields of published files that transformers does not read and that would change the model."""
    known = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
             "shared_intermediate_size": 0}  # fmt: skip
    reasons = other_values(settings, known)
    kinds = settings.get("attn_type_list")
    if kinds is not None and kinds != [1] * num_layers(settings):
        reasons.append(f"attn_type_list is {kinds!r}; only softmax attention (1) in every layer is supported")
    return reasons


def _minimax_m3_settings(settings: Settings) -> Settings:
    """Kinds of layers and sizes of published files by their names in transformers."""
    found = settings
    sparse, dense = found.get("sparse_attention_config") or {}, found.get("moe_layer_freq")
    if not isinstance(sparse, dict):
        raise ValueError(f"sparse_attention_config is {sparse!r}; it must be an object of settings")
    given = {"layer_types": (sparse.get("sparse_attention_freq"), "minimax_m3_sparse", "full_attention"),
             "mlp_layer_types": (dense, "sparse", "dense")}  # fmt: skip
    for name, (flags, yes, no) in given.items():
        if found.get(name) is None and isinstance(flags, list):
            found = {**found, name: [yes if one else no for one in flags]}
    for ours, theirs in {"index_topk_blocks": "sparse_topk_blocks", "index_block_size": "sparse_block_size"}.items():
        found = {**found, ours: sparse.get(theirs, found[ours])}
    return {
        **found, "first_k_dense_replace": 0, "intermediate_size": found["dense_intermediate_size"],
        "moe_intermediate_size": settings.get("intermediate_size"),
    }  # fmt: skip


def _minimax_m3(settings: Settings) -> Recipe:
    """M2 with norms of each head, shared experts, clamped activations and an indexer, which is left out."""
    moe = read_experts(
        settings, "num_local_experts", num_shared=1, own_shared="shared_intermediate_size",
        first_dense=num_dense(settings), scale="routed_scaling_factor", **CORRECTED,
    )  # fmt: skip
    recipe: Recipe = {
        "qk_norm": True, "norm_offset": 1.0, "moe": moe, "clamps": oai_clamps(settings, has_mlps=True),
    }  # fmt: skip
    if "minimax_m3_sparse" in (settings.get("layer_types") or ()):
        recipe["index_topk"] = whole_number(settings, "index_topk_blocks") * whole_number(settings, "index_block_size")
    return recipe


def _minimax_m3_refusals(settings: Settings) -> list[str]:
    """Also of fields of published files that transformers does not read and that would change the model."""
    known = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_head",
             "use_gemma_norm": True, "attention_output_gate": False, "n_shared_experts": 1}  # fmt: skip
    reasons = other_values(settings, known)
    if settings.get("hidden_act", "silu") not in ("silu", "swigluoai"):
        reasons.append(f"hidden_act is {settings['hidden_act']!r}; only 'swigluoai' or 'silu' is supported")
    return reasons


def _dots(settings: Settings) -> Recipe:
    first = whole_number(settings, "max_window_layers")
    windows = windows_by_type(settings, lambda layer: layer >= first)
    return {**attention_biases(settings), **windows, "qk_norm": True, "moe": read_sigmoid_moe(settings)}


def _ernie_moe(settings: Settings) -> Recipe:
    """Softmax scores with a correction of the choice; weights of the chosen experts add up to 1."""
    moe = read_experts(
        settings, "moe_num_experts", top_k="moe_k", num_shared="moe_num_shared_experts",
        first_dense="moe_layer_start_index", normalise=True, has_bias=True,
    )  # fmt: skip
    return {"moe": moe}


_MOST_NORM_MIN = 1e-6


def _ernie_moe_refusals(settings: Settings) -> list[str]:
    reasons, last = unbuilt(settings, "use_bias"), whole_number(settings, "num_hidden_layers") - 1
    if (end := whole_number(settings, "moe_layer_end_index")) not in (-1, last):
        reasons.append(f"moe_layer_end_index is {end}; only experts up to the last layer ({last}) are supported")
    if (step := whole_number(settings, "moe_layer_interval")) != 1:
        reasons.append(f"moe_layer_interval is {step}; only experts in every layer (1) are supported")
    least = number(settings, "moe_norm_min", above=0.0)
    if least > _MOST_NORM_MIN:  # sums of chosen probabilities stay far above the usual 1e-12
        reasons.append(f"moe_norm_min is {least:g}; it must be <= {_MOST_NORM_MIN:g}")
    return reasons


def _ernie_moe_tensors(config: ModelConfig) -> TensorSpecs:
    specs = renamed(decoder_tensors(config), {".gate.e_score_correction_bias": ".moe_statics.e_score_correction_bias"})
    assert config.moe is not None
    return {**specs, "router_bias": replace(specs["router_bias"], shape=(1, config.moe.num_experts))}


def _hy3(settings: Settings) -> Recipe:
    moe = read_experts(
        settings, num_shared="num_shared_experts", first_dense=num_dense(settings), scale="router_scaling_factor",
        **CORRECTED,
    )  # fmt: skip
    return {**attention_biases(settings), "qk_norm": True, "moe": moe}


def _mellum(settings: Settings) -> Recipe:
    """Layers with sliding windows have a rope of their own."""
    windows = windows_by_type(settings, lambda layer: False)
    ropes = ropes_by_kind(settings, windows, {"rope_theta": 500000.0}, {"rope_theta": 10000.0})
    moe = softmax_experts(settings, first_dense=num_dense(settings))
    return {**attention_biases(settings), **ropes, "qk_norm": True, "moe": moe}


def _exaone_moe(settings: Settings) -> Recipe:
    moe = read_sigmoid_moe({
        **settings, "n_routed_experts": settings.get("num_experts"),
        "n_shared_experts": settings.get("num_shared_experts"),
    })  # fmt: skip
    return {**exaone_attention(settings), "moe": moe}


def _kolibri(settings: Settings) -> Recipe:
    """Experts are chosen by corrected logits; layers without a window have no rotary embedding."""
    moe = softmax_experts(settings, scoring="sigmoid", has_bias=True, chooses_by_logits=True, **SHARED)
    attention = exaone_attention({**settings, "sliding_window_pattern": 5})
    return {**attention, "norms": SANDWICH_NORMS, "moe": moe}


def _flint(settings: Settings) -> Recipe:
    """Layers without a window come in fours with an extra first and last one."""
    last, dense = num_layers(settings) - 1, settings.get("mlp_only_layers")
    chosen = tuple(layer for layer in range(last + 1) if layer not in ([0, 1] if dense is None else dense))
    moe = softmax_experts(settings, scoring="sigmoid", chosen=chosen, **SHARED)
    windows = windows_alone_rotated(settings, lambda layer: layer > 1 and layer % 4 != 1 and layer != last)
    return {**attention_biases(settings), **windows, "qk_norm": True, "has_sinks": True, "moe": moe}


def _flint_refusals(settings: Settings) -> list[str]:
    reasons, dense = refuse_absent_window(settings), settings.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        reasons.append(f"mlp_only_layers is {dense!r}; it must be a list of layers")
    if (step := whole_number(settings, "decoder_sparse_step")) != 1:
        reasons.append(
            f"decoder_sparse_step is {step}; only experts in all layers but mlp_only_layers (1) are supported"
        )
    return reasons


def hunyuan_settings(settings: Settings) -> Settings:
    """Fields with a number for each layer as one, and a fixed ``alpha`` of the rope as the base that it stretches."""
    per_layer = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
    lists = {name: settings[name] for name in per_layer if isinstance(settings.get(name), list)}
    found = {**settings, **{name: own[0] for name, own in lists.items() if own and own == own[:1] * len(own)}}
    rope = rope_settings(found)
    if rope["rope_type"] != "dynamic" or rope.get("alpha") is None:
        return found
    size = found.get("head_dim") or whole_number(found, "hidden_size") // whole_number(found, "num_attention_heads")
    alpha, theta = number(rope, "alpha", above=0.0), number(rope, "rope_theta", above=1.0)
    return {**found, "rope_scaling": None, "rope_parameters": {"rope_theta": theta * alpha ** (size / (size - 2))}}


def _hunyuan_moe(settings: Settings) -> Recipe:
    """Queries and keys are normed after the rotation; every token also passes a shared expert."""
    moe = read_experts(settings, inner="intermediate_size", top_k="moe_topk", num_shared=1, normalise=True)
    return {**attention_biases(settings), "qk_norm": True, "norms_after_rope": True, "moe": moe}


def _hunyuan_refusals(settings: Settings) -> list[str]:
    """Fields that transformers does not read and that would change the model, or differ by layer."""
    known = {"moe_intermediate_size": settings.get("intermediate_size"), "num_shared_expert": 1, "use_cla": False}
    reasons = other_values(settings, known)
    for name in ("num_experts", "moe_topk"):
        if isinstance(settings.get(name), list):
            reasons.append(f"{name} is {settings[name]!r}; it must be the same in every layer")
    return reasons


HUNYUAN_NAMES = {"self_attn.q_norm.": "self_attn.query_layernorm.", "self_attn.k_norm.": "self_attn.key_layernorm."}


def _afmoe(settings: Settings) -> Recipe:
    """Gates of attention; layers without a window have no rotary embedding; norms around attention and experts."""
    moe = read_experts(
        settings, num_shared="num_shared_experts", first_dense="num_dense_layers", scale="route_scale", **CORRECTED,
    )  # fmt: skip
    own = {**settings, "sliding_window_pattern": settings["global_attn_every_n_layers"]}
    norms = LayerNorms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    recipe: Recipe = {
        **exaone_attention(own), "gate_dim": whole_number(settings, "head_dim"), "norms": norms, "moe": moe,
    }  # fmt: skip
    if flag(settings, "mup_enabled"):
        recipe["multipliers"] = Multipliers(embedding=max(whole_number(settings, "hidden_size"), 1) ** 0.5)
    return recipe


def _afmoe_refusals(settings: Settings) -> list[str]:
    """Also fields that transformers does not read and that would change the model."""
    reasons = refuse_absent_window(settings) + below_one(settings, "global_attn_every_n_layers")
    known = {"attention_bias": False, "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
    return [*reasons, *other_values(settings, known)]


def _laguna_settings(settings: Settings) -> Settings:
    """Lists by layer as transformers completes them; num_attention_heads is of the layers with a window, if any."""
    count, found = num_layers(settings), dict(settings)
    if found.get("layer_types") is None:
        found["layer_types"] = ["full_attention"] * count
    if found.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = ["dense"] + ["sparse"] * (count - 1)
    if found.get("rope_parameters") is None:
        found["rope_parameters"] = {
            "full_attention": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 10000.0},
        }
    if found.get("num_attention_heads_per_layer") is None:
        found["num_attention_heads_per_layer"] = [found["num_attention_heads"]] * count
    heads = _heads_by_kind(found)
    return {**found, "num_attention_heads": heads.get("sliding_attention", heads.get("full_attention"))}


def _heads_by_kind(settings: Settings) -> dict[str, int]:
    """Query heads of the last layer of each kind; none of lists that ``_laguna_refusals`` refuses."""
    kinds, heads = settings["layer_types"], settings["num_attention_heads_per_layer"]
    return dict(zip(kinds, heads, strict=False)) if isinstance(kinds, list) and isinstance(heads, list) else {}


def _laguna(settings: Settings) -> Recipe:
    """Layers with a window have more query heads, and rotate other parts of them; each head has a gate."""
    windows, heads = windows_by_type(settings, lambda layer: False), _heads_by_kind(settings)
    ropes = ropes_by_kind(settings, windows, {"rope_theta": 10000.0}, {"rope_theta": 10000.0}, is_partial=True)
    moe = read_experts(
        settings, num_shared=1, own_shared="shared_expert_intermediate_size", first_dense=num_dense(settings),
        scale="moe_routed_scaling_factor", **CORRECTED,
    )  # fmt: skip
    recipe: Recipe = {**ropes, "qk_norm": True, "gate_dim": 1, "has_softplus_gates": True, "moe": moe}
    if len(set(heads.values())) > 1:
        sizes = whole_number(settings, "num_key_value_heads"), whole_number(settings, "head_dim")
        recipe["full_heads"] = HeadSizes(*sizes, heads["full_attention"])
    return recipe


def _laguna_refusals(settings: Settings) -> list[str]:
    """Also of fields that transformers does not read: gating_types and norm_topk_prob."""
    known = {"attention_bias": False, "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0,
             "gating_types": ["per_head"] * num_layers(settings), "norm_topk_prob": True}  # fmt: skip
    reasons = other_values(settings, known)
    if settings["gating"] not in (True, "per-head"):
        reasons.append(f"gating is {settings['gating']!r}; only a gate for each head (true or 'per-head') is supported")
    given, by_kind = settings["num_attention_heads_per_layer"], _heads_by_kind(settings)
    if given != [by_kind.get(kind) for kind in settings["layer_types"]] or any(type(own) is not int for own in given):
        reasons.append(
            f"num_attention_heads_per_layer is {str(given)[:200]}; it must be a list, of one number for all layers of "
            "a kind"
        )
    return reasons


def _mimo_settings(settings: Settings) -> Settings:
    """Kinds of layers and their ropes of published files by their names in transformers."""
    found, count = dict(settings), num_layers(settings)
    given = {
        "layer_types": ("hybrid_layer_pattern", WINDOW, ATTENTION, lambda layer: layer > 0 and (layer + 1) % 6 > 0),
        "mlp_layer_types": ("moe_layer_freq", "sparse", "dense", lambda layer: layer > 0),
    }
    for name, (published, yes, no, default) in given.items():
        flags = found.get(published)
        flags = [default(layer) for layer in range(count)] if flags is None else flags
        if found.get(name) is None:  # other values than lists are refused
            found[name] = [yes if one else no for one in flags] if isinstance(flags, list) else flags
    if found.get("rope_parameters") is None:
        share, bases = found["partial_rotary_factor"], {ATTENTION: found["rope_theta"], WINDOW: found["swa_rope_theta"]}
        found["rope_parameters"] = {
            kind: {"rope_theta": base, "partial_rotary_factor": share} for kind, base in bases.items()
        }
    if found.get("sliding_window_size") is not None:  # tokens before that of the query
        found["sliding_window"] = whole_number(found, "sliding_window_size") + 1
    if found.get("layernorm_epsilon") is not None:
        found["rms_norm_eps"] = found["layernorm_epsilon"]
    for name, value in (("routed_scaling_factor", 1.0), ("attention_value_scale", 1.0), ("n_shared_experts", 0)):
        if found.get(name) is None:
            found[name] = value
    if found.get("swa_num_key_value_heads") is None:
        found["swa_num_key_value_heads"] = 2 * whole_number(found, "num_key_value_heads")
    return found


def _mimo(settings: Settings) -> Recipe:
    """Values are smaller than keys; layers with a window have more kv heads, and learned sinks."""
    windows = windows_by_type(settings, lambda layer: False)
    ropes = ropes_by_kind(settings, windows, {"rope_theta": 5e6}, {"rope_theta": 1e4}, is_partial=True)
    full, windowed = (whole_number(settings, f"{name}num_key_value_heads") for name in ("", "swa_"))
    recipe: Recipe = {
        **ropes, "qkv_bias": flag(settings, "attention_bias"), "moe": read_sigmoid_moe(settings),
        "value_dim": whole_number(settings, "v_head_dim"),
        "multipliers": Multipliers(attention_out=number(settings, "attention_value_scale", above=0.0)),
    }  # fmt: skip
    if windows:
        recipe |= {"has_sinks": True, "num_kv_heads": windowed}
        if None in windows["windows"]:
            recipe["full_heads"] = HeadSizes(full, whole_number(settings, "head_dim"))
    return recipe


def _mimo_refusals(settings: Settings) -> list[str]:
    """Also of fields of published files that transformers does not read and that would change the model."""
    sizes = {f"swa_{name}": settings.get(name) for name in ("num_attention_heads", "head_dim", "v_head_dim")}
    known = {
        **sizes, "rope_scaling": None, "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
        "n_shared_experts": 0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    }  # fmt: skip
    return [*refuse_absent_window(settings), *other_values(settings, known)]


_STEP_NAMES = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "num_experts", "n_routed_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok", "share_expert_dims": "shared_expert_intermediate_size",
    "share_expert_dim": "shared_expert_intermediate_size", "moe_router_scaling_factor": "moe_routed_scaling_factor",
    "max_seq_len": "max_position_embeddings",
}  # fmt: skip


def _by_layer(settings: Settings, name: str, default: object) -> list[Any]:
    """A field with a value for each layer, or one for all; lists of published files go on after the last layer."""
    given, count = settings.get(name), num_layers(settings)
    if not isinstance(given, list):
        return [default if given is None else given] * count
    if len(given) < count:
        raise ValueError(f"{name} has {len(given)} values; there are {count} layers")
    return given[:count]


def _step_settings(settings: Settings) -> Settings:
    """Those of Laguna."""
    found, count = {_STEP_NAMES.get(name, name): value for name, value in settings.items()}, num_layers(settings)
    found["layer_types"] = kinds = _by_layer(found, "layer_types", "full_attention")
    sparse = found.get("moe_layers_enum")  # such as "3,4,5"
    chosen = sparse.split(",") if isinstance(sparse, str) else range(3, count) if sparse is None else sparse
    if found.get("mlp_layer_types") is None and isinstance(chosen, list | range):
        layers = {str(layer).strip() for layer in chosen}
        found["mlp_layer_types"] = ["sparse" if str(layer) in layers else "dense" for layer in range(count)]
    found["mlp_layer_types"] = _by_layer(found, "mlp_layer_types", None)
    if found.get("rope_parameters") is None:
        bases, shares = _by_layer(found, "rope_theta", 10000.0), _by_layer(found, "partial_rotary_factors", 1.0)
        ropes = [
            {"rope_theta": base, "partial_rotary_factor": share} for base, share in zip(bases, shares, strict=True)
        ]
        found["rope_parameters"] = dict(zip(kinds, ropes, strict=True))
        if isinstance(stretch := found.get("rope_scaling"), dict) and "full_attention" in kinds:
            found["rope_parameters"]["full_attention"] |= stretch
    heads, other = found["num_attention_heads"], found.get("attention_other_setting")
    if isinstance(other, dict) and found.get("num_sliding_attention_heads") is None:
        found["num_sliding_attention_heads"] = other.get("num_attention_heads")
    windowed = found.get("num_sliding_attention_heads") or heads
    found["num_attention_heads_per_layer"] = [windowed if kind == "sliding_attention" else heads for kind in kinds]
    return _laguna_settings({**found, "rope_theta": 10000.0, "rope_scaling": None})


def _step(settings: Settings) -> Recipe:
    """Laguna with norms around 1, sigmoids for gates, and activations that are clamped in some layers."""
    return {
        **_laguna(settings), "has_softplus_gates": False, "norm_offset": 1.0,
        "clamps": LayerClamps(_step_limits(settings, "swiglu_limits_shared"), _step_limits(settings, "swiglu_limits")),
        "num_mtp_layers": whole_number(settings, "num_nextn_predict_layers"),
    }  # fmt: skip


def _step_limits(settings: Settings, name: str) -> tuple[SwiGLUClamp | None, ...]:
    """The limit is of ``silu(gate)``: that of the gate is where SiLU, which rises from 0 on, reaches it."""
    limits = [number({name: limit}, name, 0.0) for limit in _by_layer(settings, name, 0.0)]
    return tuple(SwiGLUClamp(_inverse_silu(limit), limit) if limit > 0.0 else None for limit in limits)


def _inverse_silu(value: float) -> float:
    """The ``x >= 0`` of which ``x * sigmoid(x)`` is ``value``, by Newton's method."""
    x = value
    for _ in range(100):
        share = 1.0 / (1.0 + math.exp(-x))
        x -= (x * share - value) / (share * (1.0 + x * (1.0 - share)))
    return x


def _step_refusals(settings: Settings) -> list[str]:
    """Also of fields of published files, each of which has one value that transformers takes for granted."""
    head = settings.get("head_dim")
    known = {"moe_router_activation": "sigmoid", "use_moe_router_bias": True, "norm_expert_weight": True, "sink": False,
             "use_head_wise_attn_gate": True, "att_impl_type": "GQA", "attention_bias": False, "mlp_bias": False,
             "use_bidirectional_attention": False, "yarn_only_types": ["full_attention"]}  # fmt: skip
    reasons = other_values(settings, known)
    if (scalar := settings.get("query_pre_attn_scalar")) not in (None, head):
        reasons.append(f"query_pre_attn_scalar is {scalar!r}; it must be head_dim ({head})")
    if not all(_by_layer(settings, "use_rope_layers", True) if settings.get("use_rope_layers") else ()):
        reasons.append("use_rope_layers has layers without rotary embedding, which are not supported")
    other, usual = (
        settings.get("attention_other_setting"),
        {"num_attention_groups": "num_key_value_heads", "head_dim": "head_dim"},
    )
    reasons += other_values(other or {}, {theirs: settings[ours] for theirs, ours in usual.items()})
    return reasons


def _step_tensors(config: ModelConfig) -> TensorSpecs:
    names = {
        "mlp.gate.e_score_correction_bias": "moe.router_bias", "mlp.gate.weight": "moe.gate.weight",
        "mlp.shared_experts.": "share_expert.", "mlp.experts.down_proj": "moe.down_proj.weight",
    }  # fmt: skip
    specs, moe, each = renamed(decoder_tensors(config), names), config.moe, slice(None)
    if moe is None or not config.has_fused_experts:
        return specs
    gate, up = (each, slice(moe.inner)), (each, slice(moe.inner, None))
    parts: dict[str, tuple[Place, ...]] = {"moe.gate_proj.weight": gate, "moe.up_proj.weight": up}
    return {**specs, "experts_gate_up": replace(specs["experts_gate_up"], parts=parts)}


def _laguna_tensors(config: ModelConfig) -> TensorSpecs:
    names = {".gate.e_score_correction": ".experts.e_score_correction", ".shared_experts.": ".shared_expert."}
    return renamed(decoder_tensors(config), names)


MINIMAX_M2 = Family(
    defaults={
        "bos_token_id": 200034, "eos_token_id": 200020, "head_dim": 128, "num_key_value_heads": 8,
        "num_experts_per_tok": 8, "num_local_experts": 256, "rope_theta": 5_000_000.0,
    },
    rewrite=_minimax_settings,
    recipe=lambda settings: {
        "has_whole_qk_norm": True,
        "moe": read_experts(settings, "num_local_experts", inner="intermediate_size", **CORRECTED),
    },
    refusals=_minimax_refusals,
    has_experts=True,
    is_partly_rotated=True,
    tensors=named(_MINIMAX_NAMES, _MINIMAX_EXPERTS),
)  # fmt: skip
MINIMAX_M3 = Family(
    defaults={
        "bos_token_id": 200034, "dense_intermediate_size": 12288, "eos_token_id": 200020, "head_dim": 128,
        "index_block_size": 128, "index_topk_blocks": 16, "num_experts_per_tok": 4, "num_key_value_heads": 4,
        "num_local_experts": 128, "rope_theta": 5_000_000.0, "routed_scaling_factor": 2.0,
        "shared_intermediate_size": 3072, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
    rewrite=_minimax_m3_settings,
    recipe=_minimax_m3,
    refusals=_minimax_m3_refusals,
    has_experts=True,
    has_own_activation=True,
    is_partly_rotated=True,
    is_text_part=True,
    other_layer_types=("minimax_m3_sparse",),
    skipped=(".self_attn.index_", "mtp", "model.mtp"),
    tensors=named(_MINIMAX_NAMES, _MINIMAX_EXPERTS),
)  # fmt: skip
DOTS1 = Family(
    defaults={
        "first_k_dense_replace": 0, "max_window_layers": 62, "moe_intermediate_size": 1408, "n_group": 1,
        "norm_topk_prob": False, "num_key_value_heads": 32, "routed_scaling_factor": 1.0,
        "sliding_window": 4096, "topk_group": 1,
    },
    recipe=_dots,
    has_experts=True,
    has_windows=True,
)  # fmt: skip
ERNIE4_5_MOE = Family(
    defaults={
        "bos_token_id": 1, "eos_token_id": 2, "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": -1,
        "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_norm_min": 1e-12, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    recipe=_ernie_moe,
    refusals=_ernie_moe_refusals,
    has_experts=True,
    is_interleaved=True,
    skipped=("mtp", "model.mtp"),
    tensors=_ernie_moe_tensors,
)  # fmt: skip
OLMOE = Family(
    defaults={"eos_token_id": 50279, "num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
    recipe=lambda settings: {
        **attention_biases(settings), "has_whole_qk_norm": True,
        "moe": read_experts(settings, inner="intermediate_size", normalise="norm_topk_prob"),
    },
    refusals=refuse_clipping,
    has_experts=True,
)  # fmt: skip
HY_V3 = Family(
    defaults={
        "first_k_dense_replace": 1, "head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 192,
        "num_experts_per_tok": 8, "num_key_value_heads": 8, "num_shared_experts": 1, "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0, "router_scaling_factor": 2.826,
    },
    recipe=_hy3,
    refusals=lambda settings: unbuilt(settings, "mlp_bias"),
    has_experts=True,
    tensors=named({**_ROUTER_NAMES, ".shared_experts.": ".shared_mlp."}),
)  # fmt: skip
MELLUM = Family(
    defaults={
        "first_k_dense_replace": 0, "head_dim": 128, "moe_intermediate_size": 896, "norm_topk_prob": True,
        "num_local_experts": 64, "num_experts_per_tok": 8, "num_key_value_heads": 4, "sliding_window": 1024,
    },
    recipe=_mellum,
    has_experts=True,
    has_windows=True,
    has_rope_by_kind=True,
)  # fmt: skip
EXAONE_MOE = Family(
    defaults={
        "bos_token_id": 1, "eos_token_id": 53, "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "n_group": 1,
        "norm_topk_prob": True, "num_experts": 64, "num_experts_per_tok": 8, "num_key_value_heads": 32,
        "num_shared_experts": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "sliding_window": 4096,
        "sliding_window_pattern": 4, "topk_group": 1,
    },
    recipe=_exaone_moe,
    refusals=exaone_refusals,
    has_experts=True,
    has_windows=True,
    aliases={"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},  # of published files
    skipped=("mtp",),
)  # fmt: skip
KOLIBRI1 = Family(
    defaults={
        "head_dim": 128, "intermediate_size": 512, "moe_intermediate_size": 512, "norm_topk_prob": False,
        "num_local_experts": 384, "num_experts_per_tok": 6, "num_key_value_heads": 4,
        "shared_expert_intermediate_size": 512, "sliding_window": 513,
    },
    recipe=_kolibri,
    refusals=refuse_absent_window,
    has_experts=True,
    has_windows=True,
    aliases={
        "moe.router.expert_bias": "mlp.gate.e_score_correction_bias", ".post_ffn_norm.": ".post_mlp_layernorm.",
        ".post_attn_norm.": ".post_self_attn_layernorm.",
    },
)  # fmt: skip
FLINT = Family(
    defaults={
        "decoder_sparse_step": 1, "head_dim": 128, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "num_experts": 256, "num_experts_per_tok": 6, "num_key_value_heads": 4,
        "shared_expert_intermediate_size": 1024, "sliding_window": 513,
    },
    recipe=_flint,
    refusals=_flint_refusals,
    has_experts=True,
    has_windows=True,
    aliases={"self_attn.softmax_offset": "self_attn.sinks"},  # of published files
    tensors=named({".shared_experts.": ".shared_expert."}),
)  # fmt: skip
LAGUNA = Family(
    defaults={
        "gating": True, "head_dim": 128, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "moe_intermediate_size": 512, "moe_routed_scaling_factor": 1.0, "num_attention_heads": 48, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "shared_expert_intermediate_size": 512, "sliding_window": 512,
    },
    rewrite=_laguna_settings,
    recipe=_laguna,
    refusals=_laguna_refusals,
    has_windows=True,
    has_experts=True,
    has_rope_by_kind=True,
    tensors=_laguna_tensors,
)  # fmt: skip
HUNYUAN_MOE = Family(
    defaults={"bos_token_id": 1, "eos_token_id": 2, "moe_topk": 1, "num_experts": 1, "rms_norm_eps": 1e-5},
    rewrite=hunyuan_settings,
    recipe=_hunyuan_moe,
    refusals=_hunyuan_refusals,
    has_experts=True,
    tensors=named({**HUNYUAN_NAMES, "mlp.gate.weight": "mlp.gate.wg.weight", ".shared_experts.": ".shared_mlp."}),
)
AFMOE = Family(
    defaults={
        "global_attn_every_n_layers": 4, "head_dim": 128, "moe_intermediate_size": 1408, "num_dense_layers": 1,
        "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "rms_norm_eps": 1e-5,
        "route_scale": 1.0, "sliding_window": 1024,
    },
    recipe=_afmoe,
    refusals=_afmoe_refusals,
    has_experts=True,
    has_windows=True,
    tensors=lambda config: with_gates_apart(config, named(_ROUTER_NAMES)(config)),
)  # fmt: skip
MIMO_V2 = Family(
    defaults={
        "attention_value_scale": 0.707, "bos_token_id": 1, "head_dim": 192, "hidden_size": 4096,
        "intermediate_size": 16384, "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "n_group": 1,
        "n_routed_experts": 256, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "partial_rotary_factor": 0.334, "rms_norm_eps": 1e-5,
        "rope_theta": 5e6, "sliding_window": 129, "swa_rope_theta": 1e4, "topk_group": 1, "v_head_dim": 128,
    },
    rewrite=_mimo_settings,
    recipe=_mimo,
    refusals=_mimo_refusals,
    has_windows=True,
    has_experts=True,
    may_fuse_experts=True,
    has_rope_by_kind=True,
    aliases={".attention_sink_bias": ".sinks"},
    skipped=("model.mtp.",),
)  # fmt: skip
STEP3 = Family(
    defaults={
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 11264, "max_position_embeddings": 128000,
        "moe_intermediate_size": 1280, "moe_routed_scaling_factor": 1.0, "num_attention_heads": 64,
        "num_experts": 288, "num_experts_per_tok": 8, "num_hidden_layers": 45, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "shared_expert_intermediate_size": 1280,
    },
    rewrite=_step_settings,
    recipe=_step,
    refusals=_step_refusals,
    has_windows=True,
    has_experts=True,
    may_fuse_experts=True,
    has_rope_by_kind=True,
    is_text_part=True,
    tensors=_step_tensors,
)  # fmt: skip

FAMILIES = {
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "MiniMaxM3SparseForConditionalGeneration": MINIMAX_M3,
    "Dots1ForCausalLM": DOTS1,
    "Ernie4_5_MoeForCausalLM": ERNIE4_5_MOE,
    "OlmoeForCausalLM": OLMOE,
    "HYV3ForCausalLM": HY_V3,
    "HunYuanMoEV1ForCausalLM": HUNYUAN_MOE,
    "MellumForCausalLM": MELLUM,
    "ExaoneMoeForCausalLM": EXAONE_MOE,
    "Kolibri1ForCausalLM": KOLIBRI1,
    "FlintForCausalLM": FLINT,
    "AfmoeForCausalLM": AFMOE,
    "LagunaForCausalLM": LAGUNA,
    "MiMoV2FlashForCausalLM": MIMO_V2,
    "Step3p5ForCausalLM": STEP3,
    "Step3p7ForConditionalGeneration": STEP3,
}

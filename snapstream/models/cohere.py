"""Families with LayerNorm. No torch.

Cohere (Command R, Command R7B, Command A and a mixture of experts): attention and MLP side by side after one norm. With
biases of norms: StarCoder2, StableLM, Phi-1.5 and 2, Phi-3.5-MoE, Nemotron (Minitron), Jais 2.
"""

from __future__ import annotations

from dataclasses import replace

from snapstream.config import ModelConfig
from snapstream.config.model import Activation, LayerNorms, Multipliers
from snapstream.models.config_json import Settings, flag, number, rope_settings, whole_number
from snapstream.models.family import (
    Family,
    Recipe,
    attention_biases,
    below_one,
    even_head_dim,
    num_dense,
    other_values,
    read_experts,
    refuse_absent_window,
    windows_alone_rotated,
    windows_of_all_layers,
    with_changed_rope,
)
from snapstream.models.mistral import MIXTRAL
from snapstream.models.tensors import TensorSpecs, decoder_tensors, named


def _rewrite(settings: Settings) -> Settings:
    return {**settings, "rms_norm_eps": settings.get("layer_norm_eps")}


def _head_norms(settings: Settings, name: str) -> Recipe:
    return {"qk_norm": True, "norms_heads_apart": True} if flag(settings, name) else {}


def _cohere(settings: Settings) -> Recipe:
    return {
        **attention_biases(settings), "is_parallel": True, "is_centered": True,
        "multipliers": Multipliers(logits=number(settings, "logit_scale", above=0.0)),
        "norms": LayerNorms("input_layernorm", None, None, None),
    }  # fmt: skip


def _cohere2(settings: Settings) -> Recipe:
    step = whole_number(settings, "sliding_window_pattern")
    windows = windows_alone_rotated(settings, lambda layer: (layer + 1) % step != 0)
    return {**_cohere(settings), **windows, "head_dim": even_head_dim(settings)}


def _moe_rewrite(settings: Settings) -> Settings:
    """The fields of layers with an MLP, which come first, and norms of either kind."""
    has_rms_norm = settings.get("rms_norm_eps") is not None
    own = {"moe_intermediate_size": settings.get("intermediate_size"), "is_centered": not has_rms_norm}
    if settings.get("prefix_dense_intermediate_size") is not None:
        own["intermediate_size"] = settings["prefix_dense_intermediate_size"]
    return {**(settings if has_rms_norm else _rewrite(settings)), **own}


def _cohere2_moe(settings: Settings) -> Recipe:
    """First layers with an MLP have a pattern of windows of their own; if that is 1, they are rotated without any."""
    own, step = (whole_number(settings, f"{prefix}sliding_window_pattern") for prefix in ("prefix_dense_", ""))
    first, start = num_dense(settings), whole_number(settings, "first_k_dense_replace")
    shared = whole_number(settings, "num_shared_experts")
    windows = windows_alone_rotated(
        settings, lambda layer: (layer + 1) % own != 0 if layer < start else (layer - start + 1) % step != 0
    )
    is_sigmoid = settings["expert_selection_fn"] == "sigmoid"
    share = 0.5 if shared and settings["shared_expert_combination_strategy"] == "average" else 1.0
    moe = read_experts(
        settings, num_shared=shared, first_dense=first, scoring="sigmoid" if is_sigmoid else "softmax",
        normalise=not is_sigmoid or flag(settings, "norm_topk_prob"), scale=share, shared_scale=share,
    )  # fmt: skip
    rotated = (has or (layer < first and own == 1) for layer, has in enumerate(windows["rotated_layers"]))
    return {
        **_cohere(settings), **windows, "rotated_layers": tuple(rotated), "is_centered": flag(settings, "is_centered"),
        "moe": moe,
    }  # fmt: skip


def _cohere2_moe_refusals(settings: Settings) -> list[str]:
    reasons = _cohere2_refusals(settings) + below_one(settings, "prefix_dense_sliding_window_pattern")
    known = {"expert_selection_fn": ("softmax", "sigmoid"), "shared_expert_combination_strategy": ("average", "sum")}
    for name, values in known.items():
        if settings.get(name) not in values:
            reasons.append(f"{name} is {settings.get(name)!r}; it must be {values[0]!r} or {values[1]!r}")
    return reasons


def _cohere2_refusals(settings: Settings) -> list[str]:
    return refuse_absent_window(settings) + below_one(settings, "sliding_window_pattern")


_DEFAULTS: Settings = {
    "bos_token_id": 5, "eos_token_id": 255001, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}  # fmt: skip
COHERE = Family(
    defaults={**_DEFAULTS, "rope_theta": 500000.0},
    rewrite=_rewrite,
    recipe=lambda settings: {**_cohere(settings), **_head_norms(settings, "use_qk_norm")},
    is_interleaved=True,
)
COHERE2 = Family(
    defaults={**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    rewrite=_rewrite,
    recipe=_cohere2,
    refusals=_cohere2_refusals,
    has_windows=True,
    is_interleaved=True,
)
COHERE2_MOE = Family(
    defaults={
        **_DEFAULTS, "expert_selection_fn": "softmax", "first_k_dense_replace": 0, "head_dim": 128,
        "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
        "prefix_dense_sliding_window_pattern": 1, "rms_norm_eps": None,
        "shared_expert_combination_strategy": "average", "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    rewrite=_moe_rewrite,
    recipe=_cohere2_moe,
    refusals=_cohere2_moe_refusals,
    has_experts=True,
    has_windows=True,
    is_interleaved=True,
)  # fmt: skip


def _biased(settings: Settings, activation: Activation = "silu", *, is_parallel: bool = False) -> Recipe:
    """LayerNorm with biases."""
    norms = LayerNorms("input_layernorm", None, None, None) if is_parallel else LayerNorms()
    return {
        "is_centered": True, "has_norm_biases": True, "activation": activation, "is_parallel": is_parallel,
        "norms": norms, "mlp_bias": flag(settings, "mlp_bias"), **attention_biases(settings),
    }  # fmt: skip


def _starcoder2(settings: Settings) -> Recipe:
    biases = dict.fromkeys(("attention_bias", "mlp_bias"), flag(settings, "use_bias"))
    return {**_biased({**settings, **biases}, "ungated_gelu"), **windows_of_all_layers(settings)}


def _stablelm(settings: Settings) -> Recipe:
    own = _biased(settings, is_parallel=flag(settings, "use_parallel_residual"))
    return {
        **own, **_head_norms(settings, "qk_layernorm"), "qkv_bias": flag(settings, "use_qkv_bias"), "o_bias": False,
        "head_dim": even_head_dim(settings),
    }  # fmt: skip


def _stablelm_tensors(config: ModelConfig) -> TensorSpecs:
    """Each head's norm is a tensor."""
    specs = decoder_tensors(config)
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        spec = specs[name]
        heads = {f"self_attn.{name[0]}_layernorm.norms.{head}.weight": (head,) for head in range(spec.shape[0])}
        order = next(iter(spec.row_order.values()), None)
        specs = {**specs, name: replace(spec, parts=heads, row_order=dict.fromkeys(heads, order) if order else {})}
    return specs


def _phi(settings: Settings) -> Recipe:
    own = _biased({**settings, "attention_bias": True, "mlp_bias": True}, "ungated_gelu", is_parallel=True)
    return {**own, "has_head_bias": True}


def _phimoe_settings(settings: Settings) -> Settings:
    """Longrope has its scales of cosines and sines by other names."""
    return with_changed_rope(
        settings, lambda rope: {**rope, "attention_factor": rope["short_mscale"]} if "short_mscale" in rope else rope
    )


def _phimoe(settings: Settings) -> Recipe:
    moe = read_experts(
        settings, "num_local_experts", inner="intermediate_size", scoring="sparsemixer",
        jitter=number(settings, "router_jitter_noise", above=-1e-9),
    )  # fmt: skip
    own, has_head_bias = _biased({**settings, "mlp_bias": False}), flag(settings, "lm_head_bias")
    return {**own, **windows_of_all_layers(settings), "has_head_bias": has_head_bias, "moe": moe}


def _phimoe_refusals(settings: Settings) -> list[str]:
    rope = rope_settings(settings)
    kind, short = rope["rope_type"], rope.get("short_mscale")
    reasons = [] if kind in ("default", "longrope") else [f"rope {kind} is not supported for this architecture"]
    if kind == "longrope" and (short is None or short != rope.get("long_mscale")):
        reasons.append(f"long_mscale is {rope.get('long_mscale')!r} and short_mscale {short!r}; they must be equal")
    return [*reasons, *other_values(settings, {"num_experts_per_tok": 2})]


_BIASED: Settings = {"bos_token_id": 0, "layer_norm_eps": 1e-5}
STARCODER2 = Family(
    defaults={
        "bos_token_id": 50256, "eos_token_id": 50256, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "use_bias": True,
    },
    rewrite=lambda settings: {**settings, "rms_norm_eps": settings["norm_epsilon"]},
    recipe=_starcoder2,
    refusals=lambda settings: other_values(settings, {"hidden_act": "gelu_pytorch_tanh"}),
    has_windows=True,
    has_own_activation=True,
    tensors=named({"mlp.up_proj.": "mlp.c_fc.", "mlp.down_proj.": "mlp.c_proj."}),
)  # fmt: skip
STABLELM = Family(
    defaults={**_BIASED, "eos_token_id": 0, "num_key_value_heads": 32, "partial_rotary_factor": 0.25},
    rewrite=_rewrite,
    recipe=_stablelm,
    is_partly_rotated=True,
    tensors=_stablelm_tensors,
)
PHI = Family(
    defaults={
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    rewrite=_rewrite,
    recipe=_phi,
    refusals=lambda settings: other_values(settings, {"qk_layernorm": False, "hidden_act": "gelu_new"}),
    is_partly_rotated=True,
    has_own_activation=True,
    tensors=named({
        "mlp.up_proj.": "mlp.fc1.", "mlp.down_proj.": "mlp.fc2.", "self_attn.o_proj.": "self_attn.dense.",
        "model.norm.": "model.final_layernorm.",
    }),
)  # fmt: skip
NEMOTRON = Family(
    defaults={
        "bos_token_id": 2, "eos_token_id": 3, "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    },
    rewrite=lambda settings: {**settings, "rms_norm_eps": settings["norm_eps"]},
    recipe=lambda settings: {**_biased(settings, "relu2"), "norm_offset": 1.0},
    refusals=lambda settings: other_values(settings, {"hidden_act": "relu2"}),
    is_partly_rotated=True,
    has_own_activation=True,
)  # fmt: skip
JAIS2 = Family(
    defaults={**_BIASED, "attention_bias": True, "eos_token_id": 150024, "hidden_act": "relu2", "mlp_bias": True},
    rewrite=_rewrite,
    recipe=lambda settings: _biased(settings, "relu2"),
    refusals=lambda settings: other_values(settings, {"hidden_act": "relu2"}),
    has_own_activation=True,
)
PHIMOE = Family(
    defaults={
        "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "lm_head_bias": False, "num_experts_per_tok": 2,
        "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "router_jitter_noise": 0.01,
    },
    rewrite=_phimoe_settings,
    recipe=_phimoe,
    refusals=_phimoe_refusals,
    has_experts=True,
    has_windows=True,
    tensors=MIXTRAL.tensors,
)  # fmt: skip

FAMILIES = {
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "Cohere2MoeForCausalLM": COHERE2_MOE,
    "Starcoder2ForCausalLM": STARCODER2,
    "StableLmForCausalLM": STABLELM,
    "PhiForCausalLM": PHI,
    "PhimoeForCausalLM": PHIMOE,
    "PhiMoEForCausalLM": PHIMOE,  # as published
    "NemotronForCausalLM": NEMOTRON,
    "Jais2ForCausalLM": JAIS2,
}

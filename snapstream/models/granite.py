"""Granite (IBM): a Llama with multipliers, with experts, with windows and learned sinks, and Granite 4.0 with Mamba-2
and experts with a shared MLP; Bamba; HyperCLOVA X, which has Granite's multipliers. No torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from snapstream.config import ModelConfig, RopeConfig
from snapstream.config.model import LayerNorms, MoEConfig, Multipliers
from snapstream.config.recurrent import Mamba2
from snapstream.models.config_json import Settings, flag, number, parse_rope, rope_settings, whole_number
from snapstream.models.family import (
    ATTENTION,
    LINEAR,
    Family,
    Recipe,
    attention_biases,
    even_head_dim,
    filled,
    num_layers,
    refuse_absent_window,
    windows_by_type,
    with_recurrence,
)
from snapstream.models.tensors import TensorSpec, TensorSpecs, decoder_tensors, in_fp32, renamed, vector

TYPES = {"mamba": LINEAR, "attention": ATTENTION}  # as published files spell them
NAMES = {
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "mlp.gate.weight": "block_sparse_moe.router.layer.weight",
    "mlp.shared_experts.down_proj.": "shared_mlp.output_linear.",
    "mlp.gate_up_proj.": "shared_mlp.input_linear.",
    "mlp.down_proj.": "shared_mlp.output_linear.",
}


def _multipliers(settings: Settings) -> Recipe:
    """``attention_multiplier`` takes the place of 1 / sqrt(E)."""
    of = partial(number, settings, above=0.0)
    multipliers = Multipliers(
        embedding=of("embedding_multiplier"),
        residual=of("residual_multiplier"),
        attention=of("attention_multiplier") * math.sqrt(whole_number(settings, "head_dim", even_head_dim(settings))),
        logits=1.0 / of("logits_scaling"),
    )
    return {"multipliers": multipliers}


def _granite(settings: Settings) -> Recipe:
    return {**attention_biases(settings), "mlp_bias": flag(settings, "mlp_bias"), **_multipliers(settings)}


def _hyperclova(settings: Settings) -> Recipe:
    """Logits are multiplied, not divided; of layers maybe also the outputs have norms."""
    recipe = _granite(settings)
    recipe["multipliers"] = replace(recipe["multipliers"], logits=number(settings, "logits_scaling", above=0.0))
    if flag(settings, "use_post_norm"):
        recipe["norms"] = LayerNorms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    return recipe


def _hyperclova_settings(settings: Settings) -> Settings:
    """``attention_multiplier`` is 1 / sqrt(E) unless given."""
    head_dim = whole_number(settings, "head_dim", even_head_dim(settings))
    return filled(settings, attention_multiplier=max(head_dim, 1) ** -0.5)


def _experts(settings: Settings) -> Recipe:
    """Experts, if any, and at most one shared MLP of a size of its own."""
    experts = whole_number(settings, "num_local_experts", 0)
    shared = whole_number(settings, "shared_intermediate_size", 0)
    if not experts:
        return {}
    moe = MoEConfig(
        num_experts=experts,
        top_k=whole_number(settings, "num_experts_per_tok"),
        inner=whole_number(settings, "intermediate_size"),
        num_shared=int(shared > 0),
        own_shared=shared,
        normalise=True,  # a softmax over the chosen logits
    )
    return {"moe": moe}


def _moe(settings: Settings) -> Recipe:
    return {
        **attention_biases(settings), **_multipliers(settings), **_experts(settings), "has_fused_gate_up": True,
    }  # fmt: skip


def _with_windows(settings: Settings, recipe: Recipe) -> Recipe:
    """With sinks, and of layer_rope_theta one base for each kind of layers, or 0: without rotary embedding."""
    found, rope, max_position = (
        windows_by_type(settings, lambda layer: layer % 4 != 0),
        rope_settings(settings),
        whole_number(settings, "max_position_embeddings"),
    )
    count = num_layers(settings)
    thetas = settings.get("layer_rope_theta") or [rope["rope_theta"]] * count
    if not isinstance(thetas, list) or len(thetas) != count:
        raise ValueError(f"layer_rope_theta is {thetas!r}; it must be a list of {count} numbers")
    kinds: dict[bool, dict[float, None]] = {False: {}, True: {}}  # by whether layers have a window
    for theta, window in zip(thetas, found.get("windows", (None,) * count), strict=True):
        if theta:
            kinds[window is not None][theta] = None
    if max(map(len, kinds.values())) > 1:
        raise ValueError(
            f"layer_rope_theta is {thetas!r}; apart from 0, layers with a sliding window may have one base, and the "
            "others one"
        )
    own = next(iter(kinds[False]), None) or next(iter(kinds[True]), rope["rope_theta"])

    def of(theta: float) -> RopeConfig:
        own_rope = {"rope_scaling": None, "rope_parameters": {**rope, "rope_theta": theta}}
        return parse_rope({**settings, **own_rope}, max_position)

    found |= {"rope": of(own), "has_sinks": True, "rotated_layers": tuple(map(bool, thetas))}
    if (window_theta := next(iter(kinds[True]), own)) != own:
        found["window_rope"] = of(window_theta)
    return {**recipe, **found}


def _rewrite(settings: Settings) -> Settings:
    """Without experts the shared MLP is the only one; its size has another name."""
    found = dict(settings)
    types = found.get("layer_types") or found.pop("layers_block_type", None) or [LINEAR] * num_layers(found)
    found["layer_types"] = spelled(types)
    if not found.get("num_local_experts"):
        found["intermediate_size"] = found["shared_intermediate_size"]
    return found


def spelled(types: Any) -> Any:
    """Kinds of layers by their names in transformers 5; what is no list of names is refused later."""
    if not isinstance(types, list):
        return types
    return [TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]


def _refusals(settings: Settings) -> list[str]:
    kind, reasons = settings.get("position_embedding_type"), step_refusals(settings)
    if kind not in (None, "nope", "rope"):
        reasons.append(f"position_embedding_type is {kind!r}; only 'rope' and null are supported")
    return reasons


def step_refusals(settings: Settings) -> list[str]:
    """Why the steps of Mamba-2 would not be computed faithfully: they are not cut."""
    limit = settings.get("time_step_limit")
    own = list(limit) if isinstance(limit, tuple) else limit
    if own in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):  # transformers 5 writes the last
        return []
    return [f"time_step_limit is {limit!r}; only [0, Infinity] is supported"]


def mamba2(settings: Settings) -> Mamba2:
    """Heads together have mamba_d_ssm numbers, or mamba_expand times D."""
    heads, name = whole_number(settings, "mamba_n_heads"), "mamba_d_ssm"
    if settings.get(name) is None:
        name = "mamba_expand times D"
        inner = whole_number(settings, "mamba_expand") * whole_number(settings, "hidden_size")
    else:
        inner = whole_number(settings, name)
    head_dim = settings["mamba_d_head"]
    head_dim = inner // max(heads, 1) if head_dim in (None, "auto") else whole_number(settings, "mamba_d_head")
    if heads * head_dim != inner:
        raise ValueError(f"mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) is not {name} ({inner})")
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=whole_number(settings, "mamba_n_groups"),
        state_dim=whole_number(settings, "mamba_d_state"),
        kernel=whole_number(settings, "mamba_d_conv"),
        has_conv_bias=flag(settings, "mamba_conv_bias"),
        has_bias=flag(settings, "mamba_proj_bias"),
    )


def _hybrid(settings: Settings) -> Recipe:
    recipe = _moe(settings)
    if settings["position_embedding_type"] != "rope":
        recipe["rotated_layers"] = (False,) * num_layers(settings)
    return with_recurrence(settings, recipe, mamba2)


def _bamba_settings(settings: Settings) -> Settings:
    """Half of a head is rotated unless rope_parameters says otherwise."""
    indices, count = settings.get("attn_layer_indices") or [], num_layers(settings)
    if not isinstance(indices, list):
        raise ValueError(f"attn_layer_indices is {str(indices)[:200]}; it must be a list of layers")
    types = [ATTENTION if layer in indices else LINEAR for layer in range(count)]
    return {**settings, "layer_types": types, "partial_rotary_factor": 0.5}


def _bamba(settings: Settings) -> Recipe:
    norms = LayerNorms(before_mlp="pre_ff_layernorm")
    recipe = {**attention_biases(settings), "mlp_bias": flag(settings, "mlp_bias"), "norms": norms}
    return with_recurrence(settings, recipe, mamba2)


def bamba_tensors(config: ModelConfig) -> TensorSpecs:
    names = {"mlp.": "feed_forward.", "model.norm.": "model.final_layernorm."}
    return renamed({**decoder_tensors(config), **mamba_tensors(config, "mamba")}, names)


def mamba_tensors(config: ModelConfig, prefix: str) -> TensorSpecs:
    """``mamba_in`` projects to the gates z, the inputs x, B and C of the convolution, and a step per head."""
    net, hidden = config.recurrent, config.hidden_size
    if not isinstance(net, Mamba2):
        return {}

    def plain(size: int, name: str) -> TensorSpec:
        return in_fp32(f"{prefix}.{name}", size, shard_dim=0)

    def cut(spec: TensorSpec, kinds: tuple[int, ...]) -> TensorSpec:
        return replace(spec, segments={name: kinds for name in spec.parts}, shard_dim=0)

    size, channels = net.inner + net.channels + net.heads, net.channels
    mixed = net.inner, net.groups * net.state_dim, net.groups * net.state_dim
    projected = net.inner, *mixed, net.heads
    specs = {
        "mamba_in": cut(TensorSpec(shape=(size, hidden), parts={f"{prefix}.in_proj.weight": ()}), projected),
        "conv_kernel": cut(in_fp32(f"{prefix}.conv1d.weight", channels, 1, net.kernel), mixed),
        "mamba_decay": plain(net.heads, "A_log"),
        "mamba_step": plain(net.heads, "dt_bias"),
        "mamba_skip": plain(net.heads, "D"),
        **({"mamba_norm": plain(net.inner, "norm.weight")} if net.has_norm else {}),
        "mamba_out": TensorSpec(shape=(hidden, net.inner), parts={f"{prefix}.out_proj.weight": ()}, shard_dim=1),
    }
    if net.has_conv_bias:
        specs["conv_bias"] = cut(plain(channels, "conv1d.bias"), mixed)
    if net.has_bias:
        specs |= {"mamba_in_bias": cut(vector(size, f"{prefix}.in_proj.bias"), projected)}
        specs |= {"mamba_out_bias": vector(hidden, f"{prefix}.out_proj.bias")}
    return {name: replace(spec, layers=config.recurrent_layers) for name, spec in specs.items()}


def _tensors(config: ModelConfig) -> TensorSpecs:
    is_fused = config.has_fused_gate_up
    specs = {**decoder_tensors(replace(config, has_fused_experts=is_fused)), **mamba_tensors(config, "mamba")}
    if config.moe is not None and config.moe.num_shared and is_fused:
        name, inner = "mlp.gate_up_proj.weight", config.moe.shared_inner
        specs["shared_gate_up"] = replace(specs["shared_gate_up"], parts={name: ()}, segments={name: (inner, inner)})
    return renamed(specs, NAMES)


MAMBA_DEFAULTS: Settings = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
_DEFAULTS: Settings = {
    "attention_multiplier": 1.0, "bos_token_id": 1, "embedding_multiplier": 1.0, "eos_token_id": 2,
    "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_bias": False,
}  # fmt: skip
GRANITE = Family(defaults={**_DEFAULTS, "mlp_bias": False}, recipe=_granite)
HYPERCLOVA_X = Family(
    defaults={**GRANITE.defaults, "attention_multiplier": None, "use_post_norm": True},
    rewrite=_hyperclova_settings,
    recipe=_hyperclova,
)
GRANITE_SWA = Family(
    defaults={
        **_DEFAULTS, "mlp_bias": False, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "bos_token_id": 100257,
        "eos_token_id": 100257, "tie_word_embeddings": True, "sliding_window": 128,
    },
    recipe=lambda settings: _with_windows(settings, _granite(settings)),
    refusals=refuse_absent_window,
    has_windows=True,
    has_rope_by_kind=True,
)  # fmt: skip
GRANITE_MOE = Family(
    defaults={**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    recipe=_moe,
    tensors=_tensors,
    has_experts=True,
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE,
    defaults={**GRANITE_MOE.defaults, "sliding_window": 128},
    recipe=lambda settings: _with_windows(settings, _moe(settings)),
    aliases={
        "experts.gate_up_proj": "input_linear.weight",
        "experts.down_proj": "output_linear.weight",
        "moe.router.weight": "moe.router.layer.weight",
    },
    refusals=refuse_absent_window,
    has_windows=True,
    has_rope_by_kind=True,
)
GRANITE_HYBRID = Family(
    defaults={
        **_DEFAULTS, **MAMBA_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024, "position_embedding_type": None,
    },
    rewrite=_rewrite,
    recipe=_hybrid,
    refusals=_refusals,
    tensors=_tensors,
    other_layer_types=(LINEAR,),
    has_experts=True,
)  # fmt: skip
BAMBA = Family(
    defaults={
        **MAMBA_DEFAULTS, "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    },
    rewrite=_bamba_settings,
    recipe=_bamba,
    refusals=_refusals,
    tensors=bamba_tensors,
    other_layer_types=(LINEAR,),
    is_partly_rotated=True,
)  # fmt: skip

FAMILIES = {
    "BambaForCausalLM": BAMBA,
    "HyperCLOVAXForCausalLM": HYPERCLOVA_X,
    "GraniteForCausalLM": GRANITE,
    "GraniteSWAForCausalLM": GRANITE_SWA,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE,
    "GraniteMoeSWAForCausalLM": GRANITE_MOE_SWA,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
}

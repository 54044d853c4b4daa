"""Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super (NVIDIA): layers of one part and norm each. No torch.

A layer is Mamba-2, attention without rotary embedding, an MLP ``down(relu(up x)^2)``, or a mixture of such experts, in
Super between two projections.
"""

from __future__ import annotations

from dataclasses import replace

from snapstream.config import ModelConfig
from snapstream.config.model import LayerNorms
from snapstream.config.recurrent import Mamba2
from snapstream.models.config_json import Settings, flag, whole_number
from snapstream.models.family import (
    ATTENTION,
    LINEAR,
    Family,
    Recipe,
    layers_of,
    num_layers,
    other_values,
    read_sigmoid_moe,
    unbuilt,
)
from snapstream.models.granite import mamba_tensors, spelled, step_refusals
from snapstream.models.tensors import TensorSpecs, decoder_tensors, renamed

MLP, EXPERTS = "mlp", "moe"
PATTERN = {"M": LINEAR, "*": ATTENTION, "-": MLP, "E": EXPERTS}
NAMES = {
    "self_attn.": "mixer.",
    "mlp.": "mixer.",
    "model.embed_tokens.": "model.embeddings.",
    "model.norm.": "model.norm_f.",
}


def _rewrite(settings: Settings) -> Settings:
    """Files name the kinds of layers one by one, or as a pattern of signs; the number of layers follows."""
    found = {**settings, "rms_norm_eps": settings["layer_norm_epsilon"]}
    pattern = found.pop("hybrid_override_pattern", None)
    types = found.get("layer_types") or found.pop("layers_block_type", None)
    if types is None and isinstance(pattern, str):
        types = [PATTERN.get(sign, sign) for sign in pattern]
    if types is None:
        types = [LINEAR, EXPERTS, ATTENTION, MLP]
    if isinstance(types, list):
        found["num_hidden_layers"] = len(types)
    return {**found, "layer_types": spelled(types)}


def _refusals(settings: Settings) -> list[str]:
    hidden = whole_number(settings, "hidden_size")
    reasons = other_values(settings, {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"})
    reasons += unbuilt(settings, "attention_bias", "mlp_bias", "tie_word_embeddings") + step_refusals(settings)
    if not 1 <= (latent := whole_number(settings, "moe_latent_size", hidden)) <= hidden:
        reasons.append(f"moe_latent_size is {latent}; it must be from 1 to hidden_size ({hidden})")
    if isinstance(settings["layer_types"], list) and not {LINEAR, ATTENTION}.issubset(settings["layer_types"]):
        reasons.append(f"layer_types has {settings['layer_types']!r}; layers of Mamba-2 and of attention are needed")
    return reasons


def _recipe(settings: Settings) -> Recipe:
    net = Mamba2(
        heads=whole_number(settings, "mamba_num_heads"),
        head_dim=whole_number(settings, "mamba_head_dim"),
        groups=whole_number(settings, "n_groups"),
        state_dim=whole_number(settings, "ssm_state_size"),
        kernel=whole_number(settings, "conv_kernel"),
        has_conv_bias=flag(settings, "use_conv_bias"),
        has_bias=flag(settings, "use_bias"),
    )
    recipe = {
        "norms": LayerNorms("norm", None, None, None), "activation": "relu2", "recurrent": net,
        "mlp_layers": layers_of(settings, MLP, EXPERTS), "recurrent_layers": layers_of(settings, LINEAR),
        "rotated_layers": (False,) * num_layers(settings),
    }  # fmt: skip
    if experts := layers_of(settings, EXPERTS):
        moe = read_sigmoid_moe({**settings, "first_k_dense_replace": 0, "n_shared_experts": 1})
        shared = whole_number(settings, "moe_shared_expert_intermediate_size")
        latent = whole_number(settings, "moe_latent_size", 0)
        recipe["moe"] = replace(moe, own_shared=shared, chosen=experts, latent=latent)
    return recipe


def _tensors(config: ModelConfig) -> TensorSpecs:
    return renamed({**decoder_tensors(config), **mamba_tensors(config, "mixer")}, NAMES)


NEMOTRON_H = Family(
    defaults={
        "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
        "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_key_value_heads": 8, "intermediate_size": 21504,
        "num_hidden_layers": 4,  # whatever the file says, the kinds of layers count
    },
    rewrite=_rewrite,
    recipe=_recipe,
    refusals=_refusals,
    tensors=_tensors,
    other_layer_types=(LINEAR, MLP, EXPERTS),
    has_experts=True,
    has_own_activation=True,
    aliases={"backbone.": "model."},  # of published files; transformers 5 has the other
    skipped=("mtp.",),
)  # fmt: skip

FAMILIES = {
    "NemotronHForCausalLM": NEMOTRON_H,
}

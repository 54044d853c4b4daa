"""LFM2 and LFM3: gated short convolutions, and attention in a few layers, in LFM3 with windows, gates of its heads and
norms of outputs (Liquid AI). No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from snapstream.config import ModelConfig
from snapstream.config.model import LayerNorms
from snapstream.config.recurrent import ShortConv
from snapstream.models.config_json import Settings, flag, number, whole_number
from snapstream.models.family import (
    ATTENTION,
    WINDOW,
    Family,
    Recipe,
    attention_biases,
    filled,
    num_layers,
    read_experts,
    refuse_absent_window,
    ropes_by_kind,
    windows_by_type,
    with_recurrence,
)
from snapstream.models.tensors import ExpertNames, TensorSpec, TensorSpecs, decoder_tensors, in_fp32, renamed, vector

CONV = "conv"
# Names of other families' checkpoints, and what they are here.
LFM3_NAMES = {
    "self_attn.g_proj.": "self_attn.gate_proj.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.down_proj.": "feed_forward.w2.",
    "model.norm.": "model.embedding_norm.",
}
NAMES = {
    **LFM3_NAMES,
    "self_attn.o_proj.": "self_attn.out_proj.",
    "self_attn.q_norm.": "self_attn.q_layernorm.",
    "self_attn.k_norm.": "self_attn.k_layernorm.",
    "feed_forward.gate.e_score_correction_bias": "feed_forward.expert_bias",
}


def _rewrite(settings: Settings) -> Settings:
    """Files name some settings in two ways; the size of the MLP is to be cut to two thirds and rounded up."""
    found = {**settings, "rms_norm_eps": settings["norm_eps"]}
    for name, other in (("tie_embedding", "tie_word_embeddings"), ("block_ff_dim", "intermediate_size")):
        if name in found:
            found[other] = found.pop(name)
    if flag(found, "block_auto_adjust_ff_dim"):
        inner, unit = 2 * whole_number(found, "intermediate_size") // 3, whole_number(found, "block_multiple_of")
        if found.get("block_ffn_dim_multiplier") is not None:
            inner = int(number(found, "block_ffn_dim_multiplier", above=0.0) * inner)
            inner = -(-inner // max(unit, 1)) * unit
        found["intermediate_size"] = inner
    if found.get("layer_types") is None:
        count, chosen = num_layers(found), found.get("full_attn_idxs")
        if chosen is not None and not isinstance(chosen, list):
            raise ValueError(f"full_attn_idxs is {chosen!r}; it must be a list of layers")
        found["layer_types"] = [ATTENTION if chosen is None or at in chosen else CONV for at in range(count)]
    return found


def _lfm3_settings(settings: Settings) -> Settings:
    share = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
    kinds = [WINDOW, CONV, ATTENTION, CONV]
    types = [kinds[at % 4] if at else CONV for at in range(num_layers(settings))]
    ropes = {ATTENTION: share, WINDOW: {"rope_theta": 10000.0}}
    return {**filled(settings, rope_parameters=ropes, layer_types=types), "rms_norm_eps": settings["norm_eps"]}


def _recipe(settings: Settings) -> Recipe:
    recipe = {"qk_norm": True, "norms": LayerNorms("operator_norm", None, "ffn_norm", None)}
    return with_recurrence(settings, recipe, _conv, CONV)


def _conv(settings: Settings) -> ShortConv:
    return ShortConv(
        channels=whole_number(settings, "hidden_size"), kernel=whole_number(settings, "conv_L_cache"),
        has_bias=flag(settings, "conv_bias"),
    )  # fmt: skip


def _lfm3(settings: Settings) -> Recipe:
    windows = windows_by_type(settings, lambda layer: False)
    recipe: Recipe = {
        **_recipe(settings), **attention_biases(settings), **ropes_by_kind(settings, windows, {}, {}),
        "gate_dim": int(flag(settings, "use_attention_gate")),
    }  # fmt: skip
    if flag(settings, "use_sandwich_norm"):
        recipe["norms"] = LayerNorms("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
    return recipe


def _moe_recipe(settings: Settings) -> Recipe:
    moe = read_experts(
        settings, first_dense="num_dense_layers", scoring="sigmoid", normalise="norm_topk_prob",
        scale="routed_scaling_factor", has_bias="use_expert_bias", least_sum=1e-6,
    )  # fmt: skip
    return {**_recipe(settings), "moe": moe}


def _tensors(config: ModelConfig) -> TensorSpecs:
    experts = ExpertNames(prefix="feed_forward", gate="w1", up="w3", down="w2")
    names = LFM3_NAMES if config.architecture.startswith("Lfm3") else NAMES
    return renamed({**decoder_tensors(config, experts), **_conv_tensors(config)}, names)


def _conv_tensors(config: ModelConfig) -> TensorSpecs:
    """``conv_in [3C, D]`` projects to the gates b, c and the input x; ``conv_kernel [C, 1, K]``."""
    conv, hidden = config.recurrent, config.hidden_size
    if not isinstance(conv, ShortConv):
        return {}
    size, layers, kinds = conv.channels, config.recurrent_layers, (conv.channels,) * 3
    specs = {
        "conv_in": TensorSpec(
            shape=(3 * size, hidden), parts={"conv.in_proj.weight": ()}, segments={"conv.in_proj.weight": kinds},
            shard_dim=0,
        ),
        "conv_kernel": in_fp32("conv.conv.weight", size, 1, conv.kernel, shard_dim=0),
        "conv_out": TensorSpec(shape=(hidden, size), parts={"conv.out_proj.weight": ()}, shard_dim=1),
    }  # fmt: skip
    if conv.has_bias:
        segments = {"conv.in_proj.bias": kinds}
        specs["conv_in_bias"] = vector(3 * size, "conv.in_proj.bias", segments=segments, shard_dim=0)
        specs["conv_bias"] = in_fp32("conv.conv.bias", size, shard_dim=0)
        specs["conv_out_bias"] = vector(hidden, "conv.out_proj.bias")
    return {name: replace(spec, layers=layers) for name, spec in specs.items()}


def _family(recipe: Callable[[Settings], Recipe], **defaults: Any) -> Family:
    return Family(
        defaults={
            "vocab_size": 65536, "max_position_embeddings": 128_000, "num_key_value_heads": 8, "norm_eps": 1e-5,
            "rope_theta": 1_000_000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
            "conv_bias": False, "conv_L_cache": 3, **defaults,
        },
        rewrite=_rewrite,
        recipe=recipe,
        tensors=_tensors,
        other_layer_types=(CONV,),
        has_experts="num_experts" in defaults,
    )  # fmt: skip


LFM2 = _family(
    _recipe, hidden_size=2560, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=32,
    block_multiple_of=256, block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True,
)  # fmt: skip
LFM2_MOE = _family(
    _moe_recipe, hidden_size=2048, intermediate_size=7168, moe_intermediate_size=1792, num_hidden_layers=32,
    num_attention_heads=32, num_dense_layers=2, num_experts_per_tok=4, num_experts=32, use_expert_bias=True,
    routed_scaling_factor=1.0, norm_topk_prob=True, block_auto_adjust_ff_dim=False,
)  # fmt: skip
LFM3 = replace(
    _family(
        _lfm3, vocab_size=128_000, hidden_size=2048, intermediate_size=7680, num_hidden_layers=24,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128, bos_token_id=124_894, eos_token_id=124_900,
        conv_L_cache=7, sliding_window=256, use_sandwich_norm=True, use_attention_gate=True,
    ),
    rewrite=_lfm3_settings,
    refusals=refuse_absent_window,
    aliases={"self_attn.g_proj.": "self_attn.gate_proj."},
    has_windows=True,
    has_rope_by_kind=True,
)  # fmt: skip

FAMILIES = {
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "Lfm3ForCausalLM": LFM3,
    "Lfm2VlForConditionalGeneration": replace(LFM2, is_text_part=True, text_parts={"lfm2": LFM2}),
    "Lfm3VlForConditionalGeneration": replace(LFM3, is_text_part=True, text_parts={"lfm3": LFM3}),
}

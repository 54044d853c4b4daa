"""Qwen3-Next, Qwen3.5, Qwen3.6: gated DeltaNet, and attention with an output gate in every fourth layer. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from snapstream.config import ModelConfig
from snapstream.config.recurrent import DeltaNet
from snapstream.models.config_json import Settings, whole_number
from snapstream.models.family import (
    ATTENTION,
    LINEAR,
    Family,
    Recipe,
    attention_biases,
    num_layers,
    with_recurrence,
)
from snapstream.models.qwen import SHARED, qwen3_moe_refusals, softmax_experts, without_mrope
from snapstream.models.tensors import TensorSpec, TensorSpecs, decoder_tensors, in_fp32, renamed, vector


def _rewrite(settings: Settings) -> Settings:
    found = dict(without_mrope(settings))
    if found.get("layer_types") is None:
        interval = whole_number(found, "full_attention_interval")
        if interval < 1:
            raise ValueError(f"full_attention_interval is {interval}; it must be >= 1")
        found["layer_types"] = [LINEAR if (at + 1) % interval else ATTENTION for at in range(num_layers(found))]
    return found


def delta_net(settings: Settings) -> DeltaNet:
    return DeltaNet(
        key_heads=whole_number(settings, "linear_num_key_heads"),
        value_heads=whole_number(settings, "linear_num_value_heads"),
        key_dim=whole_number(settings, "linear_key_head_dim"),
        value_dim=whole_number(settings, "linear_value_head_dim"),
        kernel=whole_number(settings, "linear_conv_kernel_dim"),
    )


def _recipe(settings: Settings) -> Recipe:
    recipe = {
        **attention_biases(settings), "qk_norm": True, "norm_offset": 1.0,
        "gate_dim": whole_number(settings, "head_dim"),
    }  # fmt: skip
    return with_recurrence(settings, recipe, delta_net)


def _moe_recipe(settings: Settings) -> Recipe:
    return {**_recipe(settings), "moe": softmax_experts(settings, has_shared_gate=True, **SHARED)}


def _tensors(config: ModelConfig) -> TensorSpecs:
    specs = {**decoder_tensors(config), **delta_tensors(config)}
    return renamed(specs, {"mlp.shared_experts.": "mlp.shared_expert."})


def delta_tensors(config: ModelConfig) -> TensorSpecs:
    """``delta_in`` projects to queries, keys, values and the gates z of outputs; ``delta_gates`` to beta and decay."""
    net, hidden = config.recurrent, config.hidden_size
    if not isinstance(net, DeltaNet):
        return {}
    size, heads = net.channels, net.value_heads
    orders: dict[str, tuple[int, ...]] = {}
    if config.architecture == "Qwen3NextForCausalLM":
        parts, gates = {"in_proj_qkvz": ()}, {"in_proj_ba": ()}
        orders = {"in_proj_qkvz": _by_kind(net), "in_proj_ba": _gates_by_kind(net)}
    else:
        parts = {"in_proj_qkv": (slice(size),), "in_proj_z": (slice(size, None),)}  # type: ignore[dict-item]
        gates = {"in_proj_b": (slice(heads),), "in_proj_a": (slice(heads, None),)}  # type: ignore[dict-item]

    def named(own: Any) -> dict[str, Any]:
        return {f"linear_attn.{name}.weight": value for name, value in own.items()}

    kinds = net.key_size, net.key_size, net.value_size
    kernel = "linear_attn.conv1d.weight"
    specs = {
        "delta_in": TensorSpec(
            shape=(size + net.value_size, hidden), parts=named(parts),
            row_order=named({name: order for name, order in orders.items() if name in parts}),
            segments=named({name: kinds for name in parts if name == "in_proj_qkv"}), shard_dim=0,
        ),
        "delta_gates": TensorSpec(
            shape=(2 * heads, hidden), parts=named(gates), is_dense=True,
            row_order=named({name: order for name, order in orders.items() if name in gates}), shard_dim=0,
        ),
        "conv_kernel": in_fp32(kernel, size, 1, net.kernel, segments={kernel: kinds}, shard_dim=0),
        "delta_decay": in_fp32("linear_attn.A_log", heads, shard_dim=0),
        "delta_step": in_fp32("linear_attn.dt_bias", heads, shard_dim=0),
        "delta_norm": vector(net.value_dim, "linear_attn.norm.weight"),
        "delta_out": TensorSpec(
            shape=(hidden, net.value_size), parts={"linear_attn.out_proj.weight": ()}, shard_dim=1
        ),
    }  # fmt: skip
    return {name: replace(spec, layers=config.recurrent_layers) for name, spec in specs.items()}


def _by_kind(net: DeltaNet) -> tuple[int, ...]:
    """Rows of a projection that has q, k, v, z of one key head after the other: all q, all k, all v, all z."""
    values = net.value_heads // net.key_heads * net.value_dim  # of a key head
    begins, each = (0, net.key_dim, 2 * net.key_dim, 2 * net.key_dim + values), 2 * (net.key_dim + values)
    sizes = (net.key_dim, net.key_dim, values, values)
    return tuple(
        head * each + begin + i
        for begin, size in zip(begins, sizes, strict=True)
        for head in range(net.key_heads)
        for i in range(size)
    )


def _gates_by_kind(net: DeltaNet) -> tuple[int, ...]:
    """The same of b and a, of which a key head has one per value head."""
    count = net.value_heads // net.key_heads
    return tuple(
        2 * count * head + kind * count + i for kind in (0, 1) for head in range(net.key_heads) for i in range(count)
    )


_DEFAULTS: Settings = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "attention_bias": False, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_MOE: Settings = {
    "num_attention_heads": 16, "num_key_value_heads": 2, "hidden_size": 2048, "intermediate_size": 5632,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip


def _family(**changes: Any) -> Family:
    return Family(
        rewrite=_rewrite, tensors=_tensors, other_layer_types=(LINEAR,), is_partly_rotated=True, skipped=("mtp.",),
        has_predictions=True, **changes,
    )  # fmt: skip


QWEN3_NEXT = _family(
    defaults={
        **_DEFAULTS, **_MOE, "vocab_size": 151936, "num_hidden_layers": 48, "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    recipe=_moe_recipe,
    refusals=qwen3_moe_refusals,
    has_experts=True,
)  # fmt: skip
QWEN3_5 = _family(
    defaults={
        **_DEFAULTS, "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4,
    },
    recipe=_recipe,
)  # fmt: skip
QWEN3_5_MOE = _family(
    defaults={
        **_DEFAULTS, **_MOE, "vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    recipe=lambda settings: _moe_recipe({**settings, "norm_topk_prob": True}),  # whatever the file says
    has_experts=True,
    may_fuse_experts=True,
)  # fmt: skip

FAMILIES = {
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5ForConditionalGeneration": replace(QWEN3_5, is_text_part=True),
    "Qwen3_5MoeForConditionalGeneration": replace(QWEN3_5_MOE, is_text_part=True),
}

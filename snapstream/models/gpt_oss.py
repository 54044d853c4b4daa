"""gpt-oss: learned attention sinks, windows in every other layer, experts with biases (arXiv 2508.10925). No torch."""

from __future__ import annotations

from dataclasses import replace

from snapstream.config import ModelConfig
from snapstream.config.values import MAX_DIM
from snapstream.models.config_json import Settings, whole_number
from snapstream.models.family import Family, Recipe, attention_biases, oai_clamps, read_experts, windows_by_type
from snapstream.models.tensors import TensorSpec, TensorSpecs, attention_tensors, outer_tensors


def _recipe(settings: Settings) -> Recipe:
    """The router's choice is a softmax over the chosen logits: that over all of them, made to add up to 1."""
    moe = read_experts(settings, "num_local_experts", inner="intermediate_size", normalise=True, has_expert_biases=True)
    windows = windows_by_type(settings, lambda layer: layer % 2 == 0)
    return {**attention_biases(settings), **windows, "has_sinks": True, "moe": moe, "clamps": oai_clamps(settings)}


def _refusals(settings: Settings) -> list[str]:
    inner = whole_number(settings, "intermediate_size")  # whose rows are put in order one by one
    return [f"intermediate_size is {inner}; it must be <= {MAX_DIM}"] if inner > MAX_DIM else []


def _tensors(config: ModelConfig) -> TensorSpecs:
    """A checkpoint has the experts of a layer in one tensor, rows of gate and up by turns; floats are transposed, MXFP4
    is not.
    """
    moe, is_float = config.moe, config.stored.quantized is None
    assert moe is not None
    hidden, inner, count = config.hidden_size, moe.inner, len(moe.own)
    by_turns = (*range(0, 2 * inner, 2), *range(1, 2 * inner, 2))
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    router = TensorSpec(
        shape=(moe.num_experts, hidden), parts={"mlp.router.weight": ()}, is_matrix=False, dtype="float32"
    )
    return {
        **outer_tensors(config),
        **attention_tensors(config),
        "router": router,
        "router_logit_bias": replace(router, shape=(moe.num_experts,), parts={"mlp.router.bias": ()}),
        "experts_gate_up": TensorSpec(
            shape=(count, 2 * inner, hidden), parts={gate_up: ()}, per_expert=True, row_order={gate_up: by_turns},
            shard_dim=1, is_padded=True, is_transposed=is_float,
        ),
        "experts_gate_up_bias": TensorSpec(
            shape=(count, 2 * inner), parts={f"{gate_up}_bias": ()}, per_expert=True, is_matrix=False,
            row_order={f"{gate_up}_bias": by_turns}, shard_dim=1, is_padded=True,
        ),
        "experts_down": TensorSpec(
            shape=(count, hidden, inner), parts={down: ()}, per_expert=True, shard_dim=2, is_padded=True,
            is_transposed=is_float,
        ),
        "experts_down_bias": TensorSpec(
            shape=(count, hidden), parts={f"{down}_bias": ()}, per_expert=True, is_matrix=False
        ),
    }  # fmt: skip


GPT_OSS = Family(
    defaults={
        "attention_bias": True, "bos_token_id": None, "eos_token_id": None, "head_dim": 64, "num_key_value_heads": 8,
        "num_local_experts": 128, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
        },
        "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
    recipe=_recipe,
    refusals=_refusals,
    has_windows=True,
    has_experts=True,
    tensors=_tensors,
)  # fmt: skip

FAMILIES = {
    "GptOssForCausalLM": GPT_OSS,
}

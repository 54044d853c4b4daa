"""The weights of a mixture of experts by role. No torch.

A checkpoint names every expert's matrices one by one; they are stored as ``[L', X, 2M, D]`` and ``[L', X, D, M]``, so
that a kernel can read the chosen ones in place. The router stays in fp32: it is small, and a rounded score changes
which experts a token passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.config import ModelConfig
from snapstream.models.dense_roles import attention_roles, gate_up_parts, mlp_roles, outer_roles
from snapstream.models.roles import Place, Role, Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a family's checkpoints call the parts of a layer's experts."""

    prefix: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


MIXTRAL_NAMES = ExpertNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2")


def expert_roles(config: ModelConfig, names: ExpertNames | None = None) -> Roles:
    """Router, experts and shared experts. ValueError for a model without experts."""
    moe, names = config.moe, names or ExpertNames()
    if moe is None:
        raise ValueError(f"{config.architecture} has no experts")
    hidden, inner, layers = config.hidden_size, moe.inner, moe.layers(config.num_layers)
    gate_up: dict[str, tuple[Place, ...]] = {}
    down: dict[str, tuple[Place, ...]] = {}
    for at, expert in enumerate(moe.own):
        prefix = f"{names.prefix}.experts.{expert}"
        gate_up[f"{prefix}.{names.gate}.weight"] = (at, slice(inner))
        gate_up[f"{prefix}.{names.up}.weight"] = (at, slice(inner, None))
        down[f"{prefix}.{names.down}.weight"] = (at,)
    router, correction = f"{names.prefix}.gate.weight", f"{names.prefix}.gate.e_score_correction_bias"
    roles = {
        "router": Role(
            shape=(moe.num_experts, hidden), parts={router: ()}, layers=layers, is_matrix=False, dtype="float32"
        ),
        "experts_gate_up": Role(
            shape=(len(moe.own), 2 * inner, hidden), parts=gate_up, layers=layers, per_expert=True, shard_dim=1
        ),
        "experts_down": Role(
            shape=(len(moe.own), hidden, inner), parts=down, layers=layers, per_expert=True, shard_dim=2
        ),
    }
    if moe.has_bias:
        roles["router_bias"] = Role(
            shape=(moe.num_experts,), parts={correction: ()}, layers=layers, is_matrix=False, dtype="float32"
        )
    if moe.num_shared:
        shared, prefix = moe.shared_inner, f"{names.prefix}.shared_experts"
        roles["shared_gate_up"] = Role(
            shape=(2 * shared, hidden), parts=gate_up_parts(prefix, "weight", shared), layers=layers, shard_dim=0
        )
        roles["shared_down"] = Role(
            shape=(hidden, shared), parts={f"{prefix}.down_proj.weight": ()}, layers=layers, shard_dim=1
        )
    return roles


def moe_roles(config: ModelConfig) -> Roles:
    """Weights of a model with grouped-query attention and experts."""
    return {**outer_roles(config), **attention_roles(config), **mlp_roles(config), **expert_roles(config)}


def mixtral_roles(config: ModelConfig) -> Roles:
    """The same under Mixtral's names."""
    return {**outer_roles(config), **attention_roles(config), **expert_roles(config, MIXTRAL_NAMES)}

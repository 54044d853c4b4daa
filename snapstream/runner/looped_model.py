"""The weights of a decoder as the library of looped steps is handed them: structs of addresses and sizes.

Of a rank they are its share. Invariant: nothing is copied, so the decoder must outlive the structs.
``decode_looped.py`` makes an engine of them; ``kernels/cpu/looped/abi.h`` says what the fields mean.
"""

from __future__ import annotations

from snapstream.kernels.cpu.looped.library import Latent, Mixture, Model, Stack, address
from snapstream.layers.rope import Rope
from snapstream.models.decoder import Decoder
from snapstream.models.mlp import bias_of_sum
from snapstream.models.panel_weight import Panels

_STACKS = ("embed", "qkv", "o", "gate_up", "down")
_NORMS = ("input_norm", "post_norm", "final_norm", "q_norm", "k_norm")


def panels_of(decoder: Decoder, role: str) -> Panels:
    """A matrix role; ValueError for one in another form."""
    weights = decoder.weights
    found = weights.lm_head if role == "lm_head" else weights.matrices[role]
    if not isinstance(found, Panels):
        raise ValueError(f"executor 'looped' reads weights in panels, and {role} is {type(found).__name__}")
    return found


def model_of(decoder: Decoder) -> Model:
    """All of a decoder."""
    config, vectors, group = decoder.share, decoder.weights.vectors, decoder.group
    biases = {
        "qkv": vectors.get("qkv_bias"), "gate_up": vectors.get("gate_up_bias"),
        "o": bias_of_sum(vectors.get("o_bias"), group), "down": bias_of_sum(vectors.get("down_bias"), group),
    }  # fmt: skip
    rope = Rope(config.rope, config.rope_dim, "cpu")
    is_dynamic = config.rope.kind == "dynamic"
    model = Model(
        layers=config.num_layers, hidden=config.hidden_size, heads=config.num_heads, kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, inner=config.intermediate_size, vocab=config.vocab_size,
        head=panels_of(decoder, "lm_head").stack, frequencies=address(rope.frequencies), rope_scale=rope.scale,
        rotated=config.rope.rotary_dim(config.rope_dim), eps=config.rms_norm_eps,
        dynamic_original=config.rope.original_max_position if is_dynamic else 0,
        dynamic_factor=config.rope.factor, dynamic_theta=config.rope.theta,
        mixture=_mixture(decoder), latent=_latent(decoder),
        **{role: _stack(decoder, role) for role in _STACKS},
        **{name: address(vectors.get(name)) for name in _NORMS},
        **{f"{role}_bias": address(bias) for role, bias in biases.items()},
    )  # fmt: skip
    model.kept = rope
    return model


def _stack(decoder: Decoder, role: str) -> Stack:
    """Zeros for a role that the model does not have."""
    return panels_of(decoder, role).stack if role in decoder.weights.matrices else Stack()


def _mixture(decoder: Decoder) -> Mixture:
    moe, vectors = decoder.share.moe, decoder.weights.vectors
    if moe is None:
        return Mixture()
    return Mixture(
        gate_up=_stack(decoder, "experts_gate_up"), down=_stack(decoder, "experts_down"),
        shared_gate_up=_stack(decoder, "shared_gate_up"), shared_down=_stack(decoder, "shared_down"),
        router=address(vectors["router"]), correction=address(vectors.get("router_bias")), experts=moe.num_experts,
        top_k=moe.top_k, inner=moe.inner, shared_inner=moe.shared_inner, first_layer=moe.first_dense,
        groups=moe.num_groups, top_groups=moe.top_groups, best_of_group=2 if moe.group_score == "top2" else 1,
        is_sigmoid=moe.scoring == "sigmoid", normalises=moe.normalise, scale=moe.scale,
        first_held=moe.own.start, held=len(moe.own),
    )  # fmt: skip


def _latent(decoder: Decoder) -> Latent:
    latent, weights = decoder.share.latent, decoder.weights
    if latent is None:
        return Latent()
    return Latent(
        q_a=_stack(decoder, "q_a"), q=_stack(decoder, "q"), kv_a=_stack(decoder, "kv_a"),
        q_a_norm=address(weights.vectors.get("q_a_norm")), c_norm=address(weights.vectors["kv_a_norm"]),
        up=address(weights.matrices["kv_b"].dense()), q_rank=latent.q_rank or 0, rank=latent.kv_rank,
        nope_dim=latent.nope_dim, rope_dim=latent.rope_dim, value_dim=latent.value_dim,
        factor=latent.softmax_scale * latent.latent_dim**0.5,
    )  # fmt: skip

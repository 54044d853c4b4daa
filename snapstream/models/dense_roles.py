"""The weights of Llama and its kin by role: embeddings, grouped-query attention, a SwiGLU. No torch.

``expert_roles.py`` has those of layers with experts. Other attention lists its own roles and takes ``outer_roles`` and
``mlp_roles`` as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snapstream.config import ModelConfig
from snapstream.models.roles import Place, Role, Roles


def vector(size: int, name: str) -> Role:
    """A norm or a bias of each layer."""
    return Role(shape=(size,), parts={name: ()}, is_matrix=False)


def gate_up_parts(prefix: str, kind: str, inner: int) -> dict[str, tuple[Place, ...]]:
    """Gate and up projection of an MLP as one matrix."""
    return {f"{prefix}.gate_proj.{kind}": (slice(inner),), f"{prefix}.up_proj.{kind}": (slice(inner, None),)}


def outer_roles(config: ModelConfig) -> Roles:
    """What surrounds the layers, and the norms in them. A tied ``lm_head`` is ``embed`` itself."""
    hidden, table = config.hidden_size, (config.own_vocab, config.hidden_size)
    roles = {
        "embed": Role(shape=table, parts={"model.embed_tokens.weight": ()}, per_layer=False, shard_dim=0),
        "input_norm": vector(hidden, "input_layernorm.weight"),
        "post_norm": vector(hidden, "post_attention_layernorm.weight"),
        "final_norm": Role(shape=(hidden,), parts={"model.norm.weight": ()}, per_layer=False, is_matrix=False),
    }
    if not config.tie_word_embeddings:
        roles["lm_head"] = Role(shape=table, parts={"lm_head.weight": ()}, per_layer=False, shard_dim=0)
    return roles


def attention_roles(config: ModelConfig) -> Roles:
    """Grouped-query attention; heads rotated in part are stored so that the two halves of a head form the pairs."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    cuts = {"q": slice(queries), "k": slice(queries, queries + keys), "v": slice(queries + keys, None)}
    orders = head_orders(config)

    def qkv(kind: str) -> dict[str, tuple[Place, ...]]:
        return {f"self_attn.{name}_proj.{kind}": (cut,) for name, cut in cuts.items()}

    def ordered(kind: str) -> Mapping[str, Sequence[int]]:
        return {f"self_attn.{name}_proj.{kind}": order for name, order in orders.items()}

    size = queries + 2 * keys
    roles = {
        "qkv": Role(shape=(size, hidden), parts=qkv("weight"), row_order=ordered("weight"), shard_dim=0),
        "o": Role(shape=(hidden, queries), parts={"self_attn.o_proj.weight": ()}, shard_dim=1),
    }
    if config.qkv_bias:
        roles["qkv_bias"] = Role(
            shape=(size,), parts=qkv("bias"), is_matrix=False, row_order=ordered("bias"), shard_dim=0
        )
    if config.o_bias:
        roles["o_bias"] = vector(hidden, "self_attn.o_proj.bias")
    if config.qk_norm:
        for name in ("q", "k"):
            part = f"self_attn.{name}_norm.weight"
            order = {part: orders[name][:head_dim]} if orders else {}
            roles[f"{name}_norm"] = Role(shape=(head_dim,), parts={part: ()}, is_matrix=False, row_order=order)
    return roles


def mlp_roles(config: ModelConfig) -> Roles:
    """The SwiGLU of the layers that have one: all, or those before the first experts."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layers = None if config.moe is None else range(config.moe.layers(config.num_layers).start)
    if layers is not None and not layers:
        return {}
    roles = {
        "gate_up": Role(
            shape=(2 * inner, hidden), parts=gate_up_parts("mlp", "weight", inner), layers=layers, shard_dim=0
        ),
        "down": Role(shape=(hidden, inner), parts={"mlp.down_proj.weight": ()}, layers=layers, shard_dim=1),
    }
    if config.mlp_bias:
        parts = gate_up_parts("mlp", "bias", inner)
        roles["gate_up_bias"] = Role(shape=(2 * inner,), parts=parts, layers=layers, is_matrix=False, shard_dim=0)
        roles["down_bias"] = Role(shape=(hidden,), parts={"mlp.down_proj.bias": ()}, layers=layers, is_matrix=False)
    return roles


def dense_roles(config: ModelConfig) -> Roles:
    """Weights of a model whose every layer has one MLP."""
    return {**outer_roles(config), **attention_roles(config), **mlp_roles(config)}


def head_orders(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Order of the rows of the q and the k projection; empty where heads are rotated as a whole.

    The first r numbers of a head are rotated in pairs (i, i + r/2), the kernels turn pairs (i, i + E/2): so the first
    halves of the rotated pairs are stored at the head's begin, their second halves at its middle. Both q and k are
    stored so, and their products are sums over a head in any order.
    """
    head_dim, rotated = config.head_dim, config.rope.rotary_dim(config.head_dim)
    if rotated == head_dim:
        return {}
    half, middle = rotated // 2, (rotated + head_dim) // 2
    one = (*range(half), *range(rotated, middle), *range(half, rotated), *range(middle, head_dim))

    def heads(count: int) -> tuple[int, ...]:
        return tuple(head * head_dim + i for head in range(count) for i in one)

    return {"q": heads(config.num_heads), "k": heads(config.num_kv_heads)}

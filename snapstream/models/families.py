"""The families of models: how each one's config.json is read, its weights by role, and the class of its layers.

A family with other maths is a file of its own - a function that lists its roles, and a layer class - and a row of
``FAMILIES``. ``registry.py`` reads the configs. No torch: layer classes are imported when a decoder is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from snapstream.cache.spec import KVSpec
from snapstream.config import DType, KVDType, ModelConfig
from snapstream.config.registry import Registry
from snapstream.models.roles import Role, Roles

GetSpec = Callable[[ModelConfig, DType, KVDType], KVSpec]
Settings = Mapping[str, Any]  # a parsed config.json


def _nothing_more(settings: Settings) -> Settings:
    """A family whose config has no fields beyond ``ModelConfig``'s."""
    return {}


def dense_roles(config: ModelConfig) -> Roles:
    """Weights of Llama and its kin: grouped-query attention and a SwiGLU. A tied ``lm_head`` is ``embed`` itself."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    cuts = {"q": slice(queries), "k": slice(queries, queries + keys), "v": slice(queries + keys, None)}
    halves = {"gate": slice(inner), "up": slice(inner, None)}

    def qkv(kind: str) -> dict[str, tuple[slice]]:
        return {f"self_attn.{name}_proj.{kind}": (cut,) for name, cut in cuts.items()}

    def gate_up(kind: str) -> dict[str, tuple[slice]]:
        return {f"mlp.{name}_proj.{kind}": (half,) for name, half in halves.items()}

    def vector(size: int, name: str) -> Role:
        return Role(shape=(size,), parts={name: ()}, is_matrix=False)

    roles = {
        "embed": Role(
            shape=(config.vocab_size, hidden), parts={"model.embed_tokens.weight": ()}, per_layer=False, shard_dim=0
        ),
        "input_norm": vector(hidden, "input_layernorm.weight"),
        "qkv": Role(shape=(queries + 2 * keys, hidden), parts=qkv("weight"), shard_dim=0),
        "o": Role(shape=(hidden, queries), parts={"self_attn.o_proj.weight": ()}, shard_dim=1),
        "post_norm": vector(hidden, "post_attention_layernorm.weight"),
        "gate_up": Role(shape=(2 * inner, hidden), parts=gate_up("weight"), shard_dim=0),
        "down": Role(shape=(hidden, inner), parts={"mlp.down_proj.weight": ()}, shard_dim=1),
        "final_norm": Role(shape=(hidden,), parts={"model.norm.weight": ()}, per_layer=False, is_matrix=False),
    }
    if config.qkv_bias:
        roles["qkv_bias"] = Role(shape=(queries + 2 * keys,), parts=qkv("bias"), is_matrix=False, shard_dim=0)
    if config.o_bias:
        roles["o_bias"] = vector(hidden, "self_attn.o_proj.bias")
    if config.mlp_bias:
        roles["gate_up_bias"] = Role(shape=(2 * inner,), parts=gate_up("bias"), is_matrix=False, shard_dim=0)
        roles["down_bias"] = vector(hidden, "mlp.down_proj.bias")
    if config.qk_norm:
        roles["q_norm"] = vector(head_dim, "self_attn.q_norm.weight")
        roles["k_norm"] = vector(head_dim, "self_attn.k_norm.weight")
    if not config.tie_word_embeddings:
        roles["lm_head"] = Role(
            shape=(config.vocab_size, hidden), parts={"lm_head.weight": ()}, per_layer=False, shard_dim=0
        )
    return roles


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family computes, and what config.json leaves to the architecture's own code in transformers."""

    qkv_bias: bool = False  # always there, whatever attention_bias says
    reads_attention_bias: bool = False  # attention_bias adds one to q, k, v and o
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # where the config has none; None means hidden_size / heads
    sliding_window: int | None = None  # where the config has no such key
    has_window_switch: bool = False  # use_sliding_window, off where the config has no such key
    config_class: type[ModelConfig] = ModelConfig  # a subclass, where the family's maths needs more numbers
    read_more: Callable[[Settings], Settings] = _nothing_more  # its further fields
    roles: Callable[[Any], Roles] = dense_roles  # of a config of that class
    layer: str | type[Any] = "snapstream.models.dense:DenseLayer"  # a models.decoder.Layer, or "module:class" of one
    kv_spec: GetSpec = KVSpec.of


FAMILIES: Registry[Family] = Registry(
    "architecture",
    {
        "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
        "MistralForCausalLM": Family(sliding_window=4096),
        "Qwen2ForCausalLM": Family(qkv_bias=True, sliding_window=4096, has_window_switch=True),
        "Qwen3ForCausalLM": Family(
            reads_attention_bias=True, qk_norm=True, head_dim=128, sliding_window=4096, has_window_switch=True
        ),
    },
)


def kv_spec_of(config: ModelConfig, dtype: DType, kv_dtype: KVDType = "auto") -> KVSpec:
    """What a layer of a model keeps per token."""
    return FAMILIES.get(config.architecture).kv_spec(config, dtype, kv_dtype)


def roles_of(config: ModelConfig) -> Roles:
    """Every stored tensor of a model by role."""
    return FAMILIES.get(config.architecture).roles(config)

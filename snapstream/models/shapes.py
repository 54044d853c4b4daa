"""Shapes of a decoder's stacked weights, how many numbers they are, and their bytes. Integer arithmetic only, no torch.

One entry per role, ``[L, out, in]`` where the role repeats in every layer. ``weights.py`` allocates these
shapes, ``loader.py`` fills them, and ``snapstream plan`` counts their bytes from a config.json alone.
"""

from __future__ import annotations

from math import prod

from snapstream.config import DTYPE_BYTES, ModelConfig


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every stored tensor by role. A tied ``lm_head`` is ``embed`` itself, so it is not listed."""
    layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
    query_rows = config.num_heads * config.head_dim
    qkv_rows = query_rows + 2 * config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, hidden),
        "input_norm": (layers, hidden),
        "qkv": (layers, qkv_rows, hidden),
        "o": (layers, hidden, query_rows),
        "post_norm": (layers, hidden),
        "gate_up": (layers, 2 * inner, hidden),
        "down": (layers, hidden, inner),
        "final_norm": (hidden,),
    }
    if config.qkv_bias:
        shapes["qkv_bias"] = (layers, qkv_rows)
    if config.o_bias:
        shapes["o_bias"] = (layers, hidden)
    if config.mlp_bias:
        shapes["gate_up_bias"] = (layers, 2 * inner)
        shapes["down_bias"] = (layers, hidden)
    if config.qk_norm:
        shapes["q_norm"] = (layers, config.head_dim)
        shapes["k_norm"] = (layers, config.head_dim)
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


def layer_parameters(config: ModelConfig) -> int:
    """How many numbers the matrices of one layer hold."""
    shapes = weight_shapes(config)
    return sum(prod(shapes[role][1:]) for role in ("qkv", "o", "gate_up", "down"))


def num_parameters(config: ModelConfig) -> int:
    """How many numbers a checkpoint of this config holds; a tied embedding counts once."""
    return sum(prod(shape) for shape in weight_shapes(config).values())


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the stored weights: the one place that multiplies parameters by a size."""
    return num_parameters(config) * DTYPE_BYTES[dtype]


def decode_weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the weights that a decode step must read: all but an untied embedding table (a line per row)."""
    lookup = 0 if config.tie_word_embeddings else prod(weight_shapes(config)["embed"])
    return weight_bytes(config, dtype) - lookup * DTYPE_BYTES[dtype]

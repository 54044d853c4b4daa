"""How many numbers a model holds and what they weigh, from its config alone. Integer arithmetic only, no torch.

The roles and their shapes are those of the model's family (``families.py``).
"""

from __future__ import annotations

from math import prod

from snapstream.config import DTYPE_BYTES, ModelConfig
from snapstream.models.families import roles_of
from snapstream.models.roles import stacked_shape


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every stored tensor by role. A tied ``lm_head`` is ``embed`` itself, so it is not listed."""
    return {name: stacked_shape(role, config.num_layers) for name, role in roles_of(config).items()}


def layer_parameters(config: ModelConfig) -> int:
    """How many numbers the matrices of one layer hold."""
    return sum(prod(role.shape) for role in roles_of(config).values() if role.per_layer and role.is_matrix)


def num_parameters(config: ModelConfig) -> int:
    """How many numbers a checkpoint of this config holds; a tied embedding counts once."""
    return sum(prod(shape) for shape in weight_shapes(config).values())


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all weights in memory."""
    return num_parameters(config) * DTYPE_BYTES[dtype]


def decode_weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the weights that a decode step must read: all but an untied embedding table (a line per row)."""
    lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (num_parameters(config) - lookup) * DTYPE_BYTES[dtype]

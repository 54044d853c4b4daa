"""How many numbers a model holds and what they weigh, from its config alone. Integer arithmetic only, no torch.

The roles and their shapes are those of the model's family (``families.py``), their forms ``WeightForms``
(``config/weights.py``); ``forms`` None means that every matrix lies in the dtype of the computation.
"""

from __future__ import annotations

from math import prod

from snapstream.config import DTYPE_BYTES, ModelConfig, WeightForm, WeightForms
from snapstream.models.families import roles_of
from snapstream.models.roles import Role, stacked_shape

_BLOCK_NUMBERS = {"cpu": 2**19}  # of a matrix that are wide at a time: 2 MiB of fp32 stay in a cache
_MOST_BLOCK_NUMBERS = 2**24  # elsewhere: few calls
# Of a block's number, at most: codes one to a byte, in fp32, in the dtype of the computation.
_BLOCK_BYTES = 10


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every stored tensor by role. A tied ``lm_head`` is ``embed`` itself, so it is not listed."""
    return {name: stacked_shape(role, config.num_layers) for name, role in roles_of(config).items()}


def layer_parameters(config: ModelConfig) -> int:
    """With how many numbers of a layer's matrices a token is multiplied, on average over the layers.

    Of the experts that is top_k; those of models without experts are all that the layer holds.
    """
    roles = [role for role in roles_of(config).values() if role.per_layer and role.is_matrix]
    total = sum(_share(config, role, 1) * prod(stacked_shape(role, config.num_layers)) for role in roles)
    return int(total) // config.num_layers


def active_parameters(config: ModelConfig) -> int:
    """With how many numbers a token is multiplied, the output embedding among them; of the experts top_k count."""
    matrices = ((name, role) for name, role in roles_of(config).items() if role.is_matrix)
    head = "embed" if config.tie_word_embeddings else "lm_head"
    used = [role for name, role in matrices if role.per_layer or name == head]
    return round(sum(_share(config, role, 1) * prod(stacked_shape(role, config.num_layers)) for role in used))


def num_parameters(config: ModelConfig) -> int:
    """How many numbers a checkpoint of this config holds; a tied embedding counts once."""
    return sum(prod(shape) for shape in weight_shapes(config).values())


def form_of(role: Role, dtype: str, forms: WeightForms | None = None) -> WeightForm:
    """The form of a role's storage."""
    plain = WeightForms.of(role.dtype or dtype).layers
    if forms is None or not role.is_matrix or role.is_wide:
        return plain
    if role.is_attention and forms.attention is not None:
        return forms.attention
    return forms.layers if role.per_layer else forms.tables


def is_widened(role: Role, dtype: str, forms: WeightForms | None = None) -> bool:
    """Whether prefill widens a layer's matrix into the buffer that all layers share. Stacks of experts are too large
    for one.
    """
    is_narrow = form_of(role, dtype, forms).width != dtype
    return role.per_layer and role.is_matrix and len(role.shape) == 2 and is_narrow


def check_groups(config: ModelConfig, forms: WeightForms) -> None:
    """ValueError where a row of a matrix is not whole groups."""
    for name, role in roles_of(config).items():
        form = form_of(role, "float32", forms)
        if form.is_codes and not form.is_blocks and role.shape[-1] % form.group:
            raise ValueError(
                f"weights are {form.describe()}; the rows of {name} have {role.shape[-1]} numbers, which must be a "
                f"multiple of {form.group}"
            )


def weight_bytes(config: ModelConfig, dtype: str, forms: WeightForms | None = None) -> int:
    """Bytes of all weights in memory, scales included."""
    return sum(role_bytes(config, dtype, forms).values())


def role_bytes(config: ModelConfig, dtype: str, forms: WeightForms | None = None) -> dict[str, int]:
    """Bytes of every role, scales included."""
    return {name: _role_bytes(config, role, dtype, forms) for name, role in roles_of(config).items()}


def decode_weight_bytes(config: ModelConfig, dtype: str, forms: WeightForms | None = None, num_tokens: int = 1) -> int:
    """Bytes of the weights that a decode step of ``num_tokens`` rows must read.

    All but an untied embedding table (a line per row) and the experts that no row chose: of X experts, k per token,
    B tokens read X (1 - (1 - k / X)^B) on average if they choose evenly and apart. Real routers choose unevenly and
    read fewer.
    """
    roles = {name: role for name, role in roles_of(config).items() if name != "embed" or config.tie_word_embeddings}
    return sum(_read_bytes(config, role, dtype, forms, num_tokens) for role in roles.values())


def layers_read_bytes(config: ModelConfig, dtype: str, forms: WeightForms | None, num_tokens: int) -> int:
    """As ``decode_weight_bytes``, of the layers alone: what a chunk of a prompt reads on its way through them."""
    layers = (role for role in roles_of(config).values() if role.per_layer)
    return sum(_read_bytes(config, role, dtype, forms, num_tokens) for role in layers)


def wide_bytes(config: ModelConfig, dtype: str, forms: WeightForms | None = None) -> int:
    """Bytes of the buffer in which prefill holds one layer of narrow weights, widened."""
    wide = (role for role in roles_of(config).values() if is_widened(role, dtype, forms))
    return sum(prod(role.shape) for role in wide) * DTYPE_BYTES[dtype]


def widened_block(device_type: str) -> int:
    """Numbers of a narrow matrix that are widened at a time."""
    return _BLOCK_NUMBERS.get(device_type, _MOST_BLOCK_NUMBERS)


def widening_bytes(config: ModelConfig, dtype: str, forms: WeightForms | None, device_type: str) -> int:
    """Bytes of the temporaries of widening: of one block of rows."""
    shapes = [
        role.shape
        for role in roles_of(config).values()
        if role.is_matrix and form_of(role, dtype, forms).width != dtype
    ]
    return max((min(prod(shape), widened_block(device_type)) for shape in shapes), default=0) * _BLOCK_BYTES


def _share(config: ModelConfig, role: Role, num_tokens: int) -> float:
    """How much of a role so many tokens are multiplied with."""
    if not role.per_expert or config.moe is None:
        return 1.0
    return config.moe.num_read(num_tokens) / config.moe.num_experts


def _read_bytes(config: ModelConfig, role: Role, dtype: str, forms: WeightForms | None, num_tokens: int) -> int:
    return round(_share(config, role, num_tokens) * _role_bytes(config, role, dtype, forms))


def _role_bytes(config: ModelConfig, role: Role, dtype: str, forms: WeightForms | None) -> int:
    return form_of(role, dtype, forms).num_bytes(stacked_shape(role, config.num_layers))

"""The stored tensors of a model by role: the shape of each and the checkpoint tensors that fill it. No torch.

A role is one stacked tensor: ``qkv`` of all layers is ``[L, (H+2G)E, D]``, ``experts_down`` of the layers that have
experts ``[L', X, D, M]``. From this one list follow the storage (``weights.py``), the reading of a checkpoint
(``loader.py``) and the bytes that ``plan`` prints (``shapes.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from snapstream.config import DType

Place = int | slice  # of a checkpoint tensor along the leading dimensions of a role


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One stored tensor of a model; of one layer where ``per_layer``."""

    shape: tuple[int, ...]  # of one layer: [out, in], [experts, out, in], [D] ...
    # Names in the checkpoint, after the prefix of the layer, and which part each fills; () is all of it.
    parts: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    per_layer: bool = True
    layers: range | None = None  # those that have it, one after the other; None: all
    is_matrix: bool = True  # stored as a Weight, which may be narrower; the others are plain tensors
    dtype: DType | None = None  # of a plain tensor; None: the model's
    per_expert: bool = False  # the first dimension counts experts, of which a token reads top_k
    # Where rows are stored in another order than the checkpoint's: by name, the checkpoint's row of each stored one.
    row_order: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # Of one layer: which dimension several devices split, each of the parts on its own; None: each holds all of it.
    shard_dim: int | None = None
    is_wide: bool = False  # a matrix that lies in the dtype of the computation whatever the forms of the others

    def layers_of(self, num_layers: int) -> range:
        """The layers of a model of ``num_layers`` that have it."""
        return range(num_layers) if self.layers is None else self.layers

    @property
    def is_attention(self) -> bool:
        """Whether it is a part of a layer's attention, as every checkpoint names it."""
        return self.per_layer and any(name.startswith("self_attn.") for name in self.parts)

    @property
    def is_quantized(self) -> bool:
        """Whether a quantized checkpoint has it as codes: the matrices of the layers."""
        return self.per_layer and self.is_matrix


Roles = Mapping[str, Role]


class Part(NamedTuple):
    """A checkpoint tensor and where it goes."""

    name: str  # in the checkpoint
    role: str
    place: tuple[Place, ...]  # in the storage of the role
    row_order: Sequence[int] | None  # the tensor's row of each stored one; None: as they are


def stacked_shape(role: Role, num_layers: int) -> tuple[int, ...]:
    """Shape of the storage."""
    return (len(role.layers_of(num_layers)), *role.shape) if role.per_layer else role.shape


def checkpoint_parts(roles: Roles, num_layers: int) -> Iterator[Part]:
    """Every checkpoint tensor of a model."""
    for name, role in roles.items():
        for part, place in role.parts.items():
            order = role.row_order.get(part)
            if not role.per_layer:
                yield Part(part, name, place, order)
                continue
            for at, layer in enumerate(role.layers_of(num_layers)):
                yield Part(f"model.layers.{layer}.{part}", name, (at, *place), order)

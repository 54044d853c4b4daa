"""Which slice of every checkpoint tensor a rank reads, and where it goes. No torch.

A rank's part of a model is a model of its own (``shards.py``), and a tensor is cut along the ``shard_dim`` of its role
where the two differ in its shape. ``qkv`` and ``gate_up`` are stacks of checkpoint tensors, each cut on its own, so a
rank's stack is again q | k | v and gate | up. The order of stored rows (``Role.row_order``) is that of the rank's own
rows, head by head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from snapstream.config import ModelConfig, ParallelConfig, WeightForm
from snapstream.config.weights import FP8_BLOCK
from snapstream.models.families import roles_of
from snapstream.models.roles import Part, Role, Roles, checkpoint_parts
from snapstream.models.shards import part_shape, rank_config, slice_of

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A model, and the part of it that is one rank's."""

    whole: ModelConfig
    own: ModelConfig  # what the rank stores and computes
    rank: int = 0
    num_ranks: int = 1

    @classmethod
    def of(cls, model: ModelConfig, parallel: ParallelConfig, rank: int) -> Share:
        """The share of ``rank``. ValueError, with value and limit, for what cannot be split."""
        if not 0 <= rank < parallel.size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {parallel.size - 1}")
        return cls(whole=model, own=rank_config(model, parallel, rank), rank=rank, num_ranks=parallel.size)


class Cut(NamedTuple):
    """One checkpoint tensor as a rank sees it."""

    part: Part  # its place in the rank's storage
    whole: Shape  # of the tensor in the checkpoint
    own: Shape  # of what the rank stores, which is more than it reads where a vocabulary does not come out even
    slices: tuple[slice, ...]  # of the tensor

    @property
    def num_missing(self) -> int:
        """Rows of the storage that the checkpoint does not have."""
        return self.own[0] - (self.slices[0].stop - self.slices[0].start)

    def scaled(self, units: tuple[int, ...]) -> tuple[slice, ...]:
        """The same part of a tensor that has one entry for every ``units`` numbers along each dimension."""
        return tuple(slice(c.start // unit, -(-c.stop // unit)) for c, unit in zip(self.slices, units, strict=True))


def cuts_of(share: Share) -> dict[str, Cut]:
    """By checkpoint name, what the rank reads. ValueError for a tensor that cannot be cut so."""
    whole_roles, own_roles = roles_of(share.whole), roles_of(share.own)
    wholes, found = needed_shapes(whole_roles, share.whole.num_layers), dict[str, Cut]()
    owns = needed_shapes(own_roles, share.own.num_layers)
    stored = share.whole.stored
    for part in checkpoint_parts(own_roles, share.own.num_layers):
        whole, own = wholes[part.name], owns[part.name]
        cut = Cut(part, whole, own, slice_of(whole, own, share.rank, share.num_ranks))
        role = own_roles[part.role]
        if whole != own:
            _check_dim(cut, role, share.num_ranks)
            codes = stored.codes_of(is_attention=role.is_attention)
            if codes is not None and role.is_quantized:
                _check_codes(cut, codes)
        found[part.name] = cut
    return found


def needed_shapes(roles: Roles, num_layers: int) -> dict[str, Shape]:
    """Shape of every checkpoint tensor that a model needs."""
    found = {}
    for role in roles.values():
        for name in role.parts:
            shape = part_shape(role, name)
            if not role.per_layer:
                found[name] = shape
                continue
            for layer in role.layers_of(num_layers):
                found[f"model.layers.{layer}.{name}"] = shape
    return found


def _check_dim(cut: Cut, role: Role, num_ranks: int) -> None:
    """A role says along which dimension it may be cut."""
    skipped = len(role.shape) - len(cut.whole)  # dimensions of the role that the tensor lacks, as that of experts
    for dim, (whole, own) in enumerate(zip(cut.whole, cut.own, strict=True)):
        if whole != own and dim + skipped != role.shard_dim:
            raise ValueError(f"{cut.part.name} {list(cut.whole)} cannot be split over {num_ranks} ranks along {dim}")


def _check_codes(cut: Cut, codes: WeightForm) -> None:
    """Numbers that share a scale stay together."""
    units = (FP8_BLOCK, FP8_BLOCK) if codes.is_blocks else (1, codes.group)
    for dim, (piece, size, unit) in enumerate(zip(cut.slices, cut.whole, units, strict=True)):
        if piece.start % unit or (piece.stop % unit and piece.stop != size):
            what = "rows" if dim == 0 else "columns"
            raise ValueError(
                f"{cut.part.name} is {codes.describe()}, and a rank's share of its {size} {what} is {piece.start} to "
                f"{piece.stop}; it must be a multiple of {unit}"
            )

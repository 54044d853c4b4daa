"""What one of several ranks stores of a model: its own ``ModelConfig``, and which slice of each checkpoint tensor.

``rank_config`` is the whole rule. It gives the model as one rank sees it - its heads, its part of the MLPs, its
experts, its lines of the vocabulary's tables - and from this config everything follows that follows from any: roles and
their shapes (``families.py``), bytes (``shapes.py``), what is cached, what ``plan`` counts. ``slice_of`` compares the
two configs' shapes of a tensor. Invariant: the slices of all ranks together are the tensor, each number once, but for
kv heads fewer than ranks, which several ranks hold. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from snapstream.config import DTYPE_BYTES, ModelConfig, WeightFormat, WeightFormats
from snapstream.config.engine import ParallelConfig
from snapstream.config.model import FP8_BLOCK, MoEConfig
from snapstream.models.registry import tensor_specs
from snapstream.models.tensors import Part, TensorSpec, TensorSpecs, checkpoint_parts, stacked_shape

# How many numbers a model holds and what they weigh, from its config alone. Integer arithmetic only, no torch.
#
# The roles and their shapes are those of the model's family (``families.py``), their forms ``WeightFormats``
# (``config/model.py``); ``forms`` None means that every matrix lies in the dtype of the computation.

_BLOCK_NUMBERS = {"cpu": 2**19}  # of a matrix that are wide at a time: 2 MiB of fp32 stay in a cache
_MOST_BLOCK_NUMBERS = 2**24  # elsewhere: few calls
# Of a block's number, at most: codes one to a byte, in fp32, in the dtype of the computation.
_BLOCK_BYTES = 10


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every stored tensor by role. A tied ``lm_head`` is ``embed`` itself, so it is not listed."""
    return {name: stacked_shape(role, config.num_layers) for name, role in tensor_specs(config).items()}


def layer_parameters(config: ModelConfig) -> int:
    """With how many numbers of a layer's matrices a token is multiplied, on average over the layers.

    Of the experts that is top_k; those of models without experts are all that the layer holds.
    """
    roles = [role for role in tensor_specs(config).values() if role.per_layer and role.is_matrix]
    total = sum(_share(config, role, 1) * prod(stacked_shape(role, config.num_layers)) for role in roles)
    return int(total) // config.num_layers


def active_parameters(config: ModelConfig) -> int:
    """With how many numbers a token is multiplied, the output embedding among them; of the experts top_k count."""
    matrices = ((name, role) for name, role in tensor_specs(config).items() if role.is_matrix)
    head = "embed" if config.tie_word_embeddings else "lm_head"
    used = [role for name, role in matrices if role.per_layer or name == head]
    return round(sum(_share(config, role, 1) * prod(stacked_shape(role, config.num_layers)) for role in used))


def num_parameters(config: ModelConfig) -> int:
    """How many numbers a checkpoint of this config holds; a tied embedding counts once."""
    return sum(prod(shape) for shape in weight_shapes(config).values())


def format_of(role: TensorSpec, dtype: str, formats: WeightFormats | None = None) -> WeightFormat:
    """The form of a role's storage."""
    plain = WeightFormats.of(role.dtype or dtype).layers
    if formats is None or not role.is_matrix or role.is_wide or role.is_float:
        return plain
    if role.is_attention and formats.attention is not None:
        return formats.attention
    return formats.layers if role.per_layer else formats.tables


def is_dequantized(role: TensorSpec, dtype: str, formats: WeightFormats | None = None) -> bool:
    """Whether prefill widens a layer's matrix into the buffer that all layers share. Stacks of experts are too large
    for one.
    """
    is_narrow = format_of(role, dtype, formats).dtype != dtype
    return role.per_layer and role.is_matrix and len(role.shape) == 2 and is_narrow


def check_groups(config: ModelConfig, formats: WeightFormats) -> None:
    """ValueError where a row of a matrix is not whole groups."""
    for name, role in tensor_specs(config).items():
        form = format_of(role, "float32", formats)
        if form.is_quantized and not form.is_fp8 and role.shape[-1] % form.group:
            raise ValueError(
                f"weights are {form.describe()}; the rows of {name} have {role.shape[-1]} numbers, which must be a "
                f"multiple of {form.group}"
            )


def weight_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None = None) -> int:
    """Bytes of all weights in memory, scales included."""
    return sum(tensor_bytes(config, dtype, formats).values())


def tensor_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None = None) -> dict[str, int]:
    """Bytes of every role, scales included."""
    return {name: _role_bytes(config, role, dtype, formats) for name, role in tensor_specs(config).items()}


def decode_weight_bytes(
    config: ModelConfig, dtype: str, formats: WeightFormats | None = None, num_tokens: int = 1
) -> int:
    """Bytes of the weights that a decode step of ``num_tokens`` rows must read.

    All but an untied embedding table (a line per row) and the experts that no row chose: of X experts, k per token,
    B tokens read X (1 - (1 - k / X)^B) on average if they choose evenly and apart. Real routers choose unevenly and
    read fewer.
    """
    roles = {name: role for name, role in tensor_specs(config).items() if name != "embed" or config.tie_word_embeddings}
    return sum(_read_bytes(config, role, dtype, formats, num_tokens) for role in roles.values())


def layers_read_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None, num_tokens: int) -> int:
    """As ``decode_weight_bytes``, of the layers alone: what a chunk of a prompt reads on its way through them."""
    layers = (role for role in tensor_specs(config).values() if role.per_layer)
    return sum(_read_bytes(config, role, dtype, formats, num_tokens) for role in layers)


def dequantized_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None = None) -> int:
    """Bytes of the buffer in which prefill holds one layer of narrow weights, widened."""
    wide = (role for role in tensor_specs(config).values() if is_dequantized(role, dtype, formats))
    return sum(prod(role.shape) for role in wide) * DTYPE_BYTES[dtype]


def dequantized_block(device_type: str) -> int:
    """Numbers of a narrow matrix that are widened at a time."""
    return _BLOCK_NUMBERS.get(device_type, _MOST_BLOCK_NUMBERS)


def dequantizing_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None, device_type: str) -> int:
    """Bytes of the temporaries of widening: of one block of rows."""
    shapes = [
        role.shape
        for role in tensor_specs(config).values()
        if role.is_matrix and format_of(role, dtype, formats).dtype != dtype
    ]
    return max((min(prod(shape), dequantized_block(device_type)) for shape in shapes), default=0) * _BLOCK_BYTES


def _share(config: ModelConfig, role: TensorSpec, num_tokens: int) -> float:
    """How much of a role so many tokens are multiplied with."""
    if not role.per_expert or config.moe is None:
        return 1.0
    return config.moe.num_read(num_tokens) / config.moe.num_experts


def _read_bytes(
    config: ModelConfig, role: TensorSpec, dtype: str, formats: WeightFormats | None, num_tokens: int
) -> int:
    return round(_share(config, role, num_tokens) * _role_bytes(config, role, dtype, formats))


def _role_bytes(config: ModelConfig, role: TensorSpec, dtype: str, formats: WeightFormats | None) -> int:
    return format_of(role, dtype, formats).num_bytes(stacked_shape(role, config.num_layers))


def rank_config(
    model: ModelConfig, parallel: ParallelConfig, rank: int = 0, formats: WeightFormats | None = None
) -> ModelConfig:
    """The model as rank ``rank`` stores it, its matrices in ``formats``; the model itself where there is one rank.

    ``hidden_size``, ``vocab_size`` and the router's number of experts stay whole. Inner sizes are cut by whole
    quantization groups and padded with zeros, so that all ranks have the same shapes. ValueError where heads or experts
    cannot be split evenly.
    """
    size = parallel.size
    if size == 1:
        return model
    if model.vocab_size <= (size - 1) * -(-model.vocab_size // size):
        raise ValueError(f"a vocabulary of {model.vocab_size} leaves some of {size} ranks without a line")
    if parallel.attention == "dp" and model.latent is None:
        raise ValueError(
            "attention is 'dp', which deals out rows of latents; this model keeps keys and values per head"
        )
    num_heads, num_kv_heads = (
        (model.num_heads, model.num_kv_heads) if parallel.attention == "dp" else _own_heads(model, size)
    )
    unit = 1 if formats is None else _unit(formats.layers, is_row=True)
    moe = None if model.moe is None else _own_experts(model.moe, parallel, rank, unit)
    inner = model.intermediate_size
    if moe is None or moe.layers(model.num_layers).start > 0:
        inner = _padded_share(inner, size, unit)
    own = replace(
        model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        moe=moe,
        intermediate_size=inner,
        table_lines=-(-model.vocab_size // size),
    )
    return own if formats is None else replace(own, float_tensors=_cut_roles(model, own, formats))


def _own_heads(model: ModelConfig, size: int) -> tuple[int, int]:
    """Query heads are split; kv heads too, or where they are fewer than ranks each is held by several."""
    kv_heads = model.num_kv_heads
    if max(kv_heads, size) % min(kv_heads, size):
        raise ValueError(f"{kv_heads} kv heads cannot be split over {size} ranks")
    return _rank_share("num_heads", model.num_heads, size), max(kv_heads // size, 1)


def _own_experts(moe: MoEConfig, parallel: ParallelConfig, rank: int, unit: int) -> MoEConfig:
    """A part of every expert, or whole experts; of the shared ones a part in either case."""
    size = parallel.size
    if parallel.experts == "tp":
        return replace(moe, inner=_padded_share(moe.inner, size, unit))
    own = _rank_share("num_experts", moe.num_experts, size)
    return replace(
        moe, held=range(rank * own, (rank + 1) * own), own_shared=_padded_share(moe.shared_inner, size, unit)
    )


def _rank_share(name: str, whole: int, size: int) -> int:
    if whole % size:
        raise ValueError(f"{name} is {whole}; it cannot be split over {size} ranks")
    return whole // size


def _padded_share(whole: int, size: int, unit: int) -> int:
    """The largest shard, in multiples of ``unit``."""
    return -(-whole // (size * unit)) * unit


def _unit(form: WeightFormat, *, is_row: bool) -> int:
    """In multiples of what a matrix can be cut along a row, or between rows."""
    if form.is_fp8:
        return FP8_BLOCK
    return form.group if form.is_quantized and is_row else 1


def _cut_roles(whole: ModelConfig, own: ModelConfig, formats: WeightFormats) -> tuple[str, ...]:
    """Roles of which a rank's shard cuts through numbers that share a scale: heads are not padded."""
    of_whole, found = tensor_specs(whole), []
    for name, role in tensor_specs(own).items():
        form = format_of(role, "float32", formats)
        shapes = [(part_shape(of_whole[name], part), part_shape(role, part)) for part in role.parts]
        if form.is_quantized and any(
            total != size and size % _unit(form, is_row=dim == len(cut) - 1)
            for uncut, cut in shapes
            for dim, (total, size) in enumerate(zip(uncut, cut, strict=True))
        ):
            found.append(name)
    return tuple(found)


def part_shape(role: TensorSpec, part: str) -> tuple[int, ...]:
    """Shape of the checkpoint tensor that fills ``part`` of a role."""
    place = role.parts[part]
    sizes = [size if dim >= len(place) else place[dim] for dim, size in enumerate(role.shape)]
    return tuple(
        len(range(*size.indices(role.shape[dim]))) if isinstance(size, slice) else size
        for dim, size in enumerate(sizes)
        if dim >= len(place) or isinstance(size, slice)
    )


def slice_of(
    whole: tuple[int, ...], own: tuple[int, ...], rank: int, num_ranks: int, *, is_padded: bool = False
) -> tuple[slice, ...]:
    """Which numbers of a checkpoint tensor of shape ``whole`` fill a rank's tensor of shape ``own``.

    Along a dimension in which they differ the rank takes one of ``whole / own`` shards. Where these are fewer than
    ranks (kv heads), neighbors take the same; of a padded tensor the last ranks take fewer numbers, or none.
    """
    cuts = []
    for total, size in zip(whole, own, strict=True):
        shards = num_ranks if is_padded and total != size else -(-total // size)
        start = min(rank * shards // num_ranks * size, total)
        cuts.append(slice(start, min(start + size, total)))
    return tuple(cuts)


# Which slice of every checkpoint tensor a rank reads, and where it goes. ``qkv`` and ``gate_up`` are stacks of tensors,
# each cut on its own, so a rank's stack is again q | k | v and gate | up. ``TensorSpec.row_order`` is that of the
# rank's own rows, head by head.

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A model, and the part of it that is one rank's."""

    whole: ModelConfig
    own: ModelConfig  # what the rank stores and computes
    rank: int = 0
    num_ranks: int = 1

    @classmethod
    def of(cls, model: ModelConfig, parallel: ParallelConfig, rank: int, formats: WeightFormats | None = None) -> Share:
        """The share of ``rank``, see ``rank_config``. ValueError, with value and limit, for what cannot be split."""
        if not 0 <= rank < parallel.size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {parallel.size - 1}")
        return cls(whole=model, own=rank_config(model, parallel, rank, formats), rank=rank, num_ranks=parallel.size)


class Cut(NamedTuple):
    """One checkpoint tensor as a rank sees it."""

    part: Part  # its place in the rank's storage
    whole: Shape  # of the tensor in the checkpoint
    own: Shape  # of what the rank stores, which is more than it reads where the shards are padded
    slices: tuple[slice, ...]  # of the tensor

    @property
    def missing(self) -> tuple[int, ...]:
        """Along each dimension, by how much the storage is longer than what the checkpoint has for it."""
        return tuple(size - (c.stop - c.start) for size, c in zip(self.own, self.slices, strict=True))

    def scaled(self, units: tuple[int, ...]) -> tuple[slice, ...]:
        """The same part of a tensor that has one entry for every ``units`` numbers along each dimension."""
        return tuple(slice(c.start // unit, -(-c.stop // unit)) for c, unit in zip(self.slices, units, strict=True))

    def widened(self, units: tuple[int, ...]) -> Cut:
        """The least part around this one that is whole ``units`` along each dimension."""
        outer = tuple(
            slice(scaled.start * unit, min(scaled.stop * unit, size))
            for scaled, unit, size in zip(self.scaled(units), units, self.whole, strict=True)
        )
        return self._replace(slices=outer)

    def within(self, outer: Cut) -> tuple[slice, ...]:
        """The slices of this part in the numbers of a larger one."""
        return tuple(slice(c.start - o.start, c.stop - o.start) for c, o in zip(self.slices, outer.slices, strict=True))


def cuts_of(share: Share) -> dict[str, Cut]:
    """By checkpoint name, what the rank reads. ValueError for a tensor that cannot be cut so."""
    whole_roles, own_roles = tensor_specs(share.whole), tensor_specs(share.own)
    wholes, found = needed_shapes(whole_roles, share.whole.num_layers), dict[str, Cut]()
    owns = needed_shapes(own_roles, share.own.num_layers)
    for part in checkpoint_parts(own_roles, share.own.num_layers):
        whole, own = wholes[part.name], owns[part.name]
        role = own_roles[part.role]
        slices = slice_of(whole, own, share.rank, share.num_ranks, is_padded=role.is_padded)
        cut = Cut(part, whole, own, slices)
        if whole != own:
            _check_dim(cut, role, share.num_ranks)
        found[part.name] = cut
    return found


def needed_shapes(roles: TensorSpecs, num_layers: int) -> dict[str, Shape]:
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


def _check_dim(cut: Cut, role: TensorSpec, num_ranks: int) -> None:
    """A role says along which dimension it may be cut."""
    skipped = len(role.shape) - len(cut.whole)  # dimensions of the role that the tensor lacks, as that of experts
    for dim, (whole, own) in enumerate(zip(cut.whole, cut.own, strict=True)):
        if whole != own and dim + skipped != role.shard_dim:
            raise ValueError(f"{cut.part.name} {list(cut.whole)} cannot be split over {num_ranks} ranks along {dim}")

"""Sizes of a model's weights, and their shards: integer arithmetic from configs, no torch.

``rank_config`` gives the ``ModelConfig`` of one rank: its heads, its part of the MLPs, its experts, its lines of the
embedding tables. Tensor shapes, bytes, cache and ``plan`` follow from it as from any config. ``slice_of`` compares the
shapes of a tensor in both configs. Invariant: the slices of all ranks cover each number once, except that kv heads
fewer than ranks are held by several.

``formats`` None means that every matrix is stored in the dtype of the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from snapstream.config import DTYPE_BYTES, ModelConfig, WeightFormat, WeightFormats
from snapstream.config.engine import ParallelConfig
from snapstream.config.model import MoEConfig
from snapstream.config.weights import FP8_BLOCK
from snapstream.models.registry import tensor_specs
from snapstream.models.tensors import Part, TensorSpec, checkpoint_parts, part_shape, stacked_shape

_BLOCK_NUMBERS = {"cpu": 2**19}  # of a matrix that are dequantized at a time: 2 MiB of fp32 stay in a cache
_MOST_BLOCK_NUMBERS = 2**24  # on other devices: few calls
_BLOCK_BYTES = 10  # per number, at most: a byte of quantized value, fp32, the dtype of the computation


def layer_parameters(config: ModelConfig) -> int:
    """Numbers of a layer's matrices that a token is multiplied with (top_k of the experts), on average over layers."""
    specs = [spec for spec in tensor_specs(config).values() if spec.per_layer and spec.is_matrix and not spec.is_table]
    total = sum(_share(config, spec, 1) * prod(stacked_shape(spec, config.num_layers)) for spec in specs)
    return int(total) // config.num_layers


def active_parameters(config: ModelConfig) -> int:
    """Numbers that a token is multiplied with, output embedding included; of the experts top_k count."""
    matrices = ((name, spec) for name, spec in tensor_specs(config).items() if spec.is_matrix)
    head = "embed" if config.tie_word_embeddings else "lm_head"
    used = [spec for name, spec in matrices if (name != "embed" and not spec.is_table) or name == head]
    return round(sum(_share(config, spec, 1) * prod(stacked_shape(spec, config.num_layers)) for spec in used))


def num_parameters(config: ModelConfig) -> int:
    """Numbers of a checkpoint with this config; a tied embedding counts once."""
    return sum(prod(part.shape) for part in checkpoint_parts(tensor_specs(config), config.num_layers))


def format_of(spec: TensorSpec, dtype: str, formats: WeightFormats | None = None) -> WeightFormat:
    plain = WeightFormats.of(spec.dtype or dtype).layers
    if formats is None or not spec.is_matrix or spec.is_dense or spec.is_float:
        return plain
    if spec.crosses_blocks and formats.layers.is_fp8:
        return plain if formats.tables.is_quantized else formats.tables
    if spec.form is not None and formats.own:
        return next(form for form in formats.own if (form.dtype, form.group) == (spec.form.dtype, spec.form.group))
    if spec.is_attention and formats.attention is not None:
        return formats.attention
    return formats.layers if spec.per_layer and not spec.is_table else formats.tables


def is_dequantized(spec: TensorSpec, dtype: str, formats: WeightFormats | None = None) -> bool:
    """Whether prefill dequantizes the matrix into the buffer that layers share, for which experts are too large."""
    is_low_precision = format_of(spec, dtype, formats).dtype != dtype
    return spec.per_layer and spec.is_matrix and not spec.is_table and len(spec.shape) == 2 and is_low_precision


def check_groups(config: ModelConfig, formats: WeightFormats) -> None:
    """ValueError where a row of a matrix is not whole groups."""
    for name, spec in tensor_specs(config).items():
        form = format_of(spec, "float32", formats)
        if form.is_quantized and not form.is_fp8 and spec.shape[-1] % form.block:
            raise ValueError(
                f"weights are {form.describe()}; the rows of {name} have {spec.shape[-1]} numbers, which must be a "
                f"multiple of {form.block}"
            )


def weight_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None = None) -> int:
    """Bytes of all weights in memory, scales included."""
    return sum(tensor_bytes(config, dtype, formats).values())


def tensor_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None = None) -> dict[str, int]:
    """Bytes of every stored tensor, scales included."""
    return {name: _spec_bytes(config, spec, dtype, formats) for name, spec in tensor_specs(config).items()}


def decode_weight_bytes(
    config: ModelConfig, dtype: str, formats: WeightFormats | None = None, num_tokens: int = 1
) -> int:
    """Bytes of the weights that a decode step of ``num_tokens`` rows must read.

    All but an untied embedding table and the experts that no row chose: of X experts, k per token, B tokens read
    X (1 - (1 - k / X)^B) on average if choices are uniform and independent. Real routers read fewer.
    """
    specs = {
        name: spec
        for name, spec in tensor_specs(config).items()
        if not spec.is_table and (name != "embed" or config.tie_word_embeddings)
    }
    return sum(
        round(_share(config, spec, num_tokens) * _spec_bytes(config, spec, dtype, formats)) for spec in specs.values()
    )


def dequantized_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None = None) -> int:
    """Bytes of the buffer for one dequantized layer of prefill."""
    dequantized = (spec for spec in tensor_specs(config).values() if is_dequantized(spec, dtype, formats))
    return sum(prod(spec.shape) for spec in dequantized) * DTYPE_BYTES[dtype]


def dequantized_block(device_type: str) -> int:
    """Numbers of a matrix that are dequantized at a time."""
    return _BLOCK_NUMBERS.get(device_type, _MOST_BLOCK_NUMBERS)


def dequantizing_bytes(config: ModelConfig, dtype: str, formats: WeightFormats | None, device_type: str) -> int:
    """Bytes of the temporaries of dequantizing a block of rows."""
    shapes = [
        spec.shape
        for spec in tensor_specs(config).values()
        if spec.is_matrix and format_of(spec, dtype, formats).dtype != dtype
    ]
    return max((min(prod(shape), dequantized_block(device_type)) for shape in shapes), default=0) * _BLOCK_BYTES


def _share(config: ModelConfig, spec: TensorSpec, num_tokens: int) -> float:
    """The part of a tensor that so many tokens are multiplied with."""
    if not spec.per_expert or config.moe is None:
        return 1.0
    return config.moe.num_read(num_tokens) / config.moe.num_experts


def _spec_bytes(config: ModelConfig, spec: TensorSpec, dtype: str, formats: WeightFormats | None) -> int:
    return format_of(spec, dtype, formats).num_bytes(stacked_shape(spec, config.num_layers))


def rank_config(
    model: ModelConfig, parallel: ParallelConfig, rank: int = 0, formats: WeightFormats | None = None
) -> ModelConfig:
    """The model as rank ``rank`` stores it, its matrices in ``formats``; the model itself where there is one rank.

    ``hidden_size``, ``vocab_size`` and the router's number of experts stay whole. Inner sizes are cut by whole
    quantization groups and padded with zeros, so that all ranks have the same shapes. ValueError where heads or experts
    cannot be split evenly, and for fused projections.
    """
    size = parallel.size
    if size == 1:
        return model
    if model.vocab_size <= (size - 1) * -(-model.vocab_size // size):
        raise ValueError(f"a vocabulary of {model.vocab_size} leaves some of {size} ranks without a line")
    if parallel.attention == "dp" and model.latent is None:
        raise ValueError("attention is 'dp', which needs latent attention; this model keeps keys and values per head")
    if parallel.attention == "dp" and model.recurrent_layers:
        raise ValueError("attention is 'dp', which is not supported beside recurrent layers")
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads
    if parallel.attention == "tp":
        num_heads, num_kv_heads = _own_heads(num_heads, num_kv_heads, size)
    full_heads = model.full_heads
    if full_heads is not None:
        heads, kv_heads = _own_heads(full_heads.num_heads or model.num_heads, full_heads.num_kv_heads, size)
        full_heads = full_heads._replace(num_heads=heads, num_kv_heads=kv_heads)
    unit = 1 if formats is None else max(_unit(form, is_row=True) for form in (formats.layers, *formats.own))
    moe = None if model.moe is None else _own_experts(model.moe, parallel, rank, unit)
    inner = model.intermediate_size
    if model.dense_layers:
        inner = _padded_share(inner, size, unit)
    if model.altup is not None and inner * size != model.intermediate_size:
        raise ValueError(
            f"{model.architecture} cuts the {model.intermediate_size} gates of an MLP by how they spread; they are not "
            f"split evenly over {size} ranks"
        )
    is_fused = model.has_fused_experts or model.has_fused_gate_up
    if model.moe and moe and is_fused and parallel.experts == "tp" and moe.inner * size != model.moe.inner:
        raise ValueError(
            f"this {model.architecture} has gate and up of all experts in one tensor, of {model.moe.inner} rows each, "
            f"which are not split evenly over {size} ranks; use experts 'ep'"
        )
    shared = (0, 0) if moe is None or model.moe is None else (moe.shared_inner, model.moe.shared_inner)
    for part, total in ((inner, model.intermediate_size if model.dense_layers else inner * size), shared):
        if model.has_fused_gate_up and part * size != total:
            raise ValueError(
                f"{model.architecture} checkpoints have gate and up in one tensor, of {total} rows each, which are not "
                f"split evenly over {size} ranks"
            )
    own = replace(
        model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        full_heads=full_heads,
        moe=moe,
        intermediate_size=inner,
        recurrent=None if model.recurrent is None else model.recurrent.of_rank(size),
        table_lines=-(-model.vocab_size // size),
    )
    return own if formats is None else replace(own, float_tensors=_float_tensors(model, own, formats))


def _own_heads(heads: int, kv_heads: int, size: int) -> tuple[int, int]:
    """Query heads are split; kv heads too, unless they are fewer than ranks: then several ranks hold each."""
    if max(kv_heads, size) % min(kv_heads, size):
        raise ValueError(f"{kv_heads} kv heads cannot be split over {size} ranks")
    return _rank_share("num_heads", heads, size), max(kv_heads // size, 1)


def _own_experts(moe: MoEConfig, parallel: ParallelConfig, rank: int, unit: int) -> MoEConfig:
    """A part of every expert, or whole experts; a part of the shared ones in either case."""
    size = parallel.size
    shared = _padded_share(moe.shared_inner, size, unit)
    if parallel.experts == "tp":
        return replace(
            moe,
            inner=_padded_share(moe.inner, size, unit),
            own_shared=shared if moe.own_shared else 0,  # 0: it follows from inner
        )
    own = _rank_share("num_experts", moe.num_experts, size)
    return replace(moe, held=range(rank * own, (rank + 1) * own), own_shared=shared)


def _rank_share(name: str, whole: int, size: int) -> int:
    if whole % size:
        raise ValueError(f"{name} is {whole}; it cannot be split over {size} ranks")
    return whole // size


def _padded_share(whole: int, size: int, unit: int) -> int:
    """The largest shard, in multiples of ``unit``. ValueError if it is all: other ranks would hold it too."""
    share = -(-whole // (size * unit)) * unit
    if 0 < whole <= share:
        raise ValueError(f"{whole} inner numbers are at most one group of {unit}, which {size} ranks cannot share")
    return share


def _unit(form: WeightFormat, *, is_row: bool) -> int:
    """Along a row, or between rows, a matrix is cut at multiples of this."""
    if form.is_fp8:
        return FP8_BLOCK
    return form.block if form.is_quantized and is_row else 1


@lru_cache(maxsize=64)
def _float_tensors(whole: ModelConfig, own: ModelConfig, formats: WeightFormats) -> tuple[str, ...]:
    """Tensors whose shard cuts through numbers that share a scale, since heads are not padded."""
    of_whole, found = tensor_specs(whole), []
    for name, spec in tensor_specs(own).items():
        form = format_of(spec, "float32", formats)
        shapes = [(part_shape(of_whole[name], part), part_shape(spec, part)) for part in spec.parts]
        for part, sizes in spec.segments.items():
            pairs = zip(of_whole[name].segments[part], sizes, strict=True)
            shapes += [((total, 0), (size, 0)) for total, size in pairs]
        if form.is_quantized and any(
            total != size and size % _unit(form, is_row=dim == len(cut) - 1)
            for uncut, cut in shapes
            for dim, (total, size) in enumerate(zip(uncut, cut, strict=True))
        ):
            found.append(name)
    return tuple(found)


def slice_of(
    whole: tuple[int, ...], own: tuple[int, ...], rank: int, num_ranks: int, *, is_padded: bool = False
) -> tuple[slice, ...]:
    """The numbers of a checkpoint tensor of shape ``whole`` that fill a rank's tensor of shape ``own``.

    Along a dimension in which they differ the rank takes one of ``whole / own`` shards. If these are fewer than ranks
    (kv heads), adjacent ranks take the same; of a padded tensor the last ranks take fewer numbers, or none.
    """
    cuts = []
    for total, size in zip(whole, own, strict=True):
        shards = num_ranks if is_padded and total != size else -(-total // size)
        start = min(rank * shards // num_ranks * size, total)
        cuts.append(slice(start, min(start + size, total)))
    return tuple(cuts)


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A model, and one rank's part of it."""

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
    """The slice of one checkpoint tensor that a rank reads.

    ``qkv`` and ``gate_up`` are stacks of tensors, each cut separately, so a rank's stack is again q | k | v and gate |
    up. Of a tensor with ``TensorSpec.segments`` all rows are read, and ``part.row_order`` takes the rank's.
    """

    part: Part  # in the rank's storage; its shape exceeds the slice where shards are padded
    whole: Shape  # of the tensor in the checkpoint
    slices: tuple[slice, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """The padding of each dimension."""
        return tuple(max(size - (c.stop - c.start), 0) for size, c in zip(self.part.shape, self.slices, strict=True))

    def scaled(self, units: tuple[int, ...]) -> tuple[slice, ...]:
        """The same slice of a tensor that has one entry for every ``units`` numbers along each dimension."""
        return tuple(slice(c.start // unit, -(-c.stop // unit)) for c, unit in zip(self.slices, units, strict=True))

    def aligned(self, units: tuple[int, ...]) -> Cut:
        """The smallest slice around this one that is whole ``units`` along each dimension."""
        outer = tuple(
            slice(scaled.start * unit, min(scaled.stop * unit, size))
            for scaled, unit, size in zip(self.scaled(units), units, self.whole, strict=True)
        )
        return self._replace(slices=outer)

    def within(self, outer: Cut) -> tuple[slice, ...]:
        """This slice relative to a larger one."""
        return tuple(slice(c.start - o.start, c.stop - o.start) for c, o in zip(self.slices, outer.slices, strict=True))


def cuts_of(share: Share) -> dict[str, Cut]:
    """The slices that the rank reads, by checkpoint name. ValueError for a tensor that cannot be split."""
    own_specs, found = tensor_specs(share.own), dict[str, Cut]()
    wholes = {part.name: part for part in checkpoint_parts(tensor_specs(share.whole), share.whole.num_layers)}
    for part in checkpoint_parts(own_specs, share.own.num_layers):
        whole, spec = wholes[part.name].shape, own_specs[part.target]
        slices = slice_of(whole, part.shape, share.rank, share.num_ranks, is_padded=spec.is_padded)
        if part.segments != wholes[part.name].segments:
            rows = _own_rows(wholes[part.name].segments, part.segments, share)
            part = part._replace(row_order=rows if part.row_order is None else [rows[row] for row in part.row_order])
            dim = part.row_dim + part.is_transposed
            slices = (*slices[:dim], slice(0, whole[dim]), *slices[dim + 1 :])
        found[part.name] = cut = Cut(part, whole, slices)
        if whole != part.shape:
            _check_dim(cut, spec, share.num_ranks)
    return found


def _own_rows(whole: Sequence[int], own: Sequence[int], share: Share) -> list[int]:
    """Rows of a checkpoint tensor of segments of ``whole`` rows that a rank, which has ``own`` of each, stores."""
    rows, start = list[int](), 0
    for total, size in zip(whole, own, strict=True):
        (cut,) = slice_of((total,), (size,), share.rank, share.num_ranks)
        rows += range(start + cut.start, start + cut.stop)
        start += total
    return rows


def _check_dim(cut: Cut, spec: TensorSpec, num_ranks: int) -> None:
    """ValueError if the tensor is cut along another dimension than ``shard_dim``."""
    skipped = len(spec.shape) - len(cut.whole)  # dimensions that the checkpoint tensor lacks, such as that of experts
    dims = [*range(skipped, len(spec.shape))]  # of the stored tensor
    if spec.is_transposed:
        dims[-2:] = dims[:-3:-1]
    allowed = {spec.shard_dim, 0 if spec.per_expert else None}
    for dim, (whole, own) in enumerate(zip(cut.whole, cut.part.shape, strict=True)):
        if whole != own and dims[dim] not in allowed:
            raise ValueError(f"{cut.part.name} {list(cut.whole)} cannot be split over {num_ranks} ranks along {dim}")

"""Fills the stacked weights from a checkpoint folder, tensor by tensor.

Invariants: the checkpoint's tensors are compared with those that the model needs before anything is allocated; each
tensor goes from the mapped file straight to its place in a stack, so host memory never exceeds the model plus
one shard. A rank reads only its part of each. Next: ``checkpoint.py`` (files and headers), ``cuts.py`` (parts),
``packed.py`` (matrices in codes), ``weights.py`` (the stacks).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from snapstream.config import ModelConfig, WeightFormat, WeightFormats
from snapstream.config.model import FP8_BLOCK
from snapstream.kernels.formats import FP8
from snapstream.kernels.groups import SCALE_DTYPE, dequantize, largest_value, quantize
from snapstream.models.config_json import read_object
from snapstream.models.matrix import MakeMatrix, decode, make_matrix
from snapstream.models.quantization import FP8_SCALES, INDEX_FILE, LM_HEAD, SCALES, SINGLE_FILE
from snapstream.models.registry import tensor_specs
from snapstream.models.sharding import Cut, Shape, Share, cuts_of, format_of, needed_shapes
from snapstream.models.tensors import Part, TensorSpec, checkpoint_parts
from snapstream.models.weights import DecoderWeights
from snapstream.types import named

# The contents of a checkpoint folder: its shards and the shape of every tensor in them, read from headers alone.
#
# Invariant: after ``read_manifest`` every shard exists, is whole, and every tensor has one place. ``loader.py``
# compares the manifest with what the model needs before a byte of weights is read.

FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")  # safetensors' names of what converts to a weight as it is


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and how it looks."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, e.g. "BF16"


def read_manifest(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by name. Raises ValueError for absent, cut or contradictory shards."""
    manifest: dict[str, StoredTensor] = {}
    for file in _shards(folder):
        for name, tensor in _read_header(file).items():
            if name in manifest:
                raise ValueError(f"{name} is in two shards: {manifest[name].file.name} and {file.name}")
            manifest[name] = tensor
    return manifest


@contextmanager
def open_shard(file: Path) -> Iterator[safe_open]:
    """Memory-map a shard; pages that were read belong to the mapping and go when it closes."""
    try:
        with safe_open(file, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def read_part(shard: safe_open, name: str, place: tuple[slice, ...]) -> Tensor:
    """The part ``place`` of a tensor; no other page of the file is read."""
    stored = shard.get_slice(name)
    if all(cut == slice(0, size) for cut, size in zip(place, stored.get_shape(), strict=True)):
        whole: Tensor = shard.get_tensor(name)
        return whole
    part: Tensor = stored[place]
    return part


def _shards(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a checkpoint folder")
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed_shards(index)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder} holds weights only as pytorch_model.bin, which can run code when read; "
            "convert them to safetensors"
        )
    raise ValueError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _indexed_shards(index: Path) -> list[Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index} is not an index of shards: weight_map is {named(weight_map)}; it must map tensors to files"
        )
    for tensor, name in weight_map.items():
        _check_name(index, tensor, name)
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{index.parent}: {len(missing)} of {len(files)} shards missing: {', '.join(missing)}")
    return files


def _check_name(index: Path, tensor: str, name: Any) -> None:
    """A shard lies in the folder of its index. It may be a link to elsewhere, as in the caches of model hubs."""
    if not isinstance(name, str):
        raise ValueError(f"{index}: weight_map names {named(name)} for {tensor}; it must be the name of a file")
    if name in ("", ".", "..") or any(sign in name for sign in ("/", "\\", "\0")):
        raise ValueError(f"{index}: weight_map names {name!r} for {tensor}; a shard is a file of the same folder")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with open_shard(file) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 - not a mapping
        return {name: StoredTensor(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


# The tensors of a quantized matrix in a checkpoint, and their bytes.
#
# In the form ``pack-quantized`` a matrix ``X.weight [out, in]`` is three tensors: ``X.weight_packed [out, in * bits /
# 32]`` int32, whose bytes are the codes of ``kernels/groups.py``; ``X.weight_scale [out, in / group]`` in a float
# dtype; ``X.weight_shape``, which holds out and in. In FP8 blocks it is ``X.weight [out, in]`` itself, e4m3, and
# ``X.weight_scale_inv [ceil(out / 128), ceil(in / 128)]``.

Wanted = tuple[Shape, tuple[str, ...]]  # of a tensor in a file: shape, and the dtypes that it may have
CODES, SHAPE = "_packed", "_shape"
FP8_STORED = "F8_E4M3"  # safetensors' name


def plain_name(name: str) -> str:
    """``X.weight`` of ``X.weight_packed``, and of itself."""
    return name.removesuffix(CODES)


def packed_tensors(name: str, shape: Shape, form: WeightFormat) -> dict[str, Wanted]:
    """The tensors that stand for a matrix ``name`` of that shape."""
    num_out, num_in = shape
    if form.is_fp8:
        scales = -(-num_out // FP8_BLOCK), -(-num_in // FP8_BLOCK)
        return {name: (shape, (FP8_STORED,)), name + FP8_SCALES: (scales, ("F32", "BF16"))}
    if num_in % form.group:
        raise ValueError(
            f"quantization_config has groups of {form.group}; the rows of {name} have {num_in} numbers, which must be "
            f"a multiple of it"
        )
    return {
        name + CODES: ((num_out, num_in * form.bits // 32), ("I32",)),
        name + SCALES: ((num_out, num_in // form.group), FLOAT_DTYPES),
        name + SHAPE: ((2,), ("I64", "I32")),
    }


def read_scales(name: str, cut: Cut, group: int, manifest: Mapping[str, StoredTensor]) -> Tensor:
    """Scales of a part of the matrix ``name`` as stored; ValueError where the checkpoint says that it has another
    shape.
    """
    stored = _tensor(name + SHAPE, (slice(0, 2),), manifest).tolist()
    if stored != list(cut.whole):
        file = manifest[name + SHAPE].file
        raise ValueError(f"{file}: {name}{SHAPE} holds {stored}; the config asks for {list(cut.whole)}")
    return _tensor(name + SCALES, cut.scaled((1, group)), manifest)


def read_block_scales(name: str, cut: Cut, manifest: Mapping[str, StoredTensor]) -> Tensor:
    """Scales of a part of the FP8 matrix ``name``, fp32."""
    return _tensor(name + FP8_SCALES, cut.scaled((FP8_BLOCK, FP8_BLOCK)), manifest).to(torch.float32)


def codes_of(packed: Tensor) -> Tensor:
    """Codes ``[out, in * bits / 8]`` uint8 of ``weight_packed``: its bytes."""
    return packed.view(torch.uint8)


def keeps_blocks(order: Sequence[int]) -> bool:
    """Whether rows in this order stay in the blocks whose scales they have."""
    return all(at // FP8_BLOCK == row // FP8_BLOCK for at, row in enumerate(order))


def pack_matrix(name: str, numbers: Tensor, form: WeightFormat) -> dict[str, Tensor]:
    """The tensors that stand for a matrix ``[out, in]``, scales in its dtype."""
    dtype = torch.float32 if numbers.dtype == torch.float64 else numbers.dtype
    codes, scales = quantize(numbers, form.bits, form.group, dtype)
    return {
        name + CODES: codes.view(torch.int32),
        name + SCALES: scales.to(dtype),
        name + SHAPE: torch.tensor(numbers.shape),
    }


def _tensor(name: str, place: tuple[slice, ...], manifest: Mapping[str, StoredTensor]) -> Tensor:
    """A part of a small tensor, wherever it lies."""
    with open_shard(manifest[name].file) as shard:
        return read_part(shard, name, place)


logger = logging.getLogger(__name__)

ROTARY_BUFFER = "rotary_emb.inv_freq"  # old checkpoints store it; it follows from the config


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool,
    formats: WeightFormats | None = None,
    make: MakeMatrix = make_matrix,
    share: Share | None = None,
) -> DecoderWeights:
    """Read a checkpoint into stacks on ``device``, computed with in ``dtype``.

    ``formats``: how the matrices lie in memory, by default in ``dtype``; ``make`` allocates a matrix. ``share``:
    the part of the model ``config`` that is read, by default all of it. A ValueError names the tensor or file.
    """
    manifest = check_checkpoint(Path(folder), config)
    share = Share(whole=config, own=config) if share is None else share
    cuts = cuts_of(share)
    weights = DecoderWeights.empty(share.own, dtype, device, formats, make)
    name_of_dtype = str(dtype).removeprefix("torch.")
    roles, whole_roles = tensor_specs(share.own), tensor_specs(share.whole)
    form = {name: format_of(role, name_of_dtype, formats) for name, role in roles.items()}
    bounds: dict[str, Tensor] = {}
    with _progress_bar(len(cuts), progress) as bar:
        for file in dict.fromkeys(stored.file for name, stored in manifest.items() if plain_name(name) in cuts):
            with open_shard(file) as shard:
                for name in shard.offset_keys():  # in the order of the file, so that a disk reads ahead
                    own = plain_name(name)
                    if own not in cuts:
                        continue
                    cut, part = cuts[own], cuts[own].part
                    codes = _codes_of(roles[part.role], config)
                    if codes is not None:
                        bounds |= _fill_codes(weights, shard, name, cut, codes, manifest)
                    else:
                        of_whole = format_of(whole_roles[part.role], name_of_dtype, formats)
                        stored = _read_floats(shard, name, cut, of_whole if roles[part.role].is_float else None)
                        bounds[own] = _bounds(stored, form[part.role])
                        weights.fill(part.role, part.place, _padded(_in_order(stored, part), cut))
                    bar.update()
    _check_finite(manifest, bounds)
    return weights


def _fill_codes(
    weights: DecoderWeights, shard: Any, name: str, cut: Cut, form: WeightFormat, manifest: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """Store a matrix that the file has in codes; by name, the bounds of what was read."""
    part, own = cut.part, plain_name(name)
    outer = cut.widened((FP8_BLOCK, FP8_BLOCK) if form.is_fp8 else (1, form.group))
    if form.is_fp8:
        codes, scales = read_part(shard, name, outer.slices), read_block_scales(own, outer, manifest)
        bounds = {own: _block_bounds(codes, scales)}
    else:
        codes = codes_of(read_part(shard, name, outer.scaled((1, 32 // form.bits))))
        scales = read_scales(own, outer, form.group, manifest).to(SCALE_DTYPE)
        bounds = {own + SCALES: _minmax(scales)}
    if outer == cut:
        weights.fill_quantized(part.role, part.place, *_padded_codes(codes, scales, cut, form))
    else:  # the shard cuts through groups: it is stored as floats
        numbers = decode(codes, scales, form)
        weights.fill(part.role, part.place, _padded(_in_order(numbers[cut.within(outer)], part), cut))
    return bounds


def _read_floats(shard: Any, name: str, cut: Cut, rounded: WeightFormat | None) -> Tensor:
    """A part of a matrix of floats. ``rounded``: its form on one rank, where a shard is not quantized because it cuts
    through groups: its values are those of one rank all the same.
    """
    if rounded is None or rounded.is_fp8:
        return read_part(shard, name, cut.slices)
    outer = cut.widened((1, rounded.group))
    codes = quantize(read_part(shard, name, outer.slices), rounded.bits, rounded.group)
    return dequantize(*codes, rounded.bits)[cut.within(outer)]


def check_checkpoint(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The stored tensors by name; ValueError unless they are exactly this model's, codes where it has codes."""
    manifest = read_manifest(folder)
    roles = tensor_specs(config)
    plan = {part.name: part for part in checkpoint_parts(roles, config.num_layers)}
    needed: dict[str, Wanted] = {}
    for name, shape in needed_shapes(roles, config.num_layers).items():
        codes = _codes_of(roles[plan[name].role], config)
        needed |= {name: (shape, FLOAT_DTYPES)} if codes is None else packed_tensors(name, shape, codes)
    _check(manifest, needed, config)
    return manifest


def _codes_of(role: TensorSpec, config: ModelConfig) -> WeightFormat | None:
    """How the files have the matrices of a role; None for plain floats."""
    return config.stored.format_of(is_attention=role.is_attention) if role.is_quantized else None


def _in_order(rows: Tensor, part: Part) -> Tensor:
    """Rows of a checkpoint tensor in the order in which they are stored."""
    return rows if part.row_order is None else rows[list(part.row_order)]


def _blocks_in_order(codes: Tensor, part: Part) -> Tensor:
    """The same of FP8 numbers, whose scales stay where they are."""
    if part.row_order is None:
        return codes
    if not keeps_blocks(part.row_order):
        raise ValueError(f"rows of {part.name} change their order across the blocks that share an FP8 scale")
    return codes.view(torch.uint8)[list(part.row_order)].view(FP8.dtype)


def _padded(numbers: Tensor, cut: Cut) -> Tensor:
    """With zeros where the shard is longer than what the checkpoint has for it."""
    ends = [end for missing in reversed(cut.missing) for end in (0, missing)]
    return torch.nn.functional.pad(numbers, ends) if any(ends) else numbers


def _padded_codes(codes: Tensor, scales: Tensor, cut: Cut, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of a part in the order of the storage; scales of zero fill up the shard."""
    if form.is_fp8:
        codes, units = _blocks_in_order(codes, cut.part), (FP8_BLOCK, FP8_BLOCK)
    else:
        codes, scales, units = _in_order(codes, cut.part), _in_order(scales, cut.part), (1, form.group)
    if not any(cut.missing):
        return codes, scales
    rows, columns = cut.own
    padded = codes.new_zeros(rows, columns * form.bits // 8)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    of_scales = scales.new_zeros(-(-rows // units[0]), -(-columns // units[1]))
    of_scales[: scales.shape[0], : scales.shape[1]] = scales
    return padded, of_scales


def _check(manifest: Mapping[str, StoredTensor], needed: Mapping[str, Wanted], config: ModelConfig) -> None:
    """Refuse a checkpoint that is not exactly this model."""
    missing = [name for name in needed if name not in manifest]
    if missing:
        raise ValueError(f"checkpoint lacks {_listed(missing)}; {config.architecture} needs {len(needed)} tensors")
    skipped = sum(_is_mtp(name, config) for name in manifest)
    if skipped:
        logger.info("%d tensors of multi-token prediction (layers behind the last) are not loaded", skipped)
    extra = [name for name in manifest if name not in needed and not _is_redundant(name, config)]
    if extra:
        raise ValueError(f"checkpoint holds {_listed(extra)}, which {config.architecture} does not use")
    for name, (shape, dtypes) in needed.items():
        stored = manifest[name]
        if stored.shape != shape:
            raise ValueError(
                f"{name} in {stored.file.name} has shape {list(stored.shape)}; the config asks for {list(shape)}"
            )
        if stored.dtype not in dtypes:
            raise ValueError(f"{name} in {stored.file.name} is stored as {stored.dtype}; known: {', '.join(dtypes)}")


def _bounds(numbers: Tensor, form: WeightFormat) -> Tensor:
    """Least and greatest weight ``[2]`` in the dtype of the storage, of codes as scales; both are NaN where one is.

    They cost one more reading of a tensor that is about to be copied: somewhat less than the copy itself, little beside
    a disk.
    """
    bounds = _minmax(numbers)
    if form.is_quantized:
        return (bounds / largest_value(form.bits)).to(SCALE_DTYPE)
    return bounds.to(getattr(torch, form.dtype))


def _minmax(numbers: Tensor) -> Tensor:
    """Zeros of a rank's empty shard."""
    return torch.stack(torch.aminmax(numbers)) if numbers.numel() else torch.zeros(2)


def _block_bounds(codes: Tensor, scales: Tensor) -> Tensor:
    """Least and greatest scale of an FP8 matrix; NaN where one of its numbers is. FP8 has no infinity."""
    has_nan = bool((codes.view(torch.uint8) & 127).eq(127).any())
    bounds = _minmax(scales)
    return bounds.fill_(torch.nan) if has_nan else bounds


def _check_finite(manifest: Mapping[str, StoredTensor], bounds: Mapping[str, Tensor]) -> None:
    """Refuse weights that hold NaN or infinity, as stored or in memory: every answer would be noise."""
    wrong = [name for name, bound in bounds.items() if not bound.isfinite().all()]
    if wrong:
        bound = bounds[wrong[0]]
        what = "NaN" if bool(bound.isnan().any()) else f"infinity as {str(bound.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"{manifest[wrong[0]].file}: {wrong[0]} holds {what}; weights must be finite "
            f"({len(wrong)} of {len(bounds)} tensors are not)"
        )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    return name.endswith(ROTARY_BUFFER) or (config.tie_word_embeddings and name == LM_HEAD) or _is_mtp(name, config)


def _is_mtp(name: str, config: ModelConfig) -> bool:
    """True for a tensor of the layers behind the last one that predict further tokens (multi-token prediction)."""
    last = config.num_layers + config.num_mtp_layers
    return any(name.startswith(f"model.layers.{layer}.") for layer in range(config.num_layers, last))


def _listed(names: list[str], most: int = 3) -> str:
    """A few names and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


class _NoBar:
    def update(self) -> None:
        """Nothing is shown."""


@contextmanager
def _progress_bar(total: int, is_shown: bool) -> Iterator[Any]:
    if not is_shown:
        yield _NoBar()
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="Loading weights", unit="tensor") as bar:
        yield bar

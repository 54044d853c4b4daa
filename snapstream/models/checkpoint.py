"""Loads the weights of a checkpoint folder or a GGUF file, tensor by tensor.

Invariants: before anything is allocated, every shard is whole, every tensor has one place, and the tensors are those
that the model needs. Each tensor is read from the mapped file into its place in a stack (``weights.py``), so host
memory never exceeds the model plus one shard. A rank reads only its slice of each.

A quantized matrix ``X.weight [out, in]`` is stored as (``pack-quantized``) ``X.weight_packed [out, in * bits / 32]``
int32, whose bytes are the values of ``kernels/groups.py``, ``X.weight_scale [out, in / group]`` and ``X.weight_shape``;
or as (FP8) ``X.weight [out, in]`` in e4m3 and ``X.weight_scale_inv [ceil(out / 128), ceil(in / 128)]`` or ``[]``; or in
the layout of a ``Packing``, whose numbers are read whole and put into groups, or dequantized.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import ModelConfig, WeightFormat, WeightFormats
from snapstream.config.weights import FP8_BLOCK, Packing
from snapstream.kernels.formats import FP8, FP8_MAX
from snapstream.kernels.groups import (
    AWQ_ORDER,
    MXFP4_NAN,
    SCALE_DTYPE,
    largest_value,
    pack,
    quantize,
    scale_dtype,
    unpack_words,
)
from snapstream.models import gguf
from snapstream.models.config_json import read_object
from snapstream.models.gguf_header import first_file, is_gguf, split_files
from snapstream.models.matrix import MakeMatrix, decode, encode, make_matrix
from snapstream.models.quantization import (
    EMBED,
    FP8_SCALES,
    GPTQ_SCALES,
    INDEX_FILE,
    INPUT_SCALE,
    LM_HEAD,
    SCALES,
    SINGLE_FILE,
)
from snapstream.models.registry import FAMILIES, own_name, tensor_specs
from snapstream.models.sharding import Cut, Shape, Share, cuts_of, format_of
from snapstream.models.tensors import ELSEWHERE, TOWER_PREFIXES, Part, TensorSpec, checkpoint_parts, keeps_blocks
from snapstream.models.weights import DecoderWeights
from snapstream.types import named

FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")  # safetensors' names


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, e.g. "BF16"
    name: str  # in the file


def read_manifest(folder: Path, config: ModelConfig | None = None) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by name. ValueError for missing, truncated or contradictory shards.

    With ``config`` by ``own_name``; of a text part only those of the text model.
    """
    is_text_part = config is not None and config.is_text_part
    manifest: dict[str, StoredTensor] = {}
    num_skipped = 0
    for file in _shards(folder):
        for stored, tensor in _read_header(file).items():
            if is_text_part and stored.startswith(TOWER_PREFIXES):
                num_skipped += 1
                continue
            name = stored if config is None else own_name(stored, config)
            if name in manifest:
                raise ValueError(f"{name} is in two shards: {manifest[name].file.name} and {file.name}")
            manifest[name] = tensor
    if num_skipped:
        logger.info("%d tensors of towers for images or sound are not loaded: text only", num_skipped)
    return manifest


def open_shard(file: Path) -> Any:
    """Memory-map a shard, a ``safe_open`` or ``gguf.Shard``."""
    if is_gguf(file):
        return gguf.Shard(file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


_held = lru_cache(maxsize=8)(open_shard)  # reading the header of one with many experts for each tensor takes minutes


def read_part(shard: Any, name: str, place: tuple[slice, ...]) -> Tensor:
    """A slice of a tensor; no other page of the file is read."""
    if isinstance(shard, gguf.Shard):
        own = torch.from_numpy(shard.read(name, place))
        return own.view(torch.bfloat16) if own.dtype == torch.uint16 else own
    stored = shard.get_slice(name)
    if all(cut == slice(0, size) for cut, size in zip(place, stored.get_shape(), strict=True)):
        whole: Tensor = shard.get_tensor(name)
        return whole
    part: Tensor = stored[place]
    return part


def _shards(folder: Path) -> list[Path]:
    if is_gguf(folder):
        return split_files(folder)
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
    """A shard is in the folder of its index; it may be a link, as in the caches of model hubs."""
    if not isinstance(name, str):
        raise ValueError(f"{index}: weight_map names {named(name)} for {tensor}; it must be the name of a file")
    if name in ("", ".", "..") or any(sign in name for sign in ("/", "\\", "\0")):
        raise ValueError(f"{index}: weight_map names {name!r} for {tensor}; a shard is a file of the same folder")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    if is_gguf(file):
        views = gguf.views(first_file(file)).items()
        return {
            name: StoredTensor(file, view.shape, view.dtype, name) for name, view in views if view.tensor.file == file
        }
    shard = open_shard(file)
    slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 - not a mapping
    return {name: StoredTensor(file, tuple(part.get_shape()), part.get_dtype(), name) for name, part in slices.items()}


Expected = tuple[Shape, tuple[str, ...]]  # shape of a tensor, and the dtypes that it may have
PACKED, SHAPE = "_packed", "_shape"
GPTQ_WORDS, GPTQ_ZEROS, GPTQ_ORDER = ".qweight", ".qzeros", ".g_idx"
ZEROS, ORDER = "_zero_point", "_g_idx"
MXFP4_CODES, MXFP4_SCALES = "_blocks", "_scales"  # suffixes of the two tensors of MXFP4 matrices
FP8_STORED = "F8_E4M3"  # safetensors' name


def plain_name(name: str) -> str:
    """``X.weight`` of ``X.weight_packed`` and ``X.qweight``, ``X`` of ``X_blocks``, and of itself."""
    if name.endswith(GPTQ_WORDS):
        return name.removesuffix(GPTQ_WORDS) + ".weight"
    return name.removesuffix(PACKED).removesuffix(MXFP4_CODES)


def packed_tensors(name: str, shape: Shape, form: WeightFormat, *, has_one_scale: bool = False) -> dict[str, Expected]:
    """The tensors of a quantized matrix ``name``, of MXFP4 a stack of such."""
    if form.is_mxfp4:
        *rows, num_in = shape
        if num_in % form.group:
            raise ValueError(
                f"the rows of {name} have {num_in} numbers; in MXFP4 it must be a multiple of {form.group}"
            )
        blocks = (*rows, num_in // form.group)
        return {name + MXFP4_CODES: ((*blocks, form.group // 2), ("U8",)), name + MXFP4_SCALES: (blocks, ("U8",))}
    num_out, num_in = shape
    if form.is_fp8:
        scales = () if has_one_scale else (-(-num_out // FP8_BLOCK), -(-num_in // FP8_BLOCK))
        return {name: (shape, (FP8_STORED,)), name + FP8_SCALES: (scales, ("F32", "BF16"))}
    if num_in % form.block:
        raise ValueError(
            f"quantization_config has groups of {form.block}; the rows of {name} have {num_in} numbers, which must be "
            f"a multiple of it"
        )
    return {
        name + PACKED: ((num_out, num_in * form.bits // 32), ("I32",)),
        name + SCALES: (
            (num_out, *form.scales_shape(num_in)),
            ("I32",) if form.is_uint4 else ("U8",) if form.is_k_quant else FLOAT_DTYPES,
        ),
        name + SHAPE: ((2,), ("I64", "I32")),
    }


def packing_tensors(name: str, shape: Shape, packing: Packing) -> dict[str, Expected]:
    """The tensors of a quantized matrix ``name`` in the layout of ``packing``."""
    (num_out, num_in), base, per_word = shape, name.removesuffix(".weight"), 32 // packing.bits
    group = packing.group or num_in
    if num_in % group or num_in % per_word or num_out % per_word:
        raise ValueError(
            f"{name} has the shape {list(shape)}; {packing.describe()} in groups of {group} needs multiples of "
            f"{per_word} and of the group"
        )
    count = num_in // group
    if packing.layout in ("gptq", "awq"):
        words = (num_in // per_word, num_out) if packing.layout == "gptq" else (num_in, num_out // per_word)
        order = {base + GPTQ_ORDER: ((num_in,), ("I32", "I64"))} if packing.has_order else {}
        return {
            base + GPTQ_WORDS: (words, ("I32",)),
            base + GPTQ_ZEROS: ((count, num_out // per_word), ("I32",)),
            base + GPTQ_SCALES: ((count, num_out), FLOAT_DTYPES),
            **order,
        }
    found: dict[str, Expected] = {name + SCALES: ((num_out, count), FLOAT_DTYPES)}
    if packing.layout == "packed":
        found |= {name + PACKED: ((num_out, num_in // per_word), ("I32",)), name + SHAPE: ((2,), ("I64", "I32"))}
    else:
        found[name] = shape, (FP8_STORED,) if packing.layout == "fp8" else ("I8",)
    if packing.has_zeros:
        is_packed = packing.layout == "packed"
        found[name + ZEROS] = ((num_out // per_word, count), ("I32",)) if is_packed else ((num_out, count), ("I8",))
    if packing.has_order:
        found[name + ORDER] = (num_in,), ("I32", "I64")
    return found


def read_packing(name: str, packing: Packing, manifest: Mapping[str, StoredTensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Values less their zeros ``[out, in]`` int16, FP8 as they are; scales ``[out, n]`` fp32; the group of each column
    ``[in]``. ValueError for a group that does not exist.
    """
    base, bits = name.removesuffix(".weight"), packing.bits

    def stored(own: str) -> Tensor:
        return _tensor(own, tuple(slice(0, size) for size in manifest[own].shape), manifest)

    order, zeros = None, None
    if packing.layout in ("gptq", "awq"):
        values, zeros = stored(base + GPTQ_WORDS), stored(base + GPTQ_ZEROS)
        scales, columns = stored(base + GPTQ_SCALES).T, AWQ_ORDER if packing.layout == "awq" else None
        values = unpack_words(values, bits, 0 if columns is None else 1, columns).T
        zeros = unpack_words(zeros, bits, 1, columns).T + packing.zero_shift
        middle = 2 ** (bits - 1)
        if not packing.has_zeros and bool((zeros != middle).any()):
            raise ValueError(
                f"{manifest[base + GPTQ_ZEROS].file}: {base}{GPTQ_ZEROS} has zeros other than {middle}, and "
                "quantization_config says that there are none"
            )
        if base + GPTQ_ORDER in manifest:
            order = stored(base + GPTQ_ORDER)
    else:
        scales = stored(name + SCALES)
        if packing.layout == "packed":
            values = unpack_words(stored(name + PACKED), bits, 1) - 2 ** (bits - 1)
        else:
            values = stored(name)
        if packing.has_zeros:
            zeros = stored(name + ZEROS)
            zeros = unpack_words(zeros, bits, 0) - 2 ** (bits - 1) if packing.layout == "packed" else zeros.short()
        if packing.has_order:
            order = stored(name + ORDER)
    num_in, count = values.shape[1], scales.shape[1]
    in_turn = torch.arange(num_in) // (num_in // count)
    groups = in_turn if order is None else order.long()
    if not packing.has_order and not torch.equal(groups, in_turn):
        file = manifest[base + GPTQ_ORDER].file
        raise ValueError(f"{file}: {base}{GPTQ_ORDER} is an activation order, and quantization_config has no desc_act")
    if bool(((groups < 0) | (groups >= count)).any()):
        raise ValueError(f"{manifest[_scales_of(name, packing)].file}: a column of {name} is in none of {count} groups")
    if zeros is not None:
        values = values.short() - zeros[:, groups]
    return values, scales.float(), groups


def _scales_of(name: str, packing: Packing) -> str:
    is_gptq = packing.layout in ("gptq", "awq")
    return name.removesuffix(".weight") + GPTQ_SCALES if is_gptq else name + SCALES


def read_scales(name: str, cut: Cut, form: WeightFormat, manifest: Mapping[str, StoredTensor]) -> Tensor:
    """Stored scales of a slice of the matrix ``name``; ValueError if the stored shape is another."""
    stored = _tensor(name + SHAPE, (slice(0, 2),), manifest).tolist()
    if stored != list(cut.whole):
        file = manifest[name + SHAPE].file
        raise ValueError(f"{file}: {name}{SHAPE} holds {stored}; the config asks for {list(cut.whole)}")
    of_block = (slice(0, form.scale_bytes),) if form.is_k_quant else ()
    return _tensor(name + SCALES, (*cut.scaled((1, form.block)), *of_block), manifest).to(scale_dtype(form))


def read_block_scales(name: str, cut: Cut, manifest: Mapping[str, StoredTensor]) -> Tensor:
    """Scales of the blocks in a slice of the FP8 matrix ``name``, fp32."""
    blocks = cut.scaled((FP8_BLOCK, FP8_BLOCK))
    if manifest[name + FP8_SCALES].shape:
        return _tensor(name + FP8_SCALES, blocks, manifest).to(torch.float32)
    scale = _tensor(name + FP8_SCALES, (), manifest).to(torch.float32)
    return scale.expand([own.stop - own.start for own in blocks]).contiguous()


def pack_matrix(name: str, numbers: Tensor, form: WeightFormat) -> dict[str, Tensor]:
    """The tensors of a matrix ``[out, in]`` as ``pack-quantized`` stores it, scales in its dtype."""
    dtype = torch.float32 if numbers.dtype == torch.float64 else numbers.dtype
    values, scales = quantize(numbers, form.bits, form.group, dtype)
    return {
        name + PACKED: values.view(torch.int32),
        name + SCALES: scales.to(dtype),
        name + SHAPE: torch.tensor(numbers.shape),
    }


def _tensor(name: str, place: tuple[slice, ...], manifest: Mapping[str, StoredTensor]) -> Tensor:
    return read_part(_held(manifest[name].file), manifest[name].name, place)


logger = logging.getLogger(__name__)

LoadProgress = bool | Callable[[float], None]  # whether to show a bar on stderr; or called with the share that is read

ROTARY_BUFFER = "rotary_emb.inv_freq"  # old checkpoints store it; it follows from the config


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: LoadProgress,
    formats: WeightFormats | None = None,
    make: MakeMatrix = make_matrix,
    share: Share | None = None,
) -> DecoderWeights:
    """Read a checkpoint into stacks on ``device``, for computation in ``dtype``.

    ``formats``: of the matrices in memory, by default ``dtype``; ``make`` allocates a matrix. ``share``: the part of
    the model that is read, by default all. A ValueError names the tensor or file.
    """
    from tqdm import tqdm

    _held.cache_clear()  # files may have changed
    manifest = check_checkpoint(Path(folder), config)
    share = Share(whole=config, own=config) if share is None else share
    cuts = cuts_of(share)
    weights = DecoderWeights.empty(share.own, dtype, device, formats, make)
    dtype_name = str(dtype).removeprefix("torch.")
    specs, whole_specs = tensor_specs(share.own), tensor_specs(share.whole)
    bounds: dict[str, Tensor] = {}
    total, num_read = sum(map(_num_elements, cuts.values())), 0
    with tqdm(total=len(cuts), desc="Loading weights", unit="tensor", disable=progress is not True) as bar:
        for file in dict.fromkeys(stored.file for name, stored in manifest.items() if plain_name(name) in cuts):
            shard = open_shard(file)
            for name in shard.offset_keys():  # in the order of the file, so that a disk reads ahead
                own = plain_name(own_name(name, config))
                if own not in cuts:
                    continue
                cut, part = cuts[own], cuts[own].part
                spec, quantized = specs[part.target], _stored_format(own, specs[part.target], config, manifest)
                if spec.is_quantized and config.stored.packing is not None:
                    bounds |= _fill_packing(weights, own, cut, config, manifest)
                elif quantized is not None:
                    bounds |= _fill_quantized(weights, shard, name, cut, quantized, manifest, spec.row_eps)
                else:
                    whole_format = format_of(whole_specs[part.target], dtype_name, formats)
                    numbers = _read_floats(shard, name, cut, whole_format if spec.is_float else None)
                    bounds[own] = _bounds(numbers, format_of(spec, dtype_name, formats))
                    if spec.offset or spec.factor != 1.0:
                        numbers = (numbers.float() + spec.offset) * spec.factor
                    if spec.row_eps is not None:
                        numbers = _with_normed_rows(numbers, spec.row_eps, dtype)
                    weights.fill(part.target, part.place, _in_order(_padded(numbers, cut), part))
                bar.update()
                num_read += _num_elements(cut)
                if callable(progress):
                    progress(num_read / total)
    _held.cache_clear()
    _check_finite(manifest, bounds)
    weights.fold_norm_biases()
    return weights


def _with_normed_rows(numbers: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See ``TensorSpec.row_eps``; some rows at a time, as a vocabulary in fp32 is large."""
    parts = (F.rms_norm(part.float(), part.shape[-1:], eps=eps).to(dtype) for part in numbers.split(4096))
    return torch.cat(list(parts))


def _with_normed_scales(values: Tensor, scales: Tensor, form: WeightFormat, eps: float) -> Tensor:
    """The same of quantized rows: their codes stay."""
    factors = [
        decode(codes, own, form).square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        for codes, own in zip(values.split(4096), scales.split(4096), strict=True)
    ]
    own = _factors(scales, form)
    normed = (own.float() * torch.cat(factors).view(-1, *[1] * (own.dim() - 1))).to(SCALE_DTYPE).view(scales.dtype)
    return torch.cat((normed, scales[..., form.factor_bytes :]), -1) if form.is_k_quant else normed


def _factors(scales: Tensor, form: WeightFormat) -> Tensor:
    """The floats among ``scales``, fp16."""
    return (scales[..., : form.factor_bytes] if form.is_k_quant else scales).contiguous().view(SCALE_DTYPE)


def _num_elements(cut: Cut) -> int:
    return math.prod(own.stop - own.start for own in cut.slices)


def _fill_quantized(
    weights: DecoderWeights, shard: Any, name: str, cut: Cut, form: WeightFormat, manifest: Mapping[str, StoredTensor],
    row_eps: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Store a matrix that is quantized in the file; by name, the bounds of what was read."""
    part, own = cut.part, cut.part.name
    if form.is_mxfp4:
        return _fill_mxfp4(weights, own, cut, form, manifest)
    outer = cut.aligned((FP8_BLOCK, FP8_BLOCK) if form.is_fp8 else (1, form.block))
    if form.is_fp8:
        values, scales = read_part(shard, name, outer.slices), read_block_scales(own, outer, manifest)
        checked, bounds = own, _block_bounds(values, scales)
    else:
        rows, columns = outer.slices
        words = slice(columns.start * form.bits // 32, columns.stop * form.bits // 32)
        values = read_part(shard, name, (rows, words)).view(torch.uint8)
        scales = read_scales(own, outer, form, manifest)
        checked, bounds = own + SCALES, _minmax(_factors(scales, form))
        scales = scales if row_eps is None else _with_normed_scales(values, scales, form, row_eps)
    target = weights.matrices[part.target]
    is_whole = form.is_fp8 or target.shape[-1] % form.block == 0  # else groups reach into the next layer
    is_whole &= not form.is_fp8 or target.form.is_fp8 or keeps_blocks(part.row_order)
    is_kept = (target.form.dtype, target.form.group) == (form.dtype, form.group)
    if outer == cut and is_whole and is_kept:
        weights.fill_quantized(part.target, part.place, *_padded_values(values, scales, cut, form))
    else:  # the shard cuts through groups, and is stored as floats; or another format was asked for
        numbers = decode(values, scales, form)
        bounds = _bounds(numbers, target.form) if bounds.isfinite().all() else bounds
        weights.fill(part.target, part.place, _padded(_in_order(numbers[cut.within(outer)], part), cut))
    return {checked: bounds}


def _fill_packing(
    weights: DecoderWeights, name: str, cut: Cut, config: ModelConfig, manifest: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """Store a matrix in the layout of a ``Packing``: as groups if their format is kept, else as floats."""
    packing, form, part = config.stored.packing, config.stored.quantized, cut.part
    assert packing is not None
    values, scales, groups = read_packing(name, packing, manifest)
    checked = name if packing.layout == "fp8" else _scales_of(name, packing)
    bounds = _minmax(scales if form is None else scales.to(SCALE_DTYPE))
    if form is not None and cut.aligned((1, form.group)) == cut:
        codes = (values.short() + 2 ** (form.bits - 1)).to(torch.uint8)[cut.slices].contiguous()
        own_scales = scales.repeat_interleave(values.shape[1] // scales.shape[1] // form.group, 1)
        own_scales = own_scales[cut.scaled((1, form.group))].to(SCALE_DTYPE)
        weights.fill_quantized(part.target, part.place, *_padded_values(pack(codes, form.bits), own_scales, cut, form))
        return {checked: bounds}
    rows, columns = cut.slices
    numbers = values[cut.slices].float() * scales[rows][:, groups[columns]]
    bounds = _bounds(numbers, weights.matrices[part.target].form) if bounds.isfinite().all() else bounds
    weights.fill(part.target, part.place, _padded(_in_order(numbers, part), cut))
    return {checked: bounds}


def _fill_mxfp4(
    weights: DecoderWeights, name: str, cut: Cut, form: WeightFormat, manifest: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """Store experts ``[X, out, in]``: codes ``[X, out, in / 32, 16]`` and scales ``[X, out, in / 32]`` in the file.

    Padding of a shard is codes of zero.
    """
    part, blocks = cut.part, cut.scaled((1, 1, form.group))
    codes = _tensor(name + MXFP4_CODES, (*blocks, slice(0, form.group // 2)), manifest).flatten(-2)
    scales = _tensor(name + MXFP4_SCALES, blocks, manifest)
    bound = torch.tensor(torch.nan if (most := int(_minmax(scales)[1])) == MXFP4_NAN else 6.0 * 2.0 ** (most - 127))
    *rows, columns = part.shape
    sizes = (*rows, columns * form.bits // 8), (*rows, columns // form.group)
    for index, (own, size) in enumerate(zip((codes, scales), sizes, strict=True)):
        if own.shape != size:
            whole = own.new_zeros(size)
            whole[tuple(map(slice, own.shape))] = own
            codes, scales = (whole, scales) if index == 0 else (codes, whole)
    weights.fill_quantized(part.target, part.place, _in_order(codes, part), _in_order(scales, part))
    return {name + MXFP4_SCALES: bound}


def _read_floats(shard: Any, name: str, cut: Cut, rounded: WeightFormat | None) -> Tensor:
    """A slice of a matrix of floats. ``rounded``: of a shard that is not quantized because it cuts through groups, the
    format on a single rank, to which its values are rounded all the same.
    """
    if rounded is None or rounded.is_fp8 or not rounded.is_quantized:
        return read_part(shard, name, cut.slices)
    outer = cut.aligned((1, rounded.block))
    values = encode(read_part(shard, name, outer.slices), rounded)
    return decode(*values, rounded)[cut.within(outer)]


def check_checkpoint(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The stored tensors by name; ValueError unless they are exactly this model's."""
    manifest = read_manifest(folder, config)
    specs = tensor_specs(config)
    needed: dict[str, Expected] = {}
    one = config.stored.has_one_scale
    for part in checkpoint_parts(specs, config.num_layers):
        spec = specs[part.target]
        form = _stored_format(part.name, spec, config, manifest)
        packing = config.stored.packing if spec.is_quantized else None
        if len(part.shape) > 2 and (packing or form) and not (form and form.is_mxfp4):
            raise ValueError(f"{part.name} is several matrices in one tensor, which is not read if it is quantized")
        if packing is not None:
            needed |= packing_tensors(part.name, part.shape, packing)
            continue
        plain = {part.name: (part.shape, FLOAT_DTYPES)}
        needed |= plain if form is None else packed_tensors(part.name, part.shape, form, has_one_scale=one)
    _check(manifest, needed, config)
    return manifest


def _stored_format(
    name: str, spec: TensorSpec, config: ModelConfig, manifest: Mapping[str, StoredTensor]
) -> WeightFormat | None:
    """The format in the files of a part of ``spec`` if it is quantized there."""
    if config.prediction_of and spec.is_float:
        return None
    if (own := config.stored.own_format(name)) is not None:
        return own
    if spec.is_matrix and (spec.is_table or not spec.per_layer):
        return config.stored.tables
    if spec.is_dense and config.stored.has_float_dense:
        return None
    form = config.stored.format_of(is_attention=spec.is_attention) if spec.is_quantized else None
    if spec.is_dense and form is not None and form.is_fp8 and name in manifest:  # Qwen leaves these floats
        return None if manifest[name].dtype in FLOAT_DTYPES else form
    return form


def _in_order(rows: Tensor, part: Part) -> Tensor:
    """Rows of a checkpoint tensor in the order of the storage."""
    rows = rows.transpose(-1, -2) if part.is_transposed else rows
    if part.row_order is None:
        return rows
    return rows.index_select(part.row_dim, torch.tensor(part.row_order, device=rows.device))


def _blocks_in_order(values: Tensor, scales: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """The same of FP8 numbers and the scales of their blocks."""
    if part.row_order is None:
        return values, scales
    if not keeps_blocks(part.row_order):
        raise ValueError(f"rows of {part.name} change their order across the blocks that share an FP8 scale")
    order = torch.tensor(part.row_order)
    return values.view(torch.uint8)[order].view(FP8.dtype), scales[order[::FP8_BLOCK] // FP8_BLOCK]


def _padded(numbers: Tensor, cut: Cut) -> Tensor:
    """Append the zeros of a padded shard."""
    ends = [end for missing in reversed(cut.missing) for end in (0, missing)]
    return torch.nn.functional.pad(numbers, ends) if any(ends) else numbers


def _padded_values(values: Tensor, scales: Tensor, cut: Cut, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Quantized values and scales in the order of the storage, padded with zeros."""
    if form.is_fp8:
        values, scales = _blocks_in_order(values, scales, cut.part)
        units = FP8_BLOCK, FP8_BLOCK
    else:
        values, scales, units = _in_order(values, cut.part), _in_order(scales, cut.part), (1, form.block)
    if not any(cut.missing):
        return values, scales
    rows, columns = cut.part.shape
    padded = values.new_zeros(rows, columns * form.bits // 8)
    padded[: values.shape[0], : values.shape[1]] = values
    of_scales = scales.new_zeros(-(-rows // units[0]), -(-columns // units[1]), *scales.shape[2:])
    of_scales[: scales.shape[0], : scales.shape[1]] = scales
    return padded, of_scales


def _check(manifest: Mapping[str, StoredTensor], needed: Mapping[str, Expected], config: ModelConfig) -> None:
    missing = [name for name in needed if name not in manifest]
    if missing:
        raise ValueError(f"checkpoint lacks {_listed(missing)}; {config.architecture} needs {len(needed)} tensors")
    skipped = sum(_is_mtp(name, config) for name in manifest)
    if skipped:
        logger.info("%d tensors of multi-token prediction (layers after the last) are not loaded", skipped)
    extra = [name for name in manifest if name not in needed and not _is_redundant(name, config)]
    if config.stored.packing is not None and config.stored.packing.layout == "gptq":
        extra = [name for name in extra if not (name.endswith(GPTQ_ORDER) or _is_zero_bias(name, manifest))]
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


def _is_zero_bias(name: str, manifest: Mapping[str, StoredTensor]) -> bool:
    """Whether it is a bias of zeros, as AutoGPTQ writes of matrices that have none."""
    stored = manifest[name]
    if not name.endswith("_proj.bias") or len(stored.shape) != 1 or stored.dtype not in FLOAT_DTYPES:
        return False
    return not bool(_tensor(name, (slice(0, stored.shape[0]),), manifest).any())


def _bounds(numbers: Tensor, form: WeightFormat) -> Tensor:
    """Least and greatest weight ``[2]`` in the dtype of the storage, or as scales; both are NaN if a weight is."""
    bounds = _minmax(numbers)
    if form.is_quantized:
        return (bounds / largest_value(form.bits)).to(SCALE_DTYPE)
    return bounds.to(getattr(torch, form.dtype))


def _minmax(numbers: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(numbers)) if numbers.numel() else torch.zeros(2)


def _block_bounds(values: Tensor, scales: Tensor) -> Tensor:
    """Bounds of an FP8 matrix by its scales; NaN if one of its numbers is. FP8 has no infinity."""
    has_nan = bool((values.view(torch.uint8) & 127).eq(127).any())
    bounds = _minmax(scales) * FP8_MAX
    return bounds.fill_(torch.nan) if has_nan else bounds


def _check_finite(manifest: Mapping[str, StoredTensor], bounds: Mapping[str, Tensor]) -> None:
    """ValueError for weights with NaN or infinity, in the file or in memory."""
    wrong = [name for name, bound in bounds.items() if not bound.isfinite().all()]
    if wrong:
        bound = bounds[wrong[0]]
        what = "NaN" if bool(bound.isnan().any()) else f"infinity as {str(bound.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"{manifest[wrong[0]].file}: {wrong[0]} holds {what}; weights must be finite "
            f"({len(wrong)} of {len(bounds)} tensors are not)"
        )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    skipped = FAMILIES.get(config.architecture).skipped
    is_tied = config.tie_word_embeddings and name == LM_HEAD
    is_skipped = name.startswith(skipped) or any(part in name for part in skipped if part.startswith("."))
    is_skipped |= config.prediction_of > 0 and name.startswith((ELSEWHERE, EMBED))
    is_skipped |= config.stored.has_one_scale and name.endswith(INPUT_SCALE)
    is_skipped |= config.norms_experts_alone and f".{config.norms.after_mlp}." in name  # of layers without experts
    return name.endswith(ROTARY_BUFFER) or is_tied or is_skipped or _is_mtp(name, config) or _is_shared(name, config)


def _is_shared(name: str, config: ModelConfig) -> bool:
    """Whether it would make keys and values of a layer that attends to those of another."""
    if config.kv_sources is None:
        return False
    shared = (layer for layer, source in enumerate(config.kv_sources) if source != layer)
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    return name.startswith(tuple(f"model.layers.{layer}.self_attn.{part}" for layer in shared for part in parts))


def _is_mtp(name: str, config: ModelConfig) -> bool:
    """Whether it belongs to multi-token prediction, which is stored as layers after the last."""
    last = config.num_layers + config.num_mtp_layers
    return any(name.startswith(f"model.layers.{layer}.") for layer in range(config.num_layers, last))


def _listed(names: list[str], most: int = 3) -> str:
    """A few names and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")

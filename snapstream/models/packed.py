"""The tensors of a quantized matrix in a checkpoint, and their bytes.

In the form ``pack-quantized`` a matrix ``X.weight [out, in]`` is three tensors: ``X.weight_packed [out, in * bits /
32]`` int32, whose bytes are the codes of ``kernels/groups.py``; ``X.weight_scale [out, in / group]`` in a float dtype;
``X.weight_shape``, which holds out and in. In FP8 blocks it is ``X.weight [out, in]`` itself, e4m3, and
``X.weight_scale_inv [ceil(out / 128), ceil(in / 128)]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from snapstream.config import WeightForm
from snapstream.config.weights import FP8_BLOCK
from snapstream.kernels.groups import quantise
from snapstream.models.checkpoint import FLOAT_DTYPES, StoredTensor, open_shard, read_part
from snapstream.models.cuts import Cut
from snapstream.models.quantization import FP8_SCALES, SCALES

Shape = tuple[int, ...]
Wanted = tuple[Shape, tuple[str, ...]]  # of a tensor in a file: shape, and the dtypes that it may have
CODES, SHAPE = "_packed", "_shape"
FP8_STORED = "F8_E4M3"  # safetensors' name


def plain_name(name: str) -> str:
    """``X.weight`` of ``X.weight_packed``, and of itself."""
    return name.removesuffix(CODES)


def packed_tensors(name: str, shape: Shape, form: WeightForm) -> dict[str, Wanted]:
    """The tensors that stand for a matrix ``name`` of that shape."""
    num_out, num_in = shape
    if form.is_blocks:
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
    told = _tensor(name + SHAPE, (slice(0, 2),), manifest).tolist()
    if told != list(cut.whole):
        file = manifest[name + SHAPE].file
        raise ValueError(f"{file}: {name}{SHAPE} holds {told}; the config asks for {list(cut.whole)}")
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


def pack_matrix(name: str, numbers: Tensor, form: WeightForm) -> dict[str, Tensor]:
    """The tensors that stand for a matrix ``[out, in]``, scales in its dtype."""
    dtype = torch.float32 if numbers.dtype == torch.float64 else numbers.dtype
    codes, scales = quantise(numbers, form.bits, form.group, dtype)
    return {
        name + CODES: codes.view(torch.int32),
        name + SCALES: scales.to(dtype),
        name + SHAPE: torch.tensor(numbers.shape),
    }


def _tensor(name: str, place: tuple[slice, ...], manifest: Mapping[str, StoredTensor]) -> Tensor:
    """A part of a small tensor, wherever it lies."""
    with open_shard(manifest[name].file) as shard:
        return read_part(shard, name, place)

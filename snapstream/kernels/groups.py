"""Weights as small integers in groups: the meaning of int8 and int4, in plain PyTorch. Faster versions equal this.

Along the input of a matrix every ``group`` numbers share a scale in fp16, and a number is ``(code - offset) * scale``.
Codes are unsigned: of 8 bits with an offset of 128, of 4 bits with one of 8, two to a byte, the first in the low half.
That is how ``pack-quantized`` checkpoints lay their bytes too. Symmetric: zero stays zero. Of 8 bits the largest
magnitude of a group is 127. Of 4 bits it is -8, by a scale that has the other sign if need be: sixteen codes are in
use, not fifteen, for which a number of the same size and the other sign is cut to 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_DTYPE = torch.float16


def largest_value(bits: int) -> int:
    """The magnitude that stands for the largest of a group: 127 for 8 bits, 8 for 4."""
    return 127 if bits == 8 else 8


def quantize(x: Tensor, bits: int, group: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes ``[..., in * bits / 8]`` uint8 and scales ``[..., in / group]`` fp16 of ``x [..., in]``, any float dtype.

    ``in`` must be a multiple of ``group``, and no magnitude above ``65504 * largest_code``. Every scale is a number of
    ``dtype`` too, for files that keep scales in it.
    """
    least, most = (-127, 127) if bits == 8 else (-8, 7)
    groups = x.float().unflatten(-1, (-1, group))  # [..., in / group, group]
    if bits == 8:
        scales = groups.abs().amax(-1) / most
    else:
        scales = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1) / least
    scales = scales.to(dtype).to(SCALE_DTYPE)
    # In fp16 a scale may come to 0, where all codes are 0, or a little short, where the largest code stays.
    divisor = torch.where(scales == 0, torch.inf, scales.float())[..., None]
    codes = (groups / divisor).round_().clamp_(least, most).add_(2 ** (bits - 1))
    return pack(codes.flatten(-2).to(torch.uint8), bits), scales


def dequantize(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The numbers ``[..., in]`` fp32 that ``codes [..., in * bits / 8]`` and ``scales [..., in / group]`` stand for."""
    numbers = unpack(codes, bits).to(torch.float32).sub_(2 ** (bits - 1))
    return numbers.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.to(torch.float32)[..., None]).flatten(-2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes ``[..., in]``, one to a byte, as they are stored."""
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unsigned codes ``[..., in]`` uint8, one to a byte."""
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quantize_inputs(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """``x [T, in]`` as whole numbers ``[T, in]`` from -127 to 127, fp32, and scales ``[T, in / group]`` fp32.

    Scales never leave a product, so they need no narrow dtype. One below the least normal number is 0; what is not
    finite gives a scale that is not.
    """
    groups = x.float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1) / largest_value(8)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    return (groups / torch.where(scales == 0, 1.0, scales)[..., None]).round().flatten(-2), scales


def round_inputs(x: Tensor, group: int) -> Tensor:
    """``x [T, in]`` as it is after a trip through int8 per token and group, fp32: what a product of codes sees."""
    codes, scales = quantize_inputs(x, group)
    return (codes.unflatten(-1, (-1, group)) * scales[..., None]).flatten(-2)

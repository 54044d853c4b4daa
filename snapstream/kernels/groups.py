"""Weights as small integers in groups, in plain PyTorch, which faster versions equal.

Along the input of a matrix every ``group`` numbers share a scale in fp16, and a number is ``(code - offset) * scale``.
Codes are unsigned: of 8 bits with an offset of 128, of 4 bits with one of 8, two to a byte, the first in the low half.
That is how ``pack-quantized`` checkpoints lay their bytes too. Symmetric: zero stays zero. Of 8 bits the largest
magnitude of a group is 127. Of 4 bits it is -8, by a scale that has the other sign if need be: sixteen codes are in
use, not fifteen, for which a number of the same size and the other sign is cut to 7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.config.weights import IQ_NUMBERS, IQ_UNITS, WeightFormat

SCALE_DTYPE = torch.float16


def scale_dtype(form: WeightFormat) -> torch.dtype:
    """Of the scales of weights in groups."""
    return torch.uint8 if form.is_mxfp4 or form.is_k_quant else torch.int32 if form.is_uint4 else SCALE_DTYPE


def largest_value(bits: int) -> int:
    """The magnitude that stands for the largest of a group: 127 for 8 bits, 8 for 4."""
    return 127 if bits == 8 else 8


def over(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``, rounded to nearest on every device: by a Python number CUDA multiplies with its reciprocal."""
    return x / x.new_full((), divisor)


def quantize(x: Tensor, bits: int, group: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes ``[..., in * bits / 8]`` uint8 and scales ``[..., in / group]`` fp16 of ``x [..., in]``, any float dtype.

    ``in`` must be a multiple of ``group``, and no magnitude above ``65504 * largest_code``. Every scale is a number of
    ``dtype`` too, for files that keep scales in it.
    """
    least, most = (-127, 127) if bits == 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    groups = x.float().unflatten(-1, (-1, group))  # [..., in / group, group]
    largest = _largest(groups)
    scales = over(largest.abs(), most) if bits == 8 else largest / least
    scales = scales.to(dtype).to(SCALE_DTYPE)
    # In fp16 a scale may come to 0, where all codes are 0, or a little short, where the largest code stays.
    divisor = torch.where(scales == 0, torch.inf, scales.float())[..., None]
    codes = (groups / divisor).round_().clamp_(least, most).add_(2 ** (bits - 1))
    return pack(codes.flatten(-2).to(torch.uint8), bits), scales


def _largest(groups: Tensor) -> Tensor:
    """Of each group ``[..., n]`` the number of the largest magnitude; of two the negative one."""
    low, high = groups.amin(-1), groups.amax(-1)  # much faster than aminmax or argmax
    return torch.where(high > -low, high, low)


def dequantize(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The numbers ``[..., in]`` fp32 that ``codes [..., in * bits / 8]`` and ``scales [..., in / group]`` stand for."""
    numbers = unpack(codes, bits).to(torch.float32).sub_(2 ** (bits - 1))
    return numbers.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.to(torch.float32)[..., None]).flatten(-2)


# uint4: a number is ``code * scale + minimum``; codes of four bits are stored as those of int4. Scale and minimum of a
# group are fp16, side by side in an int32 of the tensor that has the scales of other formats.


def join_scales(scales: Tensor, minimums: Tensor) -> Tensor:
    """Scales of uint4 ``[..., n]`` int32, of scales and minimums ``[..., n]`` of any float dtype."""
    return torch.stack((scales, minimums), -1).to(SCALE_DTYPE).view(torch.int32).squeeze(-1)


def dequantize_uint4(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers ``[..., in]`` fp32 of ``codes [..., in / 2]`` uint8 and ``scales [..., in / group]`` int32."""
    own = scales.contiguous().view(SCALE_DTYPE).unflatten(-1, (-1, 2)).float()  # [..., in / group, 2]
    numbers = unpack(codes, 4).float().unflatten(-1, (scales.shape[-1], -1))
    return numbers.mul_(own[..., :1]).add_(own[..., 1:]).flatten(-2)


def quantize_uint4(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x [..., in]``: the least number of a group is code 0, the greatest 15."""
    groups = x.float().unflatten(-1, (-1, group))
    least, most = groups.aminmax(dim=-1)
    scales = join_scales(over(most - least, 15), least)
    own = scales.view(SCALE_DTYPE).unflatten(-1, (-1, 2)).float()
    divisor = torch.where(own[..., :1] == 0, torch.inf, own[..., :1])
    codes = ((groups - own[..., 1:]) / divisor).round_().clamp_(0, 15)
    return pack(codes.flatten(-2).to(torch.uint8), 4), scales


# K-quants of llama.cpp, with codes and scales in another order. A block of 256 numbers has an fp16 factor of its
# scales, one of its minimums if it has any, then an int8 per group for the scale and one for the minimum, each times
# its factor; of Q2_K one byte has both, of four bits without a sign. A number is ``(code - offset) * scale + minimum``;
# codes of IQ types are places in a table.
_K_OFFSETS = {"q3_k": 4, "q6_k": 32}
_K_CODES = {"q2_k": (0, 3), "q3_k": (0, 7), "q4_k": (0, 15), "q5_k": (0, 31), "q6_k": (0, 63)}  # in use


def k_scales(scales: Tensor, form: WeightFormat) -> list[Tensor]:
    """Scales ``[..., in / group]`` fp32, and minimums if there are any, of ``scales [..., in / 256, n]`` uint8."""
    factors = scales[..., : form.factor_bytes].contiguous().view(SCALE_DTYPE).float()  # [..., blocks, 1 or 2]
    factors *= IQ_UNITS.get(form.dtype, 1.0)
    own = scales[..., form.factor_bytes :]
    own = torch.cat((own & 15, own >> 4), -1) if form.has_packed_scales else own
    own = own.view(torch.int8).float().unflatten(-1, (factors.shape[-1], -1))
    return [line.flatten(-2) for line in (own * factors[..., None]).unbind(-2)]


def k_numbers(codes: Tensor, form: WeightFormat) -> Tensor:
    """What is times the scale, fp32 ``[..., in]``, of ``codes [..., in * bits / 8]``."""
    places = unpack(codes, form.bits)
    if form.dtype in IQ_NUMBERS:
        return torch.tensor(IQ_NUMBERS[form.dtype], dtype=torch.float32, device=codes.device)[places.int()]
    return places.float().sub_(_K_OFFSETS.get(form.dtype, 0))


def dequantize_k(codes: Tensor, scales: Tensor, form: WeightFormat) -> Tensor:
    """The numbers ``[..., in]`` fp32 of ``codes [..., in * bits / 8]`` and ``scales [..., in / 256, n]``, uint8."""
    lines = [line[..., None] for line in k_scales(scales, form)]
    numbers = k_numbers(codes, form).unflatten(-1, (-1, form.group)).mul_(lines[0])
    return (numbers.add_(lines[1]) if form.has_minimums else numbers).flatten(-2)


def quantize_k(x: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x [..., in]``: with minimums the least number of a group is code 0, otherwise the largest
    magnitude is the least code, both but for the rounding of scales to eight bits.
    """
    groups = x.float().unflatten(-1, (-1, form.group))
    table = torch.tensor(IQ_NUMBERS.get(form.dtype, ()), dtype=torch.float32, device=x.device)
    offset = _K_OFFSETS.get(form.dtype, 0)
    least, most = _K_CODES.get(form.dtype, (0, 0))
    if form.has_minimums:
        low, high = groups.aminmax(dim=-1)
        low = low.clamp(max=0.0) if form.has_packed_scales else low  # a factor has one sign
        wanted = [over(high - low, most), low]
    else:
        wanted = [over(_largest(groups), IQ_NUMBERS[form.dtype][0] if len(table) else least - offset)]
    blocks = torch.stack(wanted, -2).unflatten(-1, (-1, form.block // form.group)).movedim(-3, -2)
    unit = IQ_UNITS.get(form.dtype, 1.0)
    largest = 15 if form.has_packed_scales else 127
    factors = over(blocks.abs().amax(-1), largest * unit).to(SCALE_DTYPE)  # [..., blocks, 1 or 2]
    if form.has_packed_scales:
        factors[..., 1].neg_()
    divisor = torch.where(factors == 0, torch.inf, factors.float() * unit)[..., None]
    own = (blocks / divisor).round_().clamp_(-largest, largest).to(torch.int8)
    own = own[..., :1, :] | own[..., 1:, :] << 4 if form.has_packed_scales else own
    scales = torch.cat((factors.view(torch.uint8), own.flatten(-2).view(torch.uint8)), -1)
    lines = [line[..., None] for line in k_scales(scales, form)]
    numbers = (groups - lines[1] if form.has_minimums else groups) / torch.where(lines[0] == 0, torch.inf, lines[0])
    if len(table):
        codes = torch.bucketize(numbers.contiguous(), (table[1:] + table[:-1]) / 2)
    else:
        codes = numbers.round_().add_(offset).clamp_(least, most)
    return pack(codes.flatten(-2).to(torch.uint8), form.bits), scales


# MXFP4 (OCP Microscaling Formats 1.0): codes of four bits, sign, two of the exponent, one of the fraction, and a scale
# of eight bits per 32 numbers, a power of two.
_MXFP4_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitude of a code
_MXFP4_BIAS = 127
MXFP4_NAN = 255  # the one scale that is no number


def dequantize_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers ``[..., in]`` fp32 of ``codes [..., in / 2]`` and ``scales [..., in / 32]``, both uint8."""
    table = torch.tensor([*_MXFP4_HALVES, *(-half for half in _MXFP4_HALVES)], dtype=torch.float32) / 2
    numbers = table.to(codes.device)[unpack(codes, 4).int()].unflatten(-1, (scales.shape[-1], -1))
    return torch.ldexp(numbers, (scales.int() - _MXFP4_BIAS)[..., None]).flatten(-2)


def quantize_mxfp4(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x [..., in]``: the largest magnitude of a group has the largest exponent, ties are away
    from zero, what is too large is 6 times the scale (section 6.3).
    """
    groups = x.float().unflatten(-1, (-1, group))
    exponent = torch.frexp(groups.abs().amax(-1)).exponent - 3  # of 2^(e - 1) <= x < 2^e, less that of 4
    scales = (exponent + _MXFP4_BIAS).clamp(0, MXFP4_NAN - 1)
    halves = torch.ldexp(groups, (_MXFP4_BIAS + 1 - scales)[..., None])
    table = torch.tensor(_MXFP4_HALVES, dtype=torch.float32, device=x.device)
    codes = torch.bucketize(halves.abs().contiguous(), (table[1:] + table[:-1]) / 2, right=True)
    return pack((codes + 8 * (halves < 0)).flatten(-2).to(torch.uint8), 4), scales.to(torch.uint8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes ``[..., in]``, one to a byte, as they are stored. Of two, three, five and six bits as panels have
    them (``cpu/looped/panels.h``): of three the lower two of sixteen numbers, then the third ones, of five and six the
    lower four of 32 or sixteen numbers, then the others.
    """
    if bits in (2, 3):
        quads = codes.unflatten(-1, (-1, 4, 4))
        low, high = _interleave(quads & 3, 2), quads >> 2
        if bits == 2:
            return low.flatten(-2)
        return torch.cat((low, _interleave(torch.cat(high.split(2, -1), -2), 1)), -1).flatten(-2)
    if bits in (5, 6):
        quads = codes.unflatten(-1, (-1, 8 // (bits - 4), 4))  # [..., units, 8 or 4, 4]
        low = quads & 15
        halves = low[..., ::2, :] | low[..., 1::2, :] << 4
        return torch.cat((halves, _interleave(quads >> 4, bits - 4)[..., None, :]), -2).flatten(-3)
    if bits == 8:
        return codes
    both = codes.contiguous().view(torch.int16)  # little-endian: the first in the lower byte
    return (both & 15 | both >> 4).to(torch.uint8)


def _interleave(lines: Tensor, bits: int) -> Tensor:
    """Bytes ``[..., n]`` of ``lines [..., 8 / bits, n]``: the first in the lowest bits."""
    return (lines << torch.arange(0, 8, bits, dtype=torch.uint8, device=lines.device)[:, None]).sum(-2).to(torch.uint8)


def _lines(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``_interleave``."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return packed.unsqueeze(-2) >> places & 2**bits - 1


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unsigned codes ``[..., in]`` uint8, one to a byte."""
    if bits == 2:
        return _lines(packed.unflatten(-1, (-1, 4)), 2).flatten(-3)
    if bits == 3:
        units = packed.unflatten(-1, (-1, 6))
        high = torch.cat(_lines(units[..., 4:], 1).split(4, -2), -1)
        return (_lines(units[..., :4], 2) | high << 2).flatten(-3)
    if bits in (5, 6):
        lines = packed.unflatten(-1, (-1, 4 // (bits - 4) + 1, 4))  # [..., units, 5 or 3, 4]
        halves = lines[..., :-1, :]
        low = torch.stack((halves & 15, halves >> 4), -2).flatten(-3, -2)  # [..., units, 8 or 4, 4]
        return (low | _lines(lines[..., -1, :], bits - 4) << 4).flatten(-3)
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the number in each four bits of a word of AWQ checkpoints


def unpack_words(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned numbers, int16, of int32 ``words`` that hold ``32 / bits`` of them along ``dim``, the lowest bits first.

    ``order``: the place among them of each number, by its bits.
    """
    places = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    if order is not None:
        places = places[torch.tensor(order, device=words.device).argsort()]
    numbers = (words.unsqueeze(dim + 1) >> places.view(-1, *[1] * (words.dim() - dim - 1))) & (2**bits - 1)
    return numbers.flatten(dim, dim + 1).to(torch.int16)


MOST_INT8, MOST_INT16 = 127, 16383  # of an input; a sum of 32 products with weights up to 4,095 fits 32 bits


def quantize_inputs(x: Tensor, group: int, most: int = MOST_INT8) -> tuple[Tensor, Tensor]:
    """``x [T, in]`` as whole numbers ``[T, in]`` from -most to most, fp32, and scales ``[T, in / group]`` fp32.

    Scales never leave a product, so they need no narrow dtype. One below the least normal number is 0; what is not
    finite gives a scale that is not.
    """
    groups = x.float().unflatten(-1, (-1, group))
    scales = over(groups.abs().amax(-1), most)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    return (groups / torch.where(scales == 0, 1.0, scales)[..., None]).round().flatten(-2), scales


def round_inputs(x: Tensor, group: int, most: int = MOST_INT8) -> Tensor:
    """``x [T, in]`` as it is after a trip through int8, or int16, per token and group, fp32: what a product sees."""
    codes, scales = quantize_inputs(x, group, most)
    return (codes.unflatten(-1, (-1, group)) * scales[..., None]).flatten(-2)

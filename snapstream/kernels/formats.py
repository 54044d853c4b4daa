"""How rows store numbers: for each format of ``config.ROW_FORMATS`` its dtype, its scales, and the rounding.

To add a format edit ``config/values.py`` (size, limits, help) and this file (arithmetic); that is all for eager decode
on a CPU. The looped CPU library has a struct per format in ``kernels/cpu/looped/rows.h``, and an entry in ``Format``
(``abi.h`` and ``library.py``) per type of number; GPUs read rows in ``kernels/triton/rows.py`` and ``attention.py``.

K and V have formats and scales of their own (``config.row_formats``). Scales are fp32. In ``fp8`` (e4m3fn: at most 448,
no infinity) a scale per layer, row and kv head is fixed when a prompt is written, from the largest magnitude of the
whole prompt, and holds for the tokens that decode adds. The headroom for those, a factor of 3.5 to 7, costs little,
because precision is lost only below ``2^-12`` of the largest; larger numbers saturate. The scale is a power of two:
dividing by it rounds nothing in any dtype, so every kernel stores the same bits. In ``int8`` every slot has a scale
from its own token, the largest magnitude over 127; nothing saturates. For a head of 64 numbers the scales are a
sixteenth of the bytes.

``int4`` rotates a token's key and value by an orthonormal Walsh-Hadamard matrix before rounding, in blocks of the
largest power of two that divides the head, so that an outlier channel is spread over its block (QuaRot, arXiv
2404.00456, section 4; of K alone in arXiv 2604.19157). The matrix is its own inverse, and a product of two rotated
vectors is that of the vectors: attention rotates q instead of K, and its output instead of V. A group x of 32 rotated
numbers has codes and a scale d, with m the number of largest magnitude (the positive of two):

    q_i = clamp(round(x_i / (-m / 8)), -8, 7)        d = sum(x_i^2 q_i x_i) / sum(x_i^2 q_i^2)

d is the scale of least squared error weighted by x^2. A group is 18 bytes: d in fp16, then the codes in two's
complement, two to a byte, the first in the low half. There is no tensor of scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from snapstream.config import ROW_FORMATS, RowFormat
from snapstream.kernels import groups

Scales = tuple[Tensor, Tensor]  # of K and of V: [rows+1, G] fp32, per slot [rows+1, G, C]

FP8_MAX = 448.0  # the next number up would be NaN: casts must be clamped

_FP8_EXPONENT = 7  # the largest magnitude is stored as 64 to 128
_FP8_LIMIT = 119  # exponents of scales: 448 x 2^119 and 1 / 2^119 are still fp32
_STORED_AT_ONCE = 4096  # tokens that are scaled in fp32 at a time


def _same(x: Tensor) -> Tensor:
    return x


def _no_scale(*args: Tensor) -> Tensor:
    raise TypeError("this row format has no scales")


@dataclass(frozen=True, slots=True)
class Encoding:
    """A row format in PyTorch. ``scale`` may lack trailing dimensions of the numbers, along which it is constant.

    ``scale_of``: scales ``[G]`` (per head) or ``[G, n]`` (per slot) of ``tokens [G, n, E]``. ``scaled``: numbers over
    a scale, in fp32 and in range, before the cast to ``dtype`` rounds them. Formats without scales have neither.
    ``pack``: the elements of ``dtype`` that store the numbers of a head; ``unpack``: back. ``rotate``: its own inverse,
    applied to a head before ``pack`` and after ``unpack``.
    """

    format: RowFormat
    dtype: torch.dtype
    scale_of: Callable[[Tensor], Tensor] = _no_scale
    scaled: Callable[[Tensor, Tensor], Tensor] = _no_scale
    pack: Callable[[Tensor], Tensor] = _same
    unpack: Callable[[Tensor], Tensor] = _same
    rotate: Callable[[Tensor], Tensor] = _same

    def width(self, num: int) -> int:
        """How many elements of ``dtype`` store a head of ``num`` numbers. ValueError for a head of part groups."""
        if num % self.format.group:
            raise ValueError(
                f"{self.format.name} rows have groups of {self.format.group} numbers; a head of {num} is no multiple"
            )
        return self.format.num_bytes(num) // self.dtype.itemsize

    def encode(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """``x`` as it is stored; without a scale packed and cast."""
        return self.pack(self.rotate(x) if scale is None else self.scaled(x, spread(scale, x))).to(self.dtype)

    def rotated(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        """The numbers that ``stored`` stands for, still rotated, fp32."""
        if scale is None:
            return self.unpack(stored).float()
        return self.unpack(stored).to(torch.float32, copy=True).mul_(spread(scale, stored))

    def decode(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        """The numbers that ``stored`` stands for, fp32."""
        return self.rotate(self.rotated(stored, scale))

    def store(self, place: Tensor, scale: Tensor | None, tokens: Tensor) -> None:
        """Put ``tokens [G, n, E]`` into ``place [G, n, E]``, a view of rows.

        A ``scale`` per head ``[G]`` is read, one per slot ``[G, n]`` is written.
        """
        if scale is None and self.format.group == 1:
            place.copy_(tokens)
            return
        for start in range(0, tokens.shape[-2], _STORED_AT_ONCE):
            block = slice(start, start + _STORED_AT_ONCE)
            part, own = tokens[..., block, :], scale
            if scale is not None and self.format.scales == "slot":
                own = self.scale_of(part)
                scale[..., block] = own
            place[..., block, :] = self.encode(part, own)


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """``scale`` with trailing dimensions of size 1, as many as ``like`` has."""
    return scale[(..., *[None] * (like.dim() - scale.dim()))]


def _fp8_scale(tokens: Tensor) -> Tensor:
    """One scale for ``tokens [G, n, E]`` of a prompt and those that will follow: ``[G]``; 1 where all are zero."""
    largest: Tensor = torch.linalg.vector_norm(tokens, float("inf"), dim=(-2, -1)).float()
    exponent = torch.frexp(largest.clamp(max=torch.finfo(torch.float32).max)).exponent
    scale = torch.exp2((exponent - _FP8_EXPONENT).clamp(-_FP8_LIMIT, _FP8_LIMIT).float())
    return torch.where(largest == 0, 1.0, scale)


def _fp8_scaled(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)


def _slot_scale(tokens: Tensor, most: int) -> Tensor:
    """Scales ``[...]`` of ``tokens [..., E]``, whose largest magnitudes become ``most``; 0 instead of a subnormal
    number, not finite where a number is not.
    """
    scale = groups.over(tokens.float().abs().amax(-1), most)
    return torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)


def _whole(x: Tensor, scale: Tensor) -> Tensor:
    """Rounded to nearest even; 0 where a scale is 0 or not finite."""
    is_used = (scale != 0) & scale.isfinite()
    return torch.where(is_used, (x.float() / torch.where(is_used, scale, 1.0)).round(), 0.0)


FP8 = Encoding(ROW_FORMATS["fp8"], torch.float8_e4m3fn, _fp8_scale, _fp8_scaled)
INT8 = Encoding(ROW_FORMATS["int8"], torch.int8, partial(_slot_scale, most=127), _whole)


def hadamard(x: Tensor) -> Tensor:
    """``x [..., E]`` times the orthonormal Walsh-Hadamard matrix of the largest power of two that divides E, block by
    block: fp32. The looped library adds in this order, so the bits are equal.
    """
    size = x.shape[-1] & -x.shape[-1]
    x, half = x.float(), 1
    while half < size:
        low, high = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x, half = torch.stack((low + high, low - high), -2).flatten(-3), 2 * half
    return x * size**-0.5


_GROUP = ROW_FORMATS["int4"].group
_FP16_MAX = torch.finfo(torch.float16).max


def _pack_groups(x: Tensor) -> Tensor:
    """Groups of ``x [..., E]`` as bytes ``[..., E / 32 * 18]``; one with a number that is not finite becomes NaN."""
    own = x.float().unflatten(-1, (-1, _GROUP))  # [..., E / 32, 32]
    most, least = own.amax(-1, keepdim=True), own.amin(-1, keepdim=True)
    first = torch.where(most >= -least, most, least) / -8
    is_used = (first != 0) & first.isfinite()
    codes = torch.where(is_used, (own / torch.where(is_used, first, 1.0)).round().clamp(-8, 7), 0.0)
    wide, weighted = own.double(), codes.double() * own.double()  # fp64: in any order the same fp16
    error = (weighted * weighted).sum(-1, keepdim=True)
    refined = (weighted * wide * wide).sum(-1, keepdim=True) / torch.where(error == 0, 1.0, error)
    scale = refined.float().clamp(-_FP16_MAX, _FP16_MAX)
    scale = torch.where(first.isfinite(), torch.where(is_used, scale, 0.0), torch.nan).half()
    packed = groups.pack(codes.to(torch.int8).view(torch.uint8) & 15, 4)
    return torch.cat((scale.view(torch.uint8), packed), -1).flatten(-2)


def _unpack_groups(stored: Tensor) -> Tensor:
    """The numbers ``[..., E]`` fp32 of groups of bytes ``[..., E / 32 * 18]``."""
    own = stored.unflatten(-1, (-1, ROW_FORMATS["int4"].num_bytes(_GROUP)))
    codes = (groups.unpack(own[..., 2:], 4) ^ 8).view(torch.int8) - 8
    return (codes.float() * own[..., :2].contiguous().view(torch.float16).float()).flatten(-2)


INT4 = Encoding(ROW_FORMATS["int4"], torch.uint8, pack=_pack_groups, unpack=_unpack_groups, rotate=hadamard)
ENCODINGS: dict[str, Encoding] = {
    "float32": Encoding(ROW_FORMATS["float32"], torch.float32),
    "bfloat16": Encoding(ROW_FORMATS["bfloat16"], torch.bfloat16),
    "float16": Encoding(ROW_FORMATS["float16"], torch.float16),
    "fp8": FP8,
    "int8": INT8,
    "int4": INT4,
}
_BY_DTYPE = {encoding.dtype: encoding for encoding in ENCODINGS.values()}


def encoding_of(stored: Tensor) -> Encoding:
    """The encoding of a tensor of rows, by its dtype."""
    return _BY_DTYPE[stored.dtype]

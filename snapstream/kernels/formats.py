"""How rows store numbers: for each format of ``config.ROW_FORMATS`` its dtype, its scales, and the rounding.

To add a format edit ``config/values.py`` (size, limits, help) and this file (arithmetic); that is all for eager decode
on a CPU. The looped CPU library has a struct per format in ``kernels/cpu/looped/rows.h``, and an entry in ``Format``
(``abi.h`` and ``library.py``) per type of number; GPUs read rows in ``kernels/triton/rows.py`` and ``attention.py``.

Scales are fp32, and K and V have their own. In ``fp8`` (e4m3fn: at most 448, no infinity) a scale per layer, row and kv
head is fixed when a prompt is written, from the largest magnitude of the whole prompt, and holds for the tokens that
decode adds. The headroom for those, a factor of 3.5 to 7, costs little, because precision is lost only below ``2^-12``
of the largest; larger numbers saturate. The scale is a power of two: dividing by it rounds nothing in any dtype, so
every kernel stores the same bits. In ``int8`` and ``int4`` every slot has a scale from its own token, the largest
magnitude over 127 or 7; nothing saturates. For a head of 64 numbers the scales are a sixteenth of the bytes of
``int8``. Codes of ``int4`` are two's complement, two to a byte, the first in the low half.
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
    ``pack``: what lies in one element of ``dtype`` together, from the numbers of a head; ``unpack``: back.
    """

    format: RowFormat
    dtype: torch.dtype
    scale_of: Callable[[Tensor], Tensor] = _no_scale
    scaled: Callable[[Tensor, Tensor], Tensor] = _no_scale
    pack: Callable[[Tensor], Tensor] = _same
    unpack: Callable[[Tensor], Tensor] = _same

    def width(self, num: int) -> int:
        """How many elements of ``dtype`` store a head of ``num`` numbers. ValueError if they do not fill them."""
        elements, left = divmod(num * self.format.bits, 8 * self.dtype.itemsize)
        if left:
            raise ValueError(f"{self.format.name} rows pack numbers into bytes; a head of {num} numbers fills no byte")
        return elements

    def encode(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """``x`` as it is stored; without a scale only cast."""
        return self.pack(x if scale is None else self.scaled(x, spread(scale, x))).to(self.dtype)

    def decode(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        """The numbers that ``stored`` stands for, fp32."""
        if scale is None:
            return stored.float()
        return self.unpack(stored).to(torch.float32, copy=True).mul_(spread(scale, stored))

    def store(self, place: Tensor, scale: Tensor | None, tokens: Tensor) -> None:
        """Put ``tokens [G, n, E]`` into ``place [G, n, E]``, a view of rows.

        A ``scale`` per head ``[G]`` is read, one per slot ``[G, n]`` is written.
        """
        if scale is None:
            place.copy_(tokens)
            return
        for start in range(0, tokens.shape[-2], _STORED_AT_ONCE):
            block = slice(start, start + _STORED_AT_ONCE)
            part, own = tokens[..., block, :], scale
            if self.format.scales == "slot":
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
    scale = tokens.float().abs().amax(-1) / most
    return torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)


def _whole(x: Tensor, scale: Tensor) -> Tensor:
    """Rounded to nearest even; 0 where a scale is 0 or not finite."""
    is_used = (scale != 0) & scale.isfinite()
    return torch.where(is_used, (x.float() / torch.where(is_used, scale, 1.0)).round(), 0.0)


FP8 = Encoding(ROW_FORMATS["fp8"], torch.float8_e4m3fn, _fp8_scale, _fp8_scaled)
INT8 = Encoding(ROW_FORMATS["int8"], torch.int8, partial(_slot_scale, most=127), _whole)
INT4 = Encoding(
    ROW_FORMATS["int4"], torch.uint8, partial(_slot_scale, most=7), _whole,
    pack=lambda codes: groups.pack(codes.to(torch.int8).view(torch.uint8) & 15, 4),
    unpack=lambda stored: (groups.unpack(stored, 4) ^ 8).view(torch.int8) - 8,
)  # fmt: skip
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

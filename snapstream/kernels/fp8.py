"""Rows in FP8: eight-bit numbers (e4m3fn: 448 at most, no infinity) times an fp32 scale per layer, row and kv head.

K and V have scales of their own. A row's are fixed when a prompt is written to it, from the largest magnitude of the
whole prompt in that layer and head, and hold for the tokens that decode adds. The headroom for those, a factor of 3.5
to 7, costs little: the numbers float, and precision is lost only below ``2^-12`` of the largest. Larger numbers
saturate. A scale is a power of two: scaling then rounds nothing, in any dtype, and every kernel stores the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
MAX = 448.0  # the next number up would be NaN: casts must be clamped
Scales = tuple[Tensor, Tensor]  # of K and of V, [rows+1, G] fp32

_EXPONENT = 7  # the largest magnitude is stored as 64 to 128
_LIMIT = 119  # exponents of scales: 448 x 2^119 and 1 / 2^119 are still fp32


def scale_of(tokens: Tensor) -> Tensor:
    """Scale ``[G]`` fp32 for ``tokens [G, N, E]`` of a prompt and those that will follow; 1 where all are zero."""
    largest: Tensor = torch.linalg.vector_norm(tokens, float("inf"), dim=(1, 2)).float()
    exponent = torch.frexp(largest.clamp(max=torch.finfo(torch.float32).max)).exponent
    scale = torch.exp2((exponent - _EXPONENT).clamp(-_LIMIT, _LIMIT).float())
    return torch.where(largest == 0, 1.0, scale)


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale`` in FP8, rounded to nearest even and saturated; ``scale`` is broadcast."""
    return saturated(x, scale).to(DTYPE)


def saturated(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale`` in fp32 within what FP8 holds: the cast that is left rounds and does no more."""
    return (x.float() / scale).clamp(-MAX, MAX)


def dequantise(x: Tensor, scale: Tensor) -> Tensor:
    """The numbers that FP8 ``x`` stands for, fp32."""
    return x.float() * scale

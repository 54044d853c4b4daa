"""Rows in int8: whole numbers from -127 to 127 times an fp32 scale per layer, row, kv head and slot.

A slot's scale follows from its own token, so nothing is fixed beforehand and nothing saturates; K and V have scales of
their own. For a head of 64 numbers the scale is a sixteenth of the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.int8
MAX = 127


def scale_of(tokens: Tensor) -> Tensor:
    """Scales ``[...]`` fp32 of ``tokens [..., E]``; 0 where all are zero, or too small for a normal number.

    What is not finite gives a scale that is not.
    """
    scale = tokens.float().abs().amax(-1) / MAX
    return torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """``x [..., E] / scale [...]``, rounded to nearest even; 0 where a scale is 0 or not finite."""
    is_used = (scale != 0) & scale.isfinite()
    codes = (x.float() / torch.where(is_used, scale, 1.0)[..., None]).round()
    return torch.where(is_used[..., None], codes, 0.0).to(DTYPE)


def dequantise(x: Tensor, scale: Tensor) -> Tensor:
    """The numbers that int8 ``x [..., E]`` stands for, fp32."""
    return x.float() * scale[..., None]

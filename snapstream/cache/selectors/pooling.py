"""Scores smoothed along the candidates, so that neighbours of a hit are kept with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_HALVINGS = 32  # a score that halved as often is carried no further


def pool_max(scores: Tensor, width: int) -> Tensor:
    """The best of ``scores [G, n]`` within an odd ``width`` around each candidate, stride 1, nothing outside."""
    return F.max_pool1d(scores[None], width, stride=1, padding=width // 2)[0]


def carry_ahead(scores: Tensor, half_life: int) -> Tensor:
    """``out[g, j] = max over d of scores[g, j - d] * 2^(-d / half_life)`` for scores >= 0, in doubling steps.

    After steps of 1, 2, 4 ... every score has reached twice as far ahead, so a few passes do for any distance; a
    half-life of 0 carries nothing. ``kernels/reference.py`` has the plain meaning.
    """
    out, step = scores.clone(), 1
    while step < min(scores.shape[-1], MAX_HALVINGS * half_life):
        carried = out[:, :-step] * 2.0 ** (-step / half_life)  # a copy: the next line writes what it was read from
        torch.maximum(out[:, step:], carried, out=out[:, step:])
        step *= 2
    return out

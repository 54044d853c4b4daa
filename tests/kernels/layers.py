"""A layer of rows out of tensors of one layer, for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from snapstream.kernels.rows import LayerRows


def one_layer(k: Tensor, v: Tensor, scales: Sequence[Tensor] = ()) -> LayerRows:
    """``k, v [rows+1, G, C, E]``; for rows in FP8 the scales of both, ``[rows+1, G]``."""
    return LayerRows(k[None], v[None], 0, *(scale[None] for scale in scales))

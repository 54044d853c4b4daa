"""The seam between a layer and its cache.

A layer never knows whether it prefills or decodes: it hands the projected heads to a view and gets attended heads back.
The staging view (prefill) and the rows view (decode) of ``models/views.py`` implement it; a test needs ten lines.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from snapstream.kernels.bound import CosSin, HeadNorm


class KVView(Protocol):
    """Norms and rotates the heads of one layer, stores its keys and values, attends over all that is visible."""

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin) -> Tensor:
        """``heads [T, H+2G, E]`` (q | k | v) as projected; returns ``[T', H, E]`` of the same dtype.

        T' is T, or fewer where only some tokens need an output: the last of each prompt, in the last layer.
        """
        ...

"""The seam between a decoder and its cache.

A layer never knows whether it prefills or decodes: it hands q, k and v to a view and gets the attended heads
back. The staging view (prefill) and the rows view (decode) of ``runner/`` implement it; a test needs ten
lines. A ``FusingView`` takes the heads as they were projected, so that a kernel may norm, rotate and store them in one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from snapstream.kernels.bound import CosSin, HeadNorm


class KVView(Protocol):
    """Stores keys and values of one layer and attends over all that is visible."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotated ``q [T, H, E]`` and ``k [T, G, E]``, ``v [T, G, E]``; returns ``[T, H, E]``, same dtype."""
        ...


class FusingView(ABC):
    """Can norm, rotate and store the heads of a layer by itself."""

    @abstractmethod
    def attend_heads(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin) -> Tensor:
        """``heads [T, H+2G, E]`` (q | k | v) before norm and rotation; returns ``[T, H, E]``."""

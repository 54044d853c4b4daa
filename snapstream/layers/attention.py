"""The seam between a decoder and its cache.

A layer never knows whether it prefills or decodes: it hands q, k and v to a view and gets the attended heads
back. The staging view (prefill) and the rows view (decode) of ``runner/`` implement it; a test needs ten
lines.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KVView(Protocol):
    """Stores keys and values of one layer and attends over all that is visible."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotated ``q [T, H, E]`` and ``k [T, G, E]``, ``v [T, G, E]``; returns ``[T, H, E]``, same dtype."""
        ...

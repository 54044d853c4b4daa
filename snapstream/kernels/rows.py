"""The handle through which kernels see one layer of all rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from snapstream.kernels.fp8 import Scales


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Stored tensors of one layer, as views of the stacks; FP8 rows have scales.

    The stacks stay in the handle because an operator of a compiled graph must write to a whole tensor, not to a view.
    Where values are the first numbers of the keys (latents), ``values`` is a view of ``keys`` and nothing is written
    to it.
    """

    keys: Tensor  # [L, rows+1, G, C, E], all layers
    values: Tensor  # [L, rows+1, G, C, E']
    layer: int
    key_scales: Tensor | None = None  # [L, rows+1, G] fp32
    value_scales: Tensor | None = None  # [L, rows+1, G] fp32
    values_are_keys: bool = False

    @property
    def k(self) -> Tensor:
        """Keys of this layer ``[rows+1, G, C, E]``."""
        return self.keys[self.layer]

    @property
    def v(self) -> Tensor:
        """Values of this layer ``[rows+1, G, C, E']``."""
        return self.values[self.layer]

    @property
    def scales(self) -> Scales | None:
        """Scales of K and V ``[rows+1, G]``; None unless rows are FP8."""
        if self.key_scales is None or self.value_scales is None:
            return None
        return self.key_scales[self.layer], self.value_scales[self.layer]

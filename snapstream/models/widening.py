"""One layer's narrow matrices in the numbers that are computed with, in a buffer that all layers share.

Prefill goes layer by layer, so a layer is widened once per pass, not once per chunk. Invariant: the buffer holds the
layer that was asked for last; passes that take turns within a layer share what is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.kernels.bound import Kernels
from snapstream.models.weight import Dense, Weight


class Stack(NamedTuple):
    """A role's narrow matrices ``[L', out, in]`` and the layers that have one."""

    matrices: Weight
    layers: range


class Rounding(Dense):
    """Sees what it is multiplied with after a trip through bf16, as prefill's looped products do (``panels.py``)."""

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply``."""
        return super().multiply(x.to(torch.bfloat16).to(x.dtype), bias, kernels)


class WideBuffer:
    """Room for the widest form of one layer."""

    def __init__(
        self, stacks: Mapping[str, Stack], dtype: torch.dtype, device: torch.device | str, *, rounds: bool = False
    ) -> None:
        """``stacks``: the narrow matrices of all layers by role; ``rounds``: see ``WeightForms.rounds_prefill``."""
        self._stacks = stacks
        self._form: type[Dense] = Rounding if rounds else Dense
        self._data = {
            role: torch.empty(stack.matrices.shape[1:], dtype=dtype, device=device) for role, stack in stacks.items()
        }
        self._layer: int | None = None  # the one that it holds

    @property
    def num_bytes(self) -> int:
        return sum(data.nbytes for data in self._data.values())

    def matrices(self, layer: int) -> dict[str, Weight]:
        """The buffer by role, as far as this layer has the role: for when it holds the layer."""
        return {role: self._form(self._data[role]) for role, stack in self._stacks.items() if layer in stack.layers}

    def hold(self, layer: int) -> None:
        """Widen a layer, unless it is there."""
        if layer == self._layer:
            return
        self._layer = None  # in case a widening is broken off
        for role, stack in self._stacks.items():
            if layer in stack.layers:
                stack.matrices[stack.layers.index(layer)].widen(self._data[role])
        self._layer = layer

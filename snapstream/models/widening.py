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
from snapstream.models.weight import Dense, Index, Weight


class Stack(NamedTuple):
    """A role's narrow matrices ``[L', out, in]`` and the layers that have one."""

    matrices: Weight
    layers: range


class Rounding(Dense):
    """Sees what it is multiplied with after a trip through bf16, as prefill's looped products do (``panels.py``)."""

    def __getitem__(self, index: Index) -> Rounding:
        return Rounding(self.data[index])

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply``."""
        return super().multiply(x.to(torch.bfloat16).to(x.dtype), bias, kernels)


class RoundingExperts(Weight):
    """The same of matrices of experts, which are not widened beforehand: a view of what is stored."""

    def __init__(self, own: Weight) -> None:
        self._own = own

    @property
    def shape(self) -> tuple[int, ...]:
        return self._own.shape

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes

    def __getitem__(self, index: Index) -> Weight:
        return self._own[index]

    def fill(self, numbers: Tensor) -> None:
        """See ``Weight.fill``."""
        self._own.fill(numbers)

    def dense(self) -> Tensor:
        """See ``Weight.dense``."""
        return self._own.dense()

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """A TypeError: there is a matrix per expert."""
        raise TypeError("matrices of experts are multiplied with the tokens of each")

    def multiply_grouped(self, x: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply_grouped``."""
        return self._own.multiply_grouped(x.to(torch.bfloat16).to(x.dtype), ends, kernels)

    def lookup(self, token_ids: Tensor) -> Tensor:
        """See ``Weight.lookup``."""
        return self._own.lookup(token_ids)


class WideBuffer:
    """Room for the widest form of one layer."""

    def __init__(
        self, stacks: Mapping[str, Stack], dtype: torch.dtype, device: torch.device | str, *, rounds: bool = False
    ) -> None:
        """``stacks``: the narrow matrices of all layers by role; ``rounds``: see ``WeightForms.rounds_prefill``."""
        self._stacks = stacks
        self._form: type[Dense] = Rounding if rounds else Dense
        self._rounds = rounds
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

    def experts(self, stored: Mapping[str, Weight]) -> dict[str, Weight]:
        """Of a layer's matrices as they are ``stored`` those of experts, as prefill multiplies with them."""
        found = {role: weight for role, weight in stored.items() if len(weight.shape) == 3}
        return {role: RoundingExperts(weight) for role, weight in found.items()} if self._rounds else found

    def hold(self, layer: int) -> None:
        """Widen a layer, unless it is there."""
        if layer == self._layer:
            return
        self._layer = None  # in case a widening is broken off
        for role, stack in self._stacks.items():
            if layer in stack.layers:
                stack.matrices[stack.layers.index(layer)].widen(self._data[role])
        self._layer = layer

"""The weights of a decoder, stored once per role as ``[L, out, in]``.

Invariant: a layer's parameters are views of the stacks, never copies, so that one kernel can walk all layers with a
stride and a loader can fill the stacks in any order. Roles and shapes are the family's (``families.py``); how a matrix
lies in memory is the ``Matrix``'s business (``weight.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.config import ModelConfig, WeightFormats
from snapstream.models.matrix import MakeMatrix, Matrix, make_matrix
from snapstream.models.registry import tensor_specs
from snapstream.models.sharding import format_of, is_dequantized
from snapstream.models.tensors import Place, stacked_shape

# One layer's narrow matrices in the numbers that are computed with, in a buffer that all layers share.
#
# Prefill goes layer by layer, so a layer is widened once per pass, not once per chunk. Invariant: the buffer holds the
# layer that was asked for last; passes that take turns within a layer share what is there.


class Stack(NamedTuple):
    """A role's narrow matrices ``[L', out, in]`` and the layers that have one."""

    matrices: Matrix
    layers: range


class DequantizedLayer:
    """Room for the widest form of one layer."""

    def __init__(
        self, stacks: Mapping[str, Stack], dtype: torch.dtype, device: torch.device | str, *, rounds: bool = False
    ) -> None:
        """``stacks``: the narrow matrices of all layers by role; ``rounds``: see ``WeightFormats.rounds_prefill``."""
        self._stacks = stacks
        self._rounds = rounds
        self._data = {
            role: torch.empty(stack.matrices.shape[1:], dtype=dtype, device=device) for role, stack in stacks.items()
        }
        self._layer: int | None = None  # the one that it holds

    @property
    def num_bytes(self) -> int:
        return sum(data.nbytes for data in self._data.values())

    def matrices(self, layer: int) -> dict[str, Matrix]:
        """The buffer by role, as far as this layer has the role: for when it holds the layer."""
        held = {role: Matrix(self._data[role]) for role, stack in self._stacks.items() if layer in stack.layers}
        return {role: matrix.with_rounded_inputs() for role, matrix in held.items()} if self._rounds else held

    def experts(self, stored: Mapping[str, Matrix]) -> dict[str, Matrix]:
        """Of a layer's matrices as they are ``stored`` those of experts, as prefill multiplies with them."""
        found = {role: weight for role, weight in stored.items() if len(weight.shape) == 3}
        return {role: weight.with_rounded_inputs() for role, weight in found.items()} if self._rounds else found

    def hold(self, layer: int) -> None:
        """Widen a layer, unless it is there."""
        if layer == self._layer:
            return
        self._layer = None  # in case a widening is broken off
        for role, stack in self._stacks.items():
            if layer in stack.layers:
                stack.matrices[stack.layers.index(layer)].dequantize_into(self._data[role])
        self._layer = layer


class DecoderWeights:
    """All weights of a decoder by role; a tied ``lm_head`` is the very weight ``embed``."""

    def __init__(
        self,
        config: ModelConfig,
        matrices: Mapping[str, Matrix],
        vectors: Mapping[str, Tensor],
        dtype: torch.dtype,
        wide: DequantizedLayer | None = None,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.matrices, self.vectors = matrices, vectors
        self.wide = wide  # where prefill widens a layer; None where every matrix is dense

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        formats: WeightFormats | None = None,
        make: MakeMatrix = make_matrix,
    ) -> DecoderWeights:
        """Uninitialised storage of the right shapes, for numbers that are computed with in ``dtype``.

        ``formats``: how they lie in memory, by default in ``dtype``; ``make`` makes the storage of a form.
        """
        matrices: dict[str, Matrix] = {}
        vectors: dict[str, Tensor] = {}
        narrow: dict[str, Stack] = {}
        name_of_dtype = str(dtype).removeprefix("torch.")
        for name, role in tensor_specs(config).items():
            shape = stacked_shape(role, config.num_layers)
            if not role.is_matrix:
                own = dtype if role.dtype is None else getattr(torch, role.dtype)
                vectors[name] = torch.empty(shape, dtype=own, device=device)
                continue
            own_make = make_matrix if role.is_wide else make  # what layers read by themselves lies row by row
            matrices[name] = own_make(format_of(role, name_of_dtype, formats), shape, dtype, device)
            if is_dequantized(role, name_of_dtype, formats) and not matrices[name].is_read_by_prefill:
                narrow[name] = Stack(matrices[name], role.layers_of(config.num_layers))
        rounds = formats is not None and formats.rounds_prefill
        wide = DequantizedLayer(narrow, dtype, device, rounds=rounds) if narrow else None
        return cls(config, matrices, vectors, dtype, wide)

    @property
    def embed(self) -> Matrix:
        """Token embedding ``[V, D]``."""
        return self.matrices["embed"]

    @property
    def lm_head(self) -> Matrix:
        """Output embedding ``[V, D]``."""
        return self.matrices.get("lm_head", self.embed)

    @property
    def device(self) -> torch.device:
        return self.vectors["final_norm"].device

    @property
    def num_bytes(self) -> int:
        """Bytes of everything that is stored."""
        return sum(w.num_bytes for w in self.matrices.values()) + sum(v.nbytes for v in self.vectors.values())

    def stored(self) -> dict[str, Tensor]:
        """The numbers of every role, as they are computed with; the storage itself where matrices are dense."""
        return {name: self.matrices[name].dense() if name in self.matrices else self.vectors[name]
                for name in tensor_specs(self.config)}  # fmt: skip

    def fill(self, role: str, place: tuple[Place, ...], numbers: Tensor) -> None:
        """Store a checkpoint tensor, its rows in the order of ``Role.row_order``, in its place of a role."""
        if role in self.matrices:
            target = self.matrices[role]
            (target[place] if place else target).fill(numbers)
        else:
            target_numbers = self.vectors[role]
            (target_numbers[place] if place else target_numbers).copy_(numbers)

    def fill_quantized(self, role: str, place: tuple[Place, ...], codes: Tensor, scales: Tensor) -> None:
        """Store a matrix that a checkpoint has in codes in its place of a role."""
        target = self.matrices[role]
        (target[place] if place else target).fill_quantized(codes, scales)

    def layer(self, index: int) -> LayerWeights:
        """Parameters of one layer, as views."""
        places = {}  # of this layer in the stacks of the roles that it has
        for name, role in tensor_specs(self.config).items():
            layers = role.layers_of(self.config.num_layers)
            if role.per_layer and index in layers:
                places[name] = layers.index(index)
        return LayerWeights(
            {name: self.matrices[name][at] for name, at in places.items() if name in self.matrices},
            {name: self.vectors[name][at] for name, at in places.items() if name in self.vectors},
        )

    def wide_layer(self, index: int) -> LayerWeights:
        """As ``layer``, with the shared buffer in the place of narrow matrices: for when it holds this layer."""
        own = self.layer(index)
        if self.wide is None:
            return own
        experts = self.wide.experts(own.matrices)
        return LayerWeights({**own.matrices, **experts, **self.wide.matrices(index)}, own.vectors)


class LayerWeights:
    """Views of one layer's weights by role."""

    def __init__(self, matrices: Mapping[str, Matrix], vectors: Mapping[str, Tensor]) -> None:
        self.matrices, self.vectors = matrices, vectors

    def matrix(self, role: str) -> Matrix:
        """A matrix that the family always has."""
        return self.matrices[role]

    def vector(self, role: str) -> Tensor:
        """A norm or a bias that the family always has."""
        return self.vectors[role]

    def optional(self, role: str) -> Tensor | None:
        """A norm or a bias that only some models have."""
        return self.vectors.get(role)

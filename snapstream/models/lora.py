"""LoRA adapters of a decoder: ``s B (A x)`` is added to the products of the base, whose weights may have any format.

Adapters are never merged. The tokens of one call may belong to several adapters and to none: ``Adapters.select`` says
which, and products of tokens without an adapter are those of the base alone, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import ModelConfig, WeightFormat
from snapstream.config.engine import Adapter
from snapstream.config.weights import WeightDType
from snapstream.kernels.interface import Kernels, LayerActivation, SumNorm
from snapstream.models.adapters import PRODUCTS, WEIGHTS_FILE, Pair, read_pairs
from snapstream.models.matrix import MakeMatrix, Matrix, activated
from snapstream.models.weights import LayerWeights

Place = slice | Tensor  # of the tokens of an adapter


class LowRank(NamedTuple):
    """What one adapter adds to a product."""

    down: Matrix  # A [R, in] of all its projections, one below the other
    ups: Sequence[tuple[int, Matrix]]  # of each projection: the first row of its output, and s B [rows, r]

    def add_to(self, out: Tensor, place: Place, x: Tensor, kernels: Kernels) -> None:
        """``out [T, rows]`` of the tokens in ``place``, whose inputs are ``x [n, in]``."""
        low, first = _times(self.down, x, kernels), 0  # [n, R]
        for start, up in self.ups:
            rank = up.shape[1]
            out[place, start : start + up.shape[0]] += _times(up, low[:, first : first + rank].contiguous(), kernels)
            first += rank


def _times(matrix: Matrix, x: Tensor, kernels: Kernels) -> Tensor:
    """Without kernels of particular shapes."""
    return matrix.multiply(x, None, kernels) if matrix.is_batch_invariant else F.linear(x, matrix.data)


class Adapters:
    """Of one decoder. ``groups``: tokens of the call in progress by adapter, counted from 1."""

    def __init__(self, products: Mapping[tuple[int, int, str], LowRank], device: torch.device | str) -> None:
        """``products``: by adapter, layer and stored matrix."""
        self.products, self._device = products, device
        self.groups: list[tuple[int, Place]] = []
        self.others: Place = slice(None)  # tokens without an adapter

    @property
    def num_bytes(self) -> int:
        parts = ((own.down, *(up for _, up in own.ups)) for own in self.products.values())
        return sum(matrix.num_bytes for part in parts for matrix in part)

    def select(self, runs: Iterable[tuple[int, int]]) -> None:
        """The adapters of the next call's tokens: of each run of tokens its adapter and length."""
        places: dict[int, list[slice]] = {}
        start = 0
        for adapter, own in groupby(runs, key=lambda run: run[0]):
            stop = start + sum(length for _, length in own)
            places.setdefault(adapter, []).append(slice(start, stop))
            start = stop
        found = {adapter: self._joined(slices) for adapter, slices in places.items()}
        self.others = found.pop(0, slice(0, 0))
        self.groups = list(found.items())

    def around(self, layer: int, weights: LayerWeights) -> LayerWeights:
        """The weights of a layer, whose products add those of the adapters."""
        matrices = {
            name: AdaptedMatrix(matrix, (layer, name), self) if name in PRODUCTS else matrix
            for name, matrix in weights.matrices.items()
        }
        return LayerWeights(matrices, weights.vectors)

    def _joined(self, slices: Sequence[slice]) -> Place:
        if len(slices) == 1:
            return slices[0]
        return torch.cat([torch.arange(own.start, own.stop, device=self._device) for own in slices])


class AdaptedMatrix(Matrix):
    """A matrix of the base with what adapters add to its product."""

    def __init__(self, base: Matrix, key: tuple[int, str], adapters: Adapters) -> None:
        super().__init__(base.data, base.scales, base.form, base.dtype)
        self.base, self._key, self._adapters = base, key, adapters

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        return self._with_adapters(self.base.multiply(x, bias, kernels), x, kernels)

    def multiply_normed(self, given: SumNorm, bias: Tensor | None, kernels: Kernels) -> Tensor:
        out = self.base.multiply_normed(given, bias, kernels)
        for adapter, place in self._own():  # what is added to the residual stream has been by now
            x = kernels.rms_norm(given.residual[place], given.weight, given.eps)
            self._low_rank(adapter).add_to(out, place, x, kernels)
        return out

    def add_product(self, residual: Tensor, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor | None:
        out = self.base.add_product(residual, x, bias, kernels)
        self._with_adapters(residual if out is None else out[0] if out.dim() == 3 else out, x, kernels)
        return out

    def activated(
        self, given: SumNorm | Tensor, bias: Tensor | None, kernels: Kernels, activation: LayerActivation
    ) -> Tensor:
        if not self._own():
            return self.base.activated(given, bias, kernels, activation)
        if isinstance(given, Tensor):
            return activated(self.multiply(given, bias, kernels), activation, kernels)
        return activated(self.multiply_normed(given, bias, kernels), activation, kernels)

    def swiglu(
        self, down: Matrix, given: SumNorm | Tensor, biases: tuple[Tensor | None, Tensor | None], kernels: Kernels,
        activation: LayerActivation = "silu",
    ) -> Tensor:  # fmt: skip
        """Of tokens without an adapter as the base computes it, which may be one call for both products."""
        assert isinstance(down, AdaptedMatrix), "both have adapters around them, or neither"
        rest, groups = (biases, kernels, activation), self._adapters.groups
        if not self._own() and not down._own():
            return self.base.swiglu(down.base, given, *rest)
        if not self.base.is_batch_invariant:
            return super().swiglu(down, given, *rest)
        if isinstance(given, SumNorm) and given.x is not None:
            given = SumNorm(given.residual.add_(given.x), None, given.weight, given.eps)
        tokens = given if isinstance(given, Tensor) else given.residual
        out = tokens.new_empty(len(tokens), down.shape[0])
        for adapter, place in [*groups, (0, self._adapters.others)]:
            if not len(own := tokens[place]):
                continue
            part = own if isinstance(given, Tensor) else given._replace(residual=own)
            self._adapters.groups = [(adapter, slice(None))]
            whole = super().swiglu(down, part, *rest) if adapter else self.base.swiglu(down.base, part, *rest)
            out[place] = whole
        self._adapters.groups = groups
        return out

    def _own(self) -> list[tuple[int, Place]]:
        """The groups whose adapters change this product."""
        return [group for group in self._adapters.groups if (group[0], *self._key) in self._adapters.products]

    def _low_rank(self, adapter: int) -> LowRank:
        return self._adapters.products[(adapter, *self._key)]

    def _with_adapters(self, out: Tensor, x: Tensor, kernels: Kernels) -> Tensor:
        for adapter, place in self._own():
            self._low_rank(adapter).add_to(out, place, x[place], kernels)
        return out


def load_adapters(
    adapters: Sequence[Adapter], model: ModelConfig, dtype: torch.dtype, device: torch.device | str, make: MakeMatrix
) -> Adapters:
    """Read adapters; ``make`` allocates their matrices. ValueError for numbers that are not finite."""
    products: dict[tuple[int, int, str], LowRank] = {}

    def matrix(numbers: Tensor) -> Matrix:
        form = WeightFormat(dtype=cast(WeightDType, str(dtype).removeprefix("torch.")))
        made = make(form, tuple(numbers.shape), dtype, device)
        made.fill(numbers)
        return made

    for index, adapter in enumerate(adapters, start=1):
        folder = Path(adapter.folder)
        pairs = groupby(read_pairs(adapter.name, folder, model), key=lambda pair: pair.projection[:2])
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            for (layer, product), own in pairs:
                downs, ups = [], []
                for pair in own:
                    down, up = (file.get_tensor(name).to(torch.float32) for name in pair.names)
                    down, up = down.to(dtype), _as_stored(up * pair.scale, pair).to(dtype)
                    if not bool(down.isfinite().all() and up.isfinite().all()):
                        names = " or ".join(pair.names)
                        raise ValueError(f"lora {adapter.name!r}: numbers of {names} are not finite in {dtype}")
                    downs.append(down)
                    ups.append((pair.projection.first, matrix(up)))
                products[index, layer, product] = LowRank(matrix(torch.cat(downs)), ups)
    return Adapters(products, device)


def _as_stored(up: Tensor, pair: Pair) -> Tensor:
    """The rows of B as the base stores those of the projection."""
    projection = pair.projection
    if projection.order is not None:
        up = up[torch.tensor(projection.order)]
    if projection.widths is None:
        return up
    given, stored = projection.widths
    heads = up.unflatten(0, (-1, given))
    return F.pad(heads, (0, 0, 0, stored - given)).flatten(0, 1)

"""The weights of a decoder, stored once per role as ``[L, out, in]``.

Invariant: a layer's parameters are views of the stacks, never copies, so that one kernel can walk all layers with a
stride and a loader can fill the stacks in any order. Roles and shapes are the family's (``families.py``); how a matrix
lies in memory is the ``Weight``'s business (``weight.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from snapstream.config import ModelConfig, WeightForms
from snapstream.models.families import roles_of
from snapstream.models.narrow import MakeWeight, make_weight
from snapstream.models.roles import Place, checkpoint_parts, stacked_shape
from snapstream.models.shapes import form_of, is_widened
from snapstream.models.weight import Dense, Weight
from snapstream.models.widening import Stack, WideBuffer


class DecoderWeights:
    """All weights of a decoder by role; a tied ``lm_head`` is the very weight ``embed``."""

    def __init__(
        self,
        config: ModelConfig,
        matrices: Mapping[str, Weight],
        vectors: Mapping[str, Tensor],
        dtype: torch.dtype,
        wide: WideBuffer | None = None,
    ) -> None:
        self.config, self.dtype = config, dtype
        self._roles = roles_of(config)
        self.matrices, self.vectors = matrices, vectors
        self.wide = wide  # where prefill widens a layer; None where every matrix is dense

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        forms: WeightForms | None = None,
        make: MakeWeight = make_weight,
    ) -> DecoderWeights:
        """Uninitialised storage of the right shapes, for numbers that are computed with in ``dtype``.

        ``forms``: how they lie in memory, by default in ``dtype``; ``make`` makes the storage of a form.
        """
        matrices: dict[str, Weight] = {}
        vectors: dict[str, Tensor] = {}
        narrow: dict[str, Stack] = {}
        name_of_dtype = str(dtype).removeprefix("torch.")
        for name, role in roles_of(config).items():
            shape = stacked_shape(role, config.num_layers)
            if not role.is_matrix:
                own = dtype if role.dtype is None else getattr(torch, role.dtype)
                vectors[name] = torch.empty(shape, dtype=own, device=device)
                continue
            own_make = make_weight if role.is_wide else make  # what layers read by themselves lies row by row
            matrices[name] = own_make(form_of(role, name_of_dtype, forms), shape, dtype, device)
            if is_widened(role, name_of_dtype, forms) and not matrices[name].multiplies_narrow:
                narrow[name] = Stack(matrices[name], role.layers_of(config.num_layers))
        rounds = forms is not None and forms.rounds_prefill
        wide = WideBuffer(narrow, dtype, device, rounds=rounds) if narrow else None
        return cls(config, matrices, vectors, dtype, wide)

    @classmethod
    def random(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int) -> DecoderWeights:
        """Random weights at real shapes, for benchmarks: every matrix keeps the size of its input."""
        weights = cls.empty(config, dtype, device)
        generator = torch.Generator(device=device).manual_seed(seed)
        for role, tensor in weights.stored().items():
            if role.endswith("norm"):
                tensor.fill_(1.0)
            elif role.endswith("bias"):
                tensor.zero_()
            else:
                bound = random_bound(role, tensor.shape[-1], config.num_layers)
                tensor.uniform_(-bound, bound, generator=generator)
        return weights

    @property
    def embed(self) -> Weight:
        """Token embedding ``[V, D]``."""
        return self.matrices["embed"]

    @property
    def lm_head(self) -> Weight:
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
                for name in roles_of(self.config)}  # fmt: skip

    def factors(self) -> list[Tensor]:
        """The dense matrices ``[out, in]`` that a step multiplies with, of every layer and the output embedding."""
        names = [name for name, role in roles_of(self.config).items() if role.per_layer and role.is_matrix]
        weights = [*(self.matrices[name] for name in names), self.lm_head]
        stacks = [weight.data for weight in weights if isinstance(weight, Dense)]
        return [matrix for stack in stacks for matrix in stack.reshape(-1, *stack.shape[-2:])]

    def fill(self, role: str, place: tuple[Place, ...], numbers: Tensor) -> None:
        """Store a checkpoint tensor, its rows in the order of ``Role.row_order``, in its place of a role."""
        if role in self.matrices:
            target = self.matrices[role]
            (target[place] if place else target).fill(numbers)
        else:
            target_numbers = self.vectors[role]
            (target_numbers[place] if place else target_numbers).copy_(numbers)

    def fill_codes(self, role: str, place: tuple[Place, ...], codes: Tensor, scales: Tensor) -> None:
        """Store a matrix that a checkpoint has in codes in its place of a role."""
        target = self.matrices[role]
        (target[place] if place else target).fill_codes(codes, scales)

    def layer(self, index: int) -> LayerWeights:
        """Parameters of one layer, as views."""
        places = {}  # of this layer in the stacks of the roles that it has
        for name, role in roles_of(self.config).items():
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

    def checkpoint(self) -> dict[str, Tensor]:
        """The numbers by the names they have in a checkpoint of transformers."""
        stored, found = self.stored(), {}
        for part in checkpoint_parts(self._roles, self.config.num_layers):
            numbers = stored[part.role][part.place] if part.place else stored[part.role]
            if part.row_order is not None:
                order = torch.tensor(part.row_order, device=numbers.device)
                numbers = torch.empty_like(numbers).index_copy_(0, order, numbers)
            found[part.name] = numbers
        return found


def random_bound(role: str, num_in: int, num_layers: int) -> float:
    """Largest magnitude of random weights that are uniform, of a matrix with rows of ``num_in`` numbers."""
    bound = (3.0 / num_in) ** 0.5  # uniform on [-b, b] has variance b^2 / 3 = 1 / fan-in
    if role == "o" or role.endswith("down"):
        bound /= (2 * num_layers) ** 0.5  # 2L residual additions sum to order 1
    return float(bound)


class LayerWeights:
    """Views of one layer's weights by role."""

    def __init__(self, matrices: Mapping[str, Weight], vectors: Mapping[str, Tensor]) -> None:
        self.matrices, self.vectors = matrices, vectors

    def matrix(self, role: str) -> Weight:
        """A matrix that the family always has."""
        return self.matrices[role]

    def vector(self, role: str) -> Tensor:
        """A norm or a bias that the family always has."""
        return self.vectors[role]

    def optional(self, role: str) -> Tensor | None:
        """A norm or a bias that only some models have."""
        return self.vectors.get(role)

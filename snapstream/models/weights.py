"""The weights of a decoder, stacked over layers as ``[L, out, in]``.

Invariant: a layer's parameters are views of the stacks, so one kernel can walk all layers with a stride and a loader
can fill the stacks in any order. ``tensors.py`` has names and shapes, ``matrix.py`` the storage of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from snapstream.config import ModelConfig, WeightFormats
from snapstream.config.weights import PrefillInputs
from snapstream.models.matrix import MakeMatrix, Matrix, joined, make_matrix
from snapstream.models.registry import tensor_specs
from snapstream.models.sharding import format_of, is_dequantized
from snapstream.models.tensors import Place, base_name, checkpoint_parts, stacked_shape


class DequantizedLayer:
    """One layer's low-precision matrices, dequantized, in a buffer that all layers share.

    Prefill goes layer by layer, so a layer is dequantized once per pass, not once per chunk. Invariant: the buffer
    holds the layer that was requested last; passes that alternate within a layer share it.
    """

    def __init__(
        self,
        stacks: Mapping[str, tuple[Matrix, Sequence[int]]],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        inputs: PrefillInputs | None = None,
    ) -> None:
        """``stacks``: by name, the low-precision matrices and the layers that have one; ``inputs``: see
        ``WeightFormats.prefill_inputs``.
        """
        self._stacks = stacks
        self._inputs = inputs
        self._data = {
            name: torch.empty(stack.shape[1:], dtype=dtype, device=device) for name, (stack, _) in stacks.items()
        }
        self._layer: int | None = None  # the one in the buffer

    @property
    def num_bytes(self) -> int:
        return sum(data.nbytes for data in self._data.values())

    def matrices(self, layer: int) -> dict[str, Matrix]:
        """Views of the buffer, for when it holds ``layer``."""
        return {
            name: Matrix(self._data[name]).with_rounded_inputs(stack.form.rounded(self._inputs), stack.form.group)
            for name, (stack, layers) in self._stacks.items()
            if layer in layers
        }

    def experts(self, stored: Mapping[str, Matrix]) -> dict[str, Matrix]:
        """The experts among a layer's ``stored`` matrices, as prefill multiplies with them."""
        return {
            name: matrix.with_rounded_inputs(matrix.form.rounded(self._inputs), matrix.form.group)
            for name, matrix in stored.items()
            if len(matrix.shape) == 3
        }

    def hold(self, layer: int) -> None:
        """Dequantize a layer, unless the buffer holds it."""
        if layer == self._layer:
            return
        self._layer = None  # in case this is interrupted
        for name, (stack, layers) in self._stacks.items():
            if layer in layers:
                stack[layers.index(layer)].dequantize_into(self._data[name])
        self._layer = layer


class DecoderWeights:
    """All weights of a decoder by name; a tied ``lm_head`` is ``embed`` itself."""

    def __init__(
        self,
        config: ModelConfig,
        matrices: Mapping[str, Matrix],
        vectors: Mapping[str, Tensor],
        dtype: torch.dtype,
        dequantized: DequantizedLayer | None = None,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.matrices, self.vectors = matrices, vectors
        self.dequantized = dequantized  # for prefill; None if no matrix needs it

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        formats: WeightFormats | None = None,
        make: MakeMatrix = make_matrix,
    ) -> DecoderWeights:
        """Uninitialized storage, for computation in ``dtype``.

        ``formats``: of the matrices, by default ``dtype``; ``make`` allocates a matrix.
        """
        matrices: dict[str, Matrix] = {}
        vectors: dict[str, Tensor] = {}
        low_precision: dict[str, tuple[Matrix, Sequence[int]]] = {}
        dtype_name = str(dtype).removeprefix("torch.")
        for name, spec in tensor_specs(config).items():
            shape = stacked_shape(spec, config.num_layers)
            if not spec.is_matrix:
                own = dtype if spec.dtype is None else getattr(torch, spec.dtype)
                vectors[name] = torch.empty(shape, dtype=own, device=device)
                if not spec.parts or spec.missing is not None:
                    vectors[name].fill_(spec.offset if spec.missing is None else spec.missing)
                continue
            own_make = make_matrix if spec.is_dense else make
            matrices[name] = own_make(format_of(spec, dtype_name, formats), shape, dtype, device)
            if is_dequantized(spec, dtype_name, formats) and not matrices[name].is_read_by_prefill:
                low_precision[name] = matrices[name], spec.layers_of(config.num_layers)
        inputs = None if formats is None else formats.prefill_inputs
        dequantized = DequantizedLayer(low_precision, dtype, device, inputs=inputs) if low_precision else None
        return cls(config, matrices, vectors, dtype, dequantized)

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
        return sum(w.num_bytes for w in self.matrices.values()) + sum(v.nbytes for v in self.vectors.values())

    def stored(self) -> dict[str, Tensor]:
        """All numbers by name, as they are computed with; the storage itself if a matrix is dense."""
        return {name: self.matrices[name].dense() if name in self.matrices else self.vectors[name]
                for name in tensor_specs(self.config)}  # fmt: skip

    def fill(self, name: str, place: tuple[Place, ...], numbers: Tensor) -> None:
        """Store a checkpoint tensor, its rows in the order of ``TensorSpec.row_order``, at a place of ``name``."""
        if name in self.matrices:
            matrix = self.matrices[name]
            own = matrix[place] if place else matrix
            own.fill(self._widened(name, self._by_layer(name, numbers), own.shape))
        else:
            vector = self.vectors[name]
            own_vector = vector[place] if place else vector
            own_vector.copy_(self._widened(name, numbers, own_vector.shape))

    def fill_quantized(self, name: str, place: tuple[Place, ...], values: Tensor, scales: Tensor) -> None:
        """The same of quantized values, in whole groups of the rows of each layer."""
        matrix = self.matrices[name]
        own = matrix[place] if place else matrix
        values, scales = (self._widened(name, self._by_layer(name, part), own.shape) for part in (values, scales))
        own.fill_quantized(values, scales)

    def _widened(self, name: str, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """Rows of heads that have fewer than are stored, with rows of zeros behind each; see ``TensorSpec.narrow``."""
        narrow = tensor_specs(self.config)[name].narrow
        if not narrow or len(rows) == shape[0]:
            return rows
        given, stored = next(iter(narrow.values()))
        heads = rows.unflatten(0, (-1, given))
        wide = heads.new_zeros(len(heads), stored, *heads.shape[2:])
        wide[:, :given] = heads
        return wide.flatten(0, 1)

    def _by_layer(self, name: str, numbers: Tensor) -> Tensor:
        """Numbers of all layers, which lie side by side in the checkpoint, one layer after the other."""
        if (dim := tensor_specs(self.config)[name].joined_dim) is None:
            return numbers
        return numbers.unflatten(dim, (self.config.num_layers, -1)).movedim(dim, 0)

    def fill_randomly(self, seed: int, num_drawn: int = 2**22) -> None:
        """Random numbers for every tensor of a checkpoint; activations keep their size. Norms are 1, biases 0.

        A pool of ``num_drawn`` numbers is drawn once, and each matrix begins elsewhere in it.
        """
        generator = torch.Generator().manual_seed(seed)
        pool = (torch.rand(num_drawn, generator=generator) * 2 - 1).to(self.device)
        specs = tensor_specs(self.config)
        for start, part in enumerate(checkpoint_parts(specs, self.config.num_layers)):
            spec = specs[part.target]
            if not spec.is_matrix:
                is_one = base_name(part.target).endswith(("norm", "scalar", "scale"))
                number = 1.0 / part.shape[-1] if part.target == "conv_kernel" else float(is_one)
                numbers = torch.full(part.shape, number, device=self.device)
            else:
                count = prod(part.shape)
                first = (start * 7919) % num_drawn
                numbers = pool.roll(-first).repeat(-(-count // num_drawn))[:count].view(part.shape)
                bound = (3.0 / spec.shape[-1]) ** 0.5  # uniform on [-b, b] has variance b^2 / 3 = 1 / fan-in
                if base_name(part.target) == "o" or base_name(part.target).endswith(
                    "down"
                ):  # what is added to the residual stream
                    bound /= (2 * self.config.num_layers) ** 0.5
                numbers = numbers * bound
            self.fill(part.target, part.place, numbers)

    def fold_norm_biases(self) -> None:
        """Add what products make of the biases of the norms before them to the biases of the products."""
        if not self.config.has_norm_biases:
            return
        second = "input_norm_bias" if self.config.is_parallel else "post_norm_bias"
        for own in map(self.layer, range(self.config.num_layers)):
            bias, products = own.vector(second), [("qkv", own.vector("input_norm_bias"))]
            if "experts_gate_up" in own.matrices:
                own.vector("router_logit_bias").add_(own.vector("router") @ bias.to(torch.float32))
                for expert, of_expert in enumerate(own.vector("experts_gate_up_bias")):
                    of_expert.add_(own.matrix("experts_gate_up")[expert].multiply_exactly(bias))
            else:
                products.append(("gate_up", bias))
            for name, before in products:
                own.vector(f"{name}_bias").add_(own.matrix(name).multiply_exactly(before))
        logits = self.lm_head.multiply_exactly(self.vectors["final_norm_bias"])
        self.vectors["lm_head_bias"].add_(logits)

    def layer(self, index: int) -> LayerWeights:
        return self._layer(index, {})

    def _layer(self, index: int, instead: Mapping[str, Matrix]) -> LayerWeights:
        """``instead``: of stored matrices of the same names; others of the same matrix are rows of it all the same."""
        places = {}  # of this layer in the stacks
        for name, spec in tensor_specs(self.config).items():
            layers = spec.stack(self.config.num_layers)
            if spec.per_layer and index in layers:
                places[name] = layers.index(index)
        stored = {name: self.matrices[name][at] for name, at in places.items() if name in self.matrices}
        vectors = {base_name(name): self.vectors[name][at] for name, at in places.items() if name in self.vectors}
        return LayerWeights(_by_base_name({**stored, **instead}), vectors)

    def prefill_layer(self, index: int) -> LayerWeights:
        """As ``layer``, with views of the shared buffer, for when it holds this layer."""
        if self.dequantized is None:
            return self.layer(index)
        own = self._layer(index, self.dequantized.matrices(index))
        return LayerWeights({**own.matrices, **self.dequantized.experts(own.matrices)}, own.vectors)


def _by_base_name(matrices: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Of one layer; those of one name are rows of one matrix."""
    found: dict[str, list[Matrix]] = {}
    for name, matrix in matrices.items():
        found.setdefault(base_name(name), []).append(matrix)
    return {name: joined(parts) for name, parts in found.items()}


class LayerWeights:
    def __init__(self, matrices: Mapping[str, Matrix], vectors: Mapping[str, Tensor]) -> None:
        self.matrices, self.vectors = matrices, vectors

    def matrix(self, name: str) -> Matrix:
        return self.matrices[name]

    def vector(self, name: str) -> Tensor:
        return self.vectors[name]

    def optional(self, name: str) -> Tensor | None:
        """A norm or a bias that only some models have."""
        return self.vectors.get(name)

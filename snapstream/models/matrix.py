"""Matrices of a model in memory: row-major, in one of the formats of ``WeightFormat``.

``encode`` and ``decode`` define a quantized format: integers and MXFP4 in groups (``kernels/groups.py``), and FP8
blocks of 128 by 128 with an fp32 scale (DeepSeek-V3, arXiv 2412.19437, section 3.3). Layers call a ``Matrix`` for its
product and never see the storage. Low precision is dequantized block by block before it is multiplied, on any device;
for few tokens kernels may read the quantized values. ``panels.py`` has the layout of the looped library. Prefill
dequantizes a layer once (``DequantizedLayer``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Self, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import WeightFormat
from snapstream.config.model import SwiGLUClamp
from snapstream.config.weights import INT16_GROUP, WeightDType
from snapstream.kernels import groups, memory, reference
from snapstream.kernels.formats import FP8, FP8_MAX
from snapstream.kernels.interface import ExpertParts, Kernels, LayerActivation, Pairs, SumNorm, Xielu
from snapstream.kernels.pytorch import clamped_swiglu, geglu, relu2, xielu
from snapstream.kernels.reference import BLOCK
from snapstream.kernels.triton.configs import FEW_TOKENS
from snapstream.models.sharding import dequantized_block

Index = int | slice | tuple[int | slice, ...]

_NO_PARTS = ExpertParts()
FEW = 64  # tokens that are multiplied with quantized values; more are bound by arithmetic


def encode(numbers: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Quantized values and scales of a matrix ``[out, in]``."""
    if form.is_mxfp4:
        return groups.quantize_mxfp4(numbers, form.group)
    if form.is_uint4:
        return groups.quantize_uint4(numbers, form.group)
    if form.is_k_quant:
        return groups.quantize_k(numbers, form)
    return quantize(numbers) if form.is_fp8 else groups.quantize(numbers, form.bits, form.group)


def decode(values: Tensor, scales: Tensor, form: WeightFormat) -> Tensor:
    """Dequantized numbers ``[..., out, in]`` fp32."""
    if form.is_fp8:
        return reference.dequantize_blocks(values, scales)
    if form.is_mxfp4:
        return groups.dequantize_mxfp4(values, scales)
    if form.is_uint4:
        return groups.dequantize_uint4(values, scales)
    if form.is_k_quant:
        return groups.dequantize_k(values, scales, form)
    return groups.dequantize(values, scales, form.bits)


class Matrix:
    """A matrix ``[out, in]``, or a stack of such: ``[L, out, in]``, ``[L, experts, out, in]``; rows are contiguous."""

    is_read_by_prefill = False  # fast for many tokens too: prefill need not dequantize it
    is_batch_invariant = False  # a token's product has the same bits in any batch
    _rounding: tuple[str, int] | None = None  # what inputs are rounded to in prefill, and the group of int8

    def __init__(
        self,
        data: Tensor,
        scales: Tensor | None = None,
        form: WeightFormat | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``data [..., out, in]``: floats, by default of the format that their dtype is; e4m3 with ``scales
        [..., ceil(out / 128), ceil(in / 128)]`` fp32; or uint8 of ``in * bits / 8`` with ``scales [..., out, in /
        group]`` as ``kernels/groups.py`` has them. ``dtype`` is that of the computation, by default that of ``data``.
        """
        self.data, self.scales = data, scales
        self.form = form or WeightFormat(dtype=cast(WeightDType, str(data.dtype).removeprefix("torch.")))
        self.dtype = data.dtype if dtype is None else dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        if self.form.is_quantized:
            return (*self.data.shape[:-1], self.data.shape[-1] * 8 // self.form.bits)
        return tuple(self.data.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the storage, scales included."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def is_low_precision(self) -> bool:
        """Whether the storage differs from the dtype of the computation."""
        return self.data.dtype != self.dtype

    def __getitem__(self, index: Index) -> Self:
        """View of a layer, an expert, or a slice of rows. ValueError for rows that are not whole FP8 blocks."""
        view = type(self)(self.data[index], self._scales_at(index), self.form, self.dtype)
        view._rounding = self._rounding
        return view

    def _scales_at(self, index: Index) -> Tensor | None:
        if self.scales is None or not self.form.is_fp8:
            return None if self.scales is None else self.scales[index]
        places = index if isinstance(index, tuple) else (index,)
        of_scales: list[int | slice] = []
        for dim, place in enumerate(places):
            if dim < len(self.shape) - 2:
                of_scales.append(place)
                continue
            start, stop, _ = place.indices(self.shape[dim]) if isinstance(place, slice) else (place, place + 1, 1)
            of_scales.append(block_rows(start, stop, self.shape[-2:]))
        return self.scales[tuple(of_scales)]

    def with_rounded_inputs(self, dtype: str | None, group: int) -> Self:
        """The same storage, multiplied with inputs rounded to bf16, int8 (per token and group) or int16, as the looped
        library does in prefill; None: as they are.
        """
        if dtype == "int16":
            dtype, group = None if self.shape[-1] % INT16_GROUP else dtype, INT16_GROUP
        other = copy(self)
        other._rounding, other.form = None if dtype is None else (dtype, group), replace(self.form, rounds_inputs=False)
        return other

    def fill(self, numbers: Tensor) -> None:
        """Store ``numbers``, of this shape and any float dtype, rounded or quantized as needed."""
        if not self.form.is_quantized:
            self.data.copy_(numbers)
        elif len(self.shape) > 2:
            for index, part in enumerate(numbers):
                self[index].fill(part)
        else:
            for start, stop in self._blocks():
                self[start:stop].fill_quantized(*encode(numbers[start:stop].to(self.data.device), self.form))

    def fill_quantized(self, values: Tensor, scales: Tensor) -> None:
        """Store groups or FP8 blocks of a checkpoint; float storage takes integers and MXFP4."""
        if len(self.shape) > 2 and self.scales is None:
            for index, (own_values, own_scales) in enumerate(zip(values, scales, strict=True)):
                self[index].fill_quantized(own_values, own_scales)
        elif self.scales is not None:
            self.data.copy_(values)
            self.scales.copy_(scales)
        elif scales.dtype == torch.uint8:
            self.fill(groups.dequantize_mxfp4(values, scales))
        else:
            self.fill(groups.dequantize(values, scales, 8 * values.shape[-1] // self.shape[-1]))

    def dense(self) -> Tensor:
        """The numbers in the dtype of the computation; the storage itself if it has that dtype."""
        return (self.data if self.scales is None else decode(self.data, self.scales, self.form)).to(self.dtype)

    def dequantize_into(self, out: Tensor) -> None:
        """Write ``dense()`` into ``out``, of this shape."""
        if len(self.shape) > 2:
            for index, part in enumerate(out):
                self[index].dequantize_into(part)
            return
        for start, stop in self._blocks():
            out[start:stop] = self[start:stop].dense()

    def multiply_exactly(self, x: Tensor) -> Tensor:
        """``x [in]`` times this matrix transposed, in fp32 and without rounding ``x``: ``[out]``."""
        rows = (self[start:stop].dense() for start, stop in self._blocks())
        return torch.cat([own.to(torch.float32) @ x.to(torch.float32) for own in rows])

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """``x [T, in]`` times this matrix transposed, plus ``bias [out]``: ``[T, out]``."""
        if kernels.one_linear is not None and self._takes_one(x):
            return kernels.one_linear(x, None, 0.0, self.data, bias, False)
        if kernels.few_linear is not None and self._takes_few(x):
            return kernels.few_linear(x, self.data, bias, False)
        x = self._rounded(x)
        if self.form.rounds_inputs:
            rounded = groups.round_inputs(x, self.form.group) if self.form.is_quantized else x.to(self.data.dtype)
            x = rounded.to(x.dtype)
        if self.scales is not None and len(x) <= FEW:
            if self.form.is_fp8:
                ends = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
                out = kernels.grouped_linear(x, self.data[None], self.scales[None], ends)
                return out if bias is None else out.add_(bias)
            if kernels.code_linear is not None and self.scales.dtype == groups.SCALE_DTYPE:
                return kernels.code_linear(x, self.data, self.scales, bias)
        parts = [
            F.linear(x, self[start:stop].dense(), None if bias is None else bias[start:stop])
            for start, stop in self._blocks()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def multiply_normed(self, given: SumNorm, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """The norm of ``given``, ``[T, in]``, times this matrix transposed, plus ``bias``: ``[T, out]``."""
        if kernels.one_linear is not None and given.x is None and self._takes_one(given.residual):
            return kernels.one_linear(given.residual, given.weight, given.eps, self.data, bias, False)
        return self.multiply(kernels.normed(given), bias, kernels)

    def add_product(self, residual: Tensor, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor | None:
        """``residual [T, out] += multiply(x, ...)`` where one kernel does both; else the product, not added, or fp32
        parts of it ``[S, T, out]``.
        """
        if kernels.add_one_linear is not None and self._takes_one(x):
            kernels.add_one_linear(residual, x, self.data, bias)
            return None
        if kernels.few_linear is not None and self._takes_few(x):
            return kernels.few_linear(x, self.data, bias, True)
        return self.multiply(x, bias, kernels)

    def _takes_one(self, x: Tensor) -> bool:
        """Whether kernels for one token multiply ``x [T, in]``."""
        return len(x) == 1 and self._is_plain

    def _takes_few(self, x: Tensor) -> bool:
        """Whether the kernel for few tokens multiplies ``x [T, in]``."""
        return 1 < len(x) <= FEW_TOKENS and self._is_plain and self.dtype.itemsize == 2 and x.stride(1) == 1

    @property
    def _is_plain(self) -> bool:
        """Not so a rank's columns of O, a slice, in prefill where its rows are dealt out."""
        is_dense = self.scales is None and not self.is_low_precision and self._rounding is None
        return is_dense and self.data.is_contiguous()

    def swiglu(
        self, down: Matrix, given: SumNorm | Tensor, biases: tuple[Tensor | None, Tensor | None], kernels: Kernels,
        activation: LayerActivation = "silu",
    ) -> Tensor:  # fmt: skip
        """``down(act(gate x) * up x)``, ``[T, D]``, of a matrix ``[2I, D]``, gate and up in one, and ``down [D, I]``;
        with ``relu2`` ``down(relu(up x)^2)`` of a matrix ``[I, D]``, and the same with ``Xielu`` and ``ungated_gelu``.

        x ``[T, D]`` is the norm of ``given``, or ``given``; ``biases`` are this matrix's and that of ``down``.
        """
        return down.multiply(self.activated(given, biases[0], kernels, activation), biases[1], kernels)

    def activated(
        self, given: SumNorm | Tensor, bias: Tensor | None, kernels: Kernels, activation: LayerActivation
    ) -> Tensor:
        """The first half of ``swiglu``, ``[T, I]``."""
        if isinstance(given, Tensor):
            return activated(self.multiply(given, bias, kernels), activation, kernels)
        if kernels.one_linear is not None and activation == "silu" and self._takes_one(given.residual):
            if given.x is None:
                return kernels.one_linear(given.residual, given.weight, given.eps, self.data, bias, True)
            return kernels.one_linear(kernels.normed(given), None, 0.0, self.data, bias, True)
        return activated(self.multiply_normed(given, bias, kernels), activation, kernels)

    def swiglu_grouped(
        self, down: Matrix, x: Tensor, pairs: Pairs, kernels: Kernels, parts: ExpertParts = _NO_PARTS
    ) -> Tensor:
        """The weighted sum of a token's experts, ``x [T, D]`` to ``[T, D]``: matrices ``[X', 2M, D]``, gate and up in
        one, or ``[X', M, D]`` without gate, and ``down [X', D, M]``. Summed in the order of the token's choices.
        """
        (num_tokens, top_k), order = pairs.weights.shape, pairs.order
        gate_up = self.multiply_grouped(x[order // top_k], pairs.ends, kernels)  # [T k, 2M]
        shares = pairs.weights.flatten()[order, None]  # [T k, 1]
        has_biases = parts.gate_up_bias is not None or parts.down_bias is not None
        experts = _experts_of(pairs) if has_biases else None  # [T k]
        if parts.gate_up_bias is not None:
            gate_up.add_(parts.gate_up_bias[experts])
        if parts.scales_inputs:
            gate_up.mul_(shares)
        inner = activated(gate_up, parts.activation, kernels)  # [T k, M]
        del gate_up  # a chunk's are large
        if not parts.scales_inputs:
            inner.mul_(shares)  # smaller before the product than after it
        out = down.multiply_grouped(inner, pairs.ends, kernels)  # [T k, D]
        if parts.down_bias is not None:
            out.add_(parts.down_bias[experts].mul_(shares))
        del inner
        if pairs.are_elsewhere is not None:
            out.masked_fill_(pairs.are_elsewhere[order, None], 0.0)  # uninitialized
        return torch.empty_like(out).index_copy_(0, order, out).view(num_tokens, top_k, -1).sum(1)

    def multiply_grouped(self, x: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
        """Of a stack ``[X, out, in]``: each row of ``x [P, in]`` times the matrix of its expert: ``[P, out]``.

        Rows are sorted by expert; ``ends [X]`` int32 are the ends of their ranges. int8 and int4 groups are multiplied
        expert by expert, which reads ``ends`` on the host.
        """
        x = self._rounded(x)
        if self.scales is None or self.form.is_fp8:
            return kernels.grouped_linear(x, self.data, self.scales, ends)
        return self._multiply_each(x, ends, kernels)

    def _multiply_each(self, x: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
        out, start = x.new_empty(len(x), self.shape[1]), 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                out[start:end] = self[expert].multiply(x[start:end], None, kernels)
            start = end
        return out

    def lookup(self, token_ids: Tensor) -> Tensor:
        """Rows of an embedding table: ``token_ids [T]`` to ``[T, in]``. TypeError for FP8."""
        if self.scales is None:
            return F.embedding(token_ids, self.data).to(self.dtype)
        if self.form.is_fp8:
            raise TypeError("embedding tables are not stored in FP8 blocks")
        return decode(self.data[token_ids], self.scales[token_ids], self.form).to(self.dtype)

    def _rounded(self, x: Tensor) -> Tensor:
        if self._rounding is None:
            return x
        dtype, group = self._rounding
        if dtype == "bfloat16":
            return x.bfloat16().to(x.dtype)
        return groups.round_inputs(x, group, groups.MOST_INT16 if dtype == "int16" else groups.MOST_INT8)

    def _blocks(self) -> list[tuple[int, int]]:
        """Ranges of rows of a matrix ``[out, in]`` that are dequantized at a time."""
        num_out, num_in = self.shape
        if not self.is_low_precision:
            return [(0, num_out)]
        unit = BLOCK if self.form.is_fp8 else 1
        rows = max(dequantized_block(self.data.device.type) // num_in // unit, 1) * unit
        return [(start, min(start + rows, num_out)) for start in range(0, num_out, rows)]


class JoinedMatrix(Matrix):
    """Matrices ``[out, in]`` one below the other, in formats of their own."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        super().__init__(parts[0].data, parts[0].scales, parts[0].form, parts[0].dtype)
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts])

    def multiply_exactly(self, x: Tensor) -> Tensor:
        return torch.cat([part.multiply_exactly(x) for part in self.parts])

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        sizes = [part.shape[0] for part in self.parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return torch.cat([part.multiply(x, own, kernels) for part, own in zip(self.parts, biases, strict=True)], -1)

    def multiply_normed(self, given: SumNorm, bias: Tensor | None, kernels: Kernels) -> Tensor:
        return self.multiply(kernels.normed(given), bias, kernels)


def joined(parts: Sequence[Matrix]) -> Matrix:
    """One matrix of the rows of all."""
    return parts[0] if len(parts) == 1 else JoinedMatrix(parts)


def activated(gate_up: Tensor, activation: LayerActivation, kernels: Kernels) -> Tensor:
    """``gate_up [T, 2I]`` (gate | up), without gate ``[T, I]``, to ``[T, I]``."""
    if isinstance(activation, Xielu):
        return xielu(gate_up, activation.numbers)
    if isinstance(activation, SwiGLUClamp):
        return clamped_swiglu(gate_up, activation)
    if activation == "relu2":
        return relu2(gate_up)
    if activation == "ungated_gelu":
        return F.gelu(gate_up, approximate="tanh")
    return kernels.swiglu(gate_up) if activation == "silu" else geglu(gate_up)


def _experts_of(pairs: Pairs) -> Tensor:
    """The stored expert of each pair ``[T k]``, sorted; of pairs whose expert is elsewhere any."""
    places = torch.arange(len(pairs.order), dtype=torch.int32, device=pairs.order.device)
    return torch.searchsorted(pairs.ends, places, right=True).clamp_(max=len(pairs.ends) - 1)


def num_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of matrices ``[..., out, in]``."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def block_rows(start: int, stop: int, shape: tuple[int, ...]) -> slice:
    """The rows of scales of rows of a matrix ``[out, in]``; ValueError unless these are whole blocks."""
    if start % BLOCK or (stop % BLOCK and stop != shape[0]):
        raise ValueError(f"rows {start} to {stop} of an FP8 matrix {list(shape)} are not whole blocks of {BLOCK}")
    return slice(start // BLOCK, -(-stop // BLOCK))


def quantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 numbers and block scales of a matrix ``[out, in]``; the largest magnitude of a block becomes 448."""
    padding = [-size % BLOCK for size in numbers.shape]
    padded = torch.nn.functional.pad(numbers.float(), (0, padding[1], 0, padding[0]))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [out / 128, 128, in / 128, 128]
    largest = tiles.abs().amax((1, 3))
    scales = torch.where(largest == 0, 1.0, groups.over(largest, FP8_MAX))
    values = FP8.encode(tiles, scales[:, None, :, None]).view(torch.uint8).flatten(2).flatten(0, 1)
    return values[: numbers.shape[0], : numbers.shape[1]].contiguous().view(FP8.dtype), scales


# From a format, the shape of a matrix or a stack, the dtype of the computation and a device: its storage.
MakeMatrix = Callable[[WeightFormat, tuple[int, ...], torch.dtype, torch.device | str], Matrix]


def make_matrix(form: WeightFormat, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Matrix:
    """Uninitialized row-major storage; a ``MakeMatrix``."""
    if form.is_fp8:
        scales = torch.empty(num_blocks(shape), dtype=torch.float32, device=device)
        return Matrix(torch.empty(shape, dtype=FP8.dtype, device=device), scales, form, dtype)
    if form.is_quantized:
        values = torch.empty((*shape[:-1], shape[-1] * form.bits // 8), dtype=torch.uint8, device=device)
        scales_shape = *shape[:-1], *form.scales_shape(shape[-1])
        scales = torch.empty(scales_shape, dtype=groups.scale_dtype(form), device=device)
        return Matrix(values, scales, form, dtype)
    stored = getattr(torch, form.dtype)
    if stored == dtype and torch.device(device).type == "cpu":
        return Matrix(memory.zeros(shape, dtype), None, form, dtype)
    return Matrix(torch.empty(shape, dtype=stored, device=device), None, form, dtype)

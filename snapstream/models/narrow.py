"""Matrices whose numbers are narrower than those computed with: 16-bit floats under fp32, and codes in groups.

Both lie row by row and are widened before they multiply, a block of rows at a time, so that what is wide stays small:
right on every device, fast on none. On a GPU few tokens are multiplied with the codes themselves
(``Kernels.code_linear``). A decode step that reads narrow numbers in another order brings a ``Weight`` of its own
(``make`` of ``load_weights``); prefill widens a layer once (``widening.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snapstream.config import WeightForm
from snapstream.kernels import groups
from snapstream.kernels.bound import Kernels
from snapstream.models.blocks import Blocks
from snapstream.models.row_major import FEW, RowMajor
from snapstream.models.weight import Dense, Index, Weight

# From a form, the shape of a matrix or a stack, the dtype of the computation and a device: its storage.
MakeWeight = Callable[[WeightForm, tuple[int, ...], torch.dtype, torch.device | str], Weight]


def make_weight(form: WeightForm, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Weight:
    """Uninitialised plain storage of that form; a ``MakeWeight``."""
    if form.is_blocks:
        return Blocks.empty(shape, dtype, device)
    if form.is_codes:
        codes = torch.empty((*shape[:-1], shape[-1] * form.bits // 8), dtype=torch.uint8, device=device)
        scales = torch.empty((*shape[:-1], shape[-1] // form.group), dtype=groups.SCALE_DTYPE, device=device)
        return Grouped(codes, scales, form, dtype)
    stored = getattr(torch, form.width)
    if stored == dtype:
        return Dense.empty(shape, dtype, device)
    return Narrow(torch.empty(shape, dtype=stored, device=device), dtype, form.rounds_inputs)


class Narrow(RowMajor):
    """Floats of 16 bits, computed with in fp32. Widening them is exact."""

    def __init__(self, data: Tensor, dtype: torch.dtype, rounds_inputs: bool = False) -> None:
        self.data, self.dtype, self._rounds_inputs = data, dtype, rounds_inputs

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def __getitem__(self, index: Index) -> Narrow:
        return Narrow(self.data[index], self.dtype, self._rounds_inputs)

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply``; a form that rounds inputs sees ``x`` in the dtype of the storage."""
        return super().multiply(x.to(self.data.dtype).to(x.dtype) if self._rounds_inputs else x, bias, kernels)

    def fill(self, numbers: Tensor) -> None:
        """See ``Weight.fill``; the numbers are rounded to the dtype of the storage."""
        self.data.copy_(numbers)

    def dense(self) -> Tensor:
        """See ``Weight.dense``."""
        return self.data.to(self.dtype)

    def multiply_grouped(self, x: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply_grouped``."""
        return kernels.grouped_linear(x, self.data, None, ends)

    def _rows(self, token_ids: Tensor) -> Narrow:
        return Narrow(self.data[token_ids], self.dtype)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)


class Grouped(RowMajor):
    """Codes of 8 or 4 bits and a scale per group (``kernels/groups.py``)."""

    def __init__(self, codes: Tensor, scales: Tensor, form: WeightForm, dtype: torch.dtype) -> None:
        """``codes [..., out, in * bits / 8]`` uint8, ``scales [..., out, in / group]`` fp16."""
        self.codes, self.scales, self.form, self.dtype = codes, scales, form, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.form.bits)

    def __getitem__(self, index: Index) -> Grouped:
        return Grouped(self.codes[index], self.scales[index], self.form, self.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply``; a form that rounds inputs sees ``x`` after a trip through int8."""
        if self.form.rounds_inputs:
            x = groups.quantise_activations(x, self.form.group).to(x.dtype)
        if kernels.code_linear is not None and len(x) <= FEW:
            return kernels.code_linear(x, self.codes, self.scales, bias)
        return super().multiply(x, bias, kernels)

    def fill(self, numbers: Tensor) -> None:
        """See ``Weight.fill``; the numbers are rounded to codes, where the storage is."""
        if len(self.shape) > 2:
            for index, part in enumerate(numbers):
                self[index].fill(part)
            return
        for start, stop in self._blocks():
            block = numbers[start:stop].to(self.codes.device)
            self[start:stop].fill_codes(*groups.quantise(block, self.form.bits, self.form.group))

    def fill_codes(self, codes: Tensor, scales: Tensor) -> None:
        """See ``Weight.fill_codes``; of these bits and groups."""
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def dense(self) -> Tensor:
        """See ``Weight.dense``."""
        return groups.widen(self.codes, self.scales, self.form.bits).to(self.dtype)

    def _rows(self, token_ids: Tensor) -> Grouped:
        return Grouped(self.codes[token_ids], self.scales[token_ids], self.form, self.dtype)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales

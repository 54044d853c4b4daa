"""Matrices in panels, the layout of the looped CPU library (``kernels/cpu/looped``); eager and prefill use them too.

The panel product takes any number of tokens and dequantizes on the fly, so a weight is in memory once. FP8 rows are
stored in whole blocks of 128, so that a block has one scale.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from snapstream.config import WeightFormat
from snapstream.config.weights import INT16_GROUP, PrefillInputs
from snapstream.kernels import memory
from snapstream.kernels.cpu.looped import panels, prompt
from snapstream.kernels.cpu.looped.library import FORMATS, PANEL, Library, Stack, address
from snapstream.kernels.formats import FP8
from snapstream.kernels.interface import ExpertParts, Kernels, LayerActivation, Pairs, SumNorm
from snapstream.kernels.reference import BLOCK
from snapstream.models.matrix import Index, MakeMatrix, Matrix, block_rows, decode, encode, num_blocks

_NO_PARTS = ExpertParts()
_ROWS_AT_ONCE = 16 * PANEL  # that are quantized; bounds the fp32 temporaries


class PanelMatrix(Matrix):
    """A matrix or a stack in panels, for computation in fp32. A view is a layer, or a range of rows of each matrix."""

    is_read_by_prefill = True
    is_batch_invariant = True

    def __init__(
        self,
        library: Library,
        data: Tensor,
        shape: tuple[int, ...],
        form: WeightFormat,
        scales: Tensor | None = None,
        *,
        inputs: str = "float32",
        rows: range | None = None,
    ) -> None:
        """``data``: panels of matrices ``shape [..., out, in]``, int8 and int4 with their scales; ``scales``: of FP8
        blocks; ``inputs``: dtype to which ``multiply`` rounds inputs; ``rows``: of the view.
        """
        super().__init__(data, scales, form, torch.float32)
        self.library, self._matrix, self._inputs = library, shape, inputs
        self._rows = range(shape[-2]) if rows is None else rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._matrix[:-2], len(self._rows), self._matrix[-1])

    def __getitem__(self, index: Index) -> Self:
        data, scales, shape, rows = self.data, self.scales, self._matrix, self._rows
        skipped = 0  # leading dimensions of which the view has all
        for part in index if isinstance(index, tuple) else (index,):
            if len(shape) > 2 and isinstance(part, int) and not skipped:
                data, scales, shape = data[part], None if scales is None else scales[part], shape[1:]
            elif len(shape) > 2 + skipped and part == slice(None):
                skipped += 1
            elif len(shape) == 2 + skipped and isinstance(part, slice):
                rows = rows[part]
            else:
                raise TypeError(f"panels of shape {list(self.shape)} have no view {index!r}")
        if self.form.is_fp8:
            block_rows(rows.start, rows.stop, shape[-2:])  # ValueError unless whole blocks
        return type(self)(self.library, data, shape, self.form, scales, inputs=self._inputs, rows=rows)

    def fill(self, numbers: Tensor) -> None:
        if tuple(numbers.shape) != self.shape:
            raise ValueError(f"numbers of shape {list(numbers.shape)} for panels of shape {list(self.shape)}")
        if len(self._matrix) > 2:
            for index, part in enumerate(numbers):
                self[index].fill(part)
        elif not self.form.is_quantized:
            panels.fill_rows(self.data, self._rows.start, numbers)
        else:
            count = BLOCK if self.form.is_fp8 else _ROWS_AT_ONCE
            for start in range(0, len(numbers), count):
                part = numbers[start : start + count]
                self[start : start + len(part)].fill_quantized(*encode(part, self.form))

    def fill_quantized(self, values: Tensor, scales: Tensor) -> None:
        first = self._rows.start
        if len(self._matrix) > 2:
            for index, (own_values, own_scales) in enumerate(zip(values, scales, strict=True)):
                self[index].fill_quantized(own_values, own_scales)
        elif not self.form.is_quantized:
            super().fill_quantized(values, scales)
        elif self.scales is None:
            panels.fill_codes(self.library, self.data, first, values, scales, self.form)
        else:
            panels.fill_rows(self.data.view(torch.uint8), first, values.view(torch.uint8))
            self.scales[block_rows(first, self._rows.stop, self._matrix[-2:])] = scales

    def dense(self) -> Tensor:
        self._need_whole()
        num_out, num_in = self._matrix[-2:]
        if self.form.is_fp8:
            numbers = panels.rows_of(self.data.view(torch.uint8), num_out, num_in).view(FP8.dtype)
            return decode(numbers, self.scales, self.form)  # type: ignore[arg-type]
        if not self.form.is_quantized:
            return panels.rows_of(self.data, num_out, num_in).to(torch.float32)
        if len(self._matrix) > 2:
            return torch.stack([self[index].dense() for index in range(self._matrix[0])])
        return decode(*panels.codes_of(self.data, num_out, self.form), self.form)

    def dequantize_into(self, out: Tensor) -> None:
        out.copy_(self.dense())

    @property
    def stack(self) -> Stack:
        """Struct of whole matrices for the library; this matrix must outlive its use."""
        self._need_whole()
        num_out, num_in, form = *self._matrix[-2:], self.form
        if form.is_quantized and not form.is_fp8:
            return panels.stack_of_codes(self.data, num_out, num_in, form)
        stack = panels.stack_of(self.data, num_out, num_in)
        if form.is_fp8:
            stack.scales = address(self.scales)
        else:
            stack.inputs = FORMATS["bfloat16" if form.rounds_inputs else "float32"]
        return stack

    def multiply_exactly(self, x: Tensor) -> Tensor:
        stack = self.stack
        stack.inputs = FORMATS["float32"]
        return prompt.linear(self.library, stack, x[None], None)[0]

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """Batch-invariant. Inputs are rounded as configured for prefill; looped decode uses ``stack``."""
        return prompt.linear(self.library, self._prefill_stack, x, bias)

    def multiply_normed(self, given: SumNorm, bias: Tensor | None, kernels: Kernels) -> Tensor:
        return prompt.linear(self.library, self._prefill_stack, given, bias)

    def swiglu(
        self, down: Matrix, given: SumNorm | Tensor, biases: tuple[Tensor | None, Tensor | None], kernels: Kernels,
        activation: LayerActivation = "silu",
    ) -> Tensor:  # fmt: skip
        """One native call if gate and up are whole panels."""
        if not isinstance(down, PanelMatrix) or down.shape[-1] % PANEL:
            return super().swiglu(down, given, biases, kernels, activation)
        stacks = self._prefill_stack, down._prefill_stack
        return prompt.swiglu(self.library, stacks, given, biases, activation)

    def swiglu_grouped(
        self, down: Matrix, x: Tensor, pairs: Pairs, kernels: Kernels, parts: ExpertParts = _NO_PARTS
    ) -> Tensor:
        """One native call if gate and up are whole panels, which are whole groups of ``down`` where it takes int8."""
        if (
            not isinstance(down, PanelMatrix)
            or down.shape[-1] % PANEL
            or (down._inputs == "int8" and PANEL % down.form.group)
        ):
            return super().swiglu_grouped(down, x, pairs, kernels, parts)
        return prompt.swiglu_grouped(self.library, (self._prefill_stack, down._prefill_stack), x, pairs, parts)

    def multiply_grouped(self, x: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
        return self._multiply_each(x, ends, kernels)

    @property
    def _prefill_stack(self) -> Stack:
        stack = self.stack
        stack.inputs = FORMATS[self._inputs]
        return stack

    def lookup(self, token_ids: Tensor) -> Tensor:
        if self.form.is_fp8:
            raise TypeError("embedding tables are not stored in FP8 blocks")
        return panels.lookup(self.library, self.stack, token_ids)

    def _need_whole(self) -> None:
        if len(self._rows) != self._matrix[-2]:
            raise TypeError(f"rows {self._rows.start} to {self._rows.stop} of {self._matrix[-2]} cannot be read alone")


def make_panels(library: Library, *, prefill_inputs: PrefillInputs | None = None) -> MakeMatrix:
    """Allocates matrices in panels, for computation in fp32 on a CPU.

    ``prefill_inputs``: see ``WeightFormats``; bf16 for bf16, int8 and int4 weights, int8 for groups, int16 where inputs
    are whole groups of 32. The output embedding multiplies few tokens, in prefill too, and rounds as in decode.
    ValueError if this processor has no bf16 products; rank 0's decides.
    """
    if prefill_inputs == "bfloat16":
        _need_bf16(library)

    def make(form: WeightFormat, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Matrix:
        if form.rounds_inputs and not form.is_quantized:
            _need_bf16(library)
        inputs: str = form.rounded(prefill_inputs) or "float32"
        if len(shape) == 2:  # a table
            inputs = "float32" if not form.rounds_inputs else "int8" if form.is_quantized else "bfloat16"
        elif inputs == "int16" and shape[-1] % INT16_GROUP:
            inputs = "float32"
        if form.is_fp8:
            blocks, scales = panels.empty_panels(shape, FP8.dtype), torch.empty(num_blocks(shape))
            return PanelMatrix(library, blocks, shape, form, scales, inputs=inputs)
        if not form.is_quantized:
            storage = panels.empty_panels(shape, getattr(torch, form.dtype))
            return PanelMatrix(library, storage, shape, form, inputs=inputs)
        storage = memory.zeros(panels.code_panel_shape(shape, form), torch.uint8)
        return PanelMatrix(library, storage, shape, form, inputs=inputs)

    return make


def _need_bf16(library: Library) -> None:
    if not library.multiplies_bf16():
        raise ValueError("this processor has no bfloat16 products to round inputs for; use activations 'dtype'")

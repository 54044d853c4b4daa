"""Matrices in panels, as the looped decode step on a CPU reads them; prefill reads the same bytes.

The panel product takes any number of tokens and widens as it goes, so nothing is widened beforehand and a weight lies
in memory once. ``panel_weight.py`` has what forms share, ``block_panels.py`` FP8, ``kernels/cpu/looped`` the layouts
and the products.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from torch import Tensor

from snapstream.config import DType, WeightForm
from snapstream.kernels import groups
from snapstream.kernels.cpu import pages
from snapstream.kernels.cpu.looped import code_panels, panels
from snapstream.kernels.cpu.looped.library import FORMATS, PANEL, Library, Stack
from snapstream.models.block_panels import BlockPanels
from snapstream.models.narrow import MakeWeight
from snapstream.models.panel_weight import Panels
from snapstream.models.weight import Weight

_ROWS_AT_ONCE = 16 * PANEL  # that are quantised: what is wide meanwhile stays small


def make_panels(library: Library, *, rounds_prefill: bool = False) -> MakeWeight:
    """Makes storage in panels for a computation in fp32 on a CPU.

    ``rounds_prefill``: see ``WeightForms``; matrices of bf16 and of codes have such products. The output embedding
    sees a few tokens of a prompt at most, in prefill too, and rounds as in decode. ValueError where this processor does
    not multiply bf16: of ranks, the leader's decides.
    """
    if rounds_prefill:
        _need_bf16(library)

    def make(form: WeightForm, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Weight:
        if form.rounds_inputs and not form.is_codes:
            _need_bf16(library)
        if form.is_blocks:
            return BlockPanels.empty(library, shape)
        is_table = len(shape) == 2
        if not form.is_codes:
            rounds = form.rounds_inputs if is_table else rounds_prefill and form.width == "bfloat16"
            storage = panels.empty_panels(shape, getattr(torch, form.width))
            return FloatPanels(library, storage, shape, "bfloat16" if rounds else "float32", form)
        inputs: DType | Literal["int8"] = "bfloat16" if rounds_prefill else "float32"
        if is_table:
            inputs = "int8" if form.rounds_inputs else "float32"
        storage = pages.zeros(code_panels.code_panel_shape(shape, form.bits, form.group), torch.uint8)
        return CodePanels(library, storage, shape, inputs, form)

    return make


def _need_bf16(library: Library) -> None:
    if not library.multiplies_bf16():
        raise ValueError("inputs are to be rounded to bfloat16, and this processor cannot; use activations 'dtype'")


class _Formed(Panels):
    """What has a form."""

    def __init__(
        self, library: Library, data: Tensor, shape: tuple[int, ...], inputs: str, form: WeightForm,
        rows: range | None = None,
    ) -> None:  # fmt: skip
        super().__init__(library, data, shape, inputs, rows)
        self.form = form

    def _view(self, data: Tensor, shape: tuple[int, ...], rows: range) -> Self:
        return type(self)(self.library, data, shape, self._inputs, self.form, rows)


class FloatPanels(_Formed):
    """Floats of 32 or 16 bits."""

    def _fill_rows(self, first: int, numbers: Tensor) -> None:
        panels.fill_rows(self.data, first, numbers)

    @property
    def stack(self) -> Stack:
        """See ``Panels.stack``."""
        self._need_whole()
        stack = panels.stack_of(self.data, self._matrix[-2], self._matrix[-1])
        stack.inputs = FORMATS["bfloat16" if self.form.rounds_inputs else "float32"]
        return stack

    def dense(self) -> Tensor:
        """See ``Weight.dense``: a copy in fp32."""
        self._need_whole()
        return panels.rows_of(self.data, self._matrix[-2], self._matrix[-1]).to(torch.float32)


class CodePanels(_Formed):
    """Codes of 8 or 4 bits and a scale per group (``kernels/groups.py``)."""

    def _fill_rows(self, first: int, numbers: Tensor) -> None:
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            codes = groups.quantise(numbers[start : start + _ROWS_AT_ONCE], self.form.bits, self.form.group)
            code_panels.fill_codes(self.data, first + start, *codes, self.form.bits)

    def fill_codes(self, codes: Tensor, scales: Tensor) -> None:
        """Store what is in codes of these bits and groups already."""
        code_panels.fill_codes(self.data, self._rows.start, codes, scales, self.form.bits)

    @property
    def stack(self) -> Stack:
        """See ``Panels.stack``."""
        self._need_whole()
        return code_panels.stack_of_codes(
            self.data, self._matrix[-2], self._matrix[-1], self.form.bits, rounds_inputs=self.form.rounds_inputs
        )

    def dense(self) -> Tensor:
        """See ``Weight.dense``: a copy in fp32."""
        self._need_whole()
        if len(self._matrix) > 2:
            return torch.stack([self[index].dense() for index in range(self._matrix[0])])
        return groups.widen(*code_panels.codes_of(self.data, self._matrix[-2], self.form.bits), self.form.bits)

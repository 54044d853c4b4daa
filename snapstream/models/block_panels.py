"""FP8 blocks in panels, as looped steps on a CPU read them: a byte per number, and scales as the checkpoint has them.

``blocks.py`` is the plain form of the same numbers. Rows are stored in whole blocks, so that a block has one scale.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from snapstream.kernels import fp8
from snapstream.kernels.cpu.looped import panels
from snapstream.kernels.cpu.looped.library import Library, Stack, address
from snapstream.kernels.reference import BLOCK, widen_blocks
from snapstream.models.blocks import block_rows, num_blocks, quantise
from snapstream.models.panel_weight import Panels
from snapstream.models.weight import Index


class BlockPanels(Panels):
    """FP8 numbers and block scales."""

    def __init__(
        self, library: Library, data: Tensor, shape: tuple[int, ...], scales: Tensor, rows: range | None = None
    ) -> None:
        """``data``: panels of e4m3fn, ``scales [..., ceil(out / 128), ceil(in / 128)]`` fp32, both of matrices
        ``shape``.
        """
        super().__init__(library, data, shape, rows=rows)
        self.scales = scales

    @classmethod
    def empty(cls, library: Library, shape: tuple[int, ...]) -> Self:
        """Storage to be filled."""
        return cls(library, panels.empty_panels(shape, fp8.DTYPE), shape, torch.empty(num_blocks(shape)))

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def __getitem__(self, index: Index) -> Self:
        """See ``Weight.__getitem__``; ValueError for rows that are not whole blocks."""
        view = super().__getitem__(index)
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts[: len(self._matrix) - 2]:
            view.scales = view.scales[part]
        return view

    def fill_codes(self, codes: Tensor, scales: Tensor) -> None:
        """Store what is FP8 with block scales already."""
        panels.fill_rows(self.data.view(torch.uint8), self._rows.start, codes.view(torch.uint8))
        self.scales[block_rows(self._rows.start, self._rows.stop, self._matrix[-2:])] = scales

    def dense(self) -> Tensor:
        """See ``Weight.dense``: a copy in fp32."""
        self._need_whole()
        numbers = panels.rows_of(self.data.view(torch.uint8), self._matrix[-2], self._matrix[-1])
        return widen_blocks(numbers.view(fp8.DTYPE), self.scales)

    @property
    def stack(self) -> Stack:
        """See ``Panels.stack``."""
        self._need_whole()
        stack = panels.stack_of(self.data, self._matrix[-2], self._matrix[-1])
        stack.scales = address(self.scales)
        return stack

    def lookup(self, token_ids: Tensor) -> Tensor:
        """A TypeError."""
        raise TypeError("a table of embeddings is not kept in FP8 blocks")

    def _view(self, data: Tensor, shape: tuple[int, ...], rows: range) -> Self:
        block_rows(rows.start, rows.stop, shape[-2:])  # which refuses others
        return type(self)(self.library, data, shape, self.scales, rows)

    def _fill_rows(self, first: int, numbers: Tensor) -> None:
        for start in range(0, len(numbers), BLOCK):
            part = numbers[start : start + BLOCK]
            view = self[first + start : first + start + len(part)]
            view.fill_codes(*quantise(part))

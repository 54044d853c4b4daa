"""What narrow forms of a matrix share: rows that lie one after the other and are widened in blocks before a product.

``narrow.py`` and ``blocks.py`` have the forms.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from snapstream.kernels.bound import Kernels
from snapstream.models.shapes import widened_block
from snapstream.models.weight import Index, Weight

FEW = 64  # tokens that a kernel multiplies with what is stored; beyond, a product is bound by arithmetic


class RowMajor(Weight):
    """Rows one after the other, widened in blocks."""

    dtype: torch.dtype  # of the computation

    @abstractmethod
    def __getitem__(self, index: Index) -> RowMajor: ...

    @abstractmethod
    def _rows(self, token_ids: Tensor) -> RowMajor:
        """Copies of rows of a matrix."""

    @abstractmethod
    def _tensors(self) -> tuple[Tensor, ...]:
        """All that is stored, ``[..., out, any]``."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def widen(self, out: Tensor) -> None:
        """See ``Weight.widen``."""
        if len(self.shape) > 2:
            for index, part in enumerate(out):
                self[index].widen(part)
            return
        for start, stop in self._blocks():
            out[start:stop] = self[start:stop].dense()

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply``: ``kernels.linear`` of the widened rows, block by block."""
        parts = [
            kernels.linear(x, self[start:stop].dense(), None if bias is None else bias[start:stop])
            for start, stop in self._blocks()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def lookup(self, token_ids: Tensor) -> Tensor:
        """See ``Weight.lookup``."""
        return self._rows(token_ids).dense()

    def _blocks(self) -> list[tuple[int, int]]:
        """Ranges of rows of a matrix ``[out, in]``."""
        num_out, num_in = self.shape
        rows = max(widened_block(self._tensors()[0].device.type) // num_in, 1)
        return [(start, min(start + rows, num_out)) for start in range(0, num_out, rows)]

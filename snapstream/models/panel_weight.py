"""What all matrices in panels have in common: views, places for rows, and the product that widens as it goes.

``panels.py`` has floats and codes, ``block_panels.py`` FP8; ``kernels/cpu/looped`` the layouts and the products.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

from torch import Tensor

from snapstream.kernels.bound import Kernels, Pairs, SumNorm
from snapstream.kernels.cpu.looped import panels, prompt_layer
from snapstream.kernels.cpu.looped.library import FORMATS, PANEL, Library, Stack
from snapstream.models.weight import Index, Weight


class Panels(Weight):
    """What every form shares. A view is a layer, or a range of the rows of a matrix."""

    multiplies_narrow = True
    sums_alike = True

    def __init__(
        self, library: Library, data: Tensor, shape: tuple[int, ...], inputs: str = "float32", rows: range | None = None
    ) -> None:
        """``data``: panels of matrices ``shape [..., out, in]``; ``inputs``: to what ``multiply`` rounds; ``rows``:
        those that belong to the view.
        """
        self.library, self.data, self._matrix, self._inputs = library, data, shape, inputs
        self._rows = range(shape[-2]) if rows is None else rows

    @abstractmethod
    def _view(self, data: Tensor, shape: tuple[int, ...], rows: range) -> Self: ...

    @abstractmethod
    def _fill_rows(self, first: int, numbers: Tensor) -> None:
        """Store ``numbers [n, in]`` as rows of a matrix."""

    @property
    @abstractmethod
    def stack(self) -> Stack:
        """The struct for the library, of whole matrices; the weight must outlive its use."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._matrix[:-2], len(self._rows), self._matrix[-1])

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def __getitem__(self, index: Index) -> Self:
        data, shape, rows = self.data, self._matrix, self._rows
        for part in index if isinstance(index, tuple) else (index,):
            if len(shape) > 2 and isinstance(part, int):
                data, shape = data[part], shape[1:]
            elif len(shape) == 2 and isinstance(part, slice):
                rows = rows[part]
            else:
                raise TypeError(f"panels of shape {list(self.shape)} have no view {index!r}")
        return self._view(data, shape, rows)

    def fill(self, numbers: Tensor) -> None:
        """See ``Weight.fill``; the numbers are rounded as the storage has them."""
        if tuple(numbers.shape) != self.shape:
            raise ValueError(f"numbers of shape {list(numbers.shape)} for panels of shape {list(self.shape)}")
        if len(self._matrix) > 2:
            for index, part in enumerate(numbers):
                self[index].fill(part)
        else:
            self._fill_rows(self._rows.start, numbers)

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply``; the same sums for a token whatever is beside it. Looped decode does not come here:
        its steps round inputs as the form says, prefill as it was decided for prefill.
        """
        return panels.linear(self.library, self._prefill_stack, x, bias)

    def multiply_normed(self, given: SumNorm, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply_normed``: in one call, whose norm is made as steps make it."""
        return prompt_layer.normed_linear(self.library, self._prefill_stack, given, bias)

    def swiglu(
        self, down: Weight, given: SumNorm | Tensor, biases: tuple[Tensor | None, Tensor | None], kernels: Kernels
    ) -> Tensor:
        """See ``Weight.swiglu``: in one call, where gate and up are whole panels."""
        if not isinstance(down, Panels) or down.shape[-1] % PANEL or down._inputs == "int8":
            return super().swiglu(down, given, biases, kernels)
        return prompt_layer.swiglu(self.library, (self._prefill_stack, down._prefill_stack), given, biases)

    def swiglu_grouped(self, down: Weight, x: Tensor, pairs: Pairs, kernels: Kernels) -> Tensor:
        """See ``Weight.swiglu_grouped``: in one call, where gate and up are whole panels."""
        if not isinstance(down, Panels) or down.shape[-1] % PANEL or down._inputs == "int8":
            return super().swiglu_grouped(down, x, pairs, kernels)
        return prompt_layer.swiglu_grouped(self.library, (self._prefill_stack, down._prefill_stack), x, pairs)

    @property
    def _prefill_stack(self) -> Stack:
        stack = self.stack
        stack.inputs = FORMATS[self._inputs]
        return stack

    def lookup(self, token_ids: Tensor) -> Tensor:
        """See ``Weight.lookup``."""
        return panels.lookup(self.library, self.stack, token_ids)

    def _need_whole(self) -> None:
        if len(self._rows) != self._matrix[-2]:
            raise TypeError(f"rows {self._rows.start} to {self._rows.stop} of {self._matrix[-2]} cannot be read alone")

"""A matrix of a model as it lies in memory: the seam behind which its numbers may be narrower than those computed with.

A layer asks a ``Weight`` for its product and never sees its storage; a loader asks it for a place to put a checkpoint's
tensor. ``Dense`` keeps plain numbers, ``narrow.py`` has narrower ones; another form is a class of its own with the
product that reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import fp8, groups
from snapstream.kernels.bound import Kernels, Pairs, SumNorm
from snapstream.kernels.cpu import pages
from snapstream.kernels.reference import widen_blocks

Index = int | slice | tuple[int | slice, ...]


class Weight(ABC):
    """A matrix ``[out, in]``, or a stack of such: ``[L, out, in]``, ``[L, experts, out, in]``.

    A ``MakeWeight`` (``narrow.py``) makes the storage, empty.
    """

    multiplies_narrow = False  # fast for many tokens, too: prefill need not widen it beforehand

    sums_alike = False  # a token's product is the same bits whatever is beside it

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the numbers it stands for."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the storage, scales included."""

    @abstractmethod
    def __getitem__(self, index: Index) -> Weight:
        """A layer, an expert, or a slice of rows: a view, never a copy."""

    @abstractmethod
    def fill(self, numbers: Tensor) -> None:
        """Store ``numbers``, of this shape and any float dtype, in place."""

    def fill_codes(self, codes: Tensor, scales: Tensor) -> None:
        """Store numbers that a checkpoint has as codes of 8 or 4 bits in groups (``kernels/groups.py``), or as FP8 in
        blocks (``blocks.py``).
        """
        if codes.dtype == fp8.DTYPE:
            self.fill(widen_blocks(codes, scales))
            return
        self.fill(groups.widen(codes, scales, 8 * codes.shape[-1] // self.shape[-1]))

    @abstractmethod
    def dense(self) -> Tensor:
        """The numbers as they are computed with."""

    def widen(self, out: Tensor) -> None:
        """Write the numbers as they are computed with into ``out``, of this shape."""
        out.copy_(self.dense())

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """``x [T, in]`` times this matrix transposed, plus ``bias [out]``: ``[T, out]``."""

    def multiply_normed(self, given: SumNorm, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """The norm that ``given`` means, ``[T, in]``, times this matrix transposed, plus ``bias``: ``[T, out]``."""
        return self.multiply(kernels.normed(given), bias, kernels)

    def swiglu(
        self, down: Weight, given: SumNorm | Tensor, biases: tuple[Tensor | None, Tensor | None], kernels: Kernels
    ) -> Tensor:
        """``down(silu(gate x) * up x)``, ``[T, D]``, of a matrix ``[2I, D]``, gate and up in one, and ``down [D, I]``.

        x ``[T, D]`` is the norm that ``given`` means, or ``given``; ``biases`` are this matrix's and that of ``down``.
        """
        if isinstance(given, Tensor):
            gate_up = self.multiply(given, biases[0], kernels)  # [T, 2I]
        else:
            gate_up = self.multiply_normed(given, biases[0], kernels)
        return down.multiply(kernels.swiglu(gate_up), biases[1], kernels)

    def swiglu_grouped(self, down: Weight, x: Tensor, pairs: Pairs, kernels: Kernels) -> Tensor:
        """The weighted sum of what a token's experts make of it, ``x [T, D]`` to ``[T, D]``: matrices ``[X', 2M, D]``,
        gate and up in one, and ``down [X', D, M]``. A token's sum is taken in the order of its own choice.
        """
        (num_tokens, top_k), order = pairs.weights.shape, pairs.order
        gate_up = self.multiply_grouped(x[order // top_k], pairs.ends, kernels)  # [T k, 2M]
        inner = kernels.swiglu(gate_up)  # [T k, M]
        del gate_up  # a chunk's are large
        inner.mul_(pairs.weights.flatten()[order, None])  # the product is linear, and narrower before than behind it
        out = down.multiply_grouped(inner, pairs.ends, kernels)  # [T k, D]
        del inner
        if pairs.are_elsewhere is not None:
            out.masked_fill_(pairs.are_elsewhere[order, None], 0.0)  # what no expert made is any number
        return torch.empty_like(out).index_copy_(0, order, out).view(num_tokens, top_k, -1).sum(1)

    def multiply_grouped(self, x: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
        """Of a stack ``[X, out, in]``: each row of ``x [P, in]`` times the matrix of its expert: ``[P, out]``.

        Rows are sorted by expert, ``ends [X]`` int32 says before which row those of an expert end. Here one expert
        after the other, which reads ``ends`` on the host; a form with a kernel for it does better.
        """
        out, start = x.new_empty(len(x), self.shape[1]), 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                out[start:end] = self[expert].multiply(x[start:end], None, kernels)
            start = end
        return out

    @abstractmethod
    def lookup(self, token_ids: Tensor) -> Tensor:
        """Rows of an embedding table: ``token_ids [T]`` to ``[T, in]``."""


class Dense(Weight):
    """Plain numbers in the dtype of the computation."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Self:
        """Storage to be filled."""
        on_cpu = torch.device(device).type == "cpu"
        return cls(pages.zeros(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def __getitem__(self, index: Index) -> Dense:
        return Dense(self.data[index])

    def fill(self, numbers: Tensor) -> None:
        """See ``Weight.fill``; the numbers are rounded to the dtype of the storage."""
        self.data.copy_(numbers)

    def dense(self) -> Tensor:
        """The storage itself."""
        return self.data

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply``."""
        return kernels.linear(x, self.data, bias)

    def multiply_grouped(self, x: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply_grouped``."""
        return kernels.grouped_linear(x, self.data, None, ends)

    def lookup(self, token_ids: Tensor) -> Tensor:
        """See ``Weight.lookup``."""
        return F.embedding(token_ids, self.data)

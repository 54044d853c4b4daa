"""A matrix as a checkpoint of FP8 blocks stores it: e4m3 bytes, and an fp32 scale per block of 128 by 128.

DeepSeek-V3's form (arXiv 2412.19437, section 3.3), also Qwen's. It is kept as it is on every device. Few tokens are
multiplied with the bytes themselves (``Kernels.grouped_linear``, a plain matrix being a stack of one), many with rows
that are widened first; prefill widens a layer once (``widening.py``), experts when they have tokens. A number times its
scale is exact in fp32 but for one rounding, the same everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.kernels import fp8, reference
from snapstream.kernels.bound import Kernels
from snapstream.kernels.reference import BLOCK
from snapstream.models.row_major import FEW, RowMajor
from snapstream.models.shapes import widened_block
from snapstream.models.weight import Index


class Blocks(RowMajor):
    """FP8 numbers and block scales."""

    def __init__(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """``data [..., out, in]`` e4m3fn, ``scales [..., ceil(out / 128), ceil(in / 128)]`` fp32."""
        self.data, self.scales, self.dtype = data, scales, dtype

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Blocks:
        """Uninitialised storage for numbers that are computed with in ``dtype``."""
        data = torch.empty(shape, dtype=fp8.DTYPE, device=device)
        return cls(data, torch.empty(num_blocks(shape), dtype=torch.float32, device=device), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def __getitem__(self, index: Index) -> Blocks:
        """See ``Weight.__getitem__``; ValueError for rows that are not whole blocks."""
        places = index if isinstance(index, tuple) else (index,)
        rows_at = len(self.shape) - 2
        of_scales = []
        for dim, place in enumerate(places):
            if dim < rows_at:
                of_scales.append(place)
                continue
            start, stop, _ = place.indices(self.shape[dim]) if isinstance(place, slice) else (place, place + 1, 1)
            of_scales.append(block_rows(start, stop, self.shape[-2:]))
        return Blocks(self.data[places], self.scales[tuple(of_scales)], self.dtype)

    def fill(self, numbers: Tensor) -> None:
        """See ``Weight.fill``; the largest magnitude of a block becomes the largest FP8 number."""
        if len(self.shape) > 2:
            for index, part in enumerate(numbers):
                self[index].fill(part)
            return
        for start, stop in self._blocks():
            self[start:stop].fill_codes(*quantise(numbers[start:stop].to(self.data.device)))

    def fill_codes(self, codes: Tensor, scales: Tensor) -> None:
        """Store what is FP8 with block scales already."""
        self.data.copy_(codes)
        self.scales.copy_(scales)

    def dense(self) -> Tensor:
        """See ``Weight.dense``."""
        return reference.widen_blocks(self.data, self.scales).to(self.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply``."""
        if len(x) > FEW:
            return super().multiply(x, bias, kernels)
        ends = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
        out = kernels.grouped_linear(x, self.data[None], self.scales[None], ends)
        return out if bias is None else out.add_(bias)

    def multiply_grouped(self, x: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
        """See ``Weight.multiply_grouped``."""
        return kernels.grouped_linear(x, self.data, self.scales, ends)

    def _rows(self, token_ids: Tensor) -> Blocks:
        raise TypeError("a table of embeddings is not kept in FP8 blocks")

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.data, self.scales

    def _blocks(self) -> list[tuple[int, int]]:
        num_out, num_in = self.shape
        rows = max(widened_block(self.data.device.type) // num_in // BLOCK, 1) * BLOCK
        return [(start, min(start + rows, num_out)) for start in range(0, num_out, rows)]


def num_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of matrices ``[..., out, in]``."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def block_rows(start: int, stop: int, shape: tuple[int, ...]) -> slice:
    """Which rows of scales belong to rows of a matrix ``[out, in]``; ValueError where they are not whole blocks."""
    if start % BLOCK or (stop % BLOCK and stop != shape[0]):
        raise ValueError(f"rows {start} to {stop} of an FP8 matrix {list(shape)} are not whole blocks of {BLOCK}")
    return slice(start // BLOCK, -(-stop // BLOCK))


def quantise(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 numbers and block scales of a matrix ``[out, in]``; the largest magnitude of a block becomes 448."""
    padding = [-size % BLOCK for size in numbers.shape]
    padded = torch.nn.functional.pad(numbers.float(), (0, padding[1], 0, padding[0]))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [out / 128, 128, in / 128, 128]
    largest = tiles.abs().amax((1, 3))
    scales = torch.where(largest == 0, 1.0, largest / fp8.MAX)
    codes = fp8.quantise(tiles, scales[:, None, :, None]).view(torch.uint8).flatten(2).flatten(0, 1)
    return codes[: numbers.shape[0], : numbers.shape[1]].contiguous().view(fp8.DTYPE), scales

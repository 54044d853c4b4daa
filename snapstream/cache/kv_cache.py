"""Storage of all rows: two tensors ``[L, rows + 1, G, C, E]`` whose addresses never change.

Row ``num_rows`` is the padding row: it absorbs the unused entries of a decode batch and belongs to no request. Keys are
stored after RoPE with their true positions and are never rotated again (SnapStream, section 3).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from snapstream.config import ModelConfig


class KVCache:
    """Keys and values of ``num_rows`` sequences (and the padding row), ``capacity`` slots each."""

    def __init__(
        self,
        config: ModelConfig,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (config.num_layers, num_rows + 1, config.num_kv_heads, capacity, config.head_dim)
        self.num_rows = num_rows
        self.capacity = capacity
        # A slot that was never written may be read with weight 0, and 0 x NaN is NaN: so rows begin as zeros.
        self.k = _zeros(shape, dtype, torch.device(device))  # [L, rows+1, G, C, E]
        self.v = _zeros(shape, dtype, torch.device(device))  # [L, rows+1, G, C, E]

    @property
    def padding_row(self) -> int:
        """Index of the row that belongs to nobody."""
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V, the padding row included."""
        return self.k.nbytes + self.v.nbytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU from the system, page by page on first use, so that untouched slots cost no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

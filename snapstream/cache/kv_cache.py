"""Storage of all rows: two tensors ``[L, rows + 1, G, C, E]`` whose addresses never change.

Row ``num_rows`` is the padding row: it absorbs the unused entries of a decode batch and belongs to no request. Keys are
stored after RoPE with their true positions and are never rotated again (SnapStream, section 3).
"""

from __future__ import annotations

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
        # Not zeroed: a slot is read only after it was written, and untouched pages cost no memory on a CPU.
        self.k = torch.empty(shape, dtype=dtype, device=device)  # [L, rows+1, G, C, E]
        self.v = torch.empty(shape, dtype=dtype, device=device)  # [L, rows+1, G, C, E]
        # The padding row is read by every padded batch entry, so it must hold numbers.
        self.k[:, num_rows].zero_()
        self.v[:, num_rows].zero_()

    @property
    def padding_row(self) -> int:
        """Index of the row that belongs to nobody."""
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V, the padding row included."""
        return self.k.nbytes + self.v.nbytes

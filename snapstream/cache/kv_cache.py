"""Storage of all rows: two tensors ``[L, rows + 1, G, C, E]`` whose addresses never change.

Row ``num_rows`` is the padding row: it absorbs the unused entries of a decode batch and belongs to no request. Keys are
stored after RoPE with their true positions and are never rotated again (SnapStream, section 3). In FP8 each layer, row
and kv head has a scale for K and one for V, fixed when a prompt is written to the row: ``kernels/fp8.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from snapstream.cache.spec import KVSpec
from snapstream.kernels import fp8
from snapstream.kernels.bound import Kernels, bind
from snapstream.kernels.rows import LayerRows

_STORED_AT_ONCE = 4096  # tokens that are scaled in fp32 at a time: not more memory than scoring takes


class KVCache:
    """Keys and values of ``num_rows`` sequences (and the padding row), ``capacity`` slots each."""

    def __init__(
        self,
        spec: KVSpec,
        num_rows: int,
        capacity: int,
        device: torch.device | str,
        kernels: Kernels | None = None,
    ) -> None:
        shape = (spec.num_layers, num_rows + 1, spec.num_kv_heads, capacity, spec.key_dim)
        dtype = fp8.DTYPE if spec.kv_dtype == "fp8" else getattr(torch, spec.dtype)
        self.spec = spec
        self.kernels = bind(device) if kernels is None else kernels
        self.num_rows = num_rows
        self.capacity = capacity
        # A slot that was never written may be read with weight 0, and 0 x NaN is NaN: so rows begin as zeros.
        self.k = _zeros(shape, dtype, torch.device(device))  # [L, rows+1, G, C, E]
        self.v = _zeros(shape, dtype, torch.device(device))  # [L, rows+1, G, C, E]
        self.k_scale: torch.Tensor | None = None
        self.v_scale: torch.Tensor | None = None
        if dtype == fp8.DTYPE:
            self.k_scale, self.v_scale = (torch.ones(shape[:3], device=device) for _ in "kv")  # [L, rows+1, G] fp32

    def layer(self, layer: int) -> LayerRows:
        """One layer of all rows, as kernels take it."""
        return LayerRows(self.k, self.v, layer, self.k_scale, self.v_scale)

    def tokens(self, layer: int, row: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values ``[G, n, E]`` that lie in ``slots [n]`` of a row."""
        return self.k[layer, row].index_select(1, slots), self.v[layer, row].index_select(1, slots)

    @property
    def padding_row(self) -> int:
        """Index of the row that belongs to nobody."""
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V and of their scales, the padding row included."""
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def scales(self, layer: int) -> fp8.Scales | None:
        """Scales of K and V of a layer, ``[rows+1, G]``; None unless rows are FP8."""
        if self.k_scale is None or self.v_scale is None:
            return None
        return self.k_scale[layer], self.v_scale[layer]

    def begin_rows(self, layer: int, rows: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fix the scales of ``rows`` before a prompt's ``keys, values [G, N, E]`` go there; without FP8 nothing."""
        scales = self.scales(layer)
        if scales is None:
            return
        for scale, tokens in zip(scales, (keys, values), strict=True):
            own = fp8.scale_of(tokens)  # [G]
            for row in rows:
                scale[row] = own

    def store(self, layer: int, row: int, place: slice, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put ``keys, values [G, n, E]`` into the slots ``place`` of a row."""
        scales = self.scales(layer) or (None, None)
        for cache, tokens, scale in zip((self.k, self.v), (keys, values), scales, strict=True):
            own = cache[layer, row, :, place]
            if scale is None:
                own.copy_(tokens)
                continue
            for start in range(0, tokens.shape[1], _STORED_AT_ONCE):
                block = slice(start, start + _STORED_AT_ONCE)
                own[:, block] = fp8.quantise(tokens[:, block], scale[row, :, None, None])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU from the system, page by page on first use, so that untouched slots cost no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

"""Storage of all rows: two tensors ``[L, rows + 1, G, C, E]`` whose addresses never change.

The spec says how much a token takes (``spec.py``); where values are the first numbers of the keys there is one tensor,
and the values are a view of it. Row ``num_rows`` is the padding row: it absorbs the unused entries of a decode batch
and belongs to no request. Keys are stored after RoPE with their true positions and are never rotated again (SnapStream,
section 3). In FP8 each layer, row and kv head has a scale for K and one for V, fixed when a prompt is written to the
row: ``kernels/fp8.py``. In int8 each slot has them too: ``kernels/int8.py``. Where kv heads have unlike numbers of
slots, rows lie slot by slot instead: ``head_rows.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from snapstream.cache.deal import Deal
from snapstream.cache.head_rows import HeadTable, overlapping
from snapstream.cache.spec import KVSpec
from snapstream.config.heads import HeadSlots
from snapstream.kernels import fp8, int8
from snapstream.kernels.bound import Kernels, bind
from snapstream.kernels.cpu import pages
from snapstream.kernels.rows import LayerRows

_STORED_AT_ONCE = 4096  # tokens that are scaled in fp32 at a time: this takes no more memory than scoring


class KVCache:
    """Keys and values of ``num_rows`` sequences (and the padding row), ``capacity`` slots each."""

    def __init__(
        self,
        spec: KVSpec,
        num_rows: int,
        capacity: int,
        device: torch.device | str,
        kernels: Kernels | None = None,
        deal: Deal | None = None,
        heads: HeadSlots | None = None,
    ) -> None:
        """``kernels`` read and write the rows; by default those that ``bind`` has for the device. With ``deal`` only a
        rank's share of the ``num_rows`` lies here. With ``heads`` every kv head has slots of its own, and ``capacity``
        is that of a mean head.
        """
        self.spec = spec
        self.deal = deal
        self.num_rows = num_rows = num_rows if deal is None else deal.num_own
        self.capacity = capacity
        self.kernels = kernels or bind(device)
        self.heads = None if heads is None else HeadTable(heads, device)
        dtype = _dtype_of(spec)
        slots: tuple[int, ...] = (spec.num_layers, num_rows + 1, spec.num_kv_heads, capacity)
        if heads is not None:
            slots = ((num_rows + 1) * heads.row_slots,)  # k and v are [slots of all rows, E]
        # A slot that was never written may be read with weight 0, and 0 x NaN is NaN: so rows begin as zeros.
        self.k = _zeros((*slots, spec.key_dim), dtype, torch.device(device))  # [L, rows+1, G, C, E]
        self.k_scale = self._scales(slots, device)  # [L, rows+1, G] fp32, of int8 [L, rows+1, G, C] or per slot
        if spec.values_are_keys:
            self.v, self.v_scale = self.k[..., : spec.value_dim], self.k_scale  # [L, rows+1, G, C, E']
        else:
            self.v = _zeros((*slots, spec.value_dim), dtype, torch.device(device))  # [L, rows+1, G, C, E']
            self.v_scale = self._scales(slots, device)
        self._seen, self._seen_scales = (self.k, self.v), (self.k_scale, self.v_scale)  # by kernels
        if heads is not None:
            widest = heads.widest.capacity
            self._seen = overlapping(self.k, widest), overlapping(self.v, widest)
            self._seen_scales = _by_slot(self.k_scale, widest), _by_slot(self.v_scale, widest)

    def layer(self, index: int) -> LayerRows:
        """The handle through which kernels see one layer of all rows."""
        if self.heads is not None:  # the address of a head tells its layer
            index = 0
        return LayerRows(*self._seen, index, *self._seen_scales, self.spec.values_are_keys)

    def tokens(self, layer: int, row: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys ``[G, n, E]`` and values ``[G, n, E']`` that lie in ``slots [n]`` of a row."""
        return self.k[layer, row].index_select(1, slots), self.v[layer, row].index_select(1, slots)

    def own(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Those of the engine's ``rows`` that lie here, as they are counted here."""
        return tuple(rows) if self.deal is None else self.deal.own(rows)

    @property
    def padding_row(self) -> int:
        """Index of the row that belongs to nobody."""
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V and of their scales, the padding row included."""
        own = [self.k, self.k_scale] if self.spec.values_are_keys else [self.k, self.v, self.k_scale, self.v_scale]
        return sum(tensor.nbytes for tensor in own if tensor is not None)

    def scales(self, layer: int) -> fp8.Scales | None:
        """Scales of K and V of a layer, ``[rows+1, G]``, of int8 ``[rows+1, G, C]``; None for rows that need none."""
        return self.layer(layer).scales

    def begin_rows(self, layer: int, rows: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Fix the scales of ``rows`` before ``keys [G, N, E], values [G, N, E']`` go there; without FP8 nothing."""
        for stored, tokens, scale in self._stored(layer, keys, values):
            if scale is None or stored.dtype == int8.DTYPE:
                continue
            own = fp8.scale_of(tokens)  # [G]
            for row in rows:
                scale[row] = own

    def store(self, layer: int, row: int, place: slice, keys: Tensor, values: Tensor) -> None:
        """Put ``keys [G, n, E], values [G, n, E']`` into the slots ``place`` of a row."""
        for stored, tokens, scale in self._stored(layer, keys, values):
            own = stored[row, :, place]
            if scale is None:
                own.copy_(tokens)
                continue
            for start in range(0, tokens.shape[1], _STORED_AT_ONCE):
                block = slice(start, start + _STORED_AT_ONCE)
                if stored.dtype == int8.DTYPE:
                    found = int8.scale_of(tokens[:, block])  # [G, n]
                    scale[row, :, place][:, block] = found
                    own[:, block] = int8.quantise(tokens[:, block], found)
                    continue
                own[:, block] = fp8.quantise(tokens[:, block], scale[row, :, None, None])

    def _stored(self, layer: int, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Each tensor of a layer to write, with the numbers for it and its scales."""
        yield self.k[layer], keys, None if self.k_scale is None else self.k_scale[layer]
        if not self.spec.values_are_keys:
            yield self.v[layer], values, None if self.v_scale is None else self.v_scale[layer]

    def _scales(self, slots: tuple[int, ...], device: torch.device | str) -> Tensor | None:
        if self.spec.kv_dtype == "int8":
            return _zeros(slots, torch.float32, torch.device(device))
        heads = self.spec.num_layers, self.num_rows + 1, self.spec.num_kv_heads
        return torch.ones(heads, device=device) if self.spec.kv_dtype == "fp8" else None


def _by_slot(scales: Tensor | None, widest: int) -> Tensor | None:
    """Scales of slots as kernels see unlike heads; those of whole heads are none of their business (``HeadsView``)."""
    return None if scales is None or scales.dim() > 1 else overlapping(scales, widest)


def _dtype_of(spec: KVSpec) -> torch.dtype:
    own = {"fp8": fp8.DTYPE, "int8": int8.DTYPE, "bfloat16": torch.bfloat16}
    found: torch.dtype = own.get(spec.kv_dtype) or getattr(torch, spec.dtype)
    return found


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU untouched slots cost no memory."""
    return pages.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

"""KV transfer: one layer of a row as bytes for the decode engine, and back into rows there.

    of each kv head:  K scale | V scale | keys [n, E] | values [n, E']           n = min(N, C) slots

Scales only in formats that have them, ``[n]`` if per slot; values unless they are part of the keys. A recurrent layer
is sent as its state, tensor after tensor, on a single device; a layer that shares the slots of another as nothing.
Invariant: ``place`` after ``take`` copies the first row bit for bit, whatever the number of ranks of either engine:
whole rows are sent. With tensor parallelism the ranks gather and scatter kv heads, with data-parallel attention the
owner of a row broadcasts it; all ranks must make the same calls in the same order. ``plan/memory.py`` has the sizes
(``row_sizes``). With per-head budgets n differs between heads, and a layer is one run of bytes; this needs a single
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from snapstream.exec.results import HostCopy
from snapstream.kv import layout
from snapstream.kv.cache import KVCache
from snapstream.kv.spec import Full, Shared
from snapstream.models.decoder import Decoder
from snapstream.step import KVReceived, PrefillEntry


class RowParts:
    """Reads and writes layers of the rows of one cache as bytes."""

    def __init__(self, cache: KVCache, decoder: Decoder) -> None:
        self._cache, self._decoder, self._group = cache, decoder, decoder.group
        self._whole = decoder.whole_kv_spec()

    def take(self, layer: int, entry: PrefillEntry) -> Tensor:
        """A copy of a layer of the entry's first row with all kv heads, ``[G, B]`` bytes on every rank; with per-head
        budgets ``[1, B]``.
        """
        partition = self._cache.partition
        if isinstance(self._cache.spec.layers[layer], Shared):
            return torch.empty(1, 0, dtype=torch.uint8)
        if partition is None:
            return self._decoder.all_kv_heads(self._bytes(layer, entry.rows[0], entry), self._heads(layer)[0])
        row = next(iter(partition.local_rows(entry.rows[:1])), self._cache.padding_row)
        return self._group.broadcast(self._bytes(layer, row, entry), partition.owner(entry.rows[0]))

    def place(self, layer: int, entry: PrefillEntry, part: bytearray | None) -> None:
        """Write a layer to each of the entry's rows; rank 0 has ``part``, with all kv heads."""
        device, some_row = self._cache.k.device, self._cache.padding_row
        num_bytes = sum(piece.nbytes for piece in self._pieces(layer, some_row, entry))  # of local heads
        if not num_bytes or isinstance(self._cache.spec.layers[layer], Shared):
            return
        num_heads, local_heads = self._heads(layer)
        shape = (num_heads, num_bytes // (local_heads.stop - local_heads.start))
        if part is None:
            data = torch.empty(shape, dtype=torch.uint8, device=device)  # [G, B]
        else:
            data = torch.frombuffer(part, dtype=torch.uint8).view(shape).to(device)
        data = self._group.broadcast(data, 0)[local_heads]
        for row in self._cache.local_rows(entry.rows):
            start = 0
            for piece in self._pieces(layer, row, entry):
                stop = start + piece[0].numel() * piece.element_size()
                piece.copy_(data[:, start:stop].contiguous().view(piece.dtype).view(piece.shape))
                start = stop

    def hidden(self, rows: Sequence[KVReceived | None]) -> Tensor:
        """Hidden states ``[P, D]`` of the last tokens of prompts; rank 0 has the received rows."""
        dtype, device = self._decoder.dtype, self._decoder.device
        data = torch.empty((len(rows), self._decoder.config.stream_size * dtype.itemsize), dtype=torch.uint8)
        for own, row in zip(data, rows, strict=True):
            if row is not None:
                own.copy_(torch.frombuffer(row.hidden, dtype=torch.uint8))
        return self._group.broadcast(data.to(device), 0).view(dtype)

    def _heads(self, layer: int) -> tuple[int, slice]:
        """How many kv heads a layer's part of a row has on the wire, and those of this rank."""
        if self._cache.heads is not None or not isinstance(self._cache.spec.layers[layer], Full):
            return 1, slice(0, 1)
        whole, local = (spec.slots_of(layer).num_kv_heads for spec in (self._whole, self._cache.spec))
        first = self._group.rank * whole // self._group.size
        return whole, slice(first, first + local)

    def _bytes(self, layer: int, row: int, entry: PrefillEntry) -> Tensor:
        """A copy of a layer of a local row, ``[local kv heads, B]``; no bytes of a layer that keeps nothing."""
        none = torch.empty((1, 0), dtype=torch.uint8, device=self._cache.k.device)
        return torch.cat([_by_head(piece) for piece in self._pieces(layer, row, entry)] or [none], 1)

    def _pieces(self, layer: int, row: int, entry: PrefillEntry) -> Iterator[Tensor]:
        """Views of the row, ``[heads, ...]``, in wire order; of a recurrent layer its state, ``[1, ...]``."""
        for state in self._cache.state(layer).values():
            yield state[row : row + 1]
        for span in self._cache.spans(layer, entry.budget, entry.prompt_len):
            num_slots = layout.num_visible(entry.prompt_len, span.budget.capacity)
            parts = self._cache.parts(layer, row, span)
            for _, scale in parts:
                if scale is not None:
                    yield scale if scale.dim() == 1 else scale[:, :num_slots]
            for tokens, _ in parts:
                yield tokens[:, :num_slots]


def read_later(data: Tensor) -> Callable[[], memoryview]:
    """A function that waits for the device and returns the bytes of ``data``, which must not change."""
    copy = HostCopy(data.flatten())
    return lambda: copy.read()[0].numpy().data


def hidden_bytes(hidden: Tensor) -> Callable[[], memoryview]:
    """``read_later`` of a copy of a hidden state ``[D]``."""
    return read_later(hidden.contiguous().view(torch.uint8).clone())


def _by_head(piece: Tensor) -> Tensor:
    """``[G, ...]`` as bytes, ``[G, B]``."""
    return (piece.flatten(1) if piece.dim() > 1 else piece[:, None]).view(torch.uint8)

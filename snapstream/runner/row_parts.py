"""One layer of a row as bytes, for the engine that answers a prompt read here, and back into rows there.

    K scales [G] | V scales [G] | votes [G, K] | keys [G, n, E] | values [G, n, E']         n = min(N, C) slots

Scales are there for rows in FP8, and in int8, then ``[G, n]``; votes for rows that choose again, values unless they are
a part of the keys. Numbers of four bytes come first, so that each piece begins at a multiple of its size. Invariant:
``place`` after ``take`` gives the rows bit for bit what the first row had. ``transfer/wire.py`` knows the sizes
(``RowSizes``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from snapstream.cache import layout
from snapstream.cache.kv_cache import KVCache
from snapstream.runner.rescoring import Rescorer
from snapstream.runner.results import Arriving
from snapstream.step import PrefillEntry


class RowParts:
    """Pieces of one cache."""

    def __init__(self, cache: KVCache, rescorer: Rescorer | None) -> None:
        self._cache, self._votes = cache, None if rescorer is None else rescorer.votes

    def take(self, layer: int, entry: PrefillEntry) -> Callable[[], memoryview]:
        """Copy a layer of the entry's first row; the function waits for the device, on whatever thread calls it."""
        pieces = self._pieces(layer, entry.rows[0], entry)
        return read_later(torch.cat([_as_bytes(piece) for piece in pieces]))

    def place(self, layer: int, entry: PrefillEntry, part: bytearray) -> None:
        """Put a layer into each of the entry's rows."""
        data = torch.frombuffer(part, dtype=torch.uint8).to(self._cache.k.device)
        for row in entry.rows:
            start = 0
            if self._votes is not None:
                self._votes[layer, row].zero_()
            for piece in self._pieces(layer, row, entry):
                num_bytes = piece.numel() * piece.element_size()
                piece.copy_(data[start : start + num_bytes].view(piece.dtype).view(piece.shape))
                start += num_bytes
            assert start == len(part), "the sizes of the wire are those of the cache"

    def _pieces(self, layer: int, row: int, entry: PrefillEntry) -> Iterator[Tensor]:
        """Views of the row, in the order of the wire."""
        cache, num_slots = self._cache, layout.num_visible(len(entry.token_ids), entry.budget.capacity)
        has_values = not cache.spec.values_are_keys
        for scale in (cache.k_scale, cache.v_scale if has_values else None):
            if scale is not None:
                own = scale[layer, row]
                yield own if own.dim() == 1 else own[:, :num_slots]
        if self._votes is not None:
            yield self._votes[layer, row, :, : entry.budget.num_topk]
        yield cache.k[layer, row, :, :num_slots]
        if has_values:
            yield cache.v[layer, row, :, :num_slots]


def read_later(data: Tensor) -> Callable[[], memoryview]:
    """The bytes of a tensor that nobody changes any more, once the device has made them."""
    arriving = Arriving(data)
    return lambda: arriving.read()[0].numpy().data


def hidden_bytes(hidden: Tensor) -> Callable[[], memoryview]:
    """A hidden state ``[D]``, to be read later."""
    return read_later(_as_bytes(hidden).clone())


def hidden_of(rows: Sequence[bytearray], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Hidden states ``[P, D]`` from their bytes."""
    return torch.stack([torch.frombuffer(row, dtype=dtype) for row in rows]).to(device)


def _as_bytes(piece: Tensor) -> Tensor:
    return piece.contiguous().view(torch.uint8).flatten()

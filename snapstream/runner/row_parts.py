"""One layer of a row as bytes, for the engine that answers a prompt read here, and back into rows there.

    of each kv head:  K scale | V scale | votes [K] | keys [n, E] | values [n, E']           n = min(N, C) slots

Scales are there for rows in FP8, and in int8, then ``[n]`` each; votes for rows that choose again, values unless they
are a part of the keys. Invariant: ``place`` after ``take`` gives the rows bit for bit what the first row had, however
many ranks either engine has: whole rows travel. Of several ranks each has some kv heads, which they gather and spread,
or with ``dp`` whole rows, which the owner tells the others; all must make the same calls in the same order.
``transfer/wire.py`` knows the sizes (``RowSizes``). Kv heads with slots of their own have unlike n, votes too; such a
layer is one run of bytes, of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from snapstream.cache import layout
from snapstream.cache.kv_cache import KVCache
from snapstream.models.decoder import Decoder
from snapstream.runner.rescoring import Rescorer
from snapstream.runner.results import Arriving
from snapstream.step import PrefillEntry, RowArrived


class RowParts:
    """Pieces of one cache."""

    def __init__(self, cache: KVCache, rescorer: Rescorer | None, decoder: Decoder) -> None:
        self._cache, self._votes = cache, None if rescorer is None else rescorer.votes
        self._decoder, self._group = decoder, decoder.group
        self._num_heads = decoder.whole_kv_spec().num_kv_heads  # G
        first = self._group.rank * self._num_heads // self._group.size
        self._own = slice(first, first + cache.spec.num_kv_heads)
        if cache.heads is not None:
            self._num_heads, self._own = 1, slice(0, 1)

    def take(self, layer: int, entry: PrefillEntry) -> Tensor:
        """A copy of a layer of the entry's first row, ``[G, B]`` bytes; on every rank that of all kv heads.

        Of kv heads with slots of their own ``[1, B]``.
        """
        deal = self._cache.deal
        if self._cache.heads is not None:
            return self._bytes(layer, entry.rows[0], entry)
        if deal is None:
            return self._decoder.all_kv_heads(self._bytes(layer, entry.rows[0], entry), 0)
        row = next(iter(deal.own(entry.rows[:1])), self._cache.padding_row)
        return self._group.broadcast(self._bytes(layer, row, entry), deal.owner(entry.rows[0]))

    def place(self, layer: int, entry: PrefillEntry, part: bytearray | None) -> None:
        """Put a layer into each of the entry's rows; the leader has the ``part``, of all kv heads."""
        device, some_row = self._cache.k.device, self._cache.padding_row
        num_bytes = sum(piece.nbytes for piece in self._pieces(layer, some_row, entry))  # of the rank's own heads
        shape = (self._num_heads, num_bytes // (self._own.stop - self._own.start))
        if part is None:
            data = torch.empty(shape, dtype=torch.uint8, device=device)  # [G, B]
        else:
            data = torch.frombuffer(part, dtype=torch.uint8).view(shape).to(device)
        data = self._group.broadcast(data, 0)[self._own]
        for row in self._cache.own(entry.rows):
            start = 0
            for votes in self._votes_of(layer, row):
                votes.zero_()
            for piece in self._pieces(layer, row, entry):
                stop = start + piece[0].numel() * piece.element_size()
                piece.copy_(data[:, start:stop].contiguous().view(piece.dtype).view(piece.shape))
                start = stop

    def hidden(self, rows: Sequence[RowArrived | None]) -> Tensor:
        """Hidden states ``[P, D]`` of the last tokens of prompts; the leader has the rows that came."""
        dtype, device = self._decoder.dtype, self._decoder.device
        data = torch.empty((len(rows), self._decoder.config.hidden_size * dtype.itemsize), dtype=torch.uint8)
        for own, row in zip(data, rows, strict=True):
            if row is not None:
                own.copy_(torch.frombuffer(row.hidden, dtype=torch.uint8))
        return self._group.broadcast(data.to(device), 0).view(dtype)

    def _bytes(self, layer: int, row: int, entry: PrefillEntry) -> Tensor:
        """A copy of what a rank has of a layer of one of its rows, ``[own kv heads, B]``."""
        return torch.cat([_by_head(piece) for piece in self._pieces(layer, row, entry)], 1)

    def _pieces(self, layer: int, row: int, entry: PrefillEntry) -> Iterator[Tensor]:
        """Views of the row, ``[own kv heads, ...]``, in the order of the wire."""
        if self._cache.heads is not None:
            for head, budget in enumerate(self._cache.heads.slots.budgets[layer]):
                yield from self._pieces_of_head(
                    layer, row, head, layout.num_visible(len(entry.token_ids), budget.capacity)
                )
            return
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

    def _pieces_of_head(self, layer: int, row: int, head: int, num_slots: int) -> Iterator[Tensor]:
        """Views of a head with slots of its own, ``[1, ...]``."""
        cache = self._cache
        assert cache.heads is not None
        first = cache.heads.slots.first(row, layer, head)
        for scale in (cache.k_scale, cache.v_scale):
            if scale is not None:
                yield scale[None, first : first + num_slots] if scale.dim() == 1 else scale[layer, row, head, None]
        if self._votes is not None:
            yield self._votes[None, first : first + cache.heads.slots.topk[layer][head]]
        for tokens in (cache.k, cache.v):
            yield tokens[None, first : first + num_slots]

    def _votes_of(self, layer: int, row: int) -> list[Tensor]:
        """Views of all votes in a layer of a row."""
        votes, heads = self._votes, self._cache.heads
        if votes is None or heads is None:
            return [] if votes is None else [votes[layer, row]]
        firsts = [heads.slots.first(row, layer, head) for head in range(len(heads.slots.topk[layer]))]
        sizes = [budget.capacity for budget in heads.slots.budgets[layer]]
        return [votes[first : first + size] for first, size in zip(firsts, sizes, strict=True)]


def read_later(data: Tensor) -> Callable[[], memoryview]:
    """The bytes of a tensor that nobody changes any more, once the device has made them."""
    arriving = Arriving(data.flatten())
    return lambda: arriving.read()[0].numpy().data


def hidden_bytes(hidden: Tensor) -> Callable[[], memoryview]:
    """A hidden state ``[D]``, to be read later."""
    return read_later(hidden.contiguous().view(torch.uint8).clone())


def _by_head(piece: Tensor) -> Tensor:
    """``[G, ...]`` as bytes, ``[G, B]``."""
    return (piece.flatten(1) if piece.dim() > 1 else piece[:, None]).view(torch.uint8)

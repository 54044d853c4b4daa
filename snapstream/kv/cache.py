"""Storage of all rows, in tensors whose addresses never change.

Where all layers have equally many slots, K and V are ``[L, rows+1, G, C, E]``. Otherwise they are
``[slots of all rows, E]``, of which

- layers with and without sliding windows take one block each, ``[rows+1, G, C, E]`` with the C of that layer;
- with per-head budgets (``HeadSlots``) a row is one run of slots, head after head, and the address of a head is the
  number of its first slot among those of all rows. Kernels read rows at ``row * stride``: over a view with a stride of
  one slot the address *is* the row index, so each head is a row of one kv head to them (``overlapping``). Those views
  overlap themselves; only slots below a head's own length are read or written.

``KVCache.spans`` hides the difference from writers: it lists a layer's heads as one span of G, or as G spans of one.

Invariant: what a head holds is what a row of its own budget would hold (``layout.py``, ``compress.py``). The counters
of a row are those of its widest head; of any other head, the ring begins no later than its own top-k region ends.

``KVSpec`` has the sizes. Where values are the first numbers of the keys, V is a view of K. Row ``num_rows`` is the
padding row: it takes the unused entries of a decode batch and belongs to no request. Keys are stored after RoPE with
their true positions and are never rotated again (SnapStream, arXiv 2511.03092, section 3). Formats and their scales:
``kernels/formats.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.config import KVBudget
from snapstream.config.kv import HeadSlots
from snapstream.kernels import memory
from snapstream.kernels.formats import ENCODINGS
from snapstream.kernels.interface import Kernels, RowPlaces, bind
from snapstream.kernels.reference import taken
from snapstream.kernels.rows import LayerRows
from snapstream.kv.spec import KVSpec

# Data-parallel attention: row ``n`` of the engine lies on rank ``n mod W``, there as row ``n div W``. Counters and the
# sampler's state are the same on all ranks. The sizes of a step's tensors follow from the batch's alone, so that it can
# be captured: a rank takes its own entries of a batch, filled up with its padding row.


class BatchShard(NamedTuple):
    """One rank's entries of a batch of B rows; b are at most as many as it has rows."""

    entries: Tensor  # [b] int64, into the batch; where it has fewer, any
    places: RowPlaces  # of these entries, in the rank's own rows
    order: Tensor  # [B] int64: of each entry of the batch, where it stands behind each other among all ranks' [W b]


class RowPartition:
    """The rows of one rank."""

    def __init__(self, num_rows: int, rank: int, num_ranks: int) -> None:
        self._num_rows, self._rank, self._num_ranks = num_rows, rank, num_ranks
        self.num_own = -(-num_rows // num_ranks)  # the same on every rank

    def own(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Those of ``rows`` that lie here, as they are counted here; every rank has a padding row."""
        here = (row for row in rows if row == self._num_rows or row % self._num_ranks == self._rank)
        return tuple(self.num_own if row == self._num_rows else row // self._num_ranks for row in here)

    def owner(self, row: int) -> int:
        """The rank on which a row lies."""
        return row % self._num_ranks

    def shard(self, batch: RowPlaces) -> BatchShard:
        """Of a batch of B rows, none twice but the padding row, which no rank has to attend."""
        rows = batch.rows
        size = min(len(rows), self.num_own)
        owners = torch.where(rows < self._num_rows, rows % self._num_ranks, self._num_ranks)  # [B]
        ranks = torch.arange(self._num_ranks, device=rows.device)
        has = owners[:, None] == ranks  # [B, W]
        nth = (has.cumsum(0) - 1).masked_fill(~has, 0).sum(1)  # [B], of an entry among those of its rank
        order = torch.where(owners < self._num_ranks, owners * size + nth, 0)
        is_own = owners == self._rank
        entries = (~is_own).to(torch.int8).argsort(stable=True)[:size]  # own ones first, in their order
        is_own = is_own[entries]
        places = RowPlaces(
            torch.where(is_own, rows[entries] // self._num_ranks, self.num_own),
            torch.where(is_own, batch.slots[entries], 0),
            torch.where(is_own, batch.lengths[entries], 1),
        )
        return BatchShard(entries, places, order)


def overlapping(flat: Tensor, widest: int) -> Tensor:
    """Slots ``[n, ...]`` as rows of one head that begin at every slot: ``[1, n - widest + 1, 1, widest, ...]``, a view.

    What a slot has are its E numbers, or its scale.
    """
    (num_slots, *of_slot), size = flat.shape, flat.stride(0)
    shape = (1, num_slots - widest + 1, 1, widest, *of_slot)
    return flat.as_strided(shape, (num_slots * size, size, widest * size, size, *flat.stride()[1:]))


def slots_of(ordinal: Tensor, ring_start: Tensor, capacity: Tensor) -> Tensor:
    """``layout.slot_of`` for tensors of one shape, or shapes that broadcast."""
    past = ordinal - ring_start
    # A ring has at least one slot; compiled code also divides in the lanes that fill up a vector.
    size = (capacity - ring_start).clamp(min=1)
    # Below the ring's start the remainder must not apply; above it, Python and torch agree on the sign.
    return torch.where(past < 0, ordinal, ring_start + past.remainder(size))


class HeadTable:
    """The constants of ``HeadSlots`` on a device, ``[L, 1, G]`` int64 each."""

    def __init__(self, slots: HeadSlots, device: torch.device | str) -> None:
        def table(values: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

        self.slots = slots
        self.spans = [  # by layer
            [
                HeadSpan(slice(head, head + 1), budget, start, slots.row_slots)
                for head, (budget, start) in enumerate(zip(budgets, starts, strict=True))
            ]
            for budgets, starts in zip(slots.budgets, slots.starts, strict=True)
        ]
        self.starts = table(slots.starts)
        self.ends = table([[own.num_sink + own.num_topk for own in layer] for layer in slots.budgets])
        self.capacities = table([[own.capacity for own in layer] for layer in slots.budgets])
        # [L, rows+1, G]: tokens by which re-selections have set a head back behind its row; None where no row
        # re-selects
        self.behind: Tensor | None = None

    def count_reselections(self, num_rows: int) -> Tensor:
        """From now on heads may re-select: ``behind``, of ``num_rows`` and the padding row."""
        (num_layers, _, num_heads), device = self.ends.shape, self.ends.device
        self.behind = torch.zeros(num_layers, num_rows + 1, num_heads, dtype=torch.int64, device=device)
        return self.behind

    def places(self, rows: Tensor, num_tokens: Tensor, ring_start: Tensor) -> list[RowPlaces]:
        """Of the next token of ``rows [B]`` in every layer, head by head: ``[B * G]`` each. Counters are ``[B]``."""
        ordinal = num_tokens[:, None]  # [B, 1]
        start = torch.minimum(ring_start[:, None], self.ends)  # [L, B, G]
        if self.behind is not None:
            behind = self.behind[:, rows]  # [L, B, G]
            ordinal = ordinal - behind
            start = torch.where(behind > 0, self.ends, start)  # a head that re-selected is full but for its ring
        slots = slots_of(ordinal, start, self.capacities).flatten(1)  # [L, B * G]
        lengths = torch.minimum(ordinal + 1, self.capacities).flatten(1)
        heads = (rows[:, None] * self.slots.row_slots + self.starts).flatten(1)
        return [RowPlaces(*own) for own in zip(heads, slots, lengths, strict=True)]


class HeadSpan(NamedTuple):
    """Kv heads of a layer that have one budget and lie side by side in a row."""

    heads: slice  # of the layer's kv heads
    budget: KVBudget
    start: int = 0  # address in row 0
    stride: int = 1  # from a row's address to the next row's

    def address(self, row: int) -> int:
        """What kernels index the rows of ``KVCache.layer`` with."""
        return row * self.stride + self.start

    def queries(self, queries: Tensor, num_kv_heads: int) -> Tensor:
        """Of ``queries [w, H, E]`` of ``num_kv_heads`` heads those of this span, contiguous."""
        group = queries.shape[1] // num_kv_heads
        own = queries[:, self.heads.start * group : self.heads.stop * group]
        return queries if own.shape == queries.shape else own.contiguous()


class KVCache:
    """Keys and values of ``num_rows`` sequences (and the padding row), ``capacity`` slots each."""

    def __init__(
        self,
        spec: KVSpec,
        num_rows: int,
        capacity: int,
        device: torch.device | str,
        kernels: Kernels | None = None,
        partition: RowPartition | None = None,
        heads: HeadSlots | None = None,
    ) -> None:
        """``kernels`` read and write the rows, by default those that ``bind`` has for the device. With ``partition``
        only a rank's part of the ``num_rows`` lies here. With ``heads`` every kv head has a budget of its own, and
        ``capacity`` is that of a mean head; such a cache has no windows.
        """
        self.spec = spec
        self.partition = partition
        self.num_rows = num_rows = num_rows if partition is None else partition.num_own
        self.capacity = capacity
        self.kernels = kernels or bind(device)
        self.heads = None if heads is None else HeadTable(heads, device)
        self.encoding = ENCODINGS[spec.format.name]
        dtype, width = self.encoding.dtype, self.encoding.width  # E numbers, or fewer elements of several each
        # Slots of each kv head by layer, and the first slot of each layer's block; of per-head budgets neither is used.
        self.layer_slots = [own.capacity for own in spec.budgets(KVBudget.full(capacity))]
        sizes = [(num_rows + 1) * spec.num_kv_heads * own for own in self.layer_slots]
        self.layer_starts = list(accumulate(sizes, initial=0))
        slots: tuple[int, ...] = (spec.num_layers, num_rows + 1, spec.num_kv_heads, self.layer_slots[0])
        self._has_blocks = len(set(self.layer_slots)) > 1
        if heads is not None:
            slots = ((num_rows + 1) * heads.row_slots,)
        elif self._has_blocks:
            slots = (self.layer_starts[-1],)
        # A slot that was never written may be read with weight 0, and 0 x NaN is NaN: so rows begin as zeros.
        self.k = _zeros((*slots, width(spec.key_dim)), dtype, torch.device(device))  # [L, rows+1, G, C, E]
        self.k_scale = self._scales(slots, device)  # [L, rows+1, G] fp32, per slot [L, rows+1, G, C]
        if spec.values_are_keys:
            self.v, self.v_scale = self.k[..., : spec.value_dim], self.k_scale  # [L, rows+1, G, C, E']
        else:
            self.v = _zeros((*slots, width(spec.value_dim)), dtype, torch.device(device))  # [L, rows+1, G, C, E']
            self.v_scale = self._scales(slots, device)
        self._seen, self._seen_scales = (self.k, self.v), (self.k_scale, self.v_scale)  # by kernels
        if heads is not None:
            widest = heads.widest.capacity
            self._seen = overlapping(self.k, widest), overlapping(self.v, widest)
            self._seen_scales = _by_slot(self.k_scale, widest), _by_slot(self.v_scale, widest)
        self._blocks = [self._layer_rows(layer) for layer in range(spec.num_layers)] if self._has_blocks else []

    def layer(self, index: int) -> LayerRows:
        """The handle through which kernels see one layer of all rows."""
        if self._has_blocks:
            return self._blocks[index]
        if self.heads is not None:  # the address of a head tells its layer
            index = 0
        return LayerRows(*self._seen, index, *self._seen_scales, self.spec.values_are_keys)

    def _block(self, stored: Tensor, layer: int) -> Tensor:
        """``[rows+1, G, C, ...]`` of a layer, a view; ``stored`` has an entry per slot of all rows."""
        own = stored[self.layer_starts[layer] : self.layer_starts[layer + 1]]
        heads, slots = self.spec.num_kv_heads, self.layer_slots[layer]
        return own.view(self.num_rows + 1, heads, slots, *stored.shape[1:])

    def _layer_rows(self, layer: int) -> LayerRows:
        """The handle of a layer with a block of its own."""

        def scales(of_all: Tensor | None) -> Tensor | None:
            if of_all is None or self.encoding.format.scales == "head":
                return None if of_all is None else of_all[layer, None]
            return self._block(of_all, layer)[None]

        keys, values = (self._block(stored, layer)[None] for stored in (self.k, self.v))
        return LayerRows(keys, values, 0, scales(self.k_scale), scales(self.v_scale))

    def spans(self, layer: int, budget: KVBudget) -> Sequence[HeadSpan]:
        """All kv heads of a layer, in order; ``budget`` is the row's, where heads are equal."""
        if self.heads is None:
            return (HeadSpan(slice(0, self.spec.num_kv_heads), self.spec.layers[layer].budget(budget)),)
        return self.heads.spans[layer]

    def slots(self, stored: Tensor, layer: int, row: int, span: HeadSpan | None = None) -> Tensor:
        """View ``[g, C, ...]`` of a span in a row; without ``span`` of all heads, which must be equal.

        ``stored``: a tensor with an entry per slot, as ``k`` has.
        """
        if self._has_blocks:
            return self._block(stored, layer)[row]
        if self.heads is None or span is None:
            return stored[layer, row]
        first = span.address(row)
        return stored[None, first : first + span.budget.capacity]

    def parts(self, layer: int, row: int, span: HeadSpan | None = None) -> list[tuple[Tensor, Tensor | None]]:
        """Views of K, and of V unless values are keys, as ``slots`` gives them, each with its scales ``[g]``, or per
        slot ``[g, C]``.
        """
        found = []
        for stored, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            if scale is not None and self.encoding.format.scales == "slot":
                scale = self.slots(scale, layer, row, span)
            elif scale is not None:
                scale = scale[layer, row] if span is None else scale[layer, row, span.heads]
            found.append((self.slots(stored, layer, row, span), scale))
        return found[:1] if self.spec.values_are_keys else found

    def tokens(self, layer: int, row: int, slots: Tensor, span: HeadSpan | None = None) -> tuple[Tensor, Tensor]:
        """Copies of the keys ``[g, n, E]`` and values ``[g, n, E']`` that lie in ``slots [n]`` of a span."""
        keys, values = (self.slots(stored, layer, row, span).index_select(1, slots) for stored in (self.k, self.v))
        return keys, values

    def own(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Those of the engine's ``rows`` that lie here, as they are counted here."""
        return tuple(rows) if self.partition is None else self.partition.own(rows)

    @property
    def padding_row(self) -> int:
        """Index of the row that belongs to no request."""
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V and of their scales, the padding row included."""
        own = [self.k, self.k_scale] if self.spec.values_are_keys else [self.k, self.v, self.k_scale, self.v_scale]
        return sum(tensor.nbytes for tensor in own if tensor is not None)

    def begin_rows(
        self, layer: int, rows: Sequence[int], keys: Tensor, values: Tensor, span: HeadSpan | None = None
    ) -> None:
        """Set the scales per head of ``rows``, if their format has any, for ``keys [g, N, E], values [g, N, E']``."""
        if self.encoding.format.scales != "head":
            return
        for index, tokens in enumerate((keys,) if self.spec.values_are_keys else (keys, values)):
            found = self.encoding.scale_of(tokens)  # [g]
            for row in rows:
                own = self.parts(layer, row, span)[index][1]
                assert own is not None
                own.copy_(found)

    def store(
        self, layer: int, row: int, place: slice, keys: Tensor, values: Tensor, span: HeadSpan | None = None
    ) -> None:
        """Put ``keys [g, n, E], values [g, n, E']`` into the slots ``place`` of a span."""
        for (stored, scale), tokens in zip(self.parts(layer, row, span), (keys, values), strict=False):
            own = scale[:, place] if scale is not None and self.encoding.format.scales == "slot" else scale
            self.encoding.store(stored[:, place], own, tokens)

    def gather(
        self, layer: int, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor, span: HeadSpan
    ) -> None:
        """Fill the first ``n`` slots of a span in ``rows`` with the tokens ``index [g, n]`` of ``keys [g, N, E]`` and
        ``values [g, N, E']``.
        """
        if not rows:
            return
        if self.heads is None or self.encoding.format.scales != "head":
            self.kernels.gather_rows(self.layer(layer), [span.address(row) for row in rows], keys, values, index)
            return
        kept = taken(keys, index), taken(values, index)  # kernels would look for a scale at each address
        for row in rows:
            self.store(layer, row, slice(index.shape[1]), *kept, span)

    def _scales(self, slots: tuple[int, ...], device: torch.device | str) -> Tensor | None:
        match self.encoding.format.scales:
            case "slot":
                return _zeros(slots, torch.float32, torch.device(device))
            case "head":
                return torch.ones(self.spec.num_layers, self.num_rows + 1, self.spec.num_kv_heads, device=device)
        return None


def _by_slot(scales: Tensor | None, widest: int) -> Tensor | None:
    """Scales per slot as kernels see heads with budgets of their own; scales per head are left to ``RowsView``."""
    return None if scales is None or scales.dim() > 1 else overlapping(scales, widest)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU untouched slots cost no memory."""
    return memory.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

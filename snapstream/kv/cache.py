"""Storage of all rows, in tensors whose addresses never change.

If all layers have the same number of slots, K and V are ``[L, rows+1, G, C, E]``. Otherwise they are
``[slots of all rows, E]``:

- with sliding windows each layer is one block ``[rows+1, G, C, E]`` with that layer's C; a layer with a recurrent
  state has no slots, and its tensors are apart (``KVCache.state``); where layers differ in G or E too, K and V are
  ``[elements of all rows]``, and a layer that shares the slots of another has none of its own;
- with per-head budgets (``HeadSlots``) a row is one run of slots, head after head, before the blocks of layers with
  windows, and a head's address is the index of its first slot among those of all rows. Kernels compute
  ``row * stride``: over a view with a stride of one slot the address *is* the row index, so each head looks like a row
  with one kv head (``head_rows``). Rows of that view overlap; only slots below a head's own length are read or written.

``KVCache.spans`` hides the difference from writers: it lists a layer's heads as one span of G, or as G spans of one.

Invariant: a head holds what a row with that head's budget would hold (``layout.py``, ``compress.py``). A row's counters
are those of its largest head; in any other head the ring begins no later than the end of its top-k region.

If values are the first elements of the keys, V is a view of K. Row ``num_rows`` is the padding row: it fills unused
entries of a decode batch and belongs to no request. Keys are stored after RoPE at their true positions and are never
rotated again (SnapStream, arXiv 2511.03092, section 3). Formats and scales: ``kernels/formats.py``.

With data-parallel attention, row ``n`` of the engine is stored on rank ``n mod W`` as row ``n div W``
(``RowPartition``); counters and sampling state are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.config import KVBudget
from snapstream.config.kv import HeadSlots
from snapstream.kernels import memory
from snapstream.kernels.formats import ENCODINGS, Encoding
from snapstream.kernels.interface import Kernels, RowPlaces, bind
from snapstream.kernels.reference import gather_tokens
from snapstream.kernels.rows import LayerRows
from snapstream.kv.spec import Full, KVSpec, LayerCache


class BatchShard(NamedTuple):
    """One rank's entries of a batch of B rows, padded to ``b = min(B, rows of a rank)`` entries."""

    entries: Tensor  # [b] int64, indices into the batch; any index for padding
    places: RowPlaces  # of these entries, in the rank's local rows
    order: Tensor  # [B] int64: index of each batch entry in the concatenation of all ranks' entries, [W * b]


class RowPartition:
    def __init__(self, num_rows: int, rank: int, num_ranks: int) -> None:
        self._num_rows, self._rank, self._num_ranks = num_rows, rank, num_ranks
        self.num_local = -(-num_rows // num_ranks)  # the same on every rank

    def local_rows(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Local indices of those of ``rows`` that are stored here; every rank has a padding row."""
        here = (row for row in rows if row == self._num_rows or row % self._num_ranks == self._rank)
        return tuple(self.num_local if row == self._num_rows else row // self._num_ranks for row in here)

    def owner(self, row: int) -> int:
        return row % self._num_ranks

    def shard(self, batch: RowPlaces) -> BatchShard:
        """This rank's entries of a batch of B rows, distinct except for padding rows, which no rank attends.

        Shapes depend on B alone, so that the step can be captured.
        """
        rows = batch.rows
        size = min(len(rows), self.num_local)
        owners = torch.where(rows < self._num_rows, rows % self._num_ranks, self._num_ranks)  # [B]
        ranks = torch.arange(self._num_ranks, device=rows.device)
        has = owners[:, None] == ranks  # [B, W]
        nth = (has.cumsum(0) - 1).masked_fill(~has, 0).sum(1)  # [B], index of an entry among those of its rank
        order = torch.where(owners < self._num_ranks, owners * size + nth, 0)
        is_local = owners == self._rank
        entries = (~is_local).to(torch.int8).argsort(stable=True)[:size]  # local entries first, in order
        is_local = is_local[entries]
        places = RowPlaces(
            torch.where(is_local, rows[entries] // self._num_ranks, self.num_local),
            torch.where(is_local, batch.slots[entries], 0),
            torch.where(is_local, batch.lengths[entries], 1),
        )
        return BatchShard(entries, places, order)


def head_rows(flat: Tensor, num_slots: int) -> Tensor:
    """Slots ``[n, ...]`` as rows of one kv head that begin at every slot: ``[1, n - C + 1, 1, C, ...]``, a view with
    overlapping rows of ``C = num_slots`` slots.
    """
    (total, *slot_shape), stride = flat.shape, flat.stride(0)
    shape = (1, total - num_slots + 1, 1, num_slots, *slot_shape)
    return flat.as_strided(shape, (total * stride, stride, num_slots * stride, stride, *flat.stride()[1:]))


def slots_of(ordinal: Tensor, ring_start: Tensor, capacity: Tensor | int) -> Tensor:
    """``layout.slot_of`` for tensors; shapes broadcast."""
    past = ordinal - ring_start
    # A ring has at least one slot; compiled code also divides in unused vector lanes.
    size = (capacity - ring_start).clamp(min=1)
    return torch.where(past < 0, ordinal, ring_start + past.remainder(size))


class HeadTable:
    """``HeadSlots`` of every row on a device, ``[L, rows+1, G]`` int64 each; addresses never change."""

    def __init__(self, slots: HeadSlots, num_rows: int, device: torch.device | str) -> None:
        self.slots = slots  # of requests with the engine's budget, whose prompts do not fit
        self._tables = lru_cache(maxsize=64)(partial(_head_tables, device))
        self._rows = [slots] * (num_rows + 1)
        own = self._tables(slots)  # [3, L, G]
        # Of a head: its first slot in the row, the end of its top-k region, and that of its ring in slots of the head.
        self.starts, self.ends, self.capacities = own[:, :, None].repeat(1, 1, num_rows + 1, 1).unbind(0)
        self.starts[:, num_rows] = 0  # the last row: kernels may look at ``slots.longest`` slots from any head on

    def admit(self, rows: Sequence[int], budget: KVBudget, prompt_len: int) -> None:
        """``rows`` hold a prompt of a request with that budget."""
        slots = self.slots.of(budget, prompt_len)
        for row in rows:
            if self._rows[row] != slots:
                self._rows[row] = slots
                for table, own in zip((self.starts, self.ends, self.capacities), self._tables(slots), strict=True):
                    table[:, row].copy_(own)

    def spans(self, layer: int, budget: KVBudget, prompt_len: int) -> Sequence[HeadSpan]:
        """The kv heads of a layer, one by one, of a row with that budget and prompt."""
        return self._spans(self.slots.of(budget, prompt_len), layer)

    def row_spans(self, layer: int, row: int) -> Sequence[HeadSpan]:
        """The kv heads of a layer of a row, one by one."""
        return self._spans(self._rows[row], layer)

    def _spans(self, slots: HeadSlots, layer: int) -> Sequence[HeadSpan]:
        return [
            HeadSpan(slice(head, head + 1), own, start, self.slots.row_slots)
            for head, (own, start) in enumerate(zip(slots.budgets[layer], slots.starts[layer], strict=True))
        ]

    def places(self, rows: Tensor, num_tokens: Tensor, ring_start: Tensor) -> list[RowPlaces]:
        """Where the next token of ``rows [B]`` goes, per layer, head by head: ``[B * G]``, anywhere in layers without
        heads of their own. Counters are ``[B]``.
        """
        ordinal, capacities = num_tokens[:, None], self.capacities[:, rows]  # [L, B, G]
        start = torch.minimum(ring_start[:, None], self.ends[:, rows])
        slots = slots_of(ordinal, start, capacities).flatten(1)  # [L, B * G]
        lengths = torch.minimum(ordinal + 1, capacities).flatten(1)
        heads = (rows[:, None] * self.slots.row_slots + self.starts[:, rows]).flatten(1)
        return [RowPlaces(*layer) for layer in zip(heads, slots, lengths, strict=True)]


def _head_tables(device: torch.device | str, slots: HeadSlots) -> Tensor:
    """Start, end of the top-k and capacity of every head, ``[3, L, G]`` int64."""
    ends = [[budget.num_sink + budget.num_topk for budget in layer] for layer in slots.budgets]
    capacities = [[budget.capacity for budget in layer] for layer in slots.budgets]
    none = (0,) * max(map(len, slots.budgets))  # of a layer without heads of its own: not read
    tables = [[own or none for own in values] for values in (slots.starts, ends, capacities)]
    return torch.tensor(tables, dtype=torch.int64, device=device)


class HeadSpan(NamedTuple):
    """Adjacent kv heads of a layer with the same budget."""

    heads: slice  # of the layer's kv heads
    budget: KVBudget
    start: int = 0  # address in row 0
    stride: int = 1  # from a row's address to the next row's

    def address(self, row: int) -> int:
        """Row index in ``KVCache.layer``."""
        return row * self.stride + self.start

    def queries(self, queries: Tensor, num_kv_heads: int) -> Tensor:
        """The query heads of ``queries [w, H, E]`` that belong to this span, contiguous."""
        group = queries.shape[1] // num_kv_heads
        found = queries[:, self.heads.start * group : self.heads.stop * group]
        return queries if found.shape == queries.shape else found.contiguous()


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
        sinks: Callable[[int], Tensor | None] = lambda layer: None,
    ) -> None:
        """``kernels`` default to ``bind(device)``. With ``partition`` only this rank's part of ``num_rows`` is stored.
        With ``heads`` (per-head budgets) ``capacity`` is the mean over heads. ``sinks``: the learned attention sinks
        ``[H]`` of a layer, if it has any, which take their share of attention scores.
        """
        self.sinks = sinks
        self.spec = spec
        self.partition = partition
        self.num_rows = num_rows = num_rows if partition is None else partition.num_local
        self.capacity = capacity
        self.kernels = kernels or bind(device)
        self.heads = None if heads is None else HeadTable(heads, num_rows, device)
        self.encodings = key_encoding, value_encoding = tuple(ENCODINGS[form.name] for form in spec.formats)
        # Slots per kv head by layer, and the first slot of each layer's block; 0 of layers with per-head budgets.
        self.layer_slots = [
            0 if self.has_own_heads(index) else layer.num_slots(capacity) for index, layer in enumerate(spec.layers)
        ]
        self._layer_heads = [layer.num_kv_heads if isinstance(layer, Full) else 0 for layer in spec.layers]  # G
        sizes = [(num_rows + 1) * own * num for own, num in zip(self._layer_heads, self.layer_slots, strict=True)]
        by_head = 0 if heads is None else (num_rows + 1) * heads.row_slots
        self.layer_starts = list(accumulate(sizes, initial=by_head))
        slots: tuple[int, ...] = (spec.num_layers, num_rows + 1, spec.num_kv_heads, self.layer_slots[0])
        self._has_blocks = len(set(self.layer_slots)) > 1 or spec.is_uneven
        if heads is not None or self._has_blocks:
            slots = (self.layer_starts[-1],)
        # A slot that was never written may be read with weight 0, and 0 x NaN is NaN: rows begin as zeros.
        if spec.is_uneven:
            self._widths = [[encoding.width(dim) for dim in dims] for encoding, dims in zip(
                self.encodings, zip(*map(_dims, spec.layers), strict=True), strict=True
            )]  # fmt: skip
            self.k, self.v = (
                _zeros((sum(map(mul, sizes, own)),), encoding.dtype, device)
                for encoding, own in zip(self.encodings, self._widths, strict=True)
            )
        else:  # [L, rows+1, G, C, E], or [slots of all rows, E]
            self.k = _zeros((*slots, key_encoding.width(spec.key_dim)), key_encoding.dtype, device)
            if spec.values_are_keys:
                self.v = self.k[..., : spec.value_dim]
            else:
                self.v = _zeros((*slots, value_encoding.width(spec.value_dim)), value_encoding.dtype, device)
        self.k_scale = self._scales(key_encoding, slots, device)  # [L, rows+1, G] fp32; per slot: as k without E
        self.v_scale = self.k_scale if spec.values_are_keys else self._scales(value_encoding, slots, device)
        self._kernel_kv, self._kernel_scales = (self.k, self.v), (self.k_scale, self.v_scale)
        if heads is not None:
            longest = heads.longest
            self._kernel_kv = head_rows(self.k[:by_head], longest), head_rows(self.v[:by_head], longest)
            self._kernel_scales = (
                _slot_scales(self.k_scale, by_head, longest), _slot_scales(self.v_scale, by_head, longest),
            )  # fmt: skip
        layers = map(spec.source, range(spec.num_layers))
        self._blocks = [self._block_rows(layer) for layer in layers] if self._has_blocks else []
        self._states = [
            {name: _zeros((num_rows + 1, *shape), torch.float32, device) for name, shape in shapes}
            for shapes in map(spec.state_shapes, range(spec.num_layers))
        ]

    def has_own_heads(self, layer: int) -> bool:
        """Whether the heads of a layer have budgets of their own."""
        return self.heads is not None and bool(self.heads.slots.topk[layer])

    def layer(self, index: int) -> LayerRows:
        """One layer of all rows, as kernels take it."""
        if self.has_own_heads(index):  # a head's address includes its layer
            index = 0
        elif self._has_blocks:
            return self._blocks[index]
        return LayerRows(*self._kernel_kv, index, *self._kernel_scales, self.spec.values_are_keys)

    def state(self, layer: int) -> Mapping[str, Tensor]:
        """The recurrent state of a layer, ``[rows+1, ...]`` fp32 each; empty for a layer without."""
        return self._states[layer]

    def copy_state(self, layer: int, source: int, rows: Sequence[int]) -> None:
        """Give ``rows`` the state of row ``source`` in a layer."""
        for stored in self._states[layer].values():
            stored[list(rows)] = stored[source].clone()

    def _block(self, stored: Tensor, layer: int) -> Tensor:
        """View ``[rows+1, G, C, ...]`` of a layer; ``stored``: ``k``, ``v``, or an entry per slot of all rows."""
        shape = (self.num_rows + 1, self._layer_heads[layer], self.layer_slots[layer])
        if self.spec.is_uneven and (stored is self.k or stored is self.v):
            widths = self._widths[0 if stored is self.k else 1]
            counts = [stop - start for start, stop in pairwise(self.layer_starts)]
            first = sum(map(mul, counts[:layer], widths))
            return stored[first : first + counts[layer] * widths[layer]].view(*shape, widths[layer])
        block = stored[self.layer_starts[layer] : self.layer_starts[layer + 1]]
        return block.view(*shape, *stored.shape[1:])

    def _block_rows(self, layer: int) -> LayerRows:
        def scales(stored: Tensor | None, encoding: Encoding) -> Tensor | None:
            if stored is None:
                return None
            if encoding.format.scales == "head":
                return stored[layer, None, :, : self._layer_heads[layer]]
            return self._block(stored, layer)[None]

        keys, values = (self._block(stored, layer)[None] for stored in (self.k, self.v))
        k_scale, v_scale = map(scales, (self.k_scale, self.v_scale), self.encodings)
        return LayerRows(keys, values, 0, k_scale, v_scale, self.spec.values_are_keys)

    def spans(self, layer: int, budget: KVBudget, prompt_len: int) -> Sequence[HeadSpan]:
        """All kv heads of a layer, in order, of a row with that budget and prompt."""
        if self.heads is not None and self.has_own_heads(layer):
            return self.heads.spans(layer, budget, prompt_len)
        cache = self.spec.layers[layer]
        return (HeadSpan(slice(0, cache.num_kv_heads), cache.budget(budget)),) if isinstance(cache, Full) else ()

    def score_kernels(self, layer: int, span: HeadSpan | None = None) -> Kernels:
        """The cache's kernels, which score with a layer's sinks, if any, of a span's query heads."""
        own = self.sinks(layer)
        if own is None:
            return self.kernels
        return self.kernels.with_sinks(own if span is None else span.queries(own[None], self.spec.num_kv_heads)[0])

    def slots(self, stored: Tensor, layer: int, row: int, span: HeadSpan | None = None) -> Tensor:
        """View ``[g, C, ...]`` of a span in a row; all heads without ``span``, which per-head budgets require.

        ``stored``: a tensor with an entry per slot, such as ``k``.
        """
        if self._has_blocks and not self.has_own_heads(layer):
            return self._block(stored, layer)[row]
        if self.heads is None or span is None:
            return stored[layer, row]
        first = span.address(row)
        return stored[None, first : first + span.budget.capacity]

    def whole_slots(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[G, C, E]`` of all heads of a row that has evicted nothing."""
        if self.heads is None or not self.has_own_heads(layer):
            return self.slots(self.k, layer, row), self.slots(self.v, layer, row)
        spans = self.heads.row_spans(layer, row)
        keys, values = (torch.cat([self.slots(own, layer, row, span) for span in spans]) for own in (self.k, self.v))
        return keys, values

    def parts(self, layer: int, row: int, span: HeadSpan | None = None) -> list[tuple[Tensor, Tensor | None]]:
        """Views of K, and of V unless values are keys (see ``slots``), each with its scales ``[g]`` or per slot
        ``[g, C]``.
        """
        found = []
        sides = zip((self.k, self.v), (self.k_scale, self.v_scale), self.encodings, strict=True)
        for stored, scale, encoding in sides:
            if scale is not None and encoding.format.scales == "slot":
                scale = self.slots(scale, layer, row, span)
            elif scale is not None:
                scale = scale[layer, row, slice(self._layer_heads[layer]) if span is None else span.heads]
            found.append((self.slots(stored, layer, row, span), scale))
        return found[:1] if self.spec.values_are_keys else found

    def slots_at(self, places: Sequence[RowPlaces]) -> list[tuple[Tensor, Tensor]]:
        """K, V and per-slot scales, each with an entry per slot, and the indices there ``[L', B, G]`` of the slots of
        ``places`` (by layer) in L' layers.
        """
        stored = [self.k] if self.spec.values_are_keys else [self.k, self.v]
        sides = zip((self.k_scale, self.v_scale), self.encodings, strict=True)
        scales = [scale for scale, encoding in sides if encoding.format.scales == "slot"][: len(stored)]
        per_slot = [own for own in scales if own is not None]
        if not self.spec.is_uneven:
            flat = [*(own.view(-1, own.shape[-1]) for own in stored), *(own.view(-1) for own in per_slot)]
            index = self._slot_indices(places)
            return [(own, index) for own in flat]
        found = []
        for layer in self.spec.slot_layer_indices:
            heads, own = self._layer_heads[layer], places[layer]
            firsts = own.rows[:, None] * heads + torch.arange(heads, device=own.rows.device)  # [B, G]
            index = (firsts * self.layer_slots[layer] + own.slots[:, None])[None]
            found += [(self._block(tensor, layer).flatten(0, 2), index) for tensor in (*stored, *per_slot)]
        return found

    def _slot_indices(self, places: Sequence[RowPlaces]) -> Tensor:
        """Those of all layers that have slots, where all have heads of one size; layers with per-head budgets first."""
        layers, heads = self.spec.slot_layer_indices, self.spec.num_kv_heads
        own = [layer for layer in layers if self.has_own_heads(layer)]
        blocks = [layer for layer in layers if layer not in own] if own else layers
        found = []
        if own:
            firsts = torch.stack([places[layer].rows + places[layer].slots for layer in own])
            found.append(firsts.view(len(own), -1, heads))
        if blocks:
            slots = torch.stack([places[layer].slots for layer in blocks])  # [L'', B]
            starts, sizes = (
                torch.tensor([of[layer] for layer in blocks], device=slots.device)[:, None, None]
                for of in (self.layer_starts, self.layer_slots)
            )
            firsts = places[blocks[0]].rows[:, None] * heads + torch.arange(heads, device=slots.device)  # [B, G]
            found.append(starts + firsts * sizes + slots[..., None])
        return torch.cat(found)

    def local_rows(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Local indices of those of the engine's ``rows`` that are stored here."""
        return tuple(rows) if self.partition is None else self.partition.local_rows(rows)

    @property
    def padding_row(self) -> int:
        """Local index of the padding row."""
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of K, V, scales and states, including the padding row."""
        stored = [self.k, self.k_scale] if self.spec.values_are_keys else [self.k, self.v, self.k_scale, self.v_scale]
        stored += [tensor for layer in self._states for tensor in layer.values()]
        return sum(tensor.nbytes for tensor in stored if tensor is not None)

    def begin_rows(
        self, layer: int, rows: Sequence[int], keys: Tensor, values: Tensor, span: HeadSpan | None = None
    ) -> None:
        """Set the per-head scales of ``rows``, if the format has any, for ``keys [g, N, E], values [g, N, E']``."""
        if not self._has_head_scales:
            return
        for index, tokens in enumerate((keys,) if self.spec.values_are_keys else (keys, values)):
            found = self.encodings[index].scale_of(tokens)  # [g]
            for row in rows:
                scale = self.parts(layer, row, span)[index][1]
                assert scale is not None
                scale.copy_(found)

    def store(
        self, layer: int, row: int, place: slice, keys: Tensor, values: Tensor, span: HeadSpan | None = None
    ) -> None:
        """Store ``keys [g, n, E], values [g, n, E']`` in the slots ``place`` of a span."""
        parts = self.parts(layer, row, span)
        for (stored, scale), tokens, encoding in zip(parts, (keys, values), self.encodings, strict=False):
            if scale is not None and encoding.format.scales == "slot":
                scale = scale[:, place]
            encoding.store(stored[:, place], scale, tokens)

    def gather(
        self, layer: int, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor, span: HeadSpan
    ) -> None:
        """Fill the first ``n`` slots of a span in ``rows`` with the tokens ``index [g, n]`` of ``keys [g, N, E]`` and
        ``values [g, N, E']``.
        """
        if not rows:
            return
        if self.heads is None or not self._has_head_scales:
            self.kernels.gather_rows(self.layer(layer), [span.address(row) for row in rows], keys, values, index)
            return
        # A kernel would look up a head's scale by its address; do it here.
        kept = gather_tokens(keys, index), gather_tokens(values, index)
        for row in rows:
            self.store(layer, row, slice(index.shape[1]), *kept, span)

    @property
    def _has_head_scales(self) -> bool:
        return self.encodings[0].format.scales == "head"  # FP8, of K and V alike

    def _scales(self, encoding: Encoding, slots: tuple[int, ...], device: torch.device | str) -> Tensor | None:
        match encoding.format.scales:
            case "slot":
                return _zeros(slots, torch.float32, device)
            case "head":
                return torch.ones(self.spec.num_layers, self.num_rows + 1, self.spec.num_kv_heads, device=device)
        return None


def _dims(layer: LayerCache) -> tuple[int, int]:
    """Numbers of a key and of a value of a layer; zeros without slots."""
    return (layer.key_dim, layer.value_dim) if isinstance(layer, Full) else (0, 0)


def _slot_scales(scales: Tensor | None, total: int, num_slots: int) -> Tensor | None:
    """The first ``total`` per-slot scales for kernels with per-head budgets; ``RowsView`` applies per-head scales
    itself.
    """
    return None if scales is None or scales.dim() > 1 else head_rows(scales[:total], num_slots)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on a CPU slots that are never written take no memory."""
    is_cpu = torch.device(device).type == "cpu"
    return memory.zeros(shape, dtype) if is_cpu else torch.zeros(shape, dtype=dtype, device=device)

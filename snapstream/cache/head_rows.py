"""Rows whose kv heads have unlike numbers of slots: every head of a layer is a row of one kv head to the kernels.

A row is one run of slots, head after head (``config/heads.py``); the address of a head is the number of its first slot
among those of all rows. Kernels read rows at ``row * stride``: with a stride of one slot the address *is* the row
index, so one kernel serves both kinds of rows. The tensors that they see overlap themselves; only slots below a head's
own length are ever read or written.

Invariant: what a head holds is what a row of its own budget would hold (``layout.py``, ``compress.py``). A row's
counters are those of its widest head; of any other, the ring begins no later than its own top-k region ends. Heads that
choose again do so each in its own time (``rescoring.py``): by how many tokens that set a head back is counted beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from snapstream.cache import layout
from snapstream.config.heads import HeadSlots
from snapstream.kernels import fp8, int8
from snapstream.kernels.rows import RowPlaces

if TYPE_CHECKING:
    from snapstream.cache.kv_cache import KVCache
    from snapstream.config import Selector

_STORED_AT_ONCE = 4096  # tokens that are scaled in fp32 at a time, as in ``kv_cache.py``


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
        self.starts = table(slots.starts)
        self.ends = table([[own.num_sink + own.num_topk for own in layer] for layer in slots.budgets])
        self.capacities = table([[own.capacity for own in layer] for layer in slots.budgets])
        # [L, rows+1, G]: tokens by which refreshes have set a head back behind its row; None where no row chooses again
        self.behind: Tensor | None = None

    def count_refreshes(self, num_rows: int) -> Tensor:
        """From now on heads may choose again: ``behind``, of ``num_rows`` and the padding row."""
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
            start = torch.where(behind > 0, self.ends, start)  # a head that chose again is full but for its ring
        slots = slots_of(ordinal, start, self.capacities).flatten(1)  # [L, B * G]
        lengths = torch.minimum(ordinal + 1, self.capacities).flatten(1)
        heads = (rows[:, None] * self.slots.row_slots + self.starts).flatten(1)
        return [RowPlaces(*own) for own in zip(heads, slots, lengths, strict=True)]


def write_heads(
    cache: KVCache,
    layer: int,
    rows: Sequence[int],
    keys: Tensor,
    values: Tensor,
    queries: Tensor | None,
    selector: Selector,
) -> list[Tensor | None]:
    """Write one layer of a prompt into each of ``rows``, head by head; see ``compress.write_rows``.

    ``keys [G, N, E], values [G, N, E]``; ``queries [w, H, E]``, needed if any head is compressed. Returns the kept
    positions of every head ``[C]``, None where it holds the prompt whole.
    """
    from snapstream.cache.compress import kept_positions

    assert cache.heads is not None
    slots, prompt_len = cache.heads.slots, keys.shape[1]
    group, all_kept = cache.spec.num_heads // cache.spec.num_kv_heads, []
    for head, budget in enumerate(slots.budgets[layer]):
        addresses = [slots.first(row, layer, head) for row in rows]
        own_keys, own_values = keys[head : head + 1], values[head : head + 1]  # [1, N, E]
        index = None  # all of them, in their order
        if layout.is_compressed(budget, prompt_len):
            asked = None
            if queries is not None:
                asked = queries[:, head * group : (head + 1) * group].contiguous()  # [w, H / G, E]
            index = kept_positions(asked, own_keys, layer, budget, selector, cache.kernels)  # [1, C of this head]
        kept = None if index is None else index[0]
        all_kept.append(kept)
        if index is not None and cache.k_scale is None:
            cache.kernels.gather_rows(cache.layer(layer), addresses, own_keys, own_values, index)
            continue
        for stored, scales, tokens in (
            (cache.k, cache.k_scale, own_keys), (cache.v, cache.v_scale, own_values),
        ):  # fmt: skip
            scale = None  # of the whole head
            if scales is not None and stored.dtype == fp8.DTYPE:
                scale = fp8.scale_of(tokens)[0]
                for row in rows:
                    scales[layer, row, head] = scale
            _store(stored, scales if scale is None else scale, addresses, tokens[0], kept)
    return all_kept


def _store(
    stored: Tensor, scales: Tensor | None, addresses: Sequence[int], tokens: Tensor, kept: Tensor | None
) -> None:
    """Put ``tokens [N, E]`` of a head, or those that are ``kept [n]``, into the slots from each of ``addresses`` on.

    ``stored [slots of all rows, E]``; ``scales`` are of all slots, which get theirs here, in FP8 the head's one.
    """
    count = len(tokens) if kept is None else len(kept)
    for start in range(0, count, _STORED_AT_ONCE):
        part = slice(start, min(start + _STORED_AT_ONCE, count))
        block = tokens[part] if kept is None else tokens[kept[part]]  # [n, E]
        own = None
        if scales is not None and scales.dim():
            own = int8.scale_of(block)  # [n]
            block = int8.quantise(block, own)
        elif scales is not None:
            block = fp8.quantise(block, scales)
        for first in addresses:
            place = slice(first + part.start, first + part.stop)
            stored[place].copy_(block)
            if scales is not None and own is not None:
                scales[place] = own

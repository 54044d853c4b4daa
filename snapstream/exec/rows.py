"""Counters of every row, in tensors whose addresses never change.

The last entry of every tensor is the padding row. Sampling state: ``sampling_state.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snapstream.config import KVBudget
from snapstream.kernels.rows import RowPlaces
from snapstream.kv import layout
from snapstream.kv.cache import HeadTable, slots_of
from snapstream.kv.spec import KVSpec, Window

Counters = tuple[int, int, int]  # of a row: num_tokens, ring_start, capacity


class Rows:
    """Counters of every row; advanced on the device, set from the host only when a row gets a new owner."""

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        def counters(value: int) -> Tensor:
            return torch.full((num_rows + 1,), value, dtype=torch.int64, device=device)

        self.last_token = counters(0)  # token to embed next
        self.num_tokens = counters(0)  # tokens fed so far: the position of last_token
        self.ring_start = counters(0)
        self.capacity = counters(1)
        self.adapter = counters(0)  # LoRA adapter, counted from 1; 0: none

    @staticmethod
    def entry(prompt_len: int, budget: KVBudget) -> Counters:
        """Counters of a row after a prompt of ``prompt_len`` tokens was written to it, for ``admit``."""
        return prompt_len, layout.ring_start(budget, prompt_len), budget.capacity

    def admit(self, rows: Tensor, entries: Tensor) -> None:
        """Set the counters of ``rows [B]`` to ``entries [B, 3]``, both int64 on the device."""
        for counter, values in zip((self.num_tokens, self.ring_start, self.capacity), entries.unbind(1), strict=True):
            counter[rows] = values

    def feed(self, rows: Tensor, tokens: Tensor) -> None:
        """``tokens [B]`` are the next to embed; a row without one (``sampling.NO_TOKEN``) is fed token 0."""
        self.last_token[rows] = tokens.clamp(min=0)

    def places(
        self, rows: Tensor, spec: KVSpec, ahead: Tensor | int = 0, heads: HeadTable | None = None
    ) -> list[RowPlaces]:
        """By layer: where the next token of each of ``rows [B]`` is written, and what it attends to; or the token that
        is ``ahead [B]`` of it. ``heads``: see ``HeadTable.places``.
        """
        fed, capacity = self.num_tokens[rows] + ahead, self.capacity[rows]
        if heads is None:
            slots = slots_of(fed, self.ring_start[rows], capacity)
            places = [RowPlaces(rows, slots, torch.minimum(fed + 1, capacity))] * spec.num_layers
        else:
            places = heads.places(rows, fed, self.ring_start[rows])
        layers = [spec.layers[spec.source(index)] for index in range(spec.num_layers)]
        rings = {}
        for layer in {layer for layer in layers if isinstance(layer, Window)}:
            slots = fed.remainder(layer.num_tokens)
            rings[layer] = RowPlaces(
                rows, slots, slots + 1 if layer.is_chunked else (fed + 1).clamp(max=layer.num_tokens)
            )
        own = zip(layers, places, strict=True)
        return [rings[layer] if isinstance(layer, Window) else place for layer, place in own]

    def advance(self, rows: Tensor, tokens: Tensor) -> None:
        """A decode step has sampled ``tokens [B]`` for ``rows [B]``."""
        self.feed(rows, tokens)
        self.num_tokens[rows] += 1


class RecentQueries:
    """The last w = ``num_queries`` decode queries of every row of a draft, rotated; position p is at p mod w."""

    def __init__(
        self, spec: KVSpec, num_rows: int, num_queries: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (spec.num_layers, num_rows + 1, num_queries, spec.num_heads, spec.key_dim)
        self.buffer = torch.zeros(shape, dtype=dtype, device=device)  # [L, rows+1, w, H, E]

    def of_step(self, rows: Tensor, positions: Tensor) -> Callable[[int, Tensor], None]:
        """Stores queries ``[B, H, E]`` of a layer, of ``rows [B]`` at ``positions [B]``."""
        places = positions % self.buffer.shape[2]

        def put(layer: int, q: Tensor) -> None:
            self.buffer[layer, rows, places] = q

        return put

    def put(self, layer: int, row: int, position: int, q: Tensor) -> None:
        """Store a query ``[H, E]`` outside of a decode step."""
        self.buffer[layer, row, position % self.buffer.shape[2]] = q

    def last(self, row: int, position: int, count: int) -> Tensor:
        """Queries ``[L, count, H, E]`` of the ``count`` positions before ``position``, oldest first."""
        places = torch.arange(position - count, position, device=self.buffer.device) % self.buffer.shape[2]
        return self.buffer[:, row].index_select(1, places)

"""Counters of every row, in tensors whose addresses never change.

``num_tokens`` drives slots and lengths, ``next_position`` drives RoPE; they differ once KV re-selection
has set a row back. The last entry of every tensor is the padding row. Sampling state: ``sampling_state.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.config import KVBudget
from snapstream.kernels.rows import RowPlaces
from snapstream.kv import layout
from snapstream.kv.cache import HeadTable, slots_of
from snapstream.kv.spec import KVSpec, Window

Counters = tuple[int, int, int, int]  # of a row: num_tokens, next_position, ring_start, capacity


class Rows:
    """Counters of every row; advanced on the device, set from the host only when a row gets a new owner."""

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        def counters(value: int) -> Tensor:
            return torch.full((num_rows + 1,), value, dtype=torch.int64, device=device)

        self.last_token = counters(0)  # token to embed next
        self.num_tokens = counters(0)  # tokens fed so far; set back when a row is re-selected
        self.next_position = counters(0)  # position of last_token in the text
        self.behind = counters(0)  # tokens by which KV re-selections have set num_tokens back; windows go on
        self.ring_start = counters(0)
        self.capacity = counters(1)

    @staticmethod
    def entry(prompt_len: int, next_position: int, budget: KVBudget) -> Counters:
        """Counters of a row after a prompt of ``prompt_len`` tokens was written to it, for ``admit``."""
        return prompt_len, next_position, layout.ring_start(budget, prompt_len), budget.capacity

    def admit(self, rows: Tensor, entries: Tensor) -> None:
        """Set the counters of ``rows [B]`` to ``entries [B, 4]``, both int64 on the device."""
        for counter, values in zip(
            (self.num_tokens, self.next_position, self.ring_start, self.capacity), entries.unbind(1), strict=True
        ):
            counter[rows] = values
        self.behind.index_fill_(0, rows, 0)  # `tensor[rows] = number` would wait for a GPU

    def feed(self, rows: Tensor, tokens: Tensor) -> None:
        """``tokens [B]`` are the next to embed; a row without one (``sampling.NO_TOKEN``) is fed token 0."""
        self.last_token[rows] = tokens.clamp(min=0)

    def reselect(self, row: int, num_tokens: int, ring_start: int) -> None:
        """Set back the counters of a re-selected row."""
        self.behind[row].add_(self.num_tokens[row]).sub_(num_tokens)
        self.num_tokens[row].fill_(num_tokens)  # `tensor[row] = number` would wait for a GPU
        self.ring_start[row].fill_(ring_start)

    def slots(self, rows: Tensor) -> Tensor:
        """Slot that the next token of each of ``rows [B]`` is written to: ``layout.slot_of`` on the device."""
        return slots_of(self.num_tokens[rows], self.ring_start[rows], self.capacity[rows])

    def lengths(self, rows: Tensor) -> Tensor:
        """Visible slots of each of ``rows [B]`` once the next token has been written."""
        return torch.minimum(self.num_tokens[rows] + 1, self.capacity[rows])

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
        windows = {layer.num_tokens for layer in layers if isinstance(layer, Window)}
        if not windows:
            return places
        fed = fed + self.behind[rows]
        rings = {size: RowPlaces(rows, fed.remainder(size), (fed + 1).clamp(max=size)) for size in windows}
        own = zip(layers, places, strict=True)
        return [rings[layer.num_tokens] if isinstance(layer, Window) else place for layer, place in own]

    def advance(self, rows: Tensor, tokens: Tensor) -> None:
        """A decode step has sampled ``tokens [B]`` for ``rows [B]``."""
        self.feed(rows, tokens)
        self.num_tokens[rows] += 1
        self.next_position[rows] += 1

"""Staging buffers to row: the one write that turns a prompt of any length into a row of constant size.

Runs once per layer, when the last chunk of a prompt has passed it (SnapStream, section 3: compress exactly once, at the
end of prefill). The slot order is the rule of ``layout.py``; the choice is a selector's (``selectors/``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.cache import layout
from snapstream.cache.kv_cache import KVCache
from snapstream.config import KVBudget, Selector
from snapstream.kernels.bound import Kernels


def kept_positions(
    queries: Tensor | None, keys: Tensor, layer: int, budget: KVBudget, selector: Selector, kernels: Kernels
) -> Tensor:
    """Prompt positions ``[G, C]`` of a compressed row in slot order.

    ``keys [G, N, E]`` with N > C; ``queries [w, H, E]`` are the last ``selector.num_queries`` of the prompt (None
    when nothing is selected, K = 0).
    """
    num_heads, prompt_len, _ = keys.shape
    device = keys.device
    parts = [torch.arange(budget.num_sink, device=device).expand(num_heads, -1)]
    if budget.num_topk:
        assert queries is not None, "a budget with top-k slots needs the queries that vote"
        candidates = layout.candidates(budget, prompt_len)
        parts.append(selector.select(queries, keys, layer, candidates, budget.num_topk, kernels))
    end = prompt_len - budget.num_window
    if budget.num_window:
        parts.append(torch.arange(end, prompt_len, device=device).expand(num_heads, -1))
    first = end - budget.num_recent  # layout.ring_positions, without a list and without a copy to the device
    shift = (prompt_len - layout.ring_start(budget, prompt_len)) % budget.num_recent
    ring = first + (torch.arange(budget.num_recent, device=device) - shift) % budget.num_recent
    parts.append(ring.expand(num_heads, -1))
    return torch.cat(parts, dim=1)  # [G, C]


def write_rows(
    cache: KVCache,
    layer: int,
    rows: Sequence[int],
    keys: Tensor,
    values: Tensor,
    queries: Tensor | None,
    budget: KVBudget,
    selector: Selector,
) -> Tensor | None:
    """Write one layer of a prompt into each of ``rows``; returns the kept positions ``[G, C]``, None if all were kept.

    ``keys``, ``values`` ``[G, N, E]`` are the prompt's staging range.
    """
    prompt_len = keys.shape[1]
    cache.begin_rows(layer, rows, keys, values)
    if not layout.is_compressed(budget, prompt_len):
        for slot, part in layout.uncompressed_parts(budget, prompt_len):
            place, source = slice(slot, slot + len(part)), slice(part.start, part.stop)
            for row in rows:
                cache.store(layer, row, place, keys[:, source], values[:, source])
        return None
    index = kept_positions(queries, keys, layer, budget, selector, cache.kernels)
    if rows:
        cache.kernels.gather_rows(cache.layer(layer), rows, keys, values, index)
    return index

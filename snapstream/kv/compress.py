"""Prompt compression at the end of prefill: writes staged K/V to a row of constant size and reports the kept tokens.

A layer is written once, after the last chunk of the prompt (SnapStream, arXiv 2511.03092, section 3). ``layout.py``
defines the slot order; a selector chooses the tokens (``selectors/``).

Callers get the kept tokens as lists of positions or as one bit per token. Both start from a tensor ``[n]`` per layer:
the ``min(N, C)`` positions of each kv head in slot order, head after head. ``selected`` and ``packed_bits`` run on the
device, ``as_positions`` and ``as_bitmap`` on the host. Lists grow with the budget, bits with the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from snapstream.config import KVBudget, Selector
from snapstream.config.kv import HeadSlots
from snapstream.distributed.group import Group
from snapstream.kernels.interface import Kernels
from snapstream.kv import layout
from snapstream.kv.cache import HeadSpan, KVCache
from snapstream.types import KeptBitmap


def kept_positions(
    queries: Tensor | None, keys: Tensor, layer: int, budget: KVBudget, selector: Selector, kernels: Kernels
) -> Tensor:
    """Prompt positions ``[G, C]`` of a compressed row in slot order.

    ``keys [G, N, E]`` with N > C; ``queries [w, H, E]`` are the last ``selector.num_queries`` of the prompt (None if
    K = 0).
    """
    num_heads, prompt_len, _ = keys.shape
    device = keys.device
    parts = [torch.arange(budget.num_sink, device=device).expand(num_heads, -1)]
    if budget.num_topk:
        assert queries is not None, "a budget with top-k slots needs observation queries"
        candidates = layout.candidates(budget, prompt_len)
        parts.append(selector.select(queries, keys, layer, candidates, budget.num_topk, kernels))
    end = prompt_len - budget.num_window
    if budget.num_window:
        parts.append(torch.arange(end, prompt_len, device=device).expand(num_heads, -1))
    first = end - budget.num_recent  # the ring of ``kv/layout.py``, computed on the device
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
) -> list[Tensor | None]:
    """Write one layer of a prompt into each of ``rows``.

    ``keys, values [G, N, E]`` are the prompt's staging range; ``queries [w, H, E]`` are needed if anything is selected.
    Returns the kept positions ``[g, C]`` of each span of kv heads, None if all were kept.
    """
    prompt_len, kept = keys.shape[1], []
    for span in cache.spans(layer, budget, prompt_len):
        k, v = keys[span.heads], values[span.heads]  # [g, N, E]
        cache.begin_rows(layer, rows, k, v, span)
        index = None
        if layout.is_compressed(span.budget, prompt_len):
            q = None if queries is None else span.queries(queries, len(keys))
            index = kept_positions(q, k, layer, span.budget, selector, cache.score_kernels(layer, span))
            cache.gather(layer, rows, k, v, index, span)
        else:
            for slot, part in layout.uncompressed_parts(span.budget, prompt_len):
                place, source = slice(slot, slot + len(part)), slice(part.start, part.stop)
                for row in rows:
                    cache.store(layer, row, place, k[:, source], v[:, source], span)
        kept.append(index)
    return kept


Budgets = Sequence[Sequence[KVBudget]]  # by layer and kv head
Positions = tuple[tuple[tuple[int, ...], ...], ...]  # [L][G][K]


def all_kept(kept: Sequence[Tensor | None], spans: Sequence[HeadSpan], prompt_len: int, device: torch.device) -> Tensor:
    """Kept positions of all heads of a layer, head after head ``[n]``, from what ``write_rows`` returned."""
    whole = torch.arange(prompt_len, device=device)
    parts = [
        whole.repeat(span.heads.stop - span.heads.start) if index is None else index.flatten()
        for index, span in zip(kept, spans, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def selected(kept: Sequence[Tensor], budgets: Budgets, prompt_len: int) -> Tensor:
    """Positions in the top-k region of every layer and kv head, ascending, concatenated: ``[n]``.

    ``kept``: per layer ``[n]``.
    """
    parts = []
    for layer, head_budgets in zip(kept, budgets, strict=True):
        heads = layer.split(HeadSlots.visible(head_budgets, prompt_len))
        for head, budget in zip(heads, head_budgets, strict=True):
            parts.append(head[budget.num_sink : budget.num_sink + layout.valid_topk(budget, prompt_len)])
    return torch.cat(parts)


def as_positions(chosen: Tensor, budgets: Budgets, prompt_len: int) -> Positions:
    """``selected`` on the host, as nested tuples."""
    left = iter(chosen.tolist())
    return tuple(
        tuple(tuple(islice(left, layout.valid_topk(budget, prompt_len))) for budget in layer) for layer in budgets
    )


def of_all_heads(kept: Sequence[Tensor], budgets: Budgets, prompt_len: int, group: Group) -> Sequence[Tensor]:
    """Per layer ``[n]`` of all kv heads, from each rank's ``kept``; a collective."""
    if group.size == 1:
        return kept
    counts = []  # n by layer and rank
    for layer in budgets:
        visible, own = HeadSlots.visible(layer, prompt_len), max(len(layer) // group.size, 1)
        firsts = (rank * len(layer) // group.size for rank in range(group.size))
        counts.append([sum(visible[first : first + own]) for first in firsts])
    longest = max(map(max, counts))
    padded = torch.stack([torch.nn.functional.pad(layer, (0, longest - len(layer))) for layer in kept])  # [L, n]
    whole = group.all_gather(padded[None], 0)  # [W, L, n]
    copies = [max(group.size // len(layer), 1) for layer in budgets]  # ranks per head
    return [
        torch.cat([whole[rank, layer, : sizes[rank]] for rank in range(0, group.size, copies[layer])])
        for layer, sizes in enumerate(counts)
    ]


def packed_bits(kept: Sequence[Tensor], budgets: Budgets, prompt_len: int) -> Tensor:
    """One bit per layer, kv head and prompt token, over all regions: ``[L, G, ceil(N / 8)]`` uint8.

    ``kept``: per layer ``[n]``, at least one layer. Of layers with fewer heads the last ones are zeros.
    """
    width = -(-prompt_len // 8)  # bytes of a head
    device, num_heads = kept[0].device, max(map(len, budgets))
    weights = torch.arange(8, device=device).exp2().to(torch.uint8)  # 1, 2, 4 ... 128
    packed = torch.empty(len(kept), num_heads, width, dtype=torch.uint8, device=device)  # [L, G, ceil(N / 8)]
    for layer, index in enumerate(kept):  # a mask has a byte per token: one layer at a time
        mask = torch.zeros(num_heads, width * 8, dtype=torch.uint8, device=device)  # [G, N']
        for head, positions in zip(mask, index.split(HeadSlots.visible(budgets[layer], prompt_len)), strict=False):
            head.scatter_(0, positions, 1)
        packed[layer] = (mask.view(num_heads, width, 8) * weights).sum(dim=2, dtype=torch.uint8)
    return packed


def as_bitmap(packed: Tensor, prompt_len: int) -> KeptBitmap:
    """``packed_bits``, copied to the host, as bytes."""
    num_layers, num_heads, _ = packed.shape
    bits = packed.numpy().tobytes()
    return KeptBitmap(num_layers=num_layers, num_kv_heads=num_heads, num_tokens=prompt_len, bits=bits)

"""Which prompt tokens a row kept, in the form that callers get: lists of positions, or one bit per token.

Both start from the slot orders that ``compress.write_rows`` returned, one tensor per layer, and have two halves: one
makes a tensor on the device, the other reads it once it has reached the host. Lists grow with the budget and are easy
to read; bits grow with the prompt and need few bytes. Where kv heads have slots of their own, a layer's slot orders are
one tensor ``[n]``, head after head: of a head ``min(N, C)`` positions, all of them where it holds the prompt whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from snapstream.cache import layout
from snapstream.config import KVBudget
from snapstream.config.heads import HeadSlots
from snapstream.distributed.group import Group
from snapstream.request import KeptBitmap

Positions = tuple[tuple[tuple[int, ...], ...], ...]  # [L][G][K]


def selected(kept: Sequence[Tensor], budget: KVBudget) -> Tensor:
    """The top-k region of every layer and kv head, ascending: ``[L, G, K]``. ``kept``: per layer ``[G, C]``."""
    region = slice(budget.num_sink, budget.num_sink + budget.num_topk)
    return torch.stack([layer[:, region] for layer in kept])


def as_positions(chosen: Tensor) -> Positions:
    """``selected`` as plain numbers."""
    return tuple(tuple(map(tuple, layer)) for layer in chosen.tolist())


def selected_by_heads(kept: Sequence[Tensor], slots: HeadSlots, prompt_len: int) -> Tensor:
    """What every head keeps between the sinks and the recent tokens, ascending, one after the other: ``[n]``.

    ``kept``: per layer ``[n]``. Of a head that holds the prompt whole these are all tokens there.
    """
    parts = []
    for layer, budgets in zip(kept, slots.budgets, strict=True):
        for own, budget in zip(layer.split(slots.visible(budgets, prompt_len)), budgets, strict=True):
            parts.append(own[budget.num_sink : budget.num_sink + layout.valid_topk(budget, prompt_len)])
    return torch.cat(parts)


def of_all_heads(kept: Sequence[Tensor], slots: HeadSlots, prompt_len: int, group: Group) -> Sequence[Tensor]:
    """Per layer ``[n]`` of all kv heads, from what each rank has of its own; a collective."""
    if group.size == 1:
        return kept
    ranks = [slots.of_rank(rank, group.size) for rank in range(group.size)]
    copies = max(group.size // len(slots.topk[0]), 1)  # ranks that have the same head
    found = []
    for layer, own in enumerate(kept):
        counts = [sum(slots.visible(rank.budgets[layer], prompt_len)) for rank in ranks]
        padded = torch.nn.functional.pad(own, (0, max(counts) - len(own)))
        whole = group.all_gather(padded[None], 0)  # [W, n]
        found.append(torch.cat([whole[rank, : counts[rank]] for rank in range(0, group.size, copies)]))
    return found


def as_positions_by_heads(chosen: Tensor, slots: HeadSlots, prompt_len: int) -> Positions:
    """``selected_by_heads`` as plain numbers."""
    left = iter(chosen.tolist())
    return tuple(
        tuple(tuple(islice(left, layout.valid_topk(budget, prompt_len))) for budget in budgets)
        for budgets in slots.budgets
    )


def packed_bits(kept: Sequence[Tensor], prompt_len: int, slots: HeadSlots | None = None) -> Tensor:
    """One bit per layer, kv head and prompt token, all regions: ``[L, G, ceil(N / 8)]`` uint8.

    ``kept``: per layer ``[G, C]``, not empty; with ``slots``, of kv heads that have their own, ``[n]``.
    """
    width = -(-prompt_len // 8)  # bytes of a head
    device, num_heads = kept[0].device, kept[0].shape[0] if slots is None else len(slots.topk[0])
    weights = torch.arange(8, device=device).exp2().to(torch.uint8)  # 1, 2, 4 ... 128
    packed = torch.empty(len(kept), num_heads, width, dtype=torch.uint8, device=device)  # [L, G, ceil(N / 8)]
    for layer, index in enumerate(kept):  # a mask has a byte per token: one layer at a time
        mask = torch.zeros(num_heads, width * 8, dtype=torch.uint8, device=device)  # [G, N']
        heads = index if slots is None else index.split(slots.visible(slots.budgets[layer], prompt_len))
        for own, places in zip(mask, heads, strict=True):
            own.scatter_(0, places, 1)
        packed[layer] = (mask.view(num_heads, width, 8) * weights).sum(dim=2, dtype=torch.uint8)
    return packed


def as_bitmap(packed: Tensor, prompt_len: int) -> KeptBitmap:
    """``packed_bits`` on the host as bytes."""
    num_layers, num_heads, _ = packed.shape
    bits = packed.numpy().tobytes()
    return KeptBitmap(num_layers=num_layers, num_kv_heads=num_heads, num_tokens=prompt_len, bits=bits)

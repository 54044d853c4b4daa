"""Which prompt tokens a row kept, in the form that callers get: lists of positions, or one bit per token.

Both start from the slot orders that ``compress.write_rows`` returned, one tensor per layer, and have two halves: one
makes a tensor on the device, the other reads it once it has reached the host. Lists grow with the budget and are easy
to read; bits grow with the prompt and need few bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.config import KVBudget
from snapstream.request import KeptBitmap


def selected(kept: Sequence[Tensor], budget: KVBudget) -> Tensor:
    """The top-k region of every layer and kv head, ascending: ``[L, G, K]``. ``kept``: per layer ``[G, C]``."""
    region = slice(budget.num_sink, budget.num_sink + budget.num_topk)
    return torch.stack([layer[:, region] for layer in kept])


def as_positions(chosen: Tensor) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """``selected`` as plain numbers."""
    return tuple(tuple(map(tuple, layer)) for layer in chosen.tolist())


def packed_bits(kept: Sequence[Tensor], prompt_len: int) -> Tensor:
    """One bit per layer, kv head and prompt token, all regions: ``[L, G, ceil(N / 8)]`` uint8.

    ``kept``: per layer ``[G, C]``, not empty.
    """
    width = -(-prompt_len // 8)  # bytes of a head
    device, num_heads = kept[0].device, kept[0].shape[0]
    weights = torch.arange(8, device=device).exp2().to(torch.uint8)  # 1, 2, 4 ... 128
    packed = torch.empty(len(kept), num_heads, width, dtype=torch.uint8, device=device)  # [L, G, ceil(N / 8)]
    for layer, index in enumerate(kept):  # a mask has a byte per token: one layer at a time
        mask = torch.zeros(num_heads, width * 8, dtype=torch.uint8, device=device).scatter_(1, index, 1)  # [G, N']
        packed[layer] = (mask.view(num_heads, width, 8) * weights).sum(dim=2, dtype=torch.uint8)
    return packed


def as_bitmap(packed: Tensor, prompt_len: int) -> KeptBitmap:
    """``packed_bits`` on the host as bytes."""
    num_layers, num_heads, _ = packed.shape
    bits = packed.numpy().tobytes()
    return KeptBitmap(num_layers=num_layers, num_kv_heads=num_heads, num_tokens=prompt_len, bits=bits)

"""What a row kept, as lists and as bits, against the slot order they come from."""

from __future__ import annotations

import pytest
import torch

from snapstream.cache.kept import as_bitmap, as_positions, packed_bits, selected
from snapstream.config import KVBudget
from snapstream.request import KeptBitmap

BUDGET = KVBudget(num_sink=2, num_topk=4, num_recent=3)


def tokens_of(bitmap: KeptBitmap, layer: int, head: int) -> list[int]:
    """The kept tokens of one head, read as the docstring of ``KeptBitmap`` says."""
    width = (bitmap.num_tokens + 7) // 8
    place = (layer * bitmap.num_kv_heads + head) * width
    part = bitmap.bits[place : place + width]
    return [token for token in range(bitmap.num_tokens) if part[token // 8] >> (token % 8) & 1]


@pytest.mark.parametrize("prompt_len", [10, 16, 17, 60])
def test_both_forms_tell_the_same(prompt_len: int) -> None:
    torch.manual_seed(prompt_len)
    num_middle = prompt_len - BUDGET.num_sink - BUDGET.num_recent
    kept = []
    for _ in range(3):
        heads = []
        for _ in range(2):
            middle = torch.randperm(num_middle)[: BUDGET.num_topk].sort().values + BUDGET.num_sink
            ring = torch.arange(prompt_len - BUDGET.num_recent, prompt_len).roll(1)
            heads.append(torch.cat([torch.arange(BUDGET.num_sink), middle, ring]))
        kept.append(torch.stack(heads))  # [G, C]
    bitmap = as_bitmap(packed_bits(kept, prompt_len), prompt_len)
    positions = as_positions(selected(kept, BUDGET))
    assert (bitmap.num_layers, bitmap.num_kv_heads, bitmap.num_tokens) == (3, 2, prompt_len)
    assert len(bitmap.bits) == 3 * 2 * -(-prompt_len // 8)
    assert sum(byte.bit_count() for byte in bitmap.bits) == 3 * 2 * BUDGET.capacity  # nothing in the padding
    for layer in range(3):
        for head in range(2):
            tokens = tokens_of(bitmap, layer, head)
            assert tokens == sorted(kept[layer][head].tolist())
            assert tokens == [0, 1, *positions[layer][head], *range(prompt_len - 3, prompt_len)]

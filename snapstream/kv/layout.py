"""Slot arithmetic of a row, in plain integers. No torch.

A row has ``C = S + K + W + R`` slots in the order ``sink | top-k | window | recent ring``::

    N <= C :  every prompt token is kept, token p in slot p while there is no window region
    N >  C :  [0, S) sinks   [S, S+K) selected, ascending   [S+K, S+K+W) the last W tokens of the prompt
              [S+K+W, C) the R tokens before those, as a ring

``p`` is the index of a token among those fed to the row. Invariant: after ``num_tokens`` tokens exactly the slots
``0 .. min(num_tokens, C) - 1`` are visible, so attention over a row needs only a length. Slots that a short prompt
leaves without a selected token belong to the ring, so nothing is evicted before ``num_tokens > C`` (SnapStream,
arXiv 2511.03092, section 3, leaves them unused). The window region (W = 0 in the paper) is frozen like the top-k. The
ring is written so that ``slot_of`` overwrites its oldest token first. If the prompt fits, its window is placed before
the ring.
"""

from __future__ import annotations

from snapstream.config import KVBudget


def valid_topk(budget: KVBudget, prompt_len: int) -> int:
    """Slots of the top-k region that the prompt fills: ``clamp(N - S - W - R, 0, K)``."""
    return min(max(prompt_len - budget.num_sink - budget.num_window - budget.num_recent, 0), budget.num_topk)


def valid_window(budget: KVBudget, prompt_len: int) -> int:
    """Slots of the window region that the prompt fills, after sinks and top-k."""
    return min(max(prompt_len - budget.num_sink - valid_topk(budget, prompt_len), 0), budget.num_window)


def ring_start(budget: KVBudget, prompt_len: int) -> int:
    """First slot of the ring of a row that was prefilled with ``prompt_len`` tokens."""
    return budget.num_sink + valid_topk(budget, prompt_len) + valid_window(budget, prompt_len)


def uncompressed_parts(budget: KVBudget, prompt_len: int) -> list[tuple[int, range]]:
    """First slot and prompt positions of each part of a prompt that fits its row."""
    window = range(prompt_len - valid_window(budget, prompt_len), prompt_len)
    ring = range(budget.num_sink + valid_topk(budget, prompt_len), window.start)
    if not window or not ring:
        return [(0, range(prompt_len))]
    return [(0, range(ring.start)), (ring.start, window), (ring.start + len(window), ring)]


def slot_of(ordinal: int, ring_start: int, capacity: int) -> int:
    """Slot that token number ``ordinal`` is written to."""
    if ordinal < ring_start:
        return ordinal
    return ring_start + (ordinal - ring_start) % (capacity - ring_start)


def num_visible(num_tokens: int, capacity: int) -> int:
    """Slots that attention reads after ``num_tokens`` tokens."""
    return min(num_tokens, capacity)


def is_compressed(budget: KVBudget, prompt_len: int) -> bool:
    """True when the prompt does not fit its row."""
    return prompt_len > budget.capacity


def candidates(budget: KVBudget, prompt_len: int) -> range:
    """Prompt positions that compete for the top-k slots; empty when the prompt fits or nothing is selected."""
    if not is_compressed(budget, prompt_len) or budget.num_topk == 0:
        return range(0)
    return range(budget.num_sink, prompt_len - budget.num_window - budget.num_recent)

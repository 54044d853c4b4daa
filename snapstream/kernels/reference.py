"""The plain PyTorch meaning of every kernel. Slow and short; every faster version is tested against these.

Softmax and scores are fp32 whatever the storage dtype. Shapes: T chunk tokens, N prompt tokens, B rows of a batch,
w observation queries, H query heads, G kv heads, E head dim, C capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last T of N tokens: ``q [T, H, E]``, ``k, v [G, N, E]`` -> ``[T, H, E]``.

    Query ``i`` sits at position ``N - T + i`` and sees the keys up to its own position (bottom-right causal).
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    grouped = q.float().view(num_queries, num_kv_heads, -1, head_dim)
    logits = torch.einsum("tgre,gne->grtn", grouped, k.float()) * head_dim**-0.5
    query_position = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    hidden = torch.arange(num_keys, device=q.device) > query_position[:, None]  # [T, N]
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    out = torch.einsum("grtn,gne->tgre", weights, v.float())
    return out.reshape(num_queries, num_heads, head_dim).to(q.dtype)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """Attention of one query per row over the row's first ``lengths`` slots.

    ``q [B, H, E]``, ``k, v [rows+1, G, C, E]``, ``rows, lengths [B]`` int64, lengths >= 1 -> ``[B, H, E]``.
    """
    batch, num_heads, head_dim = q.shape
    keys, values = k[rows].float(), v[rows].float()  # [B, G, C, E]
    grouped = q.float().view(batch, keys.shape[1], -1, head_dim)
    logits = torch.einsum("bgre,bgce->bgrc", grouped, keys) * head_dim**-0.5
    unseen = torch.arange(keys.shape[2], device=q.device) >= lengths[:, None, None, None]
    # Slots that were never written may hold anything, NaN included: a weight of 0 would not silence them.
    values = values.masked_fill(unseen[:, 0, 0, :, None].unsqueeze(1), 0.0)
    weights = logits.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("bgrc,bgce->bgre", weights, values).reshape(batch, num_heads, head_dim).to(q.dtype)


def write_slots(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Store ``k, v [B, G, E]`` in slot ``slots[b]`` of row ``rows[b]`` of ``[rows+1, G, C, E]``, in place."""
    k_cache[rows, :, slots] = k
    v_cache[rows, :, slots] = v


def snapkv_scores(
    queries: Tensor,
    keys: Tensor,
    first_query: int,
    start: int,
    stop: int,
    *,
    over_row: bool,
    group_max: bool,
) -> Tensor:
    """How much attention the candidates ``[start, stop)`` get from the observation window: ``[G, stop - start]`` fp32.

    ``queries [w, H, E]`` at positions ``first_query ..``; ``keys [G, N, E]``. The softmax runs over the candidates, or
    with ``over_row`` over every key; a query never sees keys after its own position, and one that sees no candidate
    casts no vote. Summed over the window, then summed (``group_max``: maximum) over the heads of a group.
    """
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    grouped = queries.float().view(num_queries, num_kv_heads, -1, head_dim)
    logits = torch.einsum("wgre,gne->grwn", grouped, keys.float()) * head_dim**-0.5
    position = torch.arange(num_keys, device=keys.device)
    query_position = first_query + torch.arange(num_queries, device=keys.device)
    hidden = position > query_position[:, None]  # [w, N]
    if not over_row:
        hidden = hidden | (position < start) | (position >= stop)
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)  # [G, r, w, N]
    votes = weights[..., start:stop].sum(2)  # [G, r, n]
    return votes.amax(1) if group_max else votes.sum(1)

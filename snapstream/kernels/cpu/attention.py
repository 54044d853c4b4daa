"""Attention on a CPU through PyTorch's flash kernel, without masks, gathers or copies of K and V.

Prefill: the keys before the chunk are visible to every query of it, so that part runs unmasked with the query heads of
a group folded into the query length (no repeated keys); the chunk itself is one causal square; the two are merged by
their log-sum-exp. Decode: rows are read in place, neighbouring rows of one length in one call; a query per row is too
few for the flash kernel, plain batched products read the row faster (figures in ``docs/log.md``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k, v [G, N, E]`` -> ``[T, H, E]``."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    group = num_heads // num_kv_heads
    prefix = num_keys - num_queries
    own_k = k[:, prefix:].repeat_interleave(group, 0)[None]  # [1, H, T, E]: only the chunk is repeated
    own_v = v[:, prefix:].repeat_interleave(group, 0)[None]
    out, lse = _flash(q.transpose(0, 1)[None], own_k, own_v, 0.0, True)  # [1, H, T, E], [1, H, T]
    if prefix == 0:
        return out[0].transpose(0, 1)
    folded = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)[None]
    before, before_lse = _flash(folded, k[None, :, :prefix], v[None, :, :prefix], 0.0, False)  # [1, G, r*T, E]
    before = before.reshape(num_heads, num_queries, head_dim)
    share = torch.sigmoid(before_lse.reshape(num_heads, num_queries) - lse[0])[..., None].to(out.dtype)
    return torch.lerp(out[0], before, share).transpose(0, 1)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """See ``reference.decode_attention``: ``q [B, H, E]``, ``k, v [rows+1, G, C, E]`` -> ``[B, H, E]``."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    row_list, length_list = rows.tolist(), lengths.tolist()
    parts = []
    a = 0
    while a < batch:
        b = a + 1
        while b < batch and row_list[b] == row_list[b - 1] + 1 and length_list[b] == length_list[a]:
            b += 1
        first, count, seen = row_list[a], b - a, length_list[a]
        span = slice(first, first + count)
        parts.append(_attend(grouped[a:b], k[span, :, :seen], v[span, :, :seen]))
        a = b
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(batch, num_heads, head_dim)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of ``q [b, G, r, E]`` over ``k, v [b, G, n, E]``, everything visible."""
    if q.dtype != torch.float32:  # products of half precision would round the scores
        return F.scaled_dot_product_attention(q, k, v)
    batch, num_kv_heads, group, head_dim = q.shape
    keys, values = k.flatten(0, 1), v.flatten(0, 1)  # [b*G, n, E], views: rows and heads lie evenly spaced
    scaled = (q * head_dim**-0.5).reshape(batch * num_kv_heads, group, head_dim)
    if head_dim < 128:
        logits = torch.bmm(scaled, keys.transpose(1, 2))  # [b*G, r, n]
    else:  # wide heads: the keys are read faster as the left operand
        logits = torch.bmm(keys, scaled.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(logits.softmax(-1), values).view(batch, num_kv_heads, group, head_dim)

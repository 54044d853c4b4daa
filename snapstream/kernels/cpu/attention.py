"""Attention on a CPU through PyTorch's flash kernel, without masks, gathers or copies of K and V.

Prefill: the keys before the chunk are visible to every query of it, so that part runs unmasked with the query heads of
a group folded into the query length; the chunk itself is one causal square; the two are merged by their log-sum-exp.
Decode: rows are read in place, neighboring rows of similar length in one call; with one query per row batched products
are faster than the flash kernel. Slots past a row's length may be read with weight 0, and 0 x NaN is NaN: ``KVCache``
begins with zeros, and NaN left by an earlier request is zeroed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from snapstream.kernels.formats import encoding_of, spread
from snapstream.kernels.pytorch import attend_by, capped_, in_equal_heads, sink_softmax
from snapstream.kernels.rows import LayerRows

MAX_WASTE = 1.25  # slots read over slots visible, up to which unequal rows share a call
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k, v [G, N, E]`` -> ``[T, H, E]``."""
    return attend_by(flash, q, k, v, window=window, sinks=sinks, cap=cap)


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's flash kernel of the CPU, for ``split``."""
    return in_equal_heads(lambda q, k, v: _flash(q, k, v, 0.0, is_causal), q, k, v, is_causal)


def decode_attention(
    q: Tensor, cache: LayerRows, rows: Tensor, lengths: Tensor, sinks: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """See ``reference.decode_attention``: ``q [B, H, E]`` -> ``[B, H, E']``."""
    batch, num_heads, head_dim = q.shape
    all_sinks = None if sinks is None else sinks.expand(batch, -1)  # [B, H]
    k, v, scales = cache.k, cache.v, cache.scales
    num_kv_heads = k.shape[1]
    grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    parts = []
    for run in runs(rows.tolist(), lengths.tolist()):
        span, longest = slice(run.row, run.row + run.num_rows), run.longest
        own = slice(run.start, run.start + run.num_rows)
        visible = None if run.is_even else lengths[own]
        keys, values = k[span, :, :longest], v[span, :, :longest]
        own_scales = [
            scale if scale is None else scale[span] if scale.dim() == 2 else scale[span, :, :longest]
            for scale in scales
        ]
        own_sinks = None if all_sinks is None else all_sinks[own]
        part = _attend_stored(grouped[own], keys, values, visible, own_scales, own_sinks, cap)
        if visible is not None and not math.isfinite(part.sum(dtype=torch.float32).item()):
            _silence(keys, visible)  # too: a mask that is added to a NaN leaves it
            _silence(values, visible)
            for scale in own_scales:
                if scale is not None and scale.dim() == 3:
                    _silence(scale, visible)
            part = _attend_stored(grouped[own], keys, values, visible, own_scales, own_sinks, cap)
        parts.append(part)
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(batch, num_heads, -1)


def _attend_stored(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scales: Sequence[Tensor | None], sinks: Tensor | None,
    cap: float | None,
) -> Tensor:  # fmt: skip
    """``_attend`` over rows as they are stored; the scales of a whole head are left to ``q`` and the result."""
    encodings, (k_scale, v_scale) = (encoding_of(k), encoding_of(v)), scales
    if k_scale is None and v_scale is None and all(own.format.group == 1 for own in encodings):
        dtype = q.dtype if sinks is None and cap is None else torch.float32
        return _attend(q.to(dtype), k.to(dtype), v.to(dtype), visible, sinks, cap).to(q.dtype)
    if k_scale is not None and v_scale is not None and encodings[0].format.scales == "head":
        k_scale, v_scale = spread(k_scale, k), spread(v_scale, v)
        return (_attend(q.float() * k_scale, k.float(), v.float(), visible, sinks, cap) * v_scale).to(q.dtype)
    # A few rotations of q and of the result instead of one per slot.
    keys, values = (own.rotated(x, scale) for own, x, scale in zip(encodings, (k, v), scales, strict=True))
    out = _attend(encodings[0].rotate(q.float()), keys, values, visible, sinks, cap)
    return encodings[1].rotate(out).to(q.dtype)


def _silence(slots: Tensor, visible: Tensor) -> None:
    """Zero the slots of ``slots [b, G, n, ...]``, in the cache, that lie past each row's end."""
    stored = slots.view(torch.uint8) if slots.itemsize == 1 else slots  # FP8 is not filled everywhere
    for row, length in zip(stored, visible.tolist(), strict=True):
        row[:, length:].zero_()


class Run(NamedTuple):
    """Consecutive batch entries in consecutive rows, read in one call."""

    start: int  # first entry of the batch
    row: int  # its row
    num_rows: int
    longest: int  # visible slots of the longest row
    is_even: bool  # all rows are equally long


def runs(rows: list[int], lengths: list[int]) -> Iterator[Run]:
    """Cut a batch into runs whose rows may be read to the longest one's length at little waste."""
    start = 0
    while start < len(rows):
        stop, longest, total = start + 1, lengths[start], lengths[start]
        while stop < len(rows) and rows[stop] == rows[stop - 1] + 1:
            padded = max(longest, lengths[stop]) * (stop + 1 - start)
            if padded > MAX_WASTE * (total + lengths[stop]):
                break
            longest, total = max(longest, lengths[stop]), total + lengths[stop]
            stop += 1
        yield Run(start, rows[start], stop - start, longest, total == longest * (stop - start))
        start = stop


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, sinks: Tensor | None, cap: float | None) -> Tensor:
    """Softmax attention of ``q [b, G, r, E]`` over ``k [b, G, n, E], v [b, G, n, E']``, ``visible [b]`` slots each,
    with ``sinks [b, H]`` and ``cap`` only in fp32.
    """
    batch, num_kv_heads, group, head_dim = q.shape
    unseen = None
    if visible is not None:
        unseen = (torch.arange(k.shape[2]) >= visible[:, None])[:, None, None]  # [b, 1, 1, n]
    if q.dtype != torch.float32:  # products of half precision would round the scores
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if unseen is None else ~unseen)
    keys, values = k.flatten(0, 1), v.flatten(0, 1)  # views [b*G, n, E], [b*G, n, E']
    scaled = (q * head_dim**-0.5).reshape(batch * num_kv_heads, group, head_dim)
    if head_dim < 128:
        logits = torch.bmm(scaled, keys.transpose(1, 2))  # [b*G, r, n]
    else:  # wide heads: the keys are read faster as the left operand
        logits = torch.bmm(keys, scaled.transpose(1, 2)).transpose(1, 2)
    logits = capped_(logits, cap)
    if unseen is not None:
        logits = logits.view(batch, num_kv_heads, group, -1).masked_fill(unseen, float("-inf")).flatten(0, 1)
    own_sinks = None if sinks is None else sinks.reshape(batch * num_kv_heads, group, 1)
    return torch.bmm(sink_softmax(logits, own_sinks), values).view(batch, num_kv_heads, group, -1)

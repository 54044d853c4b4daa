"""The plain PyTorch meaning of every kernel. Slow and short; every faster version is tested against these.

Softmax and scores are fp32 whatever the storage dtype. Shapes: T chunk tokens, N prompt tokens, B rows of a batch,
w observation queries, H query heads, G kv heads, E head dim, C capacity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels.fp8 import Scales, quantise


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


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor, scales: Scales | None = None
) -> Tensor:
    """Attention of one query per row over the row's first ``lengths`` slots.

    ``q [B, H, E]``, ``k, v [rows+1, G, C, E]``, ``rows, lengths [B]`` int64, lengths >= 1 -> ``[B, H, E]``. Rows in
    FP8 have ``scales``, here and below.
    """
    batch, num_heads, head_dim = q.shape
    keys, values = k[rows].float(), v[rows].float()  # [B, G, C, E]
    if scales is not None:
        keys, values = (x * scale[rows][..., None, None] for x, scale in zip((keys, values), scales, strict=True))
    grouped = q.float().view(batch, keys.shape[1], -1, head_dim)
    logits = torch.einsum("bgre,bgce->bgrc", grouped, keys) * head_dim**-0.5
    unseen = torch.arange(keys.shape[2], device=q.device) >= lengths[:, None, None, None]
    # Slots that were never written may hold anything, NaN included: a weight of 0 would not silence them.
    values = values.masked_fill(unseen[:, 0, 0, :, None].unsqueeze(1), 0.0)
    weights = logits.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("bgrc,bgce->bgre", weights, values).reshape(batch, num_heads, head_dim).to(q.dtype)


def write_slots(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor, scales: Scales | None = None
) -> None:
    """Store ``k, v [B, G, E]`` in slot ``slots[b]`` of row ``rows[b]`` of ``[rows+1, G, C, E]``, in place."""
    if scales is not None:  # written as bytes: whether an index may be written in FP8 depends on the device
        k, v = (quantise(x, scale[rows][..., None]) for x, scale in zip((k, v), scales, strict=True))
        k_cache, v_cache, k, v = (x.view(torch.uint8) for x in (k_cache, v_cache, k, v))
    k_cache[rows, :, slots] = k
    v_cache[rows, :, slots] = v


def gather_rows(
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Sequence[int],
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    scales: Scales | None = None,
) -> None:
    """Fill the first ``n`` slots of each of ``rows`` of ``[rows+1, G, C, E]`` with tokens of a prompt, in place.

    ``keys, values [G, N, E]``; ``index [G, n]`` is the token of each slot.
    """
    expanded = index[..., None].expand(-1, -1, keys.shape[-1])
    kept_keys, kept_values = keys.gather(1, expanded), values.gather(1, expanded)
    for row in rows:
        own_keys, own_values = kept_keys, kept_values
        if scales is not None:
            own_keys = quantise(kept_keys, scales[0][row, :, None, None])
            own_values = quantise(kept_values, scales[1][row, :, None, None])
        k_cache[row, :, : index.shape[1]] = own_keys
        v_cache[row, :, : index.shape[1]] = own_values


def norm_rope(
    heads: Tensor, head_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, num_kv_heads: int
) -> Tensor:
    """Norm (optional) and rotate the heads of q and k: ``heads [T, H+2G, E]`` (q | k | v) -> ``[T, H+G, E]``.

    ``head_norm [H+G, E]``; ``cos, sin [T, 1, E]`` fp32 as ``Rope.angles`` makes them (with the minus in the sine).
    """
    qk = heads[:, :-num_kv_heads]
    if head_norm is not None:
        qk = F.rms_norm(qk.float(), (qk.shape[-1],), None, eps).mul(head_norm).to(qk.dtype)
    return (qk * cos + qk.roll(qk.shape[-1] // 2, dims=-1) * sin).to(heads.dtype)


def norm_rope_write(
    heads: Tensor,
    head_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    slots: Tensor,
    scales: Scales | None = None,
) -> Tensor:
    """``norm_rope``, then ``write_slots`` of the rotated k and of v; returns q ``[T, H, E]``."""
    num_kv_heads = k_cache.shape[1]
    qk = norm_rope(heads, head_norm, eps, cos, sin, num_kv_heads)
    write_slots(k_cache, v_cache, qk[:, -num_kv_heads:], heads[:, -num_kv_heads:], rows, slots, scales)
    return qk[:, :-num_kv_heads].contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` of each row of ``x [T, D]``, fp32 inside."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += x`` in place, rounded to its dtype, and the norm of that sum: all ``[T, D]``."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2I]`` (gate | up): ``[T, I]``, fp32 inside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def hop_scores(weights: Tensor, voters: Tensor, queries: Tensor, keys: Tensor, start: int, stop: int) -> Tensor:
    """How much attention the candidates ``[start, stop)`` get from prompt tokens that vote in turn: ``[G, n]`` fp32.

    ``voters [G, m]`` are candidates (0 is ``start``), ``weights [G, m]`` what their votes count; ``queries [N, H, E]``
    and ``keys [G, N, E]`` are those of the whole prompt. The softmax runs over all candidates but the voter itself,
    later ones too: the question may make use of a token that stands behind. Averaged over the heads of a group.
    """
    num_keys, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    grouped = queries.float().view(num_keys, num_kv_heads, -1, head_dim).transpose(0, 1)  # [G, N, r, E]
    own = grouped[torch.arange(num_kv_heads, device=keys.device)[:, None], voters + start]  # [G, m, r, E]
    logits = torch.einsum("gmre,gne->gmrn", own, keys[:, start:stop].float()) * head_dim**-0.5
    itself = torch.arange(stop - start, device=keys.device) == voters[..., None]  # [G, m, n]
    probabilities = logits.masked_fill(itself[:, :, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("gm,gmn->gn", weights, probabilities.mean(2))


def carry_ahead(scores: Tensor, half_life: int) -> Tensor:
    """``scores [G, n]``, >= 0, each carried to all candidates after it: halved every ``half_life`` tokens, best kept.

    A morphological dilation with a kernel on one side. Ours: the window points at a key, its answer stands behind it.
    """
    out = scores.clone()
    for distance in range(1, scores.shape[1]):
        out[:, distance:] = torch.maximum(out[:, distance:], scores[:, :-distance] * 0.5 ** (distance / half_life))
    return out


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
    """How much attention the candidates ``[start, stop)`` get from the queries that vote: ``[G, stop - start]`` fp32.

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

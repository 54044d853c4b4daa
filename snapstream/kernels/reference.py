"""Reference of every kernel in plain PyTorch, slow and short; every faster version is tested against it.

Each field of ``interface.Kernels`` has a function of its name and signature here; the others are their parts.
Softmax and scores are fp32 whatever the storage dtype. Shapes: T chunk tokens, N prompt tokens, B rows of a batch,
w observation queries, H query heads, G kv heads, E head dim, C capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import groups
from snapstream.kernels.formats import encoding_of
from snapstream.kernels.rows import CosSin, HeadNorm, Keep, LayerRows, RowPlaces

BLOCK = 128  # rows and columns of an FP8 weight that share a scale


def sink_softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of ``logits [..., n]`` with one more logit, whose probability is left out.

    ``sinks [..., 1]`` broadcasts (gpt-oss; StreamingLLM, arXiv 2309.17453, section 3.3: softmax with a learned sink).
    None: the plain softmax.
    """
    if sinks is None:
        return logits.softmax(-1)
    return torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1).softmax(-1)[..., :-1]


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """``cap tanh(scores / cap)``: scores stay within ``+-cap`` (Gemma 2, arXiv 2408.00118, section 2). None: as is."""
    return scores if cap is None else (scores / cap).tanh() * cap


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of the last T of N tokens: ``q [T, H, E]``, ``k [G, N, E], v [G, N, E']`` -> ``[T, H, E']``.

    Query ``i`` is at position ``N - T + i`` and sees the keys up to its own position (bottom-right causal), or with a
    sliding ``window`` >= 1 only the last ``window`` of those, its own included. ``sinks [H]``: see ``sink_softmax``;
    ``cap``: see ``capped``.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    grouped = q.float().view(num_queries, num_kv_heads, -1, head_dim)
    logits = capped(torch.einsum("tgre,gne->grtn", grouped, k.float()) * head_dim**-0.5, cap)
    query_position = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    behind = query_position[:, None] - torch.arange(num_keys, device=q.device)  # [T, N]: key to query, in tokens
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    own_sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1, 1)
    weights = sink_softmax(logits.masked_fill(hidden, float("-inf")), own_sinks)
    out = torch.einsum("grtn,gne->tgre", weights, v.float())
    return out.reshape(num_queries, num_heads, -1).to(q.dtype)


def decode_attention(
    q: Tensor, cache: LayerRows, rows: Tensor, lengths: Tensor, sinks: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """Attention of one query per row over the row's first ``lengths`` slots.

    ``q [B, H, E]``, ``rows, lengths [B]`` int64, lengths >= 1 -> ``[B, H, E']``, E' numbers of a value; ``sinks [H]``
    or ``[B, H]``: see ``sink_softmax``; ``cap``: see ``capped``.
    """
    batch, num_heads, head_dim = q.shape
    keys, values = (  # [B, G, C, E], [B, G, C, E']
        encoding_of(stored).decode(stored[rows], None if scale is None else scale[rows])
        for stored, scale in zip((cache.k, cache.v), cache.scales, strict=True)
    )
    grouped = q.float().view(batch, keys.shape[1], -1, head_dim)
    logits = capped(torch.einsum("bgre,bgce->bgrc", grouped, keys) * head_dim**-0.5, cap)
    unseen = torch.arange(keys.shape[2], device=q.device) >= lengths[:, None, None, None]
    # Slots that were never written may hold anything, NaN included: a weight of 0 would not silence them.
    values = values.masked_fill(unseen[:, 0, 0, :, None].unsqueeze(1), 0.0)
    own_sinks = None if sinks is None else sinks.expand(batch, -1).view(batch, keys.shape[1], -1, 1)
    weights = sink_softmax(logits.masked_fill(unseen, float("-inf")), own_sinks)
    return torch.einsum("bgrc,bgce->bgre", weights, values).reshape(batch, num_heads, -1).to(q.dtype)


def write_slots(k: Tensor, v: Tensor, cache: LayerRows, rows: Tensor, slots: Tensor) -> None:
    """Store ``k [B, G, E], v [B, G, E']`` in slot ``slots[b]`` of row ``rows[b]``, in place; of latents k alone."""
    for stored, new, scale in _stored(cache, k, v):
        encoding, own = encoding_of(stored), None
        if scale is not None and encoding.format.scales == "slot":
            scale[rows, :, slots] = own = encoding.scale_of(new)
        elif scale is not None:
            own = scale[rows]
        encoded = encoding.encode(new, own)
        if stored.itemsize == 1:  # not every device writes FP8 at an index
            stored, encoded = stored.view(torch.uint8), encoded.view(torch.uint8)
        stored[rows, :, slots] = encoded


def gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """Of ``tokens [G, N, E]`` those that ``index [G, n]`` names: ``[G, n, E]``, a copy."""
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))


def gather_rows(cache: LayerRows, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor) -> None:
    """Fill the first ``n`` slots of each of ``rows`` with tokens of a prompt, in place.

    ``keys [G, N, E], values [G, N, E']``; ``index [G, n]`` is the token of each slot.
    """
    fill_rows(cache, rows, keys, values, index, gather_tokens)


def fill_rows(
    cache: LayerRows, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor,
    take: Callable[[Tensor, Tensor], Tensor],
) -> None:  # fmt: skip
    """``gather_rows`` by another ``take``, which means what ``gather_tokens`` does."""
    for stored, tokens, scale in _stored(cache, keys, values):
        kept, slots, encoding = take(tokens, index), slice(index.shape[1]), encoding_of(stored)
        for row in rows:
            own = None if scale is None else scale[row]  # [G] or [G, C]
            if own is not None and encoding.format.scales == "slot":
                own = own[:, slots]
            encoding.store(stored[row, :, slots], own, kept)


def _stored(cache: LayerRows, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Each stored tensor of a layer with what goes there and its scales, of heads or of slots."""
    k_scale, v_scale = cache.scales
    yield cache.k, k, k_scale
    if not cache.values_are_keys:
        yield cache.v, v, v_scale


def norm_rope(heads: Tensor, norm: HeadNorm, rope: CosSin, num_kv_heads: int) -> Tensor:
    """Norm (optional) and rotate the heads of q and k: ``heads [T, H+2G, E]`` (q | k | v) -> ``[T, H+G, E]``.

    The last ``num_kv_heads`` heads are those of v and left out. Angles are those of ``Rope.angles``.
    """
    cos, sin = rope
    qk = heads[:, : heads.shape[1] - num_kv_heads]
    if norm.weight is not None:
        qk = F.rms_norm(qk.float(), (qk.shape[-1],), None, norm.eps).mul(norm.weight).to(qk.dtype)
    return (qk * cos + qk.roll(qk.shape[-1] // 2, dims=-1) * sin).to(heads.dtype)


def norm_rope_write(
    heads: Tensor, norm: HeadNorm, rope: CosSin | None, cache: LayerRows, rows: Tensor, slots: Tensor
) -> Tensor:
    """``norm_rope``, then ``write_slots`` of the rotated k and of v; returns q ``[T, H, E]``.

    Where values are keys there are no heads of v: ``heads [T, H+G, E]``. With ``rope`` None heads come normed and
    rotated.
    """
    num_kv_heads = cache.num_kv_heads
    num_values = 0 if cache.values_are_keys else num_kv_heads
    qk = heads[:, : heads.shape[1] - num_values] if rope is None else norm_rope(heads, norm, rope, num_values)
    write_slots(qk[:, -num_kv_heads:], heads[:, -num_kv_heads:], cache, rows, slots)
    return qk[:, :-num_kv_heads].contiguous()


def attend_rows(
    heads: Tensor, norm: HeadNorm, rope: CosSin | None, cache: LayerRows, places: RowPlaces, keep: Keep | None
) -> Tensor:
    """A decode step's attention in one layer: ``norm_rope_write``, then ``decode_attention``.

    ``heads [B, H+2G, E]`` as projected -> ``[B, H, E']``; ``keep`` is handed the rotated queries ``[B, H, E]``.
    """
    q = norm_rope_write(heads, norm, rope, cache, places.rows, places.slots)
    if keep is not None:
        keep(q)
    return decode_attention(q, cache, places.rows, places.lengths, norm.sinks, norm.cap)


def code_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """``x [T, D]`` times the matrix of ``codes [O, D * bits / 8]`` and ``scales [O, D / group]``, transposed, plus
    ``bias [O]``: ``[T, O]``. ``groups.widen`` says what the codes mean; nothing is rounded before the result.
    """
    wide = groups.dequantize(codes, scales, 8 * codes.shape[1] // x.shape[1])
    return F.linear(x.float(), wide, None if bias is None else bias.float()).to(x.dtype)


def grouped_linear(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    """Each row of ``x [P, D]`` times the matrix of its expert in ``weight [X, O, D]``, transposed: ``[P, O]``.

    Rows are sorted by expert: those of expert e are ``ends[e - 1] .. ends[e] - 1``, ``ends [X]`` int32. With ``scale
    [X, ceil(O / 128), ceil(D / 128)]`` fp32 the weight is FP8 (e4m3) and each block of 128 by 128 is times its scale.
    Rows behind the last end have no expert here: what stands in theirs is any number.
    """
    out = x.new_empty(len(x), weight.shape[1])
    for row in range(int(ends[-1])):
        expert = int((ends <= row).sum())
        matrix = weight[expert].float() if scale is None else dequantize_blocks(weight[expert], scale[expert])
        out[row] = (matrix @ x[row].float()).to(x.dtype)
    return out


def dequantize_blocks(data: Tensor, scale: Tensor) -> Tensor:
    """FP8 numbers ``[.., O, D]``, each times the scale of its block, ``[.., ceil(O / 128), ceil(D / 128)]``: fp32."""
    rows, columns = (torch.arange(size, device=data.device) // BLOCK for size in data.shape[-2:])
    return data.float() * scale[..., rows, :][..., columns]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` of each row of ``x [T, D]``, fp32 inside."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += x`` in place, rounded to its dtype, and the norm of that sum: all ``[T, D]``; x may be fp32 parts
    ``[S, T, D]`` of what is added.
    """
    residual.copy_(residual + (x.sum(0) if x.dim() == 3 else x))
    return rms_norm(residual, weight, eps)


def one_linear(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, gated: bool
) -> Tensor:  # fmt: skip
    """The norm of ``x [1, D]``, or x, times ``weight [O, D]`` transposed plus ``bias [O]``, fp32 inside: ``[1, O]``;
    with ``gated`` SwiGLU of that, ``[1, O / 2]``.
    """
    normed = x.float() if norm is None else rms_norm(x.float(), norm, eps)
    out = F.linear(normed, weight.float(), None if bias is None else bias.float())
    return (swiglu(out) if gated else out).to(x.dtype)


def add_one_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """``residual [1, O]`` += ``x [1, D]`` times ``weight [O, D]`` transposed plus ``bias``, rounded once."""
    product = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    residual.copy_(residual.float() + product)


def few_linear(x: Tensor, weight: Tensor, bias: Tensor | None, in_parts: bool) -> Tensor:
    """``x [T, D]`` times ``weight [O, D]`` transposed plus ``bias [O]``, fp32 inside: ``[T, O]``; or parts of that sum
    in fp32, ``[S, T, O]`` with any S, for ``add_rms_norm``.
    """
    out = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return out[None] if in_parts else out.to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2I]`` (gate | up): ``[T, I]``, fp32 inside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def causal_conv(x: Tensor, state: Tensor, taps: Tensor, bias: Tensor | None = None, silu: bool = False) -> Tensor:
    """Depthwise convolution of sequences ``x [S, n, C]`` over each token and the K - 1 before it, and with ``silu`` the
    SiLU of it: ``[S, n, C]``.

    ``state [S, K-1, C]`` fp32 holds the inputs before the first, oldest first, and is updated in place; ``taps [K, C]``
    and ``bias [C]`` fp32. The same bits however a sequence is cut.
    """
    inputs = torch.cat((state, x.to(torch.float32)), dim=1)  # [S, K-1+n, C]
    out = taps[0] * inputs[:, : x.shape[1]]
    for place in range(1, len(taps)):
        out.addcmul_(taps[place], inputs[:, place : place + x.shape[1]])
    state.copy_(inputs[:, x.shape[1] :])
    out = out if bias is None else out.add_(bias)
    return (F.silu(out, inplace=True) if silu else out).to(x.dtype)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule token by token (arXiv 2412.06464, section 3.1): ``o [S, n, H, V]`` fp32.

    ``q, k [S, n, G, K]`` of unit length, ``v [S, n, H, V]``, ``decay, beta [S, n, H]``, all fp32; with a decay per
    element of a key (KDA, arXiv 2510.26692, section 3) ``decay [S, n, H, K]``. Value heads share the key heads in turn,
    H / G of them each; per value head

        S <- exp(decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q / sqrt(K)

    ``state [S, H, K, V]`` is updated in place.
    """
    q, k = (part.repeat_interleave(v.shape[2] // q.shape[2], dim=2) for part in (q, k))
    decay = decay[..., None] if decay.dim() == 3 else decay  # [S, n, H, 1 or K]
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state *= decay[:, t, ..., None].exp()
        recalled = torch.einsum("shkv,shk->shv", state, k[:, t])
        state += k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - recalled))[:, :, None]
        out[:, t] = torch.einsum("shkv,shk->shv", state, q[:, t])
    return out * q.shape[-1] ** -0.5


def selective_scan(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """The recurrence of Mamba-2 token by token (arXiv 2405.21060, section 2): ``y [S, n, H, P]`` fp32.

    ``b, c [S, n, G, N]``, ``x [S, n, H, P]`` times its step, ``decay [S, n, H]``, all fp32; heads share the groups in
    turn, H / G of them each; per head

        S <- exp(decay) S + b x^T;  y = S^T c

    ``state [S, H, N, P]`` is updated in place.
    """
    b, c = (part.repeat_interleave(x.shape[2] // b.shape[2], dim=2) for part in (b, c))
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        state.mul_(decay[:, t, :, None, None].exp()).addcmul_(b[:, t, :, :, None], x[:, t, :, None])
        out[:, t] = torch.einsum("shnp,shn->shp", state, c[:, t])
    return out


def hop_scores(
    weights: Tensor, voters: Tensor, queries: Tensor, keys: Tensor, start: int, stop: int, *,
    sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention that the candidates ``[start, stop)`` get from given prompt tokens: ``[G, n]`` fp32.

    ``voters [G, m]`` are these tokens, as candidates (0 is ``start``), ``weights [G, m]`` their weights;
    ``queries [N, H, E]`` and ``keys [G, N, E]`` are those of the whole prompt. The softmax runs over all candidates but
    the voter itself, later ones too: a question may refer to a token after it. Averaged over the heads of a group.
    ``sinks [H]``: see ``sink_softmax``; ``cap``: see ``capped``.
    """
    num_keys, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    grouped = queries.float().view(num_keys, num_kv_heads, -1, head_dim).transpose(0, 1)  # [G, N, r, E]
    own = grouped[torch.arange(num_kv_heads, device=keys.device)[:, None], voters + start]  # [G, m, r, E]
    logits = capped(torch.einsum("gmre,gne->gmrn", own, keys[:, start:stop].float()) * head_dim**-0.5, cap)
    itself = torch.arange(stop - start, device=keys.device) == voters[..., None]  # [G, m, n]
    own_sinks = None if sinks is None else sinks.view(num_kv_heads, 1, -1, 1)
    probabilities = sink_softmax(logits.masked_fill(itself[:, :, None], float("-inf")), own_sinks).nan_to_num(0.0)
    return torch.einsum("gm,gmn->gn", weights, probabilities.mean(2))


def carry_ahead(scores: Tensor, half_life: int) -> Tensor:
    """``scores [G, n]``, >= 0, each carried to all candidates after it: halved every ``half_life`` tokens, best kept.

    A morphological dilation with a kernel on one side. Ours: a question points at a key, its answer stands behind it.
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
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention that the candidates ``[start, stop)`` get from observation queries: ``[G, stop - start]`` fp32.

    ``queries [w, H, E]`` at positions ``first_query ..``; ``keys [G, N, E]``. The softmax runs over the candidates, or
    with ``over_row`` over every key; a query never sees keys after its own position, and one that sees no candidate
    counts as 0. Summed over the queries, then summed (``group_max``: maximum) over the heads of a group. ``sinks [H]``:
    see ``sink_softmax``; ``cap``: see ``capped``.
    """
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    grouped = queries.float().view(num_queries, num_kv_heads, -1, head_dim)
    logits = capped(torch.einsum("wgre,gne->grwn", grouped, keys.float()) * head_dim**-0.5, cap)
    position = torch.arange(num_keys, device=keys.device)
    query_position = first_query + torch.arange(num_queries, device=keys.device)
    hidden = position > query_position[:, None]  # [w, N]
    if not over_row:
        hidden = hidden | (position < start) | (position >= stop)
    own_sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1, 1)
    weights = sink_softmax(logits.masked_fill(hidden, float("-inf")), own_sinks).nan_to_num(0.0)  # [G, r, w, N]
    votes = weights[..., start:stop].sum(2)  # [G, r, n]
    return votes.amax(1) if group_max else votes.sum(1)


def key_diversity(keys: Tensor, start: int, stop: int) -> Tensor:
    """How unlike the prompt's mean direction the keys of the candidates ``[start, stop)`` are: ``[G, stop - start]``.

    ``-cos(k, a)`` in fp32, ``a`` the mean of ``k / |k|`` over all of ``keys [G, N, E]``: KeyDiff (arXiv 2504.15364),
    on keys after RoPE, as they are staged. A key of zeros is like nothing: 0.
    """
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    mean = torch.nn.functional.normalize(unit.mean(1, keepdim=True), dim=-1)  # [G, 1, E]
    return -(unit[:, start:stop] * mean).sum(-1)

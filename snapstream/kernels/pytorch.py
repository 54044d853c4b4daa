"""The kernels in PyTorch for any device: equal to ``reference.py``, without its fp32 copies."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config.model import SwiGLUClamp
from snapstream.kernels import reference
from snapstream.kernels.rows import CosSin, HeadNorm, Keep, LayerRows, RowPlaces

# Prefill attention by PyTorch's fused kernels, without a matrix of scores. A GPU's flash kernel aligns its causal mask
# with the last key; it is called by name, because PyTorch may prefer cuDNN, which plans every new pair of lengths on
# the host. ``split`` is for kernels that only know the square causal mask: keys before the chunk unmasked, the chunk as
# a square, merged by their log-sum-exp.

# q, k, v [1, heads, tokens, E] and whether causal -> output and log-sum-exp [1, H, T]
Kernel = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]

efficient_operator: Any = torch.ops.aten._scaled_dot_product_efficient_attention
cudnn_operator: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
window_operator: Any = torch.ops.aten._flash_attention_forward
WINDOW_QUERIES = 256  # in one masked call; a query is multiplied with up to as many keys outside of its window
CAPPED_SCORES = 2**22  # that exist at once where they are capped: 16 MiB in fp32


def share_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Attended ``out [.., H, T, E]`` without sinks, of a log-sum-exp ``lse [.., H, T]``, as it is with ``sinks [H]``.

    A sink takes its share of the probability: the rest is ``sigmoid(lse - sink)`` of what it was.
    """
    return out if sinks is None else (out.float() * (lse.float() - sinks[:, None]).sigmoid()[..., None]).to(out.dtype)


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.prefill_attention``: ``q [T, H, E]``, ``k, v [G, N, E]`` -> ``[T, H, E]``."""
    num_queries, num_heads, _ = q.shape
    num_kv_heads, num_keys, _ = k.shape
    if cap is not None:
        return capped_attention(q, k, v, cap, window, sinks)
    if window is not None and window < num_keys:
        return flash_window(q, k, v, window, sinks) if q.is_cuda else window_attention(q, k, v, window, sinks)
    if sinks is not None and not q.is_cuda:  # the calls below return no log-sum-exp
        return window_attention(q, k, v, num_keys, sinks)
    grouped = num_heads != num_kv_heads
    queries, keys, values = q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)  # [1, H, T, E], [1, G, N, E]
    if q.is_cuda:
        out, lse = flash(queries, keys, values, True)
        out = share_sinks(out, lse, sinks)
    elif num_queries == num_keys:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
    elif num_queries == 1:
        out = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=grouped)
    else:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril_(num_keys - num_queries)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None = None) -> Tensor:
    """``prefill_attention`` with a sliding window on any device: some queries at a time, over the keys they see.

    The query heads of a group are folded into the query length, so that keys are neither repeated nor, without sinks,
    copied. A sink is one more key, whose bias is its logit and whose value is zero.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    group, offset = num_heads // num_kv_heads, num_keys - num_queries
    parts = []
    for first in range(0, num_queries, WINDOW_QUERIES):
        own = q[first : first + WINDOW_QUERIES]
        stop = offset + first + len(own)
        seen = slice(max(offset + first + 1 - window, 0), stop)
        position = torch.arange(offset + first, stop, device=q.device)
        behind = position[:, None] - torch.arange(seen.start, stop, device=q.device)  # [t, n]
        mask = ((behind >= 0) & (behind < window)).repeat(group, 1)  # [r*t, n]
        folded = own.reshape(len(own), num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)  # [G, r*t, E]
        keys, values = k[:, seen], v[:, seen]
        if sinks is not None:
            keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))  # [G, n+1, E]
            bias = (
                torch.zeros(mask.shape, device=q.device).masked_fill_(~mask, float("-inf")).expand(num_kv_heads, -1, -1)
            )
            own_sinks = sinks.view(num_kv_heads, group, 1).expand(-1, -1, len(own)).reshape(num_kv_heads, -1, 1)
            mask = torch.cat([bias, own_sinks], dim=-1).to(q.dtype)[None]  # [1, G, r*t, n+1]
        out = F.scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask)
        parts.append(out[0].unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(parts)


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, cap: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """``prefill_attention`` with a cap of scores, which PyTorch's kernels lack, on any device: some queries at a time,
    in fp32, over the keys they see.
    """
    num_queries, num_heads, _ = q.shape
    num_keys, dtype = k.shape[1], q.dtype
    step, offset = max(CAPPED_SCORES // (num_heads * num_keys), 1), num_keys - num_queries
    q, k, v = q.float(), k.float(), v.float()
    parts = []
    for first in range(0, num_queries, step):
        own = q[first : first + step]
        stop = offset + first + len(own)
        start = 0 if window is None else max(offset + first + 1 - window, 0)
        keys, values = k[:, start:stop], v[:, start:stop]
        parts.append(reference.prefill_attention(own, keys, values, window=window, sinks=sinks, cap=cap))
    return torch.cat(parts).to(dtype)


def flash_window(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None = None) -> Tensor:
    """``prefill_attention`` with a sliding window by the flash kernel; half precision on an NVIDIA GPU."""
    queries, keys, values = q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, T, H, E], [1, N, G, E]
    found: Any = window_operator(
        queries, keys, values, None, None, q.shape[0], k.shape[1], 0.0, True, False,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    out: Tensor = found[0][0]
    return out if sinks is None else share_sinks(out.transpose(0, 1), found[1][0], sinks).transpose(0, 1)


def one_query_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attention of one query over all N tokens: ``q [1, H, E]``, ``k [G, N, E], v [G, N, E']`` -> ``[1, H, E']``.
    ``sinks [H]``: a logit in each softmax.

    Any sizes of heads and values, on any device: for latents, whose keys are wider than flash kernels take. The heads
    of a group stand as queries of one head, so that keys are neither repeated nor copied.
    """
    grouped = q.reshape(1, k.shape[0], -1, q.shape[-1])  # [1, G, r, E]
    out = F.scaled_dot_product_attention(grouped, k[None], v[None]).flatten(1, 2)
    if sinks is None:
        return out
    scores = torch.matmul(grouped, k[None].mT).to(torch.float32) * q.shape[-1] ** -0.5
    share = (scores.logsumexp(-1).flatten() - sinks).sigmoid()
    return (out * share[:, None]).to(out.dtype)


def split(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, sinks: Tensor | None = None) -> Tensor:
    """The same through two calls of ``kernel``; one query sees every key and takes one call."""
    prefix = k.shape[1] - q.shape[0]
    queries = q.transpose(0, 1)[None]
    if q.shape[0] == 1:
        own, own_lse = kernel(queries, k[None], v[None], False)
        return share_sinks(own[0], own_lse[0], sinks).transpose(0, 1)
    own, own_lse = kernel(queries, k[None, :, prefix:], v[None, :, prefix:], True)
    if prefix == 0:
        return share_sinks(own[0], own_lse[0], sinks).transpose(0, 1)
    before, before_lse = kernel(queries, k[None, :, :prefix], v[None, :, :prefix], False)
    share = torch.sigmoid(before_lse.float() - own_lse.float())[..., None].to(own.dtype)
    merged = torch.lerp(own, before, share)
    if sinks is not None:
        merged = share_sinks(merged, torch.logaddexp(before_lse.float(), own_lse.float()), sinks)
    return merged[0].transpose(0, 1)


def attend_by(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.prefill_attention``; through calls of ``kernel`` without windows and caps."""
    if cap is not None:
        return capped_attention(q, k, v, cap, window, sinks)
    if window is not None and window < k.shape[1]:
        return window_attention(q, k, v, window, sinks)
    return split(q, k, v, kernel, sinks)


def cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's kernel for ``split``; half precision on an NVIDIA GPU. New lengths cost a plan on the host.
    It takes no single key, so that is done here.
    """
    if k.shape[2] == 1:
        group = q.shape[1] // k.shape[1]
        key, value = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [1, H, 1, E]
        lse = (q.float() * key.float()).sum(-1) * q.shape[-1] ** -0.5  # [1, H, T]
        return value.expand(q.shape), lse
    found: Any = cudnn_operator(q, k, v, None, True, 0.0, is_causal)
    return found[0], found[1].reshape(q.shape[:3])


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The flash kernel; half precision on an NVIDIA GPU. Causal means aligned with the last key."""
    found: Any = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return found[0], found[1]


def efficient(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel for ``split``; fp32 too, on an NVIDIA GPU."""

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        found: Any = efficient_operator(*tensors, None, True, 0.0, is_causal)
        return found[0], found[1]

    return in_equal_heads(attend, q, k, v, is_causal)


def in_equal_heads(
    attend: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """A kernel for ``split`` of one that wants as many kv heads as query heads.

    The causal square repeats them, a chunk's worth; over the keys before it there is no mask, so the query heads of a
    group stand one after the other as queries of one head.
    """
    _, num_heads, num_queries, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    if is_causal:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    else:
        q = q.reshape(1, num_kv_heads, group * num_queries, head_dim)
    out, lse = attend(q, k, v)
    lse = lse[:, :, : q.shape[2]]  # padded to whole tiles by some
    return out.reshape(1, num_heads, num_queries, head_dim), lse.reshape(1, num_heads, num_queries)


# Selector scores in O(queries x chunk) memory. fp32 keys on a CPU are multiplied in place, some queries at a time with
# all keys. Otherwise chunks of keys are converted to fp32, in two passes: normalizers, then sums of probabilities.

CHUNK = 4096  # keys per pass; 32 queries x 32 heads x 4096 keys in fp32 are 16 MiB


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
    chunk: int = CHUNK,
) -> Tensor:
    """See ``reference.snapkv_scores``: ``queries [w, H, E]``, ``keys [G, N, E]`` -> ``[G, stop - start]`` fp32."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_heads // num_kv_heads
    scaled = queries.float() * head_dim**-0.5
    folded = scaled.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)  # [G, r*w, E]

    def logits(low: int, high: int) -> Iterator[tuple[int, int, Tensor]]:
        for a in range(low, high, chunk):
            b = min(a + chunk, high)
            block = capped_(torch.bmm(folded, keys[:, a:b].float().transpose(1, 2)), cap)  # [G, r*w, c]
            if b - 1 > first_query:  # some query may not see some key
                position = torch.arange(a, b, device=keys.device)
                query_position = first_query + torch.arange(num_queries, device=keys.device)
                hidden = (position > query_position[:, None]).repeat(group, 1)
                block.masked_fill_(hidden, float("-inf"))
            yield a, b, block

    low, high = (0, num_keys) if over_row else (start, stop)
    if keys.dtype == torch.float32 and keys.device.type == "cpu":
        seen, own = keys[:, low:high], slice(start - low, stop - low)
        visible = None if high - 1 <= first_query else first_query - low  # the last key that the first query sees
        return _cpu_scores(folded.unflatten(1, (group, -1)), seen, own, visible, group_max, chunk, sinks, cap)
    if sinks is None and not over_row and high - low <= chunk:  # one block: its softmax needs no second pass
        _, _, block = next(logits(low, high))
        return _merge_heads(block.softmax(-1).nan_to_num_(0.0), group, group_max)
    normaliser = torch.full(folded.shape[:2], float("-inf"), device=keys.device)  # [G, r*w]
    if sinks is not None:
        normaliser = sinks.float().repeat_interleave(num_queries).view(folded.shape[:2])
    for _, _, block in logits(low, high):
        normaliser = torch.logaddexp(normaliser, block.logsumexp(-1))
    scores = torch.empty(num_kv_heads, stop - start, device=keys.device)
    for a, b, block in logits(start, stop):
        # A query that sees no key has the normaliser -inf; -inf - -inf is NaN and means no vote.
        weights = block.sub_(normaliser[..., None]).exp_().nan_to_num_(0.0)
        scores[:, a - start : b - start] = _merge_heads(weights, group, group_max)
    return scores


def hop_scores(
    weights: Tensor, voters: Tensor, queries: Tensor, keys: Tensor, start: int, stop: int, *,
    sinks: Tensor | None = None, cap: float | None = None, chunk: int = CHUNK,
) -> Tensor:  # fmt: skip
    """See ``reference.hop_scores``: ``voters [G, m]``, ``queries [N, H, E]``, ``keys [G, N, E]`` -> ``[G, n]`` fp32."""
    num_keys, num_heads, head_dim = queries.shape
    num_kv_heads, num_voters = voters.shape
    group = num_heads // num_kv_heads
    heads = torch.arange(num_kv_heads, device=keys.device)[:, None]
    own = queries.view(num_keys, num_kv_heads, group, head_dim)[voters + start, heads]  # [G, m, r, E]
    folded = (own.float() * head_dim**-0.5).flatten(1, 2)  # [G, m*r, E]
    itself = (voters + start).repeat_interleave(group, dim=1)[..., None]  # [G, m*r, 1]

    def logits(a: int, b: int) -> Tensor:
        block = capped_(torch.bmm(folded, keys[:, a:b].float().transpose(1, 2)), cap)  # [G, m*r, c]
        return block.masked_fill_(torch.arange(a, b, device=keys.device) == itself, float("-inf"))

    ends = [(a, min(a + chunk, stop)) for a in range(start, stop, chunk)]
    normaliser = torch.full(folded.shape[:2], float("-inf"), device=keys.device)  # [G, m*r]
    if sinks is not None:
        normaliser = sinks.float().view(num_kv_heads, group).repeat(1, num_voters)
    for a, b in ends:
        normaliser = torch.logaddexp(normaliser, logits(a, b).logsumexp(-1))
    share = (weights / group).repeat_interleave(group, dim=1)[:, None]  # [G, 1, m*r]
    scores = torch.empty(num_kv_heads, stop - start, device=keys.device)
    for a, b in ends:
        # A voter that is the only candidate has the normaliser -inf; -inf - -inf is NaN and means no vote.
        probabilities = logits(a, b).sub_(normaliser[..., None]).exp_().nan_to_num_(0.0)
        scores[:, a - start : b - start] = torch.bmm(share, probabilities)[:, 0]
    return scores


def key_diversity(keys: Tensor, start: int, stop: int, *, chunk: int = CHUNK) -> Tensor:
    """See ``reference.key_diversity``: ``keys [G, N, E]`` -> ``[G, stop - start]`` fp32."""
    num_heads, num_keys, head_dim = keys.shape
    total = torch.zeros(num_heads, head_dim, device=keys.device)
    for a in range(0, num_keys, chunk):
        total += F.normalize(keys[:, a : a + chunk].float(), dim=-1).sum(1)
    mean = F.normalize(total, dim=-1)[..., None]  # [G, E, 1]
    scores = torch.empty(num_heads, stop - start, device=keys.device)
    for a in range(start, stop, chunk):
        b = min(a + chunk, stop)
        unit = F.normalize(keys[:, a:b].float(), dim=-1)  # [G, c, E]
        scores[:, a - start : b - start] = -torch.bmm(unit, mean)[..., 0]
    return scores


def _cpu_scores(
    queries: Tensor, keys: Tensor, own: slice, visible: int | None, group_max: bool, chunk: int, sinks: Tensor | None,
    cap: float | None,
) -> Tensor:  # fmt: skip
    """Votes ``[G, n]`` of ``queries [G, r, w, E]``, scaled, for the keys ``own`` of ``keys [G, N, E]``.

    ``visible``: query t sees the keys up to ``visible + t``; None: all. A piece - some kv heads, some query heads of
    one, or some queries of one - has as many scores as all queries have of ``chunk`` keys.
    """
    (num_kv_heads, group, num_queries, _), num_keys = queries.shape, keys.shape[1]
    rows = num_kv_heads * group * num_queries * chunk // num_keys
    at_once = min(max(rows // (group * num_queries), 1), num_kv_heads)
    rows = max(rows // at_once, 1)  # of a kv head
    parts, of_groups = [], None if sinks is None else sinks.float().view(num_kv_heads, group, 1, 1)
    for first in range(0, num_kv_heads, at_once):
        heads = slice(first, first + at_once)
        of_heads = None if of_groups is None else of_groups[heads]
        parts.append(_scores_of_heads(queries[heads], keys[heads], own, visible, group_max, rows, of_heads, cap))
    return torch.cat(parts)


def _scores_of_heads(
    queries: Tensor, keys: Tensor, own: slice, visible: int | None, group_max: bool, rows: int, sinks: Tensor | None,
    cap: float | None,
) -> Tensor:  # fmt: skip
    """The same, all kv heads at once, with ``rows`` queries of each at a time; ``sinks [G, r, 1, 1]``."""
    (num_kv_heads, group, num_queries, _), num_keys = queries.shape, keys.shape[1]
    heads, piece = max(min(rows // num_queries, group), 1), min(rows, num_queries)
    transposed, votes = keys.transpose(1, 2), queries.new_zeros(num_kv_heads, own.stop - own.start)
    for head in range(0, group, heads):
        parts = []  # [G, h, n] each
        for first in range(0, num_queries, piece):
            some = queries[:, head : head + heads, first : first + piece]  # [G, h, p, E]
            products = torch.bmm(some.flatten(1, 2), transposed)
            scores = capped_(products, cap).unflatten(1, some.shape[1:3])  # [G, h, p, N]
            if visible is not None:
                seen = visible + first + torch.arange(some.shape[2])[:, None]
                scores.masked_fill_(torch.arange(num_keys) > seen, float("-inf"))
            weights = sink_softmax(scores, None if sinks is None else sinks[:, head : head + heads])
            # A query that sees no key, or a score that is no number, makes all of its weights NaN: no vote.
            is_void = weights[..., 0].isnan()
            if is_void.any():
                weights.masked_fill_(is_void[..., None], 0.0)
            parts.append(weights[..., own].sum(2))
        of_heads = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        votes = torch.maximum(votes, of_heads.amax(1)) if group_max else votes + of_heads.sum(1)
    return votes


def capped_(scores: Tensor, cap: float | None) -> Tensor:
    """``reference.capped``, in place."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def sink_softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """``reference.sink_softmax``, without a copy of the logits."""
    if sinks is None:
        return logits.softmax(-1)
    return logits.sub_(torch.logaddexp(logits.logsumexp(-1, keepdim=True), sinks)).exp_()


def _merge_heads(weights: Tensor, group: int, group_max: bool) -> Tensor:
    """Sum over the queries, merge the group: ``[G, r*w, c]`` -> ``[G, c]``."""
    votes = weights.unflatten(1, (group, -1)).sum(2)  # [G, r, c]
    return votes.amax(1) if group_max else votes.sum(1)


NormRope = Callable[[Tensor, HeadNorm, CosSin, int], Tensor]
DecodeAttention = Callable[[Tensor, LayerRows, Tensor, Tensor, Tensor | None, float | None], Tensor]
AttendRows = Callable[[Tensor, HeadNorm, CosSin | None, LayerRows, RowPlaces, Keep | None], Tensor]


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, size: int = 64) -> Tensor:
    """See ``reference.gated_delta``: ``size`` tokens at a time (arXiv 2412.06464, section 3.2, the extended WY form).

    Within a chunk ``u_i + beta_i sum_{j<i} d_ij (k_i . k_j) u_j = beta_i (v_i - d_i S^T k_i)``, where d_ij is the decay
    from token j to i and d_i that from the chunk's start: a triangular system for all u at once. With decays per
    element of a key token by token.
    """
    num_tokens = q.shape[1]
    if num_tokens == 1 or decay.dim() == 4:
        return reference.gated_delta(q, k, v, decay, beta, state)
    group, out = v.shape[2] // q.shape[2], torch.empty_like(v)
    above = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    for start in range(0, num_tokens, size):
        own = slice(start, min(start + size, num_tokens))
        q_own, k_own = (part[:, own].repeat_interleave(group, dim=2).transpose(1, 2) for part in (q, k))
        v_own = v[:, own].transpose(1, 2)  # [S, H, n, V]
        total = decay[:, own].transpose(1, 2).cumsum(-1)  # [S, H, n], of logarithms
        b_own = beta[:, own].transpose(1, 2)[..., None]  # [S, H, n, 1]
        between = (
            (total[..., :, None] - total[..., None, :])
            .masked_fill_(above[: total.shape[-1], : total.shape[-1]], -torch.inf)
            .exp_()
        )  # [S, H, n, n]
        since = total.exp()[..., None]  # [S, H, n, 1]
        system = (b_own * k_own) @ k_own.transpose(-1, -2) * between  # its diagonal does not count
        right = b_own * (v_own - since * (k_own @ state))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)  # [S, H, n, V]
        scores = q_own @ k_own.transpose(-1, -2) * between
        out[:, own] = (since * (q_own @ state) + scores @ u).transpose(1, 2)
        left = (total[..., -1:] - total).exp()[..., None]  # decay from each token to the chunk's end
        state.mul_(total[..., -1].exp()[..., None, None]).add_((left * k_own).transpose(-1, -2) @ u)
    return out.mul_(q.shape[-1] ** -0.5)


def selective_scan(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, state: Tensor, size: int = 64) -> Tensor:
    """See ``reference.selective_scan``: ``size`` tokens at a time (arXiv 2405.21060, section 6)."""
    num_tokens = x.shape[1]
    if num_tokens == 1:
        return reference.selective_scan(c, b, x, decay, state)
    group, out = x.shape[2] // b.shape[2], torch.empty_like(x)
    above = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    for start in range(0, num_tokens, size):
        own = slice(start, min(start + size, num_tokens))
        b_own, c_own = (part[:, own].repeat_interleave(group, dim=2).transpose(1, 2) for part in (b, c))
        x_own = x[:, own].transpose(1, 2)  # [S, H, n, P]
        total = decay[:, own].transpose(1, 2).cumsum(-1)  # [S, H, n], of logarithms
        between = total[..., :, None] - total[..., None, :]
        between = between.masked_fill_(above[: total.shape[-1], : total.shape[-1]], -torch.inf).exp_()  # [S, H, n, n]
        inside = (c_own @ b_own.transpose(-1, -2) * between) @ x_own
        out[:, own] = (total.exp()[..., None] * (c_own @ state) + inside).transpose(1, 2)
        left = (total[..., -1:] - total).exp()[..., None]  # decay from each token to the chunk's end
        state.mul_(total[..., -1].exp()[..., None, None]).add_((left * b_own).transpose(-1, -2) @ x_own)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    if weight.dtype != x.dtype:  # of a norm with an offset
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.add_rms_norm``."""
    return rms_norm(residual.add_(x), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``; in the dtype of the input."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def geglu(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` of ``gate_up [T, 2I]`` (gate | up), GELU by its tanh formula: ``[T, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def relu2(up: Tensor) -> Tensor:
    """``relu(up)^2`` of an MLP without gate, ``[T, I]``; in place."""
    return up.relu_().square_()


def xielu(up: Tensor, numbers: Tensor) -> Tensor:
    """xIELU (arXiv 2411.13010, section 3) of ``up [T, I]``, in place; fp32 inside, of a part of a long chunk at a time.

    By the ``numbers`` of a ``Xielu``: ``positive x^2 + beta x`` above 0, else
    ``negative (e^min(x, eps) - 1 - x) + beta x``.
    """
    positive, negative, beta, eps = numbers.unbind()
    for part in up.split(max(128, -(-len(up) // 8))):
        x = part.float()
        below = torch.minimum(x, eps).expm1_().sub_(x).mul_(negative)
        part.copy_(torch.where(x > 0, x.square().mul_(positive), below).addcmul_(x, beta))
    return up


def clamped_swiglu(gate_up: Tensor, clamp: SwiGLUClamp) -> Tensor:
    """See ``SwiGLUClamp``: ``gate_up [T, 2M]`` (gate | up) to ``[T, M]``, fp32 inside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.most_gate), up.clamp(-clamp.most_up, clamp.most_up)
    return ((up + clamp.offset) * gate * (clamp.alpha * gate).sigmoid()).to(gate_up.dtype)


def grouped_linear(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    """See ``reference.grouped_linear``. On a CPU one expert after the other, elsewhere all in one call."""
    if x.device.type == "cpu":
        return each_expert(x, weight, scale, ends)
    wide = weight if scale is None else reference.dequantize_blocks(weight, scale)
    return F.grouped_mm(x, wide.to(x.dtype).transpose(1, 2), offs=ends)


def each_expert(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    """``grouped_linear`` as a product per expert that has rows; reads ``ends`` on the host."""
    out, start = x.new_empty(len(x), weight.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            own = weight[expert]
            matrix = own if scale is None else reference.dequantize_blocks(own, scale[expert])
            out[start:end] = F.linear(x[start:end], matrix.to(x.dtype))
        start = end
    return out


def gather_rows(cache: LayerRows, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor) -> None:
    """See ``reference.gather_rows``; token by token, where ``gather`` would go number by number."""
    reference.fill_rows(cache, rows, keys, values, index, whole_tokens)


def whole_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """See ``reference.gather_tokens``: a call per kv head, so for a CPU."""
    out = tokens.new_empty(*index.shape, tokens.shape[-1])  # [G, n, E]
    for head, own in enumerate(index):
        torch.index_select(tokens[head], 0, own, out=out[head])
    return out


def rotate(heads: Tensor, rope: CosSin) -> Tensor:
    """RoPE of ``heads [T, any, E]``: fp32 inside, result in the dtype of ``heads``."""
    cos, sin = rope
    half = heads.shape[-1] // 2
    return torch.addcmul(heads * cos, heads.roll(half, dims=-1), sin).to(heads.dtype)


def norm_rope(heads: Tensor, norm: HeadNorm, rope: CosSin, num_kv_heads: int) -> Tensor:
    """See ``reference.norm_rope``."""
    qk = heads[:, : heads.shape[1] - num_kv_heads]
    if norm.weight is not None:
        qk = (F.rms_norm(qk, (qk.shape[-1],), None, norm.eps) * norm.weight).to(qk.dtype)
    return rotate(qk, rope)


def rows_attention(norm_rope: NormRope, decode_attention: DecodeAttention) -> AttendRows:
    """``reference.attend_rows`` of these parts."""

    def attend_rows(
        heads: Tensor, norm: HeadNorm, rope: CosSin | None, cache: LayerRows, places: RowPlaces, keep: Keep | None
    ) -> Tensor:
        q, k, v = split_heads(heads, norm_rope, norm, rope, cache)
        if keep is not None:
            keep(q)
        reference.write_slots(k, v, cache, places.rows, places.slots)
        return decode_attention(q, cache, places.rows, places.lengths, norm.sinks, norm.cap)

    return attend_rows


def split_heads(
    heads: Tensor, norm_rope: NormRope, norm: HeadNorm, rope: CosSin | None, cache: LayerRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q ``[B, H, E]`` and k ``[B, G, E]``, and v ``[B, G, E]``, as views; latents have no v."""
    num_kv_heads = cache.num_kv_heads
    num_values = 0 if cache.values_are_keys else num_kv_heads
    qk = heads[:, : heads.shape[1] - num_values] if rope is None else norm_rope(heads, norm, rope, num_values)
    num_heads = qk.shape[1] - num_kv_heads
    return qk[:, :num_heads], qk[:, num_heads:], heads[:, heads.shape[1] - num_kv_heads :]


# RMSNorm on a CPU in four kernels instead of about ten: ``x / hypot(|x|, sqrt(E eps)) * (sqrt(E) weight)``.


class Constants(NamedTuple):
    """The parts of the formula that depend on weight and eps alone, fp32."""

    scaled: Tensor  # [..., E]: the weight times sqrt(E)
    floor: Tensor  # []: sqrt(E eps)

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> Constants:
        size = weight.shape[-1]
        floor = torch.full((), math.sqrt(size * eps), dtype=torch.float32, device=weight.device)
        return cls(weight.to(torch.float32) * math.sqrt(size), floor)


def composed(x: Tensor, constants: Constants) -> Tensor:
    """The norm of ``x [..., E]`` in its dtype, fp32 inside."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    normed: Tensor = (x / length.hypot_(constants.floor)).mul_(constants.scaled)
    return normed.to(x.dtype)


class Norms:
    """The norms of a kernel set. A weight's constants are kept while it lives: weights do not change once loaded."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], tuple[weakref.ref[Tensor], Constants]] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``reference.rms_norm``; ``weight`` may also be ``[heads, E]``, where heads differ."""
        return composed(x, self._constants(weight, eps))

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``reference.add_rms_norm``."""
        return composed(residual.add_(x), self._constants(weight, eps))

    def norm_rope(self, heads: Tensor, norm: HeadNorm, rope: CosSin, num_kv_heads: int) -> Tensor:
        """See ``reference.norm_rope``."""
        qk = heads[:, : heads.shape[1] - num_kv_heads]
        return rotate(qk if norm.weight is None else self.rms_norm(qk, norm.weight, norm.eps), rope)

    def _constants(self, weight: Tensor, eps: float) -> Constants:
        key = id(weight), eps
        known = self._known.get(key)
        if known is not None and known[0]() is weight:
            return known[1]
        made = Constants.of(weight, eps)
        self._known[key] = weakref.ref(weight, lambda _: self._known.pop(key, None)), made
        return made

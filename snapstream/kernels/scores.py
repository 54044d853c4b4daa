"""Scores by which selectors choose, in ``O(queries x chunk)`` of memory.

Where keys can be multiplied as they lie, some queries at a time meet all of them, once. Elsewhere chunks of keys are
widened, in two passes: the first finds the softmax normaliser of every query that votes, the second adds up the
probabilities. Same meaning as ``reference.snapkv_scores``, ``hop_scores`` and ``key_diversity``; runs on any device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

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
            block = torch.bmm(folded, keys[:, a:b].float().transpose(1, 2))  # [G, r*w, c]
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
        return _votes_at_once(folded.unflatten(1, (group, -1)), seen, own, visible, group_max, chunk)
    if not over_row and high - low <= chunk:  # one block: its softmax needs no second pass
        _, _, block = next(logits(low, high))
        return _votes(block.softmax(-1).nan_to_num_(0.0), group, group_max)
    normaliser = torch.full(folded.shape[:2], float("-inf"), device=keys.device)  # [G, r*w]
    for _, _, block in logits(low, high):
        normaliser = torch.logaddexp(normaliser, block.logsumexp(-1))
    scores = torch.empty(num_kv_heads, stop - start, device=keys.device)
    for a, b, block in logits(start, stop):
        # A query that sees no key has the normaliser -inf; -inf - -inf is NaN and means no vote.
        weights = block.sub_(normaliser[..., None]).exp_().nan_to_num_(0.0)
        scores[:, a - start : b - start] = _votes(weights, group, group_max)
    return scores


def hop_scores(
    weights: Tensor, voters: Tensor, queries: Tensor, keys: Tensor, start: int, stop: int, *, chunk: int = CHUNK
) -> Tensor:
    """See ``reference.hop_scores``: ``voters [G, m]``, ``queries [N, H, E]``, ``keys [G, N, E]`` -> ``[G, n]`` fp32."""
    num_keys, num_heads, head_dim = queries.shape
    num_kv_heads, num_voters = voters.shape
    group = num_heads // num_kv_heads
    heads = torch.arange(num_kv_heads, device=keys.device)[:, None]
    own = queries.view(num_keys, num_kv_heads, group, head_dim)[voters + start, heads]  # [G, m, r, E]
    folded = (own.float() * head_dim**-0.5).flatten(1, 2)  # [G, m*r, E]
    itself = (voters + start).repeat_interleave(group, dim=1)[..., None]  # [G, m*r, 1]

    def logits(a: int, b: int) -> Tensor:
        block = torch.bmm(folded, keys[:, a:b].float().transpose(1, 2))  # [G, m*r, c]
        return block.masked_fill_(torch.arange(a, b, device=keys.device) == itself, float("-inf"))

    ends = [(a, min(a + chunk, stop)) for a in range(start, stop, chunk)]
    normaliser = torch.full(folded.shape[:2], float("-inf"), device=keys.device)  # [G, m*r]
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


def _votes_at_once(
    queries: Tensor, keys: Tensor, own: slice, visible: int | None, group_max: bool, chunk: int
) -> Tensor:
    """Votes ``[G, n]`` of ``queries [G, r, w, E]``, scaled, for the keys ``own`` of ``keys [G, N, E]``.

    ``visible``: query t sees the keys up to ``visible + t``; None: all. A piece - some kv heads, some query heads of
    one, or some queries of one - has as many scores as all queries have of ``chunk`` keys.
    """
    (num_kv_heads, group, num_queries, _), num_keys = queries.shape, keys.shape[1]
    rows = num_kv_heads * group * num_queries * chunk // num_keys
    at_once = min(max(rows // (group * num_queries), 1), num_kv_heads)
    rows = max(rows // at_once, 1)  # of a kv head
    parts = [
        _votes_of_heads(queries[first : first + at_once], keys[first : first + at_once], own, visible, group_max, rows)
        for first in range(0, num_kv_heads, at_once)
    ]
    return torch.cat(parts)


def _votes_of_heads(
    queries: Tensor, keys: Tensor, own: slice, visible: int | None, group_max: bool, rows: int
) -> Tensor:
    """The same, all kv heads at once, with ``rows`` queries of each at a time."""
    (num_kv_heads, group, num_queries, _), num_keys = queries.shape, keys.shape[1]
    heads, piece = max(min(rows // num_queries, group), 1), min(rows, num_queries)
    transposed, votes = keys.transpose(1, 2), queries.new_zeros(num_kv_heads, own.stop - own.start)
    for head in range(0, group, heads):
        parts = []  # [G, h, n] each
        for first in range(0, num_queries, piece):
            some = queries[:, head : head + heads, first : first + piece]  # [G, h, p, E]
            scores = torch.bmm(some.flatten(1, 2), transposed).unflatten(1, some.shape[1:3])  # [G, h, p, N]
            if visible is not None:
                seen = visible + first + torch.arange(some.shape[2])[:, None]
                scores.masked_fill_(torch.arange(num_keys) > seen, float("-inf"))
            weights = scores.softmax(-1)
            # A query that sees no key, or a score that is no number, makes all of its weights NaN: no vote.
            is_void = weights[..., 0].isnan()
            if is_void.any():
                weights.masked_fill_(is_void[..., None], 0.0)
            parts.append(weights[..., own].sum(2))
        of_heads = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        votes = torch.maximum(votes, of_heads.amax(1)) if group_max else votes + of_heads.sum(1)
    return votes


def _votes(weights: Tensor, group: int, group_max: bool) -> Tensor:
    """Sum over the queries, merge the group: ``[G, r*w, c]`` -> ``[G, c]``."""
    votes = weights.unflatten(1, (group, -1)).sum(2)  # [G, r, c]
    return votes.amax(1) if group_max else votes.sum(1)

"""How much attention each prompt token gets from the look-ahead: the scores of SpecPrefill.

As published (arXiv 2502.02789, section 3; arXiv 2603.02631): per query, layer and head an fp32 softmax over the
*prompt* keys only; an average over ``pool_kernel`` neighbouring keys; the maximum over layers and heads; the mean over
queries. At the edges the average counts missing neighbours as zeros and always divides by the width, like SnapKV.

Invariant: a layer is done with when ``add`` returns, so a pass that holds one layer's keys at a time can use it; and
never more than ``O(queries x heads x chunk)`` of probabilities exist. ``lookahead.py`` makes queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 4096  # keys at a time; 8 queries x 32 heads x 4096 keys in fp32 are 4 MiB


class Importance:
    """Running maximum over layers and heads of the pooled attention, ``[w, N]`` fp32."""

    def __init__(self, num_queries: int, num_keys: int, pool_kernel: int, device: torch.device) -> None:
        self.best = torch.zeros(num_queries, num_keys, device=device)  # [w, N]; probabilities are never below 0
        self._pool_kernel = pool_kernel

    def add(self, queries: Tensor, keys: Tensor, first_query: int, *, chunk: int = CHUNK) -> None:
        """One layer: ``queries [w, H, E]`` after RoPE, the first at position ``first_query``; ``keys [G, N, E]``.

        A query sees the prompt keys up to its own position: all of them, if it comes after the prompt.
        """
        num_queries, num_heads, _ = queries.shape
        half, num_keys = self._pool_kernel // 2, keys.shape[1]
        normaliser = torch.full((num_heads * num_queries,), float("-inf"), device=keys.device)
        for _, _, block in _logits(queries, keys, first_query, 0, chunk):
            normaliser = torch.logaddexp(normaliser, block.logsumexp(-1))
        for a, b, block in _logits(queries, keys, first_query, half, chunk):
            weights = block.sub_(normaliser[:, None]).exp_()  # [H*w, c + neighbours]
            before, after = min(half, a), min(half, num_keys - b)  # what the block holds of its neighbours
            padded = F.pad(weights, (half - before, half - after))
            pooled = F.avg_pool1d(padded[None], self._pool_kernel, stride=1)[0]  # [H*w, c]
            most = pooled.unflatten(0, (num_heads, num_queries)).amax(0)  # [w, c]
            torch.maximum(self.best[:, a:b], most, out=self.best[:, a:b])

    def scores(self, num_queries: int | None = None) -> Tensor:
        """Mean over the first ``num_queries`` queries, all by default: ``[N]`` fp32."""
        return self.best[:num_queries].mean(0)


def _logits(
    queries: Tensor, keys: Tensor, first_query: int, margin: int, chunk: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Blocks ``a .. b - 1`` of keys with ``margin`` neighbours on both sides: ``[H*w, c + margins]`` fp32."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, num_keys, _ = keys.shape
    scaled = queries.float() * head_dim**-0.5
    folded = scaled.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)  # [G, r*w, E]
    for a in range(0, num_keys, chunk):
        b = min(a + chunk, num_keys)
        low, high = max(0, a - margin), min(num_keys, b + margin)
        block = torch.bmm(folded, keys[:, low:high].float().transpose(1, 2)).flatten(0, 1)  # [H*w, c]
        if high - 1 > first_query:  # some query may not see some key
            position = torch.arange(low, high, device=keys.device)
            own = first_query + torch.arange(num_queries, device=keys.device)
            block.masked_fill_((position > own[:, None]).repeat(num_heads, 1), float("-inf"))
        yield a, b, block


def chunk_means(scores: Tensor, chunk_len: int) -> Tensor:
    """Mean score of each run of ``chunk_len`` tokens, the last one shorter: ``[N]`` to ``[ceil(N / chunk_len)]``."""
    num_chunks = -(-scores.shape[0] // chunk_len)
    padded = F.pad(scores, (0, num_chunks * chunk_len - scores.shape[0])).view(num_chunks, chunk_len)
    counts = torch.full((num_chunks,), chunk_len, device=scores.device)
    counts[-1] = scores.shape[0] - (num_chunks - 1) * chunk_len
    return padded.sum(-1) / counts

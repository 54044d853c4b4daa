"""The two implementations of the seam ``view.attend``: staging (prefill) and rows (decode).

A layer hands over q, k, v and never knows which of the two it talks to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.kernels.bound import CosSin, HeadNorm, Kernels, RowPlaces
from snapstream.kernels.prefill.choice import PrefillAttention
from snapstream.kernels.prefill.packages import PackedLens
from snapstream.layers.attention import FusingView


class QuerySink(Protocol):
    """Takes the rotated queries ``[B, H, E]`` of a decode step, layer by layer."""

    def put(self, layer: int, q: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one prompt that lies in a chunk."""

    entry: int  # index of the prompt in its job
    chunk_start: int  # first token, counted in the chunk
    length: int
    prompt_start: int  # first token, counted in the prompt
    staging_start: int  # where the prompt begins in the staging pool

    @property
    def chunk_slice(self) -> slice:
        return slice(self.chunk_start, self.chunk_start + self.length)

    @property
    def num_keys(self) -> int:
        """Tokens of the prompt that are staged once this part is."""
        return self.prompt_start + self.length

    @property
    def staging_stop(self) -> int:
        """Where they end in the staging pool."""
        return self.staging_start + self.num_keys


class StagingView:
    """Attention of a chunk of packed prompts against the staging buffer of one layer, nothing of it padded.

    With ``lens`` several prompts are attended in one call, else one after the other. Their keys lie side by side in
    the pool, because the prompts of a job do and all but the last of a chunk end in it.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        segments: Sequence[Segment],
        attention: PrefillAttention,
        lens: PackedLens | None = None,
    ) -> None:
        self._k, self._v = k, v  # [G, P, E], P tokens of pool
        self._segments, self._attention, self._lens = segments, attention, lens

    def stage(self, k: Tensor, v: Tensor) -> None:
        """Store the chunk's keys and values ``[T, G, E]``."""
        for segment in self._segments:
            start = segment.staging_start + segment.prompt_start
            place = slice(start, start + segment.length)
            self._k[:, place] = k[segment.chunk_slice].transpose(0, 1)
            self._v[:, place] = v[segment.chunk_slice].transpose(0, 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stage the chunk, then causal attention per prompt: ``q [T, H, E]`` -> ``[T, H, E]``."""
        self.stage(k, v)
        if self._lens is not None and self._attention.attend_packed is not None:
            seen = slice(self._segments[0].staging_start, self._segments[-1].staging_stop)
            return self._attention.attend_packed(q, self._k[:, seen], self._v[:, seen], self._lens)
        parts = [self.attend_last(segment, q[segment.chunk_slice]) for segment in self._segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_last(self, segment: Segment, q: Tensor) -> Tensor:
        """Attention of the last ``q.shape[0]`` staged tokens of a segment."""
        seen = slice(segment.staging_start, segment.staging_stop)
        return self._attention.attend(q, self._k[:, seen], self._v[:, seen])


class RowsView(FusingView):
    """Attention of one new token per row against the row's visible slots."""

    def __init__(self, cache: KVCache, kernels: Kernels, places: RowPlaces, queries: QuerySink | None = None) -> None:
        """``queries`` keeps what rows will be rescored with; None where they are not."""
        self._cache, self._kernels, self._places, self._queries = cache, kernels, places, queries

    def attend_heads(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin) -> Tensor:
        """Norm, rotate, write the token's slot, then attend: ``heads [B, H+2G, E]`` -> ``[B, H, E]``."""
        keep = None if self._queries is None else partial(self._queries.put, layer)
        return self._kernels.attend_rows(heads, norm, rope, self._cache.layer(layer), self._places, keep)

"""The two implementations of the seam ``view.attend``: staging (prefill) and rows (decode).

A layer hands over its heads and never knows which of the two it talks to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.kernels.bound import CosSin, HeadNorm, Kernels, RowPlaces
from snapstream.kernels.prefill.choice import PrefillAttention
from snapstream.kernels.prefill.packages import PackedLens
from snapstream.models.staging import StagingBuffers


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one prompt that lies in a chunk."""

    prompt: int  # index of the prompt in its pass
    chunk_start: int  # first token, counted in the chunk
    length: int
    prompt_start: int  # first token, counted in the prompt
    staging_start: int  # where the prompt begins in the staging buffers

    @property
    def chunk_slice(self) -> slice:
        return slice(self.chunk_start, self.chunk_start + self.length)

    @property
    def num_keys(self) -> int:
        """Tokens of the prompt that are staged once this part is."""
        return self.prompt_start + self.length

    @property
    def staging_stop(self) -> int:
        """Where they end in the staging buffers."""
        return self.staging_start + self.num_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens of one unit, which may be parts of several prompts."""

    segments: Sequence[Segment]
    lens: PackedLens | None = None  # lengths on the device, where several prompts are attended in one call
    # Places in the chunk of the tokens that need an output, one per segment that ends its prompt; None: all do.
    outputs: Sequence[int] | None = None


class StagingView:
    """Attention of a chunk of packed prompts against the staging buffers of one layer, nothing of it padded.

    With ``lens`` several prompts are attended in one call, else one after the other. Their keys lie side by side in
    the buffers, because the prompts of a pass do and all but the last of a chunk end in it.
    """

    def __init__(
        self,
        buffers: StagingBuffers,
        chunk: Chunk,
        kernels: Kernels,
        attention: PrefillAttention,
        keep: Callable[[Sequence[Segment], Tensor], None],
    ) -> None:
        """``keep`` takes the rotated queries ``[T, H, E]`` of the chunk before they are attended with."""
        self._buffers, self._chunk, self._kernels, self._attention = buffers, chunk, kernels, attention
        self._keep = keep

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin) -> Tensor:
        """Stage the chunk, then causal attention per prompt: ``[T, H, E]``, or of the tokens that need an output."""
        num_kv_heads = self._buffers.spec.num_kv_heads
        qk = self._kernels.norm_rope(heads, norm, rope, num_kv_heads)  # [T, H+G, E]
        q, k, v = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:], heads[:, -num_kv_heads:]
        segments, outputs = self._chunk.segments, self._chunk.outputs
        self._keep(segments, q)
        self._stage(k, v)
        if outputs is not None:
            ending = [segment for segment in segments if segment.chunk_slice.stop - 1 in outputs]
            parts = [self._attend_last(s, q[place : place + 1]) for s, place in zip(ending, outputs, strict=True)]
            return torch.cat(parts) if parts else q[:0]
        lens = self._chunk.lens
        if lens is not None and self._attention.attend_packed is not None:
            keys, values = self._buffers.tokens(segments[0].staging_start, segments[-1].staging_stop)
            return self._attention.attend_packed(q, keys, values, lens)
        parts = [self._attend_last(segment, q[segment.chunk_slice]) for segment in segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _stage(self, k: Tensor, v: Tensor) -> None:
        """Store the chunk's keys and values ``[T, G, E]``."""
        for segment in self._chunk.segments:
            start = segment.staging_start + segment.prompt_start
            keys, values = self._buffers.tokens(start, start + segment.length)
            keys.copy_(k[segment.chunk_slice].transpose(0, 1))
            if not self._buffers.spec.values_are_keys:
                values.copy_(v[segment.chunk_slice].transpose(0, 1))

    def _attend_last(self, segment: Segment, q: Tensor) -> Tensor:
        """Attention of the last ``q.shape[0]`` staged tokens of a segment."""
        return self._attention.attend(q, *self._buffers.tokens(segment.staging_start, segment.staging_stop))


class QuerySink(Protocol):
    """Takes the rotated queries ``[B, H, E]`` of a decode step, layer by layer."""

    def put(self, layer: int, q: Tensor) -> None: ...


class RowsView:
    """Attention of one new token per row against the row's visible slots."""

    def __init__(self, cache: KVCache, places: RowPlaces, kernels: Kernels, queries: QuerySink | None = None) -> None:
        """``queries`` keeps what rows will be rescored with; None where they are not."""
        self._cache, self._places, self._kernels, self._queries = cache, places, kernels, queries

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin) -> Tensor:
        """Write a slot per row, then attend: ``heads [B, H+2G, E]`` -> ``[B, H, E]``."""
        sink = self._queries
        keep = None if sink is None else lambda q: sink.put(layer, q)
        return self._kernels.attend_rows(heads, norm, rope, self._cache.layer(layer), self._places, keep)
